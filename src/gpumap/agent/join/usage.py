"""How much each container uses of each leaf, and how much of a leaf's memory each owner uses.

All numbers are sums of measured values. A holder that certainly has no process uses 0. If that is uncertain, its use is
absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
from gpumap.model.readings import DeviceMemory, GpuReading, ProcessSample, Uuid
from gpumap.model.snapshot import ContainerUse, HostUse, Owner, OwnerUse
from gpumap.model.workloads import OTHER, Workload

SAMPLED_SECONDS = 90.0
"""Longer than any sample is kept: a driver has the last 72, of at most a second each (open-gpu-kernel-modules,
NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL; nvml.h, nvmlUtilization_t)."""


class UseMemory(Struct, frozen=True):
    """History of a container on a leaf: its peak memory and its last activity."""

    pod_uid: PodUid | None
    profile: str
    """Profile of a MIG device, if known. The uuid is made of its GPU and ids, so a new device may have it again."""
    peak_bytes: int | None
    last_active: float
    """Unix seconds. When it last computed, was first seen, or its SM time was unknown for long."""
    measured: Moment
    """When its SM time was last known."""
    kept_until: float
    """Monotonic time at which gpumap forgets it, if the container is not present again."""
    first_seen: Moment | None = None
    """`None` if the container was already there at the first reading of the leaf: its start is unknown."""


class Measured(Struct, frozen=True):
    """Measurements of one container on one leaf in one collection. `times` is `None` if SM time is unknown."""

    memory_bytes: int | None
    processes: int
    times: _Times | None
    unassigned: bool
    scheduled: bool
    pod_uid: PodUid | None
    sm_activity_ratio: float | None = None
    """Of a MIG device, which has no `times`."""

    @property
    def busy_ratio(self) -> float | None:
        """Return its SM time, or its SM activity on a MIG device; `None` if unknown. SM time may exceed 1."""
        return self.times.sm_sum if self.times else self.sm_activity_ratio


class _Times(Struct, frozen=True):
    """Ratios 0-1 of the interval. `sm_sum` may exceed 1, as a sum over several processes."""

    sm: float
    memory_controller: float
    encoder: float
    decoder: float
    sm_sum: float


_NO_PROCESSES = ContainerProcesses((), 0, unassigned=False, scheduled=False)
_NO_TIME = ProcessSample(0, 0.0, 0.0, 0.0, 0.0)


class _EndedTime(NamedTuple):
    """The pod of an ended process, and its time; `None` if some of the time may be another process's."""

    pod_uid: PodUid | None
    time: ProcessSample | None

    def for_pod(self, uid: PodUid | None) -> ProcessSample | None:
        """Return the time that belongs to a pod of the same name: all or nothing; `None` if unknown."""
        if uid is None:
            return None
        return self.time if uid == self.pod_uid else _NO_TIME


class MigActivity(NamedTuple):
    """The SM activity of a MIG device since the last collection, and who used the device at both ends of that time.

    GPM measures the device, not its processes. The activity is a container's only if the device had no other process.
    """

    sm_ratio: float
    users: frozenset[User | None]

    def of(self, name: ContainerName, uid: PodUid | None) -> float | None:
        """Return the activity of a container; `None` if it may be another one's. A holder without a process has 0."""
        if self.users == {(name, uid)}:
            return self.sm_ratio
        if None in self.users or any(user and user[0] == name for user in self.users):
            return None
        return 0.0 if self.users or not self.sm_ratio else None


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
    has_stray_time: bool = False
    """SM time was used, but by no listed process: by one that began and ended between two collections, or one that
    the driver does not report. A container without SM time may have caused it."""
    activity: MigActivity | None = None
    """`None` on a GPU that is not partitioned, or if unknown."""
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
            activity = self.activity.of(name, uid) if self.activity else None
            times = self._times(items, ended)
            yield name, Measured(memory_bytes, len(items), times, unassigned, scheduled, uid, activity)

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
            times = self._times(items, ended.get(work, ()))
            uses.append(HostUse(work, memory_of_all(items), len(items), times.sm if times else None))
        return tuple(uses)

    def _times(self, items: Iterable[Attributed], ended: Iterable[ProcessSample | None]) -> _Times | None:
        if not self.has_samples:
            return None
        sm = memory_controller = encoder = decoder = 0.0
        for sample in (*[self.times[item.process.pid] for item in items], *ended):
            if sample is None:
                return None
            sm += sample.sm_ratio
            memory_controller += sample.memory_controller_ratio
            encoder += sample.encoder_ratio
            decoder += sample.decoder_ratio
        if not sm and self.has_stray_time:
            return None
        return _Times(min(sm, 1.0), min(memory_controller, 1.0), min(encoder, 1.0), min(decoder, 1.0), sm)


def measure_leaf(
    processes: LeafProcesses,
    reading: GpuReading | None,
    ended: tuple[EndedProcess, ...],
    activity: MigActivity | None = None,
) -> LeafUse:
    """Combine processes and samples. `reading` is that of the GPU, `None` for a MIG device, which has `activity`.

    A process without a sample has time 0, or no time if the driver cannot know it, or if its samples are impossible.
    Samples may contain the time of processes that have `ended`.
    """
    samples = reading.samples if reading is not None else None
    if reading is None or samples is None:
        unknown = dict.fromkeys((item.process.pid for item in processes.attributed), None)
        return LeafUse(processes, unknown, {}, has_samples=False, activity=activity)
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
    known = {*times, *(one.pid for one in ended)}
    has_stray_time = any(sample.sm_ratio and sample.pid not in known for sample in samples) or bool(
        reading.utilization_ratio and not any(sample.sm_ratio for sample in samples)
    )
    return LeafUse(processes, times, ended_times, True, has_stray_time, ended_work_times=ended_work_times)


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
    measured: Measured,
    before: UseMemory | None,
    profile: str,
    at: Moment,
    stale_after_seconds: float,
    *,
    watched: bool,
) -> tuple[ContainerUse, UseMemory]:
    """Add the peak and the last activity to a use, and return what to remember.

    Another pod of the same name starts without history, and so does another MIG device of the same uuid. While the
    pod's UID is unknown, and it was known before, the history may be another pod's: gpumap keeps it and does not show
    it. `watched`: gpumap has read the leaf in the last minutes, so a container without history is new there.
    """
    uid = measured.pod_uid
    if before is None or _differ(before.pod_uid, uid) or _differ(before.profile, profile):
        before = UseMemory(uid, profile, None, at.wall, at, at.monotonic, at if watched else None)
    elif before.pod_uid and uid is None:
        return _use(measured), structs.replace(before, kept_until=at.monotonic + KEPT_SECONDS)
    peak_bytes, memory_bytes, busy_ratio = before.peak_bytes, measured.memory_bytes, measured.busy_ratio
    if peak_bytes is None or (memory_bytes is not None and memory_bytes > peak_bytes):
        peak_bytes = memory_bytes
    after = UseMemory(
        pod_uid=uid or before.pod_uid,
        profile=profile or before.profile,
        peak_bytes=peak_bytes,
        last_active=before.last_active
        if busy_ratio is None
        else _last_active(busy_ratio, before, at, stale_after_seconds),
        measured=before.measured if busy_ratio is None else at,
        kept_until=at.monotonic + KEPT_SECONDS,
        first_seen=before.first_seen,
    )
    seen_seconds = None if after.first_seen is None else max(elapsed(at) - elapsed(after.first_seen), 0.0)
    return _use(measured, peak_bytes, after.last_active, seen_seconds), after


def _last_active(busy_ratio: float, before: UseMemory, at: Moment, stale_after_seconds: float) -> float:
    """Return when it last used SMs, by the wall clock of now.

    A time with unknown SM use of more than `stale_after_seconds` counts as use.
    """
    unknown_seconds = elapsed(at) - elapsed(before.measured)
    if busy_ratio or unknown_seconds > stale_after_seconds + LATE_SECONDS:
        return at.wall
    clock_step = at.wall - before.measured.wall - unknown_seconds
    return before.last_active + (clock_step if abs(clock_step) > SLEEP_SECONDS else 0.0)


def _differ(before: str | None, now: str | None) -> bool:
    return bool(before and now and before != now)


def _use(
    measured: Measured,
    peak_bytes: int | None = None,
    last_active: float | None = None,
    seen_seconds: float | None = None,
) -> ContainerUse:
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
        last_active=None if measured.busy_ratio is None else last_active,
        pod_uid=measured.pod_uid,
        seen_seconds=seen_seconds,
        sm_activity_ratio=measured.sm_activity_ratio,
        scheduled=measured.scheduled,
    )


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
