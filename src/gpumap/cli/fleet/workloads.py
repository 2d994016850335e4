"""Asks kube-state-metrics, through a Prometheus, for the workloads of pods."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gpumap.cli.fleet.queries import matchers_of_targets
from gpumap.cli.fleet.source import maps_of, now
from gpumap.cli.kube_state import NEEDS_OWNERS, POD_OWNERS, Object, ObjectValues, two_values, workloads
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.prometheus import Prometheus
from gpumap.model.errors import FatalError

_NAMESPACES_MAX = 200
"""With more, it takes the pods of all namespaces: the query would be longer than the answer."""


async def maps_with_workloads(
    server: Prometheus, match: str, parts: frozenset[str], node: str, namespace: str, kube_match: str
) -> NodeMaps:
    """Ask once for the maps, and for the workloads of the pods in their findings."""
    maps = await maps_of(server, match, parts, node, namespace)
    found = (one for of_node in maps.maps for one in of_node.findings or ())
    pods = {(one.namespace, one.pod) for one in found if one.pod and one.finding != "leftover"}
    return maps._replace(workloads=await workloads_of(server, sorted(pods), kube_match, await now(server)))


async def workloads_of(server: Prometheus, pods: Collection[Object], match: str, moment: int) -> dict[Object, str]:
    """Return the workload of each pod that kube-state-metrics lists.

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

    return await workloads(find, pods) if pods else {}


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
