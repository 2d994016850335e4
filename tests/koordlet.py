"""A fake of koordlet's PodResources proxy: a real gRPC server that forwards to a kubelet, and appends ids to its List.

As koordinator-sh/koordinator does it (pkg/koordlet/statesinformer/impl/states_pod_resources.go): the ids of a pod's
allocation, of each kind of device, are appended to its first container; the other methods are forwarded as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import cast

import grpc
import grpc.aio

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.lab.demo.kubelet import ALLOCATABLE, GET, GRACE_SECONDS, LIST, Refuse

Allocations = Mapping[tuple[str, str], Mapping[str, list[str]]]
"""Ids by resource, by (namespace, pod): what its annotation `scheduling.koordinator.sh/device-allocated` holds."""

_Context = grpc.aio.ServicerContext[bytes, bytes]


class FakeKoordlet:
    """One node's proxy. It fails as the kubelet behind it fails, or by `refusal`."""

    def __init__(self, socket_path: Path, kubelet: Path) -> None:
        self.socket_path = socket_path
        self.allocations: Allocations = {}
        self.refusal: Refuse | None = None
        self.calls: Counter[str] = Counter()
        self._kubelet = kubelet
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self.socket_path.parent.mkdir(parents=True, exist_ok=True)
        self.socket_path.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers([_Methods(self)])
        self._server.add_insecure_port(f"unix:{self.socket_path}")
        await self._server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(GRACE_SECONDS)

    async def __aenter__(self) -> FakeKoordlet:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def answer(self, method: str, request: bytes, context: _Context) -> bytes:
        self.calls[method] += 1
        if self.refusal is not None:
            await context.abort(self.refusal.code, self.refusal.details)
        if method not in (LIST, GET, ALLOCATABLE):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"unknown method {method}")
        try:
            async with grpc.aio.insecure_channel(f"unix:{self._kubelet}") as channel:
                forward = cast(
                    Callable[[bytes], Awaitable[bytes]],
                    channel.unary_unary(method, request_serializer=None, response_deserializer=None),
                )
                answer = await forward(request)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        return self._filled(answer) if method == LIST else answer

    def _filled(self, answer: bytes) -> bytes:
        response = v1_pb2.ListPodResourcesResponse.FromString(answer)
        for pod in response.pod_resources:
            for resource, ids in self.allocations.get((pod.namespace, pod.name), {}).items():
                if pod.containers:
                    pod.containers[0].devices.add(resource_name=resource, device_ids=ids)
        return response.SerializeToString()


class _Methods(grpc.GenericRpcHandler):
    def __init__(self, koordlet: FakeKoordlet) -> None:
        self._koordlet = koordlet

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method

        async def answer(request: bytes, context: _Context) -> bytes:
            return await self._koordlet.answer(method, request, context)

        return grpc.unary_unary_rpc_method_handler(answer)
