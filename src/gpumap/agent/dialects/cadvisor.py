"""The dialect of cAdvisor's accelerator metrics, which its version 0.47 removed: the same names, labels and units.

The original gave each container the used memory and duty cycle of the whole card. This dialect gives its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpumap.agent.dialects.common import gpus_by_uuid, percent
from gpumap.model.families import Family, Rows, Series
from gpumap.model.node import ContainerOnDevice, Gpu, Use
from gpumap.model.snapshot import Snapshot, once_per_snapshot

_LABELS = ("acc_id", "container", "make", "model", "namespace", "pod")
"""As client_golang sorts them on the original's page. Its `id`, `image` and `name` are the container runtime's."""


def _labels(row: ContainerOnDevice, gpu: Gpu | None) -> tuple[str, ...]:
    return row.uuid, row.container, "nvidia", gpu.model if gpu is not None else "", row.namespace, row.pod


def _total(snapshot: Snapshot) -> Iterator[Series]:
    """The memory of each device that a container holds or uses.

    The holder of a partitioned GPU has its MIG devices, each with its own memory. If it uses one of them, the GPU
    itself would count them twice.
    """
    gpus = gpus_by_uuid(snapshot)
    totals = {leaf.uuid: leaf.memory.total_bytes for leaf in snapshot.node.devices if leaf.memory is not None}
    on_leaves = {(row.name, gpu.uuid) for row in snapshot.containers if (gpu := gpus.get(row.uuid)) and row.use}
    for row in _sorted(snapshot):
        gpu = gpus.get(row.uuid)
        total = totals.get(row.uuid)
        if total is None and gpu is not None and gpu.uuid == row.uuid and (row.name, gpu.uuid) not in on_leaves:
            total = gpu.reading.memory.total_bytes if gpu.reading and gpu.reading.memory else None
        if total is not None:
            yield Series(_labels(row, gpu), total)


@once_per_snapshot
def _sorted(snapshot: Snapshot) -> list[ContainerOnDevice]:
    return sorted(snapshot.containers, key=lambda row: (row.uuid, row.name.container, row.name))


def _uses(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Use]]:
    gpus = gpus_by_uuid(snapshot)
    return ((_labels(row, gpus.get(row.uuid)), row.use) for row in _sorted(snapshot) if row.use is not None)


_USES = Rows(_LABELS, _uses)
FAMILIES = (
    _USES.gauge(
        "container_accelerator_duty_cycle",
        "Percent of time over the past sample period during which the accelerator was actively processing.",
        lambda use: None if use.sm_ratio is None else percent(use.sm_ratio),
    ),
    Family("container_accelerator_memory_total_bytes", "gauge", "Total accelerator memory.", _LABELS, _total),
    _USES.gauge(
        "container_accelerator_memory_used_bytes", "Total accelerator memory allocated.", lambda use: use.memory_bytes
    ),
)
