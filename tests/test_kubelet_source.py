"""The kubelet source over a real gRPC server on a Unix socket: answers, versions, every error, restarts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from google.protobuf.message import Message

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.agent.sources import podresources
from gpumap.agent.sources.kubelet import KubeletSource
from gpumap.lab.demo import kubelet as fake
from gpumap.model.observations import ClaimDevice, DeviceId, ListedContainer, ListedPod, ResourceDevices, SourceError
from tests.kubelet import ALLOCATABLE_DISABLED, FakeKubelet, Raw

CAPTURES = Path(__file__).parent / "captures"
PODS = [
    ListedPod(
        "ml",
        f"pod-{number}",
        (
            ListedContainer(
                "main", (ResourceDevices("nvidia.com/gpu", tuple(DeviceId(f"GPU-{number}-{n}") for n in range(4))),)
            ),
            ListedContainer("side"),
        ),
    )
    for number in range(5)
]
OFFERED = [ResourceDevices("nvidia.com/gpu", (DeviceId("GPU-0-0"), DeviceId("GPU-0-1")))]


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[FakeKubelet]:
    """A kubelet with pods and an offer."""
    async with FakeKubelet(tmp_path / "kubelet.sock") as running:
        running.set_pods(PODS)
        running.set_allocatable(OFFERED)
        yield running


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[KubeletSource]:
    """A source at the same socket."""
    made = KubeletSource(tmp_path / "kubelet.sock")
    yield made
    await made.close()


async def reason(source: KubeletSource, timeout_seconds: float = 5.0) -> str:
    """The reason that a read fails for."""
    with pytest.raises(SourceError) as caught:
        await source.read(timeout_seconds)
    return caught.value.complaints[-1].reason


async def test_list_is_sorted_and_has_each_id_once(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """The answer is in order whatever the kubelet's, with one entry per resource; NUMA repetitions are one id."""
    kubelet.set_numa({DeviceId("GPU-0-0"): (0, 1)})
    answer = await source.read(5.0)
    assert list(answer.value.pods) == PODS
    assert answer.value.allocatable == tuple(OFFERED)
    assert answer.complaints == ()


async def test_unchanged_content_is_the_very_same_object(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """Shuffled answers with one content give one object, so that nothing after it is done again."""
    answers = [(await source.read(5.0)).value for _ in range(10)]
    assert all(answer.pods is answers[0].pods for answer in answers)
    assert all(answer.allocatable is answers[0].allocatable for answer in answers)
    kubelet.set_pods(PODS[:-1])
    assert (await source.read(5.0)).value.pods == tuple(PODS[:-1])


async def test_reads_that_are_far_apart_keep_no_channel(kubelet: FakeKubelet) -> None:
    """Each of them connects again, and returns the same object while nothing changed."""
    source = KubeletSource(kubelet.socket_path, idle_seconds=0.0)
    try:
        answers = [(await source.read(5.0)).value for _ in range(4)]
        assert source._channel is None
        assert all(answer.pods is answers[0].pods for answer in answers)
    finally:
        await source.close()


async def test_claims_are_listed_with_their_names(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """Devices of DRA claims come by driver, pool, device and share, with the claim that they are of."""
    claims = (
        ClaimDevice("compute-domain.nvidia.com", "node", "channel-0", "", "ml", "domain"),
        ClaimDevice("gpu.nvidia.com", "node", "gpu-0", "", "ml", "dra-gpus-x7k2p"),
        ClaimDevice("gpu.nvidia.com", "node", "gpu-1", "6b0f", "ml", "dra-shares"),
        ClaimDevice("gpu.nvidia.com", "node", "gpu-1", "91c4", "ml", "dra-shares"),
    )
    kubelet.set_pods([ListedPod("ml", "dra", (ListedContainer("main", (), claims),))])
    answer = await source.read(5.0)
    assert answer.value.pods[0].containers[0].claims == claims
    assert answer.complaints == ()


def list_answer(*containers: v1_pb2.ContainerResources, pod: str = "dra") -> Raw:
    """A List of one pod, as bytes that no fake would think of."""
    listed = v1_pb2.PodResources(namespace="ml", name=pod, containers=containers)
    return Raw(v1_pb2.ListPodResourcesResponse(pod_resources=[listed]).SerializeToString())


def claim_entry(devices: Iterable[int], *, cdi_characters: int = 10) -> v1_pb2.DynamicResource:
    """A claim entry with these GPUs, in the order and as often as they are given."""
    resources = [
        v1_pb2.ClaimResource(
            cdi_devices=[v1_pb2.CDIDevice(name=f"{turn:06}".ljust(cdi_characters, "c"))],
            driver_name="gpu.nvidia.com",
            pool_name="node",
            device_name=f"gpu-{number}",
        )
        for turn, number in enumerate(devices)
    ]
    return v1_pb2.DynamicResource(claim_namespace="ml", claim_name="eight", claim_resources=resources)


EIGHT = tuple(ClaimDevice("gpu.nvidia.com", "node", f"gpu-{number}", "", "ml", "eight") for number in range(8))


async def test_claim_that_grows_without_end_is_read_whole(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """A claim of 8 devices listed 60,000 times over, 17.8 MB as once seen, is 8 devices and one complaint."""
    grown = list_answer(
        v1_pb2.ContainerResources(
            name="main", dynamic_resources=[claim_entry((turn % 8 for turn in range(60_000)), cdi_characters=259)]
        )
    )
    assert len(grown.answer) >= 17_800_000
    kubelet.misbehave(grown)
    for _ in range(2):  # also where the answer is unchanged, and not decoded again
        answer = await source.read(30.0)
        assert answer.value.pods[0].containers[0].claims == EIGHT
        assert [complaint.reason for complaint in answer.complaints] == ["duplicate_claims"]
        assert "7500 times" in answer.complaints[0].detail
        assert "ml/dra" in answer.complaints[0].detail
    assert not any(len(kept) > 1 << 16 for kept in source._known._decoded), "its bytes are not kept in every order"
    kubelet.misbehave(
        list_answer(v1_pb2.ContainerResources(name="main", dynamic_resources=[claim_entry(range(8))])),
    )
    mended = await source.read(5.0)
    assert mended.value.pods is answer.value.pods, "the devices are the same"
    assert mended.complaints == ()


def test_decoding_costs_each_entry_once() -> None:
    """The work for a claim that repeats its devices grows with its entries, not with their square."""

    def lines(count: int) -> int:
        """Lines of gpumap's that run while so many entries are decoded."""
        counted = 0

        def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            nonlocal counted
            counted += event == "line" and frame.f_code.co_filename == podresources.__file__
            return trace

        entry = claim_entry(turn % 8 for turn in range(count))
        chunk = v1_pb2.PodResources(containers=[v1_pb2.ContainerResources(dynamic_resources=[entry])])
        raw = chunk.SerializeToString()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            podresources.decode_pod(raw)
        finally:
            sys.settrace(before)
        return counted

    assert lines(16_000) <= 2 * lines(8_000)


async def test_container_with_two_requests_of_a_claim_repeats_nothing(
    kubelet: FakeKubelet, source: KubeletSource
) -> None:
    """Kubelets list a claim once for each request that a container takes of it: the same claim twice is no fault."""
    entries = [claim_entry(range(8)), claim_entry(range(8))]
    kubelet.misbehave(list_answer(v1_pb2.ContainerResources(name="main", dynamic_resources=entries)))
    answer = await source.read(5.0)
    assert answer.value.pods[0].containers[0].claims == EIGHT
    assert answer.complaints == ()


async def test_pods_that_share_a_claim_and_start_together_are_no_fault(
    kubelet: FakeKubelet, source: KubeletSource
) -> None:
    """Kubelet 1.36.2 lists the device of a shared claim twice then, for each of its pods: no source has an error."""
    answers = CAPTURES / "dra-shared-claim" / "kubelet" / "list.pb"
    kubelet.misbehave(Raw(answers.read_bytes()))
    answer = await source.read(5.0)
    claims = [claim for pod in answer.value.pods for container in pod.containers for claim in container.claims]
    assert claims
    assert answer.complaints == ()


NOT_UTF8 = b"GPU-\xff\xfe"


def with_bytes(message: Message, placeholder: str) -> bytes:
    """A message as bytes, in which a text of the same length is not UTF-8."""
    data = message.SerializeToString()
    assert placeholder.encode() in data
    return data.replace(placeholder.encode(), NOT_UTF8)


async def test_an_id_that_is_not_utf8_costs_only_itself(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """A plugin of any vendor may register one. All pods stay, and the id is spelled out, with a complaint."""
    odd = v1_pb2.ContainerDevices(resource_name="example.com/npu", device_ids=["GPU-@@", "npu-1"])
    gpu = v1_pb2.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=["GPU-0"])
    pods = [
        v1_pb2.PodResources(
            namespace="ml", name="npu", containers=[v1_pb2.ContainerResources(name="main", devices=[odd, gpu])]
        ),
        v1_pb2.PodResources(
            namespace="ml", name="gpu", containers=[v1_pb2.ContainerResources(name="main", devices=[gpu])]
        ),
    ]
    kubelet.misbehave(Raw(with_bytes(v1_pb2.ListPodResourcesResponse(pod_resources=pods), "GPU-@@")))
    answer = await source.read(5.0)
    held = ResourceDevices("nvidia.com/gpu", (DeviceId("GPU-0"),))
    spelled = ResourceDevices("example.com/npu", (DeviceId(r"GPU-\xff\xfe"), DeviceId("npu-1")))
    assert answer.value.pods == (
        ListedPod("ml", "gpu", (ListedContainer("main", (held,)),)),
        ListedPod("ml", "npu", (ListedContainer("main", (spelled, held)),)),
    )
    assert [tuple(one) for one in answer.complaints] == [("odd_name", r"a name that is not UTF-8: GPU-\xff\xfe")]


def test_an_offered_id_that_is_not_utf8_costs_only_itself() -> None:
    allocatable = v1_pb2.AllocatableResourcesResponse(
        devices=[v1_pb2.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=["GPU-@@", "GPU-1"])]
    )
    (offered,) = podresources.decode_allocatable(with_bytes(allocatable, "GPU-@@"))
    assert offered.ids == ("GPU-1", r"GPU-\xff\xfe")


async def test_a_large_answer_is_decoded_outside_the_event_loop(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """An answer of 18 MB held the event loop for 0.9 s, and with it every scrape."""
    threads = set[int]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is podresources.decode_pod.__code__:
            threads.add(threading.get_ident())

    entry = claim_entry((turn % 8 for turn in range(8)), cdi_characters=1 << 14)
    kubelet.misbehave(list_answer(v1_pb2.ContainerResources(name="main", dynamic_resources=[entry])))
    threading.setprofile(note)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        await source.read(5.0)
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    assert threads
    assert threading.get_ident() not in threads


class SlowDecoding:
    """Lets no thread decode a pod before `go`; notes how many threads were at it at once."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.at_once = 0
        self._threads = set[int]()

    def __enter__(self) -> SlowDecoding:
        threading.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is not podresources.decode_pod.__code__:
            return
        if event == "call":
            self._threads.add(threading.get_ident())
            self.at_once = max(self.at_once, len(self._threads))
            self.begun.set()
            self.go.wait(60.0)
        elif event == "return":
            self._threads.discard(threading.get_ident())


def large(pod: str) -> Raw:
    entry = claim_entry((turn % 8 for turn in range(8)), cdi_characters=1 << 14)
    return list_answer(v1_pb2.ContainerResources(name="main", dynamic_resources=[entry]), pod=pod)


@pytest.mark.parametrize("is_large", [True, False])
async def test_an_abandoned_answer_is_never_published(
    kubelet: FakeKubelet, source: KubeletSource, is_large: bool
) -> None:
    """Decoding ends with the deadline. It goes on in its own thread, and its result is dropped."""
    newer = large("newer") if is_large else list_answer(v1_pb2.ContainerResources(name="main"), pod="newer")
    with SlowDecoding() as decoding:
        kubelet.misbehave(large("older"))
        assert await asyncio.wait_for(reason(source, 1.0), 30.0) == "deadline_exceeded"
        assert decoding.begun.is_set()
        kubelet.misbehave(newer)
        if is_large:
            assert await asyncio.wait_for(reason(source, 1.0), 30.0) == "deadline_exceeded"
        decoding.go.set()
        for _ in range(3):
            assert [pod.name for pod in (await source.read(30.0)).value.pods] == ["newer"]
    assert decoding.at_once == 1


async def test_claims_of_kubelets_that_name_no_device(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """Before 1.31 a claim's entries have only CDI names: the claim is reported, and nothing is called a repetition."""
    nameless = [v1_pb2.ClaimResource(cdi_devices=[v1_pb2.CDIDevice(name=name)]) for name in "abc"]
    entry = v1_pb2.DynamicResource(claim_namespace="ml", claim_name="old", claim_resources=nameless)
    kubelet.misbehave(list_answer(v1_pb2.ContainerResources(name="main", dynamic_resources=[entry])))
    answer = await source.read(5.0)
    assert answer.value.pods[0].containers[0].claims == (ClaimDevice("", "", "", "", "ml", "old"),)
    assert answer.complaints == ()


@pytest.mark.parametrize(
    ("container", "shown"),
    [
        (
            v1_pb2.ContainerResources(name="a\x1b[31mb"),
            r"a container with characters that are not printable: a\x1b[31mb",
        ),
        (v1_pb2.ContainerResources(name="c" * 254), f"a container of 254 characters: {'c' * 80}…"),
        (
            v1_pb2.ContainerResources(
                name="main", devices=[v1_pb2.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=["a\nb"])]
            ),
            r"a device id with characters that are not printable: a\nb",
        ),
        (
            v1_pb2.ContainerResources(
                name="main", devices=[v1_pb2.ContainerDevices(resource_name="r" * 318, device_ids=["a"])]
            ),
            f"a resource of 318 characters: {'r' * 80}…",
        ),
    ],
)
async def test_odd_names_are_kept_and_reported(
    kubelet: FakeKubelet, source: KubeletSource, container: v1_pb2.ContainerResources, shown: str
) -> None:
    """A name that no Kubernetes gives stays what it is, with one complaint a read as long as it is listed."""
    kubelet.misbehave(list_answer(container))
    for _ in range(3):
        answer = await source.read(5.0)
        assert [tuple(complaint) for complaint in answer.complaints] == [("odd_name", shown)]
    assert answer.value.pods[0].containers[0].name == container.name
    kubelet.behave()
    assert (await source.read(5.0)).complaints == ()


@pytest.mark.parametrize(("others", "more"), [(1, ", and in 1 more pod"), (2, ", and in 2 more pods")])
def test_odd_names_of_several_pods_are_one_complaint(others: int, more: str) -> None:
    pods = [v1_pb2.PodResources(namespace="ml", name=f"{n}\n").SerializeToString() for n in range(others + 1)]
    (answer,) = podresources.complaints_of([podresources.decode_pod(pod) for pod in pods])
    assert answer.detail == rf"a pod with characters that are not printable: 0\n{more}"


async def test_long_names_that_kubernetes_allows_are_not_odd(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """253 characters of a pod's name, 317 of a resource's, and letters of any script, are names."""
    device = v1_pb2.ContainerDevices(resource_name="r" * 317, device_ids=["ä" * 253])
    kubelet.misbehave(list_answer(v1_pb2.ContainerResources(name="main", devices=[device]), pod="p" * 253))
    assert (await source.read(5.0)).complaints == ()


async def test_kubelet_before_1_20_is_queried_in_v1alpha1(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """Where v1 is unknown the older version answers, and nothing is said of what is allocatable."""
    kubelet.versions = frozenset({"v1alpha1"})
    answer = await source.read(5.0)
    assert (list(answer.value.pods), answer.value.allocatable) == (PODS, None)
    await source.read(5.0)
    assert kubelet.calls[fake.LIST] == 1, "it is not asked in v1 again until it restarts"


@pytest.mark.parametrize("refusal", [fake.NO_ALLOCATABLE, ALLOCATABLE_DISABLED])
async def test_kubelet_without_allocatable_is_queried_once(
    kubelet: FakeKubelet, source: KubeletSource, refusal: fake.Refuse
) -> None:
    """A kubelet that does not have the method, or has its gate off, is asked for it once, and it is no complaint."""
    kubelet.misbehave(refusal, fake.ALLOCATABLE)
    answer = [await source.read(5.0) for _ in range(3)]
    assert [(one.value.allocatable, one.complaints) for one in answer] == [(None, ())] * 3
    assert all(one.value.may_leave_out_devices for one in answer), "it is older than 1.23"
    assert kubelet.calls[fake.ALLOCATABLE] == 1


async def test_restart_gives_a_new_socket_identity(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """A socket recreated is another one, even between two reads that both succeed."""
    before = (await source.read(5.0)).value.socket
    await kubelet.stop(leave_socket=True)
    await kubelet.start()
    after = (await source.read(5.0)).value.socket
    assert before
    assert after
    assert before != after


async def test_waiting_for_a_kubelet_that_answers_never_ends(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """After an answer there is nothing to wait for: only the interval decides."""
    await source.read(5.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(source.wait_until_back(), 1.3)


FORK = """
import asyncio, os, sys
from pathlib import Path
from gpumap.agent.sources.kubelet import KubeletSource
from gpumap.model.observations import SourceError

async def main():
    try:
        await KubeletSource(Path("/nowhere/kubelet.sock")).read(5.0)
    except SourceError:
        pass
    import grpc.aio
    channel = grpc.aio.insecure_channel("unix:/nowhere/kubelet.sock")
    before, quiet_reads = set(), 0
    while quiet_reads < 10:  # on a busy machine, threads of the start end only now
        await asyncio.sleep(0.02)
        threads = set(os.listdir("/proc/self/task"))
        before, quiet_reads = threads, quiet_reads + 1 if threads == before else 0
    assert len(before) > 4, before
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    kept = before & set(os.listdir("/proc/self/task"))  # one or another may have ended by itself
    sys.exit(0 if len(kept) > len(before) / 2 else f"gRPC has kept {len(kept)} of its {len(before)} threads")

asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads by /proc")
def test_a_fork_does_not_end_the_threads_of_grpc() -> None:
    """By default gRPC ends its threads before a fork, and aborts the process if it cannot start them again."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    ended = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
