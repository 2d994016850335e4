"""For how long a GPU has been busy without work: it runs kernels, but does next to nothing, like a hung collective.

Evidence for the finding `stalled`. One sign of work ends the time, and so does a value that is no longer known. Drivers
report no utilization of partitioned GPUs, so nothing is known of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import structs

from gpumap.agent.join.settings import GPUS_AWAY_MAX, JoinSettings
from gpumap.model.node import Device, Gpu
from gpumap.model.observations import Moment
from gpumap.model.readings import GpuReading, Uuid

BUSY_RATIO = 0.95
"""Utilization of a busy GPU."""
POWER_PART = 0.1
"""A GPU without work draws at most this part of the way from its idle power to its limit."""
ACTIVITY_RATIO = 0.01
"""A GPU without work has less tensor and DRAM activity. The memory controller has whole percents: not more."""
PCIE_BYTES_PER_SECOND, NVLINK_BYTES_PER_SECOND = 0.6e9, 9e9
"""1 % of 16 lanes of PCIe 5.0, and of the NVLinks of a Hopper GPU."""
FREE_SECONDS = 30.0
"""Clocks and power fall for some seconds after the last process: the power is idle power after so long."""
MEASURED_SECONDS = 2.0
"""Drivers count energy in steps: over a shorter time the mean power is not exact."""


class StallMemory(NamedTuple):
    """What gpumap remembers of a GPU."""

    moment: Moment
    reading: GpuReading | None = None
    """Of the time `moment`. None after a gap."""
    idle_watts: float | None = None
    """The lowest power without a process."""
    free_since: Moment | None = None
    """Since then it has had no process and no utilization."""
    since: Moment | None = None
    """Since then it has been busy without work."""


def watch_for_stalls(
    previous: Mapping[Uuid, StallMemory],
    gpus: Iterable[Gpu],
    devices: Iterable[Device],
    moment: Moment,
    settings: JoinSettings,
) -> tuple[dict[Uuid, StallMemory], tuple[Gpu, ...]]:
    """Return what to remember, and the GPUs with their idle power and for how long they have been busy without work."""
    by_uuid = {device.uuid: device for device in devices}
    after: dict[Uuid, StallMemory] = {}
    watched = []
    for gpu in gpus:
        last_memory = previous.get(gpu.uuid, StallMemory(moment))
        if gpu.reading is None or settings.is_gap(last_memory.moment, moment):
            last_memory = StallMemory(moment, idle_watts=last_memory.idle_watts)
        memory, seconds = last_memory, None
        if gpu.reading is not None:
            memory, seconds = _watch(last_memory, gpu.reading, by_uuid.get(gpu.uuid), moment)
        after[gpu.uuid] = memory
        watched.append(structs.replace(gpu, idle_power_watts=memory.idle_watts, busy_without_work_seconds=seconds))
    away = [
        (uuid, StallMemory(moment, idle_watts=memory.idle_watts))
        for uuid, memory in previous.items()
        if uuid not in after
    ]
    return dict(away[-GPUS_AWAY_MAX:]) | after, tuple(watched)


def _watch(
    previous: StallMemory, reading: GpuReading, device: Device | None, moment: Moment
) -> tuple[StallMemory, float | None]:
    """Return what to remember, and for how long it has been busy without work, if that is known."""
    free_since = (previous.free_since or moment) if reading.processes == () and reading.utilization_ratio == 0 else None
    idle_watts = previous.idle_watts
    if free_since and moment.since(free_since) >= FREE_SECONDS and reading.power_watts:
        idle_watts = min(reading.power_watts, idle_watts or reading.power_watts)
    seconds = moment.since(previous.moment)
    works = _works(previous.reading, reading, seconds, idle_watts, device)
    since = (previous.since or moment) if works is False else None
    busy_seconds = moment.since(since) if since else None if works is None else 0.0
    if previous.reading and seconds < MEASURED_SECONDS:  # measure from that reading the next time, too
        moment, reading = previous.moment, previous.reading
    return StallMemory(moment, reading, idle_watts, free_since, since), busy_seconds


def _works(
    previous: GpuReading | None, reading: GpuReading, seconds: float, idle_watts: float | None, device: Device | None
) -> bool | None:
    """Return whether a GPU works, or is not busy. False needs all evidence of the contrary."""
    if reading.utilization_ratio is None:
        return None
    if reading.utilization_ratio < BUSY_RATIO:
        return True
    span = previous, reading, seconds
    lowers_clocks = any(is_active for event, is_active in reading.clock_events.items() if event != "gpu_idle")
    is_power_uncertain = lowers_clocks or not reading.clock_events
    signs = [
        previous is not None and previous.processes != reading.processes,
        _others_compute(reading, device),
        *_draws(previous, reading, seconds, idle_watts),
        # Lower clocks need less power, also for work: then GPM's activity must show that there is none.
        None if is_power_uncertain and reading.activity is None else False,
        _is_active(previous, reading),
        _exceeds(
            lambda sample: _sum(sample.pcie_transmit_bytes, sample.pcie_receive_bytes), PCIE_BYTES_PER_SECOND, *span
        ),
        _exceeds(
            lambda sample: _sum(sample.nvlink_transmit_bytes, sample.nvlink_receive_bytes),
            NVLINK_BYTES_PER_SECOND,
            *span,
        ),
    ]
    return None if None in signs and not any(signs) else any(signs)


# --- signs of work; None: unknown -------------------------------------------------------------------------------------


def _others_compute(reading: GpuReading, device: Device | None) -> bool | None:
    """Return whether more than one container computes, or something outside containers."""
    if device is None or not reading.processes:
        return None
    pids = {process.pid for process in reading.processes}
    if any(sample.pid not in pids and any(sample.ratios) for sample in reading.samples or ()):
        return True  # a process that started and ended in between
    if device.has_unowned:
        return None
    uses = [row.use for row in device.containers if row.use and row.use.processes]
    if len(uses) != 1 or uses[0].processes != len(pids):
        return True
    return False if reading.samples is None or uses[0].sm_ratio else None


def _draws(
    previous: GpuReading | None, reading: GpuReading, seconds: float, idle_watts: float | None
) -> Iterator[bool | None]:
    """Yield whether it draws power: now, and since the last collection."""
    watts, limit = reading.power_watts, reading.power_limit_watts
    if watts is None or limit is None or idle_watts is None:
        yield None
        return
    max_watts = idle_watts + POWER_PART * (limit - idle_watts)
    yield None if watts < idle_watts else watts > max_watts  # a kernel draws more than none
    yield _exceeds(lambda sample: sample.energy_joules, max_watts, previous, reading, seconds)


def _is_active(previous: GpuReading | None, reading: GpuReading) -> bool | None:
    controller, activity = reading.memory_controller_busy_ratio, reading.activity
    if controller is not None and controller > ACTIVITY_RATIO:
        return True
    if reading.encoder_ratio or reading.decoder_ratio or any(sample.uses_video for sample in reading.samples or ()):
        return True
    if activity is None:
        return None if controller is None or (previous is not None and previous.activity is not None) else False
    pipes = (activity.tensor_ratio, activity.dram_ratio, activity.fp64_ratio, activity.fp32_ratio, activity.fp16_ratio)
    if any(ratio >= ACTIVITY_RATIO for ratio in (*pipes, activity.video_ratio) if ratio is not None):
        return True
    return None if None in (controller, activity.tensor_ratio, activity.dram_ratio) else False


def _sum(sent: int | None, received: int | None) -> int | None:
    return None if sent is None or received is None else sent + received


def _exceeds(
    count: Callable[[GpuReading], float | None],
    max_rate: float,
    previous: GpuReading | None,
    reading: GpuReading,
    seconds: float,
) -> bool | None:
    """Return whether a counter grew by more than `max_rate` a second. A GPU without the counter has no such sign."""
    old, new = count(previous) if previous else None, count(reading)
    if old is None or seconds < MEASURED_SECONDS:
        return False
    return None if new is None or new < old else new - old > max_rate * seconds
