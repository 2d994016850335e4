"""What a container was granted of a device: a share of the GPU, and bytes of its memory (contract §9).

Computed from ids, plugins' answers and what the kubelet offers; absent where nobody can know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.offers import IdsByDevice
from gpumap.model.device_ids import is_gpu
from gpumap.model.observations import ClaimDevice, ContainerName, DeviceId, PluginAnswer, PreparedDevice
from gpumap.model.plugins import GIB, MIB, Plugin, Unit, gpushare_slot_bytes
from gpumap.model.readings import Uuid

_NUMBER = re.compile("[0-9]{1,9}")
_LIMIT = re.compile(r"([0-9]{1,12})([kmgKMG]?)(?:[iI]?[bB])?")
_LIMIT_BYTES = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB}
_PINNED = re.compile(r"[0-9A-Za-z-]+=([0-9]{1,12})([MG])")
_VCUDA_BLOCK = re.compile(r"vcuda-memory-([0-9]{1,12})-")
_VCUDA_BLOCK_BYTES = 268435456


class Grant(NamedTuple):
    """What one container holds of one device."""

    slots: tuple[tuple[str, int], ...]
    """By resource, sorted."""
    gpus: float | None
    memory_bytes: int | None


class Holding(NamedTuple):
    """The ids that a container has of a resource on one device; for a DRA device, its claim."""

    container: ContainerName
    resource: str
    uuid: Uuid
    plugin: Plugin
    ids: tuple[DeviceId, ...]
    ids_anywhere: int
    """Of that resource, on this device and others."""
    answer: PluginAnswer | None = None
    place: int = 0
    """Which of the devices of the plugin's answer this is."""
    claim: ClaimDevice | None = None
    prepared: PreparedDevice | None = None


class GrantInputs(NamedTuple):
    """What one holding says. Nothing said is empty; `None` is something that nobody can know."""

    gpus: tuple[float | None, ...] = ()
    memory: tuple[int | None, ...] = ()
    is_whole: bool = False
    """All of the device's memory, by however many resources."""


def grants(
    holdings: Collection[Holding], offered: IdsByDevice, registered: IdsByDevice, inventory: Inventory
) -> dict[tuple[ContainerName, Uuid], Grant]:
    """Compute every container's grant of every device that it holds."""
    by_holder: dict[tuple[ContainerName, Uuid], list[Holding]] = {}
    for holding in holdings:
        by_holder.setdefault((holding.container, holding.uuid), []).append(holding)
    computing = _Computing(holdings, offered, registered, inventory)
    stated = {holder: [computing.stated(holding) for holding in of_holder] for holder, of_holder in by_holder.items()}
    shares = {holder: _share([gpus for one in said for gpus in one.gpus]) for holder, said in stated.items()}
    scale = _overcommitment(shares, inventory)
    return {
        holder: Grant(
            slots=_slots(of_holder),
            gpus=_scaled(shares[holder], scale.get(_gpu_uuid(holder[1], inventory), 1.0)),
            memory_bytes=_total_bytes(holder[1], inventory)
            if any(one.is_whole for one in stated[holder])
            else _bytes([memory for one in stated[holder] for memory in one.memory]),
        )
        for holder, of_holder in by_holder.items()
    }


class _Computing:
    """All holdings of a node, by which one of them is weighed."""

    def __init__(
        self, holdings: Iterable[Holding], offered: IdsByDevice, registered: IdsByDevice, inventory: Inventory
    ) -> None:
        self._inventory = inventory
        self._offered = offered
        self._registered = registered
        self._held: dict[tuple[Uuid, str], set[DeviceId]] = {}
        self._listed: dict[tuple[Uuid, str, DeviceId], int] = {}
        self._exclusive: dict[Uuid, dict[ContainerName, int]] = {}
        self._leaves_held: set[Uuid] = set()
        """Partitioned GPUs of which a MIG device is held."""
        self._claims: dict[Uuid, set[tuple[str, str]]] = {}
        for one in holdings:
            self._leaves_held.update({_gpu_uuid(one.uuid, inventory)} - {one.uuid})
            if one.plugin.unit is Unit.REPLICA:
                self._held.setdefault((one.uuid, one.resource), set()).update(one.ids)
                for id_ in one.ids:
                    key = (one.uuid, one.resource, id_)
                    self._listed[key] = self._listed.get(key, 0) + 1
            elif one.plugin.unit is Unit.DEVICE and not _is_admin(one) and not _is_share(one):
                of_device = self._exclusive.setdefault(one.uuid, {})
                of_device[one.container] = of_device.get(one.container, 0) + 1
                if one.claim is not None:
                    claim = (one.claim.claim_namespace, one.claim.claim)
                    self._claims.setdefault(one.uuid, set()).add(claim)
        self._counts = {key: self._count(key, held) for key, held in self._held.items()}
        self._by_unit: dict[Unit, Callable[[Holding], GrantInputs]] = {
            Unit.DEVICE: self._device,
            Unit.REPLICA: self._replicas,
            Unit.GPUSHARE: self._gpushare,
            Unit.SPLIT: self._split,
            Unit.CORE: _cores,
            Unit.VCUDA_MEMORY: _vcuda_memory,
            Unit.VOLCANO_MEMORY: _volcano_memory,
            Unit.UNTOLD: lambda _: GrantInputs(),
        }

    def stated(self, holding: Holding) -> GrantInputs:
        """What a holding says of shares and bytes."""
        return self._by_unit[holding.plugin.unit](holding)

    def _device(self, holding: Holding) -> GrantInputs:
        """Whole, or one share of consumable capacity, whose size only the driver's own notes tell; or nothing."""
        if _is_admin(holding):
            return GrantInputs((0.0,))
        if _is_share(holding):
            # 0 is a share without a limit of its memory: nothing was granted.
            return GrantInputs((None,), ((holding.prepared.memory_bytes or None) if holding.prepared else None,))
        is_twice = holding.uuid in self._leaves_held
        if len(self._claims.get(holding.uuid, ())) > 1 or (is_twice and holding.claim is not None):
            return GrantInputs(
                (None,)
            )  # all but one of these claims have admin access: which, only the API server knows
        sharers = self._exclusive[holding.uuid]
        own = _own_share(holding.uuid, self._inventory)
        part = own / len(sharers) / sharers[holding.container] if own is not None else None
        if len(sharers) > 1 or is_twice:
            return GrantInputs((part,))  # what several share, none of them was granted
        return GrantInputs((part,), is_whole=True)

    def _replicas(self, holding: Holding) -> GrantInputs:
        """Their part of all replicas: with MPS of the memory too, unless the plugin set a limit of its own (GKE's)."""
        key = (holding.uuid, holding.resource)
        count = self._counts[key]
        own, total = _own_share(holding.uuid, self._inventory), _total_bytes(holding.uuid, self._inventory)
        part = math.fsum(1 / self._listed[(*key, id_)] for id_ in holding.ids)
        share = own * part / count if own is not None and count else None
        envs = _envs(holding)
        memory: tuple[int | None, ...] = ()
        pinned = envs.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
        if pinned is not None:
            limit = _PINNED.fullmatch(pinned)
            memory = (int(limit[1]) * _LIMIT_BYTES[limit[2].lower()] if limit else None,)
        elif "CUDA_MPS_PIPE_DIRECTORY" in envs:
            memory = (int(total * part / count) if total is not None and count else None,)
        return GrantInputs((share,), memory)

    def _gpushare(self, holding: Holding) -> GrantInputs:
        """By the card's slots: those of its ids, else as many as the plugin wrote into the container."""
        slots = len(holding.ids)
        told = _number(_envs(holding).get("ALIYUN_COM_GPU_MEM_DEV"))
        count = self._count((holding.uuid, holding.resource)) or told
        total = _total_bytes(holding.uuid, self._inventory)
        share = slots / count if count else None
        if not count or total is None:
            return GrantInputs((share,), (None,))
        return GrantInputs((share,), (slots * gpushare_slot_bytes(count, total),))

    def _split(self, holding: Holding) -> GrantInputs:
        """Limits, device by device, in the answer's order; for the SMs that of the first (HAMi, plugin/server.go)."""
        own = _own_share(holding.uuid, self._inventory)
        envs = _envs(holding)
        limit = _LIMIT.fullmatch(envs.get(f"CUDA_DEVICE_MEMORY_LIMIT_{holding.place}", ""))
        cores = _number(envs.get("CUDA_DEVICE_SM_LIMIT"))
        if not is_gpu(holding.uuid) and limit is None and not envs.get("CUDA_DEVICE_SM_LIMIT"):
            return GrantInputs((own,), is_whole=True)  # a MIG device made for it
        # 0 is no limit: nothing was granted.
        memory = (int(limit[1]) * _LIMIT_BYTES[limit[2].lower()] or None) if limit else None
        if cores is None or own is None:
            return GrantInputs((None,), (memory,))
        if cores == 0:
            count = self._count((holding.uuid, holding.resource))
            return GrantInputs((own * len(holding.ids) / count if count else None,), (memory,))
        return GrantInputs((own * cores / 100 if holding.place == 0 else None,), (memory,))

    def _count(self, key: tuple[Uuid, str], held: Collection[DeviceId] = ()) -> int | None:
        """How many slots of a resource a device has, in all."""
        known = self._offered.get(key) or self._registered.get(key)
        return len(known.union(held) if held else known) if known else None


def _cores(holding: Holding) -> GrantInputs:
    return GrantInputs((len(holding.ids) / 100,))


def _vcuda_memory(holding: Holding) -> GrantInputs:
    block = _VCUDA_BLOCK.search(holding.ids[0])
    return GrantInputs((), (len(holding.ids) * (int(block[1]) if block else _VCUDA_BLOCK_BYTES),))


def _volcano_memory(holding: Holding) -> GrantInputs:
    """MiB by the factor, else what the plugin says of all of them: that is MiB in every version that says no factor."""
    envs = _envs(holding)
    factor, allocated = _number(envs.get("VOLCANO_GPU_FACTOR")), _number(envs.get("VOLCANO_GPU_ALLOCATED"))
    if factor is not None:
        return GrantInputs((), (len(holding.ids) * factor * MIB,))
    if allocated is not None:
        return GrantInputs((), (allocated * MIB * len(holding.ids) // holding.ids_anywhere,))
    return GrantInputs((), (None,))


def _envs(holding: Holding) -> dict[str, str]:
    """The environment that the plugin's answer set."""
    return dict(holding.answer.envs) if holding.answer else {}


def _number(text: str | None) -> int | None:
    """A number as plugins write them into environments; `None` for anything else."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def _is_admin(holding: Holding) -> bool:
    return holding.prepared is not None and holding.prepared.admin_access


def _is_share(holding: Holding) -> bool:
    """Kubelets before 1.35 list shares without their ids; the driver's notes have them."""
    noted = holding.prepared.share_id if holding.prepared else ""
    return bool(noted) or (holding.claim is not None and bool(holding.claim.share_id))


def _overcommitment(
    shares: Mapping[tuple[ContainerName, Uuid], float | None], inventory: Inventory
) -> dict[Uuid, float]:
    """By GPU: what its shares add up to where that is more than the GPU, because it is offered twice (L9)."""
    by_gpu: dict[Uuid, list[float]] = {}
    for (_, uuid), share in shares.items():
        by_gpu.setdefault(_gpu_uuid(uuid, inventory), []).append(share or 0.0)
    # Summed up exactly: ten tenths are no more than one, in whatever order they come.
    return {gpu: total for gpu, of_gpu in by_gpu.items() if (total := math.fsum(of_gpu)) > 1.0}


def _scaled(share: float | None, total: float) -> float | None:
    return None if share is None else share / total


def _slots(of_holder: Iterable[Holding]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, set[tuple[DeviceId, str]]] = {}
    for one in of_holder:
        share = one.claim.share_id if one.claim else ""
        counts.setdefault(one.resource, set()).update((id_, share) for id_ in one.ids)
    return tuple((resource, len(ids)) for resource, ids in sorted(counts.items()))


def _share(said: Iterable[float | None]) -> float | None:
    """The sum of shares, at most one whole; `None` if any of them is not known, or nothing is said."""
    known = list(said)
    total = math.fsum(one for one in known if one is not None)
    return None if not known or None in known else min(total, 1.0)


def _bytes(said: Iterable[int | None]) -> int | None:
    """Likewise; more than the device has where its plugin oversubscribes it."""
    known = list(said)
    total = sum(one for one in known if one is not None)
    return None if not known or None in known else total


def _own_share(uuid: Uuid, inventory: Inventory) -> float | None:
    leaf = inventory.leaves.get(uuid)
    if leaf is not None:
        return leaf.share
    return 1.0 if uuid in inventory.parents or is_gpu(uuid) else None


def _total_bytes(uuid: Uuid, inventory: Inventory) -> int | None:
    leaf = inventory.leaves.get(uuid)
    if leaf is not None:
        return leaf.total_bytes
    parent = inventory.parents.get(uuid)
    return parent.total_bytes if parent else None


def _gpu_uuid(uuid: Uuid, inventory: Inventory) -> Uuid:
    gpu = inventory.gpu_of_leaf.get(uuid)
    return gpu.uuid if gpu else uuid
