"""SM-seconds by the driver's samples: however often collections are pushed before their time, the sum is the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import pytest

from gpumap.agent.nvml_worker.processes import KEPT_SECONDS, Sampler, SampleRow
from gpumap.agent.sources.nvml_state import SampleRing
from tests.nodes import Gpu, Pod, Process, TestNode, gpu_uuid

GPU = gpu_uuid(0)
POD = Pod("ml", "a", {"main": {"nvidia.com/gpu": [GPU]}})
RATE = 6
"""Samples a second."""
EPOCH = 1_700_000_000
PID = 7

Load = Callable[[float], bool]


class Driver:
    """Reports a process's mean over its samples newer than asked for, in one row, and nothing where there are none."""

    def __init__(self, busy: Load, *, rows_of_idleness: bool) -> None:
        self.busy = busy
        self.rows_of_idleness = rows_of_idleness
        self.now = 0.0
        self.set_back: tuple[float, float] = (float("inf"), 0.0)
        """When the wall clock was set back, and by how many seconds."""

    def wall(self, at: float) -> float:
        when, seconds = self.set_back
        return EPOCH + at - (seconds if at > when else 0.0)

    def samples(self, since_us: int) -> list[SampleRow]:
        kept = range(max(int(self.now * RATE) - 71, 0), int(self.now * RATE) + 1)
        times = [number / RATE for number in kept if round(self.wall(number / RATE) * 1e6) > since_us]
        busy = [self.busy(at) for at in times]
        if not times or not (any(busy) or self.rows_of_idleness):
            return []
        return [(PID, round(self.wall(times[-1]) * 1e6), round(100 * sum(busy) / len(busy)), 0, 0, 0)]


@dataclass
class SampledGpu:
    """A GPU with one container, read by real samplers; `collect` at any time."""

    busy: Load
    interval: float = 5.0
    rows_of_idleness: bool = True
    node: TestNode = field(
        default_factory=lambda: TestNode([Gpu(0)], [POD], [Process(PID, GPU, POD)]), init=False, repr=False
    )

    def __post_init__(self) -> None:
        self.driver = Driver(self.busy, rows_of_idleness=self.rows_of_idleness)
        self.ring = SampleRing(lambda: self.driver.now, lambda: self.driver.wall(self.driver.now))
        self.start_worker()

    def start_worker(self) -> None:
        self.sampler = Sampler(lambda: self.driver.now, lambda: round(self.driver.wall(self.driver.now) * 1e6))

    def collect(self, at: float) -> None:
        self.keep_samples(at)
        self.driver.now = at
        sampled = self.sampler.read(self.driver.samples, self.interval, busy=True)
        drained = self.ring.is_drained()
        self.node.gpus[0].sampled_seconds = sampled.seconds if drained else None
        self.node.gpus[0].has_samples = drained and sampled.samples is not None
        self.node.processes[0].sm = sampled.samples[0].sm_ratio if sampled.samples else 0.0
        self.node.clock = at
        self.node.collect(0.0)

    def keep_samples(self, until: float) -> None:
        """As the worker does between two asked_at if the interval is long."""
        stretches, asked_at = math.ceil(self.interval / KEPT_SECONDS), self.node.clock
        for number in range(1, stretches):
            at = asked_at + number * self.interval / stretches
            if self.driver.now and at < until:
                self.driver.now = at
                self.sampler.keep(self.driver.samples)

    def sm_seconds(self, times: Iterable[float]) -> float:
        """What the container has been charged after collections at these times."""
        for at in times:
            self.collect(at)
        return self.node.memory.ledger.charges[POD.full(), GPU].sm_seconds or 0.0


def quarters(since: float, until: float) -> list[float]:
    """Four pushes a second, as many as there can be."""
    return [since + 0.25 * number for number in range(int((until - since) * 4) + 1)]


def burst(since: float, until: float) -> Load:
    return lambda at: since < at <= until


@pytest.mark.parametrize(
    ("busy", "times"),
    [
        (burst(1000, 1002), [1000, 1005, 1010, 1015]),
        (burst(1000, 1002), [1000, 1002.5, 1007.5, 1012.5]),
        (burst(998, 1000), [995, 1000, *quarters(1000.25, 1001), 1006, 1011]),
        (burst(1003, 1005), [1000, 1005, *quarters(1005.25, 1009.75), 1015, 1020]),
        (burst(1003, 1005), quarters(1000, 1020)),
        (burst(1001, 1003), [1000, 1000.25, 1005.25, 1005.5, 1010.5]),
    ],
)
def test_a_burst_is_charged_once(busy: Load, times: list[float]) -> None:
    """Two seconds of work are two SM-seconds, whatever pushes lie in them, before, or behind them."""
    assert SampledGpu(busy).sm_seconds(times) == pytest.approx(2.0, abs=0.06)


@pytest.mark.parametrize("interval", [0.5, 1.0, 5.0, 12.0, 30.0, 60.0])
def test_steady_work_is_charged_whole(interval: float) -> None:
    """A second a second, also where an interval is shorter than what a driver's samples need."""
    times = [1000 + interval * number for number in range(max(int(40 / interval), 3) + 1)]
    assert SampledGpu(lambda _: True, interval).sm_seconds(times) == pytest.approx(times[-1] - times[0])


@pytest.mark.parametrize("pushes", [[], [1009.0], [1001.0, 1021.0], [1031.0], quarters(1005, 1055)])
@pytest.mark.parametrize("interval", [30.0, 60.0])
def test_work_is_charged_that_the_driver_has_dropped_before_the_next_collection(
    interval: float, pushes: list[float]
) -> None:
    """The driver keeps samples for 12 s. Each collection begins the interval again, also one that is pushed."""
    times = sorted({1000.0, *pushes})
    times += [times[-1] + interval * number for number in range(1, 5)]
    busy = [(1002, 1006), (1011, 1012), (1040, 1043), (1065, 1068)]
    gpu = SampledGpu(lambda at: any(since < at <= until for since, until in busy), interval)
    assert gpu.sm_seconds(times) == pytest.approx(11.0, abs=0.5)


def test_long_idleness_does_not_thin_what_comes_after() -> None:
    """Where a driver has no rows of an idle GPU, the next are asked for since the last reading, not the last row."""
    idle_for_a_while = [1000.0 + 5 * number for number in range(20)]
    gpu = SampledGpu(lambda at: at <= 1000 or 1050 < at <= 1052, rows_of_idleness=False)
    assert gpu.sm_seconds(idle_for_a_while) == pytest.approx(2.0, abs=0.6)


def test_a_new_worker_has_no_samples_of_the_time_before_it() -> None:
    """The samples of its first reading are the interval's, and are not taken for all of the time since the last."""
    gpu = SampledGpu(burst(1042, 1047))
    gpu.sm_seconds([1000, 1005])
    gpu.start_worker()
    assert gpu.sm_seconds([1047, 1052]) == pytest.approx(5.0, abs=0.1)


def test_answers_that_come_late_lose_nothing() -> None:
    """The next samples settle a difference between the service's clock and the worker's."""
    gpu = SampledGpu(lambda _: True)
    late = (0.0, 0.4, 0.0, 0.1, 0.3, 0.0, 0.4, 0.0)
    for number, seconds in enumerate(late):
        gpu.driver.now = 1000.0 + 5 * number
        sampled = gpu.sampler.read(gpu.driver.samples, 5.0, busy=True)
        gpu.node.gpus[0].sampled_seconds = sampled.seconds
        gpu.node.processes[0].sm = 1.0
        gpu.node.clock = gpu.driver.now + seconds
        gpu.node.collect(0.0)
    charged = gpu.node.memory.ledger.charges[POD.full(), GPU].sm_seconds
    assert charged == pytest.approx(35.0, abs=0.01)


def test_a_gap_settles_nothing() -> None:
    """Samples that reach back over a gap, and over pushes before it, are charged for no time of it."""
    gpu = SampledGpu(lambda _: True)
    gpu.sm_seconds([1000, 1005, 1006])
    gpu.node.gpus[0].fault = "lost"
    gpu.node.collect(2.0)
    gpu.node.gpus[0].fault = None
    assert gpu.sm_seconds([1010, 1015]) == pytest.approx(10.0)


@pytest.mark.parametrize("restarts", [(), (1065, 1100), range(1065, 1135, 5)])
@pytest.mark.parametrize("seconds", [3600.0, 30.0, 5.0])
def test_a_clock_that_is_set_back_charges_no_sample_again(seconds: float, restarts: Collection[int]) -> None:
    """SM is unknown until the driver has dropped its samples from before, which look new. Then it is known again."""
    gpu = SampledGpu(lambda at: at <= 1060 or at > 1150)
    gpu.driver.set_back = (1062.0, seconds)
    assert gpu.sm_seconds([1000 + 5.0 * number for number in range(13)]) == pytest.approx(60.0, abs=0.1)
    for at in range(1065, 1135, 5):
        if at in restarts:
            gpu.start_worker()
        before = gpu.sm_seconds([at])
        assert not gpu.node.gpus[0].has_samples
        assert before == pytest.approx(60.0, abs=0.1)
    assert gpu.sm_seconds([1140.0, 1145.0, 1150.0]) == pytest.approx(60.0, abs=0.1)
    assert gpu.node.gpus[0].has_samples
    assert gpu.sm_seconds([1155.0, 1160.0]) == pytest.approx(70.0, abs=0.1)


def test_a_driver_whose_clock_lags_is_asked_for_all_samples() -> None:
    """Its samples look old. After a minute of work without a sample, gpumap asks for all of them."""
    times = [1000.0]
    sampler = Sampler(lambda: times[-1], lambda: round((EPOCH + times[-1]) * 1e6))

    def ask(since_us: int) -> list[SampleRow]:
        newest_us = round((EPOCH + times[-1] - 3600.0) * 1e6)
        return [(PID, newest_us, 50, 0, 0, 0)] if newest_us > since_us else []

    answers = []
    for _ in range(14):
        answers.append(sampler.read(ask, 5.0, busy=True).samples)
        times.append(times[-1] + 5.0)
    assert not any(answers[:13])
    assert [sample.sm_ratio for sample in answers[13] or ()] == [0.5]
