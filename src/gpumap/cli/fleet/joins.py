"""A server's values of each node, joined by their labels: its devices, the containers on them, its sources. Pure.

What series do not have is null or empty: processes, reasons, counters. So is what was not asked for. A missing series
is not 0: if no series names the holders of a device, it is not free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from msgspec import structs

from gpumap.cli.fleet import queries
from gpumap.cli.fleet.queries import AskedFamily, DeviceInfo, DevicelessGpu
from gpumap.cli.fleet.targets import Key, Labels, Name, Target, TargetsOfNode, nodes_of
from gpumap.cli.fleet.values import FamilyValues, Value, uuid_label
from gpumap.model import remedies
from gpumap.model.devices import NO_CONTAINER, add_others, place_of, sources_up
from gpumap.model.findings import count_gpus_once, sort_findings, why_nameless, why_of
from gpumap.model.formatting import listed
from gpumap.model.gaps import gaps_of
from gpumap.model.grouping import grouped
from gpumap.model.names import FINDINGS, GPU_FINDINGS, ContainerName, Owner, PodName, Source
from gpumap.model.node import (
    ContainerOnDevice,
    Device,
    Driver,
    Finding,
    Gpu,
    Grant,
    HostUse,
    NamelessGpu,
    Node,
    OwnerUse,
    Pod,
    SourceHealth,
    Unjudged,
    UnmatchedSlots,
    Use,
    Watch,
    Workload,
)
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.readings import DeviceMemory, GpuReading, MigInstance, Uuid

Slots = dict[str, int]
"""By resource."""
FamilyRows = dict[str, dict[Labels, Value]]
"""By family, then by its own labels."""
_DIGITS_MAX = 10


class Answers(NamedTuple):
    """A server's values of these targets, by family."""

    targets: Mapping[Key, Target]
    names: Mapping[Key, Name]
    asked: Sequence[AskedFamily]
    values: Mapping[str, FamilyValues]


@dataclass(frozen=True, slots=True)
class NodeSeries:
    """The values of a node, and by uuid what its devices have. `faults` are of GPUs that are down, `partitioned` are
    GPUs in MIG mode. `only_findings`: nothing else was asked for."""

    node: TargetsOfNode
    target: Target
    asked: Sequence[AskedFamily]
    rows: FamilyRows
    only_findings: bool = False
    infos: dict[str, DeviceInfo] = field(default_factory=dict)
    holders: dict[str, dict[ContainerName, Slots]] = field(default_factory=dict)
    users: dict[str, list[ContainerName]] = field(default_factory=dict)
    owners: dict[str, list[OwnerUse]] = field(default_factory=dict)
    partitioned: set[str] = field(default_factory=set)
    faults: dict[str, str] = field(default_factory=dict)

    def of(self, family: AskedFamily) -> Mapping[Labels, Value]:
        """Return a family's values by its own labels."""
        return self.rows.get(family.name, {})

    def value(self, family: AskedFamily, *labels: str) -> Value | None:
        return self.of(family).get(labels)

    def whole(self, family: AskedFamily, *labels: str) -> int | None:
        """Return a value that is whole: bytes, processes."""
        value = self.of(family).get(labels)
        return None if value is None else int(value)

    @property
    def deviceless(self) -> list[DevicelessGpu]:
        return [DevicelessGpu(*labels) for labels in sorted(self.of(queries.DEVICELESS))]


# --- the rows of each node --------------------------------------------------------------------------------------------


def series_of_nodes(answers: Answers) -> tuple[list[NodeSeries], list[str]]:
    """Return the nodes, sorted by the names that tables show, and sentences on rows of unknown targets."""
    rows, places, odd = _by_target(answers)
    gpus_by_index: dict[Key, dict[str, str]] = {}
    for key, of_target in rows.items():
        infos = (DeviceInfo(*labels) for labels in of_target.get(queries.DEVICE_INFO.name, ()))
        gpus_by_index[key] = {info.index: info.gpu_uuid for info in infos}
    nodes = nodes_of(answers.targets, answers.names, places, gpus_by_index)
    asked, only_findings = answers.asked, queries.GPU_DOWN not in answers.asked
    found = [
        NodeSeries(one, answers.targets[one.keys[0]], asked, _of_node(one, rows, asked), only_findings) for one in nodes
    ]
    for one in found:
        _join(one)
    return found, odd


def _by_target(answers: Answers) -> tuple[dict[Key, FamilyRows], dict[str, list[Key]], list[str]]:
    """Return the rows of each target, the targets that know each device, and sentences on rows without a target.

    A row that has too few labels of its target belongs to the target that knows its device.
    """
    rows: dict[Key, FamilyRows] = {key: {} for key in answers.targets}
    for family in answers.asked:
        width = len(family.by)
        for labels, value in answers.values[family.name].values.items():
            rows.setdefault(labels[width:], {}).setdefault(family.name, {})[labels[:width]] = value
    places: dict[str, list[Key]] = {}
    for key in answers.targets:
        known = (rows[key].get(family.name, ()) for family in (queries.DEVICE_INFO, queries.HOLDER_COUNT))
        for uuid in {labels[0] for of_family in known for labels in of_family}:
            places.setdefault(uuid, []).append(key)
    odd = []
    for family in answers.asked if () not in answers.targets else ():
        label = uuid_label(family)
        for labels, value in rows.get((), {}).get(family.name, {}).items():
            keys = places.get(labels[family.by.index(label)], ()) if label else ()
            for key in keys[:1]:
                rows[key].setdefault(family.name, {})[labels] = value
            if not keys:
                named = ", ".join(f"{name}={one}" for name, one in zip(family.by, labels, strict=True))
                odd.append(f"{family.name}{{{named}}} is of an unknown target")
    return rows, places, odd


_HELD, _USED, _PRESENT = "held", "used", "present"
_KIND_OF_PART = {
    **dict.fromkeys((queries.HOLDERS, queries.SHARES, queries.GRANTS, queries.OFFERS), _HELD),
    **dict.fromkeys((queries.USE, queries.PEAKS, queries.ACTIVITY, queries.LAST_SEEN), _USED),
    **dict.fromkeys((queries.OWNERS, queries.WORK), _USED),
}
_LEADING = (queries.DEVICE_INFO, queries.HOLDER_COUNT, queries.OWNER_BYTES, queries.OWNER_PROCESSES)
"""The series that exist for a device if a target knows anything of their kind about it."""


def _of_node(node: TargetsOfNode, rows: Mapping[Key, FamilyRows], asked: Sequence[AskedFamily]) -> FamilyRows:
    """Return the values of a node. Of several targets, the newest that knows a device counts for it.

    The values of two agents must not be mixed: what one assigns to a pod is unknown to the other, and both together are
    more than exists.
    """
    if len(node.keys) == 1:
        return rows[node.keys[0]]
    newest = next((key for key in node.keys if rows[key]), node.keys[0])
    judge = next((key for key in node.keys if rows[key].get(queries.JUDGED.name)), newest)
    leaders: dict[tuple[str, str], Key] = {}
    found: FamilyRows = {}
    for family in (*_LEADING, *asked):
        kind, label = _KIND_OF_PART.get(family.part, _PRESENT), uuid_label(family)
        for key in node.keys:
            for labels, value in rows[key].get(family.name, {}).items():
                leader = judge if "finding" in family.by else newest
                if label:
                    leader = leaders.setdefault((kind, labels[family.by.index(label)]), key)
                if family is queries.DEVICE_INFO:
                    leaders.setdefault((kind, DeviceInfo(*labels).gpu_uuid), key)
                if leader == key:
                    found.setdefault(family.name, {})[labels] = value
    return found


def _join(found: NodeSeries) -> None:
    """Group the series of each device."""
    for labels in sorted(found.of(queries.DEVICE_INFO)):
        found.infos.setdefault(labels[0], DeviceInfo(*labels))
    for info in [*found.infos.values()]:
        # A partitioned GPU that was assigned as a whole is a device without series of its own.
        whole = structs.replace(info, uuid=info.gpu_uuid, mig_profile="", gpu_instance_id="", compute_instance_id="")
        found.infos.setdefault(info.gpu_uuid, whole)
    found.partitioned.update(info.gpu_uuid for uuid, info in found.infos.items() if uuid != info.gpu_uuid)
    for gpu in found.deviceless:
        info = DeviceInfo(gpu.gpu_uuid, gpu.gpu_uuid, gpu.index, gpu.minor, gpu.pci_bus_id, gpu.model)
        found.infos.setdefault(gpu.gpu_uuid, info)
    for (*name, uuid, resource), slots in sorted(found.of(queries.SLOTS).items()):
        found.holders.setdefault(uuid, {}).setdefault(ContainerName(*name), {})[resource] = int(slots)
    for *name, uuid in found.of(queries.HOLDING):
        found.holders.setdefault(uuid, {}).setdefault(ContainerName(*name), {})
    for *name, uuid in sorted(found.of(queries.PROCESSES)):
        found.users.setdefault(uuid, []).append(ContainerName(*name))
    rows = {*found.of(queries.OWNER_BYTES), *found.of(queries.OWNER_PROCESSES)}
    for owner in Owner:
        for uuid in sorted(uuid for uuid, of in rows if of == owner):
            sums = (found.whole(family, uuid, owner) for family in (queries.OWNER_BYTES, queries.OWNER_PROCESSES))
            found.owners.setdefault(uuid, []).append(OwnerUse(owner, *sums))
    found.partitioned.update(gpu.gpu_uuid for gpu in found.deviceless)
    found.faults.update(dict.fromkeys((uuid for (uuid,) in found.of(queries.GPU_DOWN)), "unknown"))
    for uuid, reason in sorted(found.of(queries.GPU_FAULT)):
        if uuid in found.faults:
            found.faults[uuid] = reason


# --- the node ---------------------------------------------------------------------------------------------------------


def node_of(found: NodeSeries) -> Node:
    """Return what series have of a node."""
    devices = tuple(sorted(map(partial(_device, found), _uuids(found)), key=place_of))
    gpus = tuple(sorted(_gpus(devices, found), key=lambda gpu: (gpu.index, gpu.uuid)))
    unmatched = tuple(_unmatched(found))
    capabilities = {name: bool(present) for (name,), present in found.of(queries.CAPABILITY).items()}
    findings = sort_findings(count_gpus_once([*_findings(found, {gpu.uuid: gpu.index for gpu in gpus})]))
    return Node(
        timestamp=found.target.collected_at,
        interval_seconds=found.target.interval_seconds,
        name=found.node.shown,
        internal_ip=found.node.internal_ip or "",
        driver=next((Driver(*labels) for labels in sorted(found.of(queries.DRIVER_INFO))), None),
        gpus=gpus,
        nameless_gpus=tuple(_nameless_gpus(found)),
        devices=devices,
        unmatched=unmatched,
        pods=tuple(_pods(devices, unmatched, found)),
        sources=tuple(_sources(found)),
        capabilities=capabilities,
        remedies=remedies.capability_remedies(capabilities, gpu_answers=any(gpu.up for gpu in gpus)),
        findings=findings,
        judged={kind: int(count) for (kind,), count in found.of(queries.JUDGED).items()},
        unjudged=tuple(
            Unjudged(*NO_CONTAINER, reason=reason, findings=(kind,))
            for (kind, reason), count in found.of(queries.UNJUDGED).items()
            for _ in range(int(count))
        ),
    )


def faults_without_device(found: NodeSeries) -> Iterator[str]:
    """Return a sentence for each GPU that does not answer and that has no device in any series."""
    known = {info.gpu_uuid for info in found.infos.values()}
    for uuid, reason in sorted(found.faults.items()):
        if uuid not in known:
            yield f"node {found.node.shown}: GPU {uuid} is down: {reason}"


# --- devices ----------------------------------------------------------------------------------------------------------


def _uuids(found: NodeSeries) -> set[str]:
    """Return the devices that any series is about. NVML does not report all of them."""
    counted = (labels[0] for family in (queries.HOLDER_COUNT, queries.ALLOCATABLE) for labels in found.of(family))
    wasted = (uuid for kind, *_, uuid in found.of(queries.FINDING_SINCE) if kind not in GPU_FINDINGS and uuid)
    infos = (labels[0] for labels in found.of(queries.DEVICE_INFO))
    return {*infos, *counted, *wasted, *found.holders, *found.users}


def _device(found: NodeSeries, uuid: str) -> Device:
    info = found.infos.get(uuid, DeviceInfo(uuid))
    gpu_uuid = Uuid(info.gpu_uuid) if info.gpu_uuid else None
    place = Uuid(uuid), gpu_uuid, _nvml_number(info.index), uuid in found.partitioned, _mig(info)
    if found.only_findings:
        return Device(*place)
    holders = found.holders.get(uuid, {})
    whole = found.holders.get(info.gpu_uuid, {}) if info.gpu_uuid != uuid else {}
    # Unmatched slots exist only with a List. A device that one may be on has no gpumap_device_holders.
    least = len({*holders, *whole}) if whole or found.of(queries.UNMATCHED) else None
    owners = dict(_owners_of_containers(found, uuid, {*holders, *whole}))
    count = found.whole(queries.HOLDER_COUNT, uuid)
    device = Device(
        *place,
        memory=_memory(found, uuid),
        allocatable={
            resource: int(slots) for (of, resource), slots in _sorted(found, queries.ALLOCATABLE) if of == uuid
        },
        holders=least if count is None else count,
        may_have_more=least is not None and count is None,
        owners=tuple(found.owners.get(uuid, ())),
        containers=tuple(_container(found, uuid, name, owner) for name, owner in sorted(owners.items())),
        host=tuple(
            HostUse(
                work=Workload(kind, name),
                memory_bytes=found.whole(queries.HOST_MEMORY, kind, name, uuid),
                processes=int(processes),
                sm_ratio=found.value(queries.HOST_SM, kind, name, uuid),
            )
            for (kind, name, of), processes in _sorted(found, queries.HOST_PROCESSES)
            if of == uuid
        ),
    )
    return add_others(device)


def _owners_of_containers(
    found: NodeSeries, uuid: str, holders: Collection[ContainerName]
) -> Iterator[tuple[ContainerName, Owner]]:
    """Return the owner of each container on a device. A holder without slots is `scheduled`.

    No series has that word for a container; the sums by owner decide. An init container that was assigned the device is
    no holder, as the kubelet's list does not have it: its processes are still among the device's `assigned` ones. If
    several containers are possible, those of a pod that holds the device come first. The sums are then right, but two
    users without a grant may have each other's owner.
    """
    users = found.users.get(uuid, ())
    running = {name: found.of(queries.PROCESSES)[(*name, uuid)] for name in users}
    held = {uuid, found.infos[uuid].gpu_uuid} if uuid in found.infos else {uuid}
    with_slots = {name for one in held for name, slots in found.holders.get(one, {}).items() if slots}
    owner_of = {name: Owner.ASSIGNED if name in with_slots else Owner.SCHEDULED for name in holders}
    owner_of |= {name: Owner.UNASSIGNED for name in users if (*name, uuid) in found.of(queries.UNASSIGNED)}
    pods = {name.pod_name for name in holders}
    for owner in (Owner.ASSIGNED, Owner.SCHEDULED):
        left = found.whole(queries.OWNER_PROCESSES, uuid, owner) or 0
        left -= sum(int(running[name]) for name in users if owner_of.get(name) is owner)
        for name in sorted(running, key=lambda name: (name.pod_name not in pods, name)):
            if name not in owner_of and 0 < running[name] <= left:
                owner_of[name] = owner
                left -= int(running[name])
    for name in {*users, *found.holders.get(uuid, ())}:
        yield name, owner_of.get(name, Owner.UNKNOWN)


def _container(found: NodeSeries, uuid: str, name: ContainerName, owner: Owner) -> ContainerOnDevice:
    slots = found.holders.get(uuid, {}).get(name)
    on = (*name, uuid)
    reserves = (uuid, *name.pod_name) in found.of(queries.RESERVED)
    grant = (
        None
        if slots is None
        else Grant(
            slots=slots,
            gpus=found.value(queries.ALLOCATED_GPUS, *on),
            memory_bytes=found.whole(queries.ALLOCATED_MEMORY, *on),
            admin_access=None if not reserves and {*slots} == {DRA_DRIVER} else False,
            reservation=reserves,
        )
    )
    return ContainerOnDevice(
        *name, uuid=Uuid(uuid), owner=owner, grant=grant, use=_use(found, on), watch=_watch(found, on)
    )


def _watch(found: NodeSeries, on: Labels) -> Watch | None:
    """Return when the pod last worked: the only part of it with a series."""
    last_active = found.value(queries.LAST_ACTIVE, *on)
    return None if last_active is None else Watch(last_active, 0.0, 0.0, 0.0, 0.0)


def _use(found: NodeSeries, on: Labels) -> Use | None:
    processes = found.whole(queries.PROCESSES, *on)
    if processes is None:
        return None
    return Use(
        memory_bytes=found.whole(queries.USED, *on),
        memory_peak_bytes=found.whole(queries.PEAK, *on),
        processes=processes,
        sm_ratio=found.value(queries.SM, *on),
        memory_controller_busy_ratio=None,
        encoder_ratio=None,
        decoder_ratio=None,
        sm_activity_ratio=found.value(queries.SM_ACTIVITY, *on),
    )


def _mig(info: DeviceInfo) -> MigInstance | None:
    gpu_instance, compute_instance = _nvml_number(info.gpu_instance_id), _nvml_number(info.compute_instance_id)
    if not info.mig_profile or gpu_instance is None or compute_instance is None:
        return None
    return MigInstance(Uuid(info.uuid), gpu_instance, compute_instance, info.mig_profile)


def _memory(found: NodeSeries, uuid: str, *, of_gpu: bool = False) -> DeviceMemory | None:
    """Return `None` if memory cannot be read. Free memory is the rest: NVML's parts add up (nvmlMemory_v2_t)."""
    families = (
        (queries.GPU_MEMORY_TOTAL, queries.GPU_MEMORY_USED) if of_gpu else (queries.MEMORY_TOTAL, queries.MEMORY_USED)
    )
    total, used = (found.whole(family, uuid) for family in families)
    if total is None or used is None:
        return None
    reserved = None if of_gpu else found.whole(queries.MEMORY_RESERVED, uuid)
    return DeviceMemory(total, used, max(total - used - (reserved or 0), 0), reserved)


def _nvml_number(text: str) -> int | None:
    """Return NVML's number; None for other text, and for a number that no machine has."""
    return int(text) if len(text) < _DIGITS_MAX and text.isascii() and text.isdigit() else None


def _sorted(found: NodeSeries, family: AskedFamily) -> list[tuple[Labels, Value]]:
    return sorted(found.of(family).items())


# --- GPUs, and the node as a whole ------------------------------------------------------------------------------------


def _gpus(devices: Iterable[Device], found: NodeSeries) -> Iterator[Gpu]:
    """Return the physical GPUs of these devices, and those without a device; if only findings were asked for, those
    with a fault, or that are not offered."""
    infos = {device.gpu_uuid: found.infos[device.uuid] for device in reversed([*devices]) if device.gpu_uuid}
    infos |= {Uuid(gpu.gpu_uuid): found.infos[gpu.gpu_uuid] for gpu in found.deviceless if gpu.gpu_uuid not in infos}
    faulty = {uuid for kind, *_, uuid in found.of(queries.FINDING_SINCE) if kind in GPU_FINDINGS}
    for uuid, info in infos.items():
        if found.only_findings and uuid not in faulty:
            continue
        if uuid and (index := _nvml_number(info.index)) is not None:
            yield _gpu(uuid, index, info, found)


def _gpu(uuid: Uuid, index: int, info: DeviceInfo, found: NodeSeries) -> Gpu:
    """Return a GPU. Its other measurements are in series that are not asked for."""
    fault = found.faults.get(uuid)
    remedy = remedies.fault_remedy(fault, index)
    memory = _memory(found, uuid) or _memory(found, uuid, of_gpu=True)
    reading = GpuReading(index, memory=memory, utilization_ratio=found.value(queries.UTILIZATION, uuid))
    return Gpu(
        uuid=uuid,
        index=index,
        minor=_nvml_number(info.minor),
        pci_bus_id=info.pci_bus_id,
        model=info.model,
        partitioned=uuid in found.partitioned,
        fault=fault,
        stuck_seconds=found.value(queries.STUCK, uuid) or 0.0,
        reading=None if fault else reading,
        remedies={"fault": remedy} if remedy else {},
    )


def _nameless_gpus(found: NodeSeries) -> Iterator[NamelessGpu]:
    for gpu in found.deviceless:
        index = _nvml_number(gpu.index)
        if not gpu.gpu_uuid and index is not None:
            yield NamelessGpu(index, gpu.reason, gpu.pci_bus_id)


def _pods(devices: Iterable[Device], unmatched: Iterable[UnmatchedSlots], found: NodeSeries) -> Iterator[Pod]:
    rows = (row for device in devices for row in device.containers)
    uids = {row.pod_name: "" for row in (*rows, *unmatched)}
    uids |= {PodName(namespace, pod): uid for namespace, pod, uid in found.of(queries.POD_INFO)}
    return (Pod(*name, uid) for name, uid in sorted(uids.items()))


def _sources(found: NodeSeries) -> Iterator[SourceHealth]:
    for source in Source:
        if (up := found.value(queries.SOURCE_UP, source)) is not None:
            last_success = found.value(queries.SOURCE_SUCCESS, source)
            yield SourceHealth(source, up=bool(up), last_success=last_success)


def _unmatched(found: NodeSeries) -> Iterator[UnmatchedSlots]:
    for (namespace, pod, container, resource, reason), slots in _sorted(found, queries.UNMATCHED):
        if slots:
            remedy = remedies.UNMATCHED.get(reason)
            yield UnmatchedSlots(namespace, pod, container, resource, reason, int(slots), remedy)


def _findings(found: NodeSeries, indices: Mapping[str, int]) -> Iterator[Finding]:
    """Return the findings, without their evidence. `indices` are those of the GPUs."""
    now = found.target.collected_at
    # The names of a finding were empty, and the scrape honors no labels, if they are gpumap's own.
    own = [found.target.labels.get(label, "") for label in queries.CONTAINER]
    for labels, since in found.of(queries.FINDING_SINCE).items():
        kind, reason, *name, uuid = labels
        if kind not in FINDINGS:
            continue  # no server that heeds the query answers this
        nameless = [gpu for gpu in _nameless_gpus(found) if kind == "fault" and not uuid and gpu.fault == reason]
        yield Finding(
            *(NO_CONTAINER if name == own else name),
            finding=kind,
            reason=reason,
            uuid=Uuid(uuid) if uuid else None,
            since=since,
            gpus=found.value(queries.FINDING_GPUS, *labels),
            memory_bytes=found.whole(queries.FINDING_MEMORY, *labels),
            why=why_nameless(reason, nameless) if nameless else why_of(kind, reason, max(now - since, 0.0)),
            remedy=remedies.finding_remedy(kind, reason, indices.get(uuid)),
        )


# --- gaps: what a gpumap that answers does not report, because groups or families are not served ----------------------

_NOT_SERVED = "its gpumap does not report"
_HOLDERS = "the holders of its GPUs (add --collect allocation, or stop dropping its series)"
_LACKS_PODS = (
    "the holders of its GPUs are not known: the kubelet lists no pod of the API server yet (or Prometheus drops "
    "gpumap_device_holders)"
)
"""The reason if other series of the group allocation exist (gpumap_node_info)."""
_USERS = "the users of its GPUs (its driver lists no processes; else add --collect use, or stop dropping its series)"
_FINDINGS = "what is wrong on it (add --collect findings, or stop dropping its series)"
_GPUS = "its GPUs (add --collect device without --no-native, or stop dropping its series)"


def gaps(found: NodeSeries, node: Node, parts: Collection[str], namespace: str, *, slots_served: bool) -> Iterator[str]:
    """Return a sentence for each kind of series that these parts need and that the node's gpumap does not serve,
    although its source answers. `slots_served`: some gpumap serves slots."""
    up, devices = sources_up(node), node.devices
    if not node.sources:
        yield "its gpumap does not report its sources (Prometheus drops gpumap_source_up)"
        return
    if queries.FINDINGS in parts and up and not node.judged:
        yield f"{_NOT_SERVED} {_FINDINGS}"
    if {*parts} == {queries.FINDINGS}:
        return
    if "nvml" in up and not (node.gpus or node.nameless_gpus) and (devices or not node.driver):
        yield f"{_NOT_SERVED} {_GPUS}"
    if queries.HOLDERS in {family.part for family in found.asked} and "kubelet" in up and devices:
        if all(device.holders is None for device in devices):
            yield _LACKS_PODS if found.node.has_info else f"{_NOT_SERVED} {_HOLDERS}"
        elif not namespace and (fewer := [one.uuid for one in devices if _has_more_holders(one, found)]):
            yield f"some holders of {listed(fewer)} are missing (Prometheus drops gpumap_allocation_info)"
        elif not slots_served and _lacks_slots(found):
            yield "how the holders hold its GPUs is not known (Prometheus drops gpumap_allocation_slots)"
    if queries.USE in parts and "nvml" in up:
        yield from _gaps_of_use(node, namespace)


def duplicate_devices(nodes: Iterable[Node]) -> dict[str, list[str]]:
    """Return devices that more than one node has, which is impossible, and the nodes."""
    names = grouped((device.uuid, one.name) for one in nodes for device in one.devices)
    return {uuid: several for uuid, several in names.items() if len(several) > 1}


def _has_more_holders(device: Device, found: NodeSeries) -> bool:
    known = {name for uuid in (device.uuid, device.gpu_uuid or "") for name in found.holders.get(uuid, ())}
    return (found.whole(queries.HOLDER_COUNT, device.uuid) or 0) > len(known)


def _lacks_slots(found: NodeSeries) -> bool:
    """Whether there are holders, and nothing shows that a scheduler granted these devices without slots."""
    shared = found.of(queries.RESERVED) or any(owner == "scheduled" for _, owner in found.of(queries.OWNER_BYTES))
    return bool(found.of(queries.HOLDING)) and not shared


def _gaps_of_use(node: Node, namespace: str) -> Iterator[str]:
    measurable = gaps_of(node).measurable
    if measurable and not any(one.owners for one in measurable):
        yield f"{_NOT_SERVED} {_USERS}"
    elif not namespace and any(_lacks_users(one) for one in measurable):
        yield "some users of its GPUs are missing (Prometheus drops gpumap_container_gpu_processes)"


def _lacks_users(device: Device) -> bool:
    """Whether containers have processes there, and no container is named."""
    of_containers = (Owner.ASSIGNED, Owner.UNASSIGNED, Owner.SCHEDULED)
    running = sum(one.processes or 0 for one in device.owners if one.owner in of_containers)
    return running > 0 and not any(one.use for one in device.containers)
