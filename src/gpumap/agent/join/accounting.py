"""What each container is charged for since the last collection: time held, SM time, memory and energy.

Real time counts, from one good reading of a GPU to the next. Time that gpumap cannot charge is a gap. Energy that it
cannot charge is unattributed; with it, the energy of the containers adds up to the energy of the GPU, to the millijoule
(docs/explanation/accounting.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct, structs

from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.settings import (
    CLOCKS_APART_SECONDS,
    GPUS_AWAY_MAX,
    KEPT_SECONDS,
    LATE_SECONDS,
    UNSEEN_SECONDS,
    JoinSettings,
)
from gpumap.model.node import ContainerAccount, ContainerOnDevice, GpuAccount
from gpumap.model.observations import Moment
from gpumap.model.readings import GpuReading, Uuid
from gpumap.model.terms import ContainerName

Key = tuple[ContainerName, Uuid]
"""A container and a device."""


class Charge(Struct, frozen=True):
    """A container's counters on a leaf (or on a partitioned GPU that it holds whole), and its last known state.

    A counter is `None` until its value was known once. Then it exists and never decreases.
    """

    gpu: Uuid
    allocated_gpu_seconds: float | None = None
    sm_seconds: float | None = None
    sm_activity_seconds: float | None = None
    memory_byte_seconds: float | None = None
    energy_millijoules: int | None = None
    present: bool = False
    """Whether it was present at the last collection. If not, it is not charged for the time since then."""
    allocated_gpus: float | None = None
    memory_bytes: int | None = None
    seen_at: float = 0.0
    """Monotonic time at which it was last present."""
    unsettled_seconds: float = 0.0
    """Charged time that no samples have covered yet."""


class GpuCounters(Struct, frozen=True):
    """Energy and time of a GPU that no container was charged for."""

    gap_seconds: float = 0.0
    unattributed_millijoules: int | None = None
    """`None` until the GPU reported its energy once."""
    counter_millijoules: int | None = None
    """The driver's counter when it was last read."""
    read: bool = False
    """Whether the GPU was read at the last collection."""
    energy_read: bool = False
    """Whether its energy was read then."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """All counters of accounting. Time until `moment` is charged or a gap; `None` before the first collection."""

    moment: Moment | None = None
    charges: Mapping[Key, Charge] = field(default_factory=dict)
    gpus: Mapping[Uuid, GpuCounters] = field(default_factory=dict)
    away: Mapping[Uuid, GpuCounters] = field(default_factory=dict)
    """GPUs that NVML no longer lists; they are not shown. If one comes back, its counters continue."""


def container_accounts(ledger: Ledger) -> Iterator[ContainerAccount]:
    """Return each container's counters, sorted."""
    for (name, uuid), charge in sorted(ledger.charges.items()):
        yield ContainerAccount(
            *name,
            uuid,
            charge.allocated_gpu_seconds,
            charge.sm_seconds,
            charge.memory_byte_seconds,
            _joules(charge.energy_millijoules),
            charge.sm_activity_seconds,
        )


def gpu_accounts(ledger: Ledger) -> Iterator[GpuAccount]:
    """Return the uncharged energy and time of each GPU, sorted."""
    for uuid, counters in sorted(ledger.gpus.items()):
        yield GpuAccount(uuid, _joules(counters.unattributed_millijoules), counters.gap_seconds)


def _joules(millijoules: int | None) -> float | None:
    """Convert as the worker does: below 10^15 millijoules the text on the page is exact."""
    return None if millijoules is None else millijoules / 1000


LAG_SECONDS = 1.0
"""How much longer one answer of NVML may take than another. The next samples settle that time."""
WATTS_MAX = 10_000.0
"""More than any GPU draws. It counts if the driver reports no power limit."""
PEAK = 2.0
"""How far a GPU may exceed its power limit for a moment."""


class Measurements(NamedTuple):
    """The inputs of one collection. `sm_ratios` are the known SM ratios of containers, which may exceed 1.
    `sm_activities` are their known SM activities, as shares of the GPU."""

    moment: Moment
    """When NVML's answer or failure arrived."""
    inventory: Inventory
    containers: tuple[ContainerOnDevice, ...]
    sm_ratios: Mapping[Key, float]
    sm_activities: Mapping[Key, float]
    list_current: bool


class _Energy(NamedTuple):
    """What a GPU used since the last collection. `reading` is `None` if gpumap cannot divide it among containers."""

    millijoules: int
    reading: GpuReading | None


class ChargedPeriod(NamedTuple):
    """Time to charge, and how much time the samples at its end cover (`GpuReading.sampled_seconds`)."""

    seconds: float
    sampled_seconds: float | None


def account(previous: Ledger, measured: Measurements, settings: JoinSettings) -> Ledger:
    """Charge the time and energy since the last collection."""
    moment = measured.moment
    passed = max(moment.since(previous.moment or moment), 0.0)
    has_slept = previous.moment is not None and moment.asleep - previous.moment.asleep > CLOCKS_APART_SECONDS
    is_chargeable = previous.moment is not None and not has_slept and not settings.is_gap(previous.moment, moment)
    readings = {gpu.uuid: gpu.reading for gpu in measured.inventory.gpus}
    gpus: dict[Uuid, GpuCounters] = {}
    periods: dict[Uuid, ChargedPeriod] = {}
    energies: dict[Uuid, _Energy] = {}
    for uuid in _present_gpus(previous, measured.inventory):
        counters, reading = previous.gpus.get(uuid), readings.get(uuid)
        if counters is None:
            counters = structs.replace(previous.away.get(uuid, GpuCounters()), read=False, energy_read=False)
        elif is_chargeable and counters.read and reading is not None:
            periods[uuid] = ChargedPeriod(passed, reading.sampled_seconds)
        else:
            counters = structs.replace(counters, gap_seconds=counters.gap_seconds + passed)
        gpus[uuid], energies[uuid] = _read_energy(counters, reading, periods.get(uuid))
    shares = _energy_shares(previous.charges, measured, energies)
    for (_, uuid), millijoules in shares.items():
        remaining_millijoules = (gpus[uuid].unattributed_millijoules or 0) - millijoules
        gpus[uuid] = structs.replace(gpus[uuid], unattributed_millijoules=remaining_millijoules)
    away = {uuid: counters for uuid, counters in {**previous.away, **previous.gpus}.items() if uuid not in gpus}
    return Ledger(
        moment=moment,
        charges=_charge_all(previous.charges, measured, periods, shares, gpus),
        gpus=gpus,
        away=dict(itertools.islice(away.items(), max(len(away) - GPUS_AWAY_MAX, 0), None)),
    )


def _present_gpus(previous: Ledger, inventory: Inventory) -> Iterable[Uuid]:
    """Return the GPUs that are present. While NVML is down, or a GPU has no name, every earlier GPU may be present."""
    known = dict.fromkeys(gpu.uuid for gpu in inventory.known)
    if not inventory.up or inventory.nameless:
        known |= dict.fromkeys(previous.gpus)
    return known


def _read_energy(
    counters: GpuCounters, reading: GpuReading | None, period: ChargedPeriod | None
) -> tuple[GpuCounters, _Energy]:
    """Add the GPU's energy since its last reading to the unattributed energy. `account` subtracts the shares."""
    if reading is None or reading.energy_joules is None:
        return structs.replace(counters, read=reading is not None, energy_read=False), _Energy(0, None)
    counter = round(reading.energy_joules * 1000)  # NVML counts millijoules: integers keep sums exact
    used, continued = 0, False
    if counters.counter_millijoules is not None:
        # A counter that decreased restarted at 0, as Prometheus's increase() assumes. When it restarted is unknown, and
        # so is whether the driver was reloaded: no container is charged for it.
        continued = counter >= counters.counter_millijoules
        used = counter - counters.counter_millijoules if continued else counter
    after = structs.replace(
        counters,
        unattributed_millijoules=(counters.unattributed_millijoules or 0) + used,
        counter_millijoules=counter,
        read=True,
        energy_read=True,
    )
    limit_watts = max([reading.power_limit_watts or 0.0, *reading.power_limits_watts.values()]) or WATTS_MAX
    # If the GPU cannot draw so much in this period, its counter fell before and returned.
    can_draw = period is not None and used <= 1000 * limit_watts * PEAK * (period.seconds + LATE_SECONDS)
    is_known = counters.energy_read and continued and can_draw
    has_samples = not reading.partitioned and reading.samples is not None
    return after, _Energy(used, reading if is_known and has_samples else None)


# --- energy -----------------------------------------------------------------------------------------------------------


_Sharer = tuple[Key, float, float]
"""A container that may get a part of a GPU's energy, with its SM ratio and the share that it holds."""


def _energy_shares(
    charges: Mapping[Key, Charge], measured: Measurements, energies: Mapping[Uuid, _Energy]
) -> dict[Key, int]:
    """Divide the energy of each GPU among the containers that were on it before, in millijoules."""
    sharers: dict[Uuid, list[_Sharer]] = {}
    for row in measured.containers:
        key = row.name, row.uuid
        previous, sm_ratio = charges.get(key), measured.sm_ratios.get(key)
        if previous and previous.present and previous.energy_millijoules is not None and sm_ratio is not None:
            allocated_gpus = previous.allocated_gpus if row.allocated_gpus is not None else None
            sharers.setdefault(row.uuid, []).append((key, sm_ratio, allocated_gpus or 0.0))
    shares: dict[Key, int] = {}
    for uuid, of_gpu in sharers.items():
        energy = energies.get(uuid)
        if energy is not None and energy.reading is not None and energy.millijoules:
            shares.update(_divide(energy.millijoules, energy.reading, of_gpu))
    return shares


def _divide(millijoules: int, reading: GpuReading, sharers: Iterable[_Sharer]) -> Iterator[tuple[Key, int]]:
    """Divide the busy part by SM time, and the idle part by the shares held. Together at most all of it."""
    total = sum(sample.sm_ratio for sample in reading.samples or ())
    idle = max(1.0 - total, 0.0) if _all_sm_known(reading, total) else 0.0
    remaining_millijoules = millijoules
    for key, sm_ratio, allocated in sharers:
        share = min(int(millijoules * (sm_ratio / max(total, 1.0) + idle * allocated)), remaining_millijoules)
        yield key, share
        remaining_millijoules -= share


def _all_sm_known(reading: GpuReading, total: float) -> bool:
    """Whether no process computes without a sample. The driver samples no client of an MPS server."""
    if reading.processes is None or (reading.utilization_ratio and not total):
        return False
    sampled = {sample.pid for sample in reading.samples or ()}
    unknown = {process.pid for process in reading.processes if "M" in process.types or process.pid in reading.unsampled}
    return unknown <= sampled


# --- containers -------------------------------------------------------------------------------------------------------


def _charge_all(
    previous: Mapping[Key, Charge],
    measured: Measurements,
    periods: Mapping[Uuid, ChargedPeriod],
    shares: Mapping[Key, int],
    gpus: Mapping[Uuid, GpuCounters],
) -> dict[Key, Charge]:
    """Charge every container that was present at the last collection, and note the state of those present now."""
    after: dict[Key, Charge] = {}
    for row in measured.containers:
        key = row.name, row.uuid
        charge = previous.get(key)
        if charge is None:
            known_gpu = measured.inventory.gpu_of_leaf.get(row.uuid) or measured.inventory.parents.get(row.uuid)
            if known_gpu is None:
                continue  # NVML never listed this GPU: there is nothing to charge
            charge = Charge(known_gpu.uuid)
        sm_ratio, sm_activity = measured.sm_ratios.get(key), measured.sm_activities.get(key)
        charge = _charge(charge, periods.get(charge.gpu), sm_ratio, sm_activity, shares.get(key, 0))
        after[key] = _update_state(charge, row, sm_ratio, sm_activity, gpus.get(charge.gpu), measured.moment.monotonic)
    known = {gpu.uuid for gpu in measured.inventory.known}
    for key, charge in previous.items():
        if key in after:
            continue
        charge = _charge(charge, periods.get(charge.gpu), None, None, 0)
        # Without NVML, the List shows the holders of known GPUs, but no containers that only use one.
        ended = measured.list_current and (
            measured.inventory.up or (charge.allocated_gpu_seconds is not None and charge.gpu in known)
        )
        if measured.moment.monotonic - charge.seen_at < (KEPT_SECONDS if ended else UNSEEN_SECONDS):
            after[key] = structs.replace(
                charge, present=False, allocated_gpus=None, memory_bytes=None, unsettled_seconds=0.0
            )
    return after


def _charge(
    charge: Charge, period: ChargedPeriod | None, sm_ratio: float | None, sm_activity: float | None, millijoules: int
) -> Charge:
    """Charge a period: share and memory as they were at its start, SM time and energy as measured during it."""
    if not charge.present or period is None:
        return structs.replace(charge, unsettled_seconds=0.0) if charge.unsettled_seconds else charge
    seconds = period.seconds
    settled, unsettled = _settle(charge.unsettled_seconds + seconds, period.sampled_seconds)
    energy = charge.energy_millijoules
    return structs.replace(
        charge,
        allocated_gpu_seconds=_add(charge.allocated_gpu_seconds, charge.allocated_gpus, seconds),
        sm_seconds=_add(charge.sm_seconds, min(sm_ratio, 1.0) if sm_ratio is not None else None, settled),
        sm_activity_seconds=_add(charge.sm_activity_seconds, sm_activity, seconds),
        memory_byte_seconds=_add(charge.memory_byte_seconds, charge.memory_bytes, seconds),
        energy_millijoules=energy + millijoules if energy is not None else None,
        unsettled_seconds=unsettled,
    )


def _settle(seconds: float, sampled_seconds: float | None) -> tuple[float, float]:
    """Return how much of the unsettled time the samples settle, and what remains for the next samples.

    Samples of a reading that came early settle nothing: the next reading has them again. Others settle the time that
    they cover. The rest was never sampled, except for the time by which answers arrive earlier or later.
    """
    if sampled_seconds is None:
        return seconds, 0.0
    if sampled_seconds <= 0:
        return 0.0, seconds
    settled = min(seconds, sampled_seconds)
    return settled, min(seconds - settled, LAG_SECONDS)


def _add(total: float | None, rate: float | None, seconds: float) -> float | None:
    return total if total is None or rate is None else total + rate * seconds


def _update_state(
    charge: Charge,
    row: ContainerOnDevice,
    sm_ratio: float | None,
    sm_activity: float | None,
    gpu: GpuCounters | None,
    timestamp: float,
) -> Charge:
    """Note a container's present state. A counter starts at 0 when its value is first known: a scraper then sees its
    whole increase."""
    memory_bytes = row.use.memory_bytes if row.use else None
    gpus = row.allocated_gpus
    has_energy = sm_ratio is not None and gpu is not None and gpu.counter_millijoules is not None
    return structs.replace(
        charge,
        allocated_gpu_seconds=_started(charge.allocated_gpu_seconds, gpus is not None),
        sm_seconds=_started(charge.sm_seconds, sm_ratio is not None),
        sm_activity_seconds=_started(charge.sm_activity_seconds, sm_activity is not None),
        memory_byte_seconds=_started(charge.memory_byte_seconds, memory_bytes is not None),
        energy_millijoules=0 if charge.energy_millijoules is None and has_energy else charge.energy_millijoules,
        present=True,
        allocated_gpus=gpus,
        memory_bytes=memory_bytes,
        seen_at=timestamp,
    )


def _started(total: float | None, known: bool) -> float | None:
    return 0.0 if total is None and known else total
