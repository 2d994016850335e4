"""What is granted, and used, of the memory of one GPU: in all, and by each pod. Pure.

All amounts are bytes. A slot of gpushare is a GiB, or a MiB, of its GPU. What is not known is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumap.model.gaps import use_known
from gpumap.model.grouping import grouped
from gpumap.model.names import ContainerName, Owner
from gpumap.model.node import ContainerOnDevice, Device
from gpumap.model.plugins import gpushare_slot_bytes
from gpumap.model.readings import DeviceMemory

GPU_MEM = "aliyun.com/gpu-mem"
MIB, GIB = 1 << 20, 1 << 30
_GIB_SLOTS_MAX = 100
"""If the size of the GPU is unknown: more slots are MiB (gpushare-device-plugin, cmd/inspect/nodeinfo.go, setUnit)."""

PodKey = tuple[str, str]
"""Namespace and name."""


class Amount(NamedTuple):
    """Bytes; if not `whole`, a part of the amount is unknown, and `bytes` is the least that it can be."""

    bytes: int = 0
    whole: bool = True


UNKNOWN_AMOUNT = Amount(0, whole=False)


@dataclass(frozen=True, slots=True)
class PodShare:
    """What a pod has of a GPU; of an unknown one if `index` is `None`. `held`: it was granted."""

    index: int | None
    held: bool
    allocated: Amount
    used: Amount

    @property
    def over(self) -> bool:
        """It uses more than it was granted, as far as both are known."""
        return self.allocated.whole and self.used.bytes > self.allocated.bytes


@dataclass(frozen=True, slots=True)
class GpuGrants:
    """What is on a GPU, or on a device of an unknown one: then `index` is `None`.

    `holders_known`, `use_known`: a pod without a share of it holds, or uses, nothing of it. `slot_bytes`: size of a
    slot of gpushare here; `None` without such slots.
    """

    index: int | None
    uuid: str | None
    allocated: Amount
    total: Amount
    used: Amount
    holders_known: bool = False
    use_known: bool = False
    shares: Mapping[PodKey, PodShare] = field(default_factory=dict)
    slot_bytes: int | None = None

    @property
    def over(self) -> bool:
        """A pod uses more of it than it was granted."""
        return any(share.over for share in self.shares.values())


class _Grant(NamedTuple):
    """What a container holds of one device of the GPU, by the device's number."""

    container: ContainerName
    device: int
    amount: Amount


def sum_of(amounts: Iterable[Amount]) -> Amount:
    total, whole = 0, True
    for amount in amounts:
        total += amount.bytes
        whole = whole and amount.whole
    return Amount(total, whole)


def count(
    index: int | None,
    uuid: str,
    memory: DeviceMemory | None,
    devices: Sequence[Device],
    *,
    holders_known: bool,
    sees_processes: bool,
) -> GpuGrants:
    """Count the grants and use of one GPU's devices. Without the GPU's own `memory`, that of its device is taken.

    The memory of a partitioned GPU is that of its MIG devices: no container can be assigned the rest.
    """
    memory = memory or next((device.memory for device in devices if device.uuid == uuid), None)
    memory_bytes = memory.total_bytes if memory else None
    slots = sum(device.allocatable.get(GPU_MEM, 0) for device in devices)
    slot_bytes = _slot_bytes(devices, slots, memory_bytes)
    instances = {device.mig.gpu_instance_id: device.memory for device in devices if device.mig}
    if instances:
        total = sum_of(_amount(one.total_bytes if one else None) for one in instances.values())
    else:
        total = _total(memory_bytes, slots, slot_bytes)
    grants = [
        _Grant(holder.name, number, _granted_by(holder, slot_bytes))
        for number, device in enumerate(devices)
        for holder in device.containers
        if holder.holds
    ]
    return GpuGrants(
        index,
        uuid,
        allocated=_granted(grants, devices) if holders_known else UNKNOWN_AMOUNT,
        total=total,
        used=_amount(memory.used_bytes if memory else None),
        holders_known=holders_known,
        use_known=sees_processes and all(map(use_known, [device for device in devices if device.mig] or devices)),
        shares=_shares(index, devices, grants),
        slot_bytes=slot_bytes,
    )


def _total(memory_bytes: int | None, slots: int, slot_bytes: int | None) -> Amount:
    """Return the memory of a GPU; of one that gpushare shares out, whole slots."""
    if slot_bytes is None or (not slots and memory_bytes is None):
        return _amount(memory_bytes)
    return Amount((slots or (memory_bytes or 0) // slot_bytes) * slot_bytes)


# --- sizes of slots ---------------------------------------------------------------------------------------------------


def guessed_slot_bytes(slots: int) -> int:
    """Guess the size of a slot by the number of slots, if nothing else is known."""
    return MIB if slots > _GIB_SLOTS_MAX else GIB


def _slot_bytes(devices: Sequence[Device], offered: int, memory_bytes: int | None) -> int | None:
    """Return the size of gpushare's slots on this GPU: as its grants were counted, else by its memory, else a guess."""
    holders = [one for device in devices for one in device.containers if GPU_MEM in one.slots]
    for holder in holders:
        if holder.allocated_memory_bytes is not None and len(holder.slots) == 1:
            return MIB if holder.allocated_memory_bytes < GIB * holder.slots[GPU_MEM] else GIB
    slots = max(offered, sum(holder.slots[GPU_MEM] for holder in holders))
    if not slots:
        return None
    if memory_bytes is not None and offered:
        return gpushare_slot_bytes(offered, memory_bytes)
    return guessed_slot_bytes(slots)


# --- shares of pods ---------------------------------------------------------------------------------------------------


def _shares(index: int | None, devices: Sequence[Device], grants: Iterable[_Grant]) -> dict[PodKey, PodShare]:
    """Return the shares by pod, holders first."""
    held = grouped((grant.container.pod_name, grant) for grant in grants)
    users = grouped((one.pod_name, one) for device in devices for one in device.containers if one.use)
    return {key: _share(index, devices, held.get(key, ()), users.get(key, ())) for key in {**held, **users}}


def _share(
    index: int | None, devices: Sequence[Device], grants: Sequence[_Grant], users: Sequence[ContainerOnDevice]
) -> PodShare:
    used = sum_of(_amount(user.use.memory_bytes) for user in users if user.use)
    if not {grant.container for grant in grants} <= {user.name for user in users}:
        used = used._replace(whole=False)
    if grants:
        return PodShare(index, True, _granted(grants, devices), used)
    # A pod that is reported to use it without a grant was granted nothing. The grants of other users are unknown.
    return PodShare(
        index, False, Amount() if all(user.owner is Owner.UNASSIGNED for user in users) else UNKNOWN_AMOUNT, used
    )


def _granted(grants: Iterable[_Grant], devices: Sequence[Device]) -> Amount:
    """Return what is granted of the GPU in all.

    Compute instances share the memory of their GPU instance, which counts once for all its holders.
    """
    if len(devices) == 1 and not devices[0].mig:
        return sum_of(grant.amount for grant in grants)
    by_device = grouped((grant.device, grant.amount) for grant in grants)
    instances = grouped(
        (mig.gpu_instance_id if (mig := devices[number].mig) else None, (devices[number], sum_of(amounts)))
        for number, amounts in by_device.items()
    )
    return sum_of(map(_in_instance, instances.values()))


def _in_instance(granted: Sequence[tuple[Device, Amount]]) -> Amount:
    amounts = [amount for _, amount in granted]
    most = max(amount.bytes for amount in amounts)
    totals = [device.memory.total_bytes for device, _ in granted if device.mig and device.memory]
    is_all = bool(totals) and most >= max(totals)
    return Amount(most, is_all or all(amount.whole for amount in amounts))


def _granted_by(holder: ContainerOnDevice, slot_bytes: int | None) -> Amount:
    slots = holder.slots.get(GPU_MEM, 0)
    return Amount(slots * slot_bytes) if slots and slot_bytes else _amount(holder.allocated_memory_bytes)


def _amount(value: int | None) -> Amount:
    return UNKNOWN_AMOUNT if value is None else Amount(value)
