"""Which MIG devices the container runtime keeps from us: those that were made after our start.

It gives a container the device nodes below /dev/nvidia-caps that are there when the container is made, and none later
(NVIDIA/gpu-monitoring-tools#142): NVML then refuses a new instance's memory, or does not list the instance at all. Only
another container helps. What was missing at our start is not hidden but absent, or withheld for good, and what was seen
once is a plugin's old id: a restart would help neither, so that one restart cannot lead to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpumap.agent.join.inventory import Inventory
from gpumap.model.device_ids import ByUuid, parse
from gpumap.model.observations import ListedPod, Moment, ResourceDevices
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import HiddenDevice

RESTART_AFTER_SECONDS = 30.0
COLLECTIONS = 3
"""How long, and in how many complete collections: a plugin may name a new device a moment before NVML does."""
UNNAMED_TIMES = 20
"""So many times as long where no plugin names it: devices that a DRA driver makes on demand come and go, and each may
cost a restart. After ten minutes the kubelet has forgotten the last one, and waits for nothing before it starts us."""


class Sight(NamedTuple):
    """MIG devices in one complete collection: NVML answered for every GPU, and the List is of this collection."""

    readable: frozenset[Uuid]
    denied: frozenset[Uuid]
    """Listed by NVML, which keeps their memory from us."""
    named: frozenset[Uuid] | None
    """Offered or given away by the kubelet; `None` while its plugins offer nothing, so that it is not known what they
    would."""
    layout: frozenset[Uuid]
    """The partitioned GPUs, and every MIG device that NVML lists."""


class Missed(NamedTuple):
    """Since when (Unix seconds) a device is missed, and how long while it could be seen that it is."""

    since: float
    seconds: float
    collections: int


@dataclass(frozen=True, slots=True)
class HiddenMemory:
    """A fresh one is our own start."""

    first_layout: frozenset[Uuid] | None = None
    """In the first complete collection."""
    offer_known: bool = False
    excused: frozenset[Uuid] = frozenset()
    """Missing at our start, or seen well at any time."""
    missed: Mapping[Uuid, Missed] = field(default_factory=dict)
    looked_at: float | None = None
    """Monotonic time of the last collection, if it was complete."""


def find_hidden(
    before: HiddenMemory, sight: Sight | None, at: Moment, after_seconds: float = RESTART_AFTER_SECONDS
) -> tuple[HiddenMemory, tuple[HiddenDevice, ...]]:
    """Tell which devices are hidden since when. `sight` is `None` where the collection is not complete: it says
    nothing. What was missed before is still missed, but the time until the next complete one does not count."""
    if sight is None:
        return replace(before, looked_at=None), ()
    named = sight.named or frozenset()
    missing = sight.denied | (named - sight.readable)
    first_layout = sight.layout if before.first_layout is None else before.first_layout
    excused = before.excused | sight.readable
    # Our start lasts until plugins that start beside us have said what they offer, as long as that is of the same GPUs.
    if before.first_layout is None or (not before.offer_known and sight.layout == first_layout):
        excused |= missing
    passed = 0.0 if before.looked_at is None else at.monotonic - before.looked_at
    missed = {}
    for uuid in sorted(missing - excused):
        one = before.missed.get(uuid)
        missed[uuid] = Missed(one.since, one.seconds + passed, one.collections + 1) if one else Missed(at.wall, 0.0, 1)
    hidden = tuple(
        HiddenDevice(uuid, one.since)
        for uuid, one in missed.items()
        if one.collections >= COLLECTIONS
        and one.seconds >= (after_seconds if uuid in named else UNNAMED_TIMES * after_seconds)
    )
    offer_known = before.offer_known or sight.named is not None
    return HiddenMemory(first_layout, offer_known, excused, missed, at.monotonic), hidden


def look_for_mig(
    inventory: Inventory,
    pods: Iterable[ListedPod],
    allocatable: tuple[ResourceDevices, ...] | None,
    is_gpu_resource: Callable[[str], bool],
) -> Sight | None:
    """Give what NVML and a List just read say of MIG devices; `None` where a GPU does not tell what it has."""
    if not inventory.up or inventory.nameless or any(gpu.reading is None for gpu in inventory.gpus):
        return None
    instances = [one for gpu in inventory.gpus if gpu.reading for one in gpu.reading.instances]
    held = (row for pod in pods for container in pod.containers for row in container.devices)
    rows = [row for row in (*(allocatable or ()), *held) if is_gpu_resource(row.resource)]
    denied = frozenset(one.uuid for one in instances if one.denied)
    return Sight(
        readable=frozenset(one.uuid for one in instances) - denied,
        denied=denied,
        named=frozenset(_named(inventory, rows)) if allocatable else None,
        layout=frozenset((*inventory.parents, *(one.uuid for one in instances))),
    )


def _named(inventory: Inventory, rows: Iterable[ResourceDevices]) -> Iterator[Uuid]:
    """MIG devices by the name that NVML has for them, else by the one in the id."""
    for row in rows:
        for device_id in row.ids:
            meaning = parse(device_id) if device_id.startswith("MIG-") else None
            if meaning is not None and isinstance(meaning.device, ByUuid):
                yield inventory.find(meaning.device.uuid) or meaning.device.uuid
