"""What each holder of a device uses of it, and for how long it has rested."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from gpumap.model.devices import NodeDevice, grantees, node_devices
from gpumap.model.grouping import grouped
from gpumap.model.node import ContainerOnDevice, Device, Node, Use


class HolderUse(NamedTuple):
    """What a holder uses: of the leaf itself, or of the leaves of a GPU that it holds as a whole.

    `pod_at_work`: other containers of its pod are at work there.
    """

    memory_bytes: int | None
    memory_peak_bytes: int | None
    idle_seconds: float | None
    seen_seconds: float | None
    known_seconds: float | None
    worked_seconds_ago: float | None
    no_process_seconds: float | None
    pod_at_work: bool


_User = tuple[str, Use]
"""A container's name in its pod, and what it uses."""
HolderUses = Sequence[tuple[NodeDevice, ContainerOnDevice, HolderUse | None]]
"""Holders, each with its device and what it uses."""


def holder_uses(node: Node) -> HolderUses:
    """Return the holders of all devices with what they use, as `uses_of`."""
    return [(place, *one) for place in node_devices(node) for one in uses_of(place)]


def uses_of(place: NodeDevice) -> Iterator[tuple[ContainerOnDevice, HolderUse | None]]:
    """Return the holders of a device with a grant of their own, each with what it uses. `None`: unknown."""
    leaves = leaves_of(place)
    users = grouped((one.pod_name, (one.container, one.use)) for leaf in leaves for one in leaf.containers if one.use)
    for holder in grantees(place.device):
        yield holder, _use_of(place, holder, users.get(holder.pod_name, ()), len(leaves))


def _use_of(place: NodeDevice, holder: ContainerOnDevice, of_pod: Sequence[_User], leaves: int) -> HolderUse | None:
    """Return what a holder uses, of the uses of its pod; `None` if it is not known of each leaf.

    It rests only for as long as the other containers of its pod do, a sidecar, an init container: they use its GPU.
    Peaks of several leaves may be of different times.
    """
    uses = [use for container, use in of_pod if container == holder.container]
    if not uses or len(uses) < leaves:
        return None
    others = [use for container, use in of_pod if container != holder.container]
    resting = [*uses, *(use for use in others if use.last_active is not None)]
    memory, peaks, seen, known = zip(*map(_OF_HOLDER, uses), strict=True)
    active, worked, no_process = zip(*map(_OF_RESTING, resting), strict=True)
    return HolderUse(
        memory_bytes=None if None in memory else sum(memory),
        memory_peak_bytes=None if None in peaks else sum(peaks),
        idle_seconds=None if None in active else max(place.node.timestamp - max(active), 0.0),
        seen_seconds=_least(seen),
        known_seconds=_least(known),
        worked_seconds_ago=_least(worked),
        no_process_seconds=_least(no_process),
        pod_at_work=any(_is_at_work(use, place.node) for use in others),
    )


_OF_HOLDER = attrgetter("memory_bytes", "memory_peak_bytes", "seen_seconds", "known_seconds")
_OF_RESTING = attrgetter("last_active", "worked_seconds_ago", "no_process_seconds")
"""Fields of `Use`."""


def _least(values: Collection[Any]) -> float | None:
    """Return the least of the values; `None` if one is unknown."""
    return None if None in values else min(values)


def idle_seconds(use: Use, now: float) -> float | None:
    return None if use.last_active is None else max(now - use.last_active, 0.0)


def leaves_of(place: NodeDevice) -> Sequence[Device]:
    """Return the device, or the MIG devices of a GPU that is assigned as a whole."""
    if not place.device.partitioned:
        return (place.device,)
    return [one for one in place.node.devices if one.gpu_uuid == place.device.uuid and one is not place.device]


def _is_at_work(use: Use, node: Node) -> bool:
    """Return whether it worked lately; if that is unknown, whether it has a process or memory."""
    seconds = idle_seconds(use, node.timestamp)
    if seconds is None:
        return bool(use.processes or use.memory_bytes)
    return seconds < node.idle_after_seconds


def is_watched_for(use: HolderUse | Use | None, seconds: float) -> bool:
    """Return whether gpumap has watched a holder for so long."""
    return use is not None and use.seen_seconds is not None and use.seen_seconds >= seconds
