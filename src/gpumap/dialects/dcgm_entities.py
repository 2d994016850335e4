"""What dcgm-exporter has a series of, a GPU or a GPU instance of MIG, and whose each is.

Compute instances of one GPU instance are one entity: the labels that dcgm-exporter has cannot tell them apart.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.model import Activity, ContainerName, DeviceMemory, Uuid
from gpumap.snapshot import ContainerOnDevice, ContainerUse, Gpu, Leaf, Owner, Snapshot

_OF_OTHERS = frozenset({Owner.UNASSIGNED, Owner.GONE, Owner.HOST, Owner.MPS_SERVER})
"""Whose processes certainly are not of the container that holds the device."""
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
    """Of containers on its leaves, in the snapshot's order."""
    whole: tuple[ContainerName, ...]
    """Who holds the partitioned GPU that it is, or is on, as a whole."""
    seen: frozenset[ContainerName]
    """Whose processes are on its leaves, as far as they can be named; also where it is not settled yet that they are
    not a holder's."""

    @property
    def is_card_of_instances(self) -> bool:
        return self.gpu.partitioned and self.gpu_instance_id is None

    @property
    def owners(self) -> tuple[ContainerName, ...]:
        """The containers that hold it. On a partitioned GPU's card that is who holds all of it."""
        if self.is_card_of_instances:
            return self.whole
        return tuple(sorted({*self.whole, *(row.name for row in self.rows if row.holds)}))

    @property
    def containers(self) -> tuple[ContainerName, ...]:
        """All that hold or use it."""
        return tuple(sorted({*self.whole, *(row.name for row in self.rows)}))

    @property
    def sole(self) -> ContainerName | None:
        """The one container that has it to itself: it alone holds it, and no process of anybody else is known."""
        owners = self.owners
        if len(owners) != 1:
            return None
        (owner,) = owners
        nameless = ContainerName(owner.namespace, owner.pod, "")  # a container of its pod, and maybe itself
        if not {owner, nameless}.issuperset((*self.containers, *self.seen)):
            return None
        others = any(use.processes for leaf in self.leaves for use in leaf.owners if use.owner in _OF_OTHERS)
        return None if others else owner

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
        values = [None if use is None else value(use) for use in uses.values()]
        known = [one for one in values if one is not None]
        return sum(known) if known and len(known) == len(values) else None


def cards(snapshot: Snapshot) -> Iterator[Entity]:
    """Every GPU, by index."""
    return _cards(snapshot, _by_device(snapshot))


def _cards(snapshot: Snapshot, devices: Mapping[Uuid, _OnDevice]) -> Iterator[Entity]:
    on_gpu: dict[Uuid, list[Leaf]] = defaultdict(list)
    for leaf in snapshot.leaves:
        if leaf.gpu is not None:
            on_gpu[leaf.gpu.uuid].append(leaf)
    for gpu in sorted(snapshot.gpus, key=lambda gpu: (gpu.index, gpu.uuid)):
        yield _entity(gpu, on_gpu.get(gpu.uuid, []), devices, None, "")


def entities(snapshot: Snapshot) -> Iterator[Entity]:
    """What can be given away: every GPU that is not partitioned, and every GPU instance, by their numbers."""
    devices = _by_device(snapshot)
    for card in _cards(snapshot, devices):
        if not card.gpu.partitioned:
            yield card
            continue
        by_instance: dict[int, list[Leaf]] = defaultdict(list)
        for leaf in card.leaves:
            if leaf.instance is not None:
                by_instance[leaf.instance.gpu_instance_id].append(leaf)
        for number, leaves in sorted(by_instance.items()):
            ordered = sorted(leaves, key=lambda leaf: (_compute_instance_id(leaf), leaf.uuid))
            yield _entity(card.gpu, ordered, devices, number, _profile(ordered))


class _OnDevice(NamedTuple):
    """What the snapshot says of one device, in its order."""

    rows: list[ContainerOnDevice]
    seen: set[ContainerName]


def _by_device(snapshot: Snapshot) -> Mapping[Uuid, _OnDevice]:
    devices: dict[Uuid, _OnDevice] = defaultdict(lambda: _OnDevice([], set()))
    for row in snapshot.containers:
        devices[row.uuid].rows.append(row)
    for process in snapshot.processes:
        if process.name is not None:
            devices[process.uuid].seen.add(process.name)
    return devices


def _entity(
    gpu: Gpu, leaves: Iterable[Leaf], devices: Mapping[Uuid, _OnDevice], gpu_instance_id: int | None, profile: str
) -> Entity:
    leaves = tuple(leaves)
    found = [devices[leaf.uuid] for leaf in leaves]
    whole = {row.name for row in devices[gpu.uuid].rows if row.holds} if gpu.partitioned else set()
    return Entity(
        gpu,
        leaves,
        gpu_instance_id,
        profile,
        tuple(row for device in found for row in device.rows),
        tuple(sorted(whole)),
        frozenset(name for device in found for name in device.seen),
    )


def _compute_instance_id(leaf: Leaf) -> int:
    return leaf.instance.compute_instance_id if leaf.instance is not None else 0


def _profile(leaves: list[Leaf]) -> str:
    """The GPU instance's own: that of a compute instance without what says how large a part of it that is."""
    profiles = (leaf.instance.profile for leaf in leaves if leaf.instance is not None)
    return _COMPUTE_INSTANCE.sub("", next(profiles, ""), count=1)
