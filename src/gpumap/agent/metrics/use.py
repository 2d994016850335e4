"""The groups `use` and `codec`: measurements of containers. Also the series of each process."""

from __future__ import annotations

from gpumap.agent.metrics.allocation import CONTAINER_LABELS, container_labels
from gpumap.model.devices import container_of
from gpumap.model.families import Rows
from gpumap.model.terms import Owner

USES = Rows(
    CONTAINER_LABELS,
    lambda snapshot: ((container_labels(row), row.use) for row in snapshot.containers if row.use is not None),
)
_CONTAINERS = Rows(CONTAINER_LABELS, lambda snapshot: ((container_labels(row), row) for row in snapshot.containers))
_OWNERS = Rows(
    ("uuid", "owner"),
    lambda snapshot: (
        ((device.uuid, use.owner.value), use) for device in snapshot.node.devices for use in device.owners
    ),
)
_PROCESSES = Rows(
    (*CONTAINER_LABELS, "pid", "type"),
    lambda snapshot: (
        ((*container_of(process), process.uuid, str(process.pid), process.type), process)
        for process in snapshot.processes
    ),
)

USE = (
    USES.gauge(
        "gpumap_container_gpu_memory_used_bytes",
        "Used GPU memory of the container on the device, as reported by the driver for each process. With unified "
        "memory, only what was allocated through the driver.",
        lambda use: use.memory_bytes,
    ),
    USES.gauge(
        "gpumap_container_gpu_memory_peak_bytes",
        "Highest GPU memory use since gpumap first saw the container, sampled at the collection interval.",
        lambda use: use.memory_peak_bytes,
    ),
    USES.gauge(
        "gpumap_container_gpu_processes", "Processes of the container on the device.", lambda use: use.processes
    ),
    USES.gauge(
        "gpumap_container_sm_utilization_ratio",
        "Share of time in which the container's kernels kept the device's SMs busy (0-1), mean over the interval.",
        lambda use: use.sm_ratio,
    ),
    USES.gauge(
        "gpumap_container_memory_controller_busy_ratio",
        "Share of time in which the container kept the memory controller busy (0-1), mean over the interval.",
        lambda use: use.memory_controller_busy_ratio,
    ),
    _CONTAINERS.gauge(
        "gpumap_container_unassigned_use",
        "1: the container uses a device that it does not hold.",
        lambda row: 1 if row.owner is Owner.UNASSIGNED else None,
    ),
    _CONTAINERS.gauge(
        "gpumap_container_last_active_timestamp_seconds",
        "Unix time at which the container's pod last worked on any engine of the device, or may have worked. Until "
        "then, when gpumap first saw it. Absent if it is unknown whether it works now.",
        lambda row: row.last_active,
    ),
    _OWNERS.gauge(
        "gpumap_device_memory_used_by_owner_bytes",
        "Used memory of the device, by category of its owner. The sum is gpumap_device_memory_used_bytes, if the "
        "device reports it.",
        lambda use: use.memory_bytes,
    ),
    _OWNERS.gauge(
        "gpumap_device_processes", "Processes on the device, by category of their owner.", lambda use: use.processes
    ),
)

CODEC = (
    USES.gauge(
        "gpumap_container_encoder_utilization_ratio",
        "Share of time in which the container kept the video encoders busy (0-1), mean over the interval.",
        lambda use: use.encoder_ratio,
    ),
    USES.gauge(
        "gpumap_container_decoder_utilization_ratio",
        "Share of time in which the container kept the video decoders busy (0-1), mean over the interval.",
        lambda use: use.decoder_ratio,
    ),
)

PROCESSES = (
    _PROCESSES.gauge(
        "gpumap_process_gpu_memory_used_bytes",
        "Used GPU memory of one process. The pod is empty if the process is in no pod or its pod is unknown.",
        lambda process: process.memory_bytes,
    ),
)


# --- the group host ---------------------------------------------------------------------------------------------------


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


# --- the group accounting ---------------------------------------------------------------------------------------------


_CHARGED = Rows(
    CONTAINER_LABELS, lambda snapshot: ((container_labels(account), account) for account in snapshot.node.accounts)
)
"""The counters of a container on a device. They exist for some minutes after the container ends."""
_OF_GPUS = Rows(("gpu_uuid",), lambda snapshot: (((account.uuid,), account) for account in snapshot.node.gpu_accounts))

ACCOUNTING = (
    _CHARGED.counter(
        "gpumap_container_allocated_gpu_seconds_total",
        "Time that the container held the device, times its share of a GPU.",
        lambda account: account.allocated_gpu_seconds,
    ),
    _CHARGED.counter(
        "gpumap_container_sm_seconds_total",
        "Time that the container's kernels kept the GPU's SMs busy. Its rate() is the mean SM utilization. Absent "
        "on MIG devices.",
        lambda account: account.sm_seconds,
    ),
    _CHARGED.counter(
        "gpumap_container_sm_activity_seconds_total",
        "SM activity of the container, times the device's share of the GPU, integrated over time. Absent if several "
        "containers hold the device.",
        lambda account: account.sm_activity_seconds,
    ),
    _CHARGED.counter(
        "gpumap_container_gpu_memory_byte_seconds_total",
        "GPU memory that the container used, integrated over time.",
        lambda account: account.memory_byte_seconds,
    ),
    _CHARGED.counter(
        "gpumap_container_energy_joules_total",
        "Energy that the GPU used for the container, an estimate. gpumap shares busy energy by SM time and idle energy "
        "by allocation. Absent if SM time is unknown.",
        lambda account: account.energy_joules,
    ),
    _OF_GPUS.counter(
        "gpumap_gpu_energy_unattributed_joules_total",
        "Energy of the GPU that gpumap charged to no container. This counter and the energy of all containers on the "
        "GPU add up to the energy of the GPU.",
        lambda account: account.energy_unattributed_joules,
    ),
    _OF_GPUS.counter(
        "gpumap_accounting_gap_seconds_total",
        "Time of the GPU that gpumap did not charge because it could not measure.",
        lambda account: account.gap_seconds,
    ),
)
