"""A fake kubelet: a real gRPC server on a Unix socket that answers PodResources as kubelets do, or fails as they do.

Every answer is shuffled, as Go's map iteration does, and every device id is an entry of its own for each of its NUMA
nodes. Tests make it fail with `misbehave`. It reads no files and knows nothing of scenarios.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import NamedTuple, TypeVar

import grpc
import grpc.aio

from gpumap.agent._proto.podresources import v1_pb2, v1alpha1_pb2
from gpumap.lab.demo.unix_server import Context, UnixServer
from gpumap.model.observations import ClaimDevice, DeviceId, ListedContainer, ListedPod, ResourceDevices

LIST = "/v1.PodResourcesLister/List"
ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
GET = "/v1.PodResourcesLister/Get"
LIST_V1ALPHA1 = "/v1alpha1.PodResourcesLister/List"

T = TypeVar("T")
Numa = Mapping[DeviceId, tuple[int, ...]]
"""The NUMA nodes of device ids. An id without an entry has no topology; one with two is listed twice."""

_shuffler = SystemRandom()


class Refuse(NamedTuple):
    """Answer with a status other than OK."""

    code: grpc.StatusCode
    details: str


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
NO_ALLOCATABLE = Refuse(
    grpc.StatusCode.UNIMPLEMENTED, "unknown method GetAllocatableResources for service v1.PodResourcesLister"
)
ALLOCATABLE_DISABLED = Refuse(grpc.StatusCode.UNKNOWN, "Pod Resources API GetAllocatableResources disabled")

_CODES = {
    "message_too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    # Would be asked again and again until the deadline.
    "rate_limited": grpc.StatusCode.DEADLINE_EXCEEDED,
}


def refusal(reason: str) -> Refuse:
    """What makes the kubelet's source give this reason."""
    code = next((code for code in grpc.StatusCode if code.name.lower() == reason), grpc.StatusCode.UNAVAILABLE)
    details = "larger than max" if reason == "message_too_large" else reason
    return Refuse(_CODES.get(reason, code), details)


class FakeKubelet(UnixServer):
    """One kubelet's PodResources server. May be started again after it was stopped, and then has a new inode."""

    def __init__(self, socket_path: Path, versions: Iterable[str] = ("v1", "v1alpha1")) -> None:
        super().__init__(socket_path)
        self.versions = frozenset(versions)
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
        """One call, as bytes: a fake may answer bytes that are no protobuf."""
        self.calls[method] += 1
        self._called.set()
        behaviour = self._next_behaviour(method)
        match behaviour:
            case Hang():
                await asyncio.Event().wait()
            case Raw(answer):
                return answer
            case Slow(seconds):
                await asyncio.sleep(seconds)
        answered = behaviour if isinstance(behaviour, Refuse) else self._true_answer(method, request)
        if isinstance(answered, Refuse):
            await context.abort(answered.code, answered.details)
        return answered + _unknown_field(behaviour.size_bytes) if isinstance(behaviour, Pad) else answered

    def _next_behaviour(self, method: str) -> Behaviour | None:
        if method not in self._behaviours:
            return None
        behaviour, times = self._behaviours.pop(method)
        if times > 1:
            self._behaviours[method] = behaviour, times - 1
        return behaviour

    def _true_answer(self, method: str, request: bytes) -> bytes | Refuse:
        service, _, name = method.removeprefix("/").partition("/")
        if service.partition(".")[0] not in self.versions or not service.endswith(".PodResourcesLister"):
            return Refuse(grpc.StatusCode.UNIMPLEMENTED, f"unknown service {service}")
        if method == LIST:
            return list_answer(self._pods, self._numa)
        if method == LIST_V1ALPHA1:
            old_pods = [self._pod_v1alpha1(pod) for pod in _shuffled(self._pods)]
            return v1alpha1_pb2.ListPodResourcesResponse(pod_resources=old_pods).SerializeToString()
        if method == ALLOCATABLE:
            return allocatable_answer(self._allocatable, self._numa)
        if method == GET:
            return self._get(v1_pb2.GetPodResourcesRequest.FromString(request))
        return Refuse(grpc.StatusCode.UNIMPLEMENTED, f"unknown method {name} for service {service}")

    def _get(self, asked: v1_pb2.GetPodResourcesRequest) -> bytes | Refuse:
        for pod in self._pods:
            if (pod.namespace, pod.name) == (asked.pod_namespace, asked.pod_name):
                return v1_pb2.GetPodResourcesResponse(pod_resources=_pod(pod, self._numa)).SerializeToString()
        details = f"pod {asked.pod_name} in namespace {asked.pod_namespace} not found"
        return Refuse(grpc.StatusCode.UNKNOWN, details)

    def _pod_v1alpha1(self, pod: ListedPod) -> v1alpha1_pb2.PodResources:
        return v1alpha1_pb2.PodResources(
            name=pod.name,
            namespace=pod.namespace,
            containers=[_container_v1alpha1(container) for container in _shuffled(pod.containers)],
        )


def list_answer(pods: Sequence[ListedPod], numa: Numa) -> bytes:
    """A List, in another order each time."""
    messages = [_pod(pod, numa) for pod in _shuffled(pods)]
    return v1_pb2.ListPodResourcesResponse(pod_resources=messages).SerializeToString()


def allocatable_answer(devices: Sequence[ResourceDevices], numa: Numa) -> bytes:
    """What GetAllocatableResources answers, in another order each time."""
    return v1_pb2.AllocatableResourcesResponse(devices=_devices(devices, numa)).SerializeToString()


def _pod(pod: ListedPod, numa: Numa) -> v1_pb2.PodResources:
    return v1_pb2.PodResources(
        name=pod.name,
        namespace=pod.namespace,
        containers=[
            v1_pb2.ContainerResources(
                name=container.name,
                devices=_devices(container.devices, numa),
                dynamic_resources=_claims(container.claims, pod.namespace),
            )
            for container in _shuffled(pod.containers)
        ],
    )


def _devices(resources: Sequence[ResourceDevices], numa: Numa) -> list[v1_pb2.ContainerDevices]:
    """One entry per id and NUMA node. Node 0 is an empty NUMANode, not a missing one (kubernetes#101522)."""
    entries = []
    for resource in resources:
        for id_ in resource.ids:
            for node in numa.get(id_) or (None,):
                topology = None if node is None else v1_pb2.TopologyInfo(nodes=[v1_pb2.NUMANode(ID=node)])
                entries.append(
                    v1_pb2.ContainerDevices(resource_name=resource.resource, device_ids=[id_], topology=topology)
                )
    return _shuffled(entries)


def _shuffled(values: Sequence[T]) -> list[T]:
    return _shuffler.sample(values, len(values))


def _claims(devices: Sequence[ClaimDevice], namespace: str) -> list[v1_pb2.DynamicResource]:
    """An entry per claim. One that a test gave no name has that of its device, in the pod's namespace."""
    by_claim: dict[tuple[str, str], list[v1_pb2.ClaimResource]] = {}
    for one in _shuffled(devices):
        resource = v1_pb2.ClaimResource(
            driver_name=one.driver, pool_name=one.pool, device_name=one.device, share_id=one.share_id or None
        )
        by_claim.setdefault((one.claim_namespace or namespace, one.claim or one.device), []).append(resource)
    return [
        v1_pb2.DynamicResource(claim_name=claim, claim_namespace=of, claim_resources=resources)
        for (of, claim), resources in by_claim.items()
    ]


def _container_v1alpha1(container: ListedContainer) -> v1alpha1_pb2.ContainerResources:
    pairs = [(resource.resource, id_) for resource in container.devices for id_ in resource.ids]
    devices = [
        v1alpha1_pb2.ContainerDevices(resource_name=resource, device_ids=[id_]) for resource, id_ in _shuffled(pairs)
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
