"""What gpumap remembers of a container on a leaf: its peak, when it last worked, since when gpumap has watched it."""

from __future__ import annotations

from msgspec import Struct, structs

from gpumap.agent.join.rules import CLOCKS_APART_SECONDS, KEPT_SECONDS, Rules
from gpumap.agent.join.usage import Measured, ratio_of
from gpumap.model.node import Use
from gpumap.model.observations import Moment
from gpumap.model.terms import PodUid


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
    first_seen: Moment
    worked: Moment
    """When it last certainly worked; until then, `first_seen`."""
    watched_since: Moment
    """Since then gpumap has measured it in every collection."""
    last_process: Moment
    """When it last had a process; until then, `watched_since`."""
    timed: bool = False
    """The driver has reported its time on engines, or the activity of its device."""
    may_have_process: bool = False
    """It had a process in the last collection, or that is unknown."""


def with_history(
    measured: Measured, before: UseMemory | None, profile: str, at: Moment, rules: Rules
) -> tuple[Use, UseMemory]:
    """Add what gpumap remembers of a container to its use, and return what to remember.

    Another pod of the same name starts without history, and so does another MIG device of the same uuid. While the
    pod's UID is unknown, and it was known before, the history may be another pod's: gpumap keeps it and does not show
    it. A long time without a collection is time that gpumap did not watch.
    """
    uid = measured.pod_uid
    if before is None or _differ(before.pod_uid, uid) or _differ(before.profile, profile):
        before = UseMemory(uid, profile, None, at.wall, at, at.monotonic, at, at, at, at)
    elif before.pod_uid and uid is None:
        return _use(measured), unwatched(before, at, keep=True)
    elif rules.is_gap(before.at, at):
        before = unwatched(before, at, keep=True)
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
        first_seen=before.first_seen,
        worked=at if active else before.worked,
        watched_since=before.watched_since,
        last_process=at if measured.processes else before.last_process,
        timed=before.timed or measured.timed,
        may_have_process=measured.processes > 0,
    )
    return _use(measured, after, active), after


def unwatched(before: UseMemory, at: Moment, *, keep: bool) -> UseMemory:
    """Return the history of a container that this collection did not measure. It may have done anything.

    `keep`: it is present, or may be.
    """
    return structs.replace(
        before,
        last_active=at.wall,
        at=at,
        kept_until=at.monotonic + KEPT_SECONDS if keep else before.kept_until,
        watched_since=at,
        last_process=at,
        may_have_process=True,
    )


def _clock_step(before: Moment, at: Moment) -> float:
    """Return by how much the wall clock was set between two collections."""
    step = at.wall - before.wall - at.since(before)
    return step if abs(step) > CLOCKS_APART_SECONDS else 0.0


def _differ(before: str | None, now: str | None) -> bool:
    return bool(before and now and before != now)


def _use(measured: Measured, history: UseMemory | None = None, active: bool | None = None) -> Use:
    """Return the use of a container. Without `history`, only what this collection measured."""
    times = measured.times
    return Use(
        memory_bytes=measured.memory_bytes,
        memory_peak_bytes=history.peak_bytes if history and measured.memory_bytes is not None else None,
        processes=measured.processes,
        sm_ratio=ratio_of(times.sm_ratio),
        memory_controller_busy_ratio=ratio_of(times.memory_controller_busy_ratio),
        encoder_ratio=ratio_of(times.encoder_ratio),
        decoder_ratio=ratio_of(times.decoder_ratio),
        last_active=history.last_active if history and active is not None else None,
        pod_uid=measured.pod_uid,
        seen_seconds=history.at.since(history.watched_since) if history else None,
        known_seconds=history.at.since(history.first_seen) if history else None,
        worked_seconds_ago=history.at.since(history.worked) if history else None,
        no_process_seconds=history.at.since(history.last_process) if history else None,
        sm_activity_ratio=measured.sm_activity_ratio,
    )
