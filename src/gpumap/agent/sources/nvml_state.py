"""State of the NVML source between reads: when to replace a worker, which GPUs may crash it, XID events, and clock
changes.

Pure, except for the clocks of `SampleRing`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from gpumap.agent.nvml_worker.wire import ListeningMessage, XidMessage
from gpumap.model.readings import Listening, Uuid, XidError

LONGEST_SECONDS = 600.0
"""Limit of a `ReplacementPolicy`."""
LONGEST_PAUSE_READS = 64
"""Limit of the pause of a GPU that crashes the worker."""
MOST_EVENTS = 1000
"""Above it, equal events are counted together, with the time of the last one."""
MOST_STRETCHES = 4096
"""Above it, the oldest periods are dropped, and their time becomes blind: enough for all GPUs that register so
often."""
RING_SECONDS = 72.0
"""The driver keeps at most 72 samples, and takes at least one a second (kernel,
NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL)."""
SET_BACK_SECONDS = 1.2
"""The two clocks may differ by less than the longest time between two samples (1 s)."""


class ReplacementPolicy:
    """Decides when to replace a worker that hangs, and which GPUs the next one skips. For all workers of one source.

    A process that hangs in the driver may outlive its end. The number of such processes must stay small, so the limit
    doubles. If the driver is to be released between reads, no worker may hang for long. Then the next workers skip the
    GPUs that hung, twice as long each time. All times are of one monotonic clock.
    """

    def __init__(self, seconds: float, *, skips_hung: bool = False) -> None:
        self.skipped: frozenset[int] = frozenset()
        """The GPUs to skip now."""
        self._first = self._seconds = seconds
        self._skips_hung = skips_hung
        self._skip_ends = self._skip_ended = 0.0

    def is_over(self, monotonic: float, unanswered: Mapping[int, float], started: float | None) -> bool:
        """Return whether to end the worker that was started then. `unanswered`: since when GPUs have not answered, by
        index. `monotonic` is the time now."""
        if not unanswered:
            self._seconds = self._first
        if self.skipped and (monotonic >= self._skip_ends or not unanswered):
            self.skipped, self._skip_ended = frozenset(), monotonic
        waiting = [since for index, since in unanswered.items() if index not in self.skipped]
        if started is None or not waiting:
            return False
        limit = self._first if self._skips_hung else self._seconds
        if monotonic - max(started, self._skip_ended, min(waiting)) < limit:
            return False
        if self._skips_hung:
            self.skipped, self._skip_ends = frozenset(unanswered), monotonic + self._seconds
        self._seconds = min(2 * self._seconds, LONGEST_SECONDS)
        return True


@dataclass(slots=True)
class _Suspect:
    """`pause`: number of reads to leave it out after its next crash. `pending`: number of those that still follow."""

    pause: int = 1
    pending: int = 0


class CrashSuspects:
    """Reads GPUs under suspicion after the others, one by one: if the worker crashes again, the last one caused it.

    That GPU is left out for 1, 2, 4, … 64 reads. Each answer halves the pause, and the last one ends it.
    """

    def __init__(self) -> None:
        self._suspects: dict[int, _Suspect] = {}

    def plan(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For one more read: return the GPUs to read last, in this order, and those to leave out."""
        skip = tuple(sorted(index for index, suspect in self._suspects.items() if suspect.pending))
        last_gpus = sorted(index for index, suspect in self._suspects.items() if not suspect.pending)
        for index in skip:
            self._suspects[index].pending -= 1
        return tuple(sorted(last_gpus, key=lambda index: self._suspects[index].pause)), skip

    def answered(self, index: int) -> None:
        suspect = self._suspects.get(index)
        if suspect:
            suspect.pause //= 2
            if not suspect.pause:
                del self._suspects[index]

    def crashed(self, unanswered: Collection[int], last_gpus: Sequence[int]) -> int | None:
        """The worker died in a read: `unanswered` were asked and did not answer, `last_gpus` of them at the end.

        Return the GPU that caused it, if that is clear; it is left out from now on. Otherwise all are suspects.
        """
        together = [index for index in unanswered if index not in last_gpus]
        if len(together) > 1:  # at the same time: it is unknown which of them
            for index in together:
                self._suspects.setdefault(index, _Suspect())
            return None
        crashed = together[0] if together else next((index for index in last_gpus if index in unanswered), None)
        if crashed is not None:
            suspect = self._suspects.setdefault(crashed, _Suspect())
            suspect.pending, suspect.pause = suspect.pause, min(suspect.pause * 2, LONGEST_PAUSE_READS)
        return crashed


class XidEvents:
    """XID events that workers reported since the last reading. Bounded in number."""

    def __init__(self) -> None:
        self._events: list[XidMessage] = []
        self._most_events = MOST_EVENTS
        self._until: dict[tuple[Uuid, float], float] = {}  # by their beginning

    def add(self, message: XidMessage | ListeningMessage) -> None:
        if isinstance(message, XidMessage):
            self._events.append(message)
            if len(self._events) > self._most_events:
                self._events = _together(self._events)
                self._most_events = max(MOST_EVENTS, 2 * len(self._events))
            return
        for uuid, since, until in message.periods:
            self._until[uuid, since] = max(until, self._until.get((uuid, since), since))
        while len(self._until) > MOST_STRETCHES:
            del self._until[next(iter(self._until))]

    def take(self, monotonic: float) -> tuple[tuple[XidError, ...], tuple[Listening, ...]]:
        """Return the events and listening periods until now, and forget them: a worker reports at each read."""
        events = tuple(XidError(*_content(event), monotonic - event.monotonic, event.times) for event in self._events)
        listening = tuple(
            Listening(uuid, monotonic - since, monotonic - until) for (uuid, since), until in self._until.items()
        )
        self._events, self._until, self._most_events = [], {}, MOST_EVENTS
        return events, listening


def _together(events: Iterable[XidMessage]) -> list[XidMessage]:
    by_content: dict[tuple[object, ...], XidMessage] = {}
    for event in events:
        known = by_content.get(_content(event))
        times = event.times + (known.times if known else 0)
        by_content[_content(event)] = structs.replace(event, times=times)
    return list(by_content.values())


def _content(event: XidMessage) -> tuple[Uuid, int, int | None, int | None]:
    return event.uuid, event.code, event.gpu_instance_id, event.compute_instance_id


class SampleRing:
    """The driver's ring buffer of process samples, with time stamps of the wall clock.

    After that clock was set back, samples from before look new. It is here because it must survive the worker.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._wall_ahead = wall_clock() - clock()
        """Minimum, by the monotonic clock."""
        self._drained_at = 0.0

    def is_drained(self) -> bool:
        """Return whether all its samples are from after the last time that the wall clock was set back."""
        earlier, wall, later = self._clock(), self._wall_clock(), self._clock()
        if wall - earlier < self._wall_ahead - SET_BACK_SECONDS:
            self._drained_at = later + RING_SECONDS
        self._wall_ahead = wall - later
        return later >= self._drained_at
