"""How much each container uses of each leaf, and how much of a leaf's memory each owner uses.

All numbers are sums of measured values. A holder that certainly has no process uses 0. If that is uncertain, its use is
absent.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpumap.agent.join.attribution import Attributed, ContainerProcesses, LeafProcesses, User
from gpumap.model.grouping import all_known, grouped, sum_all
from gpumap.model.node import OTHER, HostUse, OwnerUse, Use, Workload
from gpumap.model.readings import Activity, DeviceMemory, GpuReading, Uuid
from gpumap.model.terms import ContainerName, Owner, PodName, PodUid

ACTIVE_RATIO, RESTING_RATIO = 0.01, 0.001
"""GPM's activity from which on a device works, and below which it rests: an idle CUDA context does not read exactly 0.
Between the two, nothing is known."""


class Sign(enum.Enum):
    """A sign of a pod's own work in one collection."""

    NONE = enum.auto()
    CERTAIN = enum.auto()
    """It worked. Or a process of it has a new row of 0 %, and the GPU's utilization is not 0, or the process ended."""
    ROWS = enum.auto()
    """Only new rows of 0 %, while the GPU's utilization is 0."""
    WORTHLESS_ROWS = enum.auto()
    """Only rows that the driver writes for idle contexts. They never were a sign."""


class PodWork(NamedTuple):
    """What one collection shows of a pod's work on a leaf."""

    worked: bool | None
    """Whether it worked since the collection before, on any engine. `None`: it may have."""
    sign: Sign
    has_process: bool
    """A process of it is listed, or may be."""
    is_measured: bool
    """The driver can measure its processes."""
    is_timed: bool
    """`worked` is known from the time of processes or from GPM. Otherwise only the process lists show it."""


Ratios = tuple[float, ...]
"""Time of a process on each engine as a ratio of the interval, in the order of `Times`: `ProcessSample.ratios`."""


class Times(NamedTuple):
    """`Ratios` summed over processes: they may exceed 1. `None`: unknown."""

    sm_ratio: float | None = None
    memory_controller_busy_ratio: float | None = None
    encoder_ratio: float | None = None
    decoder_ratio: float | None = None
    jpeg_ratio: float | None = None
    ofa_ratio: float | None = None


UNKNOWN_TIMES = Times()
_NO_PROCESSES = ContainerProcesses((), 0, Owner.ASSIGNED)
_NO_TIME: Ratios = (0.0,) * len(Times._fields)


def ratio_of(time: float | None) -> float | None:
    """Return the time of several processes on an engine as a ratio of the interval, at most 1."""
    return None if time is None else min(time, 1.0)


class LeafActivity(NamedTuple):
    """What GPM measured of a leaf since the last collection, and who used the leaf at both ends of that time.

    GPM measures the device, not its processes. The activity is a container's only if the device had no other process.
    """

    sm_ratio: float | None
    sms_worked: bool
    video_worked: bool
    """Its SMs, or its video engines, worked, as far as no process is known to have done that."""
    users: frozenset[User | None]
    sms_may_have_worked: bool = False
    """Its SMs worked so little that it may be noise, as far as no process is known to have worked."""

    @property
    def is_busy(self) -> bool:
        return self.sms_worked or self.video_worked

    def of(self, name: ContainerName, uid: PodUid | None) -> float | None:
        """Return the SM activity of a container; `None` if it may be another one's. A holder without a process has
        0."""
        if self.users == {(name, uid)}:
            return self.sm_ratio
        if None in self.users or any(user and user[0] == name for user in self.users):
            return None
        return 0.0 if self.users or not self.is_busy else None

    def pod_worked(self, pod: PodName, uid: PodUid | None) -> bool | None:
        """Return whether a pod worked; `None` if another one may have done all of the work, or if it may be noise."""
        if not self.is_busy and not self.sms_may_have_worked:
            return False
        if self.is_only_of(pod, uid):
            return True if self.is_busy else None
        may_use = None in self.users or any(user and user[0].pod_name == pod for user in self.users)
        return None if may_use or not self.users else False

    def is_only_of(self, pod: PodName, uid: PodUid | None) -> bool:
        """Return whether only this pod used the leaf."""
        return bool(self.users) and all(user and (user[0].pod_name, user[1]) == (pod, uid) for user in self.users)


def leaf_activity(activity: Activity | None, users: frozenset[User | None]) -> LeafActivity | None:
    """Return what GPM measured of a leaf; `None` if it reports neither SM nor graphics activity."""
    if activity is None or (activity.sm_ratio is None and activity.graphics_ratio is None):
        return None
    sm_ratio = None if activity.sm_ratio is None else min(activity.sm_ratio, 1.0)
    ratio = max(activity.sm_ratio or 0.0, activity.graphics_ratio or 0.0)
    video_worked = (activity.video_ratio or 0.0) >= ACTIVE_RATIO
    return LeafActivity(
        sm_ratio, ratio >= ACTIVE_RATIO, video_worked, users, sms_may_have_worked=RESTING_RATIO <= ratio < ACTIVE_RATIO
    )


@dataclass(frozen=True, slots=True)
class LeafUse:
    """All measurements on one leaf."""

    processes: LeafProcesses
    times: Mapping[int, Ratios | None]
    """Time of each process in this interval, by PID; `None` if unknown."""
    ended_times: Sequence[tuple[Attributed, Ratios | None]]
    """Ended processes with their time; `None` if some of it may be another process's."""
    has_samples: bool
    """The driver reports the time of processes."""
    partitioned: bool = False
    """It is a MIG device."""
    stray_engines: tuple[bool, ...] = ()
    """For each engine of `Times`: it worked for no known process, but for one that began and ended between two
    collections, or one that the driver does not list. A container without time on it may have caused that. Empty if no
    engine did. All, if the GPU was utilized and no sample shows by which process."""
    has_short_process: bool = False
    """A process that no list had worked."""
    may_work: frozenset[PodName | None] = frozenset()
    """Pods with a process that worked, or may have, and may be of any of their containers. `None`: of any pod."""
    activity: LeafActivity | None = None
    """`None` if GPM does not report it."""
    only_users_worked: bool = False
    """Samples show that no process worked but those of the `activity`'s users, and explain all of that."""
    zero_rows: frozenset[int] = frozenset()
    """PIDs with new rows of 0 % on all engines: they worked too little for a percent, or not at all."""
    unmeasured: frozenset[int] = frozenset()
    """PIDs of processes of which the driver reports no time."""
    is_utilized: bool = False
    """The GPU's utilization is not 0."""
    is_at_rest: bool = False
    """GPM shows that no process worked."""

    @property
    def is_timed(self) -> bool:
        """The driver reports the time of processes, or GPM the activity of the leaf."""
        return self.has_samples or self.activity is not None

    def drop_load(self) -> LeafUse:
        """Return the use of a leaf without processes as if its GPU did not work."""
        return replace(self, stray_engines=(), activity=None, is_utilized=False)

    def container_uses(
        self, idle: Iterable[ContainerName], uid_of: Mapping[PodName, PodUid]
    ) -> Iterator[tuple[ContainerName, Owner, float | None, Use]]:
        """Yield each container with its owner, its SM time, which may exceed 1, and its use without a peak.

        The `idle` holders use 0. `uid_of` has every pod with measured processes.
        """
        of_all = {**dict.fromkeys(idle, _NO_PROCESSES), **self.processes.by_container}
        for name, (items, memory_bytes, owner) in of_all.items():
            uid = uid_of.get(name.pod_name)
            ended = [
                time if uid else None  # without a UID, an ended process may be of another pod of the same name
                for item, time in self.ended_times
                if item.container == name and uid in (None, item.pod_uid)
            ]
            times = self._sum(items, ended)
            use = Use(
                memory_bytes=memory_bytes,
                memory_peak_bytes=None,
                processes=len(items),
                sm_ratio=ratio_of(times.sm_ratio),
                memory_controller_busy_ratio=ratio_of(times.memory_controller_busy_ratio),
                encoder_ratio=ratio_of(times.encoder_ratio),
                decoder_ratio=ratio_of(times.decoder_ratio),
                pod_uid=uid,
                sm_activity_ratio=self._sm_activity(name, uid),
            )
            yield name, owner, times.sm_ratio, use

    def host_uses(self, names: Container[Workload]) -> tuple[HostUse, ...]:
        """Return the sums of each work outside pods. Work that is not in `names` counts as `OTHER`."""
        processes = self.processes.by_owner.get(Owner.HOST, ())
        of_work = grouped((_shown_work(item.workload, names), item) for item in processes)
        ended = grouped(
            (_shown_work(item.workload, names), time) for item, time in self.ended_times if item.owner is Owner.HOST
        )
        uses = []
        for work, items in sorted(of_work.items()):
            times = self._sum(items, ended.get(work, ()))
            uses.append(
                HostUse(
                    work,
                    sum_all(item.process.used_memory_bytes for item in items),
                    len(items),
                    ratio_of(times.sm_ratio),
                )
            )
        return tuple(uses)

    def _sm_activity(self, name: ContainerName, uid: PodUid | None) -> float | None:
        """Return the SM activity of a container. On a GPU, only of its one user: others have SM time."""
        if self.activity is None:
            return None
        if self.partitioned:
            return self.activity.of(name, uid)
        return self.activity.sm_ratio if self.only_users_worked and self.activity.users == {(name, uid)} else None

    def _sum(self, items: Iterable[Attributed], ended: Iterable[Ratios | None]) -> Times:
        """Return the time on each engine. It is unknown if a part of it is, or if a stray process may have worked."""
        samples = all_known([*(self.times[item.process.pid] for item in items), *ended])
        if samples is None or not self.has_samples:
            return UNKNOWN_TIMES
        total = map(sum, zip(_NO_TIME, *samples, strict=True))
        is_stray = self.stray_engines or (False,) * len(_NO_TIME)
        return Times(*(None if stray and not time else time for time, stray in zip(total, is_stray, strict=True)))

    def pod_work(
        self, pod: PodName, uid: PodUid | None, worthless_rows: Container[int], *, is_uncertain: bool
    ) -> PodWork:
        """Return what this collection shows of a pod's work.

        `worthless_rows` are PIDs with rows of 0 % that are no sign. `is_uncertain`: the pod may have a process that
        gpumap cannot resolve.
        """
        items = self.processes.by_pod.get(uid, ()) if uid is not None else ()
        pids = [item.process.pid for item in items]
        ended = [time for item, time in self.ended_times if item.pod_uid == uid] if uid is not None else []
        times = [*(self.times[pid] for pid in pids), *ended]
        by_gpm = self.activity.pod_worked(pod, uid) if self.activity is not None else False
        worked = by_gpm or any(time is not None and any(time) for time in times)
        zero_rows = [pid for pid in pids if pid in self.zero_rows] if self.zero_rows else []
        has_ended_row = any(time is not None and not any(time) for time in ended)
        may_be = bool(self.stray_engines) or not self.may_work.isdisjoint((pod, None))
        if self.has_samples:
            is_unknown = by_gpm is None or may_be or None in times
        else:
            is_unknown = by_gpm is None if self.activity is not None else bool(items) or may_be
        is_unknown = is_unknown or is_uncertain or bool(zero_rows) or has_ended_row
        if worked or has_ended_row or (zero_rows and self.is_utilized):
            sign = Sign.CERTAIN
        elif any(pid not in worthless_rows for pid in zero_rows):
            sign = Sign.ROWS
        else:
            sign = Sign.WORTHLESS_ROWS if zero_rows else Sign.NONE
        is_measured = self.unmeasured.isdisjoint(pids) and not (uid is None and is_uncertain)
        if not is_measured and self.activity is not None:  # GPM measures the leaf: enough if it rests or has one user
            is_measured = self.is_at_rest or self.activity.is_only_of(pod, uid)
        return PodWork(
            worked=True if worked else None if is_unknown else False,
            sign=sign,
            has_process=bool(items) or is_uncertain,
            is_measured=is_measured,
            is_timed=self.is_timed,
        )


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
    is_at_rest = activity is not None and not activity.is_busy
    if reading is None or samples is None:
        unknown = dict.fromkeys((item.process.pid for item in processes.attributed), None)
        if activity is not None:
            works_unseen = activity.is_busy and not activity.users
        else:
            works_unseen = reading is not None and bool(reading.utilization_ratio) and not processes.users
        return LeafUse(
            processes,
            unknown,
            (),
            has_samples=False,
            partitioned=reading is None,
            has_short_process=activity is not None and works_unseen,
            may_work=frozenset((None,)) if works_unseen else frozenset(),
            activity=activity,
            unmeasured=frozenset(unknown),
            is_utilized=reading is not None and bool(reading.utilization_ratio),
            is_at_rest=is_at_rest,
        )
    sampled = {sample.pid: sample.ratios for sample in samples}
    if activity is not None:  # samples show which processes did the work that GPM measured
        video_worked = activity.video_worked and not any(sample.uses_video for sample in samples)
        is_explained = any(map(any, sampled.values()))
        activity = activity._replace(
            sms_worked=activity.sms_worked and not is_explained,
            video_worked=video_worked,
            sms_may_have_worked=activity.sms_may_have_worked and not is_explained,
        )
    by_pid: dict[int, Ratios | None] = {**dict.fromkeys(reading.unsampled), **sampled}
    times: dict[int, Ratios | None] = {}
    for item in processes.attributed:
        process = item.process
        # The driver counts MPS clients' time for their server: a client without a sample may have time.
        times[process.pid] = by_pid.get(process.pid, None if "M" in process.types else _NO_TIME)
    ended_times: list[tuple[Attributed, Ratios | None]] = []
    reused = _reused_pids(processes, ended)
    for entry in ended:
        if entry.pid not in by_pid:
            continue
        sample = by_pid[entry.pid]
        if entry.pid in reused:
            sample = times[entry.pid] = None  # a sample has only a PID, which several processes had
        ended_times.append((entry.process, sample))
    # A listed process that /proc does not have has just ended. Without an earlier list, its container is unknown.
    named = {entry.pid for entry in ended} | {
        item.process.pid for item in processes.attributed if item.start is not None
    }
    unlisted = sampled.keys() - named
    stray_engines = tuple(map(any, zip(*(sampled[pid] for pid in unlisted), strict=True)))
    unresolved = {item.process.pid for item in processes.attributed if item.unresolved}
    works_unseen = bool(reading.utilization_ratio) and not any(sample.sm_ratio for sample in samples)
    of_users = {item.process.pid for item in processes.attributed}
    of_users |= {
        entry.pid for entry in ended if activity and (entry.process.container, entry.process.pod_uid) in activity.users
    }
    has_no_rest = activity is not None and not activity.sms_worked and not works_unseen
    return LeafUse(
        processes,
        times,
        ended_times,
        has_samples=True,
        stray_engines=(True,) * len(Times._fields) if works_unseen else stray_engines if any(stray_engines) else (),
        has_short_process=any(any(sampled[pid]) for pid in unlisted - unresolved),
        may_work=frozenset(_uncertain_pods(processes, ended, by_pid)),
        activity=activity,
        only_users_worked=has_no_rest
        and all(pid in of_users or not _is_busy(sample) for pid, sample in by_pid.items()),
        zero_rows=frozenset(pid for pid, ratios in sampled.items() if not any(ratios)),
        unmeasured=frozenset(
            item.process.pid
            for item in processes.attributed
            if "M" in item.process.types and item.process.pid not in by_pid
        ),
        is_utilized=bool(reading.utilization_ratio),
        is_at_rest=is_at_rest,
    )


def _uncertain_pods(
    processes: LeafProcesses, ended: tuple[EndedProcess, ...], by_pid: Mapping[int, Ratios | None]
) -> Iterator[PodName | None]:
    """Yield the pods of processes of unknown containers that worked, or may have worked. `None`: any pod."""
    for item in processes.attributed:
        if item.unresolved and not item.is_measured and _is_busy(by_pid.get(item.process.pid, _NO_TIME)):
            yield item.name.pod_name if item.name else None
    for entry in ended:
        if (
            entry.process.container is None
            and entry.process.owner is not Owner.HOST
            and _is_busy(by_pid.get(entry.pid, _NO_TIME))
        ):
            yield None


def _is_busy(time: Ratios | None) -> bool:
    """Whether a process worked; also if that is unknown."""
    return time is None or any(time)


def _shown_work(work: Workload | None, names: Container[Workload]) -> Workload:
    return work if work is not None and work in names else OTHER


def _reused_pids(processes: LeafProcesses, ended: tuple[EndedProcess, ...]) -> frozenset[int]:
    """Return the PIDs that more than one process may have had.

    A process that NVML lists and /proc does not have, has just ended.
    """
    if not ended:
        return frozenset()
    counts = Counter(entry.pid for entry in ended)
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
    pods_to_verify: set[PodName] = set()
    unnamed: set[PodUid | None] = set()
    for item in attributed:
        if item.is_measured and item.name is not None and item.name.container:
            continue
        if item.pod_uid is not None:
            present.add(item.pod_uid)
        if item.name is not None and (item.unresolved or item.is_measured):
            pods_to_verify.add(item.name.pod_name)
        elif item.unresolved:
            unnamed.add(item.pod_uid)
    for holder in holders:
        uid = uid_of.get(holder.pod_name)
        may_own_unnamed = unnamed and (holder.pod_name not in certain or None in unnamed)
        if holder.pod_name not in pods_to_verify and uid not in present and not may_own_unnamed:
            yield holder


def owner_uses(
    memory: DeviceMemory | None,
    processes: LeafProcesses | None,
    siblings: tuple[Attributed, ...],
    zero_owners: Iterable[Owner],
) -> tuple[OwnerUse, ...]:
    """Divide a leaf's memory among owners. With `unaccounted` the bytes add up to the used memory of the leaf.

    `processes` is `None` if the driver lists no processes: then all of it is unaccounted. `zero_owners` are 0 if they
    have no process.
    """
    items: dict[Owner, tuple[Attributed, ...]] = {}
    if processes is not None:
        items = {**dict.fromkeys(zero_owners, ()), **processes.by_owner}
    if siblings:
        items[Owner.SIBLING] = siblings
    uses = []
    for owner, of_owner in items.items():
        known = [size for item in of_owner if (size := item.process.used_memory_bytes) is not None]
        uses.append(OwnerUse(owner, sum(known) if known or not of_owner else None, len(of_owner)))
    if memory is not None:
        accounted = sum(use.memory_bytes or 0 for use in uses)
        uses.append(OwnerUse(Owner.UNACCOUNTED, memory.used_bytes - accounted, None))
    return tuple(sorted(uses, key=lambda use: use.owner))


# --- processes that ended recently ------------------------------------------------------------------------------------


SAMPLED_SECONDS = 90.0
"""Longer than any sample is kept: a driver has the last 72, of at most a second each (open-gpu-kernel-modules,
NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL; nvml.h, nvmlUtilization_t)."""


class EndedProcess(NamedTuple):
    """A process that ended. It used no SM time after `ended_by` (monotonic clock)."""

    pid: int
    process: Attributed
    ended_by: float


class RecentProcesses(NamedTuple):
    """The processes of a leaf's last reading, by PID, and those that ended recently: samples may contain them."""

    by_pid: Mapping[int, Attributed]
    users: frozenset[User | None]
    """Of the last reading."""
    ended: tuple[EndedProcess, ...] = ()


def update_recent(
    previous: Mapping[Uuid, RecentProcesses],
    by_leaf: Mapping[Uuid, LeafProcesses],
    known: Container[Uuid],
    timestamp: float,
) -> dict[Uuid, RecentProcesses]:
    """Find the processes that ended since the last collection. A leaf that does not answer keeps its processes."""
    recent = {leaf: recent_processes for leaf, recent_processes in previous.items() if leaf in known}
    recent.update((leaf, _update_leaf(recent.get(leaf), processes, timestamp)) for leaf, processes in by_leaf.items())
    return recent


def _update_leaf(previous: RecentProcesses | None, processes: LeafProcesses, timestamp: float) -> RecentProcesses:
    present = processes.by_pid
    if previous is None:
        return RecentProcesses(present, processes.users)
    if present is previous.by_pid and not previous.ended:
        return previous
    # NVML lists it and /proc does not have it: it may be one of the ended ones, and still compute.
    unseen = {process.pid for process in processes.listed} - present.keys()
    ended = [entry._replace(ended_by=timestamp) if entry.pid in unseen else entry for entry in previous.ended]
    ended += [EndedProcess(pid, process, timestamp) for pid, process in previous.by_pid.items()]
    return RecentProcesses(
        present,
        processes.users,
        tuple(
            entry
            for entry in ended
            if timestamp - entry.ended_by < SAMPLED_SECONDS
            if (same_pid := present.get(entry.pid)) is None or same_pid.start != entry.process.start
        ),
    )
