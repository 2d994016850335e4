"""How far counters went in a window, by the few moments at which a server says that they did not just go on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from gpumap.cli.bill.counting import ABSENT_SECONDS, GAP, HELD, Counter, Event, Key, Kind


class InconsistentAnswerError(Exception):
    """The answers do not fit together: samples came in between the questions."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a server told of a counter, by key: its value at both ends, what it was last before the window, and events
    in their order."""

    first: Mapping[Key, Fraction] = field(default_factory=dict)
    last: Mapping[Key, Fraction] = field(default_factory=dict)
    before: Mapping[Key, Event] = field(default_factory=dict)
    events: Mapping[Key, tuple[Event, ...]] = field(default_factory=dict)

    def names(self) -> Iterable[Key]:
        """All keys that it has anything of."""
        return dict.fromkeys((*self.first, *self.last, *self.events))


class Verdict(NamedTuple):
    """What a container's clocks say of the steps in which its other counters came or fell."""

    doubted: frozenset[int] = frozenset()
    anew: frozenset[int] = frozenset()


class Gain(NamedTuple):
    """How far a counter went. `doubted` is what it had counted when it was first seen, at a time that nobody knows."""

    amount: Fraction
    doubted: Fraction
    verdict: Verdict


def gains(told: Mapping[Counter, Told], step_seconds: int) -> dict[Counter, dict[Key, Gain]]:
    """How far each counter of each key went; a step was so long. Raises InconsistentAnswerError."""
    found: dict[Counter, dict[Key, Gain]] = {counter: {} for counter in told}
    verdicts: dict[Key, Verdict] = {}
    dark = ScrapeGaps(told[GAP])
    for counter in sorted(told, key=lambda one: not one.clock):
        for key in told[counter].names():
            verdict = None if counter.clock else verdicts.get(key)
            run = _Run(counter, told[counter], key, step_seconds, verdict, dark)
            found[counter][key] = gain = run.to_its_end()
            if counter.clock and (gain.amount or gain.doubted):
                known = verdicts.get(key, Verdict())
                verdicts[key] = Verdict(*(one | other for one, other in zip(known, gain.verdict, strict=True)))
    return found


def added(parts: Iterable[Mapping[Counter, Mapping[Key, Gain]]]) -> dict[Counter, dict[Key, Gain]]:
    """What counters went in windows that follow each other."""
    found: dict[Counter, dict[Key, Gain]] = {}
    for part in parts:
        for counter, of_key in part.items():
            known = found.setdefault(counter, {})
            for key, gain in of_key.items():
                old = known.get(key, Gain(Fraction(0), Fraction(0), Verdict()))
                known[key] = Gain(old.amount + gain.amount, old.doubted + gain.doubted, Verdict())
    return found


def overcharged(
    told: Mapping[Counter, Told], found: Mapping[Counter, Mapping[Key, Gain]], end: int, step_seconds: int, long: int
) -> Key | None:
    """A container that held one device for longer than there was time: since the window began, `end` steps ago, and the
    `long` step of which its value there is; or since the container or a GPU was last seen before that."""
    held = told[HELD]
    for key, gain in found.get(HELD, {}).items():
        before = () if key in held.first else (held.before.get(key), *told[GAP].before.values())
        lead = max((2 * event.steps - event.step for event in before if event), default=0)
        if gain.amount > (end + max(lead, long) + 1) * step_seconds + ABSENT_SECONDS:
            return key
    return None


class ScrapeGaps:
    """When which GPU was not seen, by its counter of gaps, which stands while gpumap runs: nobody scraped it then."""

    def __init__(self, gaps: Told) -> None:
        self._of_gpu: dict[str, list[tuple[int, Event]]] = {}
        changes: list[tuple[Event, int]] = []
        for key in gaps.names():
            seen = gaps.before.get(key) if key not in gaps.first else None
            last = seen and seen.step - 2 * seen.steps
            for event in gaps.events.get(key, ()):
                if event.kind is Kind.WENT:
                    last = event.step - 2 * event.steps
                    changes.append((event, -1))
                elif event.kind is Kind.CAME:
                    if last is not None:
                        self._of_gpu.setdefault(key[0], []).append((last, event))
                    changes.append((event, 1))
        earlier = [event.step - 2 * event.steps for event in gaps.before.values()]
        self._of_all = _all_gone(len(gaps.first), sorted(changes), max(earlier, default=None))

    def since(self, uuid: str, event: Event) -> int:
        """The step in which this GPU, or the last GPU of all, was seen before it came again in the event's step; else
        the one before the event's."""
        first = event.step - event.steps
        return min(
            (
                last
                for last, came in (*self._of_gpu.get(uuid, ()), *self._of_all)
                if first < came.step and came.step - came.steps < event.step
            ),
            default=first,
        )


def _all_gone(seen: int, changes: Iterable[tuple[Event, int]], last: int | None) -> list[tuple[int, Event]]:
    """When the last of all GPUs had gone, and the event with which the first came again."""
    found = []
    for event, more in changes:
        if not seen and more > 0 and last is not None:
            found.append((last, event))
        seen += more
        if not seen:
            last = event.step - 2 * event.steps
    return found


def refined(events: Iterable[Event], short: Mapping[int, list[Event]], length: int, end: int) -> Iterator[Event]:
    """The events of long steps; where one was looked into, those of its short steps.

    A long step has `length` of them, and the number of its last; `short` has these by that number. `end` is the number
    of the window's last. Where the next long step was not looked into, what is seen in one is seen at its end.
    """
    long: dict[int, dict[Kind, Event]] = {}
    for event in events:
        long.setdefault(event.step, {})[event.kind] = event
    for step in sorted({*long, *short}):
        of_step, follows = long.get(step, {}), step - length in short
        if step not in short or (Kind.WENT in of_step and not follows):
            yield from (of_step[kind] for kind in (Kind.WENT, Kind.CAME) if kind in of_step)
            continue
        inside = sorted(short[step])
        seen = [event for event in inside if event.kind in (Kind.WENT, Kind.CAME)]
        if seen and seen[0].kind is Kind.CAME and Kind.CAME not in of_step and not follows:
            # It had gone in the long step before. Where it has not fallen since, the difference is counted either way.
            least = next((event for event in inside if event.kind is Kind.LEAST), seen[0])
            yield Event(step, Kind.WENT, of_step.get(Kind.FELL, least).value, length)
        goes_on = step != end and step + length not in short and Kind.WENT not in of_step
        if goes_on and seen and seen[-1].kind is Kind.WENT:
            inside.remove(seen[-1])
        yield from inside


class _Run:
    """A counter on its way through the window. `_begun` is its value where the present run began, `None` where it is
    not seen; `_seen` is then when it went, if it was ever seen."""

    def __init__(
        self, counter: Counter, told: Told, key: Key, step_seconds: int, clocks: Verdict | None, dark: ScrapeGaps
    ) -> None:
        self._counter = counter
        self._told = told
        self._key = key
        self._step_seconds = step_seconds
        self._clocks = clocks
        self._dark = dark
        self._begun = told.first.get(key)
        self._seen = told.before.get(key) if self._begun is None else None
        self._peak: Event | None = None
        self._least: Event | None = None
        self._amount = self._doubted = Fraction(0)
        self._doubts: set[int] = set()
        self._anew: set[int] = set()

    def to_its_end(self) -> Gain:
        for event in self._told.events.get(self._key, ()):
            self._take(event)
        end = self._told.last.get(self._key)
        if (self._begun is None) != (end is None):
            raise InconsistentAnswerError
        if self._begun is not None and end is not None:
            self._amount += end - self._begun
        verdict = Verdict(frozenset(self._doubts), frozenset(self._anew))
        return Gain(max(self._amount, Fraction(0)), self._doubted, verdict)

    def _take(self, event: Event) -> None:
        match event.kind:
            case Kind.WENT:
                if self._begun is None:
                    raise InconsistentAnswerError
                self._amount += event.value - self._begun
                self._begun, self._seen = None, event
            case Kind.LEAST:
                self._least = event
            case Kind.PEAK if self._begun is None:
                self._peak = event  # it comes in the same step
            case Kind.CAME:
                if self._begun is not None:
                    raise InconsistentAnswerError
                self._come(event)
            case Kind.PEAK | Kind.FELL:
                if self._begun is None:
                    raise InconsistentAnswerError
                if self._began_anew(event.step):
                    self._amount += event.value

    def _come(self, event: Event) -> None:
        peak = self._peak
        if peak is not None and peak.step == event.step:
            self._appear(event._replace(value=peak.value))
            self._amount += event.value
            self._anew.add(event.step)
        else:
            self._appear(event)
        self._begun, self._seen = event.value, None

    def _appear(self, event: Event) -> None:
        """Count what it went while it was not seen: since its last value, or since it was born."""
        seen, gone = self._seen, event.value
        if seen is None:
            steps = event.step - self._dark.since(self._key[-1], event)
            seconds = steps * self._step_seconds + ABSENT_SECONDS
        else:
            seconds = (event.step - seen.step + 2 * seen.steps) * self._step_seconds
            least = self._least.value if self._least and self._least.step == event.step else gone
            if gone >= seen.value and (least >= seen.value or self._peak_is_at(event.step)):
                gone -= seen.value
            else:
                self._anew.add(event.step)
        doubted = self._clocks is not None and event.step in self._clocks.doubted
        if doubted or gone > self._counter.most_per_second * seconds:
            self._doubted += gone
            self._doubts.add(event.step)
        else:
            self._amount += gone

    def _peak_is_at(self, step: int) -> bool:
        return self._peak is not None and self._peak.step == step

    def _began_anew(self, step: int) -> bool:
        """Whether a fall is a new beginning. Where the container has clocks, they began anew in the same step, or in
        one beside it in which this did not: else two scrapers of one gpumap, a moment apart, might look like one that
        goes back."""
        if self._clocks is not None and step not in self._clocks.anew:
            beside = self._clocks.anew & {step - 1, step + 1}
            own = {event.step for event in self._told.events[self._key] if event.kind in (Kind.PEAK, Kind.FELL)}
            if not beside - own:
                return False
        self._anew.add(step)
        return True
