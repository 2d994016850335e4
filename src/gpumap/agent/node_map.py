"""The snapshot as the map of /api/v1/map (`model.map`). Pure.

Words in, words out: what to do about a problem comes from `model.remedies`, the one table of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import structs

from gpumap.model import map as entries
from gpumap.model import remedies
from gpumap.model.findings import Finding, findings, sums, unknown
from gpumap.model.map import DeviceEntry, GpuEntry, MemoryEntry, NodeMap, SlotsEntry
from gpumap.model.observations import ContainerName, NvmlReading
from gpumap.model.readings import Activity, DeviceMemory, GpuReading
from gpumap.model.snapshot import (
    ContainerAccount,
    ContainerOnDevice,
    ContainerUse,
    Gpu,
    GpuAccount,
    GpuXids,
    Leaf,
    Owner,
    ProcessUse,
    Snapshot,
    SourceHealth,
)


def node_map(
    snapshot: Snapshot,
    interval_seconds: float | None = None,
    collect: Sequence[str] | None = None,
    stale: str = "",
) -> NodeMap:
    """Make the map of a snapshot.

    `interval_seconds` is the configured time between collections; `None` if a command collected once. `collect` are the
    collected groups of families. `stale` says why there is no current data; the snapshot is empty then.
    """
    made = NodeMap(
        timestamp=snapshot.at.wall,
        interval_seconds=interval_seconds,
        collect=None if collect is None else tuple(collect),
        stale=stale or None,
        node=entries.NodeEntry(name=snapshot.node.name, internal_ip=snapshot.node.internal_ip or None),
        driver=_driver(snapshot.driver),
        gpus=_gpus(snapshot),
        nameless_gpus=tuple(
            entries.NamelessGpuEntry(index=gpu.index, fault=gpu.fault, remedy=remedies.of_fault(gpu.fault, gpu.index))
            for gpu in snapshot.nameless_gpus
        ),
        devices=_devices(snapshot),
        unmatched=tuple(
            entries.UnmatchedEntry(
                **row.name._asdict(),
                resource=row.resource,
                reason=row.reason,
                slots=row.slots,
                remedy=remedies.UNMATCHED.get(row.reason),
            )
            for row in snapshot.unmatched
        ),
        pods=tuple(
            entries.PodEntry(namespace=pod.namespace, pod=pod.pod, uid=pod.uid or None) for pod in snapshot.pods
        ),
        accounts=tuple(map(_account, snapshot.accounts)),
        container_xids=tuple(
            entries.ContainerXidsEntry(**one.name._asdict(), uuid=one.uuid, xid=one.code, errors=one.errors)
            for one in snapshot.container_xids
        ),
        device_health=_device_health(snapshot),
        sources=tuple(map(_source, snapshot.sources)),
        capabilities=dict(snapshot.capabilities),
        pid_visibility_reason=snapshot.visibility_reason or None,
        remedies=remedies.of_missing_capabilities(
            dict(snapshot.capabilities), gpu_answers=any(gpu.reading for gpu in snapshot.gpus)
        ),
    )
    return _judged(made)


def _judged(made: NodeMap) -> NodeMap:
    """Return the map with its findings, by the rules of `gpumap waste` and its defaults. A stale map has none."""
    unjudged = tuple(unknown(made))
    if made.stale:
        return msgspec.structs.replace(made, unjudged=unjudged)
    found = findings(made)
    return msgspec.structs.replace(
        made, findings=tuple(map(_finding, found)), finding_sums=sums(found, made), unjudged=unjudged
    )


def _finding(one: Finding) -> entries.FindingEntry:
    return entries.FindingEntry(
        **one.container._asdict(),
        finding=one.kind,
        uuid=one.device.uuid if one.device else None,
        gpus=one.gpus,
        granted_bytes=one.granted_bytes,
        used_bytes=one.used_bytes,
        waste_bytes=one.waste_bytes,
        idle_seconds=one.idle_seconds,
        why=one.why,
        pids=one.pids,
        remedy=one.remedy,
    )


def _driver(driver: NvmlReading | None) -> entries.DriverEntry | None:
    if driver is None:
        return None
    return entries.DriverEntry(
        driver_version=driver.driver_version, cuda_version=driver.cuda_version, nvml_version=driver.nvml_version
    )


def _account(account: ContainerAccount) -> entries.AccountEntry:
    return entries.AccountEntry(
        **account.name._asdict(),
        uuid=account.uuid,
        allocated_gpu_seconds=account.allocated_gpu_seconds,
        sm_seconds=account.sm_seconds,
        sm_activity_seconds=account.sm_activity_seconds,
        memory_byte_seconds=account.memory_byte_seconds,
        energy_joules=account.energy_joules,
    )


def _device_health(snapshot: Snapshot) -> tuple[entries.DeviceHealthEntry, ...] | None:
    if snapshot.device_health is None:
        return None
    return tuple(
        entries.DeviceHealthEntry(
            **one.name._asdict(),
            resource=one.health.resource,
            device_id=one.health.device_id,
            health=one.health.health,
        )
        for one in snapshot.device_health
    )


def _source(health: SourceHealth) -> entries.SourceEntry:
    return entries.SourceEntry(
        source=health.source.value,
        up=health.up,
        reason=health.reason or None,
        detail=health.detail or None,
        remedy=remedies.SOURCES[health.source].get(health.reason),
        last_success=health.last_success.wall if health.last_success else None,
        errors=dict(sorted(health.errors.items())),
    )


# --- devices ----------------------------------------------------------------------------------------------------------


def _devices(snapshot: Snapshot) -> tuple[DeviceEntry, ...]:
    rows: dict[str, list[ContainerOnDevice]] = {}
    for row in snapshot.containers:
        rows.setdefault(row.uuid, []).append(row)
    processes: dict[str, list[ProcessUse]] = {}
    for process in snapshot.processes:
        processes.setdefault(process.uuid, []).append(process)
    gpus = {gpu.uuid: gpu for gpu in snapshot.gpus}
    entries = [
        _device(leaf, leaf.gpu or gpus.get(leaf.uuid), rows, processes.get(leaf.uuid, ())) for leaf in snapshot.leaves
    ]
    return tuple(sorted(entries, key=_place))


def _place(device: DeviceEntry) -> tuple[float, int, int]:
    """Return the device's place among the node's: by GPU, then by instance, as nvidia-smi lists them."""
    index, gpu, compute = device.index, device.gpu_instance_id, device.compute_instance_id
    return math.inf if index is None else index, -1 if gpu is None else gpu, -1 if compute is None else compute


def _device(
    leaf: Leaf, gpu: Gpu | None, rows_of: Mapping[str, list[ContainerOnDevice]], processes: Iterable[ProcessUse]
) -> DeviceEntry:
    """`gpu` is the leaf's GPU, or the partitioned GPU that was assigned as a whole. `rows_of` is by uuid."""
    mig = leaf.instance
    rows, processes = rows_of.get(leaf.uuid, []), list(processes)
    held_whole = rows_of.get(gpu.uuid, []) if gpu else []
    held = {row.name: Owner.SCHEDULED if row.scheduled else Owner.ASSIGNED for row in (*held_whole, *rows) if row.holds}
    return DeviceEntry(
        uuid=leaf.uuid,
        gpu_uuid=gpu.uuid if gpu else None,
        index=gpu.index if gpu else None,
        model=gpu.model if gpu else None,
        mig_profile=mig.profile if mig else None,
        gpu_instance_id=mig.gpu_instance_id if mig else None,
        compute_instance_id=mig.compute_instance_id if mig else None,
        memory=_memory(leaf.memory),
        activity=_activity(leaf.activity),
        allocatable=_slots(leaf.allocatable),
        owners=tuple(
            entries.OwnerEntry(owner=use.owner.value, memory_bytes=use.memory_bytes, processes=use.processes)
            for use in leaf.owners
        ),
        holders=tuple(
            entries.HolderEntry(
                **row.name._asdict(),
                slots=_slots(row.slots),
                allocated_gpus=row.allocated_gpus,
                allocated_memory_bytes=row.allocated_memory_bytes,
                admin_access=row.admin_access,
                reservation=row.reservation,
            )
            for row in rows
            if row.holds
        ),
        holders_known=leaf.holders is not None,
        users=tuple(_user(row.name, row.use, _owner_of(row.name, held, processes)) for row in rows if row.use),
        host=tuple(
            entries.HostEntry(
                **use.workload._asdict(),
                memory_used_bytes=use.memory_bytes,
                sm_utilization_ratio=use.sm_ratio,
                processes=use.processes,
            )
            for use in leaf.host
        ),
        processes=tuple(map(_process, processes)),
    )


def _owner_of(name: ContainerName, held: Mapping[ContainerName, Owner], processes: list[ProcessUse]) -> Owner:
    """Return the container's owner category on a device: it holds the device or its GPU, or what its processes are."""
    if name in held:
        return held[name]
    owners = {process.owner for process in processes if process.name == name}
    worst_first = (Owner.UNASSIGNED, Owner.UNKNOWN, Owner.SCHEDULED, Owner.ASSIGNED)
    return next((owner for owner in worst_first if owner in owners), Owner.UNKNOWN)


def _user(name: ContainerName, use: ContainerUse, owner: Owner) -> entries.UserEntry:
    return entries.UserEntry(
        **name._asdict(),
        owner=owner.value,
        memory_bytes=use.memory_bytes,
        memory_peak_bytes=use.memory_peak_bytes,
        processes=use.processes,
        sm_ratio=use.sm_ratio,
        memory_controller_busy_ratio=use.memory_controller_ratio,
        unassigned=use.unassigned,
        last_active=use.last_active,
        pod_uid=use.pod_uid,
        seen_seconds=use.seen_seconds,
        no_process_seconds=use.no_process_seconds,
        sm_activity_ratio=use.sm_activity_ratio,
    )


def _process(process: ProcessUse) -> entries.ProcessEntry:
    name = process.name
    return entries.ProcessEntry(
        pid=process.pid,
        type=process.types,
        name=process.comm or None,
        owner=process.owner.value,
        namespace=name.namespace if name else None,
        pod=name.pod if name else None,
        container=(name.container or None) if name else None,
        pod_uid=process.pod_uid,
        memory_bytes=process.memory_bytes,
        sm_ratio=process.sm_ratio,
        work=entries.WorkEntry(**process.workload._asdict()) if process.workload else None,
        owner_since=process.owner_since,
    )


def _slots(slots: Iterable[tuple[str, int]]) -> tuple[SlotsEntry, ...]:
    return tuple(SlotsEntry(resource=resource, slots=count) for resource, count in slots)


def _memory(memory: DeviceMemory | None) -> MemoryEntry | None:
    return MemoryEntry(**structs.asdict(memory)) if memory is not None else None


def _activity(activity: Activity | None) -> entries.ActivityEntry | None:
    return entries.ActivityEntry(**structs.asdict(activity)) if activity is not None else None


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _gpus(snapshot: Snapshot) -> tuple[GpuEntry, ...]:
    xids = {one.uuid: one for one in snapshot.xids}
    accounts = {one.uuid: one for one in snapshot.gpu_accounts}
    return tuple(_gpu(gpu, xids.get(gpu.uuid), accounts.get(gpu.uuid)) for gpu in snapshot.gpus)


def _gpu(gpu: Gpu, xids: GpuXids | None, account: GpuAccount | None) -> GpuEntry:
    reading = gpu.reading or GpuReading(gpu.index)
    return GpuEntry(
        uuid=gpu.uuid,
        index=gpu.index,
        minor=gpu.minor,
        pci_bus_id=gpu.pci_bus_id,
        model=gpu.model,
        partitioned=gpu.partitioned,
        up=gpu.fault is None,
        fault=gpu.fault,
        remedy=remedies.of_fault(gpu.fault, gpu.index),
        recovery_action=_recovery(gpu),
        remedies=_health_remedies(reading, xids),
        stuck_seconds=gpu.stuck_seconds,
        last_success=gpu.last_success,
        memory=_memory(reading.memory),
        samples_from=reading.samples_from if reading.samples is not None else None,
        utilization_ratio=reading.utilization_ratio,
        memory_controller_busy_ratio=reading.memory_controller_ratio,
        temperatures_celsius=dict(reading.temperatures_celsius),
        power_watts=reading.power_watts,
        power_limit_watts=reading.power_limit_watts,
        energy_joules=reading.energy_joules,
        clocks_hertz=dict(reading.clocks_hertz),
        clock_events=dict(reading.clock_events),
        clock_event_seconds=dict(reading.clock_event_seconds),
        performance_state=reading.performance_state,
        fan_speed_ratios=dict(reading.fan_ratios),
        ecc_errors=_ecc_errors(reading),
        ecc_uncorrected_at=gpu.ecc_uncorrected_at,
        remapped_rows=dict(reading.remapped_rows),
        row_remap_pending=reading.row_remap_pending,
        row_remap_failure=reading.row_remap_failure,
        retired_pages=dict(reading.retired_pages),
        pcie=entries.LinkEntry(transmit_bytes=reading.pcie_transmit_bytes, receive_bytes=reading.pcie_receive_bytes),
        nvlink=entries.LinkEntry(
            transmit_bytes=reading.nvlink_transmit_bytes, receive_bytes=reading.nvlink_receive_bytes
        ),
        xids=_xids(xids),
        account=entries.GpuAccountEntry(
            energy_unattributed_joules=account.energy_unattributed_joules, gap_seconds=account.gap_seconds
        )
        if account is not None
        else None,
    )


def _recovery(gpu: Gpu) -> entries.RecoveryEntry | None:
    action = gpu.recovery_action
    if action is None:
        return None
    return entries.RecoveryEntry(action=action, remedy=remedies.of_recovery_action(action, gpu.index))


def _health_remedies(reading: GpuReading, xids: GpuXids | None) -> dict[str, str]:
    """Return what to do about problems of a GPU that answers."""
    wrong = {
        "ecc_uncorrected": any(errors for kind, _, errors in reading.ecc_errors if kind == "uncorrected"),
        "row_remap_pending": reading.row_remap_pending,
        "row_remap_failure": reading.row_remap_failure,
        "xid_errors": xids is not None and xids.counts,
    }
    return {name: remedies.HEALTH[name].replace("<index>", str(reading.index)) for name in wrong if wrong[name]}


def _ecc_errors(reading: GpuReading) -> tuple[entries.EccErrorsEntry, ...]:
    counts = {(kind, location): errors for kind, location, errors in reading.ecc_errors}
    return tuple(
        entries.EccErrorsEntry(type=kind, location=location, errors=errors)
        for (kind, location), errors in counts.items()
    )


def _xids(xids: GpuXids | None) -> entries.GpuXidsEntry | None:
    if xids is None:
        return None
    last_at = dict(xids.last_at)
    return entries.GpuXidsEntry(
        counts=tuple(
            entries.XidCountEntry(xid=code, errors=errors, last=last_at.get(code)) for code, errors in xids.counts
        ),
        blind_seconds=xids.blind_seconds,
    )
