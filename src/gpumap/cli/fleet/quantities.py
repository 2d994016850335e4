"""The sums that a summary of a cluster is made of, each as PromQL that a server adds up, by node or by namespace. Pure.

A device that several targets report counts once, with the larger value, as in the recording rules of
rules/fleet.yaml. A sum contains only what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from gpumap.cli.fleet import queries
from gpumap.cli.fleet.queries import CONTAINER, braced
from gpumap.cli.fleet.targets import OWN_LABELS

_DEVICE, _GPU, _POD, _ON_DEVICE = ("uuid",), ("gpu_uuid",), ("namespace", "pod"), (*CONTAINER, "uuid")
_INSTANCES = 'gpu_instance_id!=""'
_BOTH = ("node", "namespace")


class Grouping(NamedTuple):
    """How series are selected, separated and grouped.

    `group` are the labels of a row of the answer, `place` the labels of a target that separate equal series. `moved`:
    gpumap's own labels that may be `exported_…`. `shared`: compute instances share memory somewhere.
    """

    match: str
    group: tuple[str, ...]
    place: tuple[str, ...]
    moved: frozenset[str]
    shared: bool

    def series(self, name: str, *only: str) -> str:
        return f"{name}{braced(*only, self.match)}"

    def each(self, own: Iterable[str], expression: str) -> str:
        """Return each thing with these own labels once, whatever the number of targets that report it."""
        return f"max {self.by(own)} ({expression})"

    def by(self, own: Iterable[str]) -> str:
        return f"by ({', '.join(self._labels(own, self.place))})"

    def on(self, own: Iterable[str]) -> str:
        return f"on ({', '.join(self._labels(own, self.place))})"

    def total(self, operator: str, expression: str) -> str:
        own = [name for name in self.group if name in OWN_LABELS]
        return f"{operator} by ({', '.join(self._labels(own, self.group))}) ({expression})"

    def once(self, own: tuple[str, ...], name: str) -> str:
        """Return each series' bytes, divided by the number of compute instances that share them."""
        whole = self.each(own, self.series(name))
        if not self.shared:
            return whole
        of_mig = self.each(own, self.series(name, 'uuid=~"MIG-.+"'))
        return f"({of_mig} / on (uuid) group_left () ({sharers(self.match)}) or {whole})"

    def _labels(self, own: Iterable[str], more: Iterable[str]) -> list[str]:
        names = [*own]
        moved = [f"exported_{name}" for name in names if name in self.moved]
        return [*dict.fromkeys((*names, *moved, *more))]


class Quantity(NamedTuple):
    """A sum that a row may have. `ask` returns its PromQL.

    `by_node` and `by_namespace` are the recording rules that have it. `measured`: without a series it is 0 if use is
    known.
    """

    ask: Callable[[Grouping], str]
    by_node: str = ""
    by_namespace: str = ""
    measured: bool = False


def sharers(match: str) -> str:
    """Return PromQL for the number of compute instances that share the memory of each MIG device, if there are several:
    gpumap's rule cluster_uuid:gpumap_device_memory_sharers:count."""
    info = f"gpumap_device_info{braced(_INSTANCES, match)}"
    instance = "gpu_uuid, gpu_instance_id"
    return (
        f"max by (uuid) (max by (uuid, {instance}) ({info}) * on ({instance}) group_left () "
        f"(count by ({instance}) (count by (uuid, {instance}) ({info})) > 1))"
    )


def _added(operator: str, name: str, by: Collection[str], values: Callable[[Grouping], str]) -> Quantity:
    """Return the sum or count of a series, with recording rules `by` node or namespace."""
    by_node, by_namespace = (f"cluster_{one}:{name}:{operator}" if one in by else "" for one in _BOTH)
    return Quantity(lambda grouping: grouping.total(operator, values(grouping)), by_node, by_namespace)


def _each(operator: str, own: tuple[str, ...], name: str, *only: str, by: Collection[str] = ("node",)) -> Quantity:
    return _added(operator, name, by, lambda grouping: grouping.each(own, grouping.series(name, *only)))


def _bytes(own: tuple[str, ...], name: str, by: Collection[str] = ("node",)) -> Quantity:
    return _added("sum", name, by, lambda grouping: grouping.once(own, name))


def _free(grouping: Grouping) -> str:
    free = f"{grouping.each(_DEVICE, grouping.series('gpumap_device_holders'))} == bool 0"
    return grouping.total("sum", f"({free}) and {grouping.on(_DEVICE)} {grouping.series('gpumap_device_info')}")


def recorded(record: str, by: str, *matchers: str) -> str:
    """Return PromQL for a record by `cluster` and by `by`: each once, whatever the number of servers that have it."""
    level = record.partition(":")[0].split("_")
    once = f"max by ({', '.join(level)}) ({record}{braced(*matchers)})"
    return once if {*level} == {"cluster", by} else f"sum by (cluster, {by}) ({once})"


_RECORDED_SM = "cluster_namespace_node:gpumap_container_sm_utilization_ratio:sum"
QUANTITIES = {
    "gpus": _each("count", _GPU, "gpumap_gpu_up"),
    "gpus_up": _each("sum", _GPU, "gpumap_gpu_up"),
    "devices": _each("count", _DEVICE, "gpumap_device_info"),
    "devices_free": Quantity(_free, "cluster_node:gpumap_device_without_holder:count"),
    "devices_measured": _each("count", _DEVICE, "gpumap_device_processes", 'owner="unknown"'),
    "holders": _each("sum", _DEVICE, "gpumap_device_holders"),
    "memory_used_bytes": _bytes(_DEVICE, "gpumap_device_memory_used_bytes"),
    "memory_total_bytes": _bytes(_DEVICE, "gpumap_device_memory_total_bytes"),
    "pods": _each("count", _POD, "gpumap_pod_info", by=("namespace",)),
    "held_gpus": _each("sum", _ON_DEVICE, queries.ALLOCATED_GPUS.name, by=_BOTH)._replace(measured=True),
    "sm_gpus": Quantity(_each("sum", _ON_DEVICE, queries.SM.name).ask, _RECORDED_SM, _RECORDED_SM),
    "used_bytes": _each("sum", _ON_DEVICE, queries.USED.name, by=_BOTH)._replace(measured=True),
    "granted_bytes": _bytes(_ON_DEVICE, queries.ALLOCATED_MEMORY.name, by=_BOTH),
}
