"""Asks a server for a label of each pod, as kube-state-metrics tells it: the last value that it had in a window."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpumap.cli.bill.counting import selector
from gpumap.cli.bill.window import Window
from gpumap.cli.prometheus import Prometheus, QueryTooLargeError, Row
from gpumap.model.errors import FatalError, UsageError

METRIC = "kube_pod_labels"
EARLIER_SECONDS = 3600
"""A pod that ended so long before the window at most may still be counted in it."""
AT_ONCE_SECONDS = 600
"""A pod of which one value is told, another, and the first again, within this, has them side by side."""
_GIVES_WAY_SECONDS = 120
_PART_SECONDS = 86400
_STEP_SECONDS = 60
_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
_CAMEL = re.compile(r"([a-z0-9])([A-Z])")
Pod = tuple[str, str]
"""Namespace and name."""


class Labelling(NamedTuple):
    """A pod's label as Kubernetes writes it, and matchers for the series of kube-state-metrics."""

    label: str
    match: str

    @property
    def name(self) -> str:
        return metric_label(self.label)


def read_label(text: str) -> str:
    """Give a label's name back. Raises UsageError where no pod can have it."""
    if not _NAME.fullmatch(text):
        raise UsageError(f"--label {text}: is not the name of a label, such as team or example.com/team")
    return text


def metric_label(label: str) -> str:
    """What kube-state-metrics calls a label (internal/store/utils.go, since 2.0: other characters, then camelCase)."""
    words = _CAMEL.sub(r"\1_\2", re.sub(r"[^a-zA-Z0-9_]", "_", label))
    return f"label_{words.lower()}"


async def label_values(
    server: Prometheus, asked: Labelling, pods: Collection[Pod], window: Window
) -> Mapping[Pod, str]:
    """The label's value by pod; pods without it are not there. Raises FatalError where no pod of the bill has it."""
    values: dict[Pod, str] = {}
    first, size = window.start - EARLIER_SECONDS, _PART_SECONDS
    while first < window.end:
        last = min(first + size, window.end)
        try:
            found = await _values(server, asked, first, last)
        except QueryTooLargeError:
            if size <= EARLIER_SECONDS:
                raise
            size //= 2
            continue
        for pod in found.keys() & set(pods):
            told = found[pod]
            value = next(iter(told)) if len(told) == 1 else await _latest(server, asked, pod, first, last)
            values |= {pod: value} if value else {}
        first = last
    if pods and not values:
        raise FatalError(await _missing(server, asked, window))
    return values


def _question(asked: Labelling, series: str) -> str:
    return f"max by (namespace, pod, exported_namespace, exported_pod, {asked.name}) ({series})"


def _pod(row: Row) -> Pod:
    """Scraped without honorLabels, the labels that kube-state-metrics gives are called exported_pod and so on; pod is
    then its own."""
    exported = "exported_" if row.labels.get("exported_pod") else ""
    return row.labels.get(f"{exported}namespace", ""), row.labels.get(f"{exported}pod", "")


async def _values(server: Prometheus, asked: Labelling, first: int, last: int) -> dict[Pod, set[str]]:
    """All values that the pods had after `first` and until `last`; "" where there was a pod without the label."""
    question = _question(asked, f"last_over_time({selector(METRIC, asked.match)}[{last - first}s])")
    found: dict[Pod, set[str]] = {}
    for row in await server.instant(question, last):
        found.setdefault(_pod(row), set()).add(row.labels.get(asked.name, ""))
    return found


async def _latest(server: Prometheus, asked: Labelling, pod: Pod, first: int, last: int) -> str:
    """Which of a pod's values was the last, by the moments of its samples. Raises FatalError where it has two side by
    side."""
    namespace, name = map(json.dumps, pod)
    series = " or ".join(
        f"timestamp({selector(METRIC, asked.match, *matchers)})"
        for matchers in (
            (f"namespace={namespace}", f"pod={name}", 'exported_pod=""'),
            (f"exported_namespace={namespace}", f"exported_pod={name}"),
        )
    )
    moments: dict[str, set[float]] = {}
    begin = last - (last - first - 1) // _STEP_SECONDS * _STEP_SECONDS
    for row in await server.range(_question(asked, series), begin, last, _STEP_SECONDS):
        told = moments.setdefault(row.labels.get(asked.name, ""), set())
        told.update(moment for moment in (float(value) for _, value in row.points) if moment > first)
    order = sorted((max(told), value) for value, told in moments.items() if told)
    for (ended, value), (_, other) in itertools.permutations(order, 2):
        if _side_by_side(moments[value], ended, moments[other]):
            raise FatalError(
                f"{server.url} tells two values of label {asked.label} for pod {'/'.join(pod)} at the same time "
                f"({', '.join(one or 'none' for one in sorted((value, other)))}): are there several clusters? choose "
                "one, such as --match 'cluster=\"a\"'"
            )
    return next((value for _, value in reversed(order) if value), "")


def _side_by_side(told: Collection[float], ended: float, others: Collection[float]) -> bool:
    """Whether others were told between the last moments in which this was, and not only while one gave way to the
    other, of which two who scrape may know at different moments."""
    since = min(moment for moment in told if moment > ended - AT_ONCE_SECONDS)
    return any(since < other < ended - _GIVES_WAY_SECONDS for other in others)


async def _missing(server: Prometheus, asked: Labelling, window: Window) -> str:
    """Why nothing was found."""
    allowed = f"--metric-labels-allowlist=pods=[{asked.label}]"
    if not await server.series(selector(METRIC, asked.match, 'namespace!=""'), window.start, window.end):
        matching = f" that matches {asked.match}" if asked.match else ""
        return (
            f"{server.url} has no {METRIC}{matching} in this time: --by label needs kube-state-metrics, started with "
            f"{allowed}, and scraped by this server"
        )
    return (
        f"{server.url} has {METRIC}, but label {asked.label} ({asked.name}) of no pod in this bill: "
        f"start kube-state-metrics with {allowed}"
    )
