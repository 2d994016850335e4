"""What a simulated card has to do at a moment of the play: how much of it computes, and what power that takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpumap.lab.demo.scenario_file import Fault, Wave
from gpumap.lab.demo.scenario_model import GpuSpec, LeafPlace, ProcessSpec

SLICES = 7
"""Of a card with MIG devices."""
IDLE_SHARE_OF_POWER = 0.12
FULL_SHARE_OF_POWER = 0.96
CAPPED_SHARE_OF_POWER = 0.93
"""From here on the driver lowers clocks, to stay below the limit."""


def fault_at(gpu: GpuSpec, moment: float) -> Fault | None:
    """What is wrong with a GPU at a time of the play."""
    return next((fault for fault in gpu.faults if fault.start <= moment < fault.end), None)


def wave_at(wave: Wave, moment: float) -> float:
    swing = (1 - math.cos(2 * math.pi * moment / wave.period_seconds)) / 2
    return wave.low + (wave.high - wave.low) * swing


def load_of_leaf(leaf: LeafPlace, moment: float, specs: Sequence[ProcessSpec]) -> float:
    """The share of a device, whole or MIG, that computes."""
    return min(1.0, sum(wave_at(spec.sm, moment) for spec in specs if leaf in spec.leaves))


def load_of_card(gpu: GpuSpec, moment: float, specs: Sequence[ProcessSpec]) -> float:
    """The share of a card that computes; on a MIG GPU a device counts as much as its slices."""
    if not gpu.mig:
        return load_of_leaf(LeafPlace(gpu.index), moment, specs)
    return sum(
        load_of_leaf(LeafPlace(gpu.index, number), moment, specs) * device.compute_slices / SLICES
        for number, device in enumerate(gpu.mig)
    )


def power_watts(gpu: GpuSpec, load: float) -> float:
    return gpu.power_limit_watts * (IDLE_SHARE_OF_POWER + (FULL_SHARE_OF_POWER - IDLE_SHARE_OF_POWER) * load)


def is_idle(load: float) -> bool:
    """Nothing computes."""
    return load < 0.005  # as NVML's percents round it


def is_capped(gpu: GpuSpec, load: float) -> bool:
    """The power is near its limit."""
    return power_watts(gpu, load) >= CAPPED_SHARE_OF_POWER * gpu.power_limit_watts
