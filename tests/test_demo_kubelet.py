"""The fake kubelet answers over its socket what a kubelet answers, and fails as one fails."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from gpumap.agent._proto.podresources import v1_pb2, v1alpha1_pb2
from gpumap.lab.demo import kubelet as fake
from gpumap.lab.demo.kubelet import FakeKubelet
from gpumap.model.observations import ClaimDevice, DeviceId, ListedContainer, ListedPod, ResourceDevices

M = TypeVar("M", bound=Message)

PATIENCE_SECONDS = 300.0
"""On a machine that is busy with other work."""
IDS = tuple(DeviceId(f"GPU-{n}") for n in range(12))
DEVICES = ResourceDevices("nvidia.com/gpu", IDS)
CLAIM = ClaimDevice("gpu.nvidia.com", "demo-node", "gpu-3")
PODS = tuple(
    ListedPod("ml", f"pod-{n}", (ListedContainer("c", (DEVICES,) if n == 0 else (), (CLAIM,) if n == 1 else ()),))
    for n in range(12)
)


@pytest.fixture(name="kubelet")
async def start_kubelet(tmp_path: Path) -> AsyncIterator[FakeKubelet]:
    async with FakeKubelet(tmp_path / "k" / "kubelet.sock") as kubelet:
        kubelet.set_pods(PODS)
        kubelet.set_allocatable([DEVICES])
        yield kubelet


@pytest.fixture(name="channel")
async def open_channel(kubelet: FakeKubelet) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 4 << 20)]
    async with grpc.aio.insecure_channel(f"unix:{kubelet.socket_path}", options=options) as channel:
        yield channel


async def ask(
    channel: grpc.aio.Channel, method: str, request: Message, answer: type[M], timeout_seconds: float = PATIENCE_SECONDS
) -> M:
    call: grpc.aio.UnaryUnaryMultiCallable[Message, M] = channel.unary_unary(
        method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
    )
    return await call(request, timeout=timeout_seconds)


async def list_v1(
    channel: grpc.aio.Channel, timeout_seconds: float = PATIENCE_SECONDS
) -> v1_pb2.ListPodResourcesResponse:
    request = v1_pb2.ListPodResourcesRequest()
    return await ask(channel, fake.LIST, request, v1_pb2.ListPodResourcesResponse, timeout_seconds)


async def allocatable(channel: grpc.aio.Channel) -> v1_pb2.AllocatableResourcesResponse:
    request = v1_pb2.AllocatableResourcesRequest()
    return await ask(channel, fake.ALLOCATABLE, request, v1_pb2.AllocatableResourcesResponse)


async def get(channel: grpc.aio.Channel, name: str) -> v1_pb2.GetPodResourcesResponse:
    request = v1_pb2.GetPodResourcesRequest(pod_name=name, pod_namespace="ml")
    return await ask(channel, fake.GET, request, v1_pb2.GetPodResourcesResponse)


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_answers_are_shuffled(kubelet: FakeKubelet, channel: grpc.aio.Channel) -> None:
    """Each List has the same pods and devices, in another order."""
    answers = [await list_v1(channel) for _ in range(4)]
    names = [[pod.name for pod in answer.pod_resources] for answer in answers]
    assert all(sorted(names[0]) == sorted(other) for other in names)
    assert len({tuple(other) for other in names}) > 1
    devices = next(pod for pod in answers[0].pod_resources if pod.name == "pod-0").containers[0].devices
    assert sorted(entry.device_ids[0] for entry in devices) == sorted(IDS)
    assert all(len(entry.device_ids) == 1 for entry in devices)
    assert kubelet.calls[fake.LIST] == 4


async def test_a_device_stands_once_per_numa_node(kubelet: FakeKubelet, channel: grpc.aio.Channel) -> None:
    """Node 0 is an empty node, a device with two nodes is told twice, one without topology has none."""
    kubelet.set_numa({IDS[0]: (0,), IDS[1]: (0, 1)})
    answer = await allocatable(channel)
    by_id: dict[str, list[list[int]]] = {}
    for entry in answer.devices:
        by_id.setdefault(entry.device_ids[0], []).append([node.ID for node in entry.topology.nodes])
    assert by_id[IDS[0]] == [[0]]
    assert sorted(by_id[IDS[1]]) == [[0], [1]]
    assert by_id[IDS[2]] == [[]]


async def test_claims_are_dynamic_resources(channel: grpc.aio.Channel) -> None:
    """A DRA device stands in dynamic_resources by driver, pool and name."""
    pod = next(pod for pod in (await list_v1(channel)).pod_resources if pod.name == "pod-1")
    device = pod.containers[0].dynamic_resources[0].claim_resources[0]
    assert (device.driver_name, device.pool_name, device.device_name) == ("gpu.nvidia.com", "demo-node", "gpu-3")


async def test_the_old_version_answers_too(channel: grpc.aio.Channel) -> None:
    """v1alpha1 lists the same pods, without topology."""
    request = v1alpha1_pb2.ListPodResourcesRequest()
    answer = await ask(channel, fake.LIST_V1ALPHA1, request, v1alpha1_pb2.ListPodResourcesResponse)
    assert sorted(pod.name for pod in answer.pod_resources) == sorted(pod.name for pod in PODS)


async def test_get_knows_one_pod(channel: grpc.aio.Channel) -> None:
    """Get tells a pod, or fails with UNKNOWN as kubelets do."""
    assert (await get(channel, "pod-0")).pod_resources.name == "pod-0"
    assert await refusal(get(channel, "x")) == (grpc.StatusCode.UNKNOWN, "pod x in namespace ml not found")


async def test_a_rate_limit_passes(kubelet: FakeKubelet, channel: grpc.aio.Channel) -> None:
    """It rejects as often as it was told to, and then answers."""
    kubelet.misbehave(fake.RATE_LIMITED, times=2)
    for _ in range(2):
        assert await refusal(list_v1(channel)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "rejected by rate limit",
        )
    assert len((await list_v1(channel)).pod_resources) == len(PODS)


async def test_old_kubelets_do_not_know_v1(kubelet: FakeKubelet, channel: grpc.aio.Channel) -> None:
    """A kubelet before 1.20 answers in Go's words, not in Python's."""
    kubelet.versions = frozenset({"v1alpha1"})
    assert await refusal(list_v1(channel)) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "unknown service v1.PodResourcesLister",
    )


@pytest.mark.parametrize("behaviour", [fake.NO_ALLOCATABLE, fake.ALLOCATABLE_DISABLED])
async def test_allocatable_may_be_missing(
    kubelet: FakeKubelet, channel: grpc.aio.Channel, behaviour: fake.Refuse
) -> None:
    """One method fails in a kubelet's words while the others answer."""
    kubelet.misbehave(behaviour, fake.ALLOCATABLE)
    assert await refusal(allocatable(channel)) == (behaviour.code, behaviour.details)
    assert len((await list_v1(channel)).pod_resources) == len(PODS)


async def test_it_can_hang_send_rubbish_and_be_huge(kubelet: FakeKubelet, channel: grpc.aio.Channel) -> None:
    """A hang ends at the caller's deadline; bytes go out as they are; a padded answer is too big for the default."""
    kubelet.misbehave(fake.Hang())
    assert (await refusal(list_v1(channel, 0.2)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(fake.LIST)
    kubelet.misbehave(fake.Raw(b"\xff\xff"))
    assert await raw(b"", timeout=PATIENCE_SECONDS) == b"\xff\xff"
    kubelet.misbehave(fake.Pad(1000))
    assert len((await list_v1(channel)).pod_resources) == len(PODS)
    kubelet.misbehave(fake.Pad(5 << 20))
    code, details = await refusal(list_v1(channel))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in details
    kubelet.behave()
    assert len((await list_v1(channel)).pod_resources) == len(PODS)


async def test_a_restart_makes_a_new_socket(kubelet: FakeKubelet) -> None:
    """A stopped kubelet's socket stays and refuses if asked to; the next one has another inode and serves."""
    before = kubelet.socket_path.stat()
    await kubelet.stop(leave_socket=True)
    assert kubelet.socket_path.is_socket()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_unix_connection(kubelet.socket_path)
    await kubelet.start()
    assert (kubelet.socket_path.stat().st_ino, kubelet.socket_path.stat().st_ctime_ns) != (
        before.st_ino,
        before.st_ctime_ns,
    )
    assert [path.name for path in kubelet.socket_path.parent.iterdir()] == ["kubelet.sock"]
    async with grpc.aio.insecure_channel(f"unix:{kubelet.socket_path}") as channel:
        assert len((await list_v1(channel)).pod_resources) == len(PODS)
    await kubelet.stop()
    assert not kubelet.socket_path.exists()


async def test_a_hanging_call_does_not_keep_it_from_stopping(kubelet: FakeKubelet, channel: grpc.aio.Channel) -> None:
    """Stop cuts off calls that are under way."""
    kubelet.misbehave(fake.Hang())
    call = asyncio.create_task(list_v1(channel))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await kubelet.called(fake.LIST)
        await kubelet.stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await call
