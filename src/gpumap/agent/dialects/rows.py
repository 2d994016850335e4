"""What dialects have in common in reading a snapshot: the originals' units, and the GPU that a device is on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from gpumap.model.readings import Uuid
from gpumap.model.snapshot import ContainerOnDevice, Gpu, Leaf, Snapshot

_Value = TypeVar("_Value")

ON_SOME_CARD = frozenset({"untrusted_id", "unparsed"})
"""Reasons of unmatched slots that may be on any card which NVML sees; the others' are on one that it does not see."""


def mib(number_bytes: int) -> int:
    """Whole MiB, cut off as nvidia-smi and DCGM cut them off."""
    return number_bytes >> 20


def percent(ratio: float) -> float:
    """A ratio as 0-100, without the noise of floats: 0.29 is 29.0."""
    return round(ratio * 100, 9)


def gpus_by_uuid(snapshot: Snapshot) -> dict[Uuid, Gpu]:
    """The GPU of every device that NVML knows: of a MIG device the one that it is on, of a GPU itself."""
    found = {leaf.uuid: leaf.gpu for leaf in snapshot.leaves if leaf.gpu is not None}
    return {**found, **{gpu.uuid: gpu for gpu in snapshot.gpus}}


def leaves_by_uuid(snapshot: Snapshot) -> dict[Uuid, Leaf]:
    return {leaf.uuid: leaf for leaf in snapshot.leaves}


def device_node(gpu: Gpu) -> str:
    """The GPU's node below /dev; empty where it is not known."""
    return "" if gpu.minor is None else f"nvidia{gpu.minor}"


def driver_version(snapshot: Snapshot) -> str:
    return snapshot.driver.driver_version if snapshot.driver is not None else ""


def all_told(values: Iterable[_Value | None]) -> list[_Value] | None:
    """The values, if each of them is told: what is not known in a part is not known in all."""
    values = list(values)
    told = [value for value in values if value is not None]
    return told if len(told) == len(values) else None


def granted_bytes(rows: Iterable[ContainerOnDevice], leaves: Mapping[Uuid, Leaf]) -> int | None:
    """The memory that `rows` were granted in all; `None` where one of them was not told.

    Compute instances of one GPU instance share its memory: it is granted once, however many of them are held.
    """
    of_memory: dict[tuple[Uuid, int | None], list[ContainerOnDevice]] = {}
    for row in rows:
        leaf = leaves.get(row.uuid)
        shared = leaf.instance.gpu_instance_id if leaf and leaf.instance else None
        owner = leaf.gpu.uuid if leaf and leaf.gpu and shared is not None else row.uuid
        of_memory.setdefault((owner, shared), []).append(row)
    total = 0
    for (_, instance), holding in of_memory.items():
        granted = all_told(_granted(row, leaves.get(row.uuid)) for row in holding)
        if granted is None:
            return None
        sizes = [size for row in holding if (size := _size(leaves.get(row.uuid))) is not None]
        total += sum(granted) if instance is None else min(sum(granted), max(sizes or granted))
    return total


def granted_mib(rows: Iterable[ContainerOnDevice], leaves: Mapping[Uuid, Leaf]) -> int | None:
    """`granted_bytes`, as the originals show it."""
    granted = granted_bytes(rows, leaves)
    return mib(granted) if granted is not None else None


def _granted(row: ContainerOnDevice, leaf: Leaf | None) -> int | None:
    """Where no bytes were said: who has the whole card has its memory, and a claim with admin access, 0, has none."""
    if row.allocated_memory_bytes is not None or row.allocated_gpus is None:
        return row.allocated_memory_bytes
    return 0 if row.allocated_gpus == 0 else _size(leaf) if row.allocated_gpus >= 1 else None


def _size(leaf: Leaf | None) -> int | None:
    return leaf.memory.total_bytes if leaf is not None and leaf.memory is not None else None


def owns(row: ContainerOnDevice) -> bool:
    """Whether a device was given to a container. A claim with admin access, of which it has nothing, looks on."""
    return row.holds and row.allocated_gpus != 0


def sees_processes(snapshot: Snapshot) -> bool:
    """Whether the PIDs of the snapshot are those that this node's processes have."""
    return dict(snapshot.capabilities).get("pid_visibility", False)
