"""Memory and load that no process explains are found, and nothing else is. The truth is known."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpumap.agent.published import published
from gpumap.agent.sources.procfs import ProcfsSource
from gpumap.cli.commands.top_screen import Live
from gpumap.cli.commands.top_screen import frame as live_frame
from gpumap.cli.commands.waste import waste_table
from gpumap.cli.rows import NodeMaps
from gpumap.cli.table import Shape
from gpumap.cli.terminal import Screen
from gpumap.lab.capture import replay
from gpumap.lab.capture.format import About, Capture
from gpumap.lab.demo.scenario import load_scenario
from gpumap.lab.demo.world import frame
from gpumap.model.node import Finding, Unjudged
from gpumap.model.readings import DeviceMemory, GpuProcess, ProcessSample, Uuid
from gpumap.model.snapshot import Snapshot
from tests import standin
from tests.lives import CARD
from tests.nodes import GIB, Gpu, Process, TestNode, gpu_uuid, holder, mig_uuid, use
from tests.test_identity_sources import CID, UID, make_process, own_at
from tests.worker import Start

MEMORY, BUSY = "memory_without_process", "busy_without_process"
WAIT_SECONDS = 600.0
"""Twice --idle-after."""
OTHER = gpu_uuid(1)
SLICE, SIBLING = mig_uuid(0, 1, 0), mig_uuid(0, 1, 1)
HOLDER = holder("trainer", str(CARD))
LEAK = 20 * GIB


def unexplained(snapshot: Snapshot) -> list[Finding]:
    return [finding for finding in snapshot.node.findings or () if finding.finding == "unexplained"]


def unjudged(snapshot: Snapshot, uuid: Uuid = CARD) -> set[tuple[str, str]]:
    entries: tuple[Unjudged, ...] = snapshot.node.unjudged
    return {(kind, entry.reason) for entry in entries if entry.uuid == uuid for kind in entry.findings}


def kinds(snapshot: Snapshot) -> set[str]:
    return {finding.finding for finding in snapshot.node.findings or ()}


def leaking(processes: list[Process] | None = None, **values: Any) -> TestNode:
    """A node with a card that a pod holds, and another card. gpumap has watched both, then memory leaks on the card."""
    node = TestNode([Gpu(0), Gpu(1)], [HOLDER], **values)
    node.collect(30.0)
    node.gpus[0].overhead = LEAK
    node.processes = processes or []
    return node


GONE = Process(4711, CARD, None, memory=3 * GIB, left=True)


@pytest.mark.parametrize(
    "processes", [[], [GONE], [GONE, Process(100, OTHER, None)]], ids=["none", "gone", "elsewhere"]
)
def test_memory_without_a_process_is_found(processes: list[Process]) -> None:
    """It is found after twice `--idle-after`, with all memory that no living process explains, and the PIDs."""
    node = leaking(processes)
    began = node.now.wall + 30.0
    assert not unexplained(node.watch(WAIT_SECONDS))
    (finding,) = unexplained(node.collect(30.0))
    has_gone = GONE in processes
    size = LEAK + has_gone * 3 * GIB
    assert (finding.reason, finding.uuid, finding.memory_bytes, finding.gpus) == (MEMORY, CARD, size, None)
    assert finding.since == pytest.approx(began, abs=0.01)
    assert finding.pids == ((4711,) if has_gone else ())
    assert finding.why.startswith("unexplained memory for 10m: no process uses it")
    assert ("PID 4711" in finding.why) == has_gone
    assert "fuser -v /dev/nvidia*" in (finding.remedy or "")


def test_unexplained_memory_ends_with_the_memory() -> None:
    """After a reset nothing is found, and what leaks then waits again."""
    node = leaking()
    assert unexplained(node.watch(630.0))
    node.gpus[0].overhead = 0
    assert not unexplained(node.collect(5.0))
    node.gpus[0].overhead = LEAK
    assert not unexplained(node.watch(WAIT_SECONDS))


GRACE = {"model": "NVIDIA GH200 480GB"}


@pytest.mark.parametrize(
    ("values", "node_values"),
    [
        ({"numa_node": 1}, {}),
        (GRACE, {}),
        ({"virtualization": "host_vgpu"}, {}),
        ({"virtualization": "host_vsga"}, {}),
        ({"memory": DeviceMemory(80 * GIB, LEAK, 60 * GIB)}, {}),
        ({"memory": None}, {}),
        ({"processes": None}, {}),
        ({}, {"is_machine": False}),
        ({}, {"visible": False}),
    ],
    ids=["NUMA", "Grace", "vGPU", "vSGA", "memory v1", "no memory", "no list", "kind", "no PIDs"],
)
def test_memory_where_it_cannot_be_known_is_never_found(values: dict[str, Any], node_values: dict[str, Any]) -> None:
    """The page cache of Grace, the memory of virtual machines, and processes of other PID namespaces are no leak."""
    node = leaking(**node_values)
    node.gpus[0].values = values
    snapshot = node.watch(2 * WAIT_SECONDS)
    assert not unexplained(snapshot)


@pytest.mark.parametrize(
    "processes",
    [
        [Process(100, CARD, None)],
        [Process(100, CARD, HOLDER)],
        [GONE, Process(100, CARD, HOLDER, memory=None)],
        [Process(100, CARD, None, readable=False)],
    ],
    ids=["host", "pod", "pod beside a gone PID", "unreadable"],
)
def test_memory_beside_a_living_process_is_never_found(processes: list[Process]) -> None:
    """A living process may have it, whatever the driver reports of the process."""
    assert not unexplained(leaking(processes).watch(2 * WAIT_SECONDS))


def test_memory_below_half_a_gib_or_with_a_short_process_is_never_found() -> None:
    """A driver and its firmware need some memory; a process that starts now and then may have all of it."""
    node = leaking()
    node.gpus[0].overhead = (512 << 20) - 1
    assert not unexplained(node.watch(2 * WAIT_SECONDS))
    node.gpus[0].overhead = LEAK
    for number in range(60):
        node.processes = [Process(100, CARD, HOLDER)] if number % 15 == 0 else []
        assert not unexplained(node.collect(30.0))


@pytest.mark.parametrize(("memory", "is_found"), [(LEAK, False), (None, False), (LEAK - GIB, True)])
def test_a_sibling_explains_the_memory_of_a_mig_device(memory: int | None, *, is_found: bool) -> None:
    """Compute instances share the memory of their GPU instance."""
    node = TestNode([Gpu(0, mig=[(1, 0, 1), (1, 1, 1)], overhead=0)], [], [Process(100, SIBLING, None, memory=memory)])
    node.collect(30.0)
    if memory != LEAK:
        node.gpus[0].overhead = GIB
    assert [finding.uuid for finding in unexplained(node.watch(660.0))] == [SLICE] * is_found


def test_a_gone_pid_stops_no_judgement_once_it_is_a_leak() -> None:
    """Until then the holder has no zero, and squatters and leftovers on the card cannot be judged."""
    node = leaking([GONE])
    early = node.watch(WAIT_SECONDS)
    assert use(early, HOLDER.full(), CARD) is None
    assert {("squatter", "unknown_process"), ("leftover", "unknown_process")} <= unjudged(early)
    late = node.watch(60.0)
    holder_use = HOLDER.use(late, CARD)
    assert (holder_use.memory_bytes, holder_use.processes, holder_use.sm_ratio) == (0, 0, 0.0)
    assert unjudged(late) == {("not_offered", "offers_unknown")}
    assert kinds(node.watch()) == {"unexplained", "idle"}
    (process,) = node.collect().processes
    assert (process.pid, process.owner.value) == (4711, "unknown")


@pytest.mark.parametrize(
    ("mode", "word"), [(0, "none"), (3, "host_vgpu"), (4, "host_vsga"), (9, "code_9"), (None, None)]
)
@pytest.mark.parametrize("node_id", [None, 2, 0xFFFFFFFF])
def test_the_driver_names_its_virtualization_and_numa_node(
    start: Start, mode: int | None, word: str | None, node_id: int | None
) -> None:
    """Of a driver that does not support a call, and of a GPU that is no NUMA node, there is no value."""
    gpu = standin.Gpu(str(CARD), virtualization_mode=mode, numa_node=node_id)
    reading = start().read_one(standin.Driver(gpus=[gpu]))
    assert (reading.virtualization, reading.numa_node) == (word, 2 if node_id == 2 else None)


@pytest.mark.parametrize(("comm", "is_machine"), [("kthreadd", True), ("bash", False), (None, False)])
def test_only_the_machines_own_namespace_has_kthreadd(tmp_path: Path, comm: str | None, *, is_machine: bool) -> None:
    """PID 2 of a container is any process, or none."""
    make_process(tmp_path / "proc", 1, "/init.scope")
    if comm:
        make_process(tmp_path / "proc", 2, "/", comm=comm)
    source = ProcfsSource(tmp_path / "proc", own_at(tmp_path, f"/kubepods/pod{UID}/{CID}"))
    for _ in range(2):
        table = source.read([], None).value
        assert (table.pid_visibility, table.is_machine) == (True, is_machine)


def test_the_demo_has_memory_without_a_process() -> None:
    """Its scenario `faults` shows it on GPU 1, with the processes of /proc that a machine has."""
    scenario = load_scenario(Path("faults"))
    frames = tuple(frame(scenario, second - 30, second) for second in range(0, 660, 30))
    *_, last = asyncio.run(replay.snapshots(Capture(About(scenario.node), frames)))
    (finding,) = unexplained(last)
    assert (finding.reason, finding.uuid) == (MEMORY, scenario.gpus[1].uuid)
    assert finding.memory_bytes == pytest.approx(LEAK, rel=0.01)


def test_people_see_it_on_the_gpu() -> None:
    """In the table of waste with its sums, in `top` above the rows of use, and what leaks on a card with a fault."""
    node = leaking([GONE])
    node.gpus[0].values = {"row_remap_pending": True}
    node.watch(630.0)
    shown = published(node.collect())
    table = waste_table(NodeMaps((shown,)), Shape())
    (line,) = (line for line in table.splitlines() if line.startswith("UNEXPLAINED"))
    assert "23.0GiB" in line
    assert "unexplained memory" in line
    assert "unexplained 23.0GiB" in table
    lines = live_frame(NodeMaps((shown,)), Live(), Shape(screen=Screen(columns=200)), (), 40).lines
    assert "unexplained 23.0GiB" in lines[0]
    rows = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in ("fault", "UNEXPLAINED")]
    assert rows == ["fault", "UNEXPLAINED"]


def stuck(has_holder: bool = True, **values: Any) -> TestNode:
    """A node with a card that is busy without a process. gpumap has watched it at rest before."""
    node = TestNode([Gpu(0, utilization=0.0, activities={(-1, -1): 0.0})], [HOLDER] if has_holder else [], **values)
    node.collect(30.0)
    node.gpus[0].utilization = 1.0
    node.gpus[0].activities = {(-1, -1): 1.0}
    return node


@pytest.mark.parametrize("utilization", [0.5, 1.0])
def test_a_card_that_is_busy_without_a_process_is_found(utilization: float) -> None:
    """Then its load is no work of its holder, also in the time before that."""
    node = stuck()
    node.gpus[0].utilization = utilization
    began = node.now.wall + 30.0
    early = node.watch(WAIT_SECONDS)
    assert not unexplained(early)
    assert "idle" not in kinds(early)
    snapshot = node.collect(30.0)
    (finding,) = unexplained(snapshot)
    assert (finding.reason, finding.uuid, finding.gpus, finding.memory_bytes) == (BUSY, CARD, 1.0, None)
    assert finding.since == pytest.approx(began)
    assert finding.why == f"stuck at {utilization * 100:.0f}% without a process for 10m"
    (idle,) = (finding for finding in snapshot.node.findings or () if finding.finding == "idle")
    assert (idle.pod, idle.why) == ("trainer", "no process seen for at least 10m")
    assert unjudged(snapshot) == {("not_offered", "offers_unknown")}
    assert HOLDER.use(snapshot, CARD).sm_ratio == 0.0
    assert kinds(node.watch()) == {"unexplained", "idle"}


def test_the_work_of_a_holder_before_its_card_got_stuck_counts() -> None:
    """Its idle time begins with the end of its own process."""
    node = stuck()
    node.processes = [Process(100, CARD, HOLDER, sm=1.0)]
    node.watch(WAIT_SECONDS)
    node.processes = []
    ended = node.now.wall
    snapshot = node.watch(660.0)
    (idle,) = (finding for finding in snapshot.node.findings or () if finding.finding == "idle")
    assert idle.since == pytest.approx(ended, abs=60.0)
    node.processes = [Process(101, CARD, HOLDER, sm=1.0)]
    assert kinds(node.collect(30.0)).isdisjoint({"idle", "unexplained"})


@pytest.mark.parametrize(
    ("values", "node_values"),
    [
        ({"utilization_ratio": 0.49}, {}),
        ({"utilization_ratio": None}, {}),
        ({"samples": None}, {}),
        ({"samples": (ProcessSample(100, 0.0, 0.0, 0.0, 0.0),)}, {}),
        ({"unsampled": (100,)}, {}),
        ({"processes": None}, {}),
        ({"processes": (GpuProcess(100, GIB, "C"),)}, {}),
        ({"memory": DeviceMemory(80 * GIB, GIB, 79 * GIB)}, {}),
        ({"virtualization": "host_vgpu"}, {}),
        ({}, {"is_machine": False}),
        ({}, {"visible": False}),
    ],
    ids=[
        *("half idle", "no utilization", "no samples", "sampled", "impossible sample", "no list", "a process"),
        *("memory v1", "vGPU", "kind", "no PIDs"),
    ],
)
def test_load_that_a_process_may_explain_is_never_found(values: dict[str, Any], node_values: dict[str, Any]) -> None:
    """And while it is not found, the holder of the card is not idle."""
    node = stuck(**node_values)
    node.gpus[0].values = values
    snapshot = node.watch(2 * WAIT_SECONDS)
    assert not unexplained(snapshot)
    assert "idle" not in kinds(snapshot)


def test_one_sample_or_gap_starts_the_time_again() -> None:
    """A short job within the time is an explanation, and so is what gpumap did not see."""
    node = stuck()
    node.watch(WAIT_SECONDS)
    node.gpus[0].late_samples = (ProcessSample(100, 0.3, 0.0, 0.0, 0.0),)
    node.collect(30.0)
    node.gpus[0].late_samples = ()
    assert not unexplained(node.watch(WAIT_SECONDS))
    node.collect(300.0)
    assert not unexplained(node.watch(WAIT_SECONDS - 30.0))


def why_unjudged(snapshot: Snapshot, uuid: Uuid = CARD) -> str | None:
    """Return why `unexplained` is not judged on a leaf, and check that the leaf is counted once."""
    reasons = [reason for kind, reason in unjudged(snapshot, uuid) if kind == "unexplained"]
    assert len(reasons) <= 1
    leaves = sum(device.is_leaf for device in snapshot.node.devices)
    others = sum("unexplained" in entry.findings for entry in snapshot.node.unjudged)
    assert snapshot.node.judged["unexplained"] + others == leaves
    return reasons[0] if reasons else None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"virtualization": "host_vgpu"}, "not_supported"),
        ({"memory": None}, "not_supported"),
        ({"processes": None}, "use_not_measured"),
        ({"numa_node": 1}, None),
        ({"samples": None}, None),
        ({"numa_node": 1, "samples": None}, "not_supported"),
        ({}, None),
    ],
)
def test_a_leaf_is_judged_if_one_reason_can_be(values: dict[str, Any], reason: str | None) -> None:
    """Each leaf counts once, as judged or with the first reason why it is not."""
    node = TestNode([Gpu(0, utilization=0.0, values=values), Gpu(1)])
    snapshot = node.collect()
    assert why_unjudged(snapshot) == reason
    assert why_unjudged(snapshot, OTHER) is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"is_machine": False}, "not_supported"),
        ({"visible": False}, "no_pid_visibility"),
        ({"down": {"procfs"}}, "no_pid_visibility"),
        ({"down": {"kubelet", "pod_identity"}}, None),
        ({"has_kubelet": False}, None),
    ],
)
def test_it_needs_pids_but_no_kubelet(values: dict[str, Any], reason: str | None) -> None:
    """Memory without a process is the same on a workstation, and while the kubelet is down."""
    node = TestNode([Gpu(0)], [HOLDER], **values)
    assert why_unjudged(node.collect()) == reason
    node.gpus[0].overhead = LEAK
    assert bool(unexplained(node.watch(660.0))) == (reason is None)


def test_what_leaked_before_gpumap_started_is_not_judged_until_it_has_lasted() -> None:
    """What begins while gpumap watches is judged at once. While the driver is down, one is not."""
    node = TestNode([Gpu(0, overhead=LEAK), Gpu(1)])
    assert [why_unjudged(node.collect(), uuid) for uuid in (CARD, OTHER)] == ["just_started", None]
    node.gpus[1].overhead = LEAK
    (sentence,) = (text for text in published(node.collect(1.0)).unjudged_sentences if "watched" in text)
    assert sentence == "gpumap has not watched GPU 0 for long enough: it has memory or load without a process."
    snapshot = node.watch(WAIT_SECONDS - 30.0)
    assert [why_unjudged(snapshot, uuid) for uuid in (CARD, OTHER)] == ["just_started", None]
    snapshot = node.watch(90.0)
    assert {finding.uuid for finding in unexplained(snapshot)} == {CARD, OTHER}
    assert snapshot.node.judged["unexplained"] == 2
    node.gpus[0].fault = "lost"
    assert why_unjudged(node.collect()) == "gpu_down"
    node.down = {"nvml"}
    down = node.collect().node
    assert [entry.reason for entry in down.unjudged if "unexplained" in entry.findings] == ["nvml_down"]
