"""What is granted, and used, of the memory of one GPU: by all, and by each pod. Pure.

All amounts are bytes; a slot of gpushare's is a GiB, or a MiB, of its card. What is not known is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.cli.tables.document import Key, key_of
from gpumap.cli.tables.unknowns import use_known
from gpumap.model.document import Document
from gpumap.model.plugins import gpushare_slot_bytes

GPU_MEM = "aliyun.com/gpu-mem"
MIB, GIB = 1 << 20, 1 << 30
_GIB_SLOTS_MAX = 100
"""Where the card's size is not known: more slots are MiB (gpushare-device-plugin, cmd/inspect/nodeinfo.go, setUnit)."""

PodKey = tuple[str, str]
"""Namespace and name."""


class Amount(NamedTuple):
    """Bytes; where not `whole`, some of it is not known, and there are so many at least."""

    bytes: int = 0
    whole: bool = True


UNKNOWN = Amount(0, whole=False)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. `over`: a pod uses more of it than it was granted. `tells_holders` and `tells_use`: who has no share of it
    holds, or uses, none."""

    index: int
    uuid: str | None
    allocated: Amount
    total: Amount
    used: Amount
    over: bool = False
    tells_holders: bool = False
    tells_use: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """What a pod has of a card; of none that is known, where `index` is `None`. `held`: it was given to it."""

    index: int | None
    held: bool
    allocated: Amount
    used: Amount

    @property
    def over(self) -> bool:
        """It uses more than it was granted, for all that is known of both."""
        return self.allocated.whole and self.used.bytes > self.allocated.bytes


class Counted(NamedTuple):
    """What lies on one GPU, or on a device of none that is known: then there is no `card`.

    `slot_bytes`: of gpushare's slots here; `None` where there are none.
    """

    card: Card | None
    total: Amount
    shares: Mapping[PodKey, Share]
    slot_bytes: int | None


class _Holding(NamedTuple):
    """What a container holds of one device of the GPU, by its number."""

    container: Key
    device: int
    granted: Amount


def sum_of(amounts: Iterable[Amount]) -> Amount:
    total, whole = 0, True
    for amount in amounts:
        total += amount.bytes
        whole = whole and amount.whole
    return Amount(total, whole)


def count(
    index: int | None,
    uuid: str,
    memory: Document | None,
    devices: Sequence[Document],
    *,
    knows_holders: bool,
    sees_processes: bool,
) -> Counted:
    """Count what the devices of one GPU say. `memory` is the GPU's; where it is none, that of the device itself."""
    memory = memory or next((device["memory"] for device in devices if device["uuid"] == uuid), None)
    memory_bytes: int | None = memory["total_bytes"] if memory else None
    slots = sum(slots_in(device["allocatable"]) for device in devices)
    slot_bytes = _slot_bytes(devices, slots, memory_bytes)
    total = _told(memory_bytes)
    if slot_bytes is not None and (slots or memory_bytes is not None):
        total = Amount((slots or (memory_bytes or 0) // slot_bytes) * slot_bytes)
    holdings = [
        _Holding(key_of(row), number, _grant(row, slot_bytes))
        for number, device in enumerate(devices)
        for row in device["holders"]
    ]
    shares = _shares(index, devices, holdings)
    if index is None:
        return Counted(None, total, shares, slot_bytes)
    allocated = _granted(holdings, devices) if knows_holders else UNKNOWN
    used = _told(memory["used_bytes"]) if memory else UNKNOWN
    over = any(share.over for share in shares.values())
    leaves = [device for device in devices if device["mig_profile"] is not None] or devices
    tells_use = sees_processes and all(map(use_known, leaves))
    card = Card(index, uuid, allocated, total, used, over, tells_holders=knows_holders, tells_use=tells_use)
    return Counted(card, total, shares, slot_bytes)


def slots_in(rows: Iterable[Document]) -> int:
    """How many of them are gpushare's."""
    return sum(row["slots"] for row in rows if row["resource"] == GPU_MEM)


def guessed_slot_bytes(slots: int) -> int:
    """Where nothing else tells: by how many there are."""
    return MIB if slots > _GIB_SLOTS_MAX else GIB


def _shares(index: int | None, devices: Sequence[Document], holdings: Iterable[_Holding]) -> dict[PodKey, Share]:
    """By pod, holders first."""
    held: dict[PodKey, list[_Holding]] = {}
    for one in holdings:
        held.setdefault(one.container[:2], []).append(one)
    users: dict[PodKey, list[Document]] = {}
    for device in devices:
        for row in device["users"]:
            users.setdefault(key_of(row)[:2], []).append(row)
    return {key: _share(index, devices, held.get(key, ()), users.get(key, ())) for key in {**held, **users}}


def _share(
    index: int | None, devices: Sequence[Document], holdings: Sequence[_Holding], users: Sequence[Document]
) -> Share:
    used = sum_of(_told(row["memory_bytes"]) for row in users)
    if not {one.container for one in holdings} <= set(map(key_of, users)):
        used = used._replace(whole=False)
    if holdings:
        return Share(index, True, _granted(holdings, devices), used)
    # Who is said to use it without a grant was granted nothing. Of others that do not hold it nobody knows.
    return Share(index, False, Amount() if all(row["unassigned"] for row in users) else UNKNOWN, used)


def _granted(holdings: Iterable[_Holding], devices: Sequence[Document]) -> Amount:
    """What these are granted of the GPU, all in all. Compute instances share the memory of their GPU instance, which
    counts once, whoever else holds part of it."""
    if len(devices) == 1 and not devices[0]["mig_profile"]:
        return sum_of(one.granted for one in holdings)
    instances: dict[int | None, dict[int, list[Amount]]] = {}
    for one in holdings:
        of_instance = instances.setdefault(devices[one.device]["gpu_instance_id"], {})
        of_instance.setdefault(one.device, []).append(one.granted)
    return sum_of(_in_instance(by_device, devices) for by_device in instances.values())


def _in_instance(by_device: Mapping[int, Sequence[Amount]], devices: Sequence[Document]) -> Amount:
    amounts = [sum_of(of_device) for of_device in by_device.values()]
    most = max(one.bytes for one in amounts)
    mig = [devices[number] for number in by_device if devices[number]["mig_profile"] and devices[number]["memory"]]
    is_all = bool(mig) and most >= max(device["memory"]["total_bytes"] for device in mig)
    return Amount(most, is_all or all(one.whole for one in amounts))


def _grant(holder: Document, slot_bytes: int | None) -> Amount:
    slots = slots_in(holder["slots"])
    return Amount(slots * slot_bytes) if slots and slot_bytes else _told(holder["allocated_memory_bytes"])


def _told(value: int | None) -> Amount:
    return UNKNOWN if value is None else Amount(value)


def _slot_bytes(devices: Sequence[Document], offered: int, memory_bytes: int | None) -> int | None:
    """What a slot of gpushare's is on this card: as its grants were counted, else by the card's size, else a guess."""
    holders = [row for device in devices for row in device["holders"] if slots_in(row["slots"])]
    for row in holders:
        if row["allocated_memory_bytes"] is not None and len(row["slots"]) == 1:
            return MIB if row["allocated_memory_bytes"] < GIB * slots_in(row["slots"]) else GIB
    slots = max(offered, sum(slots_in(row["slots"]) for row in holders))
    if not slots:
        return None
    if memory_bytes is not None and offered:
        return gpushare_slot_bytes(offered, memory_bytes)
    return guessed_slot_bytes(slots)
