"""Asks a server for what a bill is made of: each counter's values at the window's ends, and its changes between.

A window is looked at in long steps first, and in short ones where a counter did not just go on. It is asked for in
parts; where a part is too much for the server it is halved. As no step is asked for twice, and none left out, the parts
add up to what the whole would have been.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple, TypeVar

from gpumap.cli.bill.counter_increase import Gain, InconsistentAnswerError, Told, added, gains, overcharged, refined
from gpumap.cli.bill.counting import (
    GAP,
    HELD,
    OF_CONTAINERS,
    OF_GPUS,
    Asked,
    Counter,
    Event,
    Key,
    Kind,
    changes,
    level,
    screen,
    selector,
    went,
)
from gpumap.cli.bill.scrape_gaps import Hole, holes, joined
from gpumap.cli.bill.window import Window
from gpumap.cli.prometheus import Prometheus, QueryTooLargeError, Row, together
from gpumap.model.errors import FatalError

T = TypeVar("T")
COUNTERS = (*OF_CONTAINERS, *OF_GPUS)
PART_SECONDS = 86400
PART_STEPS_MAX = 10_000
"""Servers answer with at most 11 000 steps."""
_PART_STEPS_MIN = 5
BEFORE_SECONDS = 86400
"""How long before the window a counter may have been seen last that comes in it: an outage of the server."""
LONG_SECONDS = 3600
"""The steps in which a window is looked at first. Only where a counter did not just go on are short ones asked for."""
_UUIDS_MAX = 200
"""So many are named in a question; with more of them, all are asked for."""


class Accounts(NamedTuple):
    """How far each counter went, and when nothing was seen; `None` where no GPU's counters say it."""

    gains: dict[Counter, dict[Key, Gain]]
    holes: tuple[Hole, ...] | None


async def account(server: Prometheus, match: str, window: Window) -> Accounts:
    """How far each counter went. Raises FatalError, also where the server has nothing of gpumap's in the window."""
    # Scraped without honorLabels, the labels that gpumap gives are called exported_pod and so on.
    renamed = await server.series(selector(HELD.name, match, 'exported_pod!=""'), window.start, window.end)
    asked = Asked(match, window.step_seconds, exported=bool(renamed))
    steps = LONG_SECONDS // window.step_seconds
    middle = window.end - (window.end - window.start) % (steps * window.step_seconds)
    parts = [(window._replace(end=middle), steps), (window._replace(start=middle), 1)]
    try:
        told = [
            (part, steps, await _told_all(server, asked, part, steps)) for part, steps in parts if part.start < part.end
        ]
        found = [_believed(server, one, part, steps) for part, steps, one in told]
    except InconsistentAnswerError:
        raise FatalError(
            f"{server.url} gave answers that do not fit together: samples were still coming in, or part of its "
            "storage did not answer; give an earlier --to, or try again"
        ) from None
    if not any(of_key for part in found for of_key in part.values()):
        matching = f" that matches {match}" if match else ""
        raise FatalError(
            f"{server.url} has nothing of gpumap's group accounting in this time{matching}: is gpumap scraped by it, "
            "and does --match fit?"
        )
    if not any(one[GAP].names() for _, _, one in told):
        return Accounts(added(found), None)
    size = window.step_seconds
    unseen = (
        (part.start + first * size, part.start + last * size)
        for part, _, one in told
        for first, last in holes(one[GAP], (part.end - part.start) // size)
    )
    return Accounts(added(found), joined(unseen))


def _believed(
    server: Prometheus, told: Mapping[Counter, Told], part: Window, steps: int
) -> dict[Counter, dict[Key, Gain]]:
    """How far each counter went in a part of the window. Raises FatalError where that is more than time has passed."""
    found = gains(told, part.step_seconds)
    if key := overcharged(told, found, (part.end - part.start) // part.step_seconds, part.step_seconds, steps):
        namespace, pod, container, uuid = key
        raise FatalError(
            f"{server.url} has it that container {container} of pod {namespace}/{pod} held {uuid} for longer than this "
            "time: do two agents serve one node, or do the clocks of those who scrape it differ?"
        )
    return found


async def _told_all(server: Prometheus, asked: Asked, window: Window, steps: int) -> dict[Counter, Told]:
    """Each counter's ends and events in a window whose length is whole steps, each so many short ones long.

    Two series of one counter, before a restart and after, are one in a long step: where there was one, its short ones
    are asked for, and those of the next long step, which begins with what the short ones end with.
    """
    told = await together([_told(server, counter, asked, window, steps) for counter in COUNTERS])
    end = (window.end - window.start) // window.step_seconds
    looked_into: dict[int, set[str]] = {}
    for one in told if steps > 1 else ():
        for key, event in _unsteady(one):
            for number in {event.step, min(event.step + steps, end)}:
                looked_into.setdefault(number, set()).add(key[-1])
    refinements = [
        _refined(server, asked, window, steps, looked_into, one, to) for one, to in zip(COUNTERS, told, strict=True)
    ]
    return dict(zip(COUNTERS, await together(refinements), strict=True))


def _unsteady(told: Told) -> Iterator[tuple[Key, Event]]:
    """The events of long steps whose short ones must be looked at. What comes again may have begun anew while it was
    away, and have overtaken its old value within the step: only a short one tells."""
    for key, events in told.events.items():
        seen = key in told.first or key in told.before
        for event in events:
            again = event.kind is Kind.CAME and seen
            seen = seen or event.kind in (Kind.CAME, Kind.WENT)
            if again or event.kind in (Kind.FELL, Kind.UNSURE):
                yield key, event


async def _refined(
    server: Prometheus,
    asked: Asked,
    window: Window,
    steps: int,
    looked_into: Mapping[int, Collection[str]],
    counter: Counter,
    told: Told,
) -> Told:
    """What was told, with the short steps of the long ones that are to be looked into."""
    long = {key: [event for event in events if event.step > 0] for key, events in told.events.items()}
    if not looked_into:
        return replace(told, events={key: tuple(events) for key, events in long.items()})
    short = await _inside(server, counter, asked, window, steps, looked_into)
    end = (window.end - window.start) // window.step_seconds
    events: dict[Key, tuple[Event, ...]] = {}
    before = dict(told.before)
    for key in {*told.events, *short}:
        inside = {number: list[Event]() for number, uuids in looked_into.items() if key[-1] in uuids}
        inside |= short.get(key, {})
        if gone := [event for event in inside.get(0, ()) if event.kind is Kind.WENT]:
            before[key] = max(gone)
        inside |= {0: []} if 0 in inside else {}
        events[key] = tuple(refined(long.get(key, ()), inside, steps, end))
    first = await _exact(server, counter, asked, told.first, looked_into.get(0, ()), window.start)
    last = await _exact(server, counter, asked, told.last, looked_into.get(end, ()), window.end)
    return Told(first, last, before, events)


async def _exact(
    server: Prometheus,
    counter: Counter,
    asked: Asked,
    known: Mapping[Key, Fraction],
    uuids: Collection[str],
    moment: int,
) -> Mapping[Key, Fraction]:
    """The values at a moment; those of these devices as the short step says that ends there."""
    if not uuids:
        return known
    values = _values(server, counter, await server.instant(level(counter, _only(asked, uuids)), moment))
    exact = {key: value for key, value in values.items() if key[-1] in uuids}
    return {key: value for key, value in known.items() if key[-1] not in uuids} | exact


def _only(asked: Asked, uuids: Collection[str]) -> Asked:
    """Ask for these devices alone, if they are not too many to be named."""
    if len(uuids) > _UUIDS_MAX:
        return asked
    named = "|".join(re.escape(uuid) for uuid in sorted(uuids))
    return asked._replace(match=",".join(filter(None, (asked.match, f"uuid=~{json.dumps(named)}"))))


async def _inside(
    server: Prometheus,
    counter: Counter,
    asked: Asked,
    window: Window,
    steps: int,
    looked_into: Mapping[int, Collection[str]],
) -> dict[Key, dict[int, list[Event]]]:
    """The events of the short steps in each of these long ones, for the counters of these devices."""
    found: dict[Key, dict[int, list[Event]]] = {}
    for number, uuids in sorted(looked_into.items()):
        end = window.start + number * window.step_seconds
        hour = window._replace(start=end - steps * window.step_seconds, end=end)
        async for rows in _in_parts(server, changes(counter, _only(asked, uuids)), hour):
            for key, event in _events(server, counter, rows, window, 1):
                if key[-1] in uuids:
                    found.setdefault(key, {}).setdefault(number, []).append(event)
    return found


async def _told(server: Prometheus, counter: Counter, asked: Asked, window: Window, steps: int) -> Told:
    long = asked._replace(step_seconds=steps * window.step_seconds)
    here = level(counter, long)
    question = screen(counter, long, window.step_seconds) if steps > 1 else changes(counter, long)
    first = _values(server, counter, await server.instant(here, window.start))
    last = _values(server, counter, await server.instant(here, window.end))
    events: dict[Key, list[Event]] = {}
    # The long step before the window tells whether what it begins with is one series' value.
    earlier = long.step_seconds if steps > 1 else 0
    async for rows in _in_parts(server, question, Window(window.start - earlier, window.end, long.step_seconds)):
        for key, event in _events(server, counter, rows, window, steps):
            events.setdefault(key, []).append(event)
    came = {key[-1] for key, found in events.items() if any(one.kind is Kind.CAME for one in found)}
    before = await _last_before(server, counter, _only(asked, came), window) if came else {}
    return Told(first, last, before, {key: tuple(sorted(found)) for key, found in events.items()})


async def _last_before(server: Prometheus, counter: Counter, asked: Asked, window: Window) -> Mapping[Key, Event]:
    """When and with what value each key had last gone that went in the day before the window."""
    step = window.step_seconds
    earlier = Window(window.start - -(-BEFORE_SECONDS // step) * step, window.start, step)
    found: dict[Key, Event] = {}
    async for rows in _in_parts(server, went(counter, asked), earlier):
        for key, event in _events(server, counter, rows, window, 1, kind=Kind.WENT):
            found[key] = max(event, found.get(key, event))
    return found


async def _in_parts(server: Prometheus, expression: str, window: Window) -> AsyncIterator[list[Row]]:
    """The answers at each step of the window, part by part."""
    step = window.step_seconds
    steps = min(max(PART_SECONDS // step, 1), PART_STEPS_MAX)
    first = window.start + step
    while first <= window.end:
        last = min(first + (steps - 1) * step, window.end)
        try:
            rows = await server.range(expression, first, last, step)
        except QueryTooLargeError:
            if steps <= _PART_STEPS_MIN:
                raise
            steps = max(min(steps, (last - first) // step + 1) // 2, _PART_STEPS_MIN)
            continue
        yield rows
        first = last + step


# --- what was answered ------------------------------------------------------------------------------------------------


def _values(server: Prometheus, counter: Counter, rows: Sequence[Row]) -> dict[Key, Fraction]:
    return {_key(counter, row): _number(server, value) for row in rows for _, value in row.points}


def _events(
    server: Prometheus, counter: Counter, rows: Sequence[Row], window: Window, steps: int, kind: Kind | None = None
) -> list[tuple[Key, Event]]:
    """Events in steps that are so many short ones long."""
    found = []
    for row in rows:
        try:
            named = Kind[row.labels["event"]] if kind is None else kind
        except KeyError:
            raise FatalError(f"{server.url} answered with series that were not asked for") from None
        key = _key(counter, row)
        for moment, value in row.points:
            step, rest = divmod(moment - window.start, window.step_seconds)
            if rest:
                raise FatalError(f"{server.url} answered for other moments than it was asked for")
            found.append((key, Event(int(step), named, _number(server, value), steps)))
    return found


def _key(counter: Counter, row: Row) -> Key:
    return tuple(row.labels.get(name, "") for name in counter.keys)


def _number(server: Prometheus, text: str) -> Fraction:
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise FatalError(f'{server.url} answered "{text:.40}", which is no value of a counter') from None
    if number < 0:
        raise FatalError(f"{server.url} answered {text:.40}, which is no value of a counter")
    return number
