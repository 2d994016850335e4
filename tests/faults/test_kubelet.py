"""The kubelet's socket: what answers there, or does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import grpc
import pytest

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.lab.demo import kubelet as fake
from gpumap.lab.demo.kubelet import Refuse
from tests.faults import files
from tests.faults.connections import Answer, Connections
from tests.faults.matrix import ACCUSES_AGAIN, SERVED, Fault, counts, fault_of, is_down, is_up, suffer
from tests.faults.site import Inject, Site, Sites, Start, injects
from tests.kubelet import RATE_LIMITED, Behaviour, FakeKubelet, Hang, Pad, Raw, Slow
from tests.machine import WHOLE, gpu_uuid

pytestmark = pytest.mark.asyncio(loop_scope="module")
IMPATIENT = Start(deadline_seconds=2.0)
PART = "Kubelet"


LAST_LIST = (
    "gpumap_allocation_info unchanged",
    "gpumap_container_gpu_memory_used_bytes unchanged",
    "gpumap_container_unassigned_use absent",
    'gpumap_device_memory_used_by_owner_bytes{owner="gone"} absent',
    "/readyz 200",
)
"""The last List counts until --stale-after. It accuses no pod."""
AS_BEFORE = (
    "gpumap_allocation_info unchanged",
    "gpumap_device_holders unchanged",
    "gpumap_device_slots_allocatable unchanged",
    "gpumap_container_gpu_memory_used_bytes unchanged",
    "gpumap_container_unassigned_use unchanged",
)
UP = is_up("kubelet")
up_fault = partial(fault_of, PART, UP)


@injects
async def misbehaves(site: Site, *behaviours: Behaviour, methods: Sequence[str] = (fake.LIST,)) -> AsyncIterator[None]:
    """The kubelet answers these methods so."""
    for behaviour, method in zip(behaviours * len(methods), methods, strict=False):
        site.node.kubelet.misbehave(behaviour, method)
    yield
    site.node.kubelet.behave()


def failing(fault: str, inject: Inject, reason: str, detail: str = "", start: Start = SERVED) -> Fault:
    """The kubelet is down as a source, for this reason."""
    log = f"source down source=kubelet reason={reason} detail=…{detail}"
    return Fault(PART, fault, inject, LAST_LIST, is_down("kubelet", reason), (log,), ACCUSES_AGAIN, start=start)


# --- the socket -------------------------------------------------------------------------------------------------------


def socket_path(site: Site) -> Path:
    return site.node.kubelet.socket_path


@contextlib.asynccontextmanager
async def stopped(site: Site) -> AsyncIterator[None]:
    await site.node.kubelet.stop()
    yield
    await site.node.kubelet.start()


@injects
async def served_by(site: Site, answer: Answer) -> AsyncIterator[None]:
    """Another server than the kubelet is at the socket."""
    kept = site.node.directory / "kept"
    socket_path(site).rename(kept)
    connections = Connections(answer)
    server = await asyncio.start_unix_server(connections.serve, socket_path(site))
    yield
    server.close()
    await connections.end()
    files.remove(socket_path(site))
    kept.rename(socket_path(site))


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        pass


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


async def speaks_http1(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    await says_nothing(reader, writer)


async def sends_noise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(range(256)) * 64)
    await writer.drain()
    await says_nothing(reader, writer)


@contextlib.asynccontextmanager
async def slow_to_begin(site: Site) -> AsyncIterator[None]:
    """Each connection waits before its first byte, as that of a kubelet on a busy node."""
    kept = site.node.directory / "kept"

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        from_kubelet, to_kubelet = await asyncio.open_unix_connection(str(kept))

        async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()

        try:
            await asyncio.gather(pass_on(reader, to_kubelet), pass_on(from_kubelet, writer))
        finally:
            to_kubelet.close()

    async with served_by(relay)(site):
        yield


@contextlib.asynccontextmanager
async def replaced(site: Site) -> AsyncIterator[None]:
    """A new kubelet has the path. The old one still answers its connections, and knows no pod."""
    old, new = site.node.kubelet, FakeKubelet(socket_path(site))
    new.set_pods([pod.listed() for pod in site.node.pods])
    new.set_allocatable(site.node.offered)
    await new.start()
    old.set_pods([])
    yield
    await old.stop(leave_socket=True)
    site.node.update_kubelet()
    await old.start()
    await new.stop(leave_socket=True)


@contextlib.asynccontextmanager
async def restarted_with_static_pods(site: Site) -> AsyncIterator[None]:
    """It does not know the pods of the API server yet, and no plugin has registered."""
    await site.node.kubelet.stop()
    await site.agent.until(lambda page: not page.up("kubelet"), "its absence is not reported")
    site.node.update_kubelet(listed=[], registered=False)
    await site.node.kubelet.start()
    yield
    site.node.update_kubelet()


SOCKET = (
    failing("it is stopped, and its socket is gone", stopped, "socket_missing", "no socket at"),
    failing(
        "it is killed, and leaves a socket that refuses",
        files.in_place_of(socket_path, files.dead_socket),
        "connection_refused",
        "no process listens at",
    ),
    failing(
        "a plain file is at its socket's place", files.in_place_of(socket_path, files.text("")), "connection_refused"
    ),
    failing(
        "a directory is at its socket's place", files.in_place_of(socket_path, files.directory), "connection_refused"
    ),
    failing("a link to itself is at its socket's place", files.in_place_of(socket_path, files.loop), "unavailable"),
    failing(
        "gpumap may not enter the socket's directory",
        files.closed(lambda site: socket_path(site).parent),
        "permission_denied",
    ),
    failing("a server at its socket hangs up", served_by(hangs_up), "unavailable"),
    failing("a server at its socket speaks HTTP/1.1", served_by(speaks_http1), "unavailable"),
    failing("a server at its socket sends 16 KiB of noise", served_by(sends_noise), "unavailable"),
    failing("a server at its socket never says a word", served_by(says_nothing), "deadline_exceeded", start=IMPATIENT),
    up_fault(
        "a new connection waits for its first byte",
        slow_to_begin,
        *AS_BEFORE,
        metrics=('gpumap_source_errors_total{source="kubelet"} unchanged',),
    ),
    up_fault(
        "a new kubelet has the socket's path, and the old one answers an empty List",
        replaced,
        *AS_BEFORE,
        metrics=('gpumap_source_errors_total{source="kubelet"} unchanged',),
    ),
    up_fault(
        "it restarts, and lists only static pods and no offer",
        restarted_with_static_pods,
        "gpumap_allocation_info unchanged",
        "gpumap_container_allocated_gpus unchanged",
        'gpumap_container_gpu_memory_used_bytes{pod="whole"} unchanged',
        'gpumap_container_gpu_memory_used_bytes{pod="idle"} absent',
        'gpumap_device_memory_used_by_owner_bytes{owner="gone"} 0',
        log=("source down source=kubelet reason=socket_missing", "source up source=kubelet"),
        recovers=ACCUSES_AGAIN,
    ),
)

# --- the answer -------------------------------------------------------------------------------------------------------


def refuses(code: grpc.StatusCode, details: str) -> Inject:
    return misbehaves(Refuse(code, details))


@contextlib.asynccontextmanager
async def truncated(site: Site) -> AsyncIterator[None]:
    async with misbehaves(Raw(true_list(site)[:-7]))(site):
        yield


def true_list(site: Site) -> bytes:
    """What the kubelet would answer."""
    answer = site.node.kubelet.true_answer(fake.LIST)
    assert isinstance(answer, bytes)
    return answer


@contextlib.asynccontextmanager
async def rate_limited_once_a_collection(site: Site) -> AsyncIterator[None]:
    """Every second call is refused."""
    kubelet = site.node.kubelet

    async def refuse() -> None:
        while True:
            calls = kubelet.calls[fake.LIST]
            kubelet.misbehave(RATE_LIMITED, times=1)
            await kubelet.called(times=calls + 2)

    task = asyncio.create_task(refuse())
    yield
    task.cancel()
    kubelet.behave()


ANSWER = (
    failing("List never answers", misbehaves(Hang()), "deadline_exceeded", start=IMPATIENT),
    up_fault(
        "List answers late, but within the deadline",
        misbehaves(Slow(0.4)),
        *AS_BEFORE,
        metrics=('gpumap_source_errors_total{source="kubelet"} unchanged',),
    ),
    failing("List answers bytes that are no protobuf", misbehaves(Raw(b"\xff" * 64)), "decode"),
    failing("List's answer is cut off", truncated, "decode"),
    failing("List's answer has 25 MiB", misbehaves(Pad(25 << 20)), "message_too_large"),
    up_fault(
        "List's answer has 8 MiB",
        misbehaves(Pad(8 << 20)),
        *AS_BEFORE,
        metrics=('gpumap_source_errors_total{source="kubelet"} unchanged',),
    ),
    failing(
        "List is not implemented, in any version",
        misbehaves(Refuse(grpc.StatusCode.UNIMPLEMENTED, "unknown service"), methods=(fake.LIST, fake.LIST_V1ALPHA1)),
        "unimplemented",
    ),
    failing(
        "List is refused for want of permission", refuses(grpc.StatusCode.PERMISSION_DENIED, "no"), "permission_denied"
    ),
    failing("List is refused for an internal error", refuses(grpc.StatusCode.INTERNAL, "panic"), "internal"),
    failing(
        "the rate limit refuses List for longer than the deadline",
        misbehaves(RATE_LIMITED),
        "rate_limited",
        start=IMPATIENT,
    ),
    up_fault(
        "the rate limit refuses every second List",
        rate_limited_once_a_collection,
        *AS_BEFORE,
        metrics=(counts("kubelet", "rate_limited"),),
        log=("source complains source=kubelet reason=rate_limited",),
    ),
)

# --- a List that lies -------------------------------------------------------------------------------------------------

Pods = list[v1_pb2.PodResources]


@injects
async def lists(site: Site, change: Callable[[Pods], object]) -> AsyncIterator[None]:
    """The true List, changed."""
    true = v1_pb2.ListPodResourcesResponse.FromString(true_list(site))
    pods = sorted(true.pod_resources, key=lambda pod: pod.name)
    change(pods)
    answer = v1_pb2.ListPodResourcesResponse(pod_resources=pods).SerializeToString()
    async with misbehaves(Raw(answer.replace(PLACEHOLDER.encode(), NOT_UTF8)))(site):
        yield


PLACEHOLDER, NOT_UTF8 = "@@", b"\xff\xfe"


def of(name: str, pods: Pods) -> v1_pb2.PodResources:
    return next(pod for pod in pods if pod.name == name)


def assign(pods: Pods, name: str, *ids: str, resource: str = WHOLE) -> None:
    """Give a pod's container more devices."""
    of(name, pods).containers[0].devices.add(resource_name=resource, device_ids=ids)


def repeat_containers(pods: Pods) -> None:
    for pod in pods:
        pod.containers.extend(list(pod.containers))


def other_pod(pods: Pods, name: str, *ids: str) -> None:
    devices = v1_pb2.ContainerDevices(resource_name=WHOLE, device_ids=ids)
    container = v1_pb2.ContainerResources(name="main", devices=[devices])
    pods.append(v1_pb2.PodResources(namespace="ml", name=name, containers=[container]))


@contextlib.asynccontextmanager
async def leaves_out_a_pod_now_and_then(site: Site) -> AsyncIterator[None]:
    """Every second List is without the pod that uses GPU 1."""
    kubelet = site.node.kubelet

    async def take_turns() -> None:
        while True:
            calls = kubelet.calls[fake.LIST]
            site.node.update_kubelet(listed=[pod for pod in site.node.pods if calls % 2 or pod.name != "whole"])
            await kubelet.called(times=calls + 1)

    task = asyncio.create_task(take_turns())
    yield
    task.cancel()
    site.node.update_kubelet()


ODD_NAME = "source complains source=kubelet reason=odd_name detail=…"
LIES = (
    up_fault("List has each pod twice", lists(lambda pods: pods.extend(list(pods))), *AS_BEFORE),
    up_fault("List has each container of a pod twice", lists(repeat_containers), *AS_BEFORE),
    up_fault(
        "List assigns an exclusive GPU to a second pod",
        lists(lambda pods: assign(pods, "idle", gpu_uuid(1))),
        f'gpumap_device_holders{{uuid="{gpu_uuid(1)}"}} 2',
        f'gpumap_container_allocated_gpus{{uuid="{gpu_uuid(1)}"}} 0.5',
        'gpumap_container_gpu_memory_used_bytes{pod="whole"} unchanged',
        "gpumap_container_unassigned_use unchanged",
    ),
    up_fault(
        "List assigns a GPU that the driver does not know",
        lists(lambda pods: assign(pods, "idle", gpu_uuid(9))),
        *AS_BEFORE[:1],
        'gpumap_unmatched_slots{pod="idle",reason="not_in_nvml"} 1',
        *AS_BEFORE[3:],
    ),
    up_fault(
        "List has a device id that is not UTF-8",
        lists(lambda pods: assign(pods, "idle", "GPU-@@")),
        *AS_BEFORE[:1],
        'gpumap_unmatched_slots{pod="idle",reason="unparsed"} 1',
        *AS_BEFORE[3:],
        metrics=(counts("kubelet", "odd_name"),),
        log=(ODD_NAME,),
    ),
    up_fault(
        "List has a pod with a line end and a quote in its name",
        lists(lambda pods: other_pod(pods, 'a"\nb', gpu_uuid(9))),
        *AS_BEFORE[:1],
        r'gpumap_unmatched_slots{pod="a\"\nb"} 1',
        *AS_BEFORE[3:],
        metrics=(counts("kubelet", "odd_name"),),
        log=(ODD_NAME,),
    ),
    up_fault(
        "List has a pod with a name of 10 MB",
        lists(lambda pods: other_pod(pods, "x" * 10_000_000, gpu_uuid(9))),
        *AS_BEFORE[:1],
        'gpumap_unmatched_slots{reason="not_in_nvml"} 1',
        *AS_BEFORE[3:],
        metrics=(counts("kubelet", "odd_name"),),
        log=(f"{ODD_NAME}10000000 characters",),
    ),
    up_fault(
        "List is empty, while pods run",
        lists(lambda pods: pods.clear()),
        "gpumap_allocation_info absent",
        "gpumap_container_allocated_gpus absent",
        "gpumap_container_unassigned_use absent",
        "gpumap_container_gpu_memory_used_bytes absent",
        'gpumap_device_memory_used_by_owner_bytes{owner="gone"} 0',
        recovers=ACCUSES_AGAIN,
    ),
    up_fault(
        "List leaves out a pod with a running process",
        lists(lambda pods: pods.remove(of("whole", pods))),
        'gpumap_allocation_info{pod="whole"} absent',
        f'gpumap_device_memory_used_by_owner_bytes{{uuid="{gpu_uuid(1)}",owner="gone"}} 11811160064',
        'gpumap_allocation_info{pod="idle"} unchanged',
        "gpumap_container_unassigned_use unchanged",
    ),
    up_fault(
        "List leaves out a pod with a running process, every second time",
        leaves_out_a_pod_now_and_then,
        'gpumap_device_memory_used_by_owner_bytes{owner="gone"} 0',
        'gpumap_allocation_info{pod="idle"} unchanged',
        "gpumap_container_unassigned_use unchanged",
        looks=5,
    ),
)

# --- what plugins offer -----------------------------------------------------------------------------------------------

SAME_BUT_OFFER = (
    "gpumap_allocation_info unchanged",
    "gpumap_container_gpu_memory_used_bytes unchanged",
    "gpumap_container_unassigned_use unchanged",
)
OFFER = (
    up_fault(
        "GetAllocatableResources never answers",
        misbehaves(Hang(), methods=(fake.ALLOCATABLE,)),
        "gpumap_device_slots_allocatable absent",
        *SAME_BUT_OFFER,
        metrics=(counts("kubelet", "allocatable_deadline_exceeded"),),
        log=("source complains source=kubelet reason=allocatable_deadline_exceeded",),
        start=IMPATIENT,
    ),
    up_fault(
        "GetAllocatableResources answers bytes that are no protobuf",
        misbehaves(Raw(b"\xff" * 64), methods=(fake.ALLOCATABLE,)),
        "gpumap_device_slots_allocatable absent",
        *SAME_BUT_OFFER,
        metrics=(counts("kubelet", "allocatable_decode"),),
        log=("source complains source=kubelet reason=allocatable_decode",),
    ),
    up_fault(
        "GetAllocatableResources is refused for an internal error",
        misbehaves(Refuse(grpc.StatusCode.INTERNAL, "panic"), methods=(fake.ALLOCATABLE,)),
        "gpumap_device_slots_allocatable absent",
        *SAME_BUT_OFFER,
        metrics=(counts("kubelet", "allocatable_internal"),),
        log=("source complains source=kubelet reason=allocatable_internal",),
    ),
    up_fault(
        "GetAllocatableResources is empty: no plugin has registered",
        misbehaves(Raw(b""), methods=(fake.ALLOCATABLE,)),
        "gpumap_device_slots_allocatable 0",
        *SAME_BUT_OFFER,
    ),
)

FAULTS = (*SOCKET, *ANSWER, *LIES, *OFFER)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_the_kubelet(fault: Fault, sites: Sites) -> None:
    """The page, the self-metrics and the log are as the row says, and the next collection is as before."""
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)
