"""Who holds what: the kubelet's ids laid on the node's devices, each id on a device or among the unmatched.

A slot is one device id. What is granted is computed from the kubelet's and the plugins' words alone: processes decide
no allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.agent.join.answers import Answers, answers_of_row, first_named
from gpumap.agent.join.grants import Grant, Holding, grants
from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.offers import Offer, PlacedOffer, place_offer
from gpumap.agent.join.placement import NO_INDICES, Placed, place, place_claim
from gpumap.agent.join.pods import PodTable
from gpumap.model.device_ids import ByIndex, DeviceRef
from gpumap.model.observations import (
    CheckpointEntry,
    ClaimDevice,
    ContainerName,
    DeviceId,
    ListedContainer,
    ListedPod,
    PodUid,
    PreparedDevice,
)
from gpumap.model.plugins import Plugin, Trust, recognise
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import UnmatchedSlots


@dataclass(frozen=True, slots=True)
class InitContainerAllocation:
    """What a container that only the checkpoint knows was given. Not `settled`: some of it is on no device."""

    devices: frozenset[Uuid]
    settled: bool


class Told(NamedTuple):
    """What a plugin's answer tells of a container's resource."""

    container: ContainerName
    pod_uid: PodUid | None
    resource: str
    named: tuple[DeviceRef, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The kubelet's word on this node's devices. `basis` is what it was made of: the same basis, the same result."""

    basis: tuple[object, ...]
    grants: Mapping[tuple[ContainerName, Uuid], Grant]
    unmatched: tuple[UnmatchedSlots, ...]
    unsettled: frozenset[ContainerName]
    """Containers with unmatched slots: which devices they hold is not known."""
    holders: Mapping[Uuid, tuple[ContainerName, ...]]
    named: frozenset[tuple[Uuid, str]]
    """(device, resource) pairs of held ids that name their device: it must have been offered so."""
    stand_ins: Mapping[tuple[PodUid, str], InitContainerAllocation]
    """By pod and container: plain init containers, which the List leaves out."""
    offer: PlacedOffer
    indices: Mapping[Told, Mapping[int, Uuid]]
    """By which index a plugin's answer told which GPU when it was first seen: NVML counts anew when one is unbound."""


def allocate(
    pods: tuple[ListedPod, ...],
    table: PodTable,
    prepared: tuple[PreparedDevice, ...],
    offer: Offer,
    inventory: Inventory,
    is_gpu_resource: Callable[[str], bool],
    indices: Mapping[Told, Mapping[int, Uuid]],
    before: Allocation | None,
) -> Allocation:
    """Lay every id of the List on a device. `before` is returned as it is while nothing that matters has changed.

    `table` has the plugins' answers, `prepared` what NVIDIA's DRA driver wrote down, `indices` what is remembered of
    the last allocation's.
    """
    laid_offer = place_offer(offer, inventory, is_gpu_resource, before.offer if before else None)
    basis = (table, laid_offer, pods, prepared, inventory.shape)
    if before is not None and _same(before.basis, basis):
        return before
    laying = _Placer(Answers(table), prepared, inventory, is_gpu_resource, indices)
    for pod in pods:
        for container in pod.containers:
            laying.lay(ContainerName(pod.namespace, pod.name, container.name), container)
    holdings, unmatched = laying.holdings(), laying.unmatched
    return Allocation(
        basis=basis,
        grants=grants(holdings, laid_offer.allocatable, laid_offer.registered, inventory),
        unmatched=tuple(UnmatchedSlots(*key, len(slots)) for key, slots in sorted(unmatched.items())),
        unsettled=frozenset(name for name, _, _ in unmatched),
        holders=_holders(holdings),
        named=frozenset((one.uuid, one.resource) for one in holdings if one.plugin.trust is Trust.ID),
        stand_ins={key: _stand_in(rows, inventory, is_gpu_resource) for key, rows in table.unlisted.items()},
        offer=laid_offer,
        indices=laying.indices if pods else indices,
    )


class _HoldingKey(NamedTuple):
    container: ContainerName
    resource: str
    uuid: Uuid
    plugin: Plugin
    claim: ClaimDevice | None = None


class _Placer:
    """The ids of one List being laid on devices, each (container, resource, id) once: kubelets before 1.34 may list an
    ended pod beside its successor."""

    def __init__(
        self,
        answers: Answers,
        prepared: Iterable[PreparedDevice],
        inventory: Inventory,
        is_gpu_resource: Callable[[str], bool],
        indices_before: Mapping[Told, Mapping[int, Uuid]],
    ) -> None:
        self.unmatched: dict[tuple[ContainerName, str, str], set[tuple[DeviceId, str]]] = {}
        self.indices: dict[Told, Mapping[int, Uuid]] = {}
        self._indices_before = indices_before
        self._ids: dict[_HoldingKey, dict[DeviceId, None]] = {}
        self._firsts: dict[_HoldingKey, Holding] = {}
        self._answers = answers
        self._inventory = inventory
        self._is_gpu_resource = is_gpu_resource
        self._prepared: dict[str, list[PreparedDevice]] = {}
        for one in prepared:
            self._prepared.setdefault(one.device, []).append(one)

    def holdings(self) -> list[Holding]:
        return [self._firsts[key]._replace(ids=tuple(ids)) for key, ids in self._ids.items()]

    def lay(self, name: ContainerName, container: ListedContainer) -> None:
        """Lay what one container is listed with."""
        for devices in container.devices:
            answers = self._answers.of(name, devices, container)
            answer = next(iter(answers), None)
            named = first_named(answers)
            indices = self._indices(Told(name, self._answers.uid(name), devices.resource, named))
            placed = place(devices.resource, devices.ids, named, self._inventory, indices)
            for one in placed:
                for uuid in self._devices(name, devices.resource, one):
                    if one.plugin is not None:
                        key = _HoldingKey(name, devices.resource, uuid, one.plugin)
                        self._take(key, one, Holding(*key[:4], (), len(placed), answer, one.place))
        for device in container.claims:
            found, prepared = place_claim(device, self._prepared.get(device.device, ()), self._inventory)
            for uuid in self._devices(name, device.driver, found, device.share_id):
                if found.plugin is not None:
                    key = _HoldingKey(name, device.driver, uuid, found.plugin, device)
                    self._take(key, found, Holding(*key[:4], (), 1, claim=device, prepared=prepared))

    def _indices(self, told: Told) -> Mapping[int, Uuid]:
        """What NVML's indices in an answer mean: what they did when it was first seen."""
        wanted = [ref for ref in told.named if isinstance(ref, ByIndex)]
        if not wanted:
            return NO_INDICES
        before = self._indices_before.get(told, NO_INDICES)
        found = {ref.nvml_index: uuid for ref in wanted for uuid in self._inventory.resolve(ref)}
        self.indices[told] = {**found, **before}
        return self.indices[told]

    def _take(self, key: _HoldingKey, placed: Placed, holding: Holding) -> None:
        self._firsts.setdefault(key, holding)
        self._ids.setdefault(key, {})[placed.device_id] = None

    def _devices(self, name: ContainerName, resource: str, placed: Placed, share_id: str = "") -> tuple[Uuid, ...]:
        """The devices that a slot is on, if its resource is a GPU's, or it names a GPU that is here. One on none is
        counted."""
        if not (self._is_gpu_resource(resource) or _names_ours(resource, placed.device_id, self._inventory)):
            return ()
        if not placed.located.devices:
            key = (name, resource, placed.located.reason)
            self.unmatched.setdefault(key, set()).add((placed.device_id, share_id))
        return placed.located.devices


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """The first two of each are known by being the very same object: they are while nothing in them has changed."""
    return one[0] is other[0] and one[1] is other[1] and all(a is b or a == b for a, b in zip(one, other, strict=True))


def _holders(holdings: Iterable[Holding]) -> dict[Uuid, tuple[ContainerName, ...]]:
    holders: dict[Uuid, set[ContainerName]] = {}
    for one in holdings:
        holders.setdefault(one.uuid, set()).add(one.container)
    return {uuid: tuple(sorted(names)) for uuid, names in holders.items()}


def _stand_in(
    rows: Iterable[CheckpointEntry], inventory: Inventory, is_gpu_resource: Callable[[str], bool]
) -> InitContainerAllocation:
    rows = tuple(rows)
    devices: set[Uuid] = set()
    settled = True
    for row in rows:
        for one in place(row.resource, row.ids, first_named(answers_of_row(row, rows)), inventory):
            if is_gpu_resource(row.resource) or _names_ours(row.resource, one.device_id, inventory):
                devices.update(one.located.devices)
                settled = settled and bool(one.located.devices)
    return InitContainerAllocation(frozenset(devices), settled)


def _names_ours(resource: str, device_id: DeviceId, inventory: Inventory) -> bool:
    """Whether an id of a resource that is none of the GPUs' by its name has the uuid of a device that is here."""
    recognised = recognise(resource, device_id)
    return recognised is not None and inventory.has_uuid_of(recognised.device)
