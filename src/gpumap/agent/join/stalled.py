"""For how long a GPU has been busy without work: it runs kernels, but draws next to no power, like a hung collective.

Evidence for the finding `stalled`. Only GPUs without MIG report their utilization.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import structs

from gpumap.agent.join.accounting import elapsed
from gpumap.model.findings import BUSY_RATIO
from gpumap.model.node import Device, Gpu
from gpumap.model.observations import Moment
from gpumap.model.readings import GpuReading, Uuid
from gpumap.model.terms import ContainerName

POWER_PART = 0.1
"""Of the way from the idle power of a GPU to its limit."""
ACTIVITY_RATIO = 0.01
PCIE_BYTES_PER_SECOND, NVLINK_BYTES_PER_SECOND = 0.6e9, 9e9
"""1 % of 16 lanes of PCIe 5.0, and of the NVLinks of a GPU of NVIDIA's Hopper generation."""


class StallMemory(NamedTuple):
    """What gpumap remembers of a GPU."""

    at: Moment
    idle_watts: float | None = None
    """The lowest power without a process."""
    links: tuple[int | None, int | None] = (None, None)
    """Bytes over PCIe and NVLink."""
    container: ContainerName | None = None
    """The only one with processes, if the GPU is busy without work."""
    since: Moment | None = None


def watch_for_stalls(
    before: Mapping[Uuid, StallMemory], gpus: Iterable[Gpu], devices: Iterable[Device], at: Moment
) -> tuple[dict[Uuid, StallMemory], tuple[Gpu, ...]]:
    """Return what to remember, and the GPUs with their idle power and for how long they have been busy without work."""
    by_uuid = {device.uuid: device for device in devices}
    after: dict[Uuid, StallMemory] = {}
    watched = []
    for gpu in gpus:
        memory = _watch(before.get(gpu.uuid, StallMemory(at)), gpu.reading, by_uuid.get(gpu.uuid), at)
        after[gpu.uuid] = memory
        seconds = elapsed(at) - elapsed(memory.since) if memory.since else None
        if memory.idle_watts is not None or seconds is not None:
            gpu = structs.replace(gpu, idle_power_watts=memory.idle_watts, busy_without_work_seconds=seconds)
        watched.append(gpu)
    return after, tuple(watched)


def _watch(before: StallMemory, reading: GpuReading | None, device: Device | None, at: Moment) -> StallMemory:
    if reading is None:
        return StallMemory(at, before.idle_watts)
    links = (
        _sum(reading.pcie_transmit_bytes, reading.pcie_receive_bytes),
        _sum(reading.nvlink_transmit_bytes, reading.nvlink_receive_bytes),
    )
    idle_watts = before.idle_watts
    if reading.processes == () and reading.power_watts is not None:
        idle_watts = min(reading.power_watts, idle_watts or reading.power_watts)
    container = _only_user(device)
    seconds = elapsed(at) - elapsed(before.at)
    if container is None or not _is_busy_without_work(reading, idle_watts, _traffic(before.links, links, seconds)):
        return StallMemory(at, idle_watts, links)
    since = before.since if before.since and before.container == container else at
    return StallMemory(at, idle_watts, links, container, since)


def _sum(sent: int | None, received: int | None) -> int | None:
    return None if sent is None or received is None else sent + received


def _traffic(
    before: tuple[int | None, int | None], now: tuple[int | None, int | None], seconds: float
) -> tuple[float, ...]:
    """Return the bytes per second over PCIe and NVLink, 0 if they are not known."""
    return tuple(
        (new - old) / seconds if old is not None and new is not None and seconds > 0 else 0.0
        for old, new in zip(before, now, strict=True)
    )


def _only_user(device: Device | None) -> ContainerName | None:
    """Return the container that has all processes on the device."""
    if device is None or not device.owners:
        return None
    users = [one for one in device.containers if one.use and one.use.processes]
    processes = sum(one.processes or 0 for one in device.owners)
    only = users[0] if len(users) == 1 else None
    return only.name if only and only.use and only.use.processes == processes else None


def _is_busy_without_work(reading: GpuReading, idle_watts: float | None, traffic: tuple[float, ...]) -> bool:
    power, limit = reading.power_watts, reading.power_limit_watts
    if power is None or limit is None or idle_watts is None or (reading.utilization_ratio or 0.0) < BUSY_RATIO:
        return False
    if power > idle_watts + POWER_PART * (limit - idle_watts):
        return False
    activity = reading.activity
    if activity is None:
        return True
    works = [activity.tensor_ratio or 0.0, activity.dram_ratio or 0.0]
    return max(works) < ACTIVITY_RATIO and traffic[0] < PCIE_BYTES_PER_SECOND and traffic[1] < NVLINK_BYTES_PER_SECOND
