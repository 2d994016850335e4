"""How devices are assigned, in the terms of Aliyun's GPU monitoring: not at all, exclusively, or shared."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Mapping

from gpumap.agent.dialects.common import gpu_uuid, gpus_by_uuid, leaves_by_uuid, owns
from gpumap.model.grouping import grouped
from gpumap.model.node import ContainerOnDevice, Device
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot, once_per_snapshot
from gpumap.model.terms import ContainerName


class Mode(enum.IntEnum):
    """The values of DCGM_CUSTOM_ALLOCATE_MODE; the names are those of the label `AllocateMode`."""

    NONE = 0
    EXCLUSIVE = 1
    SHARE = 2


def combine(modes: Collection[Mode | None]) -> Mode | None:
    """One shared device makes it shared. Otherwise all must be known."""
    if Mode.SHARE in modes:
        return Mode.SHARE
    return max((mode for mode in modes if mode is not None), default=Mode.NONE) if None not in modes else None


@once_per_snapshot
def modes_by_device(snapshot: Snapshot) -> Mapping[tuple[ContainerName, Uuid], Mode | None]:
    """Return how each container holds each of its devices."""
    leaves = leaves_by_uuid(snapshot)
    holders: dict[Uuid, set[ContainerName]] = defaultdict(set)
    for row in snapshot.containers:
        if owns(row) or row.reservation:
            holders[row.uuid].add(row.name)
    memory_sharers = _memory_sharers(snapshot)
    return {
        (row.name, row.uuid): _mode(
            row, leaves.get(row.uuid), [holders[uuid] for uuid in memory_sharers.get(row.uuid, [row.uuid])]
        )
        for row in snapshot.containers
        if row.holds
    }


@once_per_snapshot
def modes_by_holder(snapshot: Snapshot) -> Mapping[tuple[ContainerName, Uuid], Mode | None]:
    """Return how each container holds its part of each GPU."""
    gpus = gpus_by_uuid(snapshot)
    modes = grouped(((name, gpu_uuid(uuid, gpus)), mode) for (name, uuid), mode in modes_by_device(snapshot).items())
    return {key: combine(parts) for key, parts in modes.items()}


def _memory_sharers(snapshot: Snapshot) -> Mapping[Uuid, list[Uuid]]:
    """Return all compute instances of the same GPU instance, for each of them: they share its memory."""
    instances = grouped(
        ((leaf.gpu_uuid, leaf.mig.gpu_instance_id), leaf.uuid)
        for leaf in snapshot.node.devices
        if leaf.gpu_uuid is not None and leaf.mig is not None
    )
    return {uuid: uuids for uuids in instances.values() for uuid in uuids}


def mode_of_node(snapshot: Snapshot) -> Mode | None:
    """Return `None` without a current List, and if it depends on slots without a known device or on unlisted pods."""
    if all(leaf.holders is None for leaf in snapshot.node.devices):
        return None
    may_have_more = snapshot.node.unmatched or any(leaf.holders is None for leaf in snapshot.node.devices)
    return combine([*modes_by_holder(snapshot).values(), *([None] if may_have_more else [])])


def _mode(row: ContainerOnDevice, leaf: Device | None, holders: Collection[set[ContainerName]]) -> Mode | None:
    """Exclusive leaves nothing of the device to others, whatever the name of the resource. A reservation shares it.

    `holders` are those of the device, and of each compute instance that shares its memory.
    """
    gpus, granted = row.allocated_gpus, row.allocated_memory_bytes
    if gpus == 0:
        return Mode.NONE  # a claim with admin access: it only observes
    if row.reservation or any(of_device != {row.name} for of_device in holders):
        return Mode.SHARE
    if gpus is not None and gpus >= 1:
        return Mode.EXCLUSIVE
    if granted is not None and leaf is not None and leaf.memory is not None:
        return Mode.EXCLUSIVE if granted >= leaf.memory.total_bytes else Mode.SHARE
    if row.uuid.startswith("MIG-") or (leaf is not None and leaf.mig is not None):
        offered = leaf.allocatable if leaf is not None else {}
        return Mode.SHARE if any(offered.get(resource, 0) > 1 for resource in row.slots) else None
    return Mode.SHARE if gpus is not None else None
