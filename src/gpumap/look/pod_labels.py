"""Asks a server for a label of each pod, as kube-state-metrics tells it: the last value that it had in a window."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpumap.errors import FatalError, UsageError
from gpumap.look.counting import selector
from gpumap.look.prometheus import Prometheus, TooMuchError
from gpumap.look.window import Window

METRIC = "kube_pod_labels"
EARLIER_SECONDS = 3600
"""A pod that ended so long before the window at most may still be counted in it."""
AT_ONCE_SECONDS = 600
"""A pod with two values within this has them side by side, and not one after the other."""
_PART_SECONDS = 86400
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
        except TooMuchError:
            if size <= EARLIER_SECONDS:
                raise
            size //= 2
            continue
        for pod in found.keys() & set(pods):
            told = found[pod]
            values[pod] = next(iter(told)) if len(told) == 1 else await _latest(server, asked, pod, first, last)
        first = last
    if pods and not values:
        raise FatalError(await _missing(server, asked, window))
    return values


async def _values(server: Prometheus, asked: Labelling, first: int, last: int, *more: str) -> dict[Pod, set[str]]:
    """All values that the pods had after `first` and until `last`."""
    series = selector(METRIC, asked.match, f'{asked.name}!=""', *more)
    question = f"max by (namespace, pod, {asked.name}) (last_over_time({series}[{last - first}s]))"
    found: dict[Pod, set[str]] = {}
    for row in await server.instant(question, last):
        pod = row.labels.get("namespace", ""), row.labels.get("pod", "")
        found.setdefault(pod, set()).add(row.labels.get(asked.name, ""))
    return found


async def _latest(server: Prometheus, asked: Labelling, pod: Pod, first: int, last: int) -> str:
    """Which of a pod's values was the last. Raises FatalError where it has two side by side."""
    matchers = [f"{name}={json.dumps(value)}" for name, value in zip(("namespace", "pod"), pod, strict=True)]
    told: set[str] = set()
    while last - first > AT_ONCE_SECONDS:
        middle = (first + last) // 2
        told = (await _values(server, asked, middle, last, *matchers)).get(pod, set())
        if len(told) == 1:
            return next(iter(told))
        first, last = (middle, last) if told else (first, middle)
    told = (await _values(server, asked, first, last, *matchers)).get(pod, told)
    if len(told) == 1:
        return next(iter(told))
    raise FatalError(
        f"{server.url} tells two values of label {asked.label} for pod {'/'.join(pod)} at the same time "
        f"({', '.join(sorted(told))}): are there several clusters? choose one, such as --match 'cluster=\"a\"'"
    )


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
