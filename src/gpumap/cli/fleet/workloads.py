"""Adds up the sums of pods by their workloads, which kube-state-metrics reports at the same moment."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gpumap.cli.fleet.queries import matchers_of_targets
from gpumap.cli.kube_state import NEEDS_OWNERS, POD_OWNERS, Object, ObjectValues, two_values, unlisted, workloads
from gpumap.cli.prometheus import Prometheus
from gpumap.model.errors import FatalError

_NAMESPACES_MAX = 200
"""With more, it takes the pods of all namespaces: the query would be longer than the answer."""
Values = dict[str, dict[str, float]]
"""By namespace/pod or namespace/workload, then by quantity."""


async def by_workload(server: Prometheus, of_pods: Values, match: str, moment: int) -> tuple[Values, list[str]]:
    """Return the sums of each workload, and sentences on pods whose workload is not known.

    Raises FatalError if the server has no kube-state-metrics.
    """

    async def find(values: ObjectValues, objects: Collection[Object]) -> Mapping[Object, str]:
        found = await _values_now(server, values, match, {namespace for namespace, _ in objects}, moment)
        if values is POD_OWNERS and not found:
            raise FatalError(f"{server.url} has no {values.metric} that matches {match}: {NEEDS_OWNERS}")
        wanted = {one: found[one] for one in objects if one in found}
        for one, several in wanted.items():
            if len(several) > 1:
                raise FatalError(two_values(server.url, values, one, several))
        return {one: next(iter(several)) for one, several in wanted.items()}

    pods = [_object(name) for name in of_pods]
    known = await workloads(find, pods) if pods else {}
    added: Values = {}
    for pod, row in zip(pods, of_pods.values(), strict=True):
        of_workload = added.setdefault(f"{pod[0]}/{known.get(pod, f'Pod/{pod[1]}')}", {})
        for quantity, value in row.items():
            of_workload[quantity] = of_workload.get(quantity, 0) + value
    without = sorted("/".join(pod) for pod in pods if pod not in known)
    return added, [unlisted(without)] if without else []


def _object(name: str) -> Object:
    namespace, _, pod = name.partition("/")
    return namespace, pod


async def _values_now(
    server: Prometheus, values: ObjectValues, match: str, namespaces: Iterable[str], moment: int
) -> dict[Object, set[str]]:
    names = sorted(namespaces)
    selectors = [
        values.selector(match, *matchers_of_targets([{label: one} for one in names], [label]))
        for label in ("namespace", "exported_namespace")
    ]
    chosen = " or ".join(selectors) if len(names) <= _NAMESPACES_MAX else values.selector(match)
    rows = await server.vector(values.question(chosen), moment)
    return values.by_object(labels for labels, _ in rows)
