"""The counters of gpumap that a bill reads, and the PromQL that adds up how far each went in a window. Pure.

The server adds up, step by step (--resolution), and answers with one number for each counter.
docs/explanation/accounting.md has the rule and its error:

- A counter **went on** by its newest value in the step, less its value before the step.
- A counter that is below all of its values before **restarted** at 0: its newest value counts.
- A counter without a value before was **born** at 0: its newest value counts, if the server scraped that gpumap before.
  Otherwise the server began to scrape a gpumap that had counted for an unknown time: the newest value is not charged.

"Before" means the day before the step: long enough for an outage of the server. gpumap exposes a counter for at most an
hour after its container (agent/join/accounting.py), so a counter that comes back after a day began at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

POD_KEYS = ("namespace", "pod", "container", "uuid")
BEFORE_SECONDS = 86400
"""Maximum age of the sample that is the value of a counter before a step."""
GAP_SECONDS_MIN = 600
"""A shorter time without a sample may be the time between two scrapes."""
Key = tuple[str, ...]
"""A counter's labels, in the order of its `keys`."""


class Counter(NamedTuple):
    """A counter or a gauge of gpumap's, and the labels that identify its series on all nodes."""

    name: str
    keys: tuple[str, ...]
    only: str = ""
    """A matcher for the series that count."""


HELD = Counter("gpumap_container_allocated_gpu_seconds_total", POD_KEYS)
USED = Counter("gpumap_container_sm_seconds_total", POD_KEYS)
USED_OF_MIG = Counter("gpumap_container_sm_activity_seconds_total", POD_KEYS, 'uuid=~"MIG-.+"')
"""MIG devices have no SM time."""
ENERGY = Counter("gpumap_container_energy_joules_total", POD_KEYS)
MEMORY = Counter("gpumap_container_gpu_memory_byte_seconds_total", POD_KEYS)
UNATTRIBUTED = Counter("gpumap_gpu_energy_unattributed_joules_total", ("gpu_uuid",))
NOT_MEASURED = Counter("gpumap_accounting_gap_seconds_total", ("gpu_uuid",))
"""Each gpumap exposes it for each of its GPUs, so it also shows whether the server scraped a gpumap."""
WORK_KEYS = ("workload_kind", "workload", "uuid")
PRESENT = Counter("gpumap_host_gpu_processes", WORK_KEYS)
WORK_SM = Counter("gpumap_host_sm_utilization_ratio", WORK_KEYS)
WORK_MEMORY = Counter("gpumap_host_gpu_memory_used_bytes", WORK_KEYS)
"""Gauges of work outside pods, which has no counters: a bill adds up their means (`mean`)."""
SM_KNOWN = Counter("", WORK_KEYS)
"""Not a series: the time in which WORK_SM has samples."""
SNAPSHOT = "gpumap_snapshot_timestamp_seconds"
"""Each scrape of a gpumap has exactly one sample of it."""
COUNTERS = (HELD, USED, USED_OF_MIG, ENERGY, MEMORY, UNATTRIBUTED, NOT_MEASURED)
Growth = Mapping[Counter, Mapping[Key, float]]


class Scope(NamedTuple):
    """Which series count, and the step. `match` is matchers as in PromQL. `exported`: gpumap's labels are called
    `exported_pod` and so on, because the server scrapes without honorLabels. `target_match` is `match` without the
    labels of containers."""

    match: str
    step_seconds: int
    exported: bool = False
    target_match: str = ""


def selector(name: str, *matchers: str) -> str:
    """Select a metric's series by all matchers that are not empty."""
    return f"{name}{{{','.join(matcher for matcher in matchers if matcher)}}}"


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


def mean(gauge: Counter, scope: Scope, kinds: str, function: str = "sum_over_time") -> str:
    """The gauge's mean in a step, by key, over the scrapes of its gpumap: an absent sample counts as 0.

    With `count_over_time`, the part of the step in which the gauge has samples. Series of one key count once.
    """
    recent = f"[{_range(scope)}]"
    of_kind = f'workload_kind=~"{kinds}"'
    series = f"{function}({selector(gauge.name, scope.match, of_kind)}{recent})"
    scrapes = f"max by (cluster, job, instance) (count_over_time({selector(SNAPSHOT, scope.target_match)}{recent}))"
    ratio = f"{series} / on (cluster, job, instance) group_left () {scrapes}"
    return f"max by ({', '.join(gauge.keys)}) ({ratio})"


def resumed(counter: Counter, scope: Scope) -> str:
    """The counters that the server did not scrape just before this moment, but in the day before.

    If one of them goes on, its first increase contains the time before this moment.
    """
    keys, chosen = ", ".join(counter.keys), selector(counter.name, scope.match)
    earlier, just_before = (
        _own_labels(f"last_over_time({chosen}[{seconds}s])", counter, scope)
        for seconds in (BEFORE_SECONDS, GAP_SECONDS_MIN)
    )
    return f"max by ({keys}) ({earlier}) unless on ({keys}) {just_before}"


def gaps_that_end(scope: Scope) -> str:
    """The gpumaps with a sample in the step and none just before it; the value is the time of the last snapshot."""
    series, target = selector(SNAPSHOT, scope.target_match), "cluster, job, instance"
    offset = f"offset {scope.step_seconds}s"
    return (
        f"max by ({target}) (last_over_time({series}[{BEFORE_SECONDS}s] {offset}) "
        f"and on ({target}) last_over_time({series}[{_range(scope)}])) "
        f"unless on ({target}) last_over_time({series}[{GAP_SECONDS_MIN}s] {offset})"
    )


def gpumaps_with_samples(scope: Scope) -> str:
    """How many gpumaps have a sample in the step."""
    return f"count(last_over_time({selector(SNAPSHOT, scope.target_match)}[{_range(scope)}]))"


def gpus_with_samples(scope: Scope) -> str:
    """How many GPUs have a sample in the step."""
    return f"count({_recent(NOT_MEASURED, scope)})"


def _newest(counter: Counter, scope: Scope) -> str:
    return f"max by ({', '.join(counter.keys)}) ({_own_labels(_recent(counter, scope), counter, scope)})"


def _born(counter: Counter, scope: Scope) -> str:
    """The newest value, if the server scraped the same target before. `cluster` is the usual label of one of several
    clusters; a label that both sides lack is equal."""
    target = scope._replace(match=scope.target_match)
    scraped = f"{_recent(counter, scope)} and on (cluster, job, instance) {_earlier(NOT_MEASURED, target)}"
    return f"max by ({', '.join(counter.keys)}) ({_own_labels(scraped, counter, scope)})"


def _recent(counter: Counter, scope: Scope) -> str:
    """The last sample in the step, whatever the server's look-back and staleness markers are."""
    return f"last_over_time({selector(counter.name, counter.only, scope.match)}[{_range(scope)}])"


def _range(scope: Scope) -> str:
    """A step, less a millisecond: Prometheus before 3.0 includes the range's beginning, which is in the step before."""
    return f"{scope.step_seconds * 1000 - 1}ms"


def _earlier(counter: Counter, scope: Scope) -> str:
    """The last sample before the step."""
    chosen = selector(counter.name, counter.only, scope.match)
    return f"last_over_time({chosen}[{BEFORE_SECONDS}s] offset {scope.step_seconds}s)"


def _own_labels(series: str, counter: Counter, scope: Scope) -> str:
    for key in counter.keys if scope.exported else ():
        if key not in ("uuid", "gpu_uuid"):
            series = f'label_replace({series}, "{key}", "$1", "exported_{key}", "(.+)")'
    return series
