"""When a server saw nothing at all of gpumap's in a window, by the counters that each GPU has. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpumap.cli.bill.counter_increase import Told
from gpumap.cli.bill.counting import Kind

LEAST_SECONDS = 600
"""What is shorter may be the time from one scrape to the next."""
Hole = tuple[int, int]
"""From when to when; it may be longer, by the steps in which the last sample was and the next is."""


def holes(gaps: Told, end: int) -> list[Hole]:
    """Between which steps of a window, whose last is `end`, no GPU was seen, however shortly."""
    changes = sorted(
        event for events in gaps.events.values() for event in events if event.kind in (Kind.WENT, Kind.CAME)
    )
    seen, since = len(gaps.first), 0
    found = []
    for event in changes:
        if event.kind is Kind.CAME:
            if not seen:
                found.append((since, event.step - event.steps))
            seen += 1
        else:
            seen -= 1
            since = event.step - event.steps
    if not seen:
        found.append((since, end))
    return [(max(first, 0), last) for first, last in found if max(first, 0) < last]


def joined(parts: Iterable[Hole]) -> tuple[Hole, ...]:
    """In Unix seconds: holes that follow each other are one; those that are worth a word."""
    found: list[Hole] = []
    for first, last in parts:
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return tuple((first, last) for first, last in found if last - first >= LEAST_SECONDS)
