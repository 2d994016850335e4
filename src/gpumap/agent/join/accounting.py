"""What each container is charged for since the last collection: time held, SM time, memory and energy.

Real time counts, from one good reading of a GPU to the next. What cannot be charged is a gap, or unattributed energy;
with it the energy of containers adds up to the GPU's own, to the millijoule (docs/accounting.md).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.ledger import (
    GPUS_AWAY_MAX,
    KEPT_SECONDS,
    UNSEEN_SECONDS,
    Charge,
    GpuCounters,
    Key,
    Ledger,
    elapsed,
)
from gpumap.model.observations import Moment
from gpumap.model.readings import GpuReading, Uuid
from gpumap.model.snapshot import ContainerOnDevice

SLEEP_SECONDS = 1.0
"""The machine was suspended, rather than its two clocks read a moment apart."""
LATE_SECONDS = 5.0
"""How much later than its time a reading may be in (collect.DEADLINE_SECONDS_MAX): --interval may be as long as
--stale-after, and then each would be too late."""
LAG_SECONDS = 1.0
"""How much longer than another an answer of NVML may be on its way: such time is settled by the next samples."""


class Sight(NamedTuple):
    """What one collection saw of GPUs and containers. `sm` is the SM time of containers where it is known, as a ratio
    of the interval, not cut off at 1."""

    at: Moment
    """When NVML's answer, or its failure, was in."""
    inventory: Inventory
    containers: tuple[ContainerOnDevice, ...]
    sm: Mapping[Key, float]
    list_current: bool


class _Energy(NamedTuple):
    """What a GPU used since the last collection. It can be shared out if the interval is charged, and is measured by
    process."""

    millijoules: int
    reading: GpuReading | None


class ChargedPeriod(NamedTuple):
    """Time that is charged, and what the samples at its end cover of it and of the time before
    (`GpuReading.sampled_seconds`)."""

    seconds: float
    sampled_seconds: float | None


def account(before: Ledger, sight: Sight, stale_after_seconds: float) -> Ledger:
    """Charge the time and energy since the last collection."""
    seconds = _stretch(before.at, sight.at, stale_after_seconds)
    passed = max(elapsed(sight.at) - elapsed(before.at), 0.0) if before.at else 0.0
    readings = {gpu.uuid: gpu.reading for gpu in sight.inventory.gpus}
    books: dict[Uuid, GpuCounters] = {}
    charged: dict[Uuid, ChargedPeriod] = {}
    energies: dict[Uuid, _Energy] = {}
    for uuid in _here(before, sight.inventory):
        book, reading = before.gpus.get(uuid), readings.get(uuid)
        if book is None:
            book = before.away.get(uuid, GpuCounters())._replace(read=False, told=False)
        elif seconds is not None and book.read and reading is not None:
            charged[uuid] = ChargedPeriod(seconds, reading.sampled_seconds)
        else:
            book = book._replace(gap_seconds=book.gap_seconds + passed)
        books[uuid], energies[uuid] = _read_energy(book, reading, shared=uuid in charged)
    shares = _share_out(before.charges, sight, energies)
    attributed = Counter[Uuid]()
    for (_, uuid), millijoules in shares.items():
        attributed[uuid] += millijoules
    for uuid, millijoules in attributed.items():
        left = (books[uuid].unattributed_millijoules or 0) - millijoules
        books[uuid] = books[uuid]._replace(unattributed_millijoules=left)
    gone = {uuid: book for uuid, book in {**before.away, **before.gpus}.items() if uuid not in books}
    return Ledger(
        at=sight.at,
        charges=_charge_all(before.charges, sight, charged, shares, books),
        gpus=books,
        away=dict(itertools.islice(gone.items(), max(len(gone) - GPUS_AWAY_MAX, 0), None)),
    )


def _stretch(before: Moment | None, now: Moment, longest: float) -> float | None:
    """Seconds that can be charged between two collections; `None` where they tell too little of the time between."""
    if before is None or now.asleep - before.asleep > SLEEP_SECONDS:
        return None
    seconds = max(elapsed(now) - elapsed(before), 0.0)
    return seconds if seconds <= longest + LATE_SECONDS else None


def _here(before: Ledger, inventory: Inventory) -> Iterable[Uuid]:
    """The GPUs whose time runs. While NVML is down no GPU is known to have left, nor while one of them may be a GPU
    that has not told its name."""
    known = dict.fromkeys(gpu.uuid for gpu in inventory.known)
    if not inventory.up or inventory.nameless:
        known |= dict.fromkeys(before.gpus)
    return known


def _read_energy(book: GpuCounters, reading: GpuReading | None, *, shared: bool) -> tuple[GpuCounters, _Energy]:
    """Add what the GPU used since its energy was last told to what is unattributed; containers' part goes off it."""
    if reading is None or reading.energy_joules is None:
        return book._replace(read=reading is not None, told=False), _Energy(0, None)
    counter = round(reading.energy_joules * 1000)  # NVML counts millijoules: integers keep sums exact
    used, went_on = 0, False
    if book.counter_millijoules is not None:
        # A counter that went back began anew, as Prometheus's increase() takes it. Since when, and whether it is one
        # that the driver was loaded with, nobody knows: nobody is charged for it.
        went_on = counter >= book.counter_millijoules
        used = counter - book.counter_millijoules if went_on else counter
    after = book._replace(
        unattributed_millijoules=(book.unattributed_millijoules or 0) + used,
        counter_millijoules=counter,
        read=True,
        told=True,
    )
    by_process = shared and book.told and went_on and not reading.partitioned and reading.samples is not None
    return after, _Energy(used, reading if by_process else None)


# --- energy -----------------------------------------------------------------------------------------------------------


def _share_out(charges: Mapping[Key, Charge], sight: Sight, energies: Mapping[Uuid, _Energy]) -> dict[Key, int]:
    """Share each GPU's energy out among the containers on it that were there before, in millijoules."""
    of_gpu: dict[Uuid, list[tuple[Key, float, float]]] = {}
    for row in sight.containers:
        key = row.name, row.uuid
        before, sm = charges.get(key), sight.sm.get(key)
        if before is None or not before.present or before.energy_millijoules is None or sm is None:
            continue
        held = before.allocated_gpus if row.allocated_gpus is not None else None
        of_gpu.setdefault(row.uuid, []).append((key, sm, held or 0.0))
    shares: dict[Key, int] = {}
    for uuid, there in of_gpu.items():
        energy = energies.get(uuid)
        if energy is None or energy.reading is None or not energy.millijoules:
            continue
        total = sum(sample.sm_ratio for sample in energy.reading.samples or ())
        if not total and not _is_idle(energy.reading):
            continue
        left = energy.millijoules
        for key, sm, held in there:
            share = min(int(energy.millijoules * (sm / total if total else held)), left)
            shares[key] = share
            left -= share
    return shares


def _is_idle(reading: GpuReading) -> bool:
    """Whether nobody computes, where no sample tells of anybody. The driver samples no client of an MPS server."""
    if reading.utilization_ratio or reading.processes is None:
        return False
    sampled = {sample.pid for sample in reading.samples or ()}
    return all("M" not in process.types or process.pid in sampled for process in reading.processes)


# --- containers -------------------------------------------------------------------------------------------------------


def _charge_all(
    before: Mapping[Key, Charge],
    sight: Sight,
    charged: Mapping[Uuid, ChargedPeriod],
    shares: Mapping[Key, int],
    books: Mapping[Uuid, GpuCounters],
) -> dict[Key, Charge]:
    """Charge every container that was there at the last collection, and note what those have that are here now."""
    after: dict[Key, Charge] = {}
    for row in sight.containers:
        key = row.name, row.uuid
        charge = before.get(key)
        if charge is None:
            gpu = _gpu_of(row.uuid, sight.inventory)
            if gpu is None:
                continue  # no GPU that NVML ever told: there is nothing to charge
            charge = Charge(gpu)
        charge = _charge(charge, charged.get(charge.gpu), sight.sm.get(key), shares.get(key, 0))
        after[key] = _note(charge, row, sight.sm.get(key), books.get(charge.gpu), sight.at.monotonic)
    known = {gpu.uuid for gpu in sight.inventory.known}
    for key, charge in before.items():
        if key in after:
            continue
        charge = _charge(charge, charged.get(charge.gpu), None, 0)
        # Without NVML the List alone tells who holds a GPU that is known; who only uses one is not seen.
        gone = sight.list_current and (
            sight.inventory.up or (charge.allocated_gpu_seconds is not None and charge.gpu in known)
        )
        if sight.at.monotonic - charge.seen_at < (KEPT_SECONDS if gone else UNSEEN_SECONDS):
            after[key] = charge._replace(present=False, allocated_gpus=None, memory_bytes=None, unsettled_seconds=0.0)
    return after


def _gpu_of(uuid: Uuid, inventory: Inventory) -> Uuid | None:
    gpu = inventory.gpu_of_leaf.get(uuid) or inventory.parents.get(uuid)
    return gpu.uuid if gpu else None


def _charge(charge: Charge, stretch: ChargedPeriod | None, sm: float | None, millijoules: int) -> Charge:
    """Charge a stretch: shares and memory as they were when it began, SM and energy as they were measured over it."""
    if not charge.present or stretch is None:
        return charge._replace(unsettled_seconds=0.0) if charge.unsettled_seconds else charge
    seconds = stretch.seconds
    settled, unsettled = _settle(charge.unsettled_seconds + seconds, stretch.sampled_seconds)
    energy = charge.energy_millijoules
    return Charge(  # three times as fast as _replace
        charge.gpu,
        _add(charge.allocated_gpu_seconds, charge.allocated_gpus, seconds),
        _add(charge.sm_seconds, min(sm, 1.0) if sm is not None else None, settled),
        _add(charge.memory_byte_seconds, charge.memory_bytes, seconds),
        energy + millijoules if energy is not None else None,
        charge.present,
        charge.allocated_gpus,
        charge.memory_bytes,
        charge.seen_at,
        unsettled,
    )


def _settle(seconds: float, sampled_seconds: float | None) -> tuple[float, float]:
    """What samples settle of the time that is not settled yet, and what is left for the next.

    Those of a reading before its time, which are told once more by the next one, settle nothing. Others settle what
    they cover: the rest was never sampled, but for what is a matter of when their answer came.
    """
    if sampled_seconds is None:
        return seconds, 0.0
    if sampled_seconds <= 0:
        return 0.0, seconds
    settled = min(seconds, sampled_seconds)
    return settled, min(seconds - settled, LAG_SECONDS)


def _add(total: float | None, rate: float | None, seconds: float) -> float | None:
    return total if total is None or rate is None else total + rate * seconds


def _note(charge: Charge, row: ContainerOnDevice, sm: float | None, book: GpuCounters | None, at: float) -> Charge:
    """Note what a container has now. A counter begins at 0 when its measure is first known, so that a scraper sees all
    of its increase."""
    memory_bytes = row.use.memory_bytes if row.use else None
    tells_energy = sm is not None and book is not None and book.counter_millijoules is not None
    return Charge(
        charge.gpu,
        _begun(charge.allocated_gpu_seconds, row.allocated_gpus is not None),
        _begun(charge.sm_seconds, sm is not None),
        _begun(charge.memory_byte_seconds, memory_bytes is not None),
        0 if charge.energy_millijoules is None and tells_energy else charge.energy_millijoules,
        True,
        row.allocated_gpus,
        memory_bytes,
        at,
        charge.unsettled_seconds,
    )


def _begun(total: float | None, known: bool) -> float | None:
    return 0.0 if total is None and known else total
