"""What NVML would report of the simulated GPUs at one moment: memory, processes, load, heat and state.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from gpumap.lab.demo.gpu_state import (
    activity,
    counters,
    fault_at,
    is_blackwell,
    is_hopper,
    load_of_gpu,
    load_of_leaf,
    power_watts,
    with_card,
    with_health,
    with_links,
    working,
)
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
SAMPLED_SECONDS = 2.0
"""NVML returns the samples since the last call: also those of a process that has just ended."""


def gpu_readings(scenario: Scenario, processes: Iterable[ProcessLife], seconds: float) -> tuple[GpuReading, ...]:
    """One reading for each GPU. A faulty one has only its identity and the recovery action."""
    on: dict[int, list[ProcessLife]] = {gpu.index: [] for gpu in scenario.gpus}
    for life in processes:
        if life.spec is not None and seconds in life.window.shifted(0.0, SAMPLED_SECONDS):
            for index in {leaf.gpu for leaf in life.spec.leaves}:
                on[index].append(life)
    return tuple(_reading(scenario, gpu, on[gpu.index], seconds) for gpu in scenario.gpus)


def _reading(scenario: Scenario, gpu: Gpu, sampled: Sequence[ProcessLife], seconds: float) -> GpuReading:
    _, moment = play_of(scenario, seconds)
    lives = [life for life in sampled if seconds in life.window]
    reading = GpuReading(gpu.index, uuid=gpu.uuid, minor=gpu.minor, pci_bus_id=gpu.pci_bus_id, model=gpu.model)
    if fault := fault_at(gpu, moment):
        return structs.replace(reading, fault=fault.kind, recovery_action=fault.recovery)
    specs = [life.spec for life in lives if life.spec]
    load, work = load_of_gpu(gpu, moment, specs), load_of_gpu(gpu, moment, working(specs))
    counted = counters(scenario, gpu, seconds)
    reading = _with_basics(reading, gpu, lives, load, work, seconds, moment)
    reading = structs.replace(reading, samples=None if gpu.mig else _samples(gpu, sampled, moment))
    reading = structs.replace(reading, energy_joules=round(counted.joules, 3))
    reading = with_links(with_health(reading, gpu, load, work, counted, seconds), gpu, counted)
    reading = with_card(reading, gpu, seconds)
    return _with_activity(reading, gpu, specs, moment) if is_hopper(gpu.model) else reading


def _with_basics(
    reading: GpuReading, gpu: Gpu, lives: Sequence[ProcessLife], load: float, work: float, seconds: float, moment: float
) -> GpuReading:
    """Add what is asked of every GPU."""
    whole = not gpu.mig
    specs = [life.spec for life in lives if life.spec]
    return structs.replace(
        reading,
        memory=_card_memory(gpu, lives, seconds, moment),
        partitioned=not whole,
        max_mig_devices=None if whole else MAX_MIG_DEVICES,
        instances=tuple(_instance(gpu, n, device, lives, seconds, moment) for n, device in enumerate(gpu.devices)),
        processes=_rows(lives, Leaf(gpu.index), seconds, moment) if whole else None,
        samples_from=SAMPLES_NEW if whole and is_blackwell(gpu.model) else SAMPLES_OLD,
        utilization_ratio=round(load, 2) if whole else None,
        memory_controller_busy_ratio=_sum(spec.memory_controller_at(moment) for spec in specs) if whole else None,
        encoder_ratio=_sum(ratio_at(spec.encoder, moment) for spec in specs) if whole else None,
        decoder_ratio=_sum(ratio_at(spec.decoder, moment) for spec in specs) if whole else None,
        temperatures_celsius=_temperatures(work),
        power_watts=round(power_watts(gpu, work), 3),
        power_limit_watts=float(gpu.power_limit_watts),
    )


def _sum(ratios: Iterable[float]) -> float:
    """NVML reports whole percents."""
    return min(1.0, round(sum(ratios), 2))


def _temperatures(load: float) -> dict[str, float]:
    core = round(AMBIENT_CELSIUS + 42 * load)
    return {"gpu": float(core), "memory": float(core + 8)}


def _with_activity(reading: GpuReading, gpu: Gpu, specs: Sequence[Process], moment: float) -> GpuReading:
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
    here = [spec for spec in working(specs) if leaf in spec.leaves]
    memory_load = sum(spec.memory_controller_at(moment) for spec in here)
    engines = zip(*[(spec.encoder, spec.decoder, spec.jpeg, spec.ofa) for spec in here], strict=True)
    video_load = max((sum(ratio_at(wave, moment) for wave in waves) for waves in engines), default=0.0)
    return activity(load_of_leaf(leaf, moment, here), memory_load, video_load)


# --- memory and processes ---------------------------------------------------------------------------------------------


def _memory_of(life: ProcessLife, seconds: float, moment: float) -> int | None:
    """The memory of a process that always runs grows again in each play."""
    if life.spec is None:
        return None
    return bytes_at(life.spec.memory, moment if life.window.start == -math.inf else seconds - life.window.start)


def _used(lives: Sequence[ProcessLife], seconds: float, moment: float) -> int:
    sizes = [_memory_of(life, seconds, moment) for life in lives]
    return sum(UNREPORTED_BYTES if size is None else size for size in sizes) + overhead_bytes(len(lives))


def _card_memory(gpu: Gpu, lives: Sequence[ProcessLife], seconds: float, moment: float) -> DeviceMemory:
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
        for number, other in enumerate(gpu.devices)
        if other.gpu_instance_id == device.gpu_instance_id
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
        processes=_rows(lives, Leaf(gpu.index, number), seconds, moment),
    )


def _rows(lives: Sequence[ProcessLife], leaf: Leaf, seconds: float, moment: float) -> tuple[GpuProcess, ...]:
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
            engines = [spec.encoder, spec.decoder, *((spec.jpeg, spec.ofa) if is_blackwell(gpu.model) else ())]
            loads = [ratio_at(spec.sm, moment), spec.memory_controller_at(moment)]
            ratios = [round(load, 2) for load in (*loads, *(ratio_at(engine, moment) for engine in engines))]
            if any(ratios):
                busy.append(ProcessSample(life.pid, *ratios))
    return tuple(sorted(busy, key=lambda row: row.pid))
