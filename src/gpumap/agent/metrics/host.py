"""The group `host`: use by processes outside pods. It splits the owner `host` of gpumap_device_*."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumap.model.families import Family, Series
from gpumap.model.node import HostUse
from gpumap.model.snapshot import Snapshot


def _used(name: str, help: str, value: Callable[[HostUse], float | None]) -> Family:
    def read(snapshot: Snapshot) -> Iterator[Series]:
        for leaf in snapshot.node.devices:
            for use in leaf.host:
                if (found := value(use)) is not None:
                    yield Series((use.work.kind, use.work.name, leaf.uuid), found)

    return Family(name, "gauge", help, ("workload_kind", "workload", "uuid"), read)


HOST = (
    _used(
        "gpumap_host_gpu_memory_used_bytes",
        "GPU memory of processes outside pods, by container, job, systemd unit or user.",
        lambda use: use.memory_bytes,
    ),
    _used(
        "gpumap_host_sm_utilization_ratio",
        "Share of time in which the kernels of processes outside pods kept the device's SMs busy (0-1), mean over the "
        "interval.",
        lambda use: use.sm_ratio,
    ),
    _used("gpumap_host_gpu_processes", "Processes outside pods on the device.", lambda use: use.processes),
)
