"""The map of a node, as /api/v1/map has it, made of the series that a server has of it. Pure.

What series do not have is null or empty: processes, reasons, counters. So is what was not asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpumap.cli.fleet import families
from gpumap.cli.fleet.cluster import Cluster, Container, TargetFacts, devices_of, newest_facts, users_by_owner
from gpumap.cli.fleet.families import DeviceInfo
from gpumap.cli.fleet.targets import Key, Node, Target
from gpumap.model import map as entries
from gpumap.model import remedies
from gpumap.model.findings import DEFAULTS
from gpumap.model.map import DeviceEntry, GpuEntry, MemoryEntry, NodeMap
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.terms import Source

_DIGITS_MAX = 10


def node_map_of(node: Node, targets: Mapping[Key, Target], cluster: Cluster) -> NodeMap:
    """Return one node's map."""
    target = targets[node.keys[0]]
    facts = newest_facts(cluster, node)
    # Unmatched slots exist only with a List. A device that one may be on has no gpumap_device_holders.
    has_list = bool(facts.unmatched)
    made = (_device(uuid, cluster, has_list, target.collected_at) for uuid in devices_of(cluster, node))
    devices = tuple(sorted(made, key=_place))
    gpus = tuple(sorted(_gpus(devices, facts, cluster), key=lambda gpu: (gpu.index, gpu.uuid)))
    unmatched = tuple(_unmatched(facts))
    return NodeMap(
        timestamp=target.collected_at,
        interval_seconds=target.interval_seconds,
        collect=None,
        stale=None,
        node=entries.NodeEntry(name=node.shown, internal_ip=node.internal_ip),
        driver=_driver(facts),
        gpus=gpus,
        nameless_gpus=tuple(_nameless_gpus(facts)),
        devices=devices,
        unmatched=unmatched,
        pods=tuple(_pods(devices, unmatched, facts)),
        accounts=(),
        container_xids=(),
        device_health=None,
        sources=tuple(_sources(facts)),
        capabilities=facts.capabilities,
        pid_visibility_reason=None,
        remedies=remedies.of_missing_capabilities(facts.capabilities, gpu_answers=any(gpu.up for gpu in gpus)),
    )


def faults_without_device(node: Node, cluster: Cluster) -> Iterator[str]:
    """Return a sentence for each GPU that does not answer and that has no device in any series."""
    facts = newest_facts(cluster, node)
    known = {cluster.infos[uuid].gpu_uuid for uuid in devices_of(cluster, node) if uuid in cluster.infos}
    known |= {gpu.gpu_uuid for gpu in facts.deviceless}
    for uuid in facts.down:
        if uuid not in known:
            yield f"node {node.shown}: GPU {uuid} is down: {cluster.faults.get(uuid, 'unknown')}"


# --- devices ----------------------------------------------------------------------------------------------------------


def _device(uuid: str, cluster: Cluster, has_list: bool, collected_at: float) -> DeviceEntry:
    info = cluster.infos.get(uuid, DeviceInfo(uuid, "", "", "", "", "", "", "", ""))
    holders = cluster.holders.get(uuid, {})
    whole = cluster.holders.get(info.gpu_uuid, {}) if info.gpu_uuid != uuid else {}
    return DeviceEntry(
        uuid=uuid,
        gpu_uuid=info.gpu_uuid or None,
        index=_number(info.index),
        model=info.model or None,
        mig_profile=info.mig_profile or None,
        gpu_instance_id=_number(info.gpu_instance_id),
        compute_instance_id=_number(info.compute_instance_id),
        memory=_memory(
            cluster.whole(families.MEMORY_TOTAL, uuid),
            cluster.whole(families.MEMORY_USED, uuid),
            cluster.whole(families.MEMORY_RESERVED, uuid),
            asked=families.MEMORY_USED.name in cluster.values,
        ),
        activity=None,
        allocatable=_slots(cluster.offers.get(uuid, {})),
        owners=tuple(
            entries.OwnerEntry(owner=owner, memory_bytes=memory_bytes, processes=processes)
            for owner, memory_bytes, processes in cluster.owners.get(uuid, ())
        ),
        holders=tuple(_holder(name, uuid, cluster) for name in sorted(holders)),
        holders_known=has_list or uuid in cluster.held or bool(whole),
        users=tuple(
            _user(name, uuid, cluster, owner, collected_at)
            for name, owner in users_by_owner(uuid, {*holders, *whole}, cluster)
        ),
        host=tuple(
            entries.HostEntry(
                kind=kind,
                name=name,
                memory_used_bytes=cluster.whole(families.HOST_MEMORY, kind, name, uuid),
                sm_utilization_ratio=cluster.value(families.HOST_SM, kind, name, uuid),
                processes=int(cluster.of(families.HOST_PROCESSES)[kind, name, uuid]),
            )
            for kind, name in cluster.works.get(uuid, ())
        ),
        processes=(),
    )


def _holder(name: Container, uuid: str, cluster: Cluster) -> entries.HolderEntry:
    namespace, pod, container = name
    slots = _slots(cluster.holders[uuid][name])
    reserves = (uuid, namespace, pod) in cluster.of(families.RESERVED)
    return entries.HolderEntry(
        namespace=namespace,
        pod=pod,
        container=container,
        slots=slots,
        allocated_gpus=cluster.value(families.ALLOCATED_GPUS, *name, uuid),
        allocated_memory_bytes=cluster.whole(families.ALLOCATED_MEMORY, *name, uuid),
        admin_access=None if not reserves and slots and all(one.resource == DRA_DRIVER for one in slots) else False,
        reservation=reserves,
    )


def _user(name: Container, uuid: str, cluster: Cluster, owner: str, collected_at: float) -> entries.UserEntry:
    namespace, pod, container = name
    sm_ratio, last_active = cluster.value(families.SM, *name, uuid), cluster.value(families.LAST_ACTIVE, *name, uuid)
    sm_activity_ratio = cluster.value(families.SM_ACTIVITY, *name, uuid)
    # No series has for how long gpumap has watched the container. It counts as long enough.
    seen_seconds = max(collected_at - (last_active or collected_at), DEFAULTS.idle_after_seconds)
    return entries.UserEntry(
        namespace=namespace,
        pod=pod,
        container=container,
        owner=owner,
        memory_bytes=cluster.whole(families.USED, *name, uuid),
        memory_peak_bytes=cluster.whole(families.PEAK, *name, uuid),
        processes=int(cluster.of(families.PROCESSES)[(*name, uuid)]),
        sm_ratio=sm_ratio,
        memory_controller_busy_ratio=None,
        unassigned=(*name, uuid) in cluster.of(families.UNASSIGNED),
        last_active=last_active,
        seen_seconds=seen_seconds,
        sm_activity_ratio=sm_activity_ratio,
    )


def _slots(slots: Mapping[str, int]) -> tuple[entries.SlotsEntry, ...]:
    return tuple(entries.SlotsEntry(resource=resource, slots=count) for resource, count in sorted(slots.items()))


def _memory(
    total: int | None, used: int | None, reserved: int | None = None, *, asked: bool = True
) -> MemoryEntry | None:
    """Return `None` if memory cannot be read, and the size only if use was not asked for. Free memory is the rest:
    NVML's parts add up (nvml.h, nvmlMemory_v2_t)."""
    if total is None or (asked and used is None):
        return None
    free = None if used is None else max(total - used - (reserved or 0), 0)
    return MemoryEntry(total_bytes=total, used_bytes=used, free_bytes=free, reserved_bytes=reserved)


def _place(device: DeviceEntry) -> tuple[float, float, float, str]:
    """Sort by NVML's numbers; devices without them come last."""
    parts = (device.index, device.gpu_instance_id, device.compute_instance_id)
    index, gpu_instance, compute_instance = (float("inf") if part is None else part for part in parts)
    return index, gpu_instance, compute_instance, device.uuid


def _number(text: str) -> int | None:
    """Return NVML's number; None for other text, and for a number that no machine has."""
    return int(text) if len(text) < _DIGITS_MAX and text.isascii() and text.isdigit() else None


# --- GPUs, and the node as a whole ------------------------------------------------------------------------------------


def _gpus(devices: Iterable[DeviceEntry], facts: TargetFacts, cluster: Cluster) -> Iterator[GpuEntry]:
    """Return the physical GPUs of these devices, and those without a device."""
    devices_of_gpu: dict[str, list[DeviceEntry]] = {}
    for device in devices:
        if device.gpu_uuid is not None and device.index is not None:
            devices_of_gpu.setdefault(device.gpu_uuid, []).append(device)
    deviceless = {gpu.gpu_uuid for gpu in facts.deviceless if gpu.gpu_uuid}
    for uuid in deviceless:
        if _number(cluster.infos[uuid].index) is not None:
            devices_of_gpu.setdefault(uuid, [])
    for uuid, of_gpu in devices_of_gpu.items():
        yield _gpu(uuid, of_gpu, uuid in deviceless, cluster)


def _gpu(uuid: str, devices: list[DeviceEntry], is_deviceless: bool, cluster: Cluster) -> GpuEntry:
    """Return a GPU. Its other measurements are in series that are not asked for."""
    info = cluster.infos[devices[0].uuid if devices else uuid]
    index, fault = int(info.index), cluster.faults.get(uuid)
    total, used = cluster.whole(families.GPU_MEMORY_TOTAL, uuid), cluster.whole(families.GPU_MEMORY_USED, uuid)
    own = next((device.memory for device in devices if device.uuid == uuid), None)
    return GpuEntry(
        uuid=uuid,
        index=index,
        minor=_number(info.minor),
        pci_bus_id=info.pci_bus_id,
        model=info.model,
        partitioned=is_deviceless or any(device.uuid != uuid for device in devices),
        up=fault is None,
        fault=fault,
        remedy=remedies.of_fault(fault, index),
        stuck_seconds=cluster.value(families.STUCK, uuid) or 0.0,
        memory=own or _memory(total, used, asked=families.GPU_MEMORY_USED.name in cluster.values),
        utilization_ratio=cluster.value(families.UTILIZATION, uuid),
    )


def _nameless_gpus(facts: TargetFacts) -> Iterator[entries.NamelessGpuEntry]:
    for gpu in facts.deviceless:
        index = _number(gpu.index)
        if not gpu.gpu_uuid and index is not None:
            yield entries.NamelessGpuEntry(index=index, fault=gpu.reason, remedy=remedies.of_fault(gpu.reason, index))


def _driver(facts: TargetFacts) -> entries.DriverEntry | None:
    if not facts.driver:
        return None
    driver_version, cuda_version, nvml_version = facts.driver[0]
    return entries.DriverEntry(driver_version=driver_version, cuda_version=cuda_version, nvml_version=nvml_version)


def _pods(
    devices: Iterable[DeviceEntry], unmatched: Iterable[entries.UnmatchedEntry], facts: TargetFacts
) -> Iterator[entries.PodEntry]:
    rows = (row for device in devices for row in (*device.holders, *device.users))
    uids = {(row.namespace, row.pod): "" for row in (*rows, *unmatched)}
    uids.update({(namespace, pod): uid for namespace, pod, uid in facts.pods})
    for (namespace, pod), uid in sorted(uids.items()):
        yield entries.PodEntry(namespace=namespace, pod=pod, uid=uid or None)


def _sources(facts: TargetFacts) -> Iterator[entries.SourceEntry]:
    for source in Source:
        if source in facts.sources:
            yield entries.SourceEntry(
                source=source.value,
                up=facts.sources[source],
                reason=None,
                detail=None,
                remedy=None,
                last_success=facts.successes.get(source),
                errors={},
            )


def _unmatched(facts: TargetFacts) -> Iterator[entries.UnmatchedEntry]:
    for (namespace, pod, container, resource, reason), slots in facts.unmatched.items():
        if slots:
            yield entries.UnmatchedEntry(
                namespace=namespace,
                pod=pod,
                container=container,
                resource=resource,
                reason=reason,
                slots=slots,
                remedy=remedies.UNMATCHED.get(reason),
            )
