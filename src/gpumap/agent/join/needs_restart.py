"""Faults that only a new container solves: MIG devices hidden by the container runtime, and a lost driver.

**Hidden MIG devices.** The runtime gives a container the device nodes below /dev/nvidia-caps that exist when it makes
the container, and none later (NVIDIA/gpu-monitoring-tools#142). NVML then refuses to report a new instance's memory, or
does not list the instance. A device that is missing at gpumap's start is not hidden but absent, or refused for good. A
device that gpumap could read at any time before is an old id of a plugin. A restart would not help in either case, so
one restart cannot cause the next.

**Lost driver.** A container keeps the library that it was made with, if the runtime injects it or a single file is
mounted. After an update of the driver it no longer fits the kernel module. A runtime that rewrites the container's
cgroup (after `systemctl daemon-reload`) may drop its device nodes (NVIDIA/nvidia-container-toolkit#48). If NVML never
answered, a restart would not help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpumap.agent.join.inventory import Inventory
from gpumap.model.device_ids import ByUuid, parse
from gpumap.model.observations import Failed, ListedPod, Moment, NvmlReading, Observed, ResourceDevices
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import HiddenDevice

COLLECTIONS = 3
"""In how many collections a fault must be seen. A plugin may list a new device a moment before NVML does. The first
worker process exits with the old library, and the next one may find the new one."""
UNNAMED_TIMES = 20
"""Factor for devices that no plugin lists: a DRA driver makes devices on demand, and each could cause a restart. After
ten minutes the kubelet has forgotten the last restart, and starts the container without a back-off."""

# --- hidden MIG devices -----------------------------------------------------------------------------------------------


class VisibleMigDevices(NamedTuple):
    """MIG devices in one complete collection: NVML answered for every GPU, and the List is of this collection."""

    readable: frozenset[Uuid]
    denied: frozenset[Uuid]
    """NVML lists them and refuses to report their memory."""
    named: frozenset[Uuid] | None
    """The kubelet offers or assigns them; `None` while its plugins offer nothing, and may start to."""
    layout: frozenset[Uuid]
    """The partitioned GPUs, and every MIG device that NVML lists."""


class Missed(NamedTuple):
    """A missing device: since when (Unix seconds), and for how long gpumap could check that it is missing."""

    since: float
    seconds: float
    collections: int


@dataclass(frozen=True, slots=True)
class HiddenMemory:
    """`HiddenMemory()` is the state at gpumap's start."""

    first_layout: frozenset[Uuid] | None = None
    """In the first complete collection."""
    offer_known: bool = False
    excused: frozenset[Uuid] = frozenset()
    """Missing at gpumap's start, or readable at any time."""
    missed: Mapping[Uuid, Missed] = field(default_factory=dict)
    checked_at: float | None = None
    """Monotonic time of the last collection, if it was complete."""


def find_hidden(
    previous: HiddenMemory, visible: VisibleMigDevices | None, moment: Moment, after_seconds: float
) -> tuple[HiddenMemory, tuple[HiddenDevice, ...]]:
    """Return the devices that are hidden, and since when.

    `visible` is `None` if the collection is not complete. Devices that were missing before are then still missing, but
    the time until the next complete collection does not count.
    """
    if visible is None:
        return replace(previous, checked_at=None), ()
    missing = visible.denied | ((visible.named or frozenset()) - visible.readable)
    first_layout = visible.layout if previous.first_layout is None else previous.first_layout
    excused = previous.excused | visible.readable
    # The start lasts until plugins that start together with gpumap offer their devices, while the layout is the same.
    if previous.first_layout is None or (not previous.offer_known and visible.layout == first_layout):
        excused |= missing
    passed = 0.0 if previous.checked_at is None else moment.monotonic - previous.checked_at
    missed = {}
    for uuid in sorted(missing - excused):
        earlier = previous.missed.get(uuid)
        missed[uuid] = Missed(moment.wall, 0.0, 1)
        if earlier is not None:
            missed[uuid] = Missed(earlier.since, earlier.seconds + passed, earlier.collections + 1)
    offer_known = previous.offer_known or visible.named is not None
    memory = HiddenMemory(first_layout, offer_known, excused, missed, moment.monotonic)
    return memory, tuple(_hidden(missed, visible, after_seconds))


def _hidden(missed: Mapping[Uuid, Missed], visible: VisibleMigDevices, after_seconds: float) -> Iterator[HiddenDevice]:
    """Return the devices that are missing for long enough."""
    for uuid, missing in missed.items():
        is_named = visible.named is not None and uuid in visible.named
        seconds = after_seconds if is_named else UNNAMED_TIMES * after_seconds
        if missing.collections >= COLLECTIONS and missing.seconds >= seconds:
            yield HiddenDevice(uuid, missing.since)


def visible_mig_devices(
    inventory: Inventory,
    pods: Iterable[ListedPod],
    allocatable: tuple[ResourceDevices, ...] | None,
    is_gpu_resource: Callable[[str], bool],
) -> VisibleMigDevices | None:
    """Return the MIG devices of NVML and of a new List; `None` if a GPU does not report its devices."""
    if (
        not inventory.up
        or inventory.nameless
        or any(gpu.reading is None or gpu.reading.mig_unknown for gpu in inventory.gpus)
    ):
        return None
    instances = [instance for gpu in inventory.gpus if gpu.reading for instance in gpu.reading.instances]
    denied = frozenset(instance.uuid for instance in instances if instance.denied)
    assigned = (devices for pod in pods for container in pod.containers for devices in container.devices)
    rows = (*(allocatable or ()), *assigned)
    return VisibleMigDevices(
        readable=frozenset(instance.uuid for instance in instances) - denied,
        denied=denied,
        named=frozenset(_named(inventory, rows, is_gpu_resource)) if allocatable else None,
        layout=frozenset((*inventory.parents, *(instance.uuid for instance in instances))),
    )


def _named(
    inventory: Inventory, rows: Iterable[ResourceDevices], is_gpu_resource: Callable[[str], bool]
) -> Iterator[Uuid]:
    """Return MIG devices by NVML's uuid; if NVML does not list them, by the uuid in the id."""
    for row in rows:
        ids = [device_id for device_id in row.ids if device_id.startswith("MIG-")]
        for meaning in map(parse, ids) if ids and is_gpu_resource(row.resource) else ():
            if meaning is not None and isinstance(meaning.device, ByUuid):
                yield inventory.find(meaning.device.uuid) or meaning.device.uuid


# --- the lost driver --------------------------------------------------------------------------------------------------

_WHY = {
    "driver_version_mismatch": "the driver has changed, and the library in this container does not match it: "
    "restarting to get the new library",
    "unknown": "NVML answered before and now fails for an unknown reason. This container may have lost its "
    "device nodes, as after `systemctl daemon-reload`: restarting to get them back",
}
_INCONCLUSIVE = frozenset({"deadline_exceeded"})
"""A late read between two failures does not end the fault."""


class LostDriverMemory(NamedTuple):
    """`LostDriverMemory()` is the state at gpumap's start. `since` is monotonic."""

    has_answered: bool = False
    reason: str = ""
    since: float = 0.0
    collections: int = 0


def find_lost_driver(
    previous: LostDriverMemory, nvml: Observed[NvmlReading] | Failed, moment: Moment, after_seconds: float
) -> tuple[LostDriverMemory, str]:
    """Return why NVML is lost, after it failed for the same reason for long enough; otherwise an empty text."""
    if isinstance(nvml, Observed):
        return LostDriverMemory(has_answered=True), ""
    reason = nvml.complaints[-1].reason if nvml.complaints else ""
    if reason in _INCONCLUSIVE:
        return previous, ""
    if not previous.has_answered or reason not in _WHY:
        return LostDriverMemory(previous.has_answered), ""
    if reason != previous.reason:
        return LostDriverMemory(True, reason, moment.monotonic, 1), ""
    after = previous._replace(collections=previous.collections + 1)
    lost = after.collections >= COLLECTIONS and moment.monotonic - after.since >= after_seconds
    return after, f"{_WHY[reason]} ({nvml.complaints[-1].detail})" if lost else ""
