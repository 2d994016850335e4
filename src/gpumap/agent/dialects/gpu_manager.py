"""The dialect of tkestack's gpu-manager, on /metrics and /metric: what a container uses of each GPU, and its request.

The names are the original's: `container_gpu_memory_total` is memory used, and the label value `total` is the sum over
GPUs. Where a part of a sum is not known, the sum is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from gpumap.agent.dialects.common import ON_SOME_GPU, gpus_by_uuid, granted_mib, leaves_by_uuid, mib, percent, sum_known
from gpumap.model.families import Family, Series
from gpumap.model.grouping import all_known, grouped
from gpumap.model.node import ContainerOnDevice, Device, Gpu, Use
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot, once_per_snapshot
from gpumap.model.terms import ContainerName, Owner

_Rows = list[ContainerOnDevice]
_TOTAL = "total"
_Part = tuple[int | None, float | None]
"""The index of a device's GPU, `None` while NVML does not report it, and what a container uses of the device."""


@once_per_snapshot
def _container_rows(snapshot: Snapshot) -> list[tuple[ContainerName, _Rows]]:
    rows = grouped((row.name, row) for row in snapshot.containers)
    return sorted(rows.items(), key=lambda item: (item[0].container, item[0]))


def _parts(
    rows: _Rows, gpus: Mapping[Uuid, Gpu], leaves: Iterable[Device], value: Callable[[Use], float | None]
) -> Iterator[_Part]:
    """Return what a container uses of each device. The holder of a partitioned GPU has all of its MIG devices."""
    uses = {row.uuid: row.use for row in rows}
    partitioned = {uuid for uuid in uses if (gpu := gpus.get(uuid)) and gpu.partitioned and gpu.uuid == uuid}
    parts = {leaf.uuid for leaf in leaves if leaf.is_leaf and leaf.gpu_uuid in partitioned} if partitioned else set()
    for uuid in sorted((uses.keys() - partitioned) | parts):
        gpu, use = gpus.get(uuid), uses.get(uuid)
        yield gpu.index if gpu is not None else None, value(use) if use is not None else None


def _gpu_numbers(
    parts: Iterable[_Part], convert: Callable[[float], float], is_all: bool
) -> Iterator[tuple[str, float]]:
    """Return the number of each GPU, and the sum of the shown numbers as `total` if these are all GPUs."""
    values_by_index = grouped(parts)
    numbers = {}
    for index, values in values_by_index.items():
        if index is not None and (known := all_known(values)) is not None:
            numbers[f"gpu{index}"] = convert(sum(known))
    yield from sorted(numbers.items())
    if numbers and is_all and len(numbers) == len(values_by_index):
        yield _TOTAL, round(sum(numbers.values()), 9)


def _used(
    name: str, help: str, label: str, value: Callable[[Use], float | None], convert: Callable[[float], float]
) -> Family:
    """Return a family on what containers use, by GPU. `label` names the GPU."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        gpus = gpus_by_uuid(snapshot)
        elsewhere = {slots.name for slots in snapshot.node.unmatched if slots.reason not in ON_SOME_GPU}
        for container, rows in _container_rows(snapshot):
            parts = _parts(rows, gpus, snapshot.node.devices, value)
            for gpu, number in _gpu_numbers(parts, convert, container not in elsewhere):
                labels = (container.container, gpu, container.namespace, snapshot.node.name, container.pod)
                yield Series(labels, number)

    return Family(name, "gauge", help, ("container_name", label, "namespace", "node", "pod_name"), read)


def _requested(
    name: str, help: str, label: str, value: Callable[[_Rows, Mapping[Uuid, Device]], float | None]
) -> Family:
    """Return a family on what containers hold. `value` gets all rows that one container holds."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        leaves = leaves_by_uuid(snapshot)
        elsewhere = {slots.name for slots in snapshot.node.unmatched}
        for container, rows in _container_rows(snapshot):
            if container in elsewhere:
                continue
            held_rows = [row for row in rows if row.holds]
            if held_rows:
                number = value(held_rows, leaves)
            else:  # 0 for a container that uses a device without an assignment
                number = 0 if any(row.owner is Owner.UNASSIGNED for row in rows) else None
            if number is not None:
                labels = (container.container, container.namespace, snapshot.node.name, container.pod, _TOTAL)
                yield Series(labels, number)

    return Family(name, "gauge", help, ("container_name", "namespace", "node", "pod_name", label), read)


FAMILIES = (
    _used("container_gpu_memory_total", "gpu memory usage in MiB", "gpu_memory", lambda use: use.memory_bytes, mib),
    _used("container_gpu_utilization", "gpu utilization", "gpu", lambda use: use.sm_ratio, percent),
    _requested("container_request_gpu_memory", "request of gpu memory in MiB", "req_of_gpu_memory", granted_mib),
    _requested(
        "container_request_gpu_utilization",
        "request of gpu utilization",
        "req_of_gpu",
        lambda rows, leaves: sum_known(row.allocated_gpus for row in rows),
    ),
)
