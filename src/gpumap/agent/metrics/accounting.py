"""The group `accounting`: what each container is charged for, and what of a GPU no container is charged for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumap.agent.metrics.allocation import CONTAINER_LABELS
from gpumap.model.families import Family, Series
from gpumap.model.snapshot import ContainerAccount, Snapshot


def _charged(name: str, help: str, value: Callable[[ContainerAccount], float | None]) -> Family:
    """Return a counter of a container on a device. It exists for some minutes after the container is gone."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for account in snapshot.accounts:
            if (found := value(account)) is not None:
                yield Series((*account.name, account.uuid), found)

    return Family(name, "counter", help, CONTAINER_LABELS, read)


def _unattributed(snapshot: Snapshot) -> Iterator[Series]:
    for account in snapshot.gpu_accounts:
        if account.energy_unattributed_joules is not None:
            yield Series((account.uuid,), account.energy_unattributed_joules)


ACCOUNTING = (
    _charged(
        "gpumap_container_allocated_gpu_seconds_total",
        "Time that the container held GPUs, times its share of them.",
        lambda account: account.allocated_gpu_seconds,
    ),
    _charged(
        "gpumap_container_sm_seconds_total",
        "Time that the container's kernels kept the device's SMs busy; its rate() is the mean SM utilization.",
        lambda account: account.sm_seconds,
    ),
    _charged(
        "gpumap_container_gpu_memory_byte_seconds_total",
        "GPU memory that the container used, times the time that it used it.",
        lambda account: account.memory_byte_seconds,
    ),
    _charged(
        "gpumap_container_energy_joules_total",
        "An estimate of the energy that the GPU used for the container. The busy part of it is shared by SM time, the "
        "idle part by allocation. Absent if SM time is unknown.",
        lambda account: account.energy_joules,
    ),
    Family(
        "gpumap_gpu_energy_unattributed_joules_total",
        "counter",
        "Energy of the GPU that no container was charged for; with what containers were charged it adds up to the "
        "GPU's.",
        ("uuid",),
        _unattributed,
    ),
    Family(
        "gpumap_accounting_gap_seconds_total",
        "counter",
        "Time of the GPU that nobody was charged for because nothing could be measured.",
        ("uuid",),
        lambda snapshot: [Series((account.uuid,), account.gap_seconds) for account in snapshot.gpu_accounts],
    ),
)
