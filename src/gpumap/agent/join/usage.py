"""What each container uses of each leaf, and each owner of each leaf's memory.

Sums of measured values only. A holder that certainly has no process has 0; where that is not certain, nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.agent.join.attribution import Attributed, OnLeaf
from gpumap.agent.join.ledger import KEPT_SECONDS
from gpumap.agent.join.memory import UseMemory
from gpumap.agent.join.recent_processes import EndedProcess
from gpumap.model.observations import ContainerName, Moment, PodName, PodUid
from gpumap.model.readings import DeviceMemory, ProcessSample
from gpumap.model.snapshot import ContainerUse, Owner, OwnerUse

_ALWAYS = frozenset({Owner.HOST, Owner.UNKNOWN})
_OF_THE_LIST = frozenset({Owner.ASSIGNED})
_ACCUSED = frozenset({Owner.UNASSIGNED, Owner.GONE})


class Measured(NamedTuple):
    """What one collection measured of a container on a leaf. `times` is `None` where they cannot be told."""

    memory_bytes: int | None
    processes: int
    times: _Times | None
    unassigned: bool


def _ratio(total: float) -> float:
    return min(max(total, 0.0), 1.0)


class _Times(NamedTuple):
    """Ratios 0-1 of the interval. `sm_sum` is not cut off at 1, as the sum over a GPU's processes may exceed it."""

    sm: float
    memory_controller: float
    encoder: float
    decoder: float
    sm_sum: float


_NO_TIME = ProcessSample(0, 0.0, 0.0, 0.0, 0.0)


class _Left(NamedTuple):
    """The pod that an ended process was in, and its time; `None` where another process may have part in it."""

    pod_uid: PodUid | None
    time: ProcessSample | None

    def of(self, uid: PodUid | None) -> ProcessSample | None:
        """What of it is a pod's of the same name: all or nothing, or nobody knows."""
        if uid is None:
            return None
        return self.time if uid == self.pod_uid else _NO_TIME


@dataclass(frozen=True, slots=True)
class LeafUse:
    """All that was measured on one leaf. `times`, by PID, is each process's time in this interval: `None` where nobody
    can tell it."""

    on_leaf: OnLeaf
    times: Mapping[int, ProcessSample | None]
    left: Mapping[ContainerName, list[_Left]]
    """Time of processes that have ended, by the container that they were in."""
    times_told: bool

    def by_container(
        self, idle: Iterable[ContainerName], uid_of: Mapping[PodName, PodUid]
    ) -> dict[ContainerName, Measured]:
        """Sum up by container; `idle` are the holders whose zeros stand."""
        of_container: dict[ContainerName, tuple[Attributed, ...]] = dict.fromkeys(idle, ())
        of_container.update(self.on_leaf.by_container)
        measured = {}
        for name, items in of_container.items():
            uid = items[0].pod_uid if items else uid_of.get(name.pod_name)
            measured[name] = self._measured(items, [one.of(uid) for one in self.left.get(name, ())])
        return measured

    def _measured(self, items: tuple[Attributed, ...], left: Iterable[ProcessSample | None]) -> Measured:
        memories = [item.process.used_memory_bytes for item in items]
        known = [memory for memory in memories if memory is not None]
        return Measured(
            memory_bytes=sum(known) if len(known) == len(memories) else None,
            processes=len(items),
            times=self._times(items, left),
            unassigned=any(item.owner is Owner.UNASSIGNED for item in items),
        )

    def _times(self, items: tuple[Attributed, ...], left: Iterable[ProcessSample | None]) -> _Times | None:
        if not self.times_told:
            return None
        sm = memory_controller = encoder = decoder = 0.0
        for sample in (*[self.times[item.process.pid] for item in items], *left):
            if sample is None:
                return None
            sm += sample.sm_ratio
            memory_controller += sample.memory_controller_ratio
            encoder += sample.encoder_ratio
            decoder += sample.decoder_ratio
        return _Times(_ratio(sm), _ratio(memory_controller), _ratio(encoder), _ratio(decoder), max(sm, 0.0))


def leaf_use(on_leaf: OnLeaf, samples: tuple[ProcessSample, ...] | None, ended: tuple[EndedProcess, ...]) -> LeafUse:
    """Lay samples beside processes; `samples` is `None` where the GPU tells no process's time.

    A process has 0 where the driver saw none of its time, and nothing where it cannot tell. Samples may reach back to
    processes that have `ended`.
    """
    if samples is None:
        return LeafUse(on_leaf, dict.fromkeys((item.process.pid for item in on_leaf.attributed), None), {}, False)
    by_pid = {sample.pid: sample for sample in samples}
    times: dict[int, ProcessSample | None] = {}
    for item in on_leaf.attributed:
        process = item.process
        sample = by_pid.get(process.pid)
        # The driver credits MPS clients' time to their server: no row is no zero.
        times[process.pid] = sample if sample is not None or "M" in process.types else _NO_TIME
    left: dict[ContainerName, list[_Left]] = {}
    of_several = _of_several(on_leaf, ended)
    for one in ended:
        sample = by_pid.get(one.pid)
        if sample is None:
            continue
        if one.pid in of_several:
            sample = times[one.pid] = None  # a row has a PID, and does not say whose it was
        if one.process.container is not None:
            left.setdefault(one.process.container, []).append(_Left(one.process.pod_uid, sample))
    return LeafUse(on_leaf, times, left, True)


def _of_several(on_leaf: OnLeaf, ended: tuple[EndedProcess, ...]) -> frozenset[int]:
    """PIDs that more than one process may have had. One that NVML lists and /proc has not has just ended."""
    if not ended:
        return frozenset()
    had = Counter(one.pid for one in ended)
    had.update(item.process.pid for item in on_leaf.attributed if item.start is not None or item.unresolved)
    return frozenset(pid for pid, processes in had.items() if processes > 1)


def certainly_idle(
    holders: Iterable[ContainerName], attributed: tuple[Attributed, ...], uid_of: Mapping[PodName, PodUid]
) -> Iterator[ContainerName]:
    """Give the holders of a leaf that have no process on it, leaving out those of whom one may be."""
    doubtful = set()
    nameless = set()
    for item in attributed:
        if item.name is None:
            if item.unresolved:
                nameless.add(item.pod_uid)
        elif item.unresolved or (item.measures and not item.name.container):
            doubtful.add(item.name.pod_name)
    for holder in holders:
        pod = holder.pod_name
        uid = uid_of.get(pod)
        if pod in doubtful or None in nameless or (nameless and (uid is None or uid in nameless)):
            continue
        yield holder


class OwnerInputs(NamedTuple):
    """What owners may be told by in this snapshot."""

    visible: bool
    """Processes of other containers can be seen."""
    list_served: bool
    """There is a List young enough to be served."""
    pods_named: bool
    """There is, and UIDs can be named by it."""
    can_report_unassigned: bool
    """Both are of this collection."""


def owner_uses(
    memory: DeviceMemory | None,
    on_leaf: OnLeaf | None,
    siblings: tuple[Attributed, ...],
    grounds: OwnerInputs,
) -> tuple[OwnerUse, ...]:
    """Split a leaf among owners; with `unaccounted` the bytes add up to what the leaf uses (L1).

    `on_leaf` is `None` where the driver lists no processes: then all of it is unaccounted.
    """
    standing: frozenset[Owner] = frozenset()
    if on_leaf is not None:
        standing = _ALWAYS if grounds.visible else frozenset({Owner.UNKNOWN})
        standing |= _OF_THE_LIST if grounds.visible and grounds.pods_named else frozenset()
        standing |= _ACCUSED if grounds.visible and grounds.can_report_unassigned else frozenset()
    items: dict[Owner, tuple[Attributed, ...]] = dict.fromkeys(standing, ())
    items.update(on_leaf.by_owner if on_leaf is not None else {})
    if siblings:
        items[Owner.SIBLING] = siblings
    uses = [OwnerUse(owner, _told_bytes(of_owner), len(of_owner)) for owner, of_owner in items.items()]
    if memory is not None:
        told = sum(use.memory_bytes or 0 for use in uses)
        uses.append(OwnerUse(Owner.UNACCOUNTED, memory.used_bytes - told, None))
    return tuple(sorted(uses, key=lambda use: use.owner))


def _told_bytes(items: tuple[Attributed, ...]) -> int | None:
    told = [item.process.used_memory_bytes for item in items if item.process.used_memory_bytes is not None]
    return sum(told) if told or not items else None


def remember(
    measured: Measured, before: UseMemory | None, uid: PodUid | None, profile: str, at: Moment
) -> tuple[ContainerUse, UseMemory]:
    """Add what time tells of a use: its peak, and when it was last active. Another pod of the name starts anew, and so
    does another MIG device of the uuid.

    While a pod's UID is not known that its name had before, what is remembered may be another pod's: it waits.
    """
    if before is None or _differ(before.pod_uid, uid) or _differ(before.profile, profile):
        before = UseMemory(uid, profile, None, at.wall, at.monotonic)
    elif before.pod_uid and uid is None:
        return _use(measured, None, None), before._replace(kept_until=at.monotonic + KEPT_SECONDS)
    peaks = [value for value in (before.peak_bytes, measured.memory_bytes) if value is not None]
    times = measured.times
    after = UseMemory(
        pod_uid=uid or before.pod_uid,
        profile=profile or before.profile,
        peak_bytes=max(peaks, default=None),
        last_active=at.wall if times and times.sm else before.last_active,
        kept_until=at.monotonic + KEPT_SECONDS,
    )
    return _use(measured, after.peak_bytes, after.last_active), after


def _differ(before: str | None, now: str | None) -> bool:
    return bool(before and now and before != now)


def _use(measured: Measured, peak_bytes: int | None, last_active: float | None) -> ContainerUse:
    times = measured.times
    return ContainerUse(
        memory_bytes=measured.memory_bytes,
        memory_peak_bytes=peak_bytes if measured.memory_bytes is not None else None,
        processes=measured.processes,
        sm_ratio=times.sm if times else None,
        memory_controller_ratio=times.memory_controller if times else None,
        encoder_ratio=times.encoder if times else None,
        decoder_ratio=times.decoder if times else None,
        unassigned=measured.unassigned,
        last_active=last_active if times else None,
    )
