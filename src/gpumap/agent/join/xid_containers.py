"""Who was on which GPU at the moment of an XID error, and so under whose name it is counted.

An event may be told late, and while the kubelet or NVML does not tell, nobody is known to have left: so it is
remembered who was there, for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.ledger import Key
from gpumap.model.observations import ContainerName
from gpumap.model.readings import Uuid, XidError
from gpumap.model.snapshot import ContainerOnDevice

CARRIED_SECONDS = 60.0
"""So long who was seen may still be there while not all is told: a kubelet that restarts makes no event nobody's, and
one that stays away makes none that of everybody who ever came."""
TOLD_LATE_SECONDS = 5.0
"""Longer than an event waits in a listener that does not hang."""
MOST_SCENES = 64


class DeviceContainer(NamedTuple):
    """A container that holds or uses a device, and the part of a GPU that this is; without ids all of it."""

    name: ContainerName
    uuid: Uuid
    gpu: Uuid
    gpu_instance_id: int | None
    compute_instance_id: int | None


class ContainersOnDevices(NamedTuple):
    """Who was on the devices as from a collection that was finished `since` (monotonic) until the next scene."""

    since: float
    occupants: frozenset[DeviceContainer]


Seen = Mapping[DeviceContainer, float]
"""When somebody was last seen, monotonic."""


def look(
    before: Seen, containers: Iterable[ContainerOnDevice], inventory: Inventory, *, complete: bool, finished: float
) -> Seen:
    """Who is on the devices now; while not all is told, those who were seen a moment ago are too."""
    seen = dict.fromkeys(_occupants(containers, inventory), finished)
    if not complete:
        seen |= {one: at for one, at in before.items() if one not in seen and finished - at <= CARRIED_SECONDS}
    return seen


def _occupants(containers: Iterable[ContainerOnDevice], inventory: Inventory) -> Iterator[DeviceContainer]:
    for row in containers:
        leaf, gpu = inventory.leaves.get(row.uuid), inventory.gpu_of_leaf.get(row.uuid)
        if leaf is not None and gpu is not None:
            yield DeviceContainer(row.name, row.uuid, gpu.uuid, leaf.gpu_instance_id, leaf.compute_instance_id)
        else:  # a partitioned GPU, or one that only the kubelet names
            yield DeviceContainer(row.name, row.uuid, row.uuid, None, None)


def credit(
    events: Mapping[Uuid, Iterable[XidError]], read_at: float, scenes: tuple[ContainersOnDevices, ...]
) -> dict[Key, list[XidError]]:
    """The events for each container that was on the device at that moment: each once, whatever it has of the GPU."""
    credited: dict[Key, list[XidError]] = {}
    for event in (event for of_gpu in events.values() for event in of_gpu):
        for name, uuid in _concerned(event, scene_at(read_at - event.age_seconds, scenes)).items():
            credited.setdefault((name, uuid), []).append(event)
    return credited


def _concerned(event: XidError, scene: ContainersOnDevices) -> dict[ContainerName, Uuid]:
    """Each container that an event concerns, and the device under which it is counted for it.

    That is the part of the GPU that the event names, if the container has it; else the GPU.
    """
    found: dict[ContainerName, Uuid] = {}
    for one in sorted(filter(lambda one: _concerns(event, one), scene.occupants), key=_parts_first):
        found.setdefault(one.name, event.uuid if event.gpu_instance_id is None else one.uuid)
    return found


def _concerns(event: XidError, one: DeviceContainer) -> bool:
    """An event without ids concerns all of the GPU, and a container that has all of it is concerned by each event."""
    if event.uuid != one.gpu:
        return False
    pairs = (
        (event.gpu_instance_id, one.gpu_instance_id),
        (event.compute_instance_id, one.compute_instance_id),
    )
    return all(told is None or own is None or told == own for told, own in pairs)


def _parts_first(one: DeviceContainer) -> tuple[bool, int, int]:
    """Of the compute instances that an event may be of, the first."""
    return one.gpu_instance_id is None, one.gpu_instance_id or 0, one.compute_instance_id or 0


def scene_at(moment: float, scenes: tuple[ContainersOnDevices, ...]) -> ContainersOnDevices:
    """That of the last collection which was finished by then; of those before gpumap's first one, the first."""
    return next((scene for scene in reversed(scenes) if scene.since <= moment), scenes[0])


def still_needed(scenes: tuple[ContainersOnDevices, ...], read_at: float | None) -> tuple[ContainersOnDevices, ...]:
    """Leave out the scenes that no event can be of any more, and those that are as the one before them.

    `read_at` is when NVML answered, which tells all events until then; `None` if it did not.
    """
    distinct = [one for one, earlier in zip(scenes, (None, *scenes), strict=False) if not _same(one, earlier)]
    if read_at is not None:
        oldest = scene_at(read_at - TOLD_LATE_SECONDS, tuple(distinct))
        distinct = distinct[distinct.index(oldest) :]
    return tuple(distinct[-MOST_SCENES:])


def _same(one: ContainersOnDevices, earlier: ContainersOnDevices | None) -> bool:
    return earlier is not None and one.occupants == earlier.occupants
