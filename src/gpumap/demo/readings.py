"""What NVML would say of the simulated GPUs at one moment: memory, processes, load, heat and energy.

Pure. Energy is the integral of the power that is told, and never goes back, also when the play starts again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from gpumap.demo.cast import ProcessLife, play_of
from gpumap.demo.play import (
    UNTOLD_BYTES,
    Fault,
    GpuSpec,
    LeafPlace,
    MigDevice,
    ProcessSpec,
    Scenario,
    Wave,
    overhead_bytes,
)
from gpumap.model import DeviceMemory, GpuProcess, GpuReading, MigInstance, ProcessSample

DRIVER_VERSION = "570.124.06"
CUDA_VERSION = "12.8"
NVML_VERSION = "12.570.124.06"

MAX_MIG_DEVICES = 7
IDLE_SHARE_OF_POWER = 0.12
AMBIENT_CELSIUS = 31.0
ENERGY_STEPS = 600


def gpu_readings(scenario: Scenario, processes: Iterable[ProcessLife], seconds: float) -> tuple[GpuReading, ...]:
    """One reading per GPU, faulty ones with their identity alone."""
    on: dict[int, list[ProcessLife]] = {gpu.index: [] for gpu in scenario.gpus}
    for life in processes:
        if life.spec is not None and seconds in life.window:
            for index in {leaf.gpu for leaf in life.spec.leaves}:
                on[index].append(life)
    return tuple(_reading(scenario, gpu, on[gpu.index], seconds) for gpu in scenario.gpus)


def fault_at(gpu: GpuSpec, moment: float) -> Fault | None:
    """What is wrong with a GPU at a time of the play."""
    return next((fault for fault in gpu.faults if fault.start <= moment < fault.end), None)


def wave_at(wave: Wave, moment: float) -> float:
    swing = (1 - math.cos(2 * math.pi * moment / wave.period_seconds)) / 2
    return wave.low + (wave.high - wave.low) * swing


def _reading(scenario: Scenario, gpu: GpuSpec, lives: Sequence[ProcessLife], seconds: float) -> GpuReading:
    _, moment = play_of(scenario, seconds)
    if fault := fault_at(gpu, moment):
        return GpuReading(
            gpu.index, fault.kind, uuid=gpu.uuid, minor=gpu.minor, pci_bus_id=gpu.pci_bus_id, model=gpu.model
        )
    load = _load(gpu, moment, [life.spec for life in lives if life.spec])
    whole = not gpu.mig
    specs = [life.spec for life in lives if life.spec]
    return GpuReading(
        index=gpu.index,
        uuid=gpu.uuid,
        minor=gpu.minor,
        pci_bus_id=gpu.pci_bus_id,
        model=gpu.model,
        memory=_card_memory(gpu, lives, seconds, moment),
        partitioned=not whole,
        max_mig_devices=None if whole else MAX_MIG_DEVICES,
        instances=tuple(_instance(gpu, n, device, lives, seconds, moment) for n, device in enumerate(gpu.mig)),
        processes=_rows(lives, LeafPlace(gpu.index), seconds, moment) if whole else None,
        samples=_samples(lives, moment) if whole else None,
        utilization_ratio=round(load, 2) if whole else None,
        memory_controller_ratio=_sum([spec.memory_controller for spec in specs], moment) if whole else None,
        encoder_ratio=_sum([spec.encoder for spec in specs], moment) if whole else None,
        decoder_ratio=_sum([spec.decoder for spec in specs], moment) if whole else None,
        temperatures_celsius=_temperatures(load),
        power_watts=round(_power(gpu, load), 3),
        power_limit_watts=gpu.power_limit_watts,
        energy_joules=_energy(scenario, gpu, seconds),
    )


def _sum(waves: Sequence[Wave], moment: float) -> float:
    """NVML tells whole percents."""
    return min(1.0, round(sum(wave_at(wave, moment) for wave in waves), 2))


def _load(gpu: GpuSpec, moment: float, specs: Sequence[ProcessSpec]) -> float:
    """The share of a card that computes; on a MIG GPU a device counts as much as its slices."""
    if not gpu.mig:
        return min(1.0, sum(wave_at(spec.sm, moment) for spec in specs))
    load = 0.0
    for number, device in enumerate(gpu.mig):
        here = sum(wave_at(spec.sm, moment) for spec in specs if LeafPlace(gpu.index, number) in spec.leaves)
        load += min(1.0, here) * device.compute_slices / MAX_MIG_DEVICES
    return load


# --- memory and processes ---------------------------------------------------------------------------------------------


def _memory_of(life: ProcessLife, seconds: float, moment: float) -> int | None:
    """A process that is always there grows anew with each play."""
    if life.spec is None or life.spec.memory is None:
        return None
    return life.spec.memory.at(moment if life.window.start == -math.inf else seconds - life.window.start)


def _used(lives: Sequence[ProcessLife], seconds: float, moment: float) -> int:
    sizes = [_memory_of(life, seconds, moment) for life in lives]
    return sum(UNTOLD_BYTES if size is None else size for size in sizes) + overhead_bytes(len(lives))


def _card_memory(gpu: GpuSpec, lives: Sequence[ProcessLife], seconds: float, moment: float) -> DeviceMemory:
    used = _used(lives, seconds, moment)
    if gpu.mig:
        pools = {device.gpu_instance_id: _pool_used(gpu, device, lives, seconds, moment) for device in gpu.mig}
        used = overhead_bytes(0) + sum(pools.values())
    free = gpu.memory_bytes - gpu.reserved_bytes - used
    return DeviceMemory(gpu.memory_bytes, used, free, gpu.reserved_bytes)


def _pool_used(gpu: GpuSpec, device: MigDevice, lives: Sequence[ProcessLife], seconds: float, moment: float) -> int:
    """What all the compute instances of a GPU instance use together."""
    siblings = {
        LeafPlace(gpu.index, number)
        for number, other in enumerate(gpu.mig)
        if other.gpu_instance_id == device.gpu_instance_id
    }
    users = [life for life in lives for leaf in (life.spec.leaves if life.spec else ()) if leaf in siblings]
    return _used(users, seconds, moment)


def _instance(
    gpu: GpuSpec, number: int, device: MigDevice, lives: Sequence[ProcessLife], seconds: float, moment: float
) -> MigInstance:
    used = _pool_used(gpu, device, lives, seconds, moment)
    return MigInstance(
        uuid=device.uuid,
        gpu_instance_id=device.gpu_instance_id,
        compute_instance_id=device.compute_instance_id,
        profile=device.profile,
        compute_slices=device.compute_slices,
        memory=DeviceMemory(device.memory_bytes, used, device.memory_bytes - used, 0),
        processes=_rows(lives, LeafPlace(gpu.index, number), seconds, moment),
        profile_id=device.profile_id,
        placement_start=device.placement_start,
        placement_size=device.placement_size,
    )


def _rows(lives: Sequence[ProcessLife], leaf: LeafPlace, seconds: float, moment: float) -> tuple[GpuProcess, ...]:
    rows = (
        GpuProcess(life.pid, _memory_of(life, seconds, moment), life.spec.types)
        for life in lives
        if life.spec is not None and leaf in life.spec.leaves
    )
    return tuple(sorted(rows, key=lambda row: row.pid))


def _samples(lives: Sequence[ProcessLife], moment: float) -> tuple[ProcessSample, ...]:
    """NVML has no row for a process that did nothing, nor for the clients of an MPS server."""
    rows = (
        ProcessSample(
            life.pid,
            round(wave_at(spec.sm, moment), 2),
            round(wave_at(spec.memory_controller, moment), 2),
            round(wave_at(spec.encoder, moment), 2),
            round(wave_at(spec.decoder, moment), 2),
        )
        for life in lives
        if (spec := life.spec) is not None and spec.types != "M"
    )
    busy = (
        row for row in rows if row.sm_ratio or row.memory_controller_ratio or row.encoder_ratio or row.decoder_ratio
    )
    return tuple(sorted(busy, key=lambda row: row.pid))


# --- heat and energy --------------------------------------------------------------------------------------------------


def _temperatures(load: float) -> tuple[tuple[str, float], ...]:
    core = round(AMBIENT_CELSIUS + 42 * load)
    return ("gpu", float(core)), ("memory", float(core + 8))


def _power(gpu: GpuSpec, load: float) -> float:
    return gpu.power_limit_watts * (IDLE_SHARE_OF_POWER + (0.96 - IDLE_SHARE_OF_POWER) * load)


def _energy(scenario: Scenario, gpu: GpuSpec, seconds: float) -> float:
    """Joules since the driver was loaded, which was a while before the demo began. NVML counts in millijoules."""
    play, moment = play_of(scenario, seconds)
    times, joules = _energy_of_play(scenario, gpu.index)
    right = min(bisect.bisect_right(times, moment), len(times) - 1)
    left = right - 1
    share = (moment - times[left]) / (times[right] - times[left])
    inside = joules[left] + (joules[right] - joules[left]) * share
    return round(1_000_000.0 * (gpu.index + 1) + play * joules[-1] + inside, 3)


@lru_cache(maxsize=256)
def _energy_of_play(scenario: Scenario, index: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The energy used by a time of the play, at ENERGY_STEPS times of it."""
    gpu = scenario.gpus[index]
    specs = [process.process for process in scenario.host_processes]
    specs += [spec for pod in scenario.pods for container in pod.containers for spec in container.processes]
    specs = [spec for spec in specs if any(leaf.gpu == index for leaf in spec.leaves)]
    step = scenario.repeat_seconds / ENERGY_STEPS
    times, joules = [0.0], [0.0]
    for number in range(ENERGY_STEPS):
        middle = (number + 0.5) * step
        alive = [spec for spec in specs if spec.start is None or spec.end is None or spec.start <= middle < spec.end]
        times.append((number + 1) * step)
        joules.append(joules[-1] + step * _power(gpu, _load(gpu, middle, alive)))
    return tuple(times), tuple(joules)
