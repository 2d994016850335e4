"""A second List, of a scheduler's agent, beside the kubelet's: which pods become holders, and which are not accused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gpumap.agent.exposition import Exposition
from gpumap.agent.sources.kubelet import KubeletSource
from gpumap.agent.sources.second_list import CorrectedKubelet
from gpumap.lab.demo.kubelet import ALLOCATABLE, LIST, Refuse
from gpumap.model.names import Owner
from gpumap.model.observations import DeviceId, ListedContainer, ListedPod, ResourceDevices, SecondList, SourceError
from gpumap.model.snapshot import Snapshot
from tests import laws
from tests.examples import examples
from tests.exposed import Page
from tests.generated import nodes
from tests.koordlet import FakeKoordlet
from tests.kubelet import FakeKubelet
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid, owners, row, use
from tests.test_laws import FAMILIES

CARD, OTHER = gpu_uuid(0), gpu_uuid(1)
GPU = "nvidia.com/gpu"


def koordinated(**second: list[str]) -> TestNode:
    """Two pods that share the first card, one that shares nothing, one with a card of the kubelet."""
    pods = [Pod("ml", name, {"main": {}, "side": {}}) for name in ("half", "rest", "none")]
    owner = Pod("ml", "owner", {"main": {GPU: [str(OTHER)]}})
    return TestNode([Gpu(0), Gpu(1)], [*pods, owner], second=second or {"half": [str(CARD)], "rest": [str(CARD)]})


def pod(node: TestNode, name: str) -> Pod:
    return next(one for one in node.pods if one.name == name)


def collected(node: TestNode, times: int = 3) -> Snapshot:
    for _ in range(times):
        snapshot = node.collect()
    return snapshot


# --- the snapshot -----------------------------------------------------------------------------------------------------


def test_pods_that_only_the_second_list_gives_a_card_share_it() -> None:
    """Both are holders without known share, the idle one has zeros, and the kubelet's own holder keeps its card."""
    node = koordinated()
    half, rest, owner = pod(node, "half"), pod(node, "rest"), pod(node, "owner")
    node.processes = [Process(10, CARD, half, memory=3 * GIB), Process(11, OTHER, owner)]
    snapshot = collected(node)
    rows = {(one.name.pod, one.name.container, one.uuid): one for one in snapshot.containers}
    assert set(rows) == {("half", "main", CARD), ("rest", "main", CARD), ("owner", "main", OTHER)}
    for name in ("half", "rest"):
        shared = rows[name, "main", CARD]
        assert (shared.holds, shared.slots) == (True, {})
        assert (shared.allocated_gpus, shared.allocated_memory_bytes) == (None, None)
    assert rows["owner", "main", OTHER].allocated_gpus == 1.0
    found = use(snapshot, rest.full(), CARD)
    assert found is not None
    assert (found.memory_bytes, found.processes) == (0, 0)
    assert owners(snapshot, CARD)["scheduled"] == 3 * GIB
    assert [leaf.holders for leaf in snapshot.node.devices] == [2, 1]


def test_a_pod_beyond_its_share_and_one_without_are_squatters() -> None:
    """The second List has both pods, and gives neither of them the leaf that it uses."""
    node = koordinated()
    node.processes = [Process(10, OTHER, pod(node, "half")), Process(11, CARD, pod(node, "none"))]
    snapshot = collected(node)
    assert owners(snapshot, OTHER)["unassigned"] == owners(snapshot, CARD)["unassigned"] == GIB


def test_without_an_answer_of_the_agent_no_pod_is_accused() -> None:
    """The kubelet's holders remain, no pod is a squatter, a card without a holder has an unknown number of them."""
    node = koordinated()
    node.down = {"second"}
    node.processes = [Process(10, CARD, pod(node, "half")), Process(11, OTHER, pod(node, "none"))]
    snapshot = collected(node)
    assert [one.name.pod for one in snapshot.containers if one.holds] == ["owner"]
    assert [leaf.holders for leaf in snapshot.node.devices] == [None, 1]
    for leaf in (CARD, OTHER):
        assert (owners(snapshot, leaf)["unassigned"], owners(snapshot, leaf)["unknown"]) == (0, GIB)
    found = row(snapshot, pod(node, "half").full(), CARD)
    assert found is not None
    assert found.use is not None
    assert (found.use.memory_bytes, found.owner) == (GIB, Owner.UNKNOWN)


def test_an_agent_that_stops_answering_is_remembered_until_it_is_too_old() -> None:
    """Its holders remain for a minute. From the first failure on it accuses no pod; deleted pods stay `gone`."""
    node = koordinated()
    node.processes = [Process(10, CARD, pod(node, "half")), Process(11, CARD, pod(node, "none"))]
    snapshot = collected(node)
    assert owners(snapshot, CARD)["unassigned"] == GIB
    assert snapshot.expires is None, "all of it is of this collection"
    node.down = {"second"}
    snapshot = node.collect()
    assert {one.name.pod for one in snapshot.containers if one.holds} == {"half", "rest", "owner"}
    split = owners(snapshot, CARD)
    assert (split["scheduled"], split["unassigned"], split["unknown"]) == (GIB, 0, GIB)
    assert snapshot.expires == node.memory.second.at.monotonic + 60.0  # type: ignore[union-attr]
    node.pods.remove(pod(node, "rest"))
    snapshot = node.collect(55.0)
    assert snapshot.at.monotonic == node.memory.second.at.monotonic + 60.0  # type: ignore[union-attr]
    assert {one.name.pod for one in snapshot.containers if one.holds} == {"owner"}
    assert [leaf.holders for leaf in snapshot.node.devices] == [None, 1]
    assert owners(snapshot, CARD)["unknown"] == 2 * GIB
    assert snapshot.expires is None, "nothing of the agent is served any longer"


def test_a_pod_that_only_one_of_the_lists_has() -> None:
    """The agent's pod without the kubelet does not exist; the kubelet's pod without the agent may hold any device."""
    node = koordinated()
    none = pod(node, "none")
    node.unknown_to_agent = {"none"}
    node.processes = [Process(10, CARD, none)]
    snapshot = collected(node)
    assert owners(snapshot, CARD)["unknown"] == GIB
    pod(node, "half").listed = False
    agents_list = node.memory.second
    assert agents_list is not None
    observed = node.observe()
    stale = replace(observed.kubelet.value, second=replace(observed.kubelet.value.second, pods=agents_list.value))  # type: ignore
    node._kubelet = lambda: stale  # type: ignore[method-assign]
    assert {one.name.pod for one in collected(node).containers if one.holds} == {"rest", "owner"}


def test_a_kubelet_that_restarts_shortens_both_lists() -> None:
    """For the grace period a sharing pod that it does not list again keeps what the agent listed before."""
    node = koordinated()
    node.processes = [Process(10, CARD, pod(node, "half"))]
    collected(node)
    pod(node, "half").listed = pod(node, "rest").listed = False
    node.socket = "second"
    snapshot = collected(node)
    assert {one.name.pod for one in snapshot.containers if one.holds} == {"half", "rest", "owner"}
    assert owners(snapshot, CARD)["scheduled"] == GIB
    snapshot = node.collect(70.0)
    assert {one.name.pod for one in snapshot.containers if one.holds} == {"owner"}


def test_a_new_row_of_the_agent_replaces_the_kept_one() -> None:
    """After a restart the agent may read the List later than gpumap: it already has a pod that gpumap still keeps.
    This pod was re-created with another device, and its old log directory still exists."""
    node = koordinated(half=[str(CARD)])
    collected(node)
    half = pod(node, "half")
    node.second = {"half": [str(OTHER)]}
    later = node._corrected(tuple(sorted(one.as_listed() for one in node.pods)))
    half.listed, node.socket = False, "second"
    answer = replace(node._kubelet(), second=SecondList(later))
    node._kubelet = lambda: answer  # type: ignore[method-assign]
    held = {(one.name.pod, one.uuid) for one in collected(node).containers if one.holds}
    assert held == {("half", OTHER), ("owner", OTHER)}


def test_ids_of_the_second_list_are_placed_or_counted_like_the_kubelets() -> None:
    """A MIG device is a leaf, a partitioned GPU gives all of its leaves, an id of no device is unmatched."""
    node = koordinated(half=[str(mig_uuid(0, 1, 0))], rest=[str(CARD)], none=["GPU-0"])
    node.gpus[0] = Gpu(0, mig=[(1, 0, 3), (2, 0, 4)])
    node.processes = [Process(10, mig_uuid(0, 2, 0), pod(node, "rest"))]
    snapshot = collected(node)
    held = {(one.name.pod, one.uuid) for one in snapshot.containers if one.holds}
    assert held == {("half", mig_uuid(0, 1, 0)), ("rest", CARD), ("owner", OTHER)}
    assert owners(snapshot, mig_uuid(0, 2, 0))["scheduled"] == GIB
    assert [(one.name.pod, one.resource, one.slots) for one in snapshot.node.unmatched] == [("none", GPU, 1)]


@settings(max_examples=examples(100))
@given(nodes(), st.data())
def test_a_second_list_takes_nothing_from_the_kubelets(node: TestNode, data: st.DataObject) -> None:
    """On any node: the kubelet's grants are as without it, no sharer is accused, and the laws of numbers hold."""
    leaves = [leaf for gpu in node.gpus for leaf in gpu.leaves]
    ids = st.lists(st.sampled_from([*map(str, leaves), str(gpu_uuid(77))]), max_size=2, unique=True)
    alone = replace(node)
    node.second = {one.name: data.draw(ids) for one in node.pods}
    for _ in range(3):
        node.down = set(data.draw(st.lists(st.just("second"), max_size=1)))
        snapshot, without = node.collect(), alone.collect()
        grants = {(one.name, one.uuid): one for one in snapshot.containers if one.holds}
        for one in without.containers:
            if one.holds:
                assert structs.replace(grants[one.name, one.uuid], use=None) == structs.replace(one, use=None)
        page = Page(Exposition(FAMILIES).render(snapshot).decode())
        assert [*laws.inconsistent(page)] == []
        for process in snapshot.processes:
            if process.name and str(process.uuid) in node.second.get(process.name.pod, ()):
                assert process.owner.value != "unassigned"
            assert "second" not in node.down or process.owner.value != "unassigned"


# --- the source -------------------------------------------------------------------------------------------------------

LISTED = [ListedPod("ml", f"pod-{number}", (ListedContainer("main"),)) for number in range(2)]


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[FakeKubelet]:
    async with FakeKubelet(tmp_path / "kubelet.sock") as running:
        running.set_pods(LISTED)
        yield running


@pytest.fixture
async def koordlet(tmp_path: Path, kubelet: FakeKubelet) -> AsyncIterator[FakeKoordlet]:
    async with FakeKoordlet(tmp_path / "agent" / "kubelet.sock", kubelet.socket_path) as running:
        running.allocations = {("ml", "pod-1"): {GPU: [str(CARD)], "koordinator.sh/rdma": ["0000:1f:00.2"]}}
        yield running


@pytest.fixture
async def source(kubelet: FakeKubelet, koordlet: FakeKoordlet) -> AsyncIterator[CorrectedKubelet]:
    made = CorrectedKubelet(KubeletSource(kubelet.socket_path), KubeletSource(koordlet.socket_path, list_only=True))
    yield made
    await made.close()


async def test_both_lists_are_read(kubelet: FakeKubelet, koordlet: FakeKoordlet, source: CorrectedKubelet) -> None:
    """The kubelet's pods are as without an agent; the agent is asked only for its List."""
    answer, complaints = await source.read(5.0)
    assert (answer.pods, complaints) == (tuple(LISTED), ())
    assert answer.second is not None
    assert answer.second.pods is not None
    added = {
        one.name: [devices for container in one.containers for devices in container.devices]
        for one in answer.second.pods
    }
    assert added["pod-0"] == []
    assert added["pod-1"] == [
        ResourceDevices("koordinator.sh/rdma", (DeviceId("0000:1f:00.2"),)),
        ResourceDevices(GPU, (DeviceId(CARD),)),
    ]
    assert koordlet.calls == {LIST: 1}
    assert kubelet.calls == {LIST: 2, ALLOCATABLE: 1}, "the agent's List asks the kubelet too"
    assert (await source.read(5.0)).value.second.pods is answer.second.pods  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (None, "pod_resources_connection_refused"),
        (Refuse(grpc.StatusCode.UNKNOWN, "kubelet stub: certificate expired"), "pod_resources_unknown"),
        (Refuse(grpc.StatusCode.PERMISSION_DENIED, "not for you"), "pod_resources_permission_denied"),
    ],
)
async def test_a_failing_agent_is_a_complaint(
    koordlet: FakeKoordlet, source: CorrectedKubelet, refusal: Refuse | None, reason: str
) -> None:
    """The kubelet's answer remains, and the agent's is taken again as soon as it is there."""
    koordlet.refusal = refusal
    if refusal is None:
        await koordlet.stop()
        koordlet.socket_path.touch()
    answer, complaints = await source.read(5.0)
    assert (answer.pods, answer.second.pods) == (tuple(LISTED), None)  # type: ignore[union-attr]
    assert [one.reason for one in complaints] == [reason]
    koordlet.refusal = None
    if refusal is None:
        await koordlet.start()
    assert (await source.read(5.0)).value.second.pods is not None  # type: ignore[union-attr]


async def test_a_hanging_agent_does_not_take_the_kubelets_time(kubelet: FakeKubelet, tmp_path: Path) -> None:
    """An agent that accepts calls and never answers delays no collection by the whole deadline."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")  # HTTP/2: empty SETTINGS
        await reader.read()
        writer.close()
        ended.set()

    ended, path = asyncio.Event(), tmp_path / "hangs.sock"
    source = CorrectedKubelet(KubeletSource(kubelet.socket_path), KubeletSource(path, list_only=True))
    async with await asyncio.start_unix_server(accept, path):
        started = time.monotonic()
        answer, complaints = await source.read(60.0)
        passed = time.monotonic() - started
        await source.close()
        await ended.wait()
    assert passed < 30.0
    assert (answer.pods, answer.second) == (tuple(LISTED), SecondList(None))
    assert [one.reason for one in complaints] == ["pod_resources_deadline_exceeded"]


async def test_a_failing_kubelet_fails_the_source(kubelet: FakeKubelet, source: CorrectedKubelet) -> None:
    """The agent does not show which pods exist."""
    await kubelet.stop()
    with pytest.raises(SourceError):
        await source.read(5.0)
