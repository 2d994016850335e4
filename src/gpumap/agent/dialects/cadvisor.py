"""The dialect of cAdvisor's accelerator metrics, which its version 0.47 removed: the same names, labels and units.

The original gave each container the used memory and duty cycle of the whole card. This dialect gives its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumap.agent.dialects.common import gpus_by_uuid, percent
from gpumap.model.families import Family, Series
from gpumap.model.node import ContainerOnDevice, Gpu, Use
from gpumap.model.snapshot import Snapshot, once_per_snapshot

_LABELS = ("acc_id", "container", "make", "model", "namespace", "pod")
"""As client_golang sorts them on the original's page. Its `id`, `image` and `name` are the container runtime's."""


def _series(row: ContainerOnDevice, gpu: Gpu | None, value: float) -> Series:
    name = row.name
    model = gpu.model if gpu is not None else ""
    return Series((row.uuid, name.container, "nvidia", model, name.namespace, name.pod), value)


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
            total = _total_of_gpu(gpu)
        if total is not None:
            yield _series(row, gpu, total)


def _total_of_gpu(gpu: Gpu) -> int | None:
    return gpu.reading.memory.total_bytes if gpu.reading is not None and gpu.reading.memory is not None else None


def _used(value: Callable[[Use], float | None]) -> Callable[[Snapshot], Iterator[Series]]:
    def read(snapshot: Snapshot) -> Iterator[Series]:
        gpus = gpus_by_uuid(snapshot)
        for row in _sorted(snapshot):
            if row.use is not None and (found := value(row.use)) is not None:
                yield _series(row, gpus.get(row.uuid), found)

    return read


@once_per_snapshot
def _sorted(snapshot: Snapshot) -> list[ContainerOnDevice]:
    return sorted(snapshot.containers, key=lambda row: (row.uuid, row.name.container, row.name))


FAMILIES = (
    Family(
        "container_accelerator_duty_cycle",
        "gauge",
        "Percent of time over the past sample period during which the accelerator was actively processing.",
        _LABELS,
        _used(lambda use: None if use.sm_ratio is None else percent(use.sm_ratio)),
    ),
    Family(
        "container_accelerator_memory_total_bytes",
        "gauge",
        "Total accelerator memory.",
        _LABELS,
        _total,
    ),
    Family(
        "container_accelerator_memory_used_bytes",
        "gauge",
        "Total accelerator memory allocated.",
        _LABELS,
        _used(lambda use: use.memory_bytes),
    ),
)
