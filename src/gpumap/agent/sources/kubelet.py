"""The kubelet's PodResources API over its Unix socket: the device ids that the kubelet assigned to each container.

Read-only. It asks for raw bytes, and decodes only pods whose bytes are new. It reconnects by its own rules, because
gRPC's back-off can pause for two minutes after a kubelet is back.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from gpumap.agent._proto.podresources import v1_pb2, v1alpha1_pb2
from gpumap.agent.executors import SerialExecutor
from gpumap.agent.own_process import GRPC_DESCRIPTORS, GRPC_THREADS, lack
from gpumap.agent.sources.messages import MESSAGE_BYTES_MAX
from gpumap.agent.sources.podresources import AllocatableDevices, KnownPods, ListedPods
from gpumap.model.observations import Complaint, KubeletAnswer, SourceAnswer, SourceError
from gpumap.model.terms import KUBELET_AWAY_REASONS

T = TypeVar("T")

CHANNEL_OPTIONS = (
    # Servers that are stricter than the kubelet's server refuse the path that gRPC would send (grpc/grpc#33571).
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # Channels of one process share their back-off, unless each has its own pool.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The time that one attempt to connect may take: a busy kubelet may need a second to accept it.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_LIST_V1 = "/v1.PodResourcesLister/List"
_LIST_V1ALPHA1 = "/v1alpha1.PodResourcesLister/List"
_ALLOCATABLE_V1 = "/v1.PodResourcesLister/GetAllocatableResources"
_RATE_LIMIT_PAUSE_SECONDS = 0.1
_RETURN_POLL_SECONDS = 1.0
_SMALL_BYTES_MAX = 1 << 16
"""A larger answer is decoded in a thread: one of 17.8 MB blocked the event loop for 0.9 s. For a usual answer a
thread costs more than it saves."""
IDLE_SECONDS = 10.0
"""If reads are further apart, the threads of a channel cost more than a new connection."""


class KubeletSource:
    """Reads one kubelet. It keeps its channel until the kubelet makes its socket again."""

    def __init__(
        self,
        socket_path: Path,
        on_answer: Callable[[str, bytes], None] = lambda method, answer: None,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """`on_answer` gets each answer as it came, for recordings. Reads that are further apart keep no channel."""
        self._path = socket_path
        self._on_answer = on_answer
        self._idle_seconds = idle_seconds
        self._channel: grpc.aio.Channel | None = None
        self._socket = ""
        self._list_method = _LIST_V1
        self._reports_allocatable = True
        self._known = KnownPods()
        self._executor: SerialExecutor | None = None
        self._kubelet_away = False
        self._read_at: float | None = None

    async def read(self, timeout_seconds: float) -> SourceAnswer[KubeletAnswer]:
        """Ask for List and GetAllocatableResources. `pods` is the very same object while its content is unchanged.

        Raises SourceError: socket_missing, connection_refused, permission_denied, unavailable, rate_limited,
        message_too_large, unimplemented, deadline_exceeded, decode, no_descriptors, no_threads, or another gRPC status
        in lower case.
        """
        started = time.monotonic()
        deadline = started + timeout_seconds
        is_rare = self._read_at is not None and started - self._read_at > self._idle_seconds
        self._read_at = started
        complaints: list[Complaint] = []
        try:
            await self._connect()
            pods = await self._list(deadline, complaints)
            allocatable = await self._allocatable_resources(deadline, complaints)
        except grpc.aio.AioRpcError as error:
            reason = reason_of(error, self._path)
            self._kubelet_away = reason in KUBELET_AWAY_REASONS
            if self._kubelet_away:
                await self._disconnect()
            raise SourceError(reason, self._why(reason, error), tuple(complaints)) from error
        except DecodeError as error:
            raise SourceError("decode", f"{self._path}: {error}", tuple(complaints)) from error
        except TimeoutError as error:
            raise SourceError("deadline_exceeded", "decoding its answer took too long", tuple(complaints)) from error
        if is_rare:
            await self._disconnect()
        self._kubelet_away = False
        is_v1 = self._list_method == _LIST_V1
        answer = KubeletAnswer(
            pods,
            allocatable,
            self._socket,
            may_leave_out_devices=is_v1 and not self._reports_allocatable,
            may_have_claims=is_v1 and self._reports_allocatable,
        )
        return SourceAnswer(answer, tuple(complaints))

    async def wait_until_back(self) -> None:
        """Return when a kubelet that was away accepts connections, at least a second later; otherwise never."""
        if not self._kubelet_away:
            await asyncio.Event().wait()  # without a timer: nothing wakes this process between two collections
        while True:
            await asyncio.sleep(_RETURN_POLL_SECONDS)
            if _accepts(self._path):
                return

    async def close(self) -> None:
        """Drop the channel and end the thread. The next read makes new ones."""
        await self._disconnect()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    async def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _connect(self) -> None:
        identity = _identity(self._path)
        if self._channel is not None and identity != self._socket:
            await self._disconnect()
        if self._channel is None:
            if (lacking := lack(GRPC_DESCRIPTORS, GRPC_THREADS)) is not None:
                raise SourceError(lacking.reason, lacking.detail)
            options = CHANNEL_OPTIONS + _RECONNECT_OPTIONS
            self._channel = grpc.aio.insecure_channel(f"unix:{self._path}", options=options)
            self._list_method = _LIST_V1
            self._reports_allocatable = True
        self._socket = identity

    async def _list(self, deadline: float, complaints: list[Complaint]) -> ListedPods:
        try:
            answer = await self._call(self._list_method, v1_pb2.ListPodResourcesRequest(), deadline, complaints)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNIMPLEMENTED or self._list_method == _LIST_V1ALPHA1:
                raise
            answer = await self._call(_LIST_V1ALPHA1, v1alpha1_pb2.ListPodResourcesRequest(), deadline, complaints)
            self._list_method = _LIST_V1ALPHA1  # kubelet < 1.20
        pods, oddities = await self._decode(self._known.read_list, answer, deadline)
        complaints.extend(oddities)
        return pods

    async def _allocatable_resources(self, deadline: float, complaints: list[Complaint]) -> AllocatableDevices | None:
        """Return what plugins offer; `None` if this kubelet does not support it, or the call failed."""
        if not self._reports_allocatable or self._list_method == _LIST_V1ALPHA1:
            return None
        try:
            answer = await self._call(_ALLOCATABLE_V1, v1_pb2.AllocatableResourcesRequest(), deadline, complaints)
        except grpc.aio.AioRpcError as error:
            gate_is_off = error.code() == grpc.StatusCode.UNKNOWN and "disabled" in (error.details() or "")
            if error.code() == grpc.StatusCode.UNIMPLEMENTED or gate_is_off:
                self._reports_allocatable = False  # an old kubelet, or its gate is off: do not ask until it restarts
            else:
                complaints.append(Complaint(f"allocatable_{reason_of(error, self._path)}", detail_of(error)))
            return None
        try:
            return await self._decode(self._known.read_allocatable, answer, deadline)
        except DecodeError as error:
            complaints.append(Complaint("allocatable_decode", f"{self._path}: {error}"))
        except TimeoutError:
            complaints.append(Complaint("allocatable_deadline_exceeded", "decoding its answer took too long"))
        return None

    async def _decode(self, read: Callable[[bytes], T], answer: bytes, deadline: float) -> T:
        """Decode the answer. Raises DecodeError, and TimeoutError if this or an earlier decoding takes too long.

        An abandoned one continues in the thread. Its result is dropped: the next read must not get an older answer.
        """
        if len(answer) <= _SMALL_BYTES_MAX:
            return read(answer)
        self._executor = self._executor or SerialExecutor("gpumap-kubelet")
        try:
            return await self._executor.run(lambda: read(answer), max(deadline - time.monotonic(), 0.001))
        except (TimeoutError, asyncio.CancelledError):
            self._known = KnownPods()
            raise

    async def _call(self, method: str, request: Message, deadline: float, complaints: list[Complaint]) -> bytes:
        """Make one call in the remaining time. A rate limit, shared with all other clients, is waited for."""
        if self._channel is None:
            raise RuntimeError("not connected")
        call = raw_call(self._channel, method)
        pause = _RATE_LIMIT_PAUSE_SECONDS
        while True:
            try:
                answer = await call(request.SerializeToString(), timeout=max(deadline - time.monotonic(), 0.001))
                self._on_answer(method, answer)
                return answer
            except grpc.aio.AioRpcError as error:
                if reason_of(error, self._path) != "rate_limited" or deadline - time.monotonic() <= pause:
                    raise
                complaints.append(Complaint("rate_limited", detail_of(error)))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _why(self, reason: str, error: grpc.aio.AioRpcError) -> str:
        """Return a sentence for people; gRPC's own sentence contains the same path three times."""
        if reason == "connection_refused":
            return f"no process listens at {self._path}"
        if reason == "permission_denied" and error.code() is grpc.StatusCode.UNAVAILABLE:
            return f"uid {os.geteuid()} has no permission to connect to {self._path}"
        if reason != "socket_missing":
            return detail_of(error)
        root = self._path.parent.parent
        hint = "" if root.exists() else f", and no {root}: if this machine has no kubelet, set --no-kubelet"
        return f"no socket at {self._path}{hint}"


def raw_call(channel: grpc.aio.Channel, method: str) -> Callable[..., Awaitable[bytes]]:
    """Return a call with bytes as its request and answer."""
    return cast(
        Callable[..., Awaitable[bytes]],
        channel.unary_unary(method, request_serializer=None, response_deserializer=None),
    )


def reason_of(error: grpc.aio.AioRpcError, socket_path: Path) -> str:
    """Return the status in lower case, or one of several reasons of a code (by texts of grpc and the kubelet)."""
    code, details = error.code(), (error.details() or "").lower()
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return "message_too_large" if "larger than max" in details else "rate_limited"
    if code == grpc.StatusCode.UNAVAILABLE:
        if "permission denied" in details:
            return "permission_denied"
        if "no such file" in details or not os.path.lexists(socket_path):
            return "socket_missing"
        if "refused" in details:
            return "connection_refused"
    return code.name.lower()


def detail_of(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name} {error.details() or ''}".strip()


def _identity(path: Path) -> str:
    """Return what changes if the kubelet makes its socket again. An inode number alone may be reused."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_ino}-{status.st_ctime_ns}"


def _accepts(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except OSError:
        return False
    return True
