"""The group `accounting`: what gpumap charges to each container, and what it charges to no container."""

from __future__ import annotations

from gpumap.agent.metrics.allocation import CONTAINER_LABELS, container_labels
from gpumap.model.families import Rows

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
