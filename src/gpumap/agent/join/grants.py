"""What a container was granted of a device: a share of the GPU, and bytes of its memory (docs/explanation/sharing.md).

gpumap computes it from ids, plugins' answers and the kubelet's offer. It is absent if these do not determine it.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import NamedTuple

from msgspec import structs

from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.placement import IdsByDevice
from gpumap.agent.join.shares import PlacedShare
from gpumap.model.device_ids import is_gpu
from gpumap.model.grouping import all_known, grouped
from gpumap.model.node import Grant
from gpumap.model.observations import ClaimDevice, DeviceId, PluginAnswer, PreparedDevice
from gpumap.model.plugins import GIB, MIB, Plugin, Unit, gpushare_slot_bytes
from gpumap.model.readings import Uuid
from gpumap.model.terms import ContainerName, PodName

_NUMBER = re.compile("[0-9]{1,9}")
_LIMIT = re.compile(r"([0-9]{1,12})([kmgKMG]?)(?:[iI]?[bB])?")
_LIMIT_BYTES = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB}
_PINNED = re.compile(r"[0-9A-Za-z-]+=([0-9]{1,12})([MG])")
_VCUDA_BLOCK = re.compile(r"vcuda-memory-([0-9]{1,12})-")
_VCUDA_BLOCK_BYTES = 268435456


class Holding(NamedTuple):
    """The ids that a container has of a resource on one device; for a DRA device, its claim."""

    container: ContainerName
    resource: str
    uuid: Uuid
    plugin: Plugin
    ids: tuple[DeviceId, ...]
    ids_anywhere: int
    """Number of ids of that resource, on this device and others."""
    answer: PluginAnswer | None = None
    position: int = 0
    """Position of the device in the plugin's answer."""
    claim: ClaimDevice | None = None
    prepared: PreparedDevice | None = None


class GrantInputs(NamedTuple):
    """What one holding contributes. Empty: it grants no such thing. `None`: it does, and the amount is unknown."""

    gpus: tuple[float | None, ...] = ()
    memory: tuple[int | None, ...] = ()
    is_whole: bool = False
    """It grants all of the device's memory, whatever other holdings grant."""


def grants(
    holdings: Collection[Holding],
    offered: IdsByDevice,
    registered: IdsByDevice,
    inventory: Inventory,
    reservations: Container[PodName] = (),
    scheduled: Iterable[PlacedShare] = (),
) -> dict[tuple[ContainerName, Uuid], Grant]:
    """Compute every container's grant of every device that it holds: of the kubelet, or of a scheduler beside it."""
    by_holder = grouped(((holding.container, holding.uuid), holding) for holding in holdings)
    node = _NodeHoldings(holdings, offered, registered, inventory)
    by_kubelet = {
        holder: Grant(_slots(of_holder), reservation=True)
        if holder[0].pod_name in reservations
        else node.grant(holder[1], of_holder)
        for holder, of_holder in by_holder.items()
    }
    by_scheduler = {share[:2]: _scheduled(share, inventory) for share in scheduled if share.container.container}
    by_kubelet = {**by_scheduler, **by_kubelet}
    by_gpu = grouped((_gpu_uuid(uuid, inventory), grant.gpus or 0.0) for (_, uuid), grant in by_kubelet.items())
    # A sum over 1: the devices of the GPU are offered twice. fsum is exact: ten tenths are 1 in any order.
    totals = {gpu: max(math.fsum(shares), 1.0) for gpu, shares in by_gpu.items()}
    return {
        (name, uuid): grant
        if grant.gpus is None
        else structs.replace(grant, gpus=grant.gpus / totals[_gpu_uuid(uuid, inventory)])
        for (name, uuid), grant in by_kubelet.items()
    }


class _NodeHoldings:
    """All holdings of a node. What one of them grants depends on the others on its device."""

    def __init__(
        self, holdings: Iterable[Holding], offered: IdsByDevice, registered: IdsByDevice, inventory: Inventory
    ) -> None:
        self._inventory = inventory
        self._offered = offered
        self._registered = registered
        held_ids: defaultdict[tuple[Uuid, str], set[DeviceId]] = defaultdict(set)
        self._listed: Counter[tuple[Uuid, str, DeviceId]] = Counter()
        self._exclusive: defaultdict[Uuid, Counter[ContainerName]] = defaultdict(Counter)
        self._leaves_held: set[Uuid] = set()
        """Partitioned GPUs with a MIG device that a container holds."""
        self._claims: defaultdict[Uuid, set[tuple[str, str]]] = defaultdict(set)
        for holding in holdings:
            self._leaves_held.update({_gpu_uuid(holding.uuid, inventory)} - {holding.uuid})
            if holding.plugin.unit is Unit.REPLICA:
                held_ids[holding.uuid, holding.resource].update(holding.ids)
                self._listed.update((holding.uuid, holding.resource, id_) for id_ in holding.ids)
            elif holding.plugin.unit is Unit.DEVICE and not _is_admin(holding) and not _is_share(holding):
                self._exclusive[holding.uuid][holding.container] += 1
                if holding.claim is not None:
                    self._claims[holding.uuid].add((holding.claim.claim_namespace, holding.claim.claim))
        self._counts = {key: self._count(key, ids) for key, ids in held_ids.items()}
        self._by_unit: dict[Unit, Callable[[Holding], GrantInputs]] = {
            Unit.DEVICE: self._device,
            Unit.REPLICA: self._replicas,
            Unit.GPUSHARE: self._gpushare,
            Unit.SPLIT: self._split,
            Unit.CORE: lambda holding: GrantInputs((len(holding.ids) / 100,)),
            Unit.VCUDA_MEMORY: _vcuda_memory,
            Unit.VOLCANO_MEMORY: _volcano_memory,
            Unit.UNKNOWN: lambda _: GrantInputs(),
        }

    def grant(self, uuid: Uuid, of_holder: Sequence[Holding]) -> Grant:
        """Add up what the holdings of one container contribute to its grant of a device."""
        inputs = [self._by_unit[holding.plugin.unit](holding) for holding in of_holder]
        shares = all_known(gpus for granted in inputs for gpus in granted.gpus)
        amounts = all_known(memory for granted in inputs for memory in granted.memory)
        memory_bytes = sum(amounts) if amounts else None  # more than the device has, if the plugin oversubscribes
        if any(granted.is_whole for granted in inputs):
            memory_bytes = _total_bytes(uuid, self._inventory)
        return Grant(
            slots=_slots(of_holder),
            gpus=math.fsum(shares) if shares else None,
            memory_bytes=memory_bytes,
            admin_access=_admin_access(of_holder),
        )

    def _device(self, holding: Holding) -> GrantInputs:
        """Whole; or a share of consumable capacity, with the size in the driver's notes; or nothing."""
        if _is_admin(holding):
            return GrantInputs((0.0,))
        if _is_share(holding):
            # 0 is a share without a memory limit: no memory is granted.
            return GrantInputs((None,), ((holding.prepared.memory_bytes or None) if holding.prepared else None,))
        is_twice = holding.uuid in self._leaves_held
        if len(self._claims.get(holding.uuid, ())) > 1 or (is_twice and holding.claim is not None):
            # All but one of these claims have admin access. Only the API server knows which.
            return GrantInputs((None,))
        sharers = self._exclusive[holding.uuid]
        own_share = _own_share(holding.uuid, self._inventory)
        part_share = own_share / len(sharers) / sharers[holding.container] if own_share is not None else None
        if len(sharers) > 1 or is_twice:
            return GrantInputs((part_share,))  # a shared device grants its memory to none of its holders
        return GrantInputs((part_share,), is_whole=True)

    def _replicas(self, holding: Holding) -> GrantInputs:
        """Their part of all replicas. With MPS also that part of the memory, unless the plugin set a limit (GKE)."""
        key = (holding.uuid, holding.resource)
        count = self._counts[key]
        own_share, total = _own_share(holding.uuid, self._inventory), _total_bytes(holding.uuid, self._inventory)
        replicas = math.fsum(1 / self._listed[(*key, id_)] for id_ in holding.ids)
        share = own_share * replicas / count if own_share is not None and count else None
        envs = _envs(holding)
        memory: tuple[int | None, ...] = ()
        pinned = envs.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
        if pinned is not None:
            limit = _PINNED.fullmatch(pinned)
            memory = (int(limit[1]) * _LIMIT_BYTES[limit[2].lower()] if limit else None,)
        elif "CUDA_MPS_PIPE_DIRECTORY" in envs:
            memory = (int(total * replicas / count) if total is not None and count else None,)
        return GrantInputs((share,), memory)

    def _gpushare(self, holding: Holding) -> GrantInputs:
        """By the slots of the device: those of its ids, otherwise the number in the container's environment."""
        slots = len(holding.ids)
        count = self._count((holding.uuid, holding.resource)) or _digits(_envs(holding).get("ALIYUN_COM_GPU_MEM_DEV"))
        total = _total_bytes(holding.uuid, self._inventory)
        share = slots / count if count else None
        if not count or total is None:
            return GrantInputs((share,), (None,))
        return GrantInputs((share,), (slots * gpushare_slot_bytes(count, total),))

    def _split(self, holding: Holding) -> GrantInputs:
        """By limits of each device, in the answer's order. Only the first has an SM limit (HAMi, plugin/server.go).

        Without an SM limit by memory, which may be scaled beyond that of the card; without both one of the splits.
        """
        own_share, total = _own_share(holding.uuid, self._inventory), _total_bytes(holding.uuid, self._inventory)
        envs = _envs(holding)
        limit = _LIMIT.fullmatch(envs.get(f"CUDA_DEVICE_MEMORY_LIMIT_{holding.position}", ""))
        cores = _digits(envs.get("CUDA_DEVICE_SM_LIMIT") or "0")
        if not is_gpu(holding.uuid) and limit is None and cores == 0:
            return GrantInputs((own_share,), is_whole=True)  # a MIG device that was made for this container
        # 0 is no limit: no memory is granted.
        memory = (int(limit[1]) * _LIMIT_BYTES[limit[2].lower()] or None) if limit else None
        part_share: float | None
        if cores != 0:
            part_share = cores / 100 if cores is not None and holding.position == 0 else None
        elif memory is not None:
            part_share = memory / total if total else None
        else:
            count = self._count((holding.uuid, holding.resource))
            part_share = len(holding.ids) / count if count else None
        return GrantInputs((None if own_share is None or part_share is None else own_share * part_share,), (memory,))

    def _count(self, key: tuple[Uuid, str], held_ids: Collection[DeviceId] = ()) -> int | None:
        """Return how many slots of a resource a device has in total.

        If one that is held is not offered, the plugin reports it as unhealthy: there may be more of them.
        """
        known = self._offered.get(key) or self._registered.get(key)
        return len(known) if known and known.issuperset(held_ids) else None


def _scheduled(share: PlacedShare, inventory: Inventory) -> Grant:
    """Return the grant of a scheduler. It shares a device by memory: each amount gives the other one.

    More memory than the device has is no scheduler's amount, and counts as unknown.
    """
    own_share, total = _own_share(share.uuid, inventory), _total_bytes(share.uuid, inventory)
    gpus, memory = share.gpus, share.memory_bytes
    if memory is not None and total is not None and memory > total:
        memory = None
    if gpus is None and memory is not None and total:
        gpus = memory / total
    if memory is None and gpus is not None and total is not None:
        memory = int(gpus * total)
    return Grant({}, None if gpus is None or own_share is None else own_share * gpus, memory)


def _vcuda_memory(holding: Holding) -> GrantInputs:
    block = _VCUDA_BLOCK.search(holding.ids[0])
    return GrantInputs((), (len(holding.ids) * (int(block[1]) if block else _VCUDA_BLOCK_BYTES),))


def _volcano_memory(holding: Holding) -> GrantInputs:
    """MiB by the factor; otherwise the plugin's total, which is MiB in all versions without a factor."""
    envs = _envs(holding)
    factor, allocated = _digits(envs.get("VOLCANO_GPU_FACTOR")), _digits(envs.get("VOLCANO_GPU_ALLOCATED"))
    if factor is not None:
        return GrantInputs((), (len(holding.ids) * factor * MIB,))
    if allocated is not None:
        return GrantInputs((), (allocated * MIB * len(holding.ids) // holding.ids_anywhere,))
    return GrantInputs((), (None,))


def _envs(holding: Holding) -> dict[str, str]:
    """Return the environment variables of the plugin's answer."""
    return dict(holding.answer.envs) if holding.answer else {}


def _digits(text: str | None) -> int | None:
    """A number as plugins write them into environments; `None` for anything else."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def _is_admin(holding: Holding) -> bool:
    return holding.prepared is not None and holding.prepared.admin_access


def _admin_access(of_holder: Iterable[Holding]) -> bool | None:
    """Only the checkpoint of the DRA driver shows whether a claim has admin access."""
    known = {
        (None if holding.prepared is None else holding.prepared.admin_access) if holding.claim is not None else False
        for holding in of_holder
    }
    return False if False in known else (None if None in known else True)


def _is_share(holding: Holding) -> bool:
    """Kubelets before 1.35 list shares without their ids. The driver's notes have them."""
    share_id = holding.prepared.share_id if holding.prepared else ""
    return bool(share_id) or (holding.claim is not None and bool(holding.claim.share_id))


def _slots(of_holder: Iterable[Holding]) -> dict[str, int]:
    counts: dict[str, set[tuple[DeviceId, str]]] = {}
    for holding in of_holder:
        share = holding.claim.share_id if holding.claim else ""
        counts.setdefault(holding.resource, set()).update((id_, share) for id_ in holding.ids)
    return {resource: len(ids) for resource, ids in sorted(counts.items())}


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
