"""What gpumap remembers of a leaf, of each pod on it, and of each container: when it could read the leaf, when the pod
last worked, and the container's peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct, structs

from gpumap.agent.join.settings import CLOCKS_APART_SECONDS, KEPT_SECONDS, JoinSettings
from gpumap.agent.join.usage import LeafUse, PodWork, Sign
from gpumap.agent.judgement.holders import WITHOUT_SIGN
from gpumap.model.node import Watch
from gpumap.model.observations import Moment
from gpumap.model.readings import Uuid
from gpumap.model.terms import ContainerName, PodName, PodUid


class PeakMemory(Struct, frozen=True):
    """The largest memory of a container on a leaf."""

    pod_uid: PodUid | None
    profile: str
    peak_bytes: int | None
    kept_until: float
    """Monotonic time at which gpumap forgets it, if the container is not present again."""


class PodMemory(Struct, frozen=True):
    """What gpumap has seen of a pod on a leaf. It belongs to the pod: the work of an init container counts after it has
    ended."""

    pod_uid: PodUid | None
    """The last one that was known for its name."""
    is_uid_known: bool
    """In the last collection."""
    profile: str
    """Profile of a MIG device, if known. The uuid is made of its GPU and ids, so a new device may have it again."""
    moment: Moment
    """Of the last collection, also of one that did not measure it."""
    kept_until: float
    """Monotonic time at which gpumap forgets it, if the pod is not present again."""
    appeared: bool
    """gpumap watched the leaf in the collection before it first saw the pod there."""
    first_seen: Moment
    watched_since: Moment
    """Since then gpumap has measured it in every collection."""
    last_active: float
    """Unix seconds. When it last worked or may have worked; until then, when gpumap first saw it."""
    last_sign: Moment
    """When gpumap last saw a sign of its own work, or could not measure its processes; until then, `first_seen`."""
    sign_before_rows: Moment
    """The last sign before the current series of collections with only rows of 0 %, if there is one."""
    last_process: Moment
    """When a process of it was last listed, or may have been."""
    unknown_seconds: float = 0.0
    """For how long since `sign_before_rows` it is not known whether it worked."""
    is_known: bool = False
    """Whether the last collection shows if it worked."""
    has_process: bool = False
    """A process of it was listed in the last collection, or may have been."""


class LeafMemory(Struct, frozen=True):
    """In which collections gpumap could read a leaf."""

    moment: Moment
    is_readable: bool
    is_timed: bool = False
    """The driver has reported the time of processes, or the activity of the leaf."""
    gaps: tuple[tuple[float, float], ...] = ()
    """Begin and end of the times when gpumap could not read it, on the clock of `_seconds`."""
    idle_rows: Mapping[int, Moment] = {}
    """PIDs that had a row of 0 % in each collection since then, while the GPU's utilization was 0."""

    def readable_ratio(self, settings: JoinSettings) -> float | None:
        """Return the part of the last time in which gpumap could read the leaf; `None` if it cannot now."""
        if not self.is_readable:
            return None
        return 1.0 - sum(end - begin for begin, end in self.gaps) / (WITHOUT_SIGN * settings.idle_after_seconds)


@dataclass(frozen=True, slots=True)
class History:
    """All that gpumap remembers of use."""

    peaks: Mapping[tuple[ContainerName, Uuid], PeakMemory] = field(default_factory=dict)
    pods: Mapping[tuple[PodName, Uuid], PodMemory] = field(default_factory=dict)
    leaves: Mapping[Uuid, LeafMemory] = field(default_factory=dict)
    pods_at_rest: Mapping[tuple[PodName, Uuid], PodMemory] = field(default_factory=dict)
    """As `pods`, on leaves that are busy without a process: without this load."""


# --- leaves -----------------------------------------------------------------------------------------------------------


def remember_leaf(
    previous: LeafMemory | None, use: LeafUse | None, moment: Moment, settings: JoinSettings
) -> LeafMemory:
    """Note whether gpumap can read a leaf now. `use` is `None` if a source that it needs does not answer.

    A driver that reported the time of processes, and refuses it now, leaves a gap.
    """
    window_seconds = WITHOUT_SIGN * settings.idle_after_seconds
    is_timed = use is not None and use.is_timed
    is_readable = use is not None and (is_timed or previous is None or not previous.is_timed)
    if previous is None:
        return LeafMemory(moment, is_readable, is_timed, (), _idle_rows({}, use, moment))
    gaps = previous.gaps
    if not is_readable or settings.is_gap(previous.moment, moment):
        gap = _seconds(previous.moment), _seconds(moment)
        gaps = (*gaps[:-1], (gaps[-1][0], gap[1])) if gaps and gaps[-1][1] == gap[0] else (*gaps, gap)
    start = _seconds(moment) - window_seconds
    return LeafMemory(
        moment,
        is_readable,
        previous.is_timed or is_timed,
        tuple((max(begin, start), end) for begin, end in gaps if end > start) if gaps else (),
        _idle_rows(previous.idle_rows, use, moment),
    )


def _idle_rows(previous: Mapping[int, Moment], use: LeafUse | None, moment: Moment) -> dict[int, Moment]:
    if use is None or not use.zero_rows or use.is_utilized:
        return {}
    return {pid: previous.get(pid, moment) for pid in use.zero_rows}


def worthless_rows(leaf: LeafMemory, settings: JoinSettings) -> frozenset[int]:
    """Return the PIDs with rows of 0 % that are no sign of work: the driver writes such rows for each idle context."""
    pids = leaf.idle_rows.items()
    return frozenset(pid for pid, since in pids if leaf.moment.since(since) >= settings.idle_after_seconds)


def _seconds(moment: Moment) -> float:
    return moment.monotonic + moment.asleep


# --- pods -------------------------------------------------------------------------------------------------------------


def remember_pod(
    previous: PodMemory | None,
    work: PodWork,
    uid: PodUid | None,
    profile: str,
    leaf_before: LeafMemory | None,
    moment: Moment,
    settings: JoinSettings,
) -> PodMemory:
    """Return what to remember of a pod on a leaf that gpumap can read.

    Another pod of the same name starts without history, and so does another MIG device of the same uuid. While the
    pod's UID is unknown, and it was known before, the pod may be another one: its time without a sign starts again. A
    long time without a collection is time that gpumap did not watch.
    """
    if previous is None or _differ(previous.pod_uid, uid) or _differ(previous.profile, profile):
        appeared = previous is not None or (leaf_before is not None and leaf_before.is_readable)
        previous = PodMemory(
            *(uid, uid is not None, profile, moment, moment.monotonic, appeared),
            *(moment, moment, moment.wall, moment, moment, moment),
        )
    elif settings.is_gap(previous.moment, moment):
        previous = unwatched(previous, moment, keep=True)
    worked = work.worked
    if worked is False and not work.is_timed and previous.has_process:
        worked = None  # the lists do not show what happened between them
    is_certain = work.sign is Sign.CERTAIN or not work.is_measured or (uid is None and previous.is_uid_known)
    last_sign, sign_before_rows = previous.last_sign, previous.sign_before_rows
    unknown_seconds = previous.unknown_seconds
    if is_certain:
        last_sign = sign_before_rows = moment
    elif work.sign is Sign.ROWS:
        last_sign = moment
    elif work.sign is Sign.WORTHLESS_ROWS:
        last_sign = sign_before_rows
    elif last_sign != sign_before_rows:  # rows that ended were signs
        sign_before_rows, unknown_seconds = last_sign, 0.0
    if is_certain:
        unknown_seconds = 0.0
    elif worked is None:
        unknown_seconds += moment.since(previous.moment)
    return PodMemory(
        pod_uid=uid or previous.pod_uid,
        is_uid_known=uid is not None,
        profile=profile or previous.profile,
        moment=moment,
        kept_until=moment.monotonic + KEPT_SECONDS,
        appeared=previous.appeared,
        first_seen=previous.first_seen,
        watched_since=previous.watched_since,
        last_active=moment.wall
        if worked is not False
        else previous.last_active + clock_step_seconds(previous.moment, moment),
        last_sign=last_sign,
        sign_before_rows=sign_before_rows,
        last_process=moment if work.has_process else previous.last_process,
        unknown_seconds=unknown_seconds,
        is_known=worked is not None,
        has_process=work.has_process,
    )


def unwatched(previous: PodMemory, moment: Moment, *, keep: bool) -> PodMemory:
    """Return the history of a pod that this collection did not measure. It may have done anything.

    `keep`: it is present, or may be.
    """
    return structs.replace(
        previous,
        last_active=moment.wall,
        moment=moment,
        kept_until=moment.monotonic + KEPT_SECONDS if keep else previous.kept_until,
        watched_since=moment,
        last_process=moment,
        is_known=False,
        has_process=True,
    )


def watch_of(memory: PodMemory, work: PodWork, *, is_certain: bool) -> Watch:
    """Return what gpumap has seen of a pod on a leaf. `is_certain`: its UID is known, and the pod exists."""
    moment = memory.moment
    return Watch(
        last_active=memory.last_active if memory.is_known else None,
        seen_seconds=moment.since(memory.watched_since),
        known_seconds=moment.since(memory.first_seen),
        worked_seconds_ago=moment.since(memory.last_sign),
        no_process_seconds=moment.since(memory.last_process),
        unknown_seconds=min(memory.unknown_seconds, moment.since(memory.last_sign)),
        appeared=memory.appeared,
        measured=work.is_measured,
        certain_pod=is_certain,
    )


def clock_step_seconds(previous: Moment, moment: Moment) -> float:
    """Return by how much the wall clock was set between two collections."""
    step = moment.wall - previous.wall - moment.since(previous)
    return step if abs(step) > CLOCKS_APART_SECONDS else 0.0


def _differ(previous: str | None, current: str | None) -> bool:
    return bool(previous and current and previous != current)


# --- containers -------------------------------------------------------------------------------------------------------


def remember_peak(
    previous: PeakMemory | None, memory_bytes: int | None, uid: PodUid | None, profile: str, moment: Moment
) -> PeakMemory:
    """Return the largest memory of a container. Another pod of its name starts again."""
    if previous is None or _differ(previous.pod_uid, uid) or _differ(previous.profile, profile):
        previous = PeakMemory(uid, profile, None, 0.0)
    peaks = [peak for peak in (previous.peak_bytes, memory_bytes) if peak is not None]
    return PeakMemory(
        uid or previous.pod_uid, profile or previous.profile, max(peaks, default=None), moment.monotonic + KEPT_SECONDS
    )
