"""The group `accounting`: what gpumap charges to each container, and what it charges to no container."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumap.agent.metrics.allocation import CONTAINER_LABELS, container_labels
from gpumap.model.families import Family, Series
from gpumap.model.node import ContainerAccount
from gpumap.model.snapshot import Snapshot


def _charged(name: str, help: str, value: Callable[[ContainerAccount], float | None]) -> Family:
    """Return a counter of a container on a device. It exists for some minutes after the container ends."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for account in snapshot.node.accounts:
            if (found := value(account)) is not None:
                yield Series(container_labels(account), found)

    return Family(name, "counter", help, CONTAINER_LABELS, read)


def _unattributed(snapshot: Snapshot) -> Iterator[Series]:
    for account in snapshot.node.gpu_accounts:
        if account.energy_unattributed_joules is not None:
            yield Series((account.uuid,), account.energy_unattributed_joules)


ACCOUNTING = (
    _charged(
        "gpumap_container_allocated_gpu_seconds_total",
        "Time that the container held the device, times its share of a GPU.",
        lambda account: account.allocated_gpu_seconds,
    ),
    _charged(
        "gpumap_container_sm_seconds_total",
        "Time that the container's kernels kept the GPU's SMs busy. Its rate() is the mean SM utilization. Absent "
        "on MIG devices.",
        lambda account: account.sm_seconds,
    ),
    _charged(
        "gpumap_container_sm_activity_seconds_total",
        "SM activity of the container, times the device's share of the GPU, integrated over time. Absent if several "
        "containers hold the device.",
        lambda account: account.sm_activity_seconds,
    ),
    _charged(
        "gpumap_container_gpu_memory_byte_seconds_total",
        "GPU memory that the container used, integrated over time.",
        lambda account: account.memory_byte_seconds,
    ),
    _charged(
        "gpumap_container_energy_joules_total",
        "Energy that the GPU used for the container, an estimate. gpumap shares busy energy by SM time and idle energy "
        "by allocation. Absent if SM time is unknown.",
        lambda account: account.energy_joules,
    ),
    Family(
        "gpumap_gpu_energy_unattributed_joules_total",
        "counter",
        "Energy of the GPU that gpumap charged to no container. This counter and the energy of all containers on the "
        "GPU add up to the energy of the GPU.",
        ("gpu_uuid",),
        _unattributed,
    ),
    Family(
        "gpumap_accounting_gap_seconds_total",
        "counter",
        "Time of the GPU that gpumap did not charge because it could not measure.",
        ("gpu_uuid",),
        lambda snapshot: [Series((account.uuid,), account.gap_seconds) for account in snapshot.node.gpu_accounts],
    ),
)
