"""How much each container uses of each leaf, and how much of a leaf's memory each owner uses.

All numbers are sums of measured values. A holder that certainly has no process uses 0. If that is uncertain, its use is
absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from msgspec import Struct, structs

from gpumap.agent.join.accounting import KEPT_SECONDS, LATE_SECONDS, SLEEP_SECONDS, elapsed
from gpumap.agent.join.attribution import (
    Attributed,
    ContainerProcesses,
    LastProcess,
    LeafProcesses,
    User,
    memory_of_all,
)
from gpumap.model.observations import ContainerName, Moment, PodName, PodUid
from gpumap.model.readings import Activity, DeviceMemory, GpuReading, ProcessSample, Uuid
from gpumap.model.snapshot import ContainerUse, HostUse, Owner, OwnerUse
from gpumap.model.workloads import OTHER, Workload

SAMPLED_SECONDS = 90.0
"""Longer than any sample is kept: a driver has the last 72, of at most a second each (open-gpu-kernel-modules,
NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL; nvml.h, nvmlUtilization_t)."""


ACTIVE_RATIO = 0.01
"""GPM's activity from which on a device works. An idle CUDA context does not read exactly 0."""


class UseMemory(Struct, frozen=True):
    """History of a container on a leaf, as far as gpumap has watched it."""

    pod_uid: PodUid | None
    profile: str
    """Profile of a MIG device, if known. The uuid is made of its GPU and ids, so a new device may have it again."""
    peak_bytes: int | None
    last_active: float
    """Unix seconds. When it last worked or may have worked; until then, when gpumap first saw it."""
    at: Moment
    """Of the last collection, also of one that did not measure it."""
    kept_until: float
    """Monotonic time at which gpumap forgets it, if the container is not present again."""
    watched_since: Moment
    """Since then gpumap has measured it in every collection."""
    last_process: Moment
    """When it last had a process; until then, `watched_since`."""
    timed: bool = False
    """The driver has reported its time on engines, or the activity of its device."""
    may_have_process: bool = False
    """It had a process in the last collection, or that is unknown."""


class Measured(Struct, frozen=True):
    """Measurements of one container on one leaf in one collection."""

    memory_bytes: int | None
    processes: int
    times: Times
    active: bool | None
    """Whether it worked since the collection before, on any engine. `None`: it may have."""
    timed: bool
    """`active` is known from the time of processes or from GPM. Otherwise only the process lists show it."""
    unassigned: bool
    scheduled: bool
    pod_uid: PodUid | None
    sm_activity_ratio: float | None = None
    """Of a MIG device, which has no `times`."""

    @property
    def busy_ratio(self) -> float | None:
        """Return its SM time, or its SM activity on a MIG device; `None` if unknown. SM time may exceed 1."""
        return self.sm_activity_ratio if self.times.sm is None else self.times.sm


class Times(NamedTuple):
    """Time on each engine as ratios of the interval, summed over processes: they may exceed 1. `None`: unknown."""

    sm: float | None = None
    memory_controller: float | None = None
    encoder: float | None = None
    decoder: float | None = None
    jpeg: float | None = None
    ofa: float | None = None


_NO_PROCESSES = ContainerProcesses((), 0, unassigned=False, scheduled=False)
_NO_TIME = ProcessSample(0, 0.0, 0.0, 0.0, 0.0)
_UNKNOWN_TIMES = Times()
_NO_TIMES = (0.0,) * len(Times._fields)


class _EndedTime(NamedTuple):
    """The pod of an ended process, and its time; `None` if some of the time may be another process's."""

    pod_uid: PodUid | None
    time: ProcessSample | None

    def for_pod(self, uid: PodUid | None) -> ProcessSample | None:
        """Return the time that belongs to a pod of the same name: all or nothing; `None` if unknown."""
        if uid is None:
            return None
        return self.time if uid == self.pod_uid else _NO_TIME


class LeafActivity(NamedTuple):
    """What GPM measured of a leaf since the last collection, and who used the leaf at both ends of that time.

    GPM measures the device, not its processes. The activity is a container's only if the device had no other process.
    """

    sm_ratio: float | None
    is_busy: bool
    """Any of its engines worked."""
    users: frozenset[User | None]

    def of(self, name: ContainerName, uid: PodUid | None) -> float | None:
        """Return the SM activity of a container; `None` if it may be another one's. A holder without a process has
        0."""
        if self.users == {(name, uid)}:
            return self.sm_ratio
        if self._may_use(name):
            return None
        return 0.0 if self.users or not self.is_busy else None

    def is_active(self, name: ContainerName, uid: PodUid | None) -> bool | None:
        """Return whether a container worked; `None` if another one may have done all of the work."""
        if not self.is_busy:
            return False
        if self.users == {(name, uid)}:
            return True
        return None if self._may_use(name) or not self.users else False

    def _may_use(self, name: ContainerName) -> bool:
        return None in self.users or any(user and user[0] == name for user in self.users)


def leaf_activity(activity: Activity | None, users: frozenset[User | None]) -> LeafActivity | None:
    """Return what GPM measured of a leaf; `None` if it reports neither SM nor graphics activity."""
    if activity is None or (activity.sm_ratio is None and activity.graphics_ratio is None):
        return None
    engines = (activity.sm_ratio, activity.graphics_ratio, activity.video_ratio)
    sm_ratio = None if activity.sm_ratio is None else min(activity.sm_ratio, 1.0)
    return LeafActivity(sm_ratio, any((ratio or 0.0) >= ACTIVE_RATIO for ratio in engines), users)


@dataclass(frozen=True, slots=True)
class LeafUse:
    """All measurements on one leaf."""

    processes: LeafProcesses
    times: Mapping[int, ProcessSample | None]
    """Time of each process in this interval, by PID; `None` if unknown."""
    ended_times: Mapping[ContainerName, list[_EndedTime]]
    """Time of ended processes, by their container."""
    has_samples: bool
    """The driver reports the time of processes."""
    partitioned: bool = False
    """It is a MIG device."""
    stray: tuple[bool, ...] = ()
    """For each engine of `Times`: it worked for no known process, but for one that began and ended between two
    collections, or one that the driver does not list. A container without time on it may have caused that. Empty if no
    engine did. All, if the GPU was utilized and no sample shows by which process."""
    has_short_process: bool = False
    """A process that no list had worked."""
    may_work: frozenset[PodName | None] = frozenset()
    """Pods with a process that worked, or may have, and may be of any of their containers. `None`: of any pod."""
    activity: LeafActivity | None = None
    """`None` if GPM does not report it."""
    ended_work_times: Mapping[Workload, list[ProcessSample | None]] = field(default_factory=dict)
    """Time of ended processes outside pods, by their work; `None` if some of it may be another process's."""

    def by_container(
        self, idle: Iterable[ContainerName], uid_of: Mapping[PodName, PodUid]
    ) -> Iterator[tuple[ContainerName, Measured]]:
        """Return the sums of each container; 0 for the `idle` holders.

        `uid_of` has every pod with measured processes.
        """
        of_all = {**dict.fromkeys(idle, _NO_PROCESSES), **self.processes.by_container}
        for name, (items, memory_bytes, unassigned, scheduled) in of_all.items():
            uid = uid_of.get(name.pod_name)
            ended = [one.for_pod(uid) for one in self.ended_times.get(name, ())]
            times, complete = self._sum(items, ended)
            active, timed = self._active(name, uid, times, complete, len(items))
            yield (
                name,
                Measured(
                    memory_bytes,
                    len(items),
                    self._known(times, complete),
                    active,
                    timed,
                    unassigned,
                    scheduled,
                    uid,
                    self.activity.of(name, uid) if self.activity and self.partitioned else None,
                ),
            )

    def by_workload(self, names: Container[Workload]) -> tuple[HostUse, ...]:
        """Return the sums of each work outside pods. Work that is not in `names` counts as `OTHER`."""
        of_work: dict[Workload, list[Attributed]] = {}
        for item in self.processes.by_owner.get(Owner.HOST, ()):
            of_work.setdefault(_named(item.workload, names), []).append(item)
        ended: dict[Workload, list[ProcessSample | None]] = {}
        for work, samples in self.ended_work_times.items():
            ended.setdefault(_named(work, names), []).extend(samples)
        uses = []
        for work, items in sorted(of_work.items()):
            sm = self._known(*self._sum(items, ended.get(work, ()))).sm
            uses.append(HostUse(work, memory_of_all(items), len(items), None if sm is None else min(sm, 1.0)))
        return tuple(uses)

    def _sum(
        self, items: Iterable[Attributed], ended: Iterable[ProcessSample | None]
    ) -> tuple[tuple[float, ...], bool]:
        """Return the known time on each engine, and whether that is all of the time."""
        total, complete = _NO_TIMES, self.has_samples
        for sample in (*[self.times[item.process.pid] for item in items], *ended):
            if sample is None:
                complete = False
            else:
                total = tuple(map(add, total, structs.astuple(sample)[1:]))
        return total, complete

    def _known(self, total: tuple[float, ...], complete: bool) -> Times:
        if not complete:
            return _UNKNOWN_TIMES
        if not self.stray:
            return Times(*total)
        known = (None if not time and is_stray else time for time, is_stray in zip(total, self.stray, strict=True))
        return Times(*known)

    def _active(
        self, name: ContainerName, uid: PodUid | None, total: tuple[float, ...], complete: bool, processes: int
    ) -> tuple[bool | None, bool]:
        """Return whether a container worked, and whether samples or GPM show it."""
        may_be = any(self.stray) or not self.may_work.isdisjoint((name.pod_name, None))
        signs: list[bool | None] = []
        if self.has_samples:
            signs.append(True if any(total) else False if complete and not may_be else None)
        if self.activity is not None:
            signs.append(self.activity.is_active(name, uid))
        if not signs:
            return (None if processes or may_be else False), False
        return (True if True in signs else None if None in signs else False), True


def measure_leaf(
    processes: LeafProcesses,
    reading: GpuReading | None,
    ended: tuple[EndedProcess, ...],
    activity: LeafActivity | None = None,
) -> LeafUse:
    """Combine processes and samples. `reading` is that of the GPU, `None` for a MIG device.

    A process without a sample has time 0, or no time if the driver cannot know it, or if its samples are impossible.
    Samples may contain the time of processes that have `ended`.
    """
    samples = reading.samples if reading is not None else None
    if reading is None or samples is None:
        unknown = dict.fromkeys((item.process.pid for item in processes.attributed), None)
        if activity is not None:
            works_unseen = activity.is_busy and not activity.users
        else:
            works_unseen = reading is not None and bool(reading.utilization_ratio) and not processes.users
        return LeafUse(
            processes,
            unknown,
            {},
            has_samples=False,
            partitioned=reading is None,
            has_short_process=activity is not None and works_unseen,
            may_work=frozenset((None,)) if works_unseen else frozenset(),
            activity=activity,
        )
    by_pid: dict[int, ProcessSample | None] = dict.fromkeys(reading.unsampled)
    by_pid.update((sample.pid, sample) for sample in samples)
    times: dict[int, ProcessSample | None] = {}
    for item in processes.attributed:
        process = item.process
        # The driver counts MPS clients' time for their server: a client without a sample may have time.
        times[process.pid] = by_pid.get(process.pid, None if "M" in process.types else _NO_TIME)
    ended_times: dict[ContainerName, list[_EndedTime]] = {}
    ended_work_times: dict[Workload, list[ProcessSample | None]] = {}
    reused = _reused_pids(processes, ended)
    for one in ended:
        if one.pid not in by_pid:
            continue
        sample = by_pid[one.pid]
        if one.pid in reused:
            sample = times[one.pid] = None  # a sample has only a PID, which several processes had
        if one.process.container is not None:
            ended_times.setdefault(one.process.container, []).append(_EndedTime(one.process.pod_uid, sample))
        elif one.process.workload is not None:
            ended_work_times.setdefault(one.process.workload, []).append(sample)
    # A listed process that /proc does not have has just ended. Without an earlier list, its container is unknown.
    named = {one.pid for one in ended} | {item.process.pid for item in processes.attributed if item.start is not None}
    stray = tuple(map(any, zip(*(structs.astuple(one)[1:] for one in samples if one.pid not in named), strict=True)))
    seen = named | {item.process.pid for item in processes.attributed if item.unresolved}
    works_unseen = bool(reading.utilization_ratio) and not any(sample.sm_ratio for sample in samples)
    return LeafUse(
        processes,
        times,
        ended_times,
        has_samples=True,
        stray=(True,) * len(_NO_TIMES) if works_unseen else stray if any(stray) else (),
        has_short_process=any(one.pid not in seen and _is_busy(one) for one in samples),
        may_work=frozenset(_uncertain_pods(processes, ended, by_pid)),
        activity=activity,
        ended_work_times=ended_work_times,
    )


def _uncertain_pods(
    processes: LeafProcesses, ended: tuple[EndedProcess, ...], by_pid: Mapping[int, ProcessSample | None]
) -> Iterator[PodName | None]:
    """Yield the pods of processes that worked, or may have, and whose container is unknown. `None`: any pod."""
    for item in processes.attributed:
        if item.unresolved and not item.is_measured and _is_busy(by_pid.get(item.process.pid, _NO_TIME)):
            yield item.name.pod_name if item.name else None
    for one in ended:
        if one.process.container is None and one.process.workload is None and _is_busy(by_pid.get(one.pid, _NO_TIME)):
            yield None


def _is_busy(sample: ProcessSample | None) -> bool:
    """Whether a process worked; also if that is unknown."""
    return sample is None or any(structs.astuple(sample)[1:])


def _named(work: Workload | None, names: Container[Workload]) -> Workload:
    return work if work is not None and work in names else OTHER


def _reused_pids(processes: LeafProcesses, ended: tuple[EndedProcess, ...]) -> frozenset[int]:
    """Return the PIDs that more than one process may have had.

    A process that NVML lists and /proc does not have, has just ended.
    """
    if not ended:
        return frozenset()
    counts = Counter(one.pid for one in ended)
    counts.update(item.process.pid for item in processes.attributed if item.start is not None or item.unresolved)
    return frozenset(pid for pid, count in counts.items() if count > 1)


def certainly_idle(
    holders: Iterable[ContainerName],
    attributed: tuple[Attributed, ...],
    uid_of: Mapping[PodName, PodUid],
    certain: Container[PodName],
) -> Iterator[ContainerName]:
    """Return the holders of a leaf that certainly have no process on it.

    `certain` has the pods whose UID is certain: a process of another UID is not theirs, even if nothing names it. A
    process of the holder's own UID leaves no zero, whatever its owner is, unless it is another container's.
    """
    present: set[PodUid] = set()
    uncertain_pods: set[PodName] = set()
    unnamed: set[PodUid | None] = set()
    for item in attributed:
        if item.is_measured and item.name is not None and item.name.container:
            continue
        if item.pod_uid is not None:
            present.add(item.pod_uid)
        if item.name is not None and (item.unresolved or item.is_measured):
            uncertain_pods.add(item.name.pod_name)
        elif item.unresolved:
            unnamed.add(item.pod_uid)
    for holder in holders:
        uid = uid_of.get(holder.pod_name)
        may_own_unnamed = unnamed and (holder.pod_name not in certain or None in unnamed)
        if holder.pod_name not in uncertain_pods and uid not in present and not may_own_unnamed:
            yield holder


class OwnerInputs(NamedTuple):
    """Which inputs of owners this snapshot has."""

    visible: bool
    """gpumap sees the processes of other containers."""
    list_served: bool
    """There is a List that is young enough to serve."""
    pods_named: bool
    """There also is identity, so that UIDs have names."""
    can_report_unassigned: bool
    """List and identity are both of this collection."""


def owner_uses(
    memory: DeviceMemory | None,
    processes: LeafProcesses | None,
    siblings: tuple[Attributed, ...],
    inputs: OwnerInputs,
) -> tuple[OwnerUse, ...]:
    """Divide a leaf's memory among owners. With `unaccounted` the bytes add up to the used memory of the leaf.

    `processes` is `None` if the driver lists no processes: then all of it is unaccounted.
    """
    items: dict[Owner, tuple[Attributed, ...]] = {}
    if processes is not None:
        items = {**dict.fromkeys(_known_owners(inputs), ()), **processes.by_owner}
    if siblings:
        items[Owner.SIBLING] = siblings
    uses = [OwnerUse(owner, _known_bytes(of_owner), len(of_owner)) for owner, of_owner in items.items()]
    if memory is not None:
        accounted = sum(use.memory_bytes or 0 for use in uses)
        uses.append(OwnerUse(Owner.UNACCOUNTED, memory.used_bytes - accounted, None))
    return tuple(sorted(uses, key=lambda use: use.owner))


def _known_owners(inputs: OwnerInputs) -> Iterator[Owner]:
    """Return the owners that are 0 if they have no process."""
    yield Owner.UNKNOWN
    if inputs.visible:
        yield Owner.HOST
        if inputs.pods_named:
            yield Owner.ASSIGNED
        if inputs.can_report_unassigned:
            yield from (Owner.UNASSIGNED, Owner.GONE)


def _known_bytes(items: tuple[Attributed, ...]) -> int | None:
    known = [memory for item in items if (memory := item.process.used_memory_bytes) is not None]
    return sum(known) if known or not items else None


def with_history(
    measured: Measured, before: UseMemory | None, profile: str, at: Moment, stale_after_seconds: float
) -> tuple[ContainerUse, UseMemory]:
    """Add what gpumap remembers of a container to its use, and return what to remember.

    Another pod of the same name starts without history, and so does another MIG device of the same uuid. While the
    pod's UID is unknown, and it was known before, the history may be another pod's: gpumap keeps it and does not show
    it. A long time without a collection is time that gpumap did not watch.
    """
    uid = measured.pod_uid
    if before is None or _differ(before.pod_uid, uid) or _differ(before.profile, profile):
        before = UseMemory(uid, profile, None, at.wall, at, at.monotonic, at, at)
    elif before.pod_uid and uid is None:
        return _use(measured), structs.replace(unwatched(before, at), kept_until=at.monotonic + KEPT_SECONDS)
    elif elapsed(at) - elapsed(before.at) > stale_after_seconds + LATE_SECONDS:
        before = unwatched(before, at)
    peak_bytes, memory_bytes = before.peak_bytes, measured.memory_bytes
    if peak_bytes is None or (memory_bytes is not None and memory_bytes > peak_bytes):
        peak_bytes = memory_bytes
    active = measured.active
    if active is False and not measured.timed and (before.timed or before.may_have_process):
        active = None  # the lists do not show what happened between them
    after = UseMemory(
        pod_uid=uid or before.pod_uid,
        profile=profile or before.profile,
        peak_bytes=peak_bytes,
        last_active=at.wall if active is not False else before.last_active + _clock_step(before.at, at),
        at=at,
        kept_until=at.monotonic + KEPT_SECONDS,
        watched_since=before.watched_since,
        last_process=at if measured.processes else before.last_process,
        timed=before.timed or measured.timed,
        may_have_process=measured.processes > 0,
    )
    return _use(measured, after, active), after


def unwatched(before: UseMemory, at: Moment) -> UseMemory:
    """Return the history of a container that this collection did not measure. It may have done anything."""
    return structs.replace(before, last_active=at.wall, at=at, watched_since=at, last_process=at, may_have_process=True)


def _clock_step(before: Moment, at: Moment) -> float:
    """Return by how much the wall clock was set between two collections."""
    step = at.wall - before.wall - (elapsed(at) - elapsed(before))
    return step if abs(step) > SLEEP_SECONDS else 0.0


def _differ(before: str | None, now: str | None) -> bool:
    return bool(before and now and before != now)


def _use(measured: Measured, history: UseMemory | None = None, active: bool | None = None) -> ContainerUse:
    """Return the use of a container. Without `history`, only what this collection measured."""
    times = measured.times
    use = ContainerUse(
        memory_bytes=measured.memory_bytes,
        memory_peak_bytes=None,
        processes=measured.processes,
        sm_ratio=_ratio(times.sm),
        memory_controller_ratio=_ratio(times.memory_controller),
        encoder_ratio=_ratio(times.encoder),
        decoder_ratio=_ratio(times.decoder),
        unassigned=measured.unassigned,
        last_active=None,
        pod_uid=measured.pod_uid,
        sm_activity_ratio=measured.sm_activity_ratio,
        scheduled=measured.scheduled,
    )
    if history is None:
        return use
    now = elapsed(history.at)
    return structs.replace(
        use,
        memory_peak_bytes=history.peak_bytes if measured.memory_bytes is not None else None,
        last_active=None if active is None else history.last_active,
        seen_seconds=now - elapsed(history.watched_since),
        no_process_seconds=now - elapsed(history.last_process),
    )


def _ratio(time: float | None) -> float | None:
    return None if time is None else min(time, 1.0)


# --- processes that ended lately --------------------------------------------------------------------------------------


class EndedProcess(NamedTuple):
    """A process that ended. It used no SM time after `by` (monotonic clock)."""

    pid: int
    process: LastProcess
    by: float


class RecentProcesses(NamedTuple):
    """The processes of a leaf's last reading, by PID, and those that ended recently: samples may contain them."""

    last: Mapping[int, LastProcess]
    users: frozenset[User | None]
    """Of the last reading."""
    ended: tuple[EndedProcess, ...] = ()


def update_recent(
    before: Mapping[Uuid, RecentProcesses], by_leaf: Mapping[Uuid, LeafProcesses], known: Container[Uuid], at: float
) -> dict[Uuid, RecentProcesses]:
    """Find the processes that ended since the last collection. A leaf that does not answer keeps its processes."""
    recent = {leaf: one for leaf, one in before.items() if leaf in known}
    recent.update((leaf, _update_leaf(recent.get(leaf), processes, at)) for leaf, processes in by_leaf.items())
    return recent


def _update_leaf(before: RecentProcesses | None, processes: LeafProcesses, at: float) -> RecentProcesses:
    present = processes.last
    if before is None:
        return RecentProcesses(present, processes.users)
    if present is before.last and not before.ended:
        return before
    # NVML lists it and /proc does not have it: it may be one of the ended ones, and still compute.
    unseen = {process.pid for process in processes.listed} - present.keys()
    ended = [one._replace(by=at) if one.pid in unseen else one for one in before.ended]
    ended += [EndedProcess(pid, process, at) for pid, process in before.last.items()]
    return RecentProcesses(
        present,
        processes.users,
        tuple(one for one in ended if at - one.by < SAMPLED_SECONDS and not _is_present(one, present)),
    )


def _is_present(one: EndedProcess, present: Mapping[int, LastProcess]) -> bool:
    now = present.get(one.pid)
    return now is not None and now.start == one.process.start
