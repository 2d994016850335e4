"""The kubelet's PodResources API over its Unix socket: which device ids each container was given.

Read-only. Asks for raw bytes and decodes only pods whose bytes are new: kubelets answer in random order, so the pods of
two answers with one content are the same, but the answers are not. Reconnects by its own rules, because gRPC's
back-off can stay silent for two minutes after a kubelet is back.
"""

import asyncio
import hashlib
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from gpumap.agent._proto.podresources import v1_pb2, v1alpha1_pb2
from gpumap.agent.sources.podresources import DecodedPod, complaints_of, decode_offer, decode_pod, parts
from gpumap.model.observations import Complaint, KubeletAnswer, ListedPod, ResourceDevices, SourceAnswer, SourceError

MESSAGE_BYTES_MAX = 24 << 20
"""The largest answer that is taken: a larger one could take all of the memory that the chart allows. 17.8 MB were seen
(kubernetes/kubernetes#141335)."""

_OPTIONS = (
    # Servers that are stricter than the kubelet's refuse the path that gRPC would send (grpc/grpc#33571).
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Channels of one process share their back-off unless each has a pool of its own.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_LIST_V1 = "/v1.PodResourcesLister/List"
_LIST_V1ALPHA1 = "/v1alpha1.PodResourcesLister/List"
_ALLOCATABLE_V1 = "/v1.PodResourcesLister/GetAllocatableResources"
_RATE_LIMIT_PAUSE_SECONDS = 0.1
_RETURN_POLL_SECONDS = 1.0
_ORDERS_KEPT = 4
"""In how many orders of its parts a pod is known by its bytes, on average: enough for containers with one device."""
_SMALL_BYTES_MAX = 1 << 16
"""A larger answer is decoded in a thread: one of 17.8 MB held the event loop for 0.9 s. For a usual one a thread would
cost more than it saves."""
_KEPT_BYTES_MAX = 4096
"""The bytes of a larger pod are known by their digest: one of 17.8 MB has been seen, in many orders."""
IDLE_SECONDS = 10.0
"""Between reads that are further apart, a channel's threads cost more than connecting again."""

_CODE_REASONS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline_exceeded",
    grpc.StatusCode.UNIMPLEMENTED: "unimplemented",
    grpc.StatusCode.PERMISSION_DENIED: "permission_denied",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
}
_REASONS_OF_ABSENCE = frozenset({"socket_missing", "connection_refused", "unavailable"})


class KubeletSource:
    """Asks one kubelet. Keeps its channel between calls and makes it anew when the kubelet has made its socket anew."""

    def __init__(
        self,
        socket_path: Path,
        heard: Callable[[str, bytes], None] = lambda method, answer: None,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """`heard` gets each answer as it came: a recording keeps it. Reads further apart keep no channel."""
        self._path = socket_path
        self._heard = heard
        self._idle_seconds = idle_seconds
        self._channel: grpc.aio.Channel | None = None
        self._socket = ""
        self._list_method = _LIST_V1
        self._tells_allocatable = True
        self._decoded: dict[bytes, DecodedPod] = {}
        self._list_bytes = b""
        self._listed: dict[int, ListedPod] = {}
        self._pods: tuple[ListedPod, ...] = ()
        self._oddities: tuple[Complaint, ...] = ()
        self._allocatable_entries: frozenset[bytes] = frozenset()
        self._allocatable: tuple[ResourceDevices, ...] | None = None
        self._absent = False
        self._read_at: float | None = None

    async def read(self, timeout_seconds: float) -> SourceAnswer[KubeletAnswer]:
        """Ask for List and GetAllocatableResources. `pods` is the very same object while its content is unchanged.

        Raises SourceError: socket_missing, connection_refused, permission_denied, unavailable, rate_limited,
        message_too_large, unimplemented, deadline_exceeded, decode, or another gRPC status in lower case.
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
            reason = self._reason(error)
            self._absent = reason in _REASONS_OF_ABSENCE
            if self._absent:
                await self.close()
            raise SourceError(reason, self._why(reason, error), tuple(complaints)) from error
        except DecodeError as error:
            raise SourceError("decode", f"{self._path}: {error}", tuple(complaints)) from error
        if is_rare:
            await self.close()
        self._absent = False
        is_old = self._list_method == _LIST_V1 and not self._tells_allocatable
        return SourceAnswer(KubeletAnswer(pods, allocatable, self._socket, is_old), tuple(complaints))

    async def wait_until_back(self) -> None:
        """Return once a kubelet that was away accepts connections, a second later at least; never, if it was not."""
        while True:
            await asyncio.sleep(_RETURN_POLL_SECONDS)
            if self._absent and _accepts(self._path):
                return

    async def close(self) -> None:
        """Drop the channel. The next read makes a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _connect(self) -> None:
        identity = _identity(self._path)
        if self._channel is not None and identity != self._socket:
            await self.close()
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._path}", options=_OPTIONS)
            self._list_method = _LIST_V1
            self._tells_allocatable = True
        self._socket = identity

    async def _list(self, deadline: float, complaints: list[Complaint]) -> tuple[ListedPod, ...]:
        try:
            answer = await self._call(self._list_method, v1_pb2.ListPodResourcesRequest(), deadline, complaints)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNIMPLEMENTED or self._list_method == _LIST_V1ALPHA1:
                raise
            self._list_method = _LIST_V1ALPHA1  # kubelet < 1.20
            answer = await self._call(self._list_method, v1alpha1_pb2.ListPodResourcesRequest(), deadline, complaints)
        if answer != self._list_bytes:
            await _decode(self._take, answer)
        complaints.extend(self._oddities)
        return self._pods

    def _take(self, answer: bytes) -> None:
        """Decode what is new in a List. What is strange in it is a complaint as long as it is in there."""
        chunks = parts(answer)
        if len(self._decoded) > _ORDERS_KEPT * len(chunks):
            self._decoded = {}
        decoded = [self._pod(chunk) for chunk in chunks]
        self._oddities = complaints_of(decoded)
        listed = {id(one.pod): one.pod for one in decoded}
        if listed.keys() != self._listed.keys():
            self._listed = listed
            pods = tuple(sorted(set(listed.values())))
            if pods != self._pods:
                self._pods = pods
        self._list_bytes = answer

    def _pod(self, chunk: bytes) -> DecodedPod:
        """One pod: the very same object for equal content, whose bytes come in a random order of their parts."""
        key = chunk if len(chunk) <= _KEPT_BYTES_MAX else hashlib.blake2b(chunk).digest()
        known = self._decoded.get(key)
        if known is None:
            decoded = decode_pod(chunk)
            same = (pod for pod in self._listed.values() if pod == decoded.pod)
            known = self._decoded[key] = decoded._replace(pod=next(same, decoded.pod))
        return known

    async def _allocatable_resources(
        self, deadline: float, complaints: list[Complaint]
    ) -> tuple[ResourceDevices, ...] | None:
        """What plugins offer; `None` where this kubelet cannot say, or says nothing because plugins are to register."""
        if not self._tells_allocatable or self._list_method == _LIST_V1ALPHA1:
            return None
        try:
            answer = await self._call(_ALLOCATABLE_V1, v1_pb2.AllocatableResourcesRequest(), deadline, complaints)
        except grpc.aio.AioRpcError as error:
            gate_is_off = error.code() == grpc.StatusCode.UNKNOWN and "disabled" in (error.details() or "")
            if error.code() == grpc.StatusCode.UNIMPLEMENTED or gate_is_off:
                self._tells_allocatable = False  # an old kubelet, or its gate is off: until it restarts
            else:
                complaints.append(Complaint(f"allocatable_{self._reason(error)}", _detail(error)))
            return None
        try:
            await _decode(self._take_offer, answer)
        except DecodeError as error:
            complaints.append(Complaint("allocatable_decode", f"{self._path}: {error}"))
            return None
        return self._allocatable or None

    def _take_offer(self, answer: bytes) -> None:
        entries = frozenset(parts(answer))
        if entries != self._allocatable_entries:
            devices = decode_offer(answer)
            self._allocatable_entries = entries
            if devices != self._allocatable:
                self._allocatable = devices

    async def _call(self, method: str, request: Message, deadline: float, complaints: list[Complaint]) -> bytes:
        """One call with the time that is left. A rate limit, shared with every other client, is waited out."""
        if self._channel is None:
            raise RuntimeError("not connected")
        call = cast(
            Callable[..., Awaitable[bytes]],
            self._channel.unary_unary(method, request_serializer=None, response_deserializer=None),
        )
        pause = _RATE_LIMIT_PAUSE_SECONDS
        while True:
            try:
                answer = await call(request.SerializeToString(), timeout=max(deadline - time.monotonic(), 0.001))
                self._heard(method, answer)
                return answer
            except grpc.aio.AioRpcError as error:
                left = deadline - time.monotonic()
                if self._reason(error) != "rate_limited" or left <= pause:
                    raise
                complaints.append(Complaint("rate_limited", _detail(error)))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _why(self, reason: str, error: grpc.aio.AioRpcError) -> str:
        """A sentence for people, where gRPC's own says the same path three times."""
        plain = {"socket_missing": "no socket at", "connection_refused": "nobody listens at"}
        return f"{plain[reason]} {self._path}" if reason in plain else _detail(error)

    def _reason(self, error: grpc.aio.AioRpcError) -> str:
        """Tell errors apart that share a code (texts as grpc-core and the kubelet write them)."""
        code, details = error.code(), (error.details() or "").lower()
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return "message_too_large" if "larger than max" in details else "rate_limited"
        if code == grpc.StatusCode.UNAVAILABLE:
            if "permission denied" in details:
                return "permission_denied"
            if "no such file" in details or not os.path.lexists(self._path):
                return "socket_missing"
            if "refused" in details:
                return "connection_refused"
        return _CODE_REASONS.get(code, code.name.lower())


async def _decode(take: Callable[[bytes], None], answer: bytes) -> None:
    if len(answer) > _SMALL_BYTES_MAX:
        await asyncio.to_thread(take, answer)
    else:
        take(answer)


def _detail(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name} {error.details() or ''}".strip()


def _identity(path: Path) -> str:
    """What changes when the kubelet has made its socket anew; its inode number alone may be used again."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_ino}-{found.st_ctime_ns}"


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
