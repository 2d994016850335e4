"""What kube-state-metrics reports of pods and of their owners: which series, and how to read them. Pure.

A workload is the owner of a pod's owner (Deployment, CronJob), else its owner, else the pod: `Deployment/trainer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from gpumap.model.formatting import listed

Object = tuple[str, str]
"""Namespace and name."""
_NO_OWNER = ("", "<none>")
"""The kind of an owner that does not exist; the second before kube-state-metrics 2.0."""
_CAMEL = re.compile(r"([a-z0-9])([A-Z])")


def workload_of(pod: Object, known: Mapping[Object, str]) -> str:
    """Return the workload of a pod; the pod itself if kube-state-metrics does not list it."""
    return known.get(pod, f"Pod/{pod[1]}")


def unlisted(pods: Iterable[Object], known: Mapping[Object, str]) -> list[str]:
    """Return a sentence on the pods whose workload is not known, if there are any."""
    without = sorted({"/".join(pod) for pod in pods if pod not in known})
    return [f"kube-state-metrics does not list {listed(without)}. Each has a row of its own."] if without else []


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
        return f"{self.metric}{{{','.join(matcher for matcher in (*matchers, self.only) if matcher)}}}"

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


def two_values(url: str, values: ObjectValues, object_name: Object, several: Collection[str]) -> str:
    """Return why an object's value is not known: it has two at the same time."""
    named = ", ".join(value or "none" for value in sorted(several))
    return (
        f"{url} has two {values.noun} for {values.object.removesuffix('_name')} {'/'.join(object_name)} at the same "
        f"time ({named}). If it has several clusters, choose one with --match, such as --match 'cluster=\"a\"'"
    )


def pod_label(label: str) -> ObjectValues:
    """Return the values of a pod's label, by its name in Kubernetes."""
    return ObjectValues("kube_pod_labels", "pod", (metric_label(label),), f"values of label {label}")


def metric_label(label: str) -> str:
    """What kube-state-metrics calls a label (internal/store/utils.go, since 2.0: other characters, then camelCase)."""
    words = _CAMEL.sub(r"\1_\2", re.sub(r"[^a-zA-Z0-9_]", "_", label))
    return f"label_{words.lower()}"


def _owners(metric: str, object_label: str) -> ObjectValues:
    return ObjectValues(metric, object_label, ("owner_kind", "owner_name"), "owners", 'owner_is_controller!="false"')


POD_OWNERS = _owners("kube_pod_owner", "pod")
_OWNERS_OF_OWNERS = {
    "ReplicaSet": _owners("kube_replicaset_owner", "replicaset"),
    "Job": _owners("kube_job_owner", "job_name"),
}
"""By kind of a pod's owner."""
NEEDS_OWNERS = "--by workload needs kube-state-metrics, scraped by this server"
Find = Callable[[ObjectValues, Collection[Object]], Awaitable[Mapping[Object, str]]]
"""Asks for the values of objects: empty if kube-state-metrics lists an object without one."""


async def workloads(find: Find, pods: Collection[Object]) -> dict[Object, str]:
    """Return the workload of each pod that kube-state-metrics lists, as `kind/name`."""
    owners_by_pod = {pod: owner or f"Pod/{pod[1]}" for pod, owner in (await find(POD_OWNERS, pods)).items()}
    for kind, owners in _OWNERS_OF_OWNERS.items():
        of_kind = {
            pod: (pod[0], owner.partition("/")[2])
            for pod, owner in owners_by_pod.items()
            if owner.startswith(f"{kind}/")
        }
        above = await find(owners, {*of_kind.values()}) if of_kind else {}
        owners_by_pod |= {pod: above[owner] for pod, owner in of_kind.items() if above.get(owner)}
    return owners_by_pod
