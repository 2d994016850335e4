"""On which devices an id stands: by what its plugin answered the kubelet, else by the id, where that can be trusted.

What processes do decides nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumap.agent.join.inventory import Inventory
from gpumap.model.device_ids import ByIndex, ByUuid, DeviceRef, EveryGpu
from gpumap.model.observations import ClaimDevice, DeviceId, PreparedDevice
from gpumap.model.plugins import Plugin, Trust, recognise, recognise_dra
from gpumap.model.readings import Uuid

UNPARSED, UNTRUSTED, NOT_IN_NVML, NVML_DOWN, DEVICE_DOWN = (
    "unparsed",
    "untrusted_id",
    "not_in_nvml",
    "nvml_down",
    "device_down",
)
"""Why slots are on no device (contract §9)."""


class Located(NamedTuple):
    """The devices that something names; without any, the reason."""

    devices: tuple[Uuid, ...]
    reason: str = ""


class _Target(NamedTuple):
    """A device that a plugin's answer names, and which one in its order."""

    place: int
    located: Located


class Placed(NamedTuple):
    """An id and where it stands. `plugin` is `None` where no plugin makes such ids.

    `place` is which of the devices in the plugin's answer it stands on: limits are told in that order.
    """

    device_id: DeviceId
    plugin: Plugin | None
    located: Located
    place: int = 0


def locate(ref: DeviceRef | None, inventory: Inventory) -> Located:
    """Find the devices of a reference; `None` is one that NVML does not drive. While NVML is down, a uuid stands for
    itself."""
    if ref is not None:
        found = inventory.resolve(ref)
        if found:
            return Located(found)
        if isinstance(ref, ByUuid) and not inventory.up:
            return Located((ref.uuid,))
    if not inventory.up:
        return Located((), NVML_DOWN)
    if ref is None:
        return Located((), NOT_IN_NVML)
    if inventory.nameless:
        return Located((), DEVICE_DOWN)
    return Located((), UNTRUSTED if inventory.keeps_back(ref) else NOT_IN_NVML)


NO_INDICES: Mapping[int, Uuid] = {}


def place(
    resource: str,
    ids: Iterable[DeviceId],
    named: Sequence[DeviceRef],
    inventory: Inventory,
    indices: Mapping[int, Uuid] = NO_INDICES,
) -> tuple[Placed, ...]:
    """Lay the ids that a container has of a resource on devices.

    `named` are the devices that its plugin's answer names, `indices` what NVML's indices in it meant when it was given.
    """
    placed: list[Placed] = []
    by_plugin: dict[Plugin, list[tuple[DeviceId, DeviceRef | None]]] = {}
    for device_id in sorted(ids):
        recognised = recognise(resource, device_id)
        if recognised is None:
            placed.append(Placed(device_id, None, Located((), UNPARSED)))
        else:
            by_plugin.setdefault(recognised.plugin, []).append((device_id, recognised.device))
    targets = _targets(named, inventory, indices)
    # Ids that can be trusted first: the others get what these leave.
    for plugin in sorted(by_plugin, key=lambda one: one.trust is Trust.ANSWER):
        if plugin.trust is Trust.ANSWER:
            covered = {one.located.devices for one in placed if one.located.devices}
            free = [target for target in targets if target.located.devices not in covered] or targets
            untold = _Target(0, Located((), UNTRUSTED if inventory.up else NVML_DOWN))
            strays = [device_id for device_id, _ in by_plugin[plugin]]
            dealt = _dealt(strays, free or [untold])
            placed += [Placed(device_id, plugin, target.located, target.place) for device_id, target in dealt]
        else:
            placed += _by_id(plugin, by_plugin[plugin], named, targets, inventory)
    return tuple(placed)


def _targets(named: Sequence[DeviceRef], inventory: Inventory, indices: Mapping[int, Uuid]) -> list[_Target]:
    """The devices that an answer names: one for each that it names, found or not, but no device twice."""
    targets: list[_Target] = []
    for number, ref in enumerate(named):
        known = indices.get(ref.nvml_index) if isinstance(ref, ByIndex) else None
        located = locate(ref if known is None else ByUuid(known), inventory)
        if isinstance(ref, EveryGpu) and len(located.devices) != 1:
            continue  # "all" names none of several
        if not located.devices or located.devices not in {one.located.devices for one in targets}:
            targets.append(_Target(number, located))
    return targets


def _by_id(
    plugin: Plugin,
    ids: Sequence[tuple[DeviceId, DeviceRef | None]],
    named: Sequence[DeviceRef],
    targets: Sequence[_Target],
    inventory: Inventory,
) -> Iterator[Placed]:
    """Ids stand where they say, unless the answer names other devices by uuid: a place in an order says less."""
    by_devices = {target.located.devices: target for target in targets if target.located.devices}
    is_told = bool(targets) and all(isinstance(ref, ByUuid) for ref in named)
    strays: list[DeviceId] = []
    covered = set()
    for device_id, ref in ids:
        own = locate(ref, inventory)
        target = by_devices.get(own.devices)
        if target is not None:
            covered.add(own.devices)
        if not is_told or target is not None:
            yield Placed(device_id, plugin, own, target.place if target else 0)
        else:
            strays.append(device_id)
    free = [target for target in targets if target.located.devices not in covered] or list(targets)
    for device_id, target in _dealt(strays, free):
        yield Placed(device_id, plugin, target.located, target.place)


def _dealt(ids: Sequence[DeviceId], targets: Sequence[_Target]) -> Iterator[tuple[DeviceId, _Target]]:
    """Each target gets as many ids in a row as the others, the first ones what is left over. Where there are more
    targets than ids, an id stands on several: the container has them all."""
    if not ids:
        return
    many, few = max(len(ids), len(targets)), min(len(ids), len(targets))
    each, more = divmod(many, few)
    runs = [number for number in range(few) for _ in range(each + (number < more))]
    for number, run in enumerate(runs):
        yield (ids[number], targets[run]) if len(ids) == many else (ids[run], targets[number])


class PlacedClaim(NamedTuple):
    """A DRA device and where it stands; `prepared` is what its driver wrote down of this very claim's device."""

    placed: Placed
    prepared: PreparedDevice | None


def place_claim(device: ClaimDevice, named_so: Sequence[PreparedDevice], inventory: Inventory) -> PlacedClaim:
    """Lay a DRA device on NVML's: by what its driver wrote down of this claim, else by its name.

    What it wrote down of other claims' devices of the name (`named_so`) counts only for MIG devices whose place the
    NVIDIA driver keeps back: an instance may be made where another was.
    """
    recognised = recognise_dra(device.driver, device.device)
    device_id = DeviceId(device.device)
    if recognised is None:
        return PlacedClaim(Placed(device_id, None, Located((), UNPARSED)), None)
    own = _noted(device, named_so)
    if own is not None:
        return PlacedClaim(Placed(device_id, recognised.plugin, locate(ByUuid(own.uuid), inventory)), own)
    located = locate(recognised.device, inventory)
    if located.reason == UNTRUSTED:
        others = {found for one in named_so if (found := inventory.find(one.uuid))}
        located = Located(tuple(others)) if len(others) == 1 else located
    return PlacedClaim(Placed(device_id, recognised.plugin, located), None)


def _noted(device: ClaimDevice, named_so: Sequence[PreparedDevice]) -> PreparedDevice | None:
    """What is written down of a claim's device. Kubelets before 1.35 list all its shares as one, without their ids."""
    notes = [
        one
        for one in named_so
        if (one.claim_namespace, one.claim) == (device.claim_namespace, device.claim)
        and device.share_id in ("", one.share_id)
    ]
    if len({one.uuid for one in notes}) != 1:
        return None
    amounts = [one.memory_bytes for one in notes]
    known = sum(one for one in amounts if one is not None)
    return replace(
        notes[0],
        memory_bytes=None if None in amounts else known,
        admin_access=all(one.admin_access for one in notes),
    )
