"""On which devices an id is: by the plugin's answer to the kubelet, otherwise by the id itself if it can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpumap.agent.join.inventory import Inventory
from gpumap.model.device_ids import ByIndex, ByUuid, DeviceRef, EveryGpu
from gpumap.model.observations import ClaimDevice, DeviceId, PreparedDevice, ResourceDevices
from gpumap.model.plugins import Plugin, Trust, recognise, recognise_dra
from gpumap.model.readings import Uuid

UNPARSED, UNTRUSTED, NOT_IN_NVML, NVML_DOWN, DEVICE_DOWN = (
    "unparsed",
    "untrusted_id",
    "not_in_nvml",
    "nvml_down",
    "device_down",
)
"""Reasons for unmatched slots (docs/how-to/troubleshoot.md)."""


class Located(NamedTuple):
    """The devices of a reference; if there are none, the reason."""

    devices: tuple[Uuid, ...]
    reason: str = ""
    position: int = 0
    """In the plugin's answer, which lists limits in the same order."""


class Placed(NamedTuple):
    """An id and its devices. `plugin` is `None` if no known plugin makes such ids."""

    device_id: DeviceId
    plugin: Plugin | None
    located: Located


def locate(ref: DeviceRef | None, inventory: Inventory) -> Located:
    """Find the devices of a reference. `None` is a device that NVML does not drive.

    While NVML is down, a reference by uuid is its own result.
    """
    if ref is not None:
        devices = inventory.resolve(ref)
        if devices:
            return Located(devices)
        if isinstance(ref, ByUuid) and not inventory.up:
            return Located((ref.uuid,))
    if not inventory.up:
        return Located((), NVML_DOWN)
    if ref is None:
        return Located((), NOT_IN_NVML)
    if inventory.may_answer_later(ref):
        return Located((), DEVICE_DOWN)
    return Located((), UNTRUSTED if inventory.is_ambiguous(ref) else NOT_IN_NVML)


NO_INDICES: Mapping[int, Uuid] = {}


def place(
    resource: str,
    ids: Iterable[DeviceId],
    refs: Sequence[DeviceRef],
    inventory: Inventory,
    indices: Mapping[int, Uuid] = NO_INDICES,
) -> tuple[Placed, ...]:
    """Place the ids that a container has of a resource.

    `refs` are the devices in the plugin's answer. `indices` are the GPUs of NVML's indices at the time of the answer.
    """
    placed: list[Placed] = []
    by_plugin: dict[Plugin, list[tuple[DeviceId, DeviceRef | None]]] = {}
    for device_id in sorted(ids):
        recognised = recognise(resource, device_id)
        if recognised is None:
            placed.append(Placed(device_id, None, Located((), UNPARSED)))
        else:
            by_plugin.setdefault(recognised.plugin, []).append((device_id, recognised.device))
    targets = _targets(refs, inventory, indices)
    # First the ids that can be trusted. The others get the devices that remain.
    for plugin in sorted(by_plugin, key=lambda plugin: plugin.trust is Trust.ANSWER):
        if plugin.trust is Trust.ANSWER:
            covered = {slot.located.devices for slot in placed if slot.located.devices}
            unknown = Located((), UNTRUSTED if inventory.up else NVML_DOWN)
            ids_of_plugin = [device_id for device_id, _ in by_plugin[plugin]]
            placed += _spread(plugin, ids_of_plugin, _uncovered(targets, covered) or [unknown])
        else:
            is_exact = bool(targets) and all(isinstance(ref, ByUuid) for ref in refs)
            placed += _place_by_id(plugin, by_plugin[plugin], targets, inventory, is_exact=is_exact)
    return tuple(placed)


def _targets(refs: Sequence[DeviceRef], inventory: Inventory, indices: Mapping[int, Uuid]) -> list[Located]:
    """Return a target for each reference, found or not, but no device twice."""
    targets: list[Located] = []
    for number, ref in enumerate(refs):
        known = indices.get(ref.nvml_index) if isinstance(ref, ByIndex) else None
        located = locate(ref if known is None else ByUuid(known), inventory)
        if isinstance(ref, EveryGpu) and len(located.devices) != 1:
            continue  # "all" does not select one of several GPUs
        if not located.devices or located.devices not in {target.devices for target in targets}:
            targets.append(located._replace(position=number))
    return targets


def _uncovered(targets: Sequence[Located], covered: Collection[tuple[Uuid, ...]]) -> Sequence[Located]:
    """Return the targets that no id is on yet; all of them if there is an id on each."""
    return [target for target in targets if target.devices not in covered] or targets


def _place_by_id(
    plugin: Plugin,
    ids: Sequence[tuple[DeviceId, DeviceRef | None]],
    targets: Sequence[Located],
    inventory: Inventory,
    *,
    is_exact: bool,
) -> Iterator[Placed]:
    """Place ids on the devices that they name.

    `is_exact`: the answer names devices by uuid. Then an id on none of them goes to one of them: the id may be only a
    position in the plugin's order.
    """
    by_devices = {target.devices: target for target in targets if target.devices}
    unplaced: list[DeviceId] = []
    covered = set()
    for device_id, ref in ids:
        by_id = locate(ref, inventory)
        target = by_devices.get(by_id.devices)
        if target is not None:
            covered.add(by_id.devices)
        if not is_exact or target is not None:
            yield Placed(device_id, plugin, target or by_id)
        else:
            unplaced.append(device_id)
    yield from _spread(plugin, unplaced, _uncovered(targets, covered))


def _spread(plugin: Plugin, ids: Sequence[DeviceId], targets: Sequence[Located]) -> Iterator[Placed]:
    """Place ids evenly: each target gets equally many consecutive ids, the first targets one more if needed.

    If there are more targets than ids, an id is on several: the container has all of them.
    """
    if not ids:
        return
    many, fewer = max(len(ids), len(targets)), min(len(ids), len(targets))
    each, remainder = divmod(many, fewer)
    runs = [number for number in range(fewer) for _ in range(each + (number < remainder))]
    for number, run in enumerate(runs):
        device_id, target = (ids[number], targets[run]) if len(ids) == many else (ids[run], targets[number])
        yield Placed(device_id, plugin, target)


def place_claim(
    device: ClaimDevice, same_name: Sequence[PreparedDevice], inventory: Inventory
) -> tuple[Placed, PreparedDevice | None]:
    """Place a DRA device: by the driver's note about this claim; otherwise by the device's name. Return the note, too.

    `same_name` are the driver's notes about all devices of this name. Those of other claims count only for MIG devices
    without a known placement: a new instance may have the placement of an earlier one.
    """
    recognised = recognise_dra(device.driver, device.device)
    device_id = DeviceId(device.device)
    if recognised is None:
        return Placed(device_id, None, Located((), UNPARSED)), None
    own_note = _note_of_claim(device, same_name)
    if own_note is not None:
        return Placed(device_id, recognised.plugin, locate(ByUuid(own_note.uuid), inventory)), own_note
    located = locate(recognised.device, inventory)
    if located.reason == UNTRUSTED:
        other_devices = {found_uuid for note in same_name if (found_uuid := inventory.find(note.uuid))}
        located = Located(tuple(other_devices)) if len(other_devices) == 1 else located
    return Placed(device_id, recognised.plugin, located), None


def _note_of_claim(device: ClaimDevice, same_name: Sequence[PreparedDevice]) -> PreparedDevice | None:
    """Return the driver's note about a claim's device. Kubelets before 1.35 list its shares as one, without ids."""
    notes = [
        note
        for note in same_name
        if (note.claim_namespace, note.claim) == (device.claim_namespace, device.claim)
        and device.share_id in ("", note.share_id)
    ]
    if len({note.uuid for note in notes}) != 1:
        return None
    amounts = [note.memory_bytes for note in notes]
    known = sum(amount for amount in amounts if amount is not None)
    return replace(
        notes[0], memory_bytes=None if None in amounts else known, admin_access=all(note.admin_access for note in notes)
    )


# --- what the kubelet offers ------------------------------------------------------------------------------------------


IdsByDevice = Mapping[tuple[Uuid, str], set[DeviceId]]
"""By device and resource."""


@dataclass(frozen=True, slots=True)
class PlacedOffer:
    """What the kubelet offers, and what plugins registered, by device."""

    allocatable: IdsByDevice
    registered: IdsByDevice
    slots: Mapping[Uuid, dict[str, int]]
    """Allocatable slots by device and resource; empty while the kubelet does not report them."""
    names_no_device: bool
    """A plugin offers GPU slots whose ids name no device of this node: they may be of any device."""
    unplaced: bool
    """A GPU slot that the kubelet offers may be on any device: nothing shows its device, nor that NVML lacks it."""


def place_offer(
    offered: tuple[ResourceDevices, ...],
    registered: tuple[ResourceDevices, ...],
    inventory: Inventory,
    is_gpu_resource: Callable[[str], bool],
) -> PlacedOffer:
    """Place each id on the device that it names, also those that are not trusted for containers."""
    allocatable = _ids_by_device(offered, inventory, is_gpu_resource)
    registered_ids = allocatable if registered == offered else _ids_by_device(registered, inventory, is_gpu_resource)
    named = {(resource, id_) for (_, resource), ids in allocatable.items() for id_ in ids}
    gpu_resources = [devices for devices in offered if is_gpu_resource(devices.resource)]
    offered_ids = [(devices.resource, device_id) for devices in gpu_resources for device_id in devices.ids]
    names_no_device = any(resource_id not in named for resource_id in offered_ids)
    unplaced = any(_is_unplaced(resource, device_id, inventory) for resource, device_id in offered_ids)
    return PlacedOffer(allocatable, registered_ids, _counts(allocatable), names_no_device, unplaced)


def _is_unplaced(resource: str, device_id: DeviceId, inventory: Inventory) -> bool:
    recognised = recognise(resource, device_id)
    if recognised is None or recognised.device is None:
        return recognised is None or recognised.plugin.trust is Trust.ANSWER
    located = locate(recognised.device, inventory)
    return not located.devices and located.reason != NOT_IN_NVML


def _ids_by_device(
    resources: Iterable[ResourceDevices], inventory: Inventory, is_gpu_resource: Callable[[str], bool]
) -> IdsByDevice:
    by_device: dict[tuple[Uuid, str], set[DeviceId]] = {}
    for devices in resources:
        is_gpu = is_gpu_resource(devices.resource)
        for device_id in devices.ids:
            recognised = recognise(devices.resource, device_id)
            if recognised is None or recognised.device is None:
                continue
            if is_gpu or inventory.has_uuid_of(recognised.device):
                for uuid in locate(recognised.device, inventory).devices:
                    by_device.setdefault((uuid, devices.resource), set()).add(device_id)
    return by_device


def _counts(offered: IdsByDevice) -> dict[Uuid, dict[str, int]]:
    counts: dict[Uuid, dict[str, int]] = {}
    for (uuid, resource), ids in sorted(offered.items()):
        counts.setdefault(uuid, {})[resource] = len(ids)
    return counts
