"""Ask a Prometheus how far each counter of gpumap's went in a window, and when the server had no samples of gpumap's.

gpumap asks in parts of a day, and halves a part that is too much for the server. The parts add up to the window.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TypeVar

from gpumap.cli.bill.counting import Increases
from gpumap.cli.bill.promql import (
    BEFORE_SECONDS,
    COUNTERS,
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
    gpumaps_with_samples,
    gpus_with_samples,
    growth,
    mean,
    selector,
    sum_of_steps,
    uncharged,
)
from gpumap.cli.bill.window import Window, rfc3339
from gpumap.cli.prometheus import Prometheus, QueryTooLargeError, Row, together
from gpumap.cli.server_flags import MATCHER, label_of
from gpumap.model.errors import FatalError

T = TypeVar("T")

PART_SECONDS = 86400
_PART_STEPS_MIN = 5
GAP_SECONDS_MIN = 600
"""A shorter time without a sample may be the time between two scrapes."""
Gap = tuple[int, int]
"""Unix seconds from which and until which the server has no sample."""


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
    found = dict(zip(COUNTERS, grown, strict=True))
    if not any(grown) and not left_out:
        matching = f" that matches {match}" if match else ""
        raise FatalError(
            f"{server.url} has no gpumap accounting series in this window{matching}. Check that Prometheus scrapes "
            "gpumap and that --match selects its series"
        )
    _refuse_too_much(server, found[HELD], window)
    moments = await _moments(server, gpus_with_samples(scope), window)
    known = moments or found[NOT_MEASURED]
    gaps = tuple((rfc3339(start), rfc3339(end)) for start, end in gaps_between(moments, window)) if known else None
    return Increases(found, sum(left_out.values()), gaps)


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
    found = {
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
    gaps = tuple((rfc3339(start), rfc3339(end)) for start, end in gaps_between(moments, window))
    return Increases(found, 0.0, gaps)


def gaps_between(moments: Collection[int], window: Window) -> tuple[Gap, ...]:
    """The times between these steps of the window, if they are long enough to mention."""
    step = window.step_seconds
    ends = [window.start, *sorted(moments), window.end + step]
    pairs = ((before, after - step) for before, after in itertools.pairwise(ends))
    return tuple((start, end) for start, end in pairs if end - start >= GAP_SECONDS_MIN)


async def in_parts(window: Window, longest: int, shortest: int, ask: Callable[[Window], Awaitable[T]]) -> list[T]:
    """Ask about parts of the window, in order, each at most `longest` seconds long. Together they are the window.

    If a part is too much for the server, ask about half of it. Raises QueryTooLargeError if a part of `shortest`
    seconds is too much.
    """
    answers = []
    start, length = window.start, longest // window.step_seconds * window.step_seconds
    while start < window.end:
        part = window._replace(start=start, end=min(start + length, window.end))
        try:
            answers.append(await ask(part))
        except QueryTooLargeError:
            seconds = part.end - part.start
            if seconds <= shortest:
                raise
            length = max(seconds // 2 // window.step_seconds * window.step_seconds, shortest)
            continue
        start = part.end
    return answers


async def _added(server: Prometheus, counter: Counter, expression: str, window: Window) -> dict[Key, float]:
    """The sum of an expression over the window's steps, by the counter's key."""

    async def ask(part: Window) -> list[Row]:
        return await server.instant(sum_of_steps(expression, part.end - part.start, part.step_seconds), part.end)

    found: dict[Key, float] = {}
    for row in _all(await in_parts(window, PART_SECONDS, _PART_STEPS_MIN * window.step_seconds, ask)):
        key = tuple(row.labels.get(name, "") for name in counter.keys)
        found[key] = found.get(key, 0.0) + sum(_number(server, value) for _, value in row.points)
    return found


async def _moments(server: Prometheus, expression: str, window: Window) -> set[int]:
    """The ends of the steps in which an expression has a value."""
    step = window.step_seconds

    async def ask(part: Window) -> list[Row]:
        return await server.range(expression, part.start + step, part.end, step)

    rows = _all(await in_parts(window, PART_SECONDS, _PART_STEPS_MIN * step, ask))
    moments = {moment for row in rows for moment, _ in row.points}
    if any((moment - window.start) % step or not window.start < moment <= window.end for moment in moments):
        raise FatalError(f"{server.url} answered for other times than gpumap asked for")
    return {int(moment) for moment in moments}


def _all(answers: Iterable[Iterable[Row]]) -> list[Row]:
    return [row for rows in answers for row in rows]


def _number(server: Prometheus, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise FatalError(f'{server.url} answered "{text:.40}", which is not a value of a counter')
    if number < 0:
        raise FatalError(f"{server.url} answered {text:.40}, which is not a value of a counter")
    return number


def _refuse_too_much(server: Prometheus, held: Mapping[Key, float], window: Window) -> None:
    """Raise FatalError if a container held a device for longer than there was time."""
    for (namespace, pod, container, uuid), seconds in held.items():
        if seconds > window.end - window.start + BEFORE_SECONDS + window.step_seconds:
            raise FatalError(
                f"{server.url} reports that container {container} of pod {namespace}/{pod} held {uuid} for longer than "
                "the window. Check that one node has one agent, and that the clocks of all scrapers agree"
            )


def target_matchers(match: str) -> str:
    """The matchers without those of containers: a GPU's own series has no label of a pod."""
    found = [one[0] for one in re.finditer(MATCHER, match)]
    names = [label_of(one).removeprefix("exported_") for one in found]
    return ",".join(one for one, name in zip(found, names, strict=True) if name not in POD_KEYS)
