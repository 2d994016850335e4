"""What dcgm-exporter has a series of, a GPU or a GPU instance of MIG, and whose each is.

Compute instances of one GPU instance are one entity: the labels that dcgm-exporter has cannot tell them apart.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.agent.dialects.allocate_mode import Mode, modes_by_device
from gpumap.agent.dialects.rows import all_told, owns, sees_processes
from gpumap.model.observations import ContainerName, Source
from gpumap.model.readings import Activity, DeviceMemory, Uuid
from gpumap.model.snapshot import ContainerOnDevice, ContainerUse, Gpu, Leaf, Owner, ProcessUse, Snapshot

_COMPUTE_INSTANCE = re.compile(r"[0-9]+c\.")
"""What stands before a GPU instance's profile where a compute instance is a part of it: `1c.3g.40gb`."""


@dataclass(frozen=True, slots=True)
class Entity:
    """A GPU (`leaves` are all that are on it), or a GPU instance (`leaves` are its compute instances)."""

    gpu: Gpu
    leaves: tuple[Leaf, ...]
    gpu_instance_id: int | None
    profile: str
    rows: tuple[ContainerOnDevice, ...]
    """Of containers that own or use its leaves, in the snapshot's order."""
    whole: tuple[ContainerName, ...]
    """Who owns the partitioned GPU that it is, or is on, as a whole."""
    sole: ContainerName | None
    """The one container that it was given to whole, if no process on it may be another's."""

    @property
    def owners(self) -> tuple[ContainerName, ...]:
        """The containers that it was given to. On a partitioned GPU's card that is who has all of it."""
        if self.gpu.partitioned and self.gpu_instance_id is None:
            return self.whole
        return tuple(sorted({*self.whole, *(row.name for row in self.rows if owns(row))}))

    @property
    def containers(self) -> tuple[ContainerName, ...]:
        """All that own or use it."""
        return tuple(sorted({*self.whole, *(row.name for row in self.rows)}))

    @property
    def memory(self) -> DeviceMemory | None:
        """Each of the compute instances shows their memory whole."""
        return next((leaf.memory for leaf in self.leaves if leaf.memory is not None), None)

    @property
    def activity(self) -> Activity | None:
        return next((leaf.activity for leaf in self.leaves if leaf.activity is not None), None)

    def own(self, name: ContainerName, value: Callable[[ContainerUse], float | None]) -> float | None:
        """What was measured of a container here; `None` where some of it is not known."""
        uses = {row.uuid: row.use for row in self.rows if row.name == name}
        if name in self.whole:
            uses = {leaf.uuid: uses.get(leaf.uuid) for leaf in self.leaves}
        told = all_told(None if use is None else value(use) for use in uses.values())
        return sum(told) if told else None


def cards(snapshot: Snapshot) -> Iterator[Entity]:
    """Every GPU, by index."""
    return _cards(snapshot, _look(snapshot))


def _cards(snapshot: Snapshot, sight: _Sight) -> Iterator[Entity]:
    on_gpu: dict[Uuid, list[Leaf]] = defaultdict(list)
    for leaf in snapshot.leaves:
        if leaf.gpu is not None:
            on_gpu[leaf.gpu.uuid].append(leaf)
    for gpu in sorted(snapshot.gpus, key=lambda gpu: (gpu.index, gpu.uuid)):
        yield _entity(gpu, on_gpu.get(gpu.uuid, []), sight, None, "")


def entities(snapshot: Snapshot) -> Iterator[Entity]:
    """What can be given away: every GPU that is not partitioned, and every GPU instance, by their numbers."""
    sight = _look(snapshot)
    for card in _cards(snapshot, sight):
        if not card.gpu.partitioned:
            yield card
            continue
        by_instance: dict[int, list[Leaf]] = defaultdict(list)
        for leaf in card.leaves:
            if leaf.instance is not None:
                by_instance[leaf.instance.gpu_instance_id].append(leaf)
        for number, leaves in sorted(by_instance.items()):
            ordered = sorted(leaves, key=lambda leaf: (_compute_instance_id(leaf), leaf.uuid))
            yield _entity(card.gpu, ordered, sight, number, _profile(ordered))


class _Sight(NamedTuple):
    """What the snapshot says of each device, in its order, and whether it can say whose processes are."""

    rows: Mapping[Uuid, list[ContainerOnDevice]]
    """Of containers that own or use the device."""
    processes: Mapping[Uuid, list[ProcessUse]]
    modes: Mapping[tuple[ContainerName, Uuid], Mode | None]
    sees: bool | None
    """`None`: for the moment not, so that nobody is known to be alone on a device."""

    def is_alone(self, owner: ContainerName, leaves: Iterable[Leaf]) -> bool:
        """Whether every process there is known to be its own. Where none can be told, the allocation decides."""
        if self.sees is None:
            return False
        return not self.sees or all(self._is_alone_on(leaf, owner) for leaf in leaves)

    def _is_alone_on(self, leaf: Leaf, owner: ContainerName) -> bool:
        uses = [use for use in leaf.owners if use.processes is not None]
        if not uses or any(use.processes and use.owner not in (Owner.ASSIGNED, Owner.SIBLING) for use in uses):
            return False  # the driver lists no processes, or some are not known to be of who was given the device
        on_it = self.processes.get(leaf.uuid, ())
        if any(process.owner is not Owner.ASSIGNED or process.name != owner for process in on_it):
            return False
        return all(row.name == owner for row in self.rows.get(leaf.uuid, ()))


def _look(snapshot: Snapshot) -> _Sight:
    rows: dict[Uuid, list[ContainerOnDevice]] = defaultdict(list)
    for row in snapshot.containers:
        if owns(row) or (row.use is not None and row.use.processes):
            rows[row.uuid].append(row)
    processes: dict[Uuid, list[ProcessUse]] = defaultdict(list)
    for process in snapshot.processes:
        processes[process.uuid].append(process)
    sees: bool | None = sees_processes(snapshot)
    if not sees and any(
        one.source is Source.PROCFS and not one.up and one.last_success is not None for one in snapshot.sources
    ):
        sees = None
    return _Sight(rows, processes, modes_by_device(snapshot), sees)


def _entity(gpu: Gpu, leaves: Iterable[Leaf], sight: _Sight, gpu_instance_id: int | None, profile: str) -> Entity:
    leaves = tuple(leaves)
    rows = tuple(row for leaf in leaves for row in sight.rows.get(leaf.uuid, ()))
    of_card = sight.rows.get(gpu.uuid, ()) if gpu.partitioned else ()
    whole = tuple(sorted({row.name for row in of_card if owns(row)}))
    devices = [leaf.uuid for leaf in leaves]
    if gpu.partitioned and gpu_instance_id is None:
        devices = []  # who has all instances of a card was not given the card
    owners = {*whole, *(row.name for row in rows if owns(row))}
    sole = _sole(owners, [gpu.uuid] if whole else devices, leaves, sight)
    return Entity(gpu, leaves, gpu_instance_id, profile, rows, whole, sole)


def _sole(
    owners: Collection[ContainerName], devices: Collection[Uuid], leaves: Iterable[Leaf], sight: _Sight
) -> ContainerName | None:
    """The one owner, if it was given all of `devices` whole and nobody else is on the leaves."""
    if len(owners) != 1:
        return None
    (owner,) = owners
    is_whole = bool(devices) and all(sight.modes.get((owner, uuid)) is Mode.EXCLUSIVE for uuid in devices)
    return owner if is_whole and sight.is_alone(owner, leaves) else None


def _compute_instance_id(leaf: Leaf) -> int:
    return leaf.instance.compute_instance_id if leaf.instance is not None else 0


def _profile(leaves: list[Leaf]) -> str:
    """The GPU instance's own: that of a compute instance without what says how large a part of it that is."""
    profiles = (leaf.instance.profile for leaf in leaves if leaf.instance is not None)
    return _COMPUTE_INSTANCE.sub("", next(profiles, ""), count=1)
