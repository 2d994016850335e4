"""The kubelet source over a real gRPC server on a Unix socket: answers, versions, every error, restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from gpumap.demo import kubelet as fake
from gpumap.demo.kubelet import FakeKubelet
from gpumap.model import ClaimDevice, DeviceId, ListedContainer, ListedPod, ResourceDevices, SourceError
from gpumap.sources.kubelet import KubeletSource
from tests.privileges import as_ordinary_user, open_folder

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


async def test_list_is_sorted_and_each_id_stands_once(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """The answer is in order whatever the kubelet's, with one entry per resource; NUMA repetitions are one id."""
    kubelet.set_numa({DeviceId("GPU-0-0"): (0, 1)})
    told = await source.read(5.0)
    assert list(told.value.pods) == PODS
    assert told.value.allocatable == tuple(OFFERED)
    assert told.complaints == ()


async def test_unchanged_content_is_the_very_same_object(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """Shuffled answers with one content give one object, so that nothing after it is done again."""
    answers = [(await source.read(5.0)).value for _ in range(10)]
    assert all(answer.pods is answers[0].pods for answer in answers)
    assert all(answer.allocatable is answers[0].allocatable for answer in answers)
    kubelet.set_pods(PODS[:-1])
    assert (await source.read(5.0)).value.pods == tuple(PODS[:-1])


async def test_reads_that_are_far_apart_keep_no_channel(kubelet: FakeKubelet) -> None:
    """Each of them connects anew, and tells the same object while nothing changed."""
    source = KubeletSource(kubelet.socket_path, idle_seconds=0.0)
    try:
        answers = [(await source.read(5.0)).value for _ in range(4)]
        assert source._channel is None
        assert all(answer.pods is answers[0].pods for answer in answers)
    finally:
        await source.close()


async def test_claims_are_listed_once_each(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """Devices of DRA claims come by driver, pool, device and share."""
    claim = ClaimDevice("gpu.nvidia.com", "node", "gpu-0")
    kubelet.set_pods([ListedPod("ml", "dra", (ListedContainer("main", (), (claim,)),))])
    told = await source.read(5.0)
    assert told.value.pods[0].containers[0].claims == (claim,)


async def test_kubelet_before_1_20_is_asked_in_v1alpha1(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """Where v1 is unknown the older version answers, and nothing is said of what is allocatable."""
    kubelet.versions = frozenset({"v1alpha1"})
    told = await source.read(5.0)
    assert (list(told.value.pods), told.value.allocatable) == (PODS, None)
    await source.read(5.0)
    assert kubelet.calls[fake.LIST] == 1, "it is not asked in v1 again until it restarts"


@pytest.mark.parametrize("refusal", [fake.NO_ALLOCATABLE, fake.ALLOCATABLE_DISABLED])
async def test_kubelet_without_allocatable_is_asked_once(
    kubelet: FakeKubelet, source: KubeletSource, refusal: fake.Refuse
) -> None:
    """A kubelet that does not have the method, or has its gate off, is asked for it once, and it is no complaint."""
    kubelet.misbehave(refusal, fake.ALLOCATABLE)
    told = [await source.read(5.0) for _ in range(3)]
    assert [(one.value.allocatable, one.complaints) for one in told] == [(None, ())] * 3
    assert kubelet.calls[fake.ALLOCATABLE] == 1


async def test_empty_allocatable_is_unknown(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """After a restart no plugin has registered: nothing offered means nothing known."""
    kubelet.set_allocatable([])
    assert (await source.read(5.0)).value.allocatable is None


async def test_failing_allocatable_does_not_cost_the_list(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """An error of the second call is a complaint; the List stands."""
    kubelet.misbehave(fake.Refuse(grpc.StatusCode.INTERNAL, "broken"), fake.ALLOCATABLE)
    told = await source.read(5.0)
    assert list(told.value.pods) == PODS
    assert [complaint.reason for complaint in told.complaints] == ["allocatable_internal"]


async def test_rate_limit_is_waited_out(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """A refusal for the rate, shared with every other client, is tried again within the deadline."""
    kubelet.misbehave(fake.RATE_LIMITED, times=2)
    told = await source.read(5.0)
    assert list(told.value.pods) == PODS
    assert [complaint.reason for complaint in told.complaints] == ["rate_limited", "rate_limited"]


async def test_rate_limit_for_longer_than_the_deadline_fails(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """Where the limit outlasts the deadline that is the reason, not the deadline."""
    kubelet.misbehave(fake.RATE_LIMITED)
    assert await reason(source, 0.5) == "rate_limited"


async def test_too_large_an_answer_is_told_from_a_rate_limit(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """Both come as RESOURCE_EXHAUSTED; 17.8 MB, as once seen, are taken, more than 64 MiB are not."""
    kubelet.misbehave(fake.Pad(18_000_000), times=1)
    assert len((await source.read(5.0)).value.pods) == len(PODS)
    kubelet.misbehave(fake.Pad(65 << 20), times=1)
    assert await reason(source, 10.0) == "message_too_large"


async def test_hanging_kubelet_costs_the_deadline(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """A kubelet that never answers fails at the deadline, and the next read is well."""
    kubelet.misbehave(fake.Hang(), times=1)
    assert await reason(source, 0.3) == "deadline_exceeded"
    assert len((await source.read(5.0)).value.pods) == len(PODS)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (fake.Raw(b"\xff\xff\xff"), "decode"),
        (fake.Raw(b"\x0a\x03\x0a\x01\xff"), "decode"),
        (fake.Refuse(grpc.StatusCode.INTERNAL, "boom"), "internal"),
        (fake.Refuse(grpc.StatusCode.PERMISSION_DENIED, "no"), "permission_denied"),
        (fake.Refuse(grpc.StatusCode.UNAVAILABLE, "going away"), "unavailable"),
    ],
)
async def test_every_failure_has_its_reason(
    kubelet: FakeKubelet, source: KubeletSource, answer: fake.Raw | fake.Refuse, expected: str
) -> None:
    """What goes wrong is told apart by one short word, and is over with its cause."""
    kubelet.misbehave(answer, times=1)
    assert await reason(source) == expected
    assert len((await source.read(5.0)).value.pods) == len(PODS)


async def test_missing_and_dead_sockets_are_told_apart(tmp_path: Path, source: KubeletSource) -> None:
    """No file is `socket_missing`; a file that nobody listens at is `connection_refused`."""
    assert await reason(source) == "socket_missing"
    kubelet = FakeKubelet(tmp_path / "kubelet.sock")
    await kubelet.start()
    await kubelet.stop(leave_socket=True)
    assert await reason(source) == "connection_refused"


async def test_directory_without_permission() -> None:
    """A kubelet's directory that this user may not enter is `permission_denied`, not a missing socket."""
    with open_folder() as folder:
        (folder / "pod-resources").mkdir()
        async with FakeKubelet(folder / "pod-resources" / "kubelet.sock"):
            (folder / "pod-resources").chmod(0)
            source = KubeletSource(folder / "pod-resources" / "kubelet.sock")
            with as_ordinary_user():
                said = await reason(source)
            (folder / "pod-resources").chmod(0o755)
            await source.close()
    assert said == "permission_denied"


async def test_undecodable_allocatable_does_not_cost_the_list(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """Garbage in the optional answer is a complaint; the List stands."""
    kubelet.misbehave(fake.Raw(b"\xff\xff"), fake.ALLOCATABLE)
    told = await source.read(5.0)
    assert list(told.value.pods) == PODS
    assert [complaint.reason for complaint in told.complaints] == ["allocatable_decode"]


async def test_restart_gives_a_new_socket_identity(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """A socket made anew is another one, even between two reads that both succeed."""
    before = (await source.read(5.0)).value.socket
    await kubelet.stop(leave_socket=True)
    await kubelet.start()
    after = (await source.read(5.0)).value.socket
    assert before
    assert after
    assert before != after


async def test_kubelet_that_was_away_is_back_within_two_seconds(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """However long the source has failed, it waits on the socket itself: gRPC's back-off has no say."""
    await source.read(5.0)
    await kubelet.stop(leave_socket=True)
    for _ in range(5):
        assert await reason(source, 1.0) == "connection_refused"
    waiting = asyncio.create_task(source.wait_until_back())
    await asyncio.sleep(1.5)
    assert not waiting.done()
    await kubelet.start()
    back = time.monotonic()
    await asyncio.wait_for(waiting, 2.0)
    assert len((await source.read(5.0)).value.pods) == len(PODS)
    assert time.monotonic() - back < 2.0


async def test_waiting_for_a_kubelet_that_answers_never_ends(kubelet: FakeKubelet, source: KubeletSource) -> None:
    """After an answer there is nothing to wait for: the interval alone decides."""
    await source.read(5.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(source.wait_until_back(), 1.3)
