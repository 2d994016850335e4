"""Ask a Prometheus how far each counter of gpumap's went in a window, and when the server had no samples of gpumap's.

gpumap asks in parts of a day, and halves a part that is too much for the server. The parts add up to the window.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

from gpumap.cli.args import MATCHER, label_of
from gpumap.cli.bill.counting import Gap, Increases
from gpumap.cli.bill.promql import (
    BEFORE_SECONDS,
    COUNTERS,
    GAP_SECONDS_MIN,
    HELD,
    NOT_MEASURED,
    POD_KEYS,
    PRESENT,
    SM_KNOWN,
    WORK_MEMORY,
    WORK_SM,
    Counter,
    Key,
    Scope,
    gaps_that_end,
    gpumaps_with_samples,
    gpus_with_samples,
    growth,
    mean,
    resumed,
    selector,
    sum_of_steps,
    uncharged,
)
from gpumap.cli.bill.window import Window, rfc3339
from gpumap.cli.sources.prometheus import Prometheus, QueryTooLargeError, Row, together
from gpumap.model.errors import FatalError
from gpumap.model.terms import NUMBER_MAX

T = TypeVar("T")

PART_SECONDS = 86400
_PART_STEPS_MIN = 5


async def increases(server: Prometheus, match: str, window: Window) -> Increases:
    """Ask for everything that a bill needs of gpumap. Raises FatalError, also if the server has no such counters."""
    exported = await server.series(selector(HELD.name, match, 'exported_pod!=""'), window.start, window.end)
    scope = Scope(match, window.step_seconds, bool(exported), target_matchers(match))
    *grown, left_out = await together(
        [
            *(_added(server, counter, growth(counter, scope), window) for counter in COUNTERS),
            _added(server, HELD, uncharged(HELD, scope), window),
        ]
    )
    growths = dict(zip(COUNTERS, grown, strict=True))
    if not any(grown) and not left_out:
        matching = f" that matches {match}" if match else ""
        raise FatalError(
            f"{server.url} has no gpumap accounting series from {rfc3339(window.start)} to {rfc3339(window.end)}"
            f"{matching}. Check that Prometheus scraped gpumap then and that --match selects its series"
        )
    resumed_keys = {_key(HELD, row) for row in await server.instant(resumed(HELD, scope), window.start)}
    resumed_keys &= {key for key, seconds in growths[HELD].items() if seconds}
    _refuse_too_much(server, growths[HELD], resumed_keys, window)
    moments = await _moments(server, gpus_with_samples(scope), window)
    known = moments or growths[NOT_MEASURED]
    gaps = tuple(Gap(rfc3339(start), rfc3339(end)) for start, end in gaps_between(moments, window)) if known else None
    return Increases(growths, sum(left_out.values()), gaps, frozenset(resumed_keys))


async def work_increases(server: Prometheus, match: str, kinds: str, window: Window) -> Increases:
    """Ask for everything that a bill of work outside pods needs. Raises FatalError if the server has no such series.

    Times are in seconds: the mean of each step, times the step.
    """
    scope = Scope(match, window.step_seconds, target_match=target_matchers(match))
    questions = {
        PRESENT: mean(PRESENT, scope, kinds, "count_over_time"),
        WORK_SM: mean(WORK_SM, scope, kinds),
        WORK_MEMORY: mean(WORK_MEMORY, scope, kinds),
        SM_KNOWN: mean(WORK_SM, scope, kinds, "count_over_time"),
    }
    means = await together([_added(server, gauge, question, window) for gauge, question in questions.items()])
    step = window.step_seconds
    growths = {
        gauge: {key: value * step for key, value in of_gauge.items()}
        for gauge, of_gauge in zip(questions, means, strict=True)
    }
    moments = await _moments(server, gpumaps_with_samples(scope), window)
    if not moments:
        matching = f" that match {match}" if match else ""
        raise FatalError(
            f"{server.url} has no gpumap samples in this window{matching}. Check that Prometheus scrapes gpumap and "
            "that --match selects its series"
        )
    of_all = gaps_between(moments, window)
    gaps = [Gap(rfc3339(start), rfc3339(end)) for start, end in of_all]
    return Increases(growths, 0.0, (*gaps, *await _gaps_of_one(server, scope, window, of_all)))


def gaps_between(moments: Collection[int], window: Window) -> tuple[tuple[int, int], ...]:
    """The times between these steps of the window, if they are long enough to mention."""
    step = window.step_seconds
    ends = [window.start, *sorted(moments), window.end + step]
    pairs = ((last_moment, moment - step) for last_moment, moment in itertools.pairwise(ends))
    return tuple((start, end) for start, end in pairs if end - start >= GAP_SECONDS_MIN)


async def _gaps_of_one(
    server: Prometheus, scope: Scope, window: Window, of_all: Collection[tuple[int, int]]
) -> list[Gap]:
    """The times in the window without samples of one gpumap, while the server had samples of others.

    A gap that continues after the window ends at most a day later. A gpumap that never returns was removed.
    """
    step = window.step_seconds
    last_second = min(window.end + BEFORE_SECONDS, int(time.time()) // step * step)
    rows = await _rows_of_steps(server, gaps_that_end(scope), window._replace(end=max(last_second, window.end)))
    gaps = sorted(
        (
            max(int(counter_value(server, snapshot)), window.start),
            min(int(moment) - step, window.end),
            row.labels.get("instance", ""),
        )
        for row in rows
        for moment, snapshot in row.points
    )
    return [
        Gap(rfc3339(start), rfc3339(end), instance)
        for start, end, instance in gaps
        if start < end and not any(first - step <= start and end <= after + step for first, after in of_all)
    ]


async def ask_by_parts(window: Window, longest: int, shortest: int, ask: Callable[[Window], Awaitable[T]]) -> list[T]:
    """Ask about parts of the window, in order, each at most `longest` seconds long. Together they are the window.

    If a part is too much for the server, ask about half of it. Raises QueryTooLargeError if a part of `shortest`
    seconds is too much.
    """
    answers = []
    start, length = window.start, longest // window.step_seconds * window.step_seconds
    while start < window.end:
        piece = window._replace(start=start, end=min(start + length, window.end))
        try:
            answers.append(await ask(piece))
        except QueryTooLargeError:
            seconds = piece.end - piece.start
            if seconds <= shortest:
                raise
            length = max(seconds // 2 // window.step_seconds * window.step_seconds, shortest)
            continue
        start = piece.end
    return answers


async def _added(server: Prometheus, counter: Counter, expression: str, window: Window) -> dict[Key, float]:
    """The sum of an expression over the window's steps, by the counter's key."""

    async def ask(piece: Window) -> list[Row]:
        return await server.instant(sum_of_steps(expression, piece.end - piece.start, piece.step_seconds), piece.end)

    sums: dict[Key, float] = {}
    for row in itertools.chain(*await ask_by_parts(window, PART_SECONDS, _PART_STEPS_MIN * window.step_seconds, ask)):
        key = _key(counter, row)
        sums[key] = sums.get(key, 0.0) + sum(counter_value(server, value) for _, value in row.points)
    return sums


def _key(counter: Counter, row: Row) -> Key:
    return tuple(row.labels.get(name, "") for name in counter.keys)


async def _moments(server: Prometheus, expression: str, window: Window) -> set[int]:
    """The ends of the steps in which an expression has a value."""
    return {int(moment) for row in await _rows_of_steps(server, expression, window) for moment, _ in row.points}


async def _rows_of_steps(server: Prometheus, expression: str, window: Window) -> list[Row]:
    """The values of an expression at the ends of the steps."""
    step = window.step_seconds

    async def ask(piece: Window) -> list[Row]:
        return await server.range(expression, piece.start + step, piece.end, step)

    rows = list(itertools.chain(*await ask_by_parts(window, PART_SECONDS, _PART_STEPS_MIN * step, ask)))
    moments = {moment for row in rows for moment, _ in row.points}
    if any((moment - window.start) % step or not window.start < moment <= window.end for moment in moments):
        raise FatalError(f"{server.url} answered for other times than gpumap asked for")
    return rows


def counter_value(server: Prometheus, text: str) -> float:
    """Return a value that is not negative. Raises FatalError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= NUMBER_MAX:
        raise FatalError(f'{server.url} answered "{text:.40}", which is not a value of a counter')
    return number


def _refuse_too_much(
    server: Prometheus, held_seconds: Mapping[Key, float], resumed: Collection[Key], window: Window
) -> None:
    """Raise FatalError if the containers of a device held more of it than there was: their shares add up to 1.

    The increase of a `resumed` counter contains up to a day before the window.
    """
    of_device: dict[str, float] = {}
    for key, seconds in held_seconds.items():
        of_device[key[-1]] = of_device.get(key[-1], 0.0) + seconds
    longer = {key[-1] for key in resumed}
    for uuid, seconds in of_device.items():
        earlier_seconds = BEFORE_SECONDS if uuid in longer else GAP_SECONDS_MIN
        if seconds > window.end - window.start + earlier_seconds + window.step_seconds:
            raise FatalError(
                f"{server.url} reports that containers held {seconds / 3600:.1f} GPU-hours of {uuid}, which is longer "
                "than the window. Check that one node has one agent, and that the clocks of all scrapers agree"
            )


def target_matchers(match: str) -> str:
    """The matchers without those of containers: a GPU's own series has no label of a pod."""
    matchers = [found_matcher[0] for found_matcher in re.finditer(MATCHER, match)]
    names = [label_of(matcher).removeprefix("exported_") for matcher in matchers]
    return ",".join(matcher for matcher, name in zip(matchers, names, strict=True) if name not in POD_KEYS)
