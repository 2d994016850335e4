"""A fake of koordlet's PodResources proxy: a real gRPC server that forwards to a kubelet, and appends ids to its List.

As koordinator-sh/koordinator does it (pkg/koordlet/statesinformer/impl/states_pod_resources.go): the ids of a pod's
allocation, of each kind of device, are appended to its first container; the other methods are forwarded as they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import cast

import grpc
import grpc.aio

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.lab.demo.kubelet import ALLOCATABLE, LIST, Context, Refuse, UnixServer

Allocations = Mapping[tuple[str, str], Mapping[str, list[str]]]
"""Ids by resource, by (namespace, pod): what its annotation `scheduling.koordinator.sh/device-allocated` holds."""


class FakeKoordlet(UnixServer):
    """One node's proxy. It fails as the kubelet behind it fails, or by `refusal`."""

    def __init__(self, socket_path: Path, kubelet: Path) -> None:
        super().__init__(socket_path)
        self.allocations: Allocations = {}
        self.refusal: Refuse | None = None
        self._kubelet = kubelet

    async def answer(self, method: str, request: bytes, context: Context) -> bytes:
        self.calls[method] += 1
        if self.refusal is not None:
            await context.abort(self.refusal.code, self.refusal.details)
        if method not in (LIST, ALLOCATABLE):
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
