"""What a simulated card counts since its driver was loaded: energy, time at lowered clocks, bytes over its links.

Pure. Each is the integral of what the card does, and never goes back, also when the play starts again.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from gpumap.lab.demo.load import is_capped, is_idle, load_of_card, power_watts, wave_at
from gpumap.lab.demo.scenario_model import GpuSpec, ProcessSpec, Scenario
from gpumap.lab.demo.schedule import play_of

STEPS = 600
"""Of a play, in each of which a card does the same all the time."""
BEFORE_JOULES = 1_000_000.0
BEFORE_SECONDS = 3600.0
"""The driver was loaded a while before the demo began, and the cards were idle then."""

IDLE_PCIE_BYTES_PER_SECOND = 20e3
PCIE_TRANSMIT_BYTES_PER_SECOND = 0.6e9
PCIE_RECEIVE_BYTES_PER_SECOND = 1.4e9
NVLINK_BYTES_PER_SECOND = 60e9
"""At full load; over NVLink by processes that use several cards."""


class Counters(NamedTuple):
    """Since the driver was loaded; or, of a moment, by the second."""

    joules: float
    idle_seconds: float
    capped_seconds: float
    pcie_transmit_bytes: float
    pcie_receive_bytes: float
    nvlink_bytes: float


def counters(scenario: Scenario, gpu: GpuSpec, seconds: float) -> Counters:
    play, moment = play_of(scenario, seconds)
    times, sums = _of_play(scenario, gpu.index)
    right = min(bisect.bisect_right(times, moment), len(times) - 1)
    left = right - 1
    share = (moment - times[left]) / (times[right] - times[left])
    ending = sums[-1]
    before = (BEFORE_JOULES * (gpu.index + 1), BEFORE_SECONDS, 0.0, 0.0, 0.0, 0.0)
    return Counters(
        *(
            first + play * whole + early + (late - early) * share
            for first, whole, early, late in zip(before, ending, sums[left], sums[right], strict=True)
        )
    )


@lru_cache(maxsize=256)
def _of_play(scenario: Scenario, index: int) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """What was counted by a time of the play, at STEPS times of it."""
    gpu = scenario.gpus[index]
    specs = [process.process for process in scenario.host_processes]
    specs += [spec for pod in scenario.pods for container in pod.containers for spec in container.processes]
    specs = [spec for spec in specs if any(leaf.gpu == index for leaf in spec.leaves)]
    step = scenario.repeat_seconds / STEPS
    rates = (_rates(gpu, (number + 0.5) * step, specs) for number in range(STEPS))
    sums = itertools.accumulate(
        rates,
        lambda sum_, rate: tuple(one + step * more for one, more in zip(sum_, rate, strict=True)),
        initial=(0.0,) * len(Counters._fields),
    )
    return tuple(number * step for number in range(STEPS + 1)), tuple(sums)


def _rates(gpu: GpuSpec, moment: float, specs: Sequence[ProcessSpec]) -> tuple[float, ...]:
    """By the second."""
    alive = [spec for spec in specs if spec.runs_at(moment)]
    load = load_of_card(gpu, moment, alive)
    linked = min(1.0, sum(wave_at(spec.sm, moment) for spec in alive if len({leaf.gpu for leaf in spec.leaves}) > 1))
    return Counters(
        joules=power_watts(gpu, load),
        idle_seconds=float(is_idle(load)),
        capped_seconds=float(is_capped(gpu, load)),
        pcie_transmit_bytes=IDLE_PCIE_BYTES_PER_SECOND + PCIE_TRANSMIT_BYTES_PER_SECOND * load,
        pcie_receive_bytes=IDLE_PCIE_BYTES_PER_SECOND + PCIE_RECEIVE_BYTES_PER_SECOND * load,
        nvlink_bytes=NVLINK_BYTES_PER_SECOND * linked,
    )
