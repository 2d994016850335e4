"""What the kubelet offers, laid on the node's devices: which slots each has, in all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.placement import locate
from gpumap.model.observations import DeviceId, ResourceDevices
from gpumap.model.plugins import recognise
from gpumap.model.readings import Uuid

IdsByDevice = Mapping[tuple[Uuid, str], set[DeviceId]]
"""By device and resource."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the kubelet says of its own, besides the List; all of it is optional."""

    allocatable: tuple[ResourceDevices, ...] | None
    registered: tuple[ResourceDevices, ...]


@dataclass(frozen=True, slots=True)
class PlacedOffer:
    """An offer by device. The very same object while the offer and the devices are the same."""

    basis: tuple[object, ...]
    allocatable: IdsByDevice
    registered: IdsByDevice
    slots: Mapping[Uuid, tuple[tuple[str, int], ...]] | None
    """Allocatable ones by device and resource; `None` while the kubelet does not tell."""


def place_offer(
    offer: Offer, inventory: Inventory, is_gpu_resource: Callable[[str], bool], before: PlacedOffer | None
) -> PlacedOffer:
    """Lay each id on the device that it names, also ids that cannot be trusted with a container: so many the card has.

    `before` is returned as it is while nothing has changed.
    """
    basis = (offer, inventory.shape)
    if before is not None and before.basis == basis:
        return before
    allocatable = _by_device(offer.allocatable or (), inventory, is_gpu_resource)
    is_same = offer.registered == offer.allocatable
    registered = allocatable if is_same else _by_device(offer.registered, inventory, is_gpu_resource)
    return PlacedOffer(basis, allocatable, registered, None if offer.allocatable is None else _counts(allocatable))


def _by_device(
    resources: Iterable[ResourceDevices], inventory: Inventory, is_gpu_resource: Callable[[str], bool]
) -> IdsByDevice:
    found: dict[tuple[Uuid, str], set[DeviceId]] = {}
    for devices in resources:
        is_gpus = is_gpu_resource(devices.resource)
        for device_id in devices.ids:
            recognised = recognise(devices.resource, device_id)
            if recognised is None or recognised.device is None:
                continue
            if is_gpus or inventory.has_uuid_of(recognised.device):
                for uuid in locate(recognised.device, inventory).devices:
                    found.setdefault((uuid, devices.resource), set()).add(device_id)
    return found


def _counts(offered: IdsByDevice) -> dict[Uuid, tuple[tuple[str, int], ...]]:
    counts: dict[Uuid, list[tuple[str, int]]] = {}
    for (uuid, resource), ids in sorted(offered.items()):
        counts.setdefault(uuid, []).append((resource, len(ids)))
    return {uuid: tuple(rows) for uuid, rows in counts.items()}
