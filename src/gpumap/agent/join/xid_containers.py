"""Which containers were on which GPU at the moment of an XID error. The error is counted for them.

The driver may report an event late, and an outage of the kubelet or of NVML hides which containers are gone. gpumap
therefore remembers for a while which containers were present.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpumap.agent.join.accounting import Key
from gpumap.agent.join.inventory import Inventory
from gpumap.model.grouping import grouped
from gpumap.model.node import ContainerOnDevice
from gpumap.model.readings import Uuid, XidError
from gpumap.model.terms import ContainerName

CARRIED_SECONDS = 60.0
"""During an outage, a container is taken as present for so long. A restart of the kubelet then loses no event, and a
long outage does not count an event for every container that was ever present."""
REPORTED_LATE_SECONDS = 5.0
"""Longer than an event waits in a listener that does not hang."""
HISTORY_MAX = 64


class DeviceContainer(NamedTuple):
    """A container that holds or uses a device, and its part of the GPU; without ids the whole GPU."""

    name: ContainerName
    uuid: Uuid
    gpu: Uuid
    gpu_instance_id: int | None
    compute_instance_id: int | None


class ContainersOnDevices(NamedTuple):
    """The containers on all devices from the end of one collection (`since`, monotonic) to the next change."""

    since: float
    containers: frozenset[DeviceContainer]


LastPresent = Mapping[DeviceContainer, float]
"""When a container was last present (monotonic)."""


def present_containers(
    before: LastPresent,
    containers: Iterable[ContainerOnDevice],
    inventory: Inventory,
    *,
    complete: bool,
    finished: float,
) -> LastPresent:
    """Return the containers on the devices now; during an outage also those that were recently present."""
    present = dict.fromkeys(_device_containers(containers, inventory), finished)
    if not complete:
        present |= {one: at for one, at in before.items() if one not in present and finished - at <= CARRIED_SECONDS}
    return present


def _device_containers(containers: Iterable[ContainerOnDevice], inventory: Inventory) -> Iterator[DeviceContainer]:
    for row in containers:
        leaf, gpu = inventory.leaves.get(row.uuid), inventory.gpu_of_leaf.get(row.uuid)
        if leaf is not None and gpu is not None:
            yield DeviceContainer(row.name, row.uuid, gpu.uuid, leaf.gpu_instance_id, leaf.compute_instance_id)
        else:  # a partitioned GPU, or one that only the kubelet lists
            yield DeviceContainer(row.name, row.uuid, row.uuid, None, None)


def events_by_container(
    events: Mapping[Uuid, Iterable[XidError]], read_at: float, history: tuple[ContainersOnDevices, ...]
) -> dict[Key, list[XidError]]:
    """Return the events of each container that was on the device at that moment, each event once per container."""
    return grouped(
        (key, event)
        for of_gpu in events.values()
        for event in of_gpu
        for key in _affected(event, containers_at(read_at - event.age_seconds, history)).items()
    )


def _affected(event: XidError, on_devices: ContainersOnDevices) -> dict[ContainerName, Uuid]:
    """Return each container that an event affects, and the device under which the event counts for it.

    That is the part of the GPU that the event names, if the container has it; otherwise the GPU.
    """
    found: dict[ContainerName, Uuid] = {}
    for one in sorted(filter(lambda one: _affects(event, one), on_devices.containers), key=_parts_first):
        found.setdefault(one.name, event.uuid if event.gpu_instance_id is None else one.uuid)
    return found


def _affects(event: XidError, one: DeviceContainer) -> bool:
    """An event without ids affects the whole GPU, and every event affects a container that has the whole GPU."""
    if event.uuid != one.gpu:
        return False
    pairs = (
        (event.gpu_instance_id, one.gpu_instance_id),
        (event.compute_instance_id, one.compute_instance_id),
    )
    return all(of_event is None or own is None or of_event == own for of_event, own in pairs)


def _parts_first(one: DeviceContainer) -> tuple[bool, int, int]:
    """Sort by instance ids: an event of several compute instances counts under the first."""
    return one.gpu_instance_id is None, one.gpu_instance_id or 0, one.compute_instance_id or 0


def containers_at(moment: float, history: tuple[ContainersOnDevices, ...]) -> ContainersOnDevices:
    """Return the containers after the last collection before that moment; if there is none, after the first one."""
    return next((one for one in reversed(history) if one.since <= moment), history[0])


def still_needed(history: tuple[ContainersOnDevices, ...], read_at: float | None) -> tuple[ContainersOnDevices, ...]:
    """Drop entries that are too old for any new event, and entries without a change.

    `read_at` is when NVML answered, and reported all events until then; `None` if it did not answer.
    """
    distinct = [one for one, earlier in zip(history, (None, *history), strict=False) if not _same(one, earlier)]
    if read_at is not None:
        oldest = containers_at(read_at - REPORTED_LATE_SECONDS, tuple(distinct))
        distinct = distinct[distinct.index(oldest) :]
    return tuple(distinct[-HISTORY_MAX:])


def _same(one: ContainersOnDevices, earlier: ContainersOnDevices | None) -> bool:
    return earlier is not None and one.containers == earlier.containers
