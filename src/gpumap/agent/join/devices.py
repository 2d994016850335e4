"""The leaves of the snapshot: what NVML measured, what the kubelet offers and gave away, and whose the memory is."""

from __future__ import annotations

from collections.abc import Mapping

from gpumap.agent.join.allocation import Allocation
from gpumap.agent.join.attribution import Attributed, Attribution
from gpumap.agent.join.inventory import Inventory, KnownGpu, KnownLeaf
from gpumap.agent.join.usage import OwnerInputs, owner_uses
from gpumap.model.readings import DeviceMemory, GpuProcess, MigInstance, Uuid
from gpumap.model.snapshot import Gpu, Leaf


def processes_by_leaf(inventory: Inventory) -> dict[Uuid, tuple[GpuProcess, ...]]:
    """NVML's processes on each leaf that lists them."""
    found: dict[Uuid, tuple[GpuProcess, ...]] = {}
    for gpu in inventory.gpus:
        if gpu.reading is None:
            continue
        if gpu.partitioned:
            found.update({one.uuid: one.processes for one in gpu.reading.instances if one.processes is not None})
        elif gpu.reading.processes is not None:
            found[gpu.uuid] = gpu.reading.processes
    return found


def ever_offered(
    before: frozenset[tuple[Uuid, str]], allocation: Allocation, inventory: Inventory
) -> frozenset[tuple[Uuid, str]]:
    """Add what is offered or held now to what ever was, as long as its device is here."""
    now = {(uuid, resource) for uuid, rows in (allocation.offer.slots or {}).items() for resource, _ in rows}
    everything = before | now | allocation.named
    if not inventory.up or everything == before:
        return before if everything == before else frozenset(everything)
    return frozenset(pair for pair in everything if pair[0] in inventory.leaves or pair[0] in inventory.parents)


def leaves(
    inventory: Inventory,
    allocation: Allocation,
    attribution: Attribution,
    offered: frozenset[tuple[Uuid, str]],
    grounds: OwnerInputs,
) -> tuple[Leaf, ...]:
    """Make every leaf of the node, and the devices that only the kubelet names."""
    made: dict[Uuid, Leaf] = {}
    known_by_uuid = {known.uuid: known for known in inventory.known}
    for gpu in inventory.gpus:
        known = known_by_uuid[gpu.uuid]
        for leaf in known.leaves:
            if inventory.gpu_of_leaf[leaf.uuid] is not known or leaf.uuid in made:
                continue  # a driver that gives two devices one name: a name has one series
            instance, memory = _leaf_parts(gpu, leaf)
            on_leaf = attribution.by_leaf.get(leaf.uuid)
            siblings = _siblings(known, leaf, attribution) if grounds.visible else ()
            made[leaf.uuid] = Leaf(
                uuid=leaf.uuid,
                gpu=gpu,
                instance=instance,
                memory=memory,
                holders=_holders(leaf.uuid, allocation, grounds),
                allocatable=_allocatable(leaf, inventory, allocation, offered),
                owners=owner_uses(memory, on_leaf, siblings, grounds) if gpu.reading else (),
            )
    offered_now = allocation.offer.slots or {}
    for uuid in {*allocation.holders, *offered_now} - made.keys():
        holders = _holders(uuid, allocation, grounds)
        made[uuid] = Leaf(uuid, None, holders=holders, allocatable=offered_now.get(uuid, ()))
    return tuple(sorted(made.values(), key=lambda leaf: (leaf.gpu.index if leaf.gpu else 1 << 30, leaf.uuid)))


def _holders(uuid: Uuid, allocation: Allocation, grounds: OwnerInputs) -> int | None:
    return len(allocation.holders.get(uuid, ())) if grounds.list_served else None


def _leaf_parts(gpu: Gpu, leaf: KnownLeaf) -> tuple[MigInstance | None, DeviceMemory | None]:
    """The MIG instance that a leaf is, and its memory. A lost GPU's instances keep their identity alone."""
    if not gpu.partitioned:
        return None, gpu.reading.memory if gpu.reading else None
    for instance in gpu.reading.instances if gpu.reading else ():
        if instance.uuid == leaf.uuid:
            return instance, instance.memory
    identity = MigInstance(
        leaf.uuid, leaf.gpu_instance_id or 0, leaf.compute_instance_id or 0, leaf.profile, None, None, None
    )
    return identity, None


def _siblings(gpu: KnownGpu, leaf: KnownLeaf, attribution: Attribution) -> tuple[Attributed, ...]:
    """Processes of the other compute instances in the same GPU instance: they share its memory."""
    if leaf.gpu_instance_id is None:
        return ()
    return tuple(
        item
        for other in gpu.leaves
        if other.gpu_instance_id == leaf.gpu_instance_id and other.uuid != leaf.uuid
        if (on_leaf := attribution.by_leaf.get(other.uuid))
        for item in on_leaf.attributed
    )


def _allocatable(
    leaf: KnownLeaf, inventory: Inventory, allocation: Allocation, offered: frozenset[tuple[Uuid, str]]
) -> tuple[tuple[str, int], ...]:
    """Slots by resource. One that was offered here before, or is on all other leaves of this kind, counts 0 where it is
    not: its plugin calls the device unhealthy."""
    slots = allocation.offer.slots
    if slots is None:
        return ()
    rows = dict(slots.get(leaf.uuid, ()))
    resources = {resource for uuid, resource in offered if uuid == leaf.uuid}
    if not resources and not rows:
        resources = set(_resources_of_all_others(leaf, inventory, allocation, slots))
    still = {resource for found in slots.values() for resource, _ in found}
    return tuple(sorted({**dict.fromkeys(resources & still, 0), **rows}.items()))


def _resources_of_all_others(
    leaf: KnownLeaf, inventory: Inventory, allocation: Allocation, slots: Mapping[Uuid, tuple[tuple[str, int], ...]]
) -> frozenset[str]:
    """What leaves of a leaf's kind are offered as, if that is one and the same, and nothing on this node is shared out
    otherwise: by another plugin, or by DRA, which offers nothing here, the leaf may be another's."""
    alike = {one.uuid for one in inventory.leaves.values() if one.profile == leaf.profile}
    kinds = {frozenset(resource for resource, _ in found) for uuid, found in slots.items() if uuid in alike}
    offered = {resource for found in slots.values() for resource, _ in found}
    otherwise = {resource for grant in allocation.grants.values() for resource, _ in grant.slots} - offered
    return next(iter(kinds)) if len(kinds) == 1 and not otherwise else frozenset()
