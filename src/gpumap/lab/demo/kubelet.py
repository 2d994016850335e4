"""The kubelet of a played node: a real gRPC server on a Unix socket. It gives the answers of a frame, or fails as
kubelets do. This file also makes the messages of the demo's kubelet.

Every message is shuffled, as Go's map iteration does, and every device id is an entry of its own for each of its NUMA
nodes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import NamedTuple, TypeVar

import grpc
import grpc.aio

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.agent._proto.pods import v1alpha1_pb2
from gpumap.model.observations import ClaimDevice, DeviceId, ListedPod, ResourceDevices

GRACE_SECONDS = 0.1
"""For calls under way. Without it gRPC reports an error to its clients, and they write it to stderr."""

Context = grpc.aio.ServicerContext[bytes, bytes]


class UnixServer(grpc.GenericRpcHandler):
    """Answers every method with `answer`. May be started again after it was stopped, and then has a new inode."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.calls: Counter[str] = Counter()
        self._server: grpc.aio.Server | None = None

    @property
    def running(self) -> bool:
        return self._server is not None

    async def answer(self, method: str, request: bytes, context: Context) -> bytes:
        """One call, as bytes: a fake may answer bytes that are no protobuf."""
        raise NotImplementedError

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Every method there is: grpc's own answer to an unknown one has other words than a kubelet's."""
        method = handler_call_details.method

        async def answer(request: bytes, context: Context) -> bytes:
            return await self.answer(method, request, context)

        return grpc.unary_unary_rpc_method_handler(answer)

    async def start(self) -> None:
        """Listen as CreateListener does (k/k pkg/kubelet/util/util_unix.go): under a temporary name, then rename."""
        if self._server is not None:
            raise RuntimeError("the server is running already")
        self.socket_path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        temporary = self.socket_path.with_name(f".{secrets.token_hex(4)}.sock")
        if len(os.fsencode(temporary)) > 107:
            raise OSError(f"{temporary}: longer than a Unix socket's path may be (107 bytes)")
        server = grpc.aio.server(options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers([self])
        server.add_insecure_port(f"unix:{temporary}")
        await server.start()
        self.socket_path.unlink(missing_ok=True)
        temporary.rename(self.socket_path)
        self._server = server

    async def stop(self, leave_socket: bool = False) -> None:
        """Stop listening, and soon cut off calls. A killed kubelet leaves its socket, which then refuses."""
        server, self._server = self._server, None
        if server is None:
            return
        await server.stop(GRACE_SECONDS)
        if not leave_socket:
            self.socket_path.unlink(missing_ok=True)


# --- the List ---------------------------------------------------------------------------------------------------------

LIST = "/v1.PodResourcesLister/List"
ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
LIST_V1ALPHA1 = "/v1alpha1.PodResourcesLister/List"

T = TypeVar("T")
Numa = Mapping[DeviceId, tuple[int, ...]]
"""The NUMA nodes of device ids. An id without an entry has no topology; one with two is listed twice."""

_shuffler = SystemRandom()


class Refuse(NamedTuple):
    """A status other than OK."""

    code: grpc.StatusCode
    details: str


NO_ALLOCATABLE = Refuse(
    grpc.StatusCode.UNIMPLEMENTED, "unknown method GetAllocatableResources for service v1.PodResourcesLister"
)
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


def unknown_service(method: str) -> Refuse:
    """What gRPC answers for a service that the server does not have."""
    return Refuse(grpc.StatusCode.UNIMPLEMENTED, f"unknown service {method.removeprefix('/').partition('/')[0]}")


class PlayedKubelet(UnixServer):
    """One kubelet's PodResources server, with the same answer to a method until another one is shown."""

    def __init__(self, socket_path: Path, versions: Iterable[str]) -> None:
        super().__init__(socket_path)
        self.lists = [method for method in (LIST, LIST_V1ALPHA1) if method[1:].partition(".")[0] in versions]
        """The methods that list pods."""
        self._answers: dict[str, bytes | Refuse] = {}

    def show(self, method: str, answer: bytes | Refuse) -> None:
        """Answer this from now on. The bytes may be no message."""
        self._answers[method] = answer

    async def answer(self, method: str, request: bytes, context: Context) -> bytes:
        self.calls[method] += 1
        return await give_or_refuse(self._answers.get(method, unknown_service(method)), context)


async def give_or_refuse(answer: bytes | Refuse, context: Context) -> bytes:
    """Give an answer, or refuse."""
    if isinstance(answer, Refuse):
        await context.abort(answer.code, answer.details)
    return answer


def list_answer(pods: Sequence[ListedPod], numa: Numa) -> bytes:
    """A List, in another order each time."""
    messages = [_pod(pod, numa) for pod in shuffled(pods)]
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
            for container in shuffled(pod.containers)
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
    return shuffled(entries)


def shuffled(values: Sequence[T]) -> list[T]:
    return _shuffler.sample(values, len(values))


def _claims(devices: Sequence[ClaimDevice], namespace: str) -> list[v1_pb2.DynamicResource]:
    """An entry per claim. One that a test gave no name has that of its device, in the pod's namespace."""
    by_claim: dict[tuple[str, str], list[v1_pb2.ClaimResource]] = {}
    for device in shuffled(devices):
        resource = v1_pb2.ClaimResource(
            driver_name=device.driver,
            pool_name=device.pool,
            device_name=device.device,
            share_id=device.share_id or None,
        )
        by_claim.setdefault((device.claim_namespace or namespace, device.claim or device.device), []).append(resource)
    return [
        v1_pb2.DynamicResource(claim_name=claim, claim_namespace=namespace_, claim_resources=resources)
        for (namespace_, claim), resources in by_claim.items()
    ]


# --- the Pods API -----------------------------------------------------------------------------------------------------

WATCH_PODS, LIST_PODS = "/v1alpha1.Pods/WatchPods", "/v1alpha1.Pods/ListPods"
_ADDED = 1
"""WatchPodsEvent.type, in the numbering of 1.37."""


class PlayedPodsApi(UnixServer):
    """A kubelet's Pods API, with pods that do not change. They are bytes: it does not read their messages."""

    def __init__(self, socket_path: Path, pods: Sequence[bytes] = ()) -> None:
        super().__init__(socket_path)
        self.pods = tuple(pods)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if handler_call_details.method == WATCH_PODS:
            return grpc.unary_stream_rpc_method_handler(self.watch)
        return grpc.unary_unary_rpc_method_handler(self.list) if handler_call_details.method == LIST_PODS else None

    async def stop(self, leave_socket: bool = True) -> None:
        """Stop, and leave the socket, which then refuses connections, as a kubelet does."""
        await super().stop(leave_socket)

    async def list(self, request: bytes, context: Context) -> bytes:
        self.calls[LIST_PODS] += 1
        return v1alpha1_pb2.ListPodsResponse(pods=self.pods).SerializeToString()

    async def watch(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        self.calls[WATCH_PODS] += 1
        for pod in self.pods:
            yield added_event(pod)
        await asyncio.Event().wait()  # nothing changes


def added_event(pod: bytes) -> bytes:
    """A message of WatchPods about a pod."""
    return v1alpha1_pb2.WatchPodsEvent(type=_ADDED, pod=pod).SerializeToString()
