"""What each holder of a device uses of it, and what gpumap has seen of its pod there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

from msgspec import structs

from gpumap.model.devices import NodeDevice, grantees, node_devices
from gpumap.model.grouping import grouped
from gpumap.model.node import ContainerOnDevice, Device, Node, Watch

T = TypeVar("T", int, float)


class HolderUse(NamedTuple):
    """What a holder uses of a leaf, or of all leaves of a GPU that it holds as a whole. `None`: unknown."""

    place: NodeDevice
    holder: ContainerOnDevice
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    watch: Watch | None = None
    readable_ratio: float | None = None

    @property
    def idle_seconds(self) -> float | None:
        """Return for how long its pod has certainly not worked."""
        if self.watch is None or self.watch.last_active is None:
            return None
        return max(self.place.node.timestamp - self.watch.last_active, 0.0)


def holder_uses(node: Node) -> list[HolderUse]:
    """Return the holders with a grant of their own. Admin access grants nothing."""
    uses = (use for place in node_devices(node) for use in _uses_of(place))
    return [use for use in uses if use.holder.allocated_gpus != 0]


def _uses_of(place: NodeDevice) -> Iterator[HolderUse]:
    leaves = leaves_of(place)
    rows = grouped((row.name, row) for leaf in leaves for row in leaf.containers)
    for holder in grantees(place.device):
        on_leaves = rows.get(holder.name, ())
        uses = [row.use for row in on_leaves if row.use]
        watches = [row.watch for row in on_leaves if row.watch]
        is_complete = bool(leaves) and len(uses) == len(leaves)
        yield HolderUse(
            place,
            holder,
            _sum([use.memory_bytes for use in uses]) if is_complete else None,
            # The peaks may be at different times.
            _sum([use.memory_peak_bytes for use in uses]) if is_complete else None,
            _watch_of_all(watches) if leaves and len(watches) == len(leaves) else None,
            _least([leaf.readable_ratio for leaf in leaves]),
        )


def _watch_of_all(watches: Sequence[Watch]) -> Watch:
    """Return what gpumap has seen on several leaves: the holder rests only if it rests on each."""
    if len(watches) == 1:
        return watches[0]
    last_active = [watch.last_active for watch in watches]
    seconds = zip(*map(_SECONDS, watches), strict=True)
    seen, known, worked_ago, no_process = map(min, seconds)
    known_times = [moment for moment in last_active if moment is not None]
    return structs.replace(
        watches[0],
        last_active=max(known_times) if len(known_times) == len(watches) else None,
        seen_seconds=seen,
        known_seconds=known,
        worked_seconds_ago=worked_ago,
        no_process_seconds=no_process,
        unknown_seconds=max(watch.unknown_seconds for watch in watches),
        appeared=all(watch.appeared for watch in watches),
        measured=all(watch.measured for watch in watches),
        certain_pod=all(watch.certain_pod for watch in watches),
    )


_SECONDS = attrgetter("seen_seconds", "known_seconds", "worked_seconds_ago", "no_process_seconds")
"""Fields of `Watch`."""


def _sum(values: Collection[T | None]) -> T | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _least(values: Collection[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def leaves_of(place: NodeDevice) -> Sequence[Device]:
    """Return the device, or the MIG devices of a GPU that is assigned as a whole."""
    if not place.device.partitioned:
        return (place.device,)
    return [
        device for device in place.node.devices if device.gpu_uuid == place.device.uuid and device is not place.device
    ]
