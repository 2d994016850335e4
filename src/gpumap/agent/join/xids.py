"""XID errors: how many each GPU had, how long there was no listener, and which containers were on it at the time.

Every second since a GPU's first reading is settled once: either there was a listener, or it is blind time. A second
stays open for a while if a listener may still report it. A settled second never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from gpumap.agent.join.accounting import Key
from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.settings import GPUS_AWAY_MAX, KEPT_SECONDS, UNSEEN_SECONDS
from gpumap.model.grouping import grouped
from gpumap.model.node import ContainerOnDevice, ContainerXids, Gpu, GpuXids
from gpumap.model.observations import Failed, NvmlReading, Observed
from gpumap.model.readings import Uuid, XidError
from gpumap.model.remedies import XIDS
from gpumap.model.terms import ContainerName

OPEN_SECONDS = 60.0
"""How long a second may stay open in addition to the time between two reads. It is longer than gpumap waits for a
worker that hangs (sources/nvml.py)."""
JITTER_SECONDS = 0.001
"""Two readings report the same moment, each as an age: such a difference is not time between them."""
_MAY_STILL_LISTEN = frozenset({"deadline_exceeded"})
"""Reasons for a failed read of NVML during which the worker may still receive events."""


class GpuXidMemory(NamedTuple):
    """XID errors and blind time of one GPU."""

    errors: Mapping[int, int] = MappingProxyType({})
    """Events by XID code."""
    blind_seconds: float = 0.0
    settled_until: float | None = None
    """Monotonic: until then every second had a listener or is in `blind_seconds`. `None`: counting starts at the next
    reading, because the GPU is not on the node."""
    listened: bool = False
    """Whether there was ever a listener for it. A GPU that does not support XID events is not shown."""
    last_code: int | None = None
    """XID code of the last event."""
    last_at: Mapping[int, float] = MappingProxyType({})
    """Time of the last event of each code, in Unix seconds."""
    before_reset: frozenset[int] = frozenset()
    """Codes without an event since the last reset of the GPU or reload of the driver."""
    energy_joules: float | None = None
    """The driver's last count."""
    recovery_action: str | None = None
    """The last one that the driver reported."""


class ContainerXidMemory(NamedTuple):
    """XID errors of one container on one device. There is none without errors."""

    errors: Mapping[int, int] = MappingProxyType({})
    """Events by XID code."""
    kept_until: float = 0.0
    """Monotonic time at which gpumap forgets it, if the container is not present again."""
    seen_at: float = 0.0
    """Monotonic time at which the container was last present on the GPU."""


@dataclass(frozen=True, slots=True)
class XidMemory:
    """What gpumap remembers about XID errors."""

    gpus: Mapping[Uuid, GpuXidMemory] = field(default_factory=dict)
    containers: Mapping[Key, ContainerXidMemory] = field(default_factory=dict)
    history: tuple[ContainersOnDevices, ...] = ()
    """Oldest first, as far back as a new event may be."""
    present: LastPresent = field(default_factory=dict)
    """Containers on the devices in the last collection, with those that may still have been."""
    read_at: float | None = None
    """Monotonic time of the last read of NVML, also if it failed."""
    apart_seconds: float = 0.0
    """Time between the last two reads; during failures, the longest one since the last success."""
    is_driver_unloaded: bool = False
    """A read found no loaded driver, and none has succeeded since."""


def count_xids(
    previous: XidMemory,
    nvml: Observed[NvmlReading] | Failed,
    inventory: Inventory,
    containers: tuple[ContainerOnDevice, ...],
    *,
    list_current: bool,
    finished: float,
) -> tuple[XidMemory, tuple[GpuXids, ...], tuple[ContainerXids, ...]]:
    """Count the events of one collection. `containers` are its rows, and `finished` is its end (monotonic).

    During an outage of the kubelet or NVML, no container is known to be gone.
    """
    events = grouped((event.uuid, event) for event in nvml.value.xids) if isinstance(nvml, Observed) else {}
    apart = 0.0 if previous.read_at is None else nvml.at.monotonic - previous.read_at
    if not isinstance(nvml, Observed):
        apart = max(apart, previous.apart_seconds)
    here = {gpu.uuid for gpu in inventory.known}
    is_reloaded = previous.is_driver_unloaded and inventory.up
    readings = {gpu.uuid: gpu for gpu in inventory.gpus}
    gpus: dict[Uuid, GpuXidMemory] = {}
    present_gpus = {*here, *events}
    away = [uuid for uuid in previous.gpus if uuid not in present_gpus]  # the longest absent first
    for uuid in (*away[-GPUS_AWAY_MAX:], *sorted(present_gpus)):
        counted = _note_reset(previous.gpus.get(uuid, GpuXidMemory()), readings.get(uuid), is_reloaded=is_reloaded)
        counted = _add_events(counted, events.get(uuid, []), nvml.at.wall)
        if uuid in here:
            counted = _settle(counted, uuid, nvml, previous.read_at, OPEN_SECONDS + apart)
        elif inventory.up and not inventory.nameless:
            counted = counted._replace(settled_until=None)  # it is not on the node
        gpus[uuid] = counted
    complete = list_current and inventory.up
    present = present_containers(previous.present, containers, inventory, complete=complete, finished=finished)
    history = (*previous.history, ContainersOnDevices(finished, frozenset(present)))
    new_events = events_by_container(events, nvml.at.monotonic, history)
    kept_errors = _keep(previous.containers, new_events, present, complete=complete, finished=finished)
    # A GPU with an event is shown even if there was never a listener for it: no event is hidden.
    shown_uuids = (uuid for uuid in sorted(here) if gpus[uuid].listened or gpus[uuid].errors)
    needed_history = still_needed(history, nvml.at.monotonic if isinstance(nvml, Observed) else None)
    is_unloaded = isinstance(nvml, Failed) and (
        previous.is_driver_unloaded or nvml.complaints[-1].reason == "driver_not_loaded"
    )
    memory = XidMemory(gpus, kept_errors, needed_history, present, nvml.at.monotonic, apart, is_unloaded)
    return (
        memory,
        tuple(_gpu_xids(uuid, gpus[uuid]) for uuid in shown_uuids),
        tuple(
            ContainerXids(*name, uuid, code, errors)
            for (name, uuid), remembered in sorted(kept_errors.items())
            for code, errors in sorted(remembered.errors.items())
        ),
    )


def _add(errors: Mapping[int, int], events: Iterable[XidError]) -> Mapping[int, int]:
    sums = dict(errors)
    for event in events:
        sums[event.code] = sums.get(event.code, 0) + event.times
    return sums


def _add_events(gpu: GpuXidMemory, events: list[XidError], timestamp: float) -> GpuXidMemory:
    """Add events. Of several at the same moment, the last one in the reading is the last event."""
    if not events:
        return gpu
    oldest_first = sorted(events, key=lambda event: -event.age_seconds)
    return gpu._replace(
        errors=_add(gpu.errors, events),
        last_code=oldest_first[-1].code,
        last_at={**gpu.last_at, **{event.code: timestamp - event.age_seconds for event in oldest_first}},
        before_reset=gpu.before_reset - {event.code for event in events},
    )


def _note_reset(memory: GpuXidMemory, gpu: Gpu | None, *, is_reloaded: bool) -> GpuXidMemory:
    """Note which errors were before a reset or a reload of the driver. An answer of the GPU does not show one."""
    joules = gpu.reading.energy_joules if gpu and gpu.reading else None
    action = gpu.recovery_action if gpu else None
    went_back = joules is not None and memory.energy_joules is not None and joules < memory.energy_joules
    recovered = action == "none" and memory.recovery_action not in (None, "none")
    return memory._replace(
        before_reset=frozenset(memory.errors) if is_reloaded or went_back or recovered else memory.before_reset,
        energy_joules=memory.energy_joules if joules is None else joules,
        recovery_action=action or memory.recovery_action,
    )


# --- blind time -------------------------------------------------------------------------------------------------------


def _settle(
    gpu: GpuXidMemory, uuid: Uuid, nvml: Observed[NvmlReading] | Failed, previous: float | None, open_seconds: float
) -> GpuXidMemory:
    """Settle seconds: up to the end of the last listening period, or up to now if there is no listener.

    While reads fail, only up to the previous read: the next successful read reports the events since then.
    """
    timestamp = nvml.at.monotonic
    listening = nvml.value.listening if isinstance(nvml, Observed) else ()
    ages = [(listener.since_seconds, listener.until_seconds) for listener in listening if listener.uuid == uuid]
    periods = sorted((timestamp - max(since, 0.0), timestamp - max(until, 0.0)) for since, until in ages)
    for since, until in periods:
        gpu = _blind_until(since, gpu)
        gpu = gpu._replace(listened=True, settled_until=max(until, gpu.settled_until or until))
    if gpu.settled_until is None or timestamp - gpu.settled_until > open_seconds:
        return _blind_until(timestamp, gpu)
    if isinstance(nvml, Observed):
        return gpu if periods else _blind_until(timestamp, gpu)
    return gpu if nvml.complaints[-1].reason in _MAY_STILL_LISTEN or previous is None else _blind_until(previous, gpu)


def _blind_until(moment: float, gpu: GpuXidMemory) -> GpuXidMemory:
    """Settle the open seconds before this moment as blind time."""
    if gpu.settled_until is None:
        return gpu._replace(settled_until=moment)
    blind_seconds = moment - gpu.settled_until
    if blind_seconds < JITTER_SECONDS:
        return gpu
    return gpu._replace(
        blind_seconds=gpu.blind_seconds + blind_seconds, settled_until=gpu.settled_until + blind_seconds
    )


# --- containers -------------------------------------------------------------------------------------------------------


def _keep(
    previous: Mapping[Key, ContainerXidMemory],
    new_events: Mapping[Key, list[XidError]],
    present: LastPresent,
    *,
    complete: bool,
    finished: float,
) -> dict[Key, ContainerXidMemory]:
    """Keep present containers, and for a while those that are gone: longer if an outage hides whether they are gone."""
    kept_errors: dict[Key, ContainerXidMemory] = {}
    if not previous and not new_events:
        return kept_errors
    here = {
        (container.name, uuid)
        for container, timestamp in present.items()
        if timestamp == finished
        for uuid in (container.uuid, container.gpu)
    }
    for key in {*previous, *new_events}:
        memory = previous.get(key, ContainerXidMemory())
        if key in here or key in new_events:
            memory = ContainerXidMemory(_add(memory.errors, new_events.get(key, ())), finished + KEPT_SECONDS, finished)
        elif not complete:
            memory = memory._replace(kept_until=min(finished + KEPT_SECONDS, memory.seen_at + UNSEEN_SECONDS))
        if memory.kept_until > finished:
            kept_errors[key] = memory
    return kept_errors


# --- rows of the snapshot ---------------------------------------------------------------------------------------------


def _gpu_xids(uuid: Uuid, gpu: GpuXidMemory) -> GpuXids:
    counts = dict(sorted(gpu.errors.items()))
    meanings = {code: XIDS[code] for code in counts if code in XIDS}
    last_at = dict(sorted(gpu.last_at.items()))
    return GpuXids(uuid, counts, gpu.blind_seconds, gpu.last_code, last_at, meanings, tuple(sorted(gpu.before_reset)))


# --- containers of an error -------------------------------------------------------------------------------------------


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
    previous: LastPresent,
    containers: Iterable[ContainerOnDevice],
    inventory: Inventory,
    *,
    complete: bool,
    finished: float,
) -> LastPresent:
    """Return the containers on the devices now; during an outage also those that were recently present."""
    present = dict.fromkeys(_device_containers(containers, inventory), finished)
    if not complete:
        present |= {
            container: timestamp
            for container, timestamp in previous.items()
            if container not in present and finished - timestamp <= CARRIED_SECONDS
        }
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
    containers: dict[ContainerName, Uuid] = {}
    affected = (container for container in on_devices.containers if _affects(event, container))
    # An event of several compute instances counts under the first. A whole GPU comes last.
    for container in sorted(
        affected, key=lambda container: [(instance_id is None, instance_id or 0) for instance_id in container[3:]]
    ):
        containers.setdefault(container.name, event.uuid if event.gpu_instance_id is None else container.uuid)
    return containers


def _affects(event: XidError, container: DeviceContainer) -> bool:
    """An event without ids affects the whole GPU, and every event affects a container that has the whole GPU."""
    if event.uuid != container.gpu:
        return False
    pairs = zip((event.gpu_instance_id, event.compute_instance_id), container[3:], strict=True)
    return all(of_event is None or own_instance is None or of_event == own_instance for of_event, own_instance in pairs)


def containers_at(moment: float, history: tuple[ContainersOnDevices, ...]) -> ContainersOnDevices:
    """Return the containers after the last collection before that moment; if there is none, after the first one."""
    return next((earlier for earlier in reversed(history) if earlier.since <= moment), history[0])


def still_needed(history: tuple[ContainersOnDevices, ...], read_at: float | None) -> tuple[ContainersOnDevices, ...]:
    """Drop entries that are too old for any new event, and entries without a change.

    `read_at` is when NVML answered, and reported all events until then; `None` if it did not answer.
    """
    distinct = [
        state
        for state, earlier in zip(history, (None, *history), strict=False)
        if earlier is None or state.containers != earlier.containers
    ]
    if read_at is not None:
        oldest = containers_at(read_at - REPORTED_LATE_SECONDS, tuple(distinct))
        distinct = distinct[distinct.index(oldest) :]
    return tuple(distinct[-HISTORY_MAX:])
