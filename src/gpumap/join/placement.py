"""On which devices an id stands: by what its plugin answered the kubelet, else by the id, where that can be trusted.

What processes do decides nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpumap.device_ids import ByUuid, DeviceRef, EveryGpu
from gpumap.join.inventory import Inventory
from gpumap.model import ClaimDevice, DeviceId, PluginAnswer, PreparedDevice, Uuid
from gpumap.plugins import Plugin, Trust, named_devices, recognise, recognise_dra

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


def place(
    resource: str, ids: Iterable[DeviceId], answers: Sequence[PluginAnswer], inventory: Inventory
) -> tuple[Placed, ...]:
    """Lay the ids that a container has of a resource on devices.

    `answers` are its plugin's, the one to this resource first; the first that names devices counts.
    """
    placed: list[Placed] = []
    by_plugin: dict[Plugin, list[tuple[DeviceId, DeviceRef | None]]] = {}
    for device_id in sorted(ids):
        recognised = recognise(resource, device_id)
        if recognised is None:
            placed.append(Placed(device_id, None, Located((), UNPARSED)))
        else:
            by_plugin.setdefault(recognised.plugin, []).append((device_id, recognised.device))
    named = next((refs for answer in answers if (refs := named_devices(answer))), ())
    untold = Located((), UNTRUSTED if inventory.up else NVML_DOWN)
    for plugin, of_plugin in by_plugin.items():
        targets = _targets(plugin, named, inventory)
        if not targets and plugin.trust is Trust.ANSWER:
            targets = (untold,)
        placed += _of_plugin(plugin, of_plugin, targets, inventory)
    return tuple(placed)


class PlacedClaim(NamedTuple):
    """A DRA device and where it stands; `prepared` is what its driver wrote down of this very claim's device."""

    placed: Placed
    prepared: PreparedDevice | None


def place_claim(device: ClaimDevice, named_so: Iterable[PreparedDevice], inventory: Inventory) -> PlacedClaim:
    """Lay a DRA device on NVML's, by what its driver wrote down of devices with this name, else by the name."""
    recognised = recognise_dra(device.driver, device.device)
    device_id = DeviceId(device.device)
    if recognised is None:
        return PlacedClaim(Placed(device_id, None, Located((), UNPARSED)), None)
    named_so = tuple(named_so)
    key = (device.claim_namespace, device.claim, device.share_id)
    own = [one for one in named_so if (one.claim_namespace, one.claim, one.share_id) == key]
    written = {found for one in own or named_so if (found := inventory.find(one.uuid))}
    # One name with two uuids: an instance was made where another was.
    located = Located(tuple(written)) if len(written) == 1 else locate(recognised.device, inventory)
    return PlacedClaim(Placed(device_id, recognised.plugin, located), own[0] if len(own) == 1 else None)


def _targets(plugin: Plugin, named: Sequence[DeviceRef], inventory: Inventory) -> tuple[Located, ...]:
    """The devices that the answer names, one by one."""
    if plugin.trust is Trust.ID and not all(isinstance(ref, ByUuid) for ref in named):
        return ()  # a place in an order says less than an id that can be trusted
    targets: list[Located] = []
    for ref in named:
        located = locate(ref, inventory)
        if isinstance(ref, EveryGpu) and len(located.devices) != 1:
            continue  # "all" names none of several
        targets += [Located((uuid,)) for uuid in located.devices] or [located]
    return tuple(dict.fromkeys(targets))


def _of_plugin(
    plugin: Plugin,
    ids: Sequence[tuple[DeviceId, DeviceRef | None]],
    targets: Sequence[Located],
    inventory: Inventory,
) -> list[Placed]:
    """Lay one plugin's ids on the devices that are named, by the ids themselves where none is."""
    if not targets:
        return [Placed(device_id, plugin, locate(ref, inventory)) for device_id, ref in ids]
    order = {target: number for number, target in enumerate(targets)}
    placed: list[Placed] = []
    strays: list[DeviceId] = []
    for device_id, ref in ids:
        own = locate(ref, inventory) if plugin.trust is Trust.ID else None
        if own is not None and own in order:
            placed.append(Placed(device_id, plugin, own, order[own]))
        else:
            strays.append(device_id)
    covered = {one.located for one in placed}
    free = [target for target in targets if target not in covered] or list(targets)
    for device_id, target in _dealt(strays, free):
        placed.append(Placed(device_id, plugin, target, order[target]))
    return placed


def _dealt(ids: Sequence[DeviceId], targets: Sequence[Located]) -> Iterator[tuple[DeviceId, Located]]:
    """Each target gets as many ids in a row as the others, the first ones what is left over. Where there are more
    targets than ids, an id stands on several: the container has them all."""
    if not ids:
        return
    many, few = max(len(ids), len(targets)), min(len(ids), len(targets))
    each, more = divmod(many, few)
    runs = [number for number in range(few) for _ in range(each + (number < more))]
    for number, run in enumerate(runs):
        yield (ids[number], targets[run]) if len(ids) == many else (ids[run], targets[number])
