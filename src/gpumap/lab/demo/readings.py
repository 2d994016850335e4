"""What NVML would report of the simulated GPUs at one moment: memory, processes, load, power and heat.

The scenario has the other values, such as clocks and memory errors. The model decides which calls the driver has: only
Hopper and later have GPM. Pure.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from msgspec import structs

from gpumap.lab.demo.scenario_model import (
    UNREPORTED_BYTES,
    Gpu,
    Leaf,
    Process,
    ProcessType,
    Scenario,
    bytes_at,
    overhead_bytes,
    ratio_at,
)
from gpumap.lab.demo.schedule import ProcessLife, play_of
from gpumap.model.readings import (
    SAMPLES_NEW,
    SAMPLES_OLD,
    Activity,
    DeviceMemory,
    GpuProcess,
    GpuReading,
    MigInstance,
    ProcessSample,
)

DRIVER_VERSION = "570.124.06"
CUDA_VERSION = "12.8"
NVML_VERSION = "12.570.124.06"

MAX_MIG_DEVICES = 7
NVML_TYPES: Mapping[ProcessType, str] = {"compute": "C", "graphics": "G", "compute+graphics": "C+G", "mps": "M"}
AMBIENT_CELSIUS = 31.0
SLICES = 7
"""Of a GPU with MIG devices."""
IDLE_SHARE_OF_POWER = 0.12
FULL_SHARE_OF_POWER = 0.96
ENERGY_STEPS = 600
"""Of a play, in each of which a GPU takes the same power."""
_HOPPER = re.compile(r"\bG?[HB][12345]\d\d\b")
"""H100, H200, GH200, B200, GB300, …: Hopper and Blackwell."""
_BLACKWELL = re.compile(r"\bG?B[123]\d\d?\b|Blackwell|RTX 50\d\d")
SAMPLED_SECONDS = 2.0
"""NVML returns the samples since the last call: also those of a process that has just ended."""


def gpu_readings(scenario: Scenario, processes: Iterable[ProcessLife], seconds: float) -> tuple[GpuReading, ...]:
    """One reading for each GPU. A faulty one has only its identity and the recovery action."""
    lives_of: dict[int, list[ProcessLife]] = {gpu.index: [] for gpu in scenario.gpus}
    for life in processes:
        if life.spec is not None and seconds in life.window.shifted(0.0, SAMPLED_SECONDS):
            for index in {leaf.gpu for leaf in life.spec.leaves}:
                lives_of[index].append(life)
    return tuple(_reading(scenario, gpu, lives_of[gpu.index], seconds) for gpu in scenario.gpus)


def _reading(scenario: Scenario, gpu: Gpu, sampled: Sequence[ProcessLife], seconds: float) -> GpuReading:
    play, moment = play_of(scenario, seconds)
    reading = GpuReading(gpu.index, uuid=gpu.uuid, minor=gpu.minor, pci_bus_id=gpu.pci_bus_id, model=gpu.model)
    if fault := next((fault for fault in gpu.faults if fault.start <= moment < fault.end), None):
        return structs.replace(reading, fault=fault.kind, recovery_action=fault.recovery)
    lives = [life for life in sampled if seconds in life.window]
    reading = _add_basics(reading, gpu, lives, seconds, moment)
    joules = _joules(scenario, gpu.index)
    step, fraction = divmod(moment / scenario.repeat_seconds * ENERGY_STEPS, 1.0)
    step_joules = joules[min(int(step) + 1, ENERGY_STEPS)] - joules[int(step)]
    reading = structs.replace(
        reading,
        samples=None if gpu.mig else _samples(gpu, sampled, moment),
        energy_joules=round(play * joules[-1] + joules[int(step)] + step_joules * fraction, 3),
        **gpu.written_values(seconds),
    )
    if not _HOPPER.search(gpu.model):
        return reading
    return _add_activity(reading, gpu, [life.spec for life in lives if life.spec], moment)


def _add_basics(
    reading: GpuReading, gpu: Gpu, lives: Sequence[ProcessLife], seconds: float, moment: float
) -> GpuReading:
    """Add what is asked of every GPU."""
    is_whole = not gpu.mig
    specs = [life.spec for life in lives if life.spec]
    load, work = _gpu_load(gpu, moment, specs), _gpu_load(gpu, moment, _working(specs))
    core_celsius = float(round(AMBIENT_CELSIUS + 42 * work))
    return structs.replace(
        reading,
        memory=_gpu_memory(gpu, lives, seconds, moment),
        partitioned=not is_whole,
        max_mig_devices=None if is_whole else MAX_MIG_DEVICES,
        instances=tuple(_instance(gpu, n, device, lives, seconds, moment) for n, device in enumerate(gpu.devices)),
        processes=_processes_on(lives, Leaf(gpu.index), seconds, moment) if is_whole else None,
        samples_from=SAMPLES_NEW if is_whole and _BLACKWELL.search(gpu.model) else SAMPLES_OLD,
        utilization_ratio=round(load, 2) if is_whole else None,
        memory_controller_busy_ratio=_sum(spec.memory_controller_at(moment) for spec in specs) if is_whole else None,
        encoder_ratio=_sum(ratio_at(spec.encoder, moment) for spec in specs) if is_whole else None,
        decoder_ratio=_sum(ratio_at(spec.decoder, moment) for spec in specs) if is_whole else None,
        temperatures_celsius={"gpu": core_celsius, "memory": core_celsius + 8},
        power_watts=round(_power_watts(gpu, work), 3),
        power_limit_watts=float(gpu.power_limit_watts),
    )


def _sum(ratios: Iterable[float]) -> float:
    """NVML reports whole percents."""
    return min(1.0, round(sum(ratios), 2))


def _add_activity(reading: GpuReading, gpu: Gpu, specs: Sequence[Process], moment: float) -> GpuReading:
    """GPM measures whole GPUs, or GPU instances: a compute instance that shares one has no number of its own."""
    if not gpu.mig:
        return structs.replace(reading, activity=_activity(Leaf(gpu.index), specs, moment))
    ids = [device.gpu_instance_id for device in gpu.devices]
    instances = tuple(
        structs.replace(instance, activity=_activity(Leaf(gpu.index, number), specs, moment))
        if ids.count(instance.gpu_instance_id) == 1
        else instance
        for number, instance in enumerate(reading.instances)
    )
    return structs.replace(reading, instances=instances)


def _activity(leaf: Leaf, specs: Sequence[Process], moment: float) -> Activity:
    users = [spec for spec in _working(specs) if leaf in spec.leaves]
    load, memory_load = _leaf_load(leaf, moment, users), sum(spec.memory_controller_at(moment) for spec in users)
    engines = zip(*[(spec.encoder, spec.decoder, spec.jpeg, spec.ofa) for spec in users], strict=True)
    video_load = max((sum(ratio_at(wave, moment) for wave in waves) for waves in engines), default=0.0)
    return Activity(
        sm_ratio=round(0.88 * load, 4),
        sm_occupancy_ratio=round(0.46 * load, 4),
        tensor_ratio=round(0.52 * load, 4),
        dram_ratio=round(0.9 * min(memory_load, 1.0), 4),
        graphics_ratio=round(load, 4),
        fp64_ratio=0.0,
        fp32_ratio=round(0.14 * load, 4),
        fp16_ratio=round(0.06 * load, 4),
        video_ratio=round(min(video_load, 1.0), 4),
    )


# --- load, power and energy -------------------------------------------------------------------------------------------


def _working(specs: Sequence[Process]) -> list[Process]:
    """Those that do not hang: the others keep a GPU busy, but need neither power nor memory traffic."""
    return [spec for spec in specs if not spec.hangs]


def _leaf_load(leaf: Leaf, moment: float, specs: Sequence[Process]) -> float:
    """The share of a device, whole or MIG, that computes."""
    return min(1.0, sum(ratio_at(spec.sm, moment) for spec in specs if leaf in spec.leaves))


def _gpu_load(gpu: Gpu, moment: float, specs: Sequence[Process]) -> float:
    """The share of a GPU that computes; on one with MIG, a device counts as much as its slices."""
    if not gpu.mig:
        return _leaf_load(Leaf(gpu.index), moment, specs)
    return sum(
        _leaf_load(Leaf(gpu.index, number), moment, specs) * (device.compute_slices or 0) / SLICES
        for number, device in enumerate(gpu.devices)
    )


def _power_watts(gpu: Gpu, load: float) -> float:
    return gpu.power_limit_watts * (IDLE_SHARE_OF_POWER + (FULL_SHARE_OF_POWER - IDLE_SHARE_OF_POWER) * load)


@lru_cache(maxsize=256)
def _joules(scenario: Scenario, index: int) -> tuple[float, ...]:
    """The energy that a GPU took by each step of a play."""
    gpu = scenario.gpus[index]
    specs: list[Process] = [*scenario.host_processes]
    specs += [spec for pod in scenario.pods for container in pod.containers for spec in container.processes]
    specs = [spec for spec in specs if any(leaf.gpu == index for leaf in spec.leaves)]
    step = scenario.repeat_seconds / ENERGY_STEPS
    moments = ((number + 0.5) * step for number in range(ENERGY_STEPS))
    loads = (_gpu_load(gpu, moment, _working([spec for spec in specs if spec.runs_at(moment)])) for moment in moments)
    return tuple(itertools.accumulate((step * _power_watts(gpu, load) for load in loads), initial=0.0))


# --- memory and processes ---------------------------------------------------------------------------------------------


def _memory_of(life: ProcessLife, seconds: float, moment: float) -> int | None:
    """The memory of a process that always runs grows again in each play."""
    if life.spec is None:
        return None
    return bytes_at(life.spec.memory, moment if life.window.start == -math.inf else seconds - life.window.start)


def _used(lives: Sequence[ProcessLife], seconds: float, moment: float) -> int:
    sizes = [_memory_of(life, seconds, moment) for life in lives]
    return sum(UNREPORTED_BYTES if size is None else size for size in sizes) + overhead_bytes(len(lives))


def _gpu_memory(gpu: Gpu, lives: Sequence[ProcessLife], seconds: float, moment: float) -> DeviceMemory:
    used = _used(lives, seconds, moment) + gpu.leaked_bytes
    if gpu.mig:
        pools = {device.gpu_instance_id: _pool_used(gpu, device, lives, seconds, moment) for device in gpu.devices}
        used = overhead_bytes(0) + sum(pools.values())
    free = gpu.memory_bytes - gpu.reserved_bytes - used
    return DeviceMemory(int(gpu.memory_bytes), used, free, int(gpu.reserved_bytes))


def _pool_used(gpu: Gpu, device: MigInstance, lives: Sequence[ProcessLife], seconds: float, moment: float) -> int:
    """What all the compute instances of a GPU instance use together."""
    siblings = {
        Leaf(gpu.index, number)
        for number, sibling in enumerate(gpu.devices)
        if sibling.gpu_instance_id == device.gpu_instance_id
    }
    users = [life for life in lives for leaf in (life.spec.leaves if life.spec else ()) if leaf in siblings]
    return _used(users, seconds, moment)


def _instance(
    gpu: Gpu, number: int, device: MigInstance, lives: Sequence[ProcessLife], seconds: float, moment: float
) -> MigInstance:
    total = device.memory.total_bytes if device.memory else 0
    used = _pool_used(gpu, device, lives, seconds, moment)
    return structs.replace(
        device,
        memory=DeviceMemory(total, used, total - used, 0),
        processes=_processes_on(lives, Leaf(gpu.index, number), seconds, moment),
    )


def _processes_on(lives: Sequence[ProcessLife], leaf: Leaf, seconds: float, moment: float) -> tuple[GpuProcess, ...]:
    rows = (
        GpuProcess(life.pid, _memory_of(life, seconds, moment), NVML_TYPES[life.spec.type])
        for life in lives
        if life.spec is not None and leaf in life.spec.leaves
    )
    return tuple(sorted(rows, key=lambda row: row.pid))


def _samples(gpu: Gpu, lives: Sequence[ProcessLife], moment: float) -> tuple[ProcessSample, ...]:
    """NVML has no row for a process that did nothing, nor for the clients of an MPS server. Only the new call, of
    Blackwell GPUs, has JPEG and OFA."""
    busy = []
    for life in lives:
        if (spec := life.spec) is not None and spec.type != "mps":
            engines = [spec.encoder, spec.decoder, *((spec.jpeg, spec.ofa) if _BLACKWELL.search(gpu.model) else ())]
            loads = [ratio_at(spec.sm, moment), spec.memory_controller_at(moment)]
            ratios = [round(load, 2) for load in (*loads, *(ratio_at(engine, moment) for engine in engines))]
            if any(ratios):
                busy.append(ProcessSample(life.pid, *ratios))
    return tuple(sorted(busy, key=lambda row: row.pid))
