"""XID errors: how many each GPU had, how long nobody listened for them, and which containers were on it at the time.

Every second since a GPU was first seen is settled once: somebody listened, or it is blind time. A second that may
still turn out to have been listened to stays open for a while; what is settled is not taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.ledger import GPUS_AWAY_MAX, KEPT_SECONDS, UNSEEN_SECONDS, Key
from gpumap.agent.join.xid_containers import ContainersOnDevices, Seen, credit, look, still_needed
from gpumap.model.observations import Failed, NvmlReading, Observed
from gpumap.model.readings import Uuid, XidError
from gpumap.model.snapshot import ContainerOnDevice, ContainerXids, GpuXids

OPEN_SECONDS = 60.0
"""How long a second may stay open beyond the time between two reads; longer than a worker that hangs is waited for
(sources/nvml.py)."""
JITTER_SECONDS = 0.001
"""Of one moment that two readings tell, each by its own age: no time between."""
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
    last_code: int | None = None
    """Of the last event."""
    heard_at: Mapping[int, float] = MappingProxyType({})
    """By code, when its last event came, in Unix seconds; not of events that a state file of before has counted."""


class ContainerXidMemory(NamedTuple):
    """Of a container and a device; those without errors are not remembered."""

    errors: Mapping[int, int]
    """Events by XID code."""
    kept_until: float
    """Monotonic: forgotten then, if not seen again."""
    seen_at: float
    """Monotonic: when the container was last seen on the GPU."""


@dataclass(frozen=True, slots=True)
class XidMemory:
    """What is remembered of XID errors from one collection to the next: plain numbers by uuid and name.

    A state file has need of `gpus` and `containers`; the rest is of this process alone.
    """

    gpus: Mapping[Uuid, GpuXidMemory] = field(default_factory=dict)
    containers: Mapping[Key, ContainerXidMemory] = field(default_factory=dict)
    scenes: tuple[ContainersOnDevices, ...] = ()
    """Oldest first; those that an event may still be of."""
    seen: Seen = field(default_factory=dict)
    """Who was on the devices in the collection before, or may still have been."""
    read_at: float | None = None
    """Monotonic: when NVML was read, or not, in the collection before."""
    apart_seconds: float = 0.0
    """How far apart reads are: the last two, or if one fails the farthest since one did not."""


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
    apart = _apart(before, nvml)
    here = {gpu.uuid for gpu in inventory.known}
    gpus: dict[Uuid, GpuXidMemory] = {}
    for uuid in _all(before, {*here, *events}):
        remembered = before.gpus.get(uuid, _UNSEEN)
        heard = events.get(uuid, [])
        counted = remembered._replace(
            errors=_add(remembered.errors, heard),
            last_code=_last_code(heard, remembered.last_code),
            heard_at=_heard_at(heard, remembered.heard_at, nvml.at.wall),
        )
        if uuid in here:
            counted = _settle(counted, uuid, nvml, before.read_at, OPEN_SECONDS + apart)
        elif inventory.up and not inventory.nameless:
            counted = counted._replace(settled_until=None)  # it is not on the node
        gpus[uuid] = counted
    complete = list_current and inventory.up
    seen = look(before.seen, containers, inventory, complete=complete, finished=finished)
    scenes = (*before.scenes, ContainersOnDevices(finished, frozenset(seen)))
    credited = credit(events, nvml.at.monotonic, scenes)
    kept = _keep(before.containers, credited, seen, complete=complete, finished=finished)
    # Lists also an event's GPU that was never listened to by what it now hears: nothing that was told is hidden.
    told = (uuid for uuid in sorted(here) if gpus[uuid].listened or gpus[uuid].errors)
    needed = still_needed(scenes, nvml.at.monotonic if isinstance(nvml, Observed) else None)
    memory = XidMemory(gpus, kept, needed, seen, nvml.at.monotonic, apart)
    return memory, tuple(_gpu_xids(uuid, gpus[uuid]) for uuid in told), tuple(_container_xids(kept))


_UNSEEN = GpuXidMemory({}, 0.0, None, listened=False)


def _all(before: XidMemory, here: set[Uuid]) -> list[Uuid]:
    """Before these the GPUs that are remembered and not here, who left first first; not too many."""
    away = [uuid for uuid in before.gpus if uuid not in here]
    return away[-GPUS_AWAY_MAX:] + sorted(here)


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


def _last_code(heard: list[XidError], before: int | None) -> int | None:
    """Of several at one moment, that which was told last."""
    return min(reversed(heard), key=lambda event: event.age_seconds).code if heard else before


def _heard_at(heard: list[XidError], before: Mapping[int, float], now: float) -> Mapping[int, float]:
    oldest_first = sorted(heard, key=lambda event: -event.age_seconds)
    return {**before, **{event.code: now - event.age_seconds for event in oldest_first}} if heard else before


# --- blind time -------------------------------------------------------------------------------------------------------


def _apart(before: XidMemory, nvml: Observed[NvmlReading] | Failed) -> float:
    since = 0.0 if before.read_at is None else nvml.at.monotonic - before.read_at
    return since if isinstance(nvml, Observed) else max(since, before.apart_seconds)


def _settle(
    gpu: GpuXidMemory,
    uuid: Uuid,
    nvml: Observed[NvmlReading] | Failed,
    before: float | None,
    open_seconds: float,
) -> GpuXidMemory:
    """Settle what can be: up to where it was listened, or up to now where nobody does.

    While reads fail, only up to the one before: what was heard until then is told by the next that does not.
    """
    at = nvml.at.monotonic
    stretches = _listened(nvml, uuid)
    for since, until in stretches:
        gpu = _blind_until(since, gpu)
        gpu = gpu._replace(listened=True, settled_until=max(until, gpu.settled_until or until))
    if gpu.settled_until is None or at - gpu.settled_until > open_seconds:
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


def _keep(
    before: Mapping[Key, ContainerXidMemory],
    credited: Mapping[Key, list[XidError]],
    seen: Seen,
    *,
    complete: bool,
    finished: float,
) -> dict[Key, ContainerXidMemory]:
    """Those who are here, and those who are gone for a while: longer where nobody can tell that they are gone."""
    kept: dict[Key, ContainerXidMemory] = {}
    if not before and not credited:
        return kept
    present = [one for one, at in seen.items() if at == finished]
    here = {(one.name, uuid) for one in present for uuid in (one.uuid, one.gpu)}
    for key in {*before, *credited}:
        one = before.get(key, _NO_ERRORS)
        if key in here or key in credited:
            one = ContainerXidMemory(_add(one.errors, credited.get(key, ())), finished + KEPT_SECONDS, finished)
        elif not complete:
            one = one._replace(kept_until=min(finished + KEPT_SECONDS, one.seen_at + UNSEEN_SECONDS))
        if one.kept_until > finished:
            kept[key] = one
    return kept


_NO_ERRORS = ContainerXidMemory({}, 0.0, 0.0)


# --- what is told -----------------------------------------------------------------------------------------------------


def _gpu_xids(uuid: Uuid, gpu: GpuXidMemory) -> GpuXids:
    return GpuXids(uuid, tuple(sorted(gpu.errors.items())), gpu.blind_seconds, gpu.last_code, _by_code(gpu.heard_at))


def _by_code(moments: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(moments.items()))


def _container_xids(kept: Mapping[Key, ContainerXidMemory]) -> Iterator[ContainerXids]:
    for (name, uuid), remembered in sorted(kept.items()):
        for code, errors in sorted(remembered.errors.items()):
            yield ContainerXids(name, uuid, code, errors)
