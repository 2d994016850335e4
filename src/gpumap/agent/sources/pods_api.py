"""The kubelet's Pods API (KEP-4188): UIDs, names and container ids of its pods, health of devices, and shares of GPUs.

Used only on request of the user: the kubelet sends whole pods with their environments. It decodes only names, UIDs,
status, labels and annotations. Of the last two it keeps only shares (`pod_shares`), and it keeps no bytes. Events only
start another List: kubelets drop some, and number their kinds differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from gpumap.agent._proto.pods import v1alpha1_pb2
from gpumap.agent.own_process import GRPC_DESCRIPTORS, GRPC_THREADS, lack
from gpumap.agent.sources.kubelet import CHANNEL_OPTIONS, detail_of, raw_call, reason_of
from gpumap.agent.sources.messages import decode, fit
from gpumap.agent.sources.pod_shares import gpu_groups, may_share, pod_shares
from gpumap.model.observations import Complaint, DeviceHealth, ReportedContainer, ReportedPod, SourceAnswer
from gpumap.model.terms import PodUid

WATCH, LIST = "/v1alpha1.Pods/WatchPods", "/v1alpha1.Pods/ListPods"
RETRY_SECONDS = 1.0
LIST_PAUSE_SECONDS = 0.25
"""Between two Lists: events come in bursts."""
RESYNC_SECONDS = 60.0
"""Interval of Lists without an event: a kubelet drops events of a slow client, and one that hangs sends none."""

ReportedPods = tuple[ReportedPod, ...]


class PodsApiSource:
    """Follows one kubelet's pods from `start` to `close`. Any thread may call `read`."""

    def __init__(
        self,
        socket_path: Path,
        deadline_seconds: float,
        resync_seconds: float = RESYNC_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.confirmed_at = 0.0
        """When gpumap asked for the newest answer. Until the next one, the kubelet may have dropped an event."""
        self._monotonic = monotonic
        self._path = socket_path
        self._deadline_seconds = deadline_seconds
        self._resync_seconds = resync_seconds
        self._answer: SourceAnswer[ReportedPods | None] = SourceAnswer(None)
        self._pods: ReportedPods = ()
        self._known: dict[bytes, ReportedPod] = {}
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, patience_seconds: float = 1.0) -> None:
        """Begin, and wait this time for a first answer or failure."""
        self._task = asyncio.create_task(self._run(), name="gpumap-pods-api")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), patience_seconds)

    def read(self) -> SourceAnswer[ReportedPods | None]:
        """Return the pods, the very same object while nothing changed; `None` while they are not followed.

        Complaints: `pods_api_` and `socket_missing`, `connection_refused`, `decode`, `stream_ended`, or a gRPC status
        in lower case (`unimplemented`: an older kubelet; `failed_precondition`: it has just restarted).
        """
        if self._task is not None and self._task.done():
            return SourceAnswer(
                None, (Complaint("pods_api_internal_error", f"{self._path}: gpumap stopped following the stream"),)
            )
        return self._answer

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                if (lacking := lack(GRPC_DESCRIPTORS, GRPC_THREADS)) is not None:
                    self._lose(*lacking)
                else:
                    await self._list_at_changes()
                    self._lose("stream_ended", "the kubelet ended the stream")
            except grpc.aio.AioRpcError as error:
                self._lose(reason_of(error, self._path), detail_of(error))
            except DecodeError as error:
                self._lose("decode", str(error))
            await asyncio.sleep(RETRY_SECONDS)

    def _lose(self, reason: str, detail: str) -> None:
        """Pods that are no longer followed are not served."""
        self._answer = SourceAnswer(None, (Complaint(f"pods_api_{reason}", f"{self._path}: {detail}"),))
        self._tried.set()

    async def _list_at_changes(self) -> None:
        """List at each change, as long as the kubelet reports changes."""
        changed = asyncio.Event()
        async with grpc.aio.insecure_channel(f"unix:{self._path}", options=CHANNEL_OPTIONS) as channel:
            watching = asyncio.create_task(_watch(channel, changed))
            watching.add_done_callback(lambda _: changed.set())
            try:
                while not watching.done():
                    changed.clear()
                    earliest = time.monotonic() + LIST_PAUSE_SECONDS
                    await self._list(channel)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), self._resync_seconds)
                    await asyncio.sleep(max(earliest - time.monotonic(), 0.0))
                await watching
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _list(self, channel: grpc.aio.Channel) -> None:
        asked_at = self._monotonic()
        answer = await raw_call(channel, LIST)(b"", timeout=self._deadline_seconds)
        pods = await asyncio.to_thread(self._decode, answer)
        if pods != self._pods:
            self._pods = pods
        self._answer = SourceAnswer(self._pods)
        self.confirmed_at = asked_at
        self._tried.set()

    def _decode(self, answer: bytes) -> ReportedPods:
        """Known pods are not decoded again. Only a digest of the bytes is kept."""
        known: dict[bytes, ReportedPod] = {}
        for chunk in v1alpha1_pb2.ListPodsResponse.FromString(answer).pods:
            digest = hashlib.blake2b(chunk).digest()
            known[digest] = self._known.get(digest) or decode_pod(chunk)
        self._known = known
        pods = {pod for pod in known.values() if pod.pod_uid}
        return tuple(sorted(pods, key=lambda pod: (pod.pod_uid, *pod.pod_name)))


async def _watch(channel: grpc.aio.Channel, changed: asyncio.Event) -> None:
    """Note each event, whatever it is, until the stream ends or fails."""
    call = cast(
        Callable[..., AsyncIterator[bytes]],
        channel.unary_stream(WATCH, request_serializer=None, response_deserializer=None),
    )
    async for _ in call(b""):
        changed.set()


def decode_pod(chunk: bytes) -> ReportedPod:
    """Read a pod's name, UID, status and shares of GPUs. Raises DecodeError."""
    pod, _ = decode(v1alpha1_pb2.Pod, chunk)
    metadata = pod.metadata
    uid = PodUid(fit(metadata.uid))
    labels = {label.key: label.value for label in metadata.labels}
    groups = gpu_groups(labels)
    annotations = {annotation.key: annotation.value for annotation in metadata.annotations}
    return ReportedPod(
        uid,
        fit(metadata.namespace),
        fit(metadata.name),
        tuple(sorted(_containers(pod.status))),
        groups,
        pod_shares(uid, groups, annotations, [container.name for container in pod.spec.containers]),
        may_share((*labels, *annotations), pod.spec.scheduler_name),
    )


def _containers(status: v1alpha1_pb2.PodStatus) -> Iterator[ReportedContainer]:
    for statuses in (
        status.container_statuses,
        status.init_container_statuses,
        status.ephemeral_container_statuses,
    ):
        for container in statuses:
            health = (
                DeviceHealth(fit(resource.name), fit(device.resource_id), fit(device.health))
                for resource in container.allocated_resources_status
                for device in resource.resources
            )
            # "containerd://<id>"
            container_id = container.container_id.rpartition("://")[2]
            yield ReportedContainer(fit(container.name), fit(container_id), tuple(sorted(health)))
