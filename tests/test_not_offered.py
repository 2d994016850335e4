"""GPUs that no container can be assigned: found by each kind of evidence, and by nothing less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpumap.agent.published import published
from gpumap.cli.commands.doctor import doctor_checks
from gpumap.cli.commands.top_screen import Live, frame
from gpumap.cli.table import Shape
from gpumap.cli.terminal import Screen
from gpumap.model.check import LINE_BYTES, check
from gpumap.model.node import Finding
from gpumap.model.observations import ClaimDevice
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests.agent import serve
from tests.command import run_command_in_loop
from tests.exposed import Page
from tests.machine import Node
from tests.nodes import Gpu, Pod, TestNode, gpu_uuid, mig_uuid
from tests.shown import map_table, maps, waste_table, waste_values

WHOLE, SHARED, SLICE = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"
CARD, OTHER, THIRD = (gpu_uuid(index) for index in range(3))
MOVED = {"model": "NVIDIA T400"}
"""Another model than that of the other GPUs."""


def offer(*ids: str, resource: str = WHOLE) -> dict[str, list[str]]:
    return {resource: [*ids]} if ids else {}


def two_gpus(*pods: Pod, **values: object) -> TestNode:
    node = TestNode([Gpu(0), Gpu(1)], [*pods])
    for name, value in values.items():
        setattr(node, name, value)
    return node


def holder(*ids: str, namespace: str = "ml") -> Pod:
    return Pod(namespace, "job", {"main": {WHOLE: [*ids]}})


def watch(node: TestNode, seconds: float = 150.0) -> Snapshot:
    """Collect for longer than `--grace`."""
    return node.watch(seconds)


def found(snapshot: Snapshot) -> dict[str | None, Finding]:
    """Return the findings by GPU."""
    return {one.uuid: one for one in snapshot.node.findings or () if one.finding == "not_offered"}


def reasons(snapshot: Snapshot) -> dict[str | None, str]:
    return {uuid: one.reason for uuid, one in found(snapshot).items()}


def slots(snapshot: Snapshot) -> dict[Uuid, dict[str, int]]:
    return {device.uuid: device.allocatable for device in snapshot.node.devices}


def unjudged(snapshot: Snapshot) -> list[str]:
    return [entry.reason for entry in snapshot.node.unjudged for kind in entry.findings if kind == "not_offered"]


# --- what is found ----------------------------------------------------------------------------------------------------


def test_a_plugin_that_dies() -> None:
    """From [a, b] to []: 0 slots at once, and after `--grace` a finding for each GPU since the offer ended."""
    node = two_gpus(allocatable=offer(CARD, OTHER))
    assert slots(node.collect()) == {CARD: {WHOLE: 1}, OTHER: {WHOLE: 1}}
    node.allocatable = offer()
    snapshot = node.collect()
    began = snapshot.node.timestamp
    assert slots(snapshot) == {CARD: {WHOLE: 0}, OTHER: {WHOLE: 0}}
    snapshot = node.watch(90.0)
    assert found(snapshot) == {}
    snapshot = node.collect(30.0)
    assert reasons(snapshot) == {CARD: "no_resource", OTHER: "no_resource"}, "at the limit it counts"
    (finding, _) = found(snapshot).values()
    assert (finding.since, finding.gpus, finding.memory_bytes, finding.name) == (began, 1.0, None, ("", "", ""))
    assert "device plugin stopped or removed, for example for DRA" in finding.why
    assert (snapshot.node.judged["not_offered"], unjudged(snapshot)) == (2, [])
    node.allocatable = offer(CARD, OTHER)
    snapshot = node.collect()
    assert (found(snapshot), slots(snapshot)) == ({}, {CARD: {WHOLE: 1}, OTHER: {WHOLE: 1}})


FRESH: dict[str, tuple[TestNode, dict[str | None, str], dict[Uuid, dict[str, int]]]] = {
    "registered": (
        two_gpus(allocatable={}, registered=offer(CARD, OTHER)),
        {CARD: "no_resource", OTHER: "no_resource"},
        {CARD: {WHOLE: 0}, OTHER: {WHOLE: 0}},
    ),
    "held": (two_gpus(holder(CARD), allocatable={}), {CARD: "no_resource"}, {CARD: {WHOLE: 0}, OTHER: {}}),
    "others": (
        TestNode([Gpu(0), Gpu(1), Gpu(2)], allocatable=offer(CARD, OTHER)),
        {THIRD: "left_out"},
        {CARD: {WHOLE: 1}, OTHER: {WHOLE: 1}, THIRD: {WHOLE: 0}},
    ),
    "other resource": (
        two_gpus(holder(CARD), allocatable=offer(f"{OTHER}::0", f"{OTHER}::1", resource=SHARED)),
        {CARD: "left_out"},
        {CARD: {WHOLE: 0}, OTHER: {SHARED: 2}},
    ),
}
"""Nodes of which an agent that just started finds GPUs, for example 10 minutes after the plugin died."""


@pytest.mark.parametrize("name", FRESH)
def test_an_agent_that_starts_later(name: str) -> None:
    """It needs no memory: the checkpoint, the List and the other GPUs show which GPUs should be offered."""
    node, expected, shown = FRESH[name]
    assert slots(node.collect()) == shown
    assert reasons(watch(node)) == expected


@pytest.mark.parametrize(
    ("resource", "id_"), [(WHOLE, str(gpu_uuid(99))), ("nvidia.com/GH100", "0000:65:00.0"), (WHOLE, "nvidia9")]
)
def test_slots_of_gpus_that_nvml_does_not_list(resource: str, id_: str) -> None:
    """They are certainly on none of the others: what cannot be judged hides nothing."""
    node = offered_before(two_gpus(), allocatable=offer(id_, resource=resource))
    assert set(reasons(watch(node))) == {CARD, OTHER}


@pytest.mark.parametrize(
    ("resource", "names"),
    [(SHARED, [f"{CARD}::0", f"{CARD}::1"]), ("nvidia.com/vgpu", [f"{CARD}-0"]), (WHOLE, ["nvidia0"])],
)
def test_each_form_of_ids(resource: str, names: list[str]) -> None:
    """Replicas, splits and device nodes name their GPU too."""
    node = TestNode([Gpu(0)], allocatable=offer(*names, resource=resource))
    assert slots(node.collect()) == {CARD: {resource: len(names)}}
    node.allocatable = {}
    assert slots(node.collect()) == {CARD: {resource: 0}}
    assert reasons(watch(node)) == {CARD: "no_resource"}


def test_mig_devices() -> None:
    """A partitioned GPU is offered by any of its MIG devices. Without any, each of them has 0 slots."""
    one, other = mig_uuid(0, 1, 0), mig_uuid(0, 2, 0)
    node = TestNode([Gpu(0, mig=[(1, 0, 1), (2, 0, 1)]), Gpu(1)], allocatable=offer(one, other, resource=SLICE))
    node.collect()
    node.allocatable = offer(one, resource=SLICE)
    assert reasons(watch(node)) == {OTHER: "left_out"}
    node.allocatable = {}
    assert slots(node.collect()) == {one: {SLICE: 0}, other: {SLICE: 0}, OTHER: {}}
    assert reasons(watch(node)) == {CARD: "no_resource"}
    assert found(node.collect())[CARD].gpus == 1.0


# --- what is not found ------------------------------------------------------------------------------------------------


def partitioned() -> TestNode:
    """A GPU that was offered as a whole, then partitioned."""
    node = TestNode([Gpu(0)], allocatable=offer(CARD), registered=offer(CARD))
    node.collect()
    node.gpus = [Gpu(0, mig=[(1, 0, 1)])]
    node.allocatable = {}
    return node


def offered_before(node: TestNode, **later: object) -> TestNode:
    """A node with an offer of both GPUs, then with these values."""
    node.allocatable = offer(CARD, OTHER)
    node.collect()
    node.allocatable = {}
    for name, value in later.items():
        setattr(node, name, value)
    return node


CLAIM = ClaimDevice("gpu.nvidia.com", "node-a", "gpu-0", "", "ml", "claim")
NETWORK_CLAIM = ClaimDevice("dra.net", "node-a", "eth0", "", "ml", "claim")
CLAIMING = Pod("ml", "claiming", claims={"main": [CLAIM]})
QUIET: dict[str, tuple[Callable[[], TestNode], list[str]]] = {
    "no plugin": (lambda: two_gpus(allocatable={}), []),
    "MIG parent": (partitioned, []),
    "MIG parent that is held": (
        lambda: TestNode([Gpu(0, mig=[(1, 0, 1)])], [holder(CARD)], allocatable={}, registered=offer(CARD)),
        [],
    ),
    "MIG without devices": (lambda: TestNode([Gpu(0, mig=[]), Gpu(1)], allocatable=offer(OTHER)), []),
    "whole MIG GPU": (lambda: TestNode([Gpu(0, mig=[(1, 0, 1)]), Gpu(1)], allocatable=offer(CARD, OTHER)), []),
    "reservation": (
        lambda: two_gpus(holder(CARD, namespace="kai-resource-reservation"), allocatable=offer(OTHER)),
        [],
    ),
    "display card": (
        lambda: TestNode([Gpu(0), Gpu(1), Gpu(2, values=MOVED)], allocatable=offer(CARD, OTHER)),
        [],
    ),
    "two of a model": (lambda: TestNode([Gpu(0), Gpu(1), Gpu(2)], allocatable=offer(CARD)), []),
    "mixed names": (
        lambda: offered_before(two_gpus(), allocatable={WHOLE: [CARD], SHARED: [f"{OTHER}::0", f"{OTHER}::1"]}),
        [],
    ),
    "unknown ids": (lambda: offered_before(two_gpus(), allocatable=offer("card-0")), ["offers_unknown"] * 2),
    "units of any GPU": (
        lambda: offered_before(
            two_gpus(), allocatable=offer("tencent.com/vcuda-core-1", resource="tencent.com/vcuda-core")
        ),
        ["offers_unknown"] * 2,
    ),
    "no known minor": (
        lambda: TestNode([Gpu(0), Gpu(1, has_minor=False)], allocatable=offer("nvidia0", "nvidia7")),
        ["offers_unknown"] * 2,
    ),
    "claim": (lambda: offered_before(two_gpus(), pods=[CLAIMING]), ["offers_unknown"] * 2),
    "claim without a driver": (
        lambda: offered_before(two_gpus(), pods=[Pod("ml", "old", claims={"main": [replace(CLAIM, driver="")]})]),
        ["offers_unknown"] * 2,
    ),
    "lost GPU": (
        lambda: offered_before(two_gpus(), gpus=[Gpu(0, fault="lost"), Gpu(1)], allocatable=offer(OTHER)),
        ["gpu_down"],
    ),
    "old kubelet": (lambda: offered_before(two_gpus(), allocatable=None), ["offers_unknown"] * 2),
    "no kubelet": (lambda: two_gpus(has_kubelet=False), ["no_kubelet"] * 2),
    "kubelet down": (lambda: offered_before(two_gpus(), down={"kubelet"}), ["kubelet_down"] * 2),
    "no driver": (lambda: offered_before(two_gpus(), down={"nvml"}), ["nvml_down"]),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_no_finding(name: str) -> None:
    """No evidence, no finding. What cannot be judged has a reason, and no zero."""
    make, expected = QUIET[name]
    node = make()
    snapshots = [node.collect(30.0) for _ in range(8)]
    assert [found(snapshot) for snapshot in snapshots] == [{}] * 8
    assert unjudged(snapshots[-1]) == expected
    judged = snapshots[-1].node.judged["not_offered"]
    assert judged == max(len(snapshots[-1].node.gpus) - len(expected), 0)
    assert not [count for of_device in slots(snapshots[-1]).values() for count in of_device.values() if not count]


def test_a_rollout_of_the_plugin() -> None:
    """30 s without an offer, again and again, are no finding: the wait starts again."""
    node = two_gpus()
    for _ in range(6):
        offered_before(node)
        assert [found(node.collect(10.0)) for _ in range(3)] == [{}] * 3


@pytest.mark.parametrize("interruption", ["no answer", "gap"])
def test_the_wait_needs_each_collection(interruption: str) -> None:
    """An allocatable answer that is missing, or a time without collections, starts the wait again."""
    node = offered_before(two_gpus())
    node.watch(90.0)
    if interruption == "gap":
        node.collect(400.0)
    else:
        node.allocatable = None
        node.collect(5.0)
        node.allocatable = {}
    assert found(node.watch(90.0)) == {}
    assert len(found(node.watch(60.0))) == 2


def test_a_move_to_dra() -> None:
    """Until a claim is seen, the plugin is gone for an unknown reason. A claim settles it, also after it ended."""
    node = offered_before(two_gpus())
    node.pods = [Pod("ml", "net", claims={"main": [NETWORK_CLAIM]})]
    assert set(reasons(watch(node)).values()) == {"no_resource"}, "a claim of a network device is none of GPUs"
    node.pods = [CLAIMING]
    assert unjudged(node.collect()) == ["offers_unknown"] * 2
    node.pods = []
    snapshot = watch(node)
    assert (found(snapshot), unjudged(snapshot)) == ({}, ["offers_unknown"] * 2)
    assert any("can be assigned GPU 0, 1" in sentence for sentence in published(snapshot).unjudged_sentences)


# --- what people see --------------------------------------------------------------------------------------------------


def test_check_names_gpus_that_are_not_offered() -> None:
    """The GPUs work: exit code 0. Asked for it, the condition is a problem, and unknown if it cannot be judged."""
    node = TestNode([Gpu(0), Gpu(1), Gpu(2)], allocatable=offer(CARD, OTHER))
    assert check(node.collect().node) == (0, "3 GPUs well")
    assert check(node.collect().node, ["not_offered"]) == (0, "3 GPUs well (not_offered)")
    snapshot = watch(node).node
    assert check(snapshot) == (0, "3 GPUs well, 1 not offered")
    assert check(snapshot, ["not_offered"]) == (1, "GPU 2 is not offered: its device plugin leaves it out")
    assert check(snapshot, ["down"]) == (0, "3 GPUs well (down)")
    node.allocatable = {}
    code, line = check(watch(node).node, ["not_offered"])
    assert (code, line.endswith(" (+1 GPU)"), len(line)) == (1, True, LINE_BYTES)
    node.gpus, node.allocatable = [Gpu(0)], None
    snapshot = node.collect().node
    assert check(snapshot) == (0, "1 GPU well")
    assert check(snapshot, ["not_offered"]) == (2, "GPU 0: not_offered is unknown: offers_unknown")
    node.gpus, node.allocatable = [Gpu(0, fault="lost")], {}
    assert check(node.collect().node, ["not_offered"]) == (2, "GPU 0: not_offered is unknown: gpu_down")


def test_every_command_shows_it() -> None:
    """A line in doctor, top and waste, on its GPU and no container's row; the sums count GPUs."""
    node = two_gpus(holder(CARD))
    snapshot = watch(offered_before(node))
    shown = published(snapshot)
    assert shown.finding_sums["not_offered_gpus"] == 2
    results = [result for result in doctor_checks(shown) if result.check.endswith("not_offered")]
    assert [(result.check, result.state) for result in results] == [
        ("gpu/0/not_offered", "degraded"),
        ("gpu/1/not_offered", "degraded"),
    ]
    assert all("no_resource: is not offered: device plugin" in (result.why or "") for result in results)
    table = waste_table(shown, Shape())
    assert "not offered 2 GPUs" in table
    lines = [line.split() for line in table.splitlines() if line.startswith("not offered ")]
    assert [line[:8] for line in lines] == [["not", "offered", "-", "-", "-", gpu, "1", "-"] for gpu in "01"]
    assert waste_values(shown, Shape())["sums"]["not_offered_gpus"] == 2
    window = frame(maps(snapshot), Live(), Shape(screen=Screen(columns=120)), ("head",), 24).lines
    assert any("not offered 2" in line for line in window)
    rows = [line.strip("> ").split() for line in window if "plugin stopped" in line]
    assert [row[:6] for row in rows] == [["not", "offered", "2m", gpu, "is", "not"] for gpu in "01"]
    assert "GPU 1 is not offered: device plugin stopped or removed" in map_table(shown, Shape())


# --- as a service -----------------------------------------------------------------------------------------------------


async def test_a_plugin_that_dies_and_returns(node: Node) -> None:
    """With a real kubelet and driver: `check`, `doctor` and the page name both GPUs until the plugin is back."""

    async def ask(command: str, *words: str) -> tuple[int, str]:
        done = await run_command_in_loop(command, "--url", agent.url, *words)
        return done.returncode, done.stdout

    def not_offered(page: Page) -> int:
        return len(page.rows("gpumap_finding_gpus"))

    async with serve(node, "--grace", "500ms") as agent:
        await agent.until(lambda page: len(page.rows("gpumap_device_slots_allocatable")) == 3, "nothing is offered")
        assert await ask("check", "--only", "not_offered") == (0, "3 GPUs well (not_offered)\n")
        node.update_kubelet(registered=False)
        page = await agent.until(lambda page: not_offered(page) == 3, "nothing is found")
        assert [slots for _, slots in page.rows("gpumap_device_slots_allocatable")] == [0, 0, 0]
        assert page.by("gpumap_finding_gpus", "reason") == {"no_resource": 1}
        assert page.value("gpumap_finding_judged", finding="not_offered") == 3
        assert await ask("check") == (0, "3 GPUs well, 3 not offered\n")
        assert (await ask("check", "--only", "not_offered"))[0] == 1
        _, doctor = await ask("doctor")
        assert [f"gpu/{index}/not_offered" in doctor for index in range(3)] == [True] * 3
        node.update_kubelet()
        await agent.until(lambda page: not not_offered(page), "the finding stays")
        assert await ask("check") == (0, "3 GPUs well\n")
