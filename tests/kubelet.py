"""A fake kubelet for tests: it answers PodResources truly, or fails as kubelets do.

Every answer is shuffled, as Go's map iteration does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import grpc

from gpumap.agent._proto.podresources import v1alpha1_pb2
from gpumap.lab.demo.kubelet import (
    ALLOCATABLE,
    LIST,
    LIST_PODS,
    LIST_V1ALPHA1,
    WATCH_PODS,
    Context,
    Numa,
    PlayedPodsApi,
    Refuse,
    UnixServer,
    added_event,
    allocatable_answer,
    give_or_refuse,
    list_answer,
    shuffled,
    unknown_service,
)
from gpumap.model.observations import ListedContainer, ListedPod, ResourceDevices


class Hang(NamedTuple):
    """Never answer."""


class Raw(NamedTuple):
    """Answer with these bytes, valid or not."""

    answer: bytes


class Pad(NamedTuple):
    """Answer truly, in a message made larger by about so many bytes (in an unknown field, which decoders skip)."""

    size_bytes: int


class Slow(NamedTuple):
    """Answer truly, but late."""

    seconds: float


Behaviour = Refuse | Hang | Raw | Pad | Slow

RATE_LIMITED = Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
ALLOCATABLE_DISABLED = Refuse(grpc.StatusCode.UNKNOWN, "Pod Resources API GetAllocatableResources disabled")


class _Served(UnixServer):
    """A server that runs in a block."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class FakeKubelet(_Served):
    """One kubelet's PodResources server. May be started again after it was stopped, and then has a new inode."""

    def __init__(self, socket_path: Path, versions: Iterable[str] = ("v1", "v1alpha1")) -> None:
        super().__init__(socket_path)
        self.versions = frozenset(versions)
        self.longest_deadline_seconds = 0.0
        """That a caller gave it."""
        self._called = asyncio.Event()
        self._pods: tuple[ListedPod, ...] = ()
        self._allocatable: tuple[ResourceDevices, ...] = ()
        self._numa: Numa = {}
        self._behaviours: dict[str, tuple[Behaviour, float]] = {}

    def set_pods(self, pods: Sequence[ListedPod]) -> None:
        self._pods = tuple(pods)

    def set_allocatable(self, devices: Sequence[ResourceDevices]) -> None:
        self._allocatable = tuple(devices)

    def set_numa(self, numa: Numa) -> None:
        self._numa = numa

    def misbehave(self, behaviour: Behaviour, method: str = LIST, times: float = float("inf")) -> None:
        """Do so the next `times` that `method` is called, instead of what it did before."""
        self._behaviours[method] = behaviour, times

    def behave(self, method: str | None = None) -> None:
        """Answer again, all methods or one."""
        if method is None:
            self._behaviours.clear()
        else:
            self._behaviours.pop(method, None)

    async def called(self, method: str = LIST, times: int = 1) -> None:
        """Return when `method` has been called so often, whatever the answer."""
        while self.calls[method] < times:
            self._called.clear()
            await self._called.wait()

    async def answer(self, method: str, request: bytes, context: Context) -> bytes:
        self.calls[method] += 1
        self.longest_deadline_seconds = max(self.longest_deadline_seconds, context.time_remaining() or math.inf)
        self._called.set()
        behaviour = self._next_behaviour(method)
        match behaviour:
            case Hang():
                await asyncio.Event().wait()
            case Raw(answer):
                return answer
            case Slow(seconds):
                await asyncio.sleep(seconds)
        answer = await give_or_refuse(behaviour if isinstance(behaviour, Refuse) else self.true_answer(method), context)
        return answer + _unknown_field(behaviour.size_bytes) if isinstance(behaviour, Pad) else answer

    def _next_behaviour(self, method: str) -> Behaviour | None:
        if method not in self._behaviours:
            return None
        behaviour, times = self._behaviours.pop(method)
        if times > 1:
            self._behaviours[method] = behaviour, times - 1
        return behaviour

    def true_answer(self, method: str) -> bytes | Refuse:
        version = method[1:].partition(".")[0]
        if version in self.versions and method == LIST:
            return list_answer(self._pods, self._numa)
        if version in self.versions and method == ALLOCATABLE:
            return allocatable_answer(self._allocatable, self._numa)
        if version in self.versions and method == LIST_V1ALPHA1:
            old_pods = [_pod_v1alpha1(pod) for pod in shuffled(self._pods)]
            return v1alpha1_pb2.ListPodResourcesResponse(pod_resources=old_pods).SerializeToString()
        return unknown_service(method)


def _pod_v1alpha1(pod: ListedPod) -> v1alpha1_pb2.PodResources:
    containers = [_container_v1alpha1(container) for container in shuffled(pod.containers)]
    return v1alpha1_pb2.PodResources(name=pod.name, namespace=pod.namespace, containers=containers)


def _container_v1alpha1(container: ListedContainer) -> v1alpha1_pb2.ContainerResources:
    pairs = [(resource.resource, id_) for resource in container.devices for id_ in resource.ids]
    devices = [
        v1alpha1_pb2.ContainerDevices(resource_name=resource, device_ids=[id_]) for resource, id_ in shuffled(pairs)
    ]
    return v1alpha1_pb2.ContainerResources(name=container.name, devices=devices)


def _unknown_field(size_bytes: int) -> bytes:
    """Field 1000, length-delimited, full of zeros."""
    tag, length = 1000 << 3 | 2, size_bytes
    head = bytearray([tag & 0x7F | 0x80, tag >> 7])
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*head, length]) + bytes(size_bytes)


NOT_SYNCED = Refuse(grpc.StatusCode.FAILED_PRECONDITION, "pod sources are not synced")


class FakePodsApi(PlayedPodsApi, _Served):
    """A kubelet's Pods API with pods that change, or that fails."""

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path)
        self._refusals: dict[str, Refuse] = {}
        self._streams: set[asyncio.Queue[bytes | None]] = set()

    def set_pods(self, pods: Sequence[bytes], *, tell: bool = True) -> None:
        """Set the pods. `tell`: send an event to the clients; a kubelet drops events of slow clients."""
        self.pods = tuple(pods)
        if tell:
            for stream in self._streams:
                stream.put_nowait(added_event(self.pods[-1] if self.pods else b""))

    def refuse(self, method: str, refusal: Refuse | None) -> None:
        """Refuse calls of a method from now on; `None`: answer them again."""
        if refusal is None:
            self._refusals.pop(method, None)
        else:
            self._refusals[method] = refusal

    def end_streams(self) -> None:
        """End all streams, as newer kubelets do with slow clients."""
        for stream in self._streams:
            stream.put_nowait(None)

    async def list(self, request: bytes, context: Context) -> bytes:
        return await give_or_refuse(self._refusals.get(LIST_PODS, await super().list(request, context)), context)

    async def watch(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        self.calls[WATCH_PODS] += 1
        await give_or_refuse(self._refusals.get(WATCH_PODS, b""), context)
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._streams.add(events)
        try:
            for pod in self.pods:
                yield added_event(pod)
            while (event := await events.get()) is not None:
                yield event
        finally:
            self._streams.discard(events)
