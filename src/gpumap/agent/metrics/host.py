"""The group `host`: use by processes outside pods. It splits the owner `host` of gpumap_device_*."""

from __future__ import annotations

from gpumap.model.families import Rows

_WORK = Rows(
    ("workload_kind", "workload", "uuid"),
    lambda snapshot: (
        ((use.work.kind, use.work.name, device.uuid), use) for device in snapshot.node.devices for use in device.host
    ),
)

HOST = (
    _WORK.gauge(
        "gpumap_host_gpu_memory_used_bytes",
        "GPU memory of processes outside pods, by container, job, systemd unit or user.",
        lambda use: use.memory_bytes,
    ),
    _WORK.gauge(
        "gpumap_host_sm_utilization_ratio",
        "Share of time in which the kernels of processes outside pods kept the device's SMs busy (0-1), mean over the "
        "interval.",
        lambda use: use.sm_ratio,
    ),
    _WORK.gauge("gpumap_host_gpu_processes", "Processes outside pods on the device.", lambda use: use.processes),
)
