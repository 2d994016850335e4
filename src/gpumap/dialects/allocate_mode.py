"""How cards are given away, in the words of Aliyun's GPU monitoring: not at all, exclusively, or shared."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection

from gpumap.dialects.rows import gpus_by_uuid
from gpumap.model import ContainerName, Uuid
from gpumap.snapshot import ContainerOnDevice, Leaf, Snapshot


class Mode(enum.IntEnum):
    """The values of DCGM_CUSTOM_ALLOCATE_MODE; the names are those of the label `AllocateMode`."""

    NONE = 0
    EXCLUSIVE = 1
    SHARE = 2


def combine(modes: Collection[Mode | None]) -> Mode | None:
    """One shared device is enough; else all have to be known."""
    if Mode.SHARE in modes:
        return Mode.SHARE
    return max((mode for mode in modes if mode is not None), default=Mode.NONE) if None not in modes else None


def modes_by_holder(snapshot: Snapshot) -> dict[tuple[ContainerName, Uuid], Mode | None]:
    """How each holder was given what it holds on a card."""
    gpus = gpus_by_uuid(snapshot)
    leaves = {leaf.uuid: leaf for leaf in snapshot.leaves}
    holders = Counter(row.uuid for row in snapshot.containers if row.holds and row.allocated_gpus != 0)
    found: dict[tuple[ContainerName, Uuid], list[Mode | None]] = {}
    for row in snapshot.containers:
        if row.holds:
            gpu = gpus.get(row.uuid)
            mode = _mode(row, leaves.get(row.uuid), holders[row.uuid])
            found.setdefault((row.name, gpu.uuid if gpu is not None else row.uuid), []).append(mode)
    return {key: combine(of_card) for key, of_card in found.items()}


def mode_of_node(snapshot: Snapshot) -> Mode | None:
    """`None` without a current List, and where it hangs on slots of which nobody knows the device."""
    if all(leaf.holders is None for leaf in snapshot.leaves):
        return None
    return combine([*modes_by_holder(snapshot).values(), *([None] if snapshot.unmatched else [])])


def _mode(row: ContainerOnDevice, leaf: Leaf | None, holders: int) -> Mode | None:
    """Exclusive is what leaves nothing of the device to others, whatever the resource is called."""
    gpus, granted = row.allocated_gpus, row.allocated_memory_bytes
    if gpus == 0:
        return Mode.NONE  # a claim with admin access: it looks on
    if holders > 1:
        return Mode.SHARE
    if gpus is not None and gpus >= 1:
        return Mode.EXCLUSIVE
    if granted is not None and leaf is not None and leaf.memory is not None:
        return Mode.EXCLUSIVE if granted >= leaf.memory.total_bytes else Mode.SHARE
    if row.uuid.startswith("MIG-") or (leaf is not None and leaf.instance is not None):
        offered = dict(leaf.allocatable) if leaf is not None else {}
        return Mode.SHARE if any(offered.get(resource, 0) > 1 for resource, _ in row.slots) else None
    return Mode.SHARE if gpus is not None else None
