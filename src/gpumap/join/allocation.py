"""Who holds what: the kubelet's ids laid on the node's devices, each id on a device or among the unmatched.

A slot is one device id. What is granted is computed from ids alone: processes decide no allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.device_ids import NamedDevice, Unnamed, is_gpu, parse
from gpumap.join.inventory import Inventory, KnownGpu
from gpumap.model import ContainerName, DeviceId, ListedContainer, ListedPod, ResourceDevices, Uuid
from gpumap.snapshot import UnmatchedSlots

_IdsByDevice = dict[tuple[Uuid, str], set[DeviceId]]
"""By device and resource."""


class Grant(NamedTuple):
    """What one container holds of one device."""

    slots: tuple[tuple[str, int], ...]
    """By resource, sorted."""
    gpus: float | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Offer:
    """What the kubelet says of its own, besides the List; all of it is optional."""

    allocatable: tuple[ResourceDevices, ...] | None
    registered: tuple[ResourceDevices, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The kubelet's word on this node's devices. `basis` is what it was made of: the same basis, the same result."""

    basis: tuple[object, ...]
    grants: Mapping[tuple[ContainerName, Uuid], Grant]
    unmatched: tuple[UnmatchedSlots, ...]
    unsettled: frozenset[ContainerName]
    """Containers with unmatched slots: which devices they hold is not known."""
    holders: Mapping[Uuid, tuple[ContainerName, ...]]
    offered: Mapping[Uuid, tuple[tuple[str, int], ...]] | None
    """Allocatable slots by leaf and resource; `None` while the kubelet does not tell."""


class _Slot(NamedTuple):
    container: ContainerName
    resource: str
    device_id: DeviceId
    uuid: Uuid
    shared: bool

    @property
    def shared_id(self) -> tuple[Uuid, DeviceId]:
        """What several containers may list: one replica, or the device, by whichever of its names."""
        return self.uuid, self.device_id if self.shared else DeviceId("")


def allocate(
    pods: tuple[ListedPod, ...],
    offer: Offer,
    inventory: Inventory,
    is_gpu_resource: Callable[[str], bool],
    before: Allocation | None,
) -> Allocation:
    """Lay every id of the List on a device. `before` is returned as it is while nothing that matters has changed."""
    basis = (pods, offer.allocatable, offer.registered, _shape(inventory))
    if before is not None and _same(before.basis, basis):
        return before
    slots: list[_Slot] = []
    unmatched: dict[tuple[ContainerName, str, str], int] = {}
    for name, resource, device_id in _listed(pods):
        found = _locate(resource, device_id, inventory)
        if isinstance(found, NamedDevice):
            if is_gpu_resource(resource) or inventory.find(found.uuid):
                slots.append(_Slot(name, resource, device_id, found.uuid, found.shared))
        elif is_gpu_resource(resource):
            key = (name, resource, found.reason)
            unmatched[key] = unmatched.get(key, 0) + 1
    offered = _ids_by_device(offer.allocatable or (), inventory)
    return Allocation(
        basis=basis,
        grants=_grants(slots, offered, _ids_by_device(offer.registered, inventory), inventory),
        unmatched=tuple(UnmatchedSlots(*key, count) for key, count in sorted(unmatched.items())),
        unsettled=frozenset(name for name, _, _ in unmatched),
        holders=_holders(slots),
        offered=None if offer.allocatable is None else _counts(offered),
    )


def _shape(inventory: Inventory) -> tuple[object, ...]:
    """What allocation needs to know of the devices: all but the moment they last answered."""
    return inventory.up, inventory.nameless, inventory.known


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return all(a is b or a == b for a, b in zip(one, other, strict=True))


def _listed(pods: Iterable[ListedPod]) -> Iterable[tuple[ContainerName, str, DeviceId]]:
    """Every (container, resource, id) once: kubelets before 1.34 may list an ended pod beside its successor."""
    return dict.fromkeys(
        (ContainerName(pod.namespace, pod.name, container.name), resource, device_id)
        for pod in pods
        for container in pod.containers
        for resource, device_id in _ids(container)
    )


def _ids(container: ListedContainer) -> Iterator[tuple[str, DeviceId]]:
    for devices in container.devices:
        yield from ((devices.resource, device_id) for device_id in devices.ids)
    for claim in container.claims:
        yield claim.driver, DeviceId(claim.device)


def _locate(resource: str, device_id: DeviceId, inventory: Inventory) -> NamedDevice | Unnamed:
    """Find the device of an id. While NVML is down, a uuid stands for itself."""
    named = parse(resource, device_id)
    if isinstance(named, Unnamed):
        return Unnamed("nvml_down") if named.reason == "not_in_nvml" and not inventory.up else named
    uuid = inventory.find(named.uuid)
    if uuid is not None:
        return named._replace(uuid=uuid)
    if not inventory.up:
        return named
    return Unnamed("device_down" if inventory.nameless else "not_in_nvml")


def _holders(slots: Iterable[_Slot]) -> dict[Uuid, tuple[ContainerName, ...]]:
    holders: dict[Uuid, set[ContainerName]] = {}
    for slot in slots:
        holders.setdefault(slot.uuid, set()).add(slot.container)
    return {uuid: tuple(sorted(names)) for uuid, names in holders.items()}


def _counts(offered: _IdsByDevice) -> dict[Uuid, tuple[tuple[str, int], ...]]:
    counts: dict[Uuid, list[tuple[str, int]]] = {}
    for (uuid, resource), ids in sorted(offered.items()):
        counts.setdefault(uuid, []).append((resource, len(ids)))
    return {uuid: tuple(rows) for uuid, rows in counts.items()}


def _ids_by_device(resources: Iterable[ResourceDevices], inventory: Inventory) -> _IdsByDevice:
    found: _IdsByDevice = {}
    for devices in resources:
        for device_id in devices.ids:
            named = _locate(devices.resource, device_id, inventory)
            if isinstance(named, NamedDevice):
                found.setdefault((named.uuid, devices.resource), set()).add(device_id)
    return found


def _grants(
    slots: list[_Slot], offered: _IdsByDevice, registered: _IdsByDevice, inventory: Inventory
) -> dict[tuple[ContainerName, Uuid], Grant]:
    sharers: dict[tuple[Uuid, DeviceId], int] = {}
    held: _IdsByDevice = {}
    by_holder: dict[tuple[ContainerName, Uuid], list[_Slot]] = {}
    for slot in slots:
        sharers[slot.shared_id] = sharers.get(slot.shared_id, 0) + 1
        held.setdefault((slot.uuid, slot.resource), set()).add(slot.device_id)
        by_holder.setdefault((slot.container, slot.uuid), []).append(slot)
    replicas = {
        key: len(known | ids) if (known := offered.get(key) or registered.get(key)) else None
        for key, ids in held.items()
    }

    def share(slot: _Slot) -> float | None:
        """The part of a GPU that one slot is; an id that several containers list is split among them."""
        own = _own_share(slot.uuid, inventory)
        if slot.shared:
            count = replicas[slot.uuid, slot.resource]
            own = own / count if own is not None and count else None
        return own / sharers[slot.shared_id] if own is not None else None

    shares = {holder: _sum(share(slot) for slot in of_holder) for holder, of_holder in by_holder.items()}
    scale = _overcommitment(shares, inventory)
    return {
        holder: Grant(
            slots=_count(of_holder),
            gpus=_scaled(shares[holder], scale.get(_gpu_uuid(holder[1], inventory), 1.0)),
            memory_bytes=None if all(slot.shared for slot in of_holder) else _total_bytes(holder[1], inventory),
        )
        for holder, of_holder in by_holder.items()
    }


def _overcommitment(
    shares: Mapping[tuple[ContainerName, Uuid], float | None], inventory: Inventory
) -> dict[Uuid, float]:
    """By GPU: what its shares add up to where that is more than the GPU, because it is offered twice (L9)."""
    sums: dict[Uuid, float] = {}
    for (_, uuid), share in shares.items():
        gpu = _gpu_uuid(uuid, inventory)
        sums[gpu] = sums.get(gpu, 0.0) + (share or 0.0)
    return {gpu: total for gpu, total in sums.items() if total > 1.0}


def _scaled(share: float | None, total: float) -> float | None:
    return None if share is None else share / total


def _count(slots: Iterable[_Slot]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for slot in slots:
        counts[slot.resource] = counts.get(slot.resource, 0) + 1
    return tuple(sorted(counts.items()))


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum of shares, at most one whole; `None` if any of them is not known."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return min(total, 1.0)


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
    gpu: KnownGpu | None = inventory.gpu_of_leaf.get(uuid)
    return gpu.uuid if gpu else uuid
