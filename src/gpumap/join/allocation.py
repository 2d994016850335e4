"""Who holds what: the kubelet's ids laid on the node's devices, each id on a device or among the unmatched.

A slot is one device id. What is granted is computed from the kubelet's and the plugins' words alone: processes decide
no allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.device_ids import ByUuid, DeviceRef
from gpumap.join.answers import Answers, answers_of_row
from gpumap.join.grants import Grant, Holding, grants
from gpumap.join.inventory import Inventory
from gpumap.join.placement import Placed, locate, place, place_claim
from gpumap.join.pods import PodTable
from gpumap.model import (
    CheckpointEntry,
    ClaimDevice,
    ContainerName,
    DeviceId,
    ListedContainer,
    ListedPod,
    PodUid,
    PreparedDevice,
    ResourceDevices,
    Uuid,
)
from gpumap.plugins import Plugin, Trust, recognise
from gpumap.snapshot import UnmatchedSlots


@dataclass(frozen=True, slots=True)
class Offer:
    """What the kubelet says of its own, besides the List; all of it is optional."""

    allocatable: tuple[ResourceDevices, ...] | None
    registered: tuple[ResourceDevices, ...]


@dataclass(frozen=True, slots=True)
class StandIn:
    """What a container that only the checkpoint knows was given. Not `settled`: some of it is on no device."""

    devices: frozenset[Uuid]
    settled: bool


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
    stand_ins: Mapping[tuple[PodUid, str], StandIn]
    """By pod and container: plain init containers, which the List leaves out."""
    offered: Mapping[Uuid, tuple[tuple[str, int], ...]] | None
    """Allocatable slots by leaf and resource; `None` while the kubelet does not tell."""


def allocate(
    pods: tuple[ListedPod, ...],
    table: PodTable,
    prepared: tuple[PreparedDevice, ...],
    offer: Offer,
    inventory: Inventory,
    is_gpu_resource: Callable[[str], bool],
    before: Allocation | None,
) -> Allocation:
    """Lay every id of the List on a device. `before` is returned as it is while nothing that matters has changed.

    `table` has the plugins' answers, `prepared` what NVIDIA's DRA driver wrote down.
    """
    basis = (table, pods, prepared, offer.allocatable, offer.registered, _shape(inventory))
    if before is not None and _same(before.basis, basis):
        return before
    laying = _Laying(Answers(table), prepared, inventory, is_gpu_resource)
    for pod in pods:
        for container in pod.containers:
            laying.lay(ContainerName(pod.namespace, pod.name, container.name), container)
    holdings, unmatched = laying.holdings(), laying.unmatched
    offered = _ids_by_device(offer.allocatable or (), inventory, is_gpu_resource)
    return Allocation(
        basis=basis,
        grants=grants(holdings, offered, _ids_by_device(offer.registered, inventory, is_gpu_resource), inventory),
        unmatched=tuple(UnmatchedSlots(*key, len(slots)) for key, slots in sorted(unmatched.items())),
        unsettled=frozenset(name for name, _, _ in unmatched),
        holders=_holders(holdings),
        named=frozenset((one.uuid, one.resource) for one in holdings if one.plugin.trust is Trust.ID),
        stand_ins={key: _stand_in(rows, inventory) for key, rows in table.unlisted.items()},
        offered=None if offer.allocatable is None else _counts(offered),
    )


class _HoldingKey(NamedTuple):
    container: ContainerName
    resource: str
    uuid: Uuid
    plugin: Plugin
    claim: ClaimDevice | None = None


class _Laying:
    """The ids of one List being laid on devices, each (container, resource, id) once: kubelets before 1.34 may list an
    ended pod beside its successor."""

    def __init__(
        self,
        answers: Answers,
        prepared: Iterable[PreparedDevice],
        inventory: Inventory,
        is_gpu_resource: Callable[[str], bool],
    ) -> None:
        self.unmatched: dict[tuple[ContainerName, str, str], set[tuple[DeviceId, str]]] = {}
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
            placed = place(devices.resource, devices.ids, answers, self._inventory)
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

    def _take(self, key: _HoldingKey, placed: Placed, holding: Holding) -> None:
        self._firsts.setdefault(key, holding)
        self._ids.setdefault(key, {})[placed.device_id] = None

    def _devices(self, name: ContainerName, resource: str, placed: Placed, share_id: str = "") -> tuple[Uuid, ...]:
        """The devices that a slot is on. One on none is counted if its resource is a GPU's."""
        is_gpus = self._is_gpu_resource(resource)
        if not placed.located.devices:
            if is_gpus:
                key = (name, resource, placed.located.reason)
                self.unmatched.setdefault(key, set()).add((placed.device_id, share_id))
            return ()
        if not is_gpus:
            recognised = recognise(resource, placed.device_id)
            is_gpus = recognised is not None and _is_ours(recognised.device, self._inventory)
        return placed.located.devices if is_gpus else ()


def _shape(inventory: Inventory) -> tuple[object, ...]:
    """What allocation needs to know of the devices: all but the moment they last answered."""
    return inventory.up, inventory.nameless, inventory.known


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """The first of each is known by being the very same object: to compare it costs more than to do the work again."""
    return one[0] is other[0] and all(a is b or a == b for a, b in zip(one[1:], other[1:], strict=True))


def _holders(holdings: Iterable[Holding]) -> dict[Uuid, tuple[ContainerName, ...]]:
    holders: dict[Uuid, set[ContainerName]] = {}
    for one in holdings:
        holders.setdefault(one.uuid, set()).add(one.container)
    return {uuid: tuple(sorted(names)) for uuid, names in holders.items()}


def _stand_in(rows: Iterable[CheckpointEntry], inventory: Inventory) -> StandIn:
    rows = tuple(rows)
    devices: set[Uuid] = set()
    settled = True
    for row in rows:
        for one in place(row.resource, row.ids, answers_of_row(row, rows), inventory):
            devices.update(one.located.devices)
            settled = settled and bool(one.located.devices)
    return StandIn(frozenset(devices), settled)


def _counts(offered: Mapping[tuple[Uuid, str], set[DeviceId]]) -> dict[Uuid, tuple[tuple[str, int], ...]]:
    counts: dict[Uuid, list[tuple[str, int]]] = {}
    for (uuid, resource), ids in sorted(offered.items()):
        counts.setdefault(uuid, []).append((resource, len(ids)))
    return {uuid: tuple(rows) for uuid, rows in counts.items()}


def _ids_by_device(
    resources: Iterable[ResourceDevices], inventory: Inventory, is_gpu_resource: Callable[[str], bool]
) -> dict[tuple[Uuid, str], set[DeviceId]]:
    """What is offered, by the device that each id names: also those that a container's ids cannot be trusted with."""
    found: dict[tuple[Uuid, str], set[DeviceId]] = {}
    for devices in resources:
        is_gpus = is_gpu_resource(devices.resource)
        for device_id in devices.ids:
            recognised = recognise(devices.resource, device_id)
            if recognised is None or recognised.device is None:
                continue
            if is_gpus or _is_ours(recognised.device, inventory):
                for uuid in locate(recognised.device, inventory).devices:
                    found.setdefault((uuid, devices.resource), set()).add(device_id)
    return found


def _is_ours(ref: DeviceRef | None, inventory: Inventory) -> bool:
    """Whether an id of a resource that is none of the GPUs' has the uuid of a device that is here."""
    return isinstance(ref, ByUuid) and bool(inventory.resolve(ref))
