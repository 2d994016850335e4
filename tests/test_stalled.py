"""A holder may be stalled if its GPU is busy for ten minutes and does next to nothing. The truth is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gpumap.agent.join import step
from gpumap.agent.judgement.holders import STALLED_SECONDS
from gpumap.lab.demo.scenario import load_scenario
from gpumap.lab.demo.world import world
from gpumap.model.findings import judged_kinds
from gpumap.model.node import Finding
from gpumap.model.readings import Activity, ProcessSample
from tests.examples import examples
from tests.nodes import GIB, RULES, Gpu, Pod, Process, TestNode, gpu_uuid

CARD = gpu_uuid(0)
IDLE, HUNG, LIMIT = 71.0, 118.0, 700.0
"""Watts: of the card without a process, with a kernel that only waits, and its limit."""
SPINNING = Activity(0.1, 0.02, 0.0, 0.002, graphics_ratio=1.0, fp64_ratio=0.0, fp32_ratio=0.003, fp16_ratio=0.0)
EVENTS = {"gpu_idle": False, "sw_power_cap": False, "hw_slowdown": False, "applications_clocks_setting": False}
COUNTERS = ("energy_joules", "pcie_transmit_bytes", "nvlink_receive_bytes")
TRAINER = Pod("ml", "trainer", {"main": {"nvidia.com/gpu": [CARD]}, "sidecar": {}})
OTHER = Pod("ml", "other", {"main": {}})


def hung_process(pid: int = 100, pod: Pod | None = TRAINER, **values: Any) -> Process:
    return Process(pid, CARD, pod, sm=1.0, **values)


@dataclass
class Card:
    """A GPU that a pod holds, and its readings: of a hung process if there is one, with the values of a moment."""

    has_gpm: bool = True
    pods: list[Pod] = field(default_factory=lambda: [TRAINER, OTHER])
    node: TestNode = field(init=False)
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 1e6))
    limit: float = LIMIT

    def __post_init__(self) -> None:
        self.node = TestNode([Gpu(0)], self.pods)

    @property
    def gpu(self) -> Gpu:
        return self.node.gpus[0]

    def collect(self, seconds: float = 5.0, rates: dict[str, float] | None = None, **values: Any) -> list[Finding]:
        """Collect once after so many seconds, in which counters grew by these rates, and return what may be stalled."""
        is_busy = bool(self.node.processes)
        watts = HUNG if is_busy else IDLE
        for name, rate in ({"energy_joules": watts} | (rates or {})).items():
            self.counts[name] += rate * seconds
        self.gpu.values = {
            "utilization_ratio": 1.0 if is_busy else 0.0,
            "memory_controller_busy_ratio": 0.01 if is_busy else 0.0,
            "power_watts": watts,
            "power_limit_watts": self.limit,
            "clock_events": EVENTS | {"gpu_idle": not is_busy},
            "activity": SPINNING if self.has_gpm else None,
            "pcie_source": "totals",
            "pcie_receive_bytes": 0,
            "nvlink_transmit_bytes": 0,
            **self.counts,
            **values,
        }
        found = self.node.collect(seconds).node.findings or ()
        return [one for one in found if one.finding == "stalled"]

    def run(self, seconds: float, every: float = 5.0) -> list[Finding]:
        """Collect for so long, and return the findings of the last time; before that there are none."""
        found: list[Finding] = []
        for _ in range(int(seconds / every)):
            assert not found
            found = self.collect(every)
        return found

    def judged(self) -> bool:
        return "stalled" in judged_kinds(self.node.collect(0.0).node)


def hung_card(**values: Any) -> Card:
    """Return a card with a holder that has just begun to hang. gpumap has seen it idle before."""
    card = Card(**values)
    card.run(60.0)
    card.node.processes = [hung_process()]
    card.run(10.0)
    return card


@pytest.mark.parametrize("has_gpm", [False, True])
def test_a_holder_that_hangs_is_found_after_ten_minutes(*, has_gpm: bool) -> None:
    """The finding has the share of the GPU, since when, and the evidence in words that only suspect."""
    card = hung_card(has_gpm=has_gpm)
    began = card.node.now.wall
    (one,) = card.run(STALLED_SECONDS)
    assert (one.name, one.uuid, one.reason, one.gpus) == (TRAINER.full(), CARD, "busy_without_work", 1.0)
    assert one.since == pytest.approx(began, abs=0.01)
    assert one.memory_bytes is None
    assert one.why == "may be stalled: busy for 10m, but draws 118 of 700 W (idle 71 W)"
    assert one.remedy is not None
    assert "may" in one.remedy
    assert f"`py-spy dump --pid {one.pids[0]}`" in one.remedy


def test_since_does_not_move_with_the_length_of_a_collection() -> None:
    """A kubelet that answers late makes the collection longer, after NVML was read. The wall clock may be set."""
    card = hung_card()
    began = card.node.now.wall
    card.run(STALLED_SECONDS)
    for length_seconds, clock_seconds in ((0.0, 0.0), (4.0, 0.0), (0.5, -3600.0), (3.0, -3600.0)):
        card.node.clock += 5.0
        card.node.wall_step = clock_seconds
        finished = card.node.later(length_seconds)
        card.node.memory, snapshot = step(card.node.memory, replace(card.node.observe(), finished=finished), RULES)
        (finding,) = (one for one in snapshot.node.findings or () if one.finding == "stalled")
        assert finding.since == pytest.approx(began + clock_seconds, abs=0.01)


Step = Callable[[Card], object]


def reading(**values: Any) -> Step:
    return lambda card: card.collect(**values)


def traffic(**rates: float) -> Step:
    return lambda card: card.collect(rates=rates)


def activity(**ratios: float | None) -> Step:
    return reading(activity=structs.replace(SPINNING, **ratios))


def sampled(pid: int, *times: float) -> Step:
    return reading(samples=(ProcessSample(100, 1.0, 0.0, 0.0, 0.0), ProcessSample(pid, *times)))


def beside(*processes: Process) -> Step:
    """Let other processes run, or the holder's, for one collection."""

    def step(card: Card) -> None:
        card.node.processes, before = list(processes), card.node.processes
        card.collect()
        card.node.processes = before
        card.collect()

    return step


def down(source: str) -> Step:
    def step(card: Card) -> None:
        card.node.down = {source}
        card.collect()
        card.node.down = set()

    return step


def lost(card: Card) -> None:
    card.gpu.fault = "lost"
    card.gpu.values = {}
    card.node.collect()
    card.gpu.fault = None


def slept(card: Card) -> None:
    card.node.asleep += RULES.stale_after_seconds + 10.0
    card.collect()


def invisible(card: Card) -> None:
    card.node.visible = False
    card.collect()
    card.node.visible = True


def counts_again(card: Card) -> None:
    """The driver was loaded again."""
    card.counts["energy_joules"] = 0.0
    card.collect()


def refused(*names: str) -> Step:
    return reading(**dict.fromkeys(names))


SIGNS: dict[str, Step] = {
    "less utilization": reading(utilization_ratio=0.94),
    "power now": reading(power_watts=135.0),
    "power since the last collection": traffic(energy_joules=300.0),
    "memory traffic": reading(memory_controller_busy_ratio=0.02),
    "tensor cores": activity(tensor_ratio=0.01),
    "memory bandwidth": activity(dram_ratio=0.01),
    "FP64 pipes": activity(fp64_ratio=0.01),
    "FP32 pipes": activity(fp32_ratio=0.01),
    "FP16 pipes": activity(fp16_ratio=0.01),
    "a video engine by GPM": activity(video_ratio=0.01),
    "the encoder of the GPU": reading(encoder_ratio=0.01),
    "the decoder of the GPU": reading(decoder_ratio=0.01),
    "an encoder": sampled(100, 1.0, 0.0, 0.2, 0.0),
    "a decoder": sampled(100, 1.0, 0.0, 0.0, 0.2),
    "a JPEG engine": sampled(100, 1.0, 0.0, 0.0, 0.0, 0.2),
    "an OFA": sampled(100, 1.0, 0.0, 0.0, 0.0, 0.0, 0.2),
    "PCIe": traffic(pcie_transmit_bytes=2e9),
    "NVLink": traffic(nvlink_receive_bytes=30e9),
    "a short process": sampled(999, 0.1, 0.0, 0.0, 0.0),
    "another container": beside(hung_process(), hung_process(101, OTHER)),
    "a process of the host": beside(hung_process(), hung_process(101, None)),
    "a restarted container": beside(hung_process(102)),
    "new memory": beside(hung_process(memory=2 * GIB)),
}
"""Each shows for one collection that something works on the GPU."""
UNKNOWN: dict[str, Step] = {
    "utilization": refused("utilization_ratio", "memory_controller_busy_ratio"),
    "processes": refused("processes"),
    "power": refused("power_watts"),
    "power limit": refused("power_limit_watts"),
    "energy": refused("energy_joules"),
    "GPM": refused("activity"),
    "tensor cores": activity(tensor_ratio=None),
    "memory bandwidth": activity(dram_ratio=None),
    "PCIe": refused("pcie_receive_bytes"),
    "NVLink": refused("nvlink_transmit_bytes"),
    "clocks": reading(clock_events={}, activity=None),
    "lower clocks": reading(clock_events=EVENTS | {"hw_slowdown": True}, activity=None),
    "SM time of the container": reading(samples=()),
    "an impossible power": reading(power_watts=20.0),
    "the container": invisible,
    "a lost GPU": lost,
    "NVML": down("nvml"),
    "/proc": down("procfs"),
    "a machine that slept": slept,
    "a late collection": reading(seconds=RULES.stale_after_seconds + 10.0),
    "a driver that was loaded again": counts_again,
}
"""Each leaves it open for one collection whether something works."""


@pytest.mark.parametrize("sign", [*SIGNS.values(), *UNKNOWN.values()], ids=[*SIGNS, *(f"no {one}" for one in UNKNOWN)])
def test_a_sign_of_work_starts_the_time_again(sign: Step) -> None:
    """A sign of work ends the suspicion, and so does a single collection that leaves it open."""
    card = hung_card()
    card.run(STALLED_SECONDS - 30.0)
    sign(card)
    assert not card.run(STALLED_SECONDS - 5.0)
    assert any(card.collect() for _ in range(3))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 1300.0), st.sampled_from([*SIGNS.values(), *UNKNOWN.values()])), max_size=3),
    st.lists(st.sampled_from([0.75, 5.0, 30.0]), min_size=1, max_size=4),
)
def test_a_holder_that_works_is_never_stalled_and_one_that_hangs_always(
    signs: list[tuple[float, Step]], pauses: list[float]
) -> None:
    """Signs of work come at times drawn by chance: no sign was in the ten minutes before a finding."""
    card = hung_card()
    last = began = card.node.clock
    due = sorted(signs, key=itemgetter(0))
    for pause in cycle(pauses):
        if card.node.clock - began > 2000.0:
            break
        if due and card.node.clock - began >= due[0][0]:
            due.pop(0)[1](card)
            last = card.node.clock
        found = card.collect(pause)
        quiet = card.node.clock - last
        assert not (found and quiet < STALLED_SECONDS)
        assert found or quiet < STALLED_SECONDS + 90.0


def test_without_idle_power_nothing_is_judged() -> None:
    """An agent that has never seen the card idle cannot know whether the power is low."""
    card = Card()
    card.node.processes = [hung_process()]
    assert not card.run(2 * STALLED_SECONDS)
    assert not card.judged()


def works_with_150_watts(card: Card) -> None:
    """Let a new process work for half an hour. Only its power shows it. It is more than 10 % of the way from 71 W to
    the limit, but less than that from 100 W."""
    card.node.processes = [hung_process(200)]
    for _ in range(360):
        assert not card.collect(power_watts=150.0, rates={"energy_joules": 150.0})


@pytest.mark.parametrize(
    ("processes", "values"),
    [
        ([], {"utilization_ratio": 0.3}),
        ([hung_process()], {"utilization_ratio": 0.0}),
        ([hung_process()], {"utilization_ratio": 0.0, "processes": None}),
    ],
    ids=["an unlisted process computes", "a process rests", "no list of processes"],
)
def test_only_a_card_without_a_process_shows_its_idle_power(processes: list[Process], values: dict[str, Any]) -> None:
    """A process keeps the clocks high, also if it rests."""
    card = Card(has_gpm=False)
    card.node.processes = processes
    for _ in range(20):
        card.collect(power_watts=100.0, **values)
    works_with_150_watts(card)


@pytest.mark.parametrize(
    ("other", "judged"),
    [
        (hung_process(101, OTHER), True),
        (hung_process(101, container="sidecar"), True),
        (hung_process(101, None), True),
        (hung_process(101, readable=False), False),
    ],
    ids=["another pod", "another container of the pod", "the host", "unknown"],
)
def test_no_container_is_stalled_beside_another_process(other: Process, *, judged: bool) -> None:
    """It is not known which kernels keep the GPU busy. If the other process is unknown, nothing is judged."""
    card = Card()
    card.run(60.0)
    card.node.processes = [hung_process(), other]
    assert not card.run(2 * STALLED_SECONDS)
    assert card.judged() == judged


def test_the_power_limit_of_each_moment_counts() -> None:
    """A holder works with 118 W under a limit of 300 W: more than 10 % of the way to it. Then the limit rises."""
    card = hung_card(has_gpm=False)
    card.limit = 300.0
    assert not card.run(2 * STALLED_SECONDS)
    card.limit = LIMIT
    assert card.run(STALLED_SECONDS + 5.0)


def test_partitioned_gpus_are_never_stalled_and_never_judged() -> None:
    """Their driver reports no utilization of them. The map says that it is not known."""
    gpu = Gpu(0, mig=[(1, 0, 3)])
    pod = Pod("ml", "mig", {"main": {"nvidia.com/mig-3g.40gb": [gpu.leaves[0]]}})
    card = Card(pods=[pod])
    card.node.gpus = [gpu]
    gpu.values = {"power_watts": IDLE, "power_limit_watts": LIMIT}
    card.node.watch()
    card.node.processes = [Process(100, gpu.leaves[0], pod, sm=1.0)]
    snapshot = card.node.watch(2 * STALLED_SECONDS)
    assert not [one for one in snapshot.node.findings or () if one.finding == "stalled"]
    assert not snapshot.node.judged["stalled"]


def test_the_scenario_of_the_demo_shows_it() -> None:
    """`gpumap demo --scenario stalled`: eleven minutes after its start, the worker that waits for its peer is found."""
    scenario = load_scenario(Path("stalled"))
    uuids = [gpu.uuid for gpu in scenario.gpus]
    pods = [Pod("ml-team", f"trainer-{index}", {"train": {"nvidia.com/gpu": [uuids[index]]}}) for index in range(2)]
    node = TestNode([Gpu(0), Gpu(1)], pods)
    found = []
    for seconds in range(0, 720, 5):
        readings = world(scenario, seconds).gpus
        node.processes = []
        for gpu, pod, reading in zip(node.gpus, pods, readings, strict=True):
            gpu.values = structs.asdict(reading)
            node.processes += [Process(one.pid, gpu.uuid, pod, "train") for one in reading.processes or ()]
        of_node = node.collect().node.findings or ()
        found += [(seconds, one.pod) for one in of_node if one.finding == "stalled"]
    assert {pod for _, pod in found} == {"trainer-0"}
    assert 660 <= found[0][0] <= 675
