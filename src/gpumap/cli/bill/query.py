"""Ask a Prometheus how far each counter of gpumap's went in a window, and when the server had no samples of gpumap's.

The server adds up, step by step (--resolution), and answers with one number for each counter. docs/bill.md has the rule
and its error:

- A counter **went on** by its newest value in the step, less its value before the step.
- A counter that is below all of its values before **restarted** at 0: its newest value counts.
- A counter without a value before was **born** at 0: its newest value counts, if the server scraped that gpumap before.
  Otherwise the server began to scrape a gpumap that had counted for an unknown time: the newest value is not charged.

"Before" means the day before the step: long enough for an outage of the server. gpumap exposes a counter for at most an
hour after its container (agent/join/ledger.py), so a counter that comes back after a day began at 0.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

from gpumap.cli.bill.window import Window
from gpumap.cli.prometheus import Prometheus, QueryTooLargeError, Row, together
from gpumap.cli.server_flags import MATCHER
from gpumap.model.errors import FatalError

T = TypeVar("T")

POD_KEYS = ("namespace", "pod", "container", "uuid")
BEFORE_SECONDS = 86400
"""How long before a step a sample still tells what a counter was."""
PART_SECONDS = 86400
_PART_STEPS_MIN = 5
GAP_SECONDS_MIN = 600
"""A shorter time without a sample may be the time between two scrapes."""
Key = tuple[str, ...]
"""A counter's labels, in the order of its `keys`."""
Gap = tuple[int, int]
"""Unix seconds from which and until which the server has no sample."""


class Counter(NamedTuple):
    """A counter of gpumap's, and the labels that identify its series on all nodes."""

    name: str
    keys: tuple[str, ...]


HELD = Counter("gpumap_container_allocated_gpu_seconds_total", POD_KEYS)
USED = Counter("gpumap_container_sm_seconds_total", POD_KEYS)
ENERGY = Counter("gpumap_container_energy_joules_total", POD_KEYS)
MEMORY = Counter("gpumap_container_gpu_memory_byte_seconds_total", POD_KEYS)
UNATTRIBUTED = Counter("gpumap_gpu_energy_unattributed_joules_total", ("uuid",))
NOT_MEASURED = Counter("gpumap_accounting_gap_seconds_total", ("uuid",))
"""Each gpumap exposes it for each of its GPUs, so it also shows whether the server scraped a gpumap."""
COUNTERS = (HELD, USED, ENERGY, MEMORY, UNATTRIBUTED, NOT_MEASURED)
Growth = Mapping[Counter, Mapping[Key, float]]


class Scope(NamedTuple):
    """Which series count, and the step. `match` is matchers as in PromQL. `exported`: gpumap's labels are called
    `exported_pod` and so on, because the server scrapes without honorLabels."""

    match: str
    step_seconds: int
    exported: bool = False


class Increases(NamedTuple):
    """How far each counter went. `uncharged_seconds` are GPU-seconds that gpumap had counted before the server scraped
    it. `gaps` is None if no counter of a GPU matches."""

    growth: Growth
    uncharged_seconds: float
    gaps: tuple[Gap, ...] | None


# --- PromQL -----------------------------------------------------------------------------------------------------------


def selector(name: str, *matchers: str) -> str:
    """Select a metric's series by all matchers that are not empty."""
    return f"{name}{{{','.join(one for one in matchers if one)}}}"


def growth(counter: Counter, scope: Scope) -> str:
    """How far the counter went in a step, by key.

    Series of one key differ in what the scrape adds (instance, job, replica) and count once. The value before is the
    highest one that is not above the newest: a series that ended with an agent keeps its higher value for a day.
    """
    keys, newest = ", ".join(counter.keys), _newest(counter, scope)
    earlier = _own_labels(_earlier(counter, scope), counter, scope)
    went_on = f"{newest} - max by ({keys}) ({earlier} <= on ({keys}) group_left () {newest})"
    restarted = f"{newest} and on ({keys}) {earlier}"
    return f"({went_on}) or ({restarted}) or {_born(counter, scope)}"


def uncharged(counter: Counter, scope: Scope) -> str:
    """The first values that `growth` leaves out, because the server had not scraped that gpumap before."""
    keys, earlier = ", ".join(counter.keys), _own_labels(_earlier(counter, scope), counter, scope)
    return f"{_newest(counter, scope)} unless on ({keys}) {earlier} unless {_born(counter, scope)}"


def sum_of_steps(expression: str, seconds: int, step_seconds: int) -> str:
    """Add up an expression's values at the steps of so many seconds.

    Half a step less, for the same reason as in `_recent`: the range's beginning is a step of the part before.
    """
    return f"sum_over_time(({expression})[{seconds - step_seconds // 2}s:{step_seconds}s])"


def gpus_with_samples(scope: Scope) -> str:
    """How many GPUs have a sample in the step."""
    return f"count({_recent(NOT_MEASURED, scope)})"


def _newest(counter: Counter, scope: Scope) -> str:
    return f"max by ({', '.join(counter.keys)}) ({_own_labels(_recent(counter, scope), counter, scope)})"


def _born(counter: Counter, scope: Scope) -> str:
    """The newest value, if the server scraped the same target before. `cluster` is the usual label of one of several
    clusters; a label that both sides lack is equal."""
    target = scope._replace(match=_target_matchers(scope.match))
    scraped = f"{_recent(counter, scope)} and on (cluster, job, instance) {_earlier(NOT_MEASURED, target)}"
    return f"max by ({', '.join(counter.keys)}) ({_own_labels(scraped, counter, scope)})"


def _recent(counter: Counter, scope: Scope) -> str:
    """The last sample in the step, whatever the server's look-back and staleness markers are.

    A millisecond less, because Prometheus before 3.0 includes the range's beginning, which is in the step before.
    """
    return f"last_over_time({selector(counter.name, scope.match)}[{scope.step_seconds * 1000 - 1}ms])"


def _earlier(counter: Counter, scope: Scope) -> str:
    """The last sample before the step."""
    chosen = selector(counter.name, scope.match)
    return f"last_over_time({chosen}[{BEFORE_SECONDS}s] offset {scope.step_seconds}s)"


def _own_labels(series: str, counter: Counter, scope: Scope) -> str:
    for key in counter.keys if scope.exported else ():
        if key != "uuid":
            series = f'label_replace({series}, "{key}", "$1", "exported_{key}", "(.+)")'
    return series


def _target_matchers(match: str) -> str:
    """The matchers without those of containers: a GPU's own series has no label of a pod."""
    found = [one[0] for one in re.finditer(MATCHER, match)]
    names = [re.split(r"[\s=!]", one, maxsplit=1)[0].removeprefix("exported_") for one in found]
    return ",".join(one for one, name in zip(found, names, strict=True) if name not in POD_KEYS)


# --- asking -----------------------------------------------------------------------------------------------------------


async def increases(server: Prometheus, match: str, window: Window) -> Increases:
    """Ask for everything that a bill needs of gpumap. Raises FatalError, also if the server has no such counters."""
    exported = await server.series(selector(HELD.name, match, 'exported_pod!=""'), window.start, window.end)
    scope = Scope(match, window.step_seconds, bool(exported))
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
            f"{server.url} has nothing of gpumap's group accounting in this time{matching}: is gpumap scraped by it, "
            "and does --match fit?"
        )
    _refuse_too_much(server, found[HELD], window)
    moments = await _moments(server, scope, window)
    gaps = gaps_between(moments, window) if moments or found[NOT_MEASURED] else None
    return Increases(found, sum(left_out.values()), gaps)


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


async def _moments(server: Prometheus, scope: Scope, window: Window) -> set[int]:
    """The ends of the steps in which a GPU has a sample."""
    step = window.step_seconds

    async def ask(part: Window) -> list[Row]:
        return await server.range(gpus_with_samples(scope), part.start + step, part.end, step)

    rows = _all(await in_parts(window, PART_SECONDS, _PART_STEPS_MIN * step, ask))
    moments = {moment for row in rows for moment, _ in row.points}
    if any((moment - window.start) % step or not window.start < moment <= window.end for moment in moments):
        raise FatalError(f"{server.url} answered for other moments than it was asked for")
    return {int(moment) for moment in moments}


def _all(answers: Iterable[Iterable[Row]]) -> list[Row]:
    return [row for rows in answers for row in rows]


def _number(server: Prometheus, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise FatalError(f'{server.url} answered "{text:.40}", which is no value of a counter')
    if number < 0:
        raise FatalError(f"{server.url} answered {text:.40}, which is no value of a counter")
    return number


def _refuse_too_much(server: Prometheus, held: Mapping[Key, float], window: Window) -> None:
    """Raise FatalError if a container held a device for longer than there was time."""
    for (namespace, pod, container, uuid), seconds in held.items():
        if seconds > window.end - window.start + BEFORE_SECONDS + window.step_seconds:
            raise FatalError(
                f"{server.url} has it that container {container} of pod {namespace}/{pod} held {uuid} for longer than "
                "this time: do two agents serve one node, or do the clocks of those who scrape it differ?"
            )
