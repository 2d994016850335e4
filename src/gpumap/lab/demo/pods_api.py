"""A fake of the kubelet's Pods API: a real gRPC server on a Unix socket that lists pods and reports changes.

Pods are bytes: it does not read their messages, and sends what it has. Tests make it fail with `refuse`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio

from gpumap.agent._proto.pods import v1alpha1_pb2
from gpumap.lab.demo.kubelet import Refuse
from gpumap.lab.demo.unix_server import Context, UnixServer

WATCH, LIST = "/v1alpha1.Pods/WatchPods", "/v1alpha1.Pods/ListPods"
NOT_SYNCED = Refuse(grpc.StatusCode.FAILED_PRECONDITION, "pod sources are not synced")
_ADDED = 1
"""WatchPodsEvent.type, in the numbering of 1.37."""


class FakePodsApi(UnixServer):
    """One kubelet's Pods server."""

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path)
        self._pods: tuple[bytes, ...] = ()
        self._refusals: dict[str, Refuse] = {}
        self._streams: set[asyncio.Queue[bytes | None]] = set()

    def set_pods(self, pods: Sequence[bytes], *, tell: bool = True) -> None:
        """Set the pods. `tell`: send an event to the clients; a kubelet drops events of slow clients."""
        self._pods = tuple(pods)
        if tell:
            for stream in self._streams:
                stream.put_nowait(_added(self._pods[-1] if self._pods else b""))

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

    def handler(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            WATCH.rpartition("/")[2]: grpc.unary_stream_rpc_method_handler(self._watch),
            LIST.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(self._list),
        }
        return grpc.method_handlers_generic_handler("v1alpha1.Pods", handlers)

    async def stop(self, leave_socket: bool = True) -> None:
        """Stop, and leave the socket, which then refuses connections, as a kubelet does."""
        await super().stop(leave_socket)

    async def _list(self, request: bytes, context: Context) -> bytes:
        await self._called(LIST, context)
        return v1alpha1_pb2.ListPodsResponse(pods=self._pods).SerializeToString()

    async def _watch(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        await self._called(WATCH, context)
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._streams.add(events)
        try:
            for pod in self._pods:
                yield _added(pod)
            while (event := await events.get()) is not None:
                yield event
        finally:
            self._streams.discard(events)

    async def _called(self, method: str, context: Context) -> None:
        self.calls[method] += 1
        if method in self._refusals:
            refusal = self._refusals[method]
            await context.abort(refusal.code, refusal.details)


def _added(pod: bytes) -> bytes:
    return v1alpha1_pb2.WatchPodsEvent(type=_ADDED, pod=pod).SerializeToString()
