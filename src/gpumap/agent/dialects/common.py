"""What several dialects need: the units of the originals, lookups in the snapshot, and values of a GPU's reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from gpumap.model.grouping import all_known
from gpumap.model.node import ContainerOnDevice, Device, Gpu
from gpumap.model.readings import GpuReading, Uuid
from gpumap.model.snapshot import Snapshot, once_per_snapshot
from gpumap.model.terms import Owner

_Value = TypeVar("_Value")

ON_SOME_GPU = frozenset({"untrusted_id", "unparsed"})
"""Reasons of unmatched slots that may be on any GPU that NVML lists. The other slots are on none of them."""


def mib(number_bytes: float) -> int:
    """Return whole MiB, rounded down as in nvidia-smi and DCGM."""
    return int(number_bytes) >> 20


def percent(ratio: float) -> float:
    """Return a ratio as 0-100, without the noise of floats: 0.29 is 29.0."""
    return round(ratio * 100, 9)


@once_per_snapshot
def gpus_by_uuid(snapshot: Snapshot) -> Mapping[Uuid, Gpu]:
    """Return the GPU of every device that NVML lists: of a MIG device its parent, of a GPU itself."""
    gpus = {gpu.uuid: gpu for gpu in snapshot.node.gpus}
    device_gpus = {device.uuid: gpus[device.gpu_uuid] for device in snapshot.node.devices if device.gpu_uuid in gpus}
    return {**device_gpus, **gpus}


def gpu_uuid(uuid: Uuid, gpus: Mapping[Uuid, Gpu]) -> Uuid:
    """Return the uuid of a device's GPU; its own if NVML does not list the device."""
    gpu = gpus.get(uuid)
    return uuid if gpu is None else gpu.uuid


@once_per_snapshot
def leaves_by_uuid(snapshot: Snapshot) -> Mapping[Uuid, Device]:
    return {leaf.uuid: leaf for leaf in snapshot.node.devices}


def device_node(gpu: Gpu) -> str:
    """Return the GPU's device node below /dev; empty if unknown."""
    return "" if gpu.minor is None else f"nvidia{gpu.minor}"


def driver_version(snapshot: Snapshot) -> str:
    return snapshot.node.driver.driver_version if snapshot.node.driver is not None else ""


def granted_bytes(rows: Iterable[ContainerOnDevice], leaves: Mapping[Uuid, Device]) -> int | None:
    """Return the memory that `rows` grant in total; `None` if one of them is unknown.

    Compute instances of one GPU instance share its memory: it counts once for all of them.
    """
    of_memory: dict[tuple[Uuid, int | None], list[ContainerOnDevice]] = {}
    for row in rows:
        leaf = leaves.get(row.uuid)
        shared = leaf.mig.gpu_instance_id if leaf and leaf.mig else None
        owner = leaf.gpu_uuid if leaf and leaf.gpu_uuid and shared is not None else row.uuid
        of_memory.setdefault((owner, shared), []).append(row)
    total = 0
    for (_, instance), holding in of_memory.items():
        granted = all_known(_granted(row, leaves.get(row.uuid)) for row in holding)
        if granted is None:
            return None
        sizes = [size for row in holding if (size := _size(leaves.get(row.uuid))) is not None]
        total += sum(granted) if instance is None else min(sum(granted), max(sizes or granted))
    return total


def sum_known(values: Iterable[float | None]) -> float | None:
    """Return the exact sum; `None` if a value is unknown."""
    known = all_known(values)
    return None if known is None else math.fsum(known)


def granted_mib(rows: Iterable[ContainerOnDevice], leaves: Mapping[Uuid, Device]) -> int | None:
    """Return `granted_bytes` in MiB."""
    granted = granted_bytes(rows, leaves)
    return mib(granted) if granted is not None else None


def _granted(row: ContainerOnDevice, leaf: Device | None) -> int | None:
    """Without an amount, the whole GPU grants its memory, and a claim with admin access (0 GPUs) grants none."""
    if row.allocated_memory_bytes is not None or row.allocated_gpus is None:
        return row.allocated_memory_bytes
    return 0 if row.allocated_gpus == 0 else _size(leaf) if row.allocated_gpus >= 1 else None


def _size(leaf: Device | None) -> int | None:
    return leaf.memory.total_bytes if leaf is not None and leaf.memory is not None else None


def owns(row: ContainerOnDevice) -> bool:
    """Whether a device was assigned to a container. A claim with admin access only observes it, a reservation only
    keeps it for others; a pod that a scheduler lets use it may have no other sign."""
    if row.reservation or row.allocated_gpus == 0:
        return False
    return row.holds or row.owner is Owner.SCHEDULED


def sees_processes(snapshot: Snapshot) -> bool:
    """Whether the PIDs of the snapshot are PIDs of this node."""
    return snapshot.node.capabilities.get("pid_visibility", False)


# --- values of a GPU --------------------------------------------------------------------------------------------------


Reading = Callable[[GpuReading], float | None]


def _reader_by_word(values: Callable[[GpuReading], Mapping[str, float]]) -> Callable[[str], Reading]:
    return lambda word: lambda reading: values(reading).get(word)


clock = _reader_by_word(lambda reading: reading.clocks_hertz)
max_clock = _reader_by_word(lambda reading: reading.max_clocks_hertz)
temperature = _reader_by_word(lambda reading: reading.temperatures_celsius)
power_limit = _reader_by_word(lambda reading: reading.power_limits_watts)
event_seconds = _reader_by_word(lambda reading: reading.clock_event_seconds)
"""How long the driver lowered the clocks for a reason."""
remapped_rows = _reader_by_word(lambda reading: reading.remapped_rows)
retired_pages = _reader_by_word(lambda reading: reading.retired_pages)


def ecc_errors(kind: str, location: str) -> Reading:
    """Over the GPU's life."""
    return lambda reading: reading.ecc_errors.get(kind, {}).get(location)


def ecc_total(kind: str, since: str) -> Reading:
    return lambda reading: reading.ecc_totals.get(kind, {}).get(since)
