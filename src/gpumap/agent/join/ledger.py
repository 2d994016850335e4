"""What has been charged so far: a book for each (container, leaf) and each GPU, as frozen values; how it is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumap.model.observations import ContainerName, Moment
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import ContainerAccount, GpuAccount

Key = tuple[ContainerName, Uuid]
"""A container and a device."""

KEPT_SECONDS = 300.0
"""How long what is remembered of a container stands after it was last seen (contract §3): peak, accounts, XIDs."""
UNSEEN_SECONDS = 3600.0
"""How long its counters stand where nobody can tell that it is gone: an outage of the kubelet or of NVML may last."""
GPUS_AWAY_MAX = 64
"""GPUs that are not on the node, and may come back: as many are remembered."""


class Charge(NamedTuple):
    """A container's counters on a leaf (or on a partitioned GPU that it holds whole), and what it had when last read.

    A counter is `None` until its measure was known once; then it stands, and never goes back.
    """

    gpu: Uuid
    allocated_gpu_seconds: float | None = None
    sm_seconds: float | None = None
    memory_byte_seconds: float | None = None
    energy_millijoules: int | None = None
    present: bool = False
    """Whether it was there at the last collection: else the stretch that begins then is not charged to it."""
    allocated_gpus: float | None = None
    memory_bytes: int | None = None
    seen_at: float = 0.0
    """Monotonic: when it was last there."""
    unsettled_seconds: float = 0.0
    """Time that was charged, and of which no samples have told the SM time yet."""


class GpuCounters(NamedTuple):
    """A GPU's energy and time that nobody was charged for."""

    gap_seconds: float = 0.0
    unattributed_millijoules: int | None = None
    """`None` until the GPU told its energy once."""
    counter_millijoules: int | None = None
    """The driver's counter when it was last told."""
    read: bool = False
    """Whether the GPU was read at the last collection."""
    told: bool = False
    """Whether its energy was."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """All books. `at` is until when time has been charged, or counted as a gap; `None` before the first collection."""

    at: Moment | None = None
    charges: Mapping[Key, Charge] = field(default_factory=dict)
    gpus: Mapping[Uuid, GpuCounters] = field(default_factory=dict)
    away: Mapping[Uuid, GpuCounters] = field(default_factory=dict)
    """Of GPUs that NVML has no more: not shown. One that comes back goes on, as the driver's counter may."""


def elapsed(moment: Moment) -> float:
    """Seconds of a clock that goes on while the machine sleeps."""
    return moment.monotonic + moment.asleep


def container_accounts(ledger: Ledger) -> Iterator[ContainerAccount]:
    """Each container's counters, sorted."""
    for (name, uuid), charge in sorted(ledger.charges.items()):
        yield ContainerAccount(
            name,
            uuid,
            charge.allocated_gpu_seconds,
            charge.sm_seconds,
            charge.memory_byte_seconds,
            _joules(charge.energy_millijoules),
        )


def gpu_accounts(ledger: Ledger) -> Iterator[GpuAccount]:
    """What nobody was charged for, by GPU, sorted."""
    for uuid, book in sorted(ledger.gpus.items()):
        yield GpuAccount(uuid, _joules(book.unattributed_millijoules), book.gap_seconds)


def _joules(millijoules: int | None) -> float | None:
    """As the worker makes joules of NVML's millijoules: below 10^15 of them the text on the page is exact."""
    return None if millijoules is None else millijoules / 1000
