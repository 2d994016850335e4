"""XID errors: how many each GPU had, how long nobody listened for them, and which containers were on it at the time.

Every second since a GPU was first seen is settled once: somebody listened, or it is blind time. A second that may
still turn out to have been listened to stays open for a while; what is settled is not taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumap.join.inventory import Inventory
from gpumap.model import ContainerName, Failed, NvmlReading, Observed, Uuid, XidError
from gpumap.snapshot import ContainerOnDevice, ContainerXids, GpuXids

KEPT_SECONDS = 300.0
"""How long a container's errors are told after it was last seen (contract §3, as its accounts are)."""
OPEN_SECONDS = 60.0
"""How long a second may stay open; longer than a worker that hangs is waited for (sources/nvml.py)."""
TOLD_LATE_SECONDS = 5.0
"""Longer than an event waits in a listener that does not hang."""
JITTER_SECONDS = 0.001
"""Of one moment that two readings tell, each by its own age: no time between."""
MOST_SCENES = 64
_MAY_STILL_LISTEN = frozenset({"deadline_exceeded"})
"""Reasons why a read of NVML failed, and the worker may hear events all the same."""


class GpuXidMemory(NamedTuple):
    """Of a GPU, known by its uuid."""

    errors: Mapping[int, int]
    """Events by XID code."""
    blind_seconds: float
    settled_until: float | None
    """Monotonic: up to then every second was listened to, or is in `blind_seconds`; `None`: count from when it is seen
    again, as for a GPU that is not on the node, or whose memory is of another boot."""
    listened: bool
    """Whether its events were ever listened to. What cannot be is not told."""


class ContainerXidMemory(NamedTuple):
    """Of a container and a device; those without errors are not remembered."""

    errors: Mapping[int, int]
    """Events by XID code."""
    kept_until: float
    """Monotonic: forgotten then, if not seen again."""


class Occupant(NamedTuple):
    """A container that holds or uses a device, and the part of a GPU that this is; without ids all of it."""

    name: ContainerName
    uuid: Uuid
    gpu: Uuid
    gpu_instance_id: int | None
    compute_instance_id: int | None


class Scene(NamedTuple):
    """Who was on the devices as from a collection that was finished `since` (monotonic) until the next scene."""

    since: float
    occupants: frozenset[Occupant]


@dataclass(frozen=True, slots=True)
class XidMemory:
    """What is remembered of XID errors from one collection to the next: plain numbers by uuid and name.

    A state file has need of `gpus` and `containers`; `scenes` are of this process alone.
    """

    gpus: Mapping[Uuid, GpuXidMemory] = field(default_factory=dict)
    containers: Mapping[tuple[ContainerName, Uuid], ContainerXidMemory] = field(default_factory=dict)
    scenes: tuple[Scene, ...] = ()
    """Oldest first; those that an event may still be of."""
    read_at: float | None = None
    """Monotonic: when NVML was read, or not, in the collection before."""


def count_xids(
    before: XidMemory,
    nvml: Observed[NvmlReading] | Failed,
    inventory: Inventory,
    containers: tuple[ContainerOnDevice, ...],
    *,
    list_current: bool,
    finished: float,
) -> tuple[XidMemory, tuple[GpuXids, ...], tuple[ContainerXids, ...]]:
    """Reduce one collection, which was `finished` then (monotonic), and of which `containers` are the rows.

    While the kubelet or NVML does not tell, nobody is known to have left.
    """
    events = _by_uuid(nvml.value.xids) if isinstance(nvml, Observed) else {}
    gpus = dict(before.gpus)
    here = {gpu.uuid for gpu in inventory.known}
    for uuid in {*gpus, *here, *events}:
        remembered = gpus.get(uuid, _UNSEEN)
        counted = remembered._replace(errors=_add(remembered.errors, events.get(uuid, ())))
        if uuid in here:
            counted = _settle(counted, uuid, nvml, before.read_at)
        elif inventory.up and not inventory.nameless:
            counted = counted._replace(settled_until=None)  # it is not on the node
        gpus[uuid] = counted
    complete = list_current and inventory.up
    scene = _look(before.scenes, containers, inventory, complete=complete, finished=finished)
    scenes = (*before.scenes, scene)
    credited = _credit(events, nvml.at.monotonic, scenes)
    kept = _keep(before.containers, credited, containers, complete=complete, finished=finished)
    # Lists also an event's GPU that was never listened to by what it now hears: nothing that was told is hidden.
    told = (uuid for uuid in sorted(here) if gpus[uuid].listened or gpus[uuid].errors)
    memory = XidMemory(gpus, kept, _still_needed(scenes, nvml), nvml.at.monotonic)
    return memory, tuple(_gpu_xids(uuid, gpus[uuid]) for uuid in told), tuple(_container_xids(kept))


_UNSEEN = GpuXidMemory({}, 0.0, None, listened=False)


def _by_uuid(events: Iterable[XidError]) -> dict[Uuid, list[XidError]]:
    by_uuid: dict[Uuid, list[XidError]] = {}
    for event in events:
        by_uuid.setdefault(event.uuid, []).append(event)
    return by_uuid


def _add(errors: Mapping[int, int], events: Iterable[XidError]) -> Mapping[int, int]:
    sums = dict(errors)
    for event in events:
        sums[event.code] = sums.get(event.code, 0) + event.times
    return sums


# --- blind time -------------------------------------------------------------------------------------------------------


def _settle(gpu: GpuXidMemory, uuid: Uuid, nvml: Observed[NvmlReading] | Failed, before: float | None) -> GpuXidMemory:
    """Settle what can be: up to where it was listened, or up to now where nobody does.

    While reads fail, only up to the one before: what was heard until then is told by the next that does not.
    """
    at = nvml.at.monotonic
    stretches = _listened(nvml, uuid)
    for since, until in stretches:
        gpu = _blind_until(since, gpu)
        gpu = gpu._replace(listened=True, settled_until=max(until, gpu.settled_until or until))
    if gpu.settled_until is None or at - gpu.settled_until > OPEN_SECONDS:
        return _blind_until(at, gpu)
    if isinstance(nvml, Observed):
        return gpu if stretches else _blind_until(at, gpu)
    return gpu if _may_still_listen(nvml) or before is None else _blind_until(before, gpu)


def _listened(nvml: Observed[NvmlReading] | Failed, uuid: Uuid) -> list[tuple[float, float]]:
    """Since and until when (monotonic) every event of a GPU was told, oldest first."""
    listening = nvml.value.listening if isinstance(nvml, Observed) else ()
    ages = [(one.since_seconds, one.until_seconds) for one in listening if one.uuid == uuid]
    return sorted((nvml.at.monotonic - max(since, 0.0), nvml.at.monotonic - max(until, 0.0)) for since, until in ages)


def _may_still_listen(nvml: Failed) -> bool:
    return nvml.complaints[-1].reason in _MAY_STILL_LISTEN


def _blind_until(moment: float, gpu: GpuXidMemory) -> GpuXidMemory:
    """Settle as blind what is open before this moment."""
    if gpu.settled_until is None:
        return gpu._replace(settled_until=moment)
    more = moment - gpu.settled_until
    if more < JITTER_SECONDS:
        return gpu
    return gpu._replace(blind_seconds=gpu.blind_seconds + more, settled_until=gpu.settled_until + more)


# --- containers -------------------------------------------------------------------------------------------------------


def _look(
    scenes: tuple[Scene, ...],
    containers: tuple[ContainerOnDevice, ...],
    inventory: Inventory,
    *,
    complete: bool,
    finished: float,
) -> Scene:
    """Who is on the devices now; while not all is told, those of the scene before are too."""
    occupants = frozenset(_occupants(containers, inventory))
    if scenes and not complete:
        occupants |= scenes[-1].occupants
    return Scene(finished, occupants)


def _occupants(containers: Iterable[ContainerOnDevice], inventory: Inventory) -> Iterator[Occupant]:
    for row in containers:
        leaf, gpu = inventory.leaves.get(row.uuid), inventory.gpu_of_leaf.get(row.uuid)
        if leaf is not None and gpu is not None:
            yield Occupant(row.name, row.uuid, gpu.uuid, leaf.gpu_instance_id, leaf.compute_instance_id)
        else:  # a partitioned GPU, or one that only the kubelet names
            yield Occupant(row.name, row.uuid, row.uuid, None, None)


def _credit(
    events: Mapping[Uuid, list[XidError]], read_at: float, scenes: tuple[Scene, ...]
) -> dict[tuple[ContainerName, Uuid], list[XidError]]:
    """The events for each container that was on the device at that moment."""
    credited: dict[tuple[ContainerName, Uuid], list[XidError]] = {}
    for event in (event for of_gpu in events.values() for event in of_gpu):
        for one in _scene_at(read_at - event.age_seconds, scenes).occupants:
            if _concerns(event, one):
                credited.setdefault((one.name, one.uuid), []).append(event)
    return credited


def _scene_at(moment: float, scenes: tuple[Scene, ...]) -> Scene:
    """That of the last collection which was finished by then; of those before gpumap's first one, the first."""
    return next((scene for scene in reversed(scenes) if scene.since <= moment), scenes[0])


def _concerns(event: XidError, one: Occupant) -> bool:
    """An event without ids concerns all of the GPU, and a container that has all of it is concerned by each event."""
    if event.uuid != one.gpu:
        return False
    pairs = (
        (event.gpu_instance_id, one.gpu_instance_id),
        (event.compute_instance_id, one.compute_instance_id),
    )
    return all(told is None or own is None or told == own for told, own in pairs)


def _keep(
    before: Mapping[tuple[ContainerName, Uuid], ContainerXidMemory],
    credited: Mapping[tuple[ContainerName, Uuid], list[XidError]],
    containers: tuple[ContainerOnDevice, ...],
    *,
    complete: bool,
    finished: float,
) -> dict[tuple[ContainerName, Uuid], ContainerXidMemory]:
    rows = {(row.name, row.uuid) for row in containers}
    kept: dict[tuple[ContainerName, Uuid], ContainerXidMemory] = {}
    for key in {*before, *credited}:
        remembered = before.get(key, ContainerXidMemory({}, 0.0))
        if key in rows or key in credited or not complete:
            errors = _add(remembered.errors, credited.get(key, ()))
            kept[key] = ContainerXidMemory(errors, finished + KEPT_SECONDS)
        elif remembered.kept_until > finished:
            kept[key] = remembered
    return kept


def _still_needed(scenes: tuple[Scene, ...], nvml: Observed[NvmlReading] | Failed) -> tuple[Scene, ...]:
    """Leave out the scenes that no event can be of any more, and those that are as the one before them."""
    distinct = [one for one, earlier in zip(scenes, (None, *scenes), strict=False) if not _same(one, earlier)]
    if isinstance(nvml, Observed):
        oldest = _scene_at(nvml.at.monotonic - TOLD_LATE_SECONDS, tuple(distinct))
        distinct = distinct[distinct.index(oldest) :]
    return tuple(distinct[-MOST_SCENES:])


def _same(one: Scene, earlier: Scene | None) -> bool:
    return earlier is not None and one.occupants == earlier.occupants


# --- what is told -----------------------------------------------------------------------------------------------------


def _gpu_xids(uuid: Uuid, gpu: GpuXidMemory) -> GpuXids:
    return GpuXids(uuid, tuple(sorted(gpu.errors.items())), gpu.blind_seconds)


def _container_xids(kept: Mapping[tuple[ContainerName, Uuid], ContainerXidMemory]) -> Iterator[ContainerXids]:
    for (name, uuid), remembered in sorted(kept.items()):
        for code, errors in sorted(remembered.errors.items()):
            yield ContainerXids(name, uuid, code, errors)
