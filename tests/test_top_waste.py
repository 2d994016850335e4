"""`gpumap top` and `gpumap waste`: who uses what, what is wasted, and what no pod may be accused of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings

from gpumap.agent.published import published
from gpumap.cli.commands import top as top_report
from gpumap.cli.commands import waste as waste_report
from gpumap.cli.commands.doctor import doctor_table
from gpumap.cli.commands.top import top_names
from gpumap.cli.commands.top_screen import Live, frame, pressed
from gpumap.cli.commands.waste import waste_names
from gpumap.cli.filter import select_rows
from gpumap.cli.rows import NodeMaps
from gpumap.cli.screen import View, text_of
from gpumap.cli.table import Shape
from gpumap.cli.terminal import PIPE, Screen, escape_terminal_controls
from gpumap.cli.watch import _show
from gpumap.model.devices import sources_up
from gpumap.model.findings import judged_kinds
from gpumap.model.node import Device, Node, decode
from gpumap.model.remedies import FINDINGS, advice, finding_remedy
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner
from tests.command import run_command_in_loop
from tests.demo_process import fetch
from tests.examples import examples
from tests.generated import runs
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, holder, mig_uuid
from tests.shown import (
    changed,
    changed_in,
    judged_again,
    map_table,
    maps,
    served_as_waste,
    top_table,
    top_values,
    values,
    waste_table,
    waste_values,
    with_devices,
)
from tests.snapshots import with_node

CARD, OTHER = gpu_uuid(0), gpu_uuid(1)


def busy() -> TestNode:
    """Two GPUs: one with a holder that computes, a squatter and a process of the host; one that is held for nothing."""
    work, idle, squatter = holder("work", CARD), holder("idle", OTHER), Pod("ml", "squat", {"main": {}})
    node = TestNode([Gpu(0), Gpu(1)], [work, idle, squatter])
    node.processes = [
        Process(10, CARD, work, memory=30 * GIB, sm=0.75, comm="torchrun"),
        Process(11, CARD, work, memory=10 * GIB),
        Process(12, CARD, squatter, memory=9 * GIB, comm="miner"),
        Process(13, OTHER, None, memory=2 * GIB, comm="Xorg"),
    ]
    node.watch()
    return node


def leave(node: TestNode, name: str) -> None:
    """A pod ends; its processes do not."""
    node.pods = [pod for pod in node.pods if pod.name != name]


def table(found: Node, shape: Shape | None = None) -> list[list[str]]:
    return [line.split() for line in top_table(found, shape or Shape()).splitlines()]


def wasted(found: Node, **shape: object) -> dict[str, tuple[str, ...]]:
    """The pods of each kind of finding."""
    kinds: dict[str, list[str]] = {}
    for one in waste_values(found, replace(Shape(), **shape))["findings"]:  # type: ignore[arg-type] # the test's own
        kinds.setdefault(one["finding"], []).append(one["pod"])
    return {kind: tuple(pods) for kind, pods in kinds.items()}


# --- top --------------------------------------------------------------------------------------------------------------


def test_top_has_a_row_for_each_container_and_device() -> None:
    """The largest first; then also what no container accounts for, with its owner."""
    rows = table(published(busy().collect()))
    assert rows[0][:4] == ["NAMESPACE", "POD", "CONTAINER", "DEVICE"]
    assert rows[1] == ["ml", "work", "main", "0", "40.0GiB", "50%", "40.0GiB", "75%", "2", "assigned"]
    assert rows[2] == ["ml", "squat", "main", "0", "9.0GiB", "11%", "9.0GiB", "0%", "1", "unassigned"]
    assert rows[3] == ["-", "-", "-", "1", "2.0GiB", "2%", "-", "0%", "1", "host"]
    assert rows[4][:5] == ["ml", "idle", "main", "1", "0"]
    assert [row[9] for row in rows[4:]] == ["assigned"], "the small remainders have no rows"


def test_top_by_process() -> None:
    """A row for each process with its PID, type and name, as nvidia-smi has it; the host's too."""
    rows = table(published(busy().collect()), Shape(processes=True))
    assert rows[0][:4] == ["DEVICE", "PID", "TYPE", "PROCESS"]
    assert rows[1] == ["0", "10", "C", "torchrun", "ml", "work", "main", "30.0GiB", "38%", "75%", "assigned"]
    assert ["1", "13", "C", "Xorg", "-", "-", "-", "2.0GiB", "2%", "0%", "host"] in rows
    assert sorted(row[1] for row in rows if row[2] == "C") == ["10", "11", "12", "13"]


@pytest.mark.parametrize(
    ("order", "reverse", "pods"),
    [
        ("memory", False, ["work", "squat", "idle"]),
        ("memory", True, ["idle", "squat", "work"]),
        ("sm", False, ["work", "squat", "idle"]),
        ("pod", False, ["idle", "squat", "work"]),
        ("pod", True, ["work", "squat", "idle"]),
        ("device", True, ["idle", "work", "squat"]),
    ],
)
def test_top_is_sorted(order: str, reverse: bool, pods: list[str]) -> None:
    """Numbers largest first, names from A to Z, devices by index; --reverse the other way round."""
    rows = top_values(published(busy().collect()), Shape(order=order, reverse=reverse))["rows"]
    assert [row["pod"] for row in rows if row["pod"]] == pods


def test_what_is_not_known_stands_last_either_way() -> None:
    """A row without a value is neither the largest nor the smallest."""
    work = holder("work", CARD)
    node = TestNode([Gpu(0)], [work], [Process(10, CARD, work, memory=None), Process(11, CARD, None, memory=GIB)])
    node.collect()
    for reverse in (False, True):
        rows = top_values(published(node.collect()), Shape(reverse=reverse))["rows"]
        assert (rows[-1]["pod"], rows[-1]["memory_bytes"]) == ("work", None)
    assert "-" in table(published(node.collect()))[-1]


def test_top_without_pid_visibility() -> None:
    """Holders have dashes, and a sentence says what it takes; no holder has 0."""
    node = busy()
    node.visible = False
    text = top_table(published(node.collect()), Shape())
    rows = [line.split() for line in text.splitlines() if line.startswith("ml")]
    assert [row[4:9] for row in rows] == [["-"] * 5] * 2
    assert "hostPID" in text


# --- waste ------------------------------------------------------------------------------------------------------------


def test_waste_is_told_worst_first() -> None:
    """Who uses what is not theirs, then who holds for nothing, then who was given too much; the sums come last."""
    node = busy()
    leave(node, "squat")
    node.pods.append(Pod("ml", "thief", {"main": {}}))
    node.processes.append(Process(14, OTHER, node.pods[-1], memory=GIB, comm="python3"))
    node.collect()
    found = published(node.collect(10.0))
    values = waste_values(found, Shape())
    assert [(one["finding"], one["pod"]) for one in values["findings"]] == [
        ("squatter", "thief"),
        ("leftover", "squat"),
        ("idle", "idle"),
        ("unused", "work"),
    ]
    assert [one["memory_bytes"] for one in values["findings"]] == [GIB, 9 * GIB, 80 * GIB, 40 * GIB]
    assert values["sums"] == {
        "idle_gpus": 1,
        "idle_holders": 1,
        "maybe_idle_gpus": 0,
        "not_offered_gpus": None,
        "unused_bytes": 120 * GIB,
        "over_bytes": 0,
        "squatter_bytes": GIB,
        "leftover_bytes": 9 * GIB,
        "unexplained_bytes": 0,
        "unexplained_gpus": 0,
        "stalled_gpus": 0,
        "unmatched": 0,
    }
    text = waste_table(found, Shape())
    assert text.splitlines()[-1] == (
        "Sum of the findings: squatter 1.0GiB, leftover 9.0GiB, idle 1 GPU, unused 120.0GiB."
    )
    assert "its pod no longer exists, but left PID 12 miner" in text


def test_the_idle_time_of_a_holder_that_gpumap_saw_at_work_is_exact() -> None:
    """Another holder may have rested before gpumap first looked."""
    new = holder("new", CARD)
    node = TestNode([Gpu(0)], [])
    node.collect()
    node.pods, node.processes = [new], [Process(10, CARD, new, memory=80 * GIB, sm=0.5)]
    for sm in (0.5, 0.5, 0.0):
        node.processes[0].sm = sm
        node.collect(seconds=50)
    for _ in range(7):
        node.collect(seconds=50)
    (one,) = waste_values(published(node.collect(seconds=50)), Shape())["findings"]
    assert (one["finding"], one["why"]) == ("idle", "no activity seen for 7m30s")


def granting(memory_bytes: int | None) -> Callable[[Device], Device]:
    """Makes a device with a first holder that was granted so much."""

    def change(device: Device) -> Device:
        first = next(one for one in device.containers if one.grant)
        granted = changed_in(first, "grant", memory_bytes=memory_bytes)
        return changed(device, containers=tuple(granted if one is first else one for one in device.containers))

    return change


def test_over_users() -> None:
    """Who uses more than it was granted: an MPS share or a memory limit, never a time-slicing replica."""
    node = busy()
    found = published(node.collect())
    values = waste_values(with_devices(found, granting(16 * GIB), 0), Shape())
    over = next(one for one in values["findings"] if one["finding"] == "over")
    assert (over["pod"], over["granted_bytes"], over["used_bytes"], over["memory_bytes"]) == (
        "work", 16 * GIB, 40 * GIB, 24 * GIB,
    )  # fmt: skip
    assert values["sums"]["over_bytes"] == 24 * GIB
    values = waste_values(with_devices(found, granting(None), 0), Shape())
    assert "work" not in [one["pod"] for one in values["findings"]]
    assert values["sums"]["over_bytes"] == 0, "that of the other holder"


def test_a_namespace_without_a_device_has_one_sentence() -> None:
    """Other namespaces are not its doubts, and it has no sums."""
    lazy = holder("lazy", CARD)
    node = TestNode([Gpu(0)], [lazy], [Process(10, CARD, lazy, memory=GIB)])
    node.collect()
    found = published(node.collect())
    assert "ml/lazy" in waste_table(found, Shape())
    assert waste_table(found, Shape(namespace="web")) == "Namespace web has no holder or user of a GPU.\n"


def test_a_new_pod_is_not_judged() -> None:
    """A holder is unused only after --grace, and idle only after --idle-after. Until then it is judged: it is young."""
    old, new = holder("old", CARD), holder("new", OTHER)
    node = TestNode([Gpu(0), Gpu(1)], [old])
    node.watch()
    node.pods.append(new)
    found = published(node.collect(seconds=5))
    assert wasted(found) == {"idle": ("old",)}
    assert found.judged["unused"] == found.judged["idle"] == 2
    assert wasted(judged_again(found, idle_after_seconds=0.001))["idle"] == ("old",)
    node.processes = [Process(10, OTHER, new, memory=GIB, sm=0.5)]
    found = published(node.collect(seconds=30))
    assert wasted(found) == {"idle": ("old",)}
    assert wasted(judged_again(found, grace_seconds=10.0)) == {"idle": ("old",), "unused": ("new",)}
    found = published(node.watch(90.0))
    assert wasted(found) == {"idle": ("old",), "unused": ("new",)}
    assert "no process seen for at least 7m" in waste_table(found, Shape())


def test_a_node_whose_source_is_back_is_not_judged() -> None:
    """What happened meanwhile is unknown: the time of each holder starts again."""
    node = busy()
    assert wasted(published(node.collect())) == {"squatter": ("squat",), "idle": ("idle",), "unused": ("work",)}
    node.down = {"nvml"}
    node.collect()
    node.down = set()
    node.collect()
    assert wasted(published(node.collect())) == {"squatter": ("squat",)}
    assert wasted(published(node.watch())) == {"squatter": ("squat",), "idle": ("idle",), "unused": ("work",)}


def test_little_that_is_unused_is_no_finding() -> None:
    """A fifth of a grant and 1 GiB may stay unused."""

    def unused(used: float, granted: float) -> bool:
        work = holder("work", CARD)
        node = TestNode([Gpu(0)], [work], [Process(10, CARD, work, memory=int(used * GIB), sm=0.9)])
        found = with_devices(published(node.watch()), granting(int(granted * GIB)))
        return "unused" in wasted(found)

    assert not unused(71, 79.6)
    assert unused(20, 79.6)
    assert not unused(0.2, 1)


def test_unused_is_judged_by_the_peak() -> None:
    """A job that restarts leaves its grant unused for a minute only; WASTE is what not even the peak used."""
    work = holder("work", CARD)
    node = TestNode([Gpu(0)], [work], [Process(10, CARD, work, memory=71 * GIB, sm=0.9)])
    node.collect()
    node.processes = [Process(11, CARD, work, memory=17 * GIB, sm=0.1, start=2000)]
    found = published(node.watch())
    assert wasted(found) == {}
    other = TestNode([Gpu(0)], [work], [Process(10, CARD, work, memory=60 * GIB, sm=0.9)])
    other.collect()
    other.processes = [Process(11, CARD, work, memory=17 * GIB, sm=0.1, start=2000)]
    found = published(other.watch())
    (one,) = waste_values(found, Shape())["findings"]
    assert (one["used_bytes"], one["memory_bytes"], one["why"]) == (17 * GIB, 20 * GIB, "peak so far 60.0GiB")
    (device,) = found.devices
    (one,) = device.containers
    peakless = changed_in(one, "use", memory_peak_bytes=None)
    assert wasted(judged_again(found, devices=(changed(device, containers=(peakless,)),))) == {}


def in_two_namespaces() -> Node:
    """An idle holder and a squatter of one namespace, an idle holder of another, and slots on no device."""
    node = busy()
    node.gpus.append(Gpu(2))
    node.pods.append(Pod("web", "shop", {"main": {"nvidia.com/gpu": [str(gpu_uuid(2))]}}))
    node.pods.append(holder("odd", "GPU-none", resource="aliyun.com/gpu-mem"))
    return published(node.watch())


def test_sums_by_namespace() -> None:
    """--by prints a line for each namespace, the largest sum first; -o json always has them."""
    found = in_two_namespaces()
    rows = [line.split() for line in waste_table(found, Shape(sums_by="namespace")).splitlines()]
    assert rows[0] == ["NAMESPACE", "IDLE", "GPUS", "IDLE", "HOLDERS", "UNUSED", "OVER", "SQUATTERS", "LEFTOVERS"]
    assert rows[1] == ["ml", "1", "1", "120.0GiB", "0", "9.0GiB", "0"]
    assert rows[2] == ["web", "1", "1", "80.0GiB", "0", "0", "0"]
    assert rows[-1][:4] == ["Sum", "of", "the", "findings:"]
    values = waste_values(found, Shape())
    assert [(one["namespace"], one["idle_gpus"], one["squatter_bytes"]) for one in values["by_namespace"]] == [
        ("ml", 1, 9 * GIB),
        ("web", 1, 0),
    ]
    for key in ("idle_gpus", "idle_holders", "unused_bytes", "squatter_bytes"):
        assert sum(one[key] for one in values["by_namespace"]) == values["sums"][key]
    assert "by_node" not in values
    assert len(waste_values(found, Shape(namespace="web"))["by_namespace"]) == 1
    narrow = waste_table(found, Shape(sums_by="namespace", screen=Screen(60, colours=False)))
    assert max(map(len, narrow.splitlines())) <= 60


def test_a_sum_of_unknown_values_is_unknown() -> None:
    """Without a known grant `unused` is not 0, and the line of sums leaves it out."""
    shared = holder("shared", CARD)
    node = TestNode([Gpu(0)], [replace(shared, namespace="web")])
    node.processes = [Process(10, CARD, node.pods[0], memory=GIB, sm=0.9)]
    found = with_devices(published(node.watch()), granting(None))
    for shape in (Shape(), Shape(namespace="web")):
        values = waste_values(found, shape)
        assert (values["sums"]["idle_gpus"], values["sums"]["unused_bytes"], values["sums"]["over_bytes"]) == (
            0, None, None,
        )  # fmt: skip
        assert "Sum of the findings" not in waste_table(found, shape)
    row = waste_table(found, Shape(sums_by="namespace")).splitlines()[0]
    assert row == "No waste found in the known data."


def test_waste_of_processes_without_known_memory_is_unknown() -> None:
    """An idle holder of whose process the driver does not report the memory: how much it wastes is unknown, not 0."""
    pod = holder("rests", CARD)
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod, memory=None)])
    found = published(node.watch())
    assert (found.finding_sums["idle_gpus"], found.finding_sums["unused_bytes"]) == (1, None)
    assert waste_table(found, Shape()).endswith("Sum of the findings: idle 1 GPU.\n")


def test_a_process_of_unknown_owner_may_be_a_squatter() -> None:
    """As after a restart of the kubelet: then nothing is 0, and a sentence says on which GPU."""
    node = TestNode([Gpu(0)], [], [Process(21, gpu_uuid(0), None, memory=GIB, readable=False)])
    node.collect()
    found = waste_values(published(node.collect()), Shape())
    assert (found["findings"], found["sums"]["squatter_bytes"], found["sums"]["leftover_bytes"]) == ([], None, None)
    said = "The owner of some processes on GPU 0 is not known: each may be a squatter or a leftover."
    assert said in found["unjudged_sentences"]


def test_holders_of_unknown_use_are_named() -> None:
    """Nothing is known of what a holder uses, although its GPU answers: no 0 GPUs are idle, and a sentence names it."""
    node = TestNode([Gpu(0)], [holder("dark", CARD)])
    node.collect()
    (device,) = published(node.collect()).devices
    (one,) = device.containers
    found = judged_again(
        published(node.collect()), devices=(changed(device, containers=(changed(one, use=None, watch=None),)),)
    )
    text = waste_table(found, Shape())
    assert text.startswith("No waste found in the known data.")
    assert "The driver cannot measure these holders, so it is not known whether they work: ml/dark." in text
    assert "Sum of the findings" not in text


def test_sums_by_node() -> None:
    """Of a fleet also by node: only nodes with a finding."""
    one = in_two_namespaces()
    other = changed(one, name="other")
    fleet = NodeMaps((one, other), fleet=True)
    lines = waste_report.waste_table(fleet, Shape(sums_by="node")).splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["node-a", "2", "2"], ["other", "2", "2"]]
    assert [row["node"] for row in values(waste_report.waste_values(fleet, Shape()))["by_node"]] == ["node-a", "other"]


def test_idle_holders_of_unknown_share_are_counted_as_one_says_it() -> None:
    """One holder, two holders."""
    found = published(busy().collect())
    (one,) = found.devices[1].containers
    shareless = changed_in(one, "grant", gpus=None)
    found = with_devices(found, lambda device: changed(device, containers=(shareless,)), 1)
    assert "idle 1 holder of unknown share" in waste_table(found, Shape())


def with_sidecar(sm: float) -> TestNode:
    """A pod with a card that another of its containers uses, one without a grant."""
    pod = Pod("ml", "served", {"main": {"nvidia.com/gpu": [str(CARD)]}, "sidecar": {}})
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod, container="sidecar", memory=8 * GIB, sm=0.5)])
    node.collect()
    node.collect()
    node.processes[0].sm = sm
    for _ in range(9):
        node.collect(seconds=50)
    return node


def test_a_card_that_its_pod_uses_is_not_idle() -> None:
    """The holder has no process, but a sidecar or an init container of its pod is at work there."""
    found = published(with_sidecar(sm=0.5).collect())
    assert {"idle", "unused"}.isdisjoint(wasted(found))
    init = Pod(
        "ml", "starts", {"main": {"nvidia.com/gpu": [str(CARD)]}}, init={"load": {"nvidia.com/gpu": [str(CARD)]}}
    )
    node = TestNode([Gpu(0)], [init], [Process(10, CARD, init, container="load", memory=GIB, sm=0.9)])
    assert wasted(published(node.watch())) == {}


def test_a_holder_whose_sibling_works_in_short_jobs_is_not_idle() -> None:
    """Also in a collection in which the sibling has no process."""
    ids = [f"{CARD}::{number}" for number in range(2)]
    shared = "nvidia.com/gpu.shared"
    pod = Pod("ml", "pair", {"main": {shared: ids[:1]}, "worker": {shared: ids[1:]}})
    node = TestNode([Gpu(0)], [pod])
    for number in range(200):
        node.processes = [Process(100 + number, CARD, pod, "worker", sm=0.5)] if number % 4 else []
        assert "idle" not in wasted(published(node.collect()))


def test_a_holder_is_idle_since_its_pod_last_worked() -> None:
    """A sidecar that worked later than the holder began the time of its finding."""
    node = with_sidecar(sm=0.5)
    worked = node.collect().node.timestamp
    node.processes[0].sm = 0.0
    found = published(node.watch(400.0))
    (one,) = [one for one in found.findings or () if one.finding == "idle"]
    assert (one.since, one.reason) == (worked, "no_activity")


def test_a_pod_that_rests_as_a_whole_is_idle() -> None:
    """A sidecar that has done no work for long does not count as work of its pod."""
    assert wasted(published(with_sidecar(sm=0.0).collect()))["idle"] == ("served",)


def test_on_mig_idle_is_no_process() -> None:
    """Without GPM nothing shows the work of a process there: it may work, and a sentence says so."""
    gpu = Gpu(0, mig=[(1, 0, 3), (2, 0, 3)])
    used, unused = gpu.leaves
    work, idle = holder("work", used), holder("idle", unused)
    node = TestNode([gpu], [work, idle], [Process(10, used, work, memory=10 * GIB)])
    found = published(node.watch())
    assert wasted(found) == {"idle": ("idle",)}
    said = "The driver cannot measure these holders, so it is not known whether they work: ml/work."
    assert said in waste_table(found, Shape())
    assert waste_values(found, Shape())["sums"]["idle_gpus"] == pytest.approx(3 / 7, abs=1e-3)


@pytest.mark.parametrize("outage_seconds", [60.0, 900.0])
def test_after_an_outage_of_the_kubelet_idle_is_unknown(outage_seconds: float) -> None:
    """A holder without a process is then not watched: "0 idle" would be a guess, until gpumap has watched it again."""
    node = busy()
    assert wasted(published(node.collect()))["idle"] == ("idle",)
    node.down = {"kubelet"}
    node.watch(outage_seconds)
    node.down = set()
    for seconds in range(0, 330, 30):
        found = published(node.collect(30.0))
        kinds = wasted(found).keys() & {"idle", "maybe_idle"}
        has_watched = node.clock - 1000.0 >= 630.0 and outage_seconds < 100.0
        assert kinds == ({"idle"} if seconds >= 270 else {"maybe_idle"} if has_watched else set())
        assert ("idle" in judged_kinds(found)) == bool(kinds)
        assert waste_values(found, Shape())["sums"]["idle_gpus"] == (1.0 if "idle" in kinds else 0 if kinds else None)
        said = "gpumap has not watched these holders for long enough (idle"
        assert any(said in sentence for sentence in found.unjudged_sentences) != bool(kinds)


def test_holder_of_a_partitioned_gpu_is_judged_on_all_of_it() -> None:
    """It is idle only when each of the leaves is."""
    gpu = Gpu(0, mig=[(1, 0, 3), (2, 0, 3)])
    whole = holder("whole", gpu.uuid)
    node = TestNode([gpu], [whole])
    assert wasted(published(node.watch())) == {"idle": ("whole",)}
    node.processes = [Process(10, gpu.leaves[1], whole, memory=3 * GIB)]
    (one,) = waste_values(published(node.collect()), Shape())["findings"]
    assert (one["finding"], one["used_bytes"]) == ("unused", 3 * GIB)


def test_shared_memory_is_summed_once() -> None:
    """Compute instances of one GPU instance share its memory: what is unused of it is not counted twice."""
    gpu = Gpu(0, mig=[(1, 0, 1), (1, 1, 1)])
    node = TestNode([gpu], [holder("a", gpu.leaves[0]), holder("b", gpu.leaves[1])])
    found = published(node.watch())
    assert wasted(found) == {"idle": ("a", "b")}
    memory = found.devices[0].memory
    assert memory is not None
    assert waste_values(found, Shape())["sums"]["unused_bytes"] == memory.total_bytes


def test_unmatched_slots_are_found() -> None:
    """Slots on no device, with the reason and, for scripts, the remedy."""
    node = TestNode([Gpu(0)], [holder("odd", "GPU-none", resource="aliyun.com/gpu-mem")])
    node.collect()
    (one,) = waste_values(published(node.collect()), Shape())["findings"]
    assert (one["finding"], one["pod"], one["device"], one["uuid"]) == ("unmatched", "odd", None, None)
    assert "aliyun.com/gpu-mem" in one["why"]
    assert one["remedy"]
    assert f"\nunmatched of odd: {one['remedy']}\n" in waste_table(published(node.collect()), Shape(wide=True))


@pytest.mark.parametrize(
    ("down", "visible", "says", "silent"),
    [
        ({"nvml"}, True, "NVML does not answer", {"idle_gpus", "unused_bytes", "squatter_bytes", "leftover_bytes"}),
        (set(), False, "hostPID", {"idle_gpus", "unused_bytes", "squatter_bytes", "leftover_bytes"}),
        ({"procfs"}, True, "hostPID", {"idle_gpus", "unused_bytes", "squatter_bytes", "leftover_bytes"}),
        ({"kubelet"}, True, "The kubelet does not answer", {"squatter_bytes", "leftover_bytes", "unmatched"}),
        ({"pod_identity"}, True, "cannot name the pods of processes", {"squatter_bytes", "leftover_bytes"}),
    ],
)
def test_what_is_not_known_accuses_nobody(down: set[str], visible: bool, says: str, silent: set[str]) -> None:
    """Without a source there is no verdict that rests on it, its sum is unknown, not 0, and a sentence says so."""
    node = busy()
    node.processes = []
    node.collect()
    node.down, node.visible = down, visible
    found = published(node.collect())
    values = waste_values(found, Shape())
    assert {name for name, value in values["sums"].items() if value is None} >= silent
    assert says in waste_table(found, Shape())
    assert {one["finding"] for one in values["findings"]} <= (
        {"idle", "unused"} if down & {"kubelet", "pod_identity"} else set()
    )


def test_a_gpu_that_is_down_is_not_judged() -> None:
    """Its holder is not idle: its use is unknown. The others are judged all the same."""
    node = busy()
    node.gpus[1].fault = "hung"
    found = published(node.collect())
    assert "idle" not in wasted(found)
    assert "GPU 1 is down: gpumap cannot check anything there." in waste_table(found, Shape())
    assert wasted(found)["squatter"] == ("squat",)


def test_a_gpu_that_needs_repair_is_named() -> None:
    """It answers, so its rows are as ever; a line below them says what to do, of `waste` where to look."""
    found = published(busy().collect())
    well, gpu = found.gpus
    rows = changed_in(gpu, "reading", row_remap_pending=True)
    asks = changed(gpu, recovery_action="gpu_reset")
    for broken, why, reason in (
        (rows, "GPU 1 needs a reset to replace bad memory rows", "row_remap_pending"),
        (asks, "GPU 1 requires a reset", "recovery_gpu_reset"),
    ):
        said = f"{why}. {advice(finding_remedy('fault', reason, 1))}"
        node = judged_again(found, gpus=(well, broken))
        for show in (map_table, top_table):
            assert said in " ".join(show(node, Shape()).split())
        hint = "GPU 1 needs repair: see `gpumap doctor --url http://node`."
        assert hint in waste_table(node, Shape(source_flags=" --url http://node")).splitlines()
        live = pressed(Live(), "enter", 1)
        assert live is not None
        details = " ".join(frame(NodeMaps((node,)), live, Shape(), (), 24).lines)
        assert said.removeprefix("GPU 1 ").partition(". ")[2] in details
    for show in (map_table, top_table, waste_table):
        assert "repair" not in show(found, Shape())


def test_a_stale_document_is_no_node_without_devices() -> None:
    """Where all there was is too old, each table says so; nothing is judged, and nothing adds up to 0."""
    found = published(
        with_node(busy().collect(), gpus=(), devices=(), findings=None, judged={}), stale="no collection for a week"
    )
    for show in (map_table, top_table, waste_table):
        text = show(found, Shape())
        assert text.startswith("No current data.")
        assert "no collection for a week" in text
        assert "No devices" not in text
    values = waste_values(found, Shape())
    assert (values["unjudged_sentences"], set(values["sums"].values())) == (["no collection for a week"], {None})
    assert sources_up(found) == set()


def test_waste_is_sorted() -> None:
    """By any column; without one by how bad it is."""
    found = published(busy().collect())
    by_pod = waste_values(found, Shape(order="pod"))["findings"]
    assert [one["pod"] for one in by_pod] == ["idle", "squat", "work"]
    by_waste = waste_values(found, Shape(order="waste"))["findings"]
    assert [one["pod"] for one in by_waste] == ["idle", "work", "squat"]
    turned = waste_values(found, Shape(reverse=True))["findings"]
    assert [one["finding"] for one in turned] == ["unused", "idle", "squatter"]


def test_a_verdict_is_the_same_for_one_namespace() -> None:
    """Who holds a partitioned GPU whole is judged by all of its devices, also by those that nothing is known of."""
    whole = holder("whole", CARD)
    node = TestNode([Gpu(0, mig=[(1, 0, 3), (2, 0, 4)])], [whole])
    found = published(node.watch())
    assert wasted(found) == wasted(found, namespace="ml") == {"idle": ("whole",)}
    (dark,) = (n for n, device in enumerate(found.devices) if device.mig and device.mig.gpu_instance_id == 2)
    found = with_devices(found, lambda device: changed(device, containers=(), owners=()), dark)
    assert wasted(found) == wasted(found, namespace="ml") == {}
    for shape in (Shape(), Shape(namespace="ml")):
        assert waste_table(found, shape).startswith("No waste found in the known data.")
        assert "The use of GPU 0/2/0 4g" in waste_table(found, shape)
    assert waste_table(found, Shape(namespace="web")).startswith("Namespace web has no known holder or user")


def test_where_nothing_is_told_nothing_is_judged() -> None:
    """Devices with unknown holders and users have no sums and no waste, and are not free."""
    node = TestNode([Gpu(0)], [], allocatable={"nvidia.com/gpu": [str(CARD)]})
    node.collect()
    found = published(node.collect())
    assert waste_table(found, Shape()).startswith("No waste found.\n")
    lacking: tuple[Callable[[Device], Device], ...] = (
        lambda device: changed(device, holders=None),
        lambda device: changed(device, owners=()),
    )
    for without in lacking:
        less = judged_again(with_devices(found, without), collect=())
        assert not waste_table(less, Shape()).startswith("No waste found.\n")
        assert "of the only device" in waste_table(less, Shape())
        assert "of the only device" in map_table(less, Shape())
        assert map_table(less, Shape(namespace="ml")).startswith("Namespace ml has no known holder or user")
        sums = waste_values(less, Shape())["sums"]
        assert (sums["squatter_bytes"] if less.devices[0].holders is not None else sums["idle_gpus"]) is None
    dark = with_devices(found, lambda device: changed(device, owners=(), holders=None))
    assert set(waste_values(dark, Shape())["sums"].values()) == {None, 0}


def test_names_are_of_pods_that_are_there() -> None:
    """-o name is for other commands, which find no pod that is gone."""
    node = busy()
    leave(node, "work")
    node.collect()
    seen = maps(node.collect())
    assert ("ml", "work") not in top_names(seen, Shape())
    assert ("ml", "work") not in waste_names(seen, Shape())
    assert ("ml", "squat") in top_names(seen, Shape())


def test_names_are_arguments_of_kubectl() -> None:
    """A pod is found by its namespace and name; of one namespace the name is enough."""
    seen = maps(busy().collect())
    for namespace, line in (("", "-n ml pod/squat"), ("ml", "pod/squat")):
        view = View(waste_report.REPORT, "name", Shape(namespace=namespace), "", watch=False, interval_seconds=1.0)
        assert line in text_of(seen, view, PIPE).splitlines()


def test_memory_that_containers_share_is_named() -> None:
    """WASTE of a compute instance is its part of the GPU instance's memory: a sentence says why it is so little."""
    holders = [Pod("ml", f"ci{n}", {"main": {"nvidia.com/mig-1c": [str(mig_uuid(0, 1, n))]}}) for n in range(2)]
    alone = Pod("ml", "gi", {"main": {"nvidia.com/mig-1g": [str(mig_uuid(0, 2, 0))]}})
    node = TestNode([Gpu(0, mig=[(1, 0, 1), (1, 1, 1), (2, 0, 1)])], [*holders, alone])
    text = waste_table(published(node.watch()), Shape())
    (said,) = (line for line in text.splitlines() if "containers share" in line)
    assert said.endswith(": ml/ci0, ml/ci1.")
    node.pods.pop(0)
    assert "containers share" not in waste_table(published(node.watch()), Shape())


async def test_nodes_of_which_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and a line for each, or for a few, in every form."""

    async def sights() -> AsyncIterator[NodeMaps]:
        yield NodeMaps((well, *dark), fleet=True)

    node = TestNode([Gpu(0)], [])
    node.collect()
    well = published(node.collect())
    node.down = {"kubelet", "nvml"}
    dead = published(node.collect(90.0))
    dark = [changed(dead, name=f"node-{n}") for n in range(7)]
    for form in ("table", "wide", "json", "yaml", "name"):
        view = View(top_report.REPORT, form, Shape(), "", watch=False, interval_seconds=1.0)
        assert await _show(sights(), view) == 1  # type: ignore[arg-type] # the test's own
        said = capsys.readouterr().err.splitlines()
        assert said[0] == "gpumap: node node-0: neither its kubelet nor NVML answers"
        assert said[5] == "gpumap: and 2 more like this"


def test_the_map_has_the_findings() -> None:
    """An agent serves what `gpumap waste` says, with a remedy for each finding; of a namespace only its findings."""
    node = busy()
    found = published(node.collect())
    served_as_waste(found)
    assert found.findings is not None
    assert [(one.finding, one.remedy) for one in found.findings] == [
        (kind, FINDINGS[kind]) for kind in ("squatter", "idle", "unused")
    ]
    assert len(in_one(found, "ml").findings or ()) == 3
    assert (in_one(found, "web").findings, in_one(found, "web").finding_sums) == ((), {})
    stale = published(
        with_node(node.collect(), gpus=(), devices=(), findings=None, judged={}), stale="no collection for a week"
    )
    assert (stale.findings, stale.finding_sums, stale.unjudged_sentences) == (None, {}, ("no collection for a week",))


def in_one(found: Node, namespace: str) -> Node:
    (one,) = select_rows(NodeMaps((found,)), namespace, ()).maps
    return one


def test_remedies_are_below_the_table() -> None:
    """The first one of each kind of finding; the wide table has all that differ."""
    node = busy()
    node.pods += [Pod("ml", name, {"main": {}}) for name in ("ends", "stays")]
    node.processes += [Process(20 + number, OTHER, node.pods[-number], memory=GIB) for number in (1, 2)]
    node.collect()
    leave(node, "squat")
    leave(node, "ends")
    node.collect()
    answer = published(node.collect(10.0))
    for wide, leftovers in ((False, 1), (True, 2)):
        lines = waste_table(answer, Shape(wide=wide)).splitlines()
        assert lines.count(f"squatter: {FINDINGS['squatter']}") == 1
        assert sum(line.startswith("leftover: ") for line in lines) == leftovers
    assert FINDINGS["squatter"] not in waste_table(answer, Shape(sums_by="namespace"))


@settings(max_examples=examples(200))
@given(runs())
def test_every_node_can_be_shown(run: list[Snapshot | TestNode]) -> None:
    """Whatever a node has been through: top accounts for each byte, waste claims no more than there is, none raises."""
    (node,) = run
    assert isinstance(node, TestNode)
    for _ in range(2):
        found = published(node.collect())
        for shape in (Shape(), Shape(wide=True, processes=True, screen=Screen(70, colours=True))):
            assert map_table(found, shape)
            assert top_table(found, shape)
            assert waste_table(found, shape)
            assert doctor_table(found, shape)
        accounts_for_memory(found)
        served_as_waste(found)
        claims_no_more_than_there_is(found)


def accounts_for_memory(found: Node) -> None:
    """The rows of a device add up to what its owners have, each of which reports all its bytes; L1 has these add up."""
    for device in found.devices:
        if not device.owners or any(one.memory_bytes is None for one in device.processes):
            continue
        of_owners = sum(owner.memory_bytes or 0 for owner in device.owners)
        assert device.memory is None or of_owners == device.memory.used_bytes
        for shape in (Shape(), Shape(processes=True)):
            rows = [row for row in top_values(found, shape)["rows"] if row["uuid"] == device.uuid]
            told = sum(row["memory_bytes"] or 0 for row in rows)
            assert told == of_owners, (shape, rows, device)


@settings(max_examples=examples(100))
@given(runs(lambda _, snapshot: accounts_for_memory(published(snapshot))))
def test_top_accounts_for_all_memory_at_every_moment(run: list[Snapshot | TestNode]) -> None:
    """Also while a pod's name is another's, the kubelet is away, or a pod is not yet known to be gone."""
    assert run


def claims_no_more_than_there_is(found: Node) -> None:
    values = waste_values(found, Shape())
    memories = (gpu.reading.memory for gpu in found.gpus if gpu.reading)
    total = sum(memory.total_bytes for memory in memories if memory)
    assert (values["sums"]["unused_bytes"] or 0) <= total
    assert (values["sums"]["idle_gpus"] or 0) <= len(found.gpus) + 1e-3
    rows = [(device, row) for device in found.devices for row in device.containers]
    holding_pods = {(row.pod_name, device.uuid) for device, row in rows if row.holds}
    users = {
        (row.name, device.uuid)
        for device, row in rows
        if row.owner is Owner.UNASSIGNED
        and row.use
        and not holding_pods & {(row.pod_name, device.uuid), (row.pod_name, device.gpu_uuid)}
    }
    squatters = {
        ((one["namespace"], one["pod"], one["container"] or ""), one["uuid"])
        for one in values["findings"]
        if one["finding"] == "squatter"
    }
    assert squatters == users


# --- the installed command --------------------------------------------------------------------------------------------


async def test_every_form_of_an_agent(demo_url: str) -> None:
    """Tables, JSON and YAML of a running agent say the same; nothing is on stderr."""
    for command, word in (("top", "rows"), ("waste", "findings")):
        forms = ("table", "wide", "json", "yaml")
        runs = await asyncio.gather(*(run_command_in_loop(command, "-o", form, "--url", demo_url) for form in forms))
        assert [(done.returncode, done.stderr) for done in runs] == [(0, "")] * len(forms)
        for form, done in zip(forms, runs, strict=True):
            if form in ("json", "yaml"):
                found = json.loads(done.stdout) if form == "json" else yaml.safe_load(done.stdout)
                assert found["version"] == 1
                assert "squatter" in [row["pod"] for row in found[word]]
            else:
                assert "squatter" in done.stdout
        assert len(runs[1].stdout.splitlines()[0]) > len(runs[0].stdout.splitlines()[0])


def test_an_agent_serves_its_findings(demo_url: str) -> None:
    """The demo's squatter is in /api/v1/map, as `gpumap waste` judges the same map."""
    found = decode(fetch(f"{demo_url}/api/v1/map")[0].encode())
    served_as_waste(found)
    assert "squatter" in [one.pod for one in found.findings or ()]


async def test_order_and_process_flags(demo_url: str, tmp_path: Path) -> None:
    """--sort-by, --reverse, --no-headers and --processes reach the table."""
    done = await run_command_in_loop(
        "top", "--processes", "--sort-by", "pid", "--reverse", "--no-headers", "--url", demo_url
    )
    lines = (line.partition(" C ")[0].split() for line in done.stdout.splitlines() if " C " in line)
    pids = [int(line[-1]) for line in lines]
    assert pids
    assert pids == sorted(pids, reverse=True)
    for flags, said in (
        (("--by", "node", "--sort-by", "pod"), "--sort-by sorts findings, but --by prints no findings"),
    ):
        done = await run_command_in_loop("waste", *flags, "--url", demo_url)
        assert (done.returncode, done.stderr) == (2, f"gpumap: {said}\n")
    token = tmp_path / "a token"
    token.write_text("secret")
    source_flags = ("--url", demo_url, "--token-file", str(token), "--header", "X-Key: secret")
    done = await run_command_in_loop("waste", "--by", "namespace", *source_flags)
    assert (done.returncode, done.stdout.split()[:3]) == (0, ["NAMESPACE", "IDLE", "GPUS"])
    assert f"see `gpumap doctor --url {demo_url} --token-file '{token}'`" in done.stdout


def test_squatter_and_leftover_of_one_name_are_told_apart() -> None:
    """A pod was made again under its name: the new one's process is its own, the old one's is a leftover."""
    old = holder("db-0", OTHER)
    new = replace(old, generation=1)
    old.listed = old.in_checkpoint = False
    offered = {"nvidia.com/gpu": [str(CARD), str(OTHER)]}
    node = TestNode([Gpu(0), Gpu(1)], [old, new], [Process(5, CARD, old), Process(6, CARD, new)], offered)
    for _ in range(3):
        snapshot = node.collect()
    pids = {one.finding: one.pids for one in snapshot.node.findings or () if one.finding != "idle"}
    assert pids == {"squatter": (6,), "leftover": (5,)}


def test_json_on_a_terminal_steers_nothing() -> None:
    """Controls and direction marks are written as JSON's escapes, and mean the same."""
    told = {"name": "a\x9b31m\u202eb\u2028 é \U000e0001", "n": [1]}
    text = escape_terminal_controls(json.dumps(told, indent=2, ensure_ascii=False))
    assert all(line.isprintable() for line in text.split("\n"))
    assert "é" in text
    assert json.loads(text) == told
