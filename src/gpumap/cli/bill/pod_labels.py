"""Ask a Prometheus for a label or the workload of each pod, by kube-state-metrics: the last value in a window."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping

from gpumap.cli.bill.counting import Labelling, Pod
from gpumap.cli.bill.query import ask_by_parts, counter_value
from gpumap.cli.bill.window import Window
from gpumap.cli.kube_state import NEEDS_OWNERS, POD_OWNERS, Object, ObjectValues, pod_label, two_values, workloads
from gpumap.cli.sources.prometheus import Prometheus
from gpumap.model.errors import FatalError, UsageError

EARLIER_SECONDS = 3600
"""A pod that ended at most this long before the window may still be charged in it."""
AT_ONCE_SECONDS = 600
"""Two values are side by side if one has samples between those of the other's last ten minutes."""
_GIVES_WAY_SECONDS = 120
"""While one value replaces another, two scrapers may see the change at different moments."""
_PART_SECONDS = 86400
_STEP_SECONDS = 60
_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)


def read_label(text: str) -> str:
    """Return the label's name. Raises UsageError if Kubernetes does not allow it."""
    if not _NAME.fullmatch(text):
        raise UsageError(f"--label {text}: must be the name of a label, such as team or example.com/team")
    return text


async def label_values(
    server: Prometheus, labelling: Labelling, pods: Collection[Pod], window: Window
) -> Mapping[Pod, str]:
    """Return the label's value, or the workload, of the pods that have it. Raises FatalError if none of them has it."""

    async def find(values: ObjectValues, objects: Collection[Object]) -> Mapping[Object, str]:
        return await _last_values(server, values, labelling.match, objects, window)

    if labelling.label is None:
        value_of: Mapping[Pod, str] = await workloads(find, pods)
    else:
        listed = await find(pod_label(labelling.label), pods)
        value_of = {pod: value for pod, value in listed.items() if value}
    if pods and not value_of:
        raise FatalError(await _missing(server, labelling, window))
    return value_of


async def _last_values(
    server: Prometheus, values: ObjectValues, match: str, objects: Collection[Object], window: Window
) -> dict[Object, str]:
    """Return the last value of each object that was listed; empty if it had none."""
    wanted_objects = set(objects)

    async def ask(day: Window) -> dict[Object, str]:
        series = f"last_over_time({values.selector(match)}[{day.end - day.start}s])"
        rows = await server.instant(values.question(series), day.end)
        return {
            labelled: next(iter(found_values))
            if len(found_values) == 1
            else await _last_value(server, values, match, labelled, day)
            for labelled, found_values in values.values_by_object(row.labels for row in rows).items()
            if labelled in wanted_objects
        }

    since = Window(window.start - EARLIER_SECONDS, window.end, _STEP_SECONDS)
    last_values: dict[Object, str] = {}
    for answer in await ask_by_parts(since, _PART_SECONDS, EARLIER_SECONDS, ask):
        last_values |= {labelled: value or last_values.get(labelled, "") for labelled, value in answer.items()}
    return last_values


async def _last_value(server: Prometheus, values: ObjectValues, match: str, labelled: Object, window: Window) -> str:
    """The value that the object had last, by the times of its samples. Raises FatalError if it had two side by side."""
    series = " or ".join(f"timestamp({selected})" for selected in values.selectors(match, labelled))
    times: dict[str, set[float]] = {}
    first = window.end - (window.end - window.start - 1) // _STEP_SECONDS * _STEP_SECONDS
    for row in await server.range(values.question(series), first, window.end, _STEP_SECONDS):
        of_value = times.setdefault(values.value_of(row.labels), set())
        of_value.update(
            time for time in (counter_value(server, value) for _, value in row.points) if time > window.start
        )
    order = sorted((max(of_value), value) for value, of_value in times.items() if of_value)
    for (last_time, value), (_, other_value) in itertools.permutations(order, 2):
        first_time = min(time for time in times[value] if time > last_time - AT_ONCE_SECONDS)
        if any(first_time < time < last_time - _GIVES_WAY_SECONDS for time in times[other_value]):  # side by side
            raise FatalError(two_values(server.url, values, labelled, (value, other_value)))
    return next((value for _, value in reversed(order) if value), "")


async def _missing(server: Prometheus, labelling: Labelling, window: Window) -> str:
    """Why no pod has the label, or a workload."""
    values = POD_OWNERS if labelling.label is None else pod_label(labelling.label)
    allowed = f"--metric-labels-allowlist=pods=[{labelling.label}]"
    if not await server.series(values.selector(labelling.match, 'namespace!=""'), window.start, window.end):
        matching = f" that matches {labelling.match}" if labelling.match else ""
        needs = (
            f"--by label needs kube-state-metrics, started with {allowed}, and scraped by this server"
            if labelling.label
            else NEEDS_OWNERS
        )
        return f"{server.url} has no {values.metric}{matching} in this time: {needs}"
    if labelling.label is None:
        return f"{server.url} has {values.metric}, but of no pod in this bill"
    return (
        f"{server.url} has {values.metric}, but label {labelling.label} ({values.values[0]}) of no pod in this "
        f"bill: start kube-state-metrics with {allowed}"
    )
