"""The entities of dcgm-exporter's series, GPUs and GPU instances of MIG, with the containers that own each.

Compute instances of one GPU instance are one entity: the labels of dcgm-exporter cannot separate them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpumap.agent.dialects.allocate_mode import Mode, modes_by_device
from gpumap.agent.dialects.common import owns, sees_processes
from gpumap.model.devices import place_of
from gpumap.model.grouping import all_known, grouped
from gpumap.model.node import ContainerOnDevice, Device, Gpu, Process, Use
from gpumap.model.readings import Activity, DeviceMemory, Uuid
from gpumap.model.snapshot import Snapshot, once_per_snapshot
from gpumap.model.terms import ContainerName, Owner, Source

_COMPUTE_INSTANCE = re.compile(r"\A[0-9]+c\.")
"""The prefix of the GPU instance's profile in that of a compute instance: `1c.3g.40gb`."""


@dataclass(frozen=True)
class Entity:
    """A GPU (`leaves` are all that are on it), or a GPU instance (`leaves` are its compute instances)."""

    gpu: Gpu
    leaves: tuple[Device, ...]
    gpu_instance_id: int | None
    profile: str
    rows: tuple[ContainerOnDevice, ...]
    """Rows of the containers that own or use its leaves, in the snapshot's order."""
    gpu_owners: tuple[ContainerName, ...]
    """Containers that own the whole partitioned GPU that it is, or is on."""
    sole: ContainerName | None
    """The container that owns all of it, if no process on it may belong to another one."""

    @cached_property
    def owners(self) -> tuple[ContainerName, ...]:
        """The containers that own it. Only the owners of the whole GPU own a partitioned GPU itself."""
        if self.gpu.partitioned and self.gpu_instance_id is None:
            return self.gpu_owners
        return tuple(sorted({*self.gpu_owners, *(row.name for row in self.rows if owns(row))}))

    @cached_property
    def containers(self) -> tuple[ContainerName, ...]:
        """All containers that own or use it."""
        return tuple(sorted({*self.gpu_owners, *(row.name for row in self.rows)}))

    @cached_property
    def memory(self) -> DeviceMemory | None:
        """Each compute instance reports the whole memory."""
        return next((leaf.memory for leaf in self.leaves if leaf.memory is not None), None)

    @cached_property
    def activity(self) -> Activity | None:
        return next((leaf.activity for leaf in self.leaves if leaf.activity is not None), None)

    def own(self, name: ContainerName, value: Callable[[Use], float | None]) -> float | None:
        """Return the measured value of a container here; `None` if a part of it is unknown."""
        uses = {row.uuid: row.use for row in self.rows if row.name == name}
        if name in self.gpu_owners:
            uses = {leaf.uuid: uses.get(leaf.uuid) for leaf in self.leaves}
        values = all_known(None if use is None else value(use) for use in uses.values())
        return sum(values) if values else None


@once_per_snapshot
def gpu_entities(snapshot: Snapshot) -> tuple[Entity, ...]:
    """Return every GPU, by index."""
    on_gpu = grouped((leaf.gpu_uuid, leaf) for leaf in snapshot.node.devices if leaf.is_leaf)
    by_index = sorted(snapshot.node.gpus, key=lambda gpu: (gpu.index, gpu.uuid))
    view = _view(snapshot)
    return tuple(_entity(gpu, on_gpu.get(gpu.uuid, []), view, None, "") for gpu in by_index)


@once_per_snapshot
def entities(snapshot: Snapshot) -> tuple[Entity, ...]:
    """Return what the kubelet can assign: every GPU that is not partitioned, and every GPU instance, by number."""
    view, assignable = _view(snapshot), []
    for entity in gpu_entities(snapshot):
        if not entity.gpu.partitioned:
            assignable.append(entity)
            continue
        by_instance = grouped((leaf.mig.gpu_instance_id, leaf) for leaf in entity.leaves if leaf.mig is not None)
        for number, leaves in sorted(by_instance.items()):
            ordered = sorted(leaves, key=place_of)
            profile = next((leaf.mig.profile for leaf in ordered if leaf.mig is not None), "")
            assignable.append(_entity(entity.gpu, ordered, view, number, _COMPUTE_INSTANCE.sub("", profile, count=1)))
    return tuple(assignable)


class DcgmView(NamedTuple):
    """The snapshot by device, in its order, and whether it knows the owners of processes."""

    rows: Mapping[Uuid, list[ContainerOnDevice]]
    """Rows of the containers that own or use the device."""
    processes: Mapping[Uuid, list[Process]]
    modes: Mapping[tuple[ContainerName, Uuid], Mode | None]
    sees_processes: bool | None
    """`None`: temporarily not. No container is then known to be alone on a device."""

    def is_alone(self, owner: ContainerName, leaves: Iterable[Device]) -> bool:
        """Whether every process there certainly is its own. If gpumap cannot see processes, the allocation decides."""
        if self.sees_processes is None:
            return False
        return not self.sees_processes or all(self._is_alone_on(leaf, owner) for leaf in leaves)

    def _is_alone_on(self, leaf: Device, owner: ContainerName) -> bool:
        uses = [use for use in leaf.owners if use.processes is not None]
        if not uses or any(use.processes and use.owner not in (Owner.ASSIGNED, Owner.SIBLING) for use in uses):
            return False  # the driver lists no processes, or some may not belong to the owners
        on_it = self.processes.get(leaf.uuid, ())
        if any(process.owner is not Owner.ASSIGNED or process.name != owner for process in on_it):
            return False
        return all(row.name == owner for row in self.rows.get(leaf.uuid, ()))


@once_per_snapshot
def _view(snapshot: Snapshot) -> DcgmView:
    used = (row for row in snapshot.containers if owns(row) or (row.use is not None and row.use.processes))
    rows = grouped((row.uuid, row) for row in used)
    processes = grouped((process.uuid, process) for process in snapshot.processes)
    sees: bool | None = sees_processes(snapshot)
    if not sees and any(
        source.source == Source.PROCFS and not source.up and source.last_success is not None
        for source in snapshot.node.sources
    ):
        sees = None
    return DcgmView(rows, processes, modes_by_device(snapshot), sees)


def _entity(gpu: Gpu, leaves: Iterable[Device], view: DcgmView, gpu_instance_id: int | None, profile: str) -> Entity:
    leaves = tuple(leaves)
    rows = tuple(row for leaf in leaves for row in view.rows.get(leaf.uuid, ()))
    gpu_rows = view.rows.get(gpu.uuid, ()) if gpu.partitioned else ()
    gpu_owners = tuple(sorted({row.name for row in gpu_rows if owns(row)}))
    devices = [leaf.uuid for leaf in leaves]
    if gpu.partitioned and gpu_instance_id is None:
        devices = []  # the owner of all instances of a GPU does not own the GPU
    owners = {*gpu_owners, *(row.name for row in rows if owns(row))}
    if gpu_owners:
        devices = [gpu.uuid]
    sole = None
    if len(owners) == 1:  # and it owns each of the devices exclusively, and no other container is on the leaves
        (owner,) = owners
        is_whole = bool(devices) and all(view.modes.get((owner, uuid)) is Mode.EXCLUSIVE for uuid in devices)
        sole = owner if is_whole and view.is_alone(owner, leaves) else None
    return Entity(gpu, leaves, gpu_instance_id, profile, rows, gpu_owners, sole)
