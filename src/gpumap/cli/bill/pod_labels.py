"""Ask a Prometheus for a label of each pod, as kube-state-metrics reports it: the last value in a window."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping

from gpumap.cli.bill.counting import Labelling, Pod
from gpumap.cli.bill.promql import selector
from gpumap.cli.bill.query import in_parts
from gpumap.cli.bill.window import Window
from gpumap.cli.prometheus import Prometheus, Row
from gpumap.model.errors import FatalError, UsageError

METRIC = "kube_pod_labels"
EARLIER_SECONDS = 3600
"""A pod that ended at most this long before the window may still be charged in it."""
AT_ONCE_SECONDS = 600
"""Two values are side by side if one has samples between those of the other's last ten minutes."""
_GIVES_WAY_SECONDS = 120
"""While one value replaces another, two scrapers may see the change at different moments."""
_PART_SECONDS = 86400
_STEP_SECONDS = 60
_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
_CAMEL = re.compile(r"([a-z0-9])([A-Z])")


def read_label(text: str) -> str:
    """Return the label's name. Raises UsageError if Kubernetes does not allow it."""
    if not _NAME.fullmatch(text):
        raise UsageError(f"--label {text}: must be the name of a label, such as team or example.com/team")
    return text


def metric_label(label: str) -> str:
    """What kube-state-metrics calls a label (internal/store/utils.go, since 2.0: other characters, then camelCase)."""
    words = _CAMEL.sub(r"\1_\2", re.sub(r"[^a-zA-Z0-9_]", "_", label))
    return f"label_{words.lower()}"


async def label_values(
    server: Prometheus, labelling: Labelling, pods: Collection[Pod], window: Window
) -> Mapping[Pod, str]:
    """The label's value of the pods that have it. Raises FatalError if none of the pods has it."""
    charged = set(pods)

    async def ask(part: Window) -> dict[Pod, str]:
        found = await _values(server, labelling, part)
        return {
            pod: next(iter(values)) if len(values) == 1 else await _last_value(server, labelling, pod, part)
            for pod, values in found.items()
            if pod in charged
        }

    since = Window(window.start - EARLIER_SECONDS, window.end, _STEP_SECONDS)
    parts = await in_parts(since, _PART_SECONDS, EARLIER_SECONDS, ask)
    found = {pod: value for part in parts for pod, value in part.items() if value}
    if pods and not found:
        raise FatalError(await _missing(server, labelling, window))
    return found


def _question(labelling: Labelling, series: str) -> str:
    return f"max by (namespace, pod, exported_namespace, exported_pod, {metric_label(labelling.label)}) ({series})"


def _pod(row: Row) -> Pod:
    """The pod that the series is about. If the server scrapes without honorLabels, its labels are called exported_pod
    and so on, and `pod` is kube-state-metrics' own."""
    exported = "exported_" if row.labels.get("exported_pod") else ""
    return row.labels.get(f"{exported}namespace", ""), row.labels.get(f"{exported}pod", "")


async def _values(server: Prometheus, labelling: Labelling, part: Window) -> dict[Pod, set[str]]:
    """All values of each pod. "": the pod was without the label."""
    series = f"last_over_time({selector(METRIC, labelling.match)}[{part.end - part.start}s])"
    found: dict[Pod, set[str]] = {}
    for row in await server.instant(_question(labelling, series), part.end):
        found.setdefault(_pod(row), set()).add(row.labels.get(metric_label(labelling.label), ""))
    return found


async def _last_value(server: Prometheus, labelling: Labelling, pod: Pod, part: Window) -> str:
    """The value that the pod had last, by the times of its samples. Raises FatalError if it had two side by side."""
    namespace, name = map(json.dumps, pod)
    series = " or ".join(
        f"timestamp({selector(METRIC, labelling.match, *matchers)})"
        for matchers in (
            (f"namespace={namespace}", f"pod={name}", 'exported_pod=""'),
            (f"exported_namespace={namespace}", f"exported_pod={name}"),
        )
    )
    times: dict[str, set[float]] = {}
    first = part.end - (part.end - part.start - 1) // _STEP_SECONDS * _STEP_SECONDS
    for row in await server.range(_question(labelling, series), first, part.end, _STEP_SECONDS):
        of_value = times.setdefault(row.labels.get(metric_label(labelling.label), ""), set())
        of_value.update(time for time in (float(value) for _, value in row.points) if time > part.start)
    order = sorted((max(of_value), value) for value, of_value in times.items() if of_value)
    for (_, value), (_, other) in itertools.permutations(order, 2):
        if _side_by_side(times[value], times[other]):
            raise FatalError(
                f"{server.url} has two values of label {labelling.label} for pod {'/'.join(pod)} at the same time "
                f"({', '.join(one or 'none' for one in sorted((value, other)))}). If it has several clusters, choose "
                "one with --match, such as --match 'cluster=\"a\"'"
            )
    return next((value for _, value in reversed(order) if value), "")


def _side_by_side(times: Collection[float], others: Collection[float]) -> bool:
    """Whether another value has samples between the last samples of this one."""
    last = max(times)
    first = min(time for time in times if time > last - AT_ONCE_SECONDS)
    return any(first < other < last - _GIVES_WAY_SECONDS for other in others)


async def _missing(server: Prometheus, labelling: Labelling, window: Window) -> str:
    """Why no pod has the label."""
    allowed = f"--metric-labels-allowlist=pods=[{labelling.label}]"
    if not await server.series(selector(METRIC, labelling.match, 'namespace!=""'), window.start, window.end):
        matching = f" that matches {labelling.match}" if labelling.match else ""
        return (
            f"{server.url} has no {METRIC}{matching} in this time: --by label needs kube-state-metrics, started with "
            f"{allowed}, and scraped by this server"
        )
    return (
        f"{server.url} has {METRIC}, but label {labelling.label} ({metric_label(labelling.label)}) of no pod in this "
        f"bill: start kube-state-metrics with {allowed}"
    )
