"""The label or the workload of each pod, from the series of kube-state-metrics: the last value in a window.

A workload is the owner of a pod's owner (Deployment, CronJob), else its owner, else the pod: `Deployment/trainer`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from gpumap.cli.bill.counting import Pod, Request
from gpumap.cli.bill.promql import selector
from gpumap.cli.bill.query import ask_by_parts, counter_value
from gpumap.cli.bill.window import Window
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
_NO_OWNER = ("", "<none>")
"""The kind of an owner that does not exist; the second before kube-state-metrics 2.0."""
_CAMEL = re.compile(r"([a-z0-9])([A-Z])")
Object = tuple[str, str]
"""Namespace and name."""


def read_label(text: str) -> str:
    """Return the label's name. Raises UsageError if Kubernetes does not allow it."""
    if not _NAME.fullmatch(text):
        raise UsageError(f"--label {text}: must be the name of a label, such as team or example.com/team")
    return text


async def label_values(
    server: Prometheus, request: Request, pods: Collection[Pod], window: Window
) -> Mapping[Pod, str]:
    """Return the label's value, or the workload, of the pods that have it. Raises FatalError if none of them has it."""

    async def find(values: ObjectValues, objects: Collection[Object]) -> Mapping[Object, str]:
        return await _last_values(server, values, request.label_match, objects, window)

    if request.label is None:
        value_of: Mapping[Pod, str] = await _workloads(find, pods)
    else:
        listed = await find(_pod_label(request.label), pods)
        value_of = {pod: value for pod, value in listed.items() if value}
    if pods and not value_of:
        raise FatalError(await _missing(server, request, window))
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
            named = ", ".join(text or "none" for text in sorted((value, other_value)))
            raise FatalError(
                f"{server.url} has two {values.noun} for {values.object.removesuffix('_name')} {'/'.join(labelled)} at "
                f"the same time ({named}). If it has several clusters, choose one with --match, such as --match "
                "'cluster=\"a\"'"
            )
    return next((value for _, value in reversed(order) if value), "")


async def _missing(server: Prometheus, request: Request, window: Window) -> str:
    """Why no pod has the label, or a workload."""
    values = _POD_OWNERS if request.label is None else _pod_label(request.label)
    allowed = f"--metric-labels-allowlist=pods=[{request.label}]"
    if not await server.series(values.selector(request.label_match, 'namespace!=""'), window.start, window.end):
        matching = f" that matches {request.label_match}" if request.label_match else ""
        needs = (
            f"--by label needs kube-state-metrics, started with {allowed}, and scraped by this server"
            if request.label
            else "--by workload needs kube-state-metrics, scraped by this server"
        )
        return f"{server.url} has no {values.metric}{matching} in this time: {needs}"
    if request.label is None:
        return f"{server.url} has {values.metric}, but of no pod in this bill"
    return (
        f"{server.url} has {values.metric}, but label {request.label} ({values.values[0]}) of no pod in this "
        f"bill: start kube-state-metrics with {allowed}"
    )


# --- the series of kube-state-metrics ---------------------------------------------------------------------------------


class ObjectValues(NamedTuple):
    """A metric with a series for each object: `object` is the label with its name, `values` are labels to read.

    `noun` names the value in messages. `only` selects among an object's series.
    """

    metric: str
    object: str
    values: tuple[str, ...]
    noun: str
    only: str = ""

    def question(self, series: str) -> str:
        """Return PromQL for one row for each object and value."""
        object_labels = ("namespace", self.object)
        moved_labels = (f"exported_{label}" for label in object_labels)
        return f"max by ({', '.join((*object_labels, *moved_labels, *self.values))}) ({series})"

    def selectors(self, match: str, object_name: Object) -> Iterator[str]:
        """Select an object's series, by the labels that it has with honorLabels and without: no target has a label
        `replicaset`, but many have a label `pod`."""
        namespace, name = map(json.dumps, object_name)
        moved = f"exported_{self.object}" if self.object == "pod" else self.object
        yield self.selector(match, f'namespace={namespace},{self.object}={name},exported_namespace=""')
        yield self.selector(match, f"exported_namespace={namespace},{moved}={name}")

    def selector(self, *matchers: str) -> str:
        return selector(self.metric, *matchers, self.only)

    def value_of(self, labels: Mapping[str, str]) -> str:
        """Return the value; empty if the object has none."""
        values = [labels.get(label, "") for label in self.values]
        return "" if values[0] in _NO_OWNER else "/".join(values)

    def values_by_object(self, rows: Iterable[Mapping[str, str]]) -> dict[Object, set[str]]:
        """Return all values of each object. Without honorLabels its labels are called exported_pod and so on, and `pod`
        is kube-state-metrics' own."""
        values_by_object: dict[Object, set[str]] = {}
        object_labels = ("namespace", self.object)
        for labels in rows:
            namespace, name = (labels.get(f"exported_{label}") or labels.get(label, "") for label in object_labels)
            values_by_object.setdefault((namespace, name), set()).add(self.value_of(labels))
        return values_by_object


def _pod_label(label: str) -> ObjectValues:
    """Return the values of a pod's label, by its name in Kubernetes."""
    return ObjectValues("kube_pod_labels", "pod", (metric_label(label),), f"values of label {label}")


def metric_label(label: str) -> str:
    """What kube-state-metrics calls a label (internal/store/utils.go, since 2.0: other characters, then camelCase)."""
    words = _CAMEL.sub(r"\1_\2", re.sub(r"[^a-zA-Z0-9_]", "_", label))
    return f"label_{words.lower()}"


def _owners(metric: str, object_label: str) -> ObjectValues:
    return ObjectValues(metric, object_label, ("owner_kind", "owner_name"), "owners", 'owner_is_controller!="false"')


_POD_OWNERS = _owners("kube_pod_owner", "pod")
_OWNERS_OF_OWNERS = {
    "ReplicaSet": _owners("kube_replicaset_owner", "replicaset"),
    "Job": _owners("kube_job_owner", "job_name"),
}
"""By kind of a pod's owner."""


async def _workloads(
    find: Callable[[ObjectValues, Collection[Object]], Awaitable[Mapping[Object, str]]], pods: Collection[Object]
) -> dict[Object, str]:
    """Return the workload of each pod that kube-state-metrics lists, as `kind/name`.

    `find` asks for the values of objects: empty if kube-state-metrics lists an object without one.
    """
    owners_by_pod = {pod: owner or f"Pod/{pod[1]}" for pod, owner in (await find(_POD_OWNERS, pods)).items()}
    for kind, owners in _OWNERS_OF_OWNERS.items():
        of_kind = {
            pod: (pod[0], owner.partition("/")[2])
            for pod, owner in owners_by_pod.items()
            if owner.startswith(f"{kind}/")
        }
        above = await find(owners, {*of_kind.values()}) if of_kind else {}
        owners_by_pod |= {pod: above[owner] for pod, owner in of_kind.items() if above.get(owner)}
    return owners_by_pod
