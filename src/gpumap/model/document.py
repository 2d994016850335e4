"""The snapshot as the JSON document of /api/v1/map: what scripts and the tables read.

Names and meanings are frozen with `VERSION`. What is not known is null, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumap.model import remedies
from gpumap.model.document_gpu import gpu_documents, memory_document, nameless_documents
from gpumap.model.observations import ContainerName
from gpumap.model.snapshot import (
    ContainerAccount,
    ContainerOnDevice,
    ContainerUse,
    Gpu,
    Leaf,
    Owner,
    OwnerUse,
    ProcessUse,
    Snapshot,
    SourceHealth,
)

VERSION = 1
OF_GPUS = ("process_utilization", "gpm", "xid_events")
"""Capabilities that a GPU gives or withholds."""

Document = dict[str, Any]


def document(
    snapshot: Snapshot,
    interval_seconds: float | None = None,
    collect: Sequence[str] | None = None,
    stale: str = "",
) -> Document:
    """Make the document: devices with their holders, users and owners; what is unmatched; the sources' health.

    `interval_seconds` is the time between collections; `None` where they are not made again and again. `collect` are
    the groups of families that are asked for. `stale` says why there is no data, where all there was is too old.
    """
    rows: dict[str, list[ContainerOnDevice]] = {}
    for row in snapshot.containers:
        rows.setdefault(row.uuid, []).append(row)
    processes: dict[str, list[ProcessUse]] = {}
    for process in snapshot.processes:
        processes.setdefault(process.uuid, []).append(process)
    gpus = {gpu.uuid: gpu for gpu in snapshot.gpus}
    driver = snapshot.driver
    return {
        "version": VERSION,
        "timestamp": snapshot.at.wall,
        "interval_seconds": interval_seconds,
        "collect": None if collect is None else list(collect),
        "stale": stale or None,
        "node": {"name": snapshot.node.name, "internal_ip": snapshot.node.internal_ip or None},
        "driver": {
            "driver_version": driver.driver_version,
            "cuda_version": driver.cuda_version,
            "nvml_version": driver.nvml_version,
        }
        if driver
        else None,
        "gpus": gpu_documents(snapshot),
        "nameless_gpus": nameless_documents(snapshot),
        "devices": [
            _device(leaf, leaf.gpu or gpus.get(leaf.uuid), rows, processes.get(leaf.uuid, ()))
            for leaf in snapshot.leaves
        ],
        "unmatched": [
            {
                **row.name._asdict(),
                "resource": row.resource,
                "reason": row.reason,
                "slots": row.slots,
                "remedy": remedies.UNMATCHED.get(row.reason),
            }
            for row in snapshot.unmatched
        ],
        "pods": [{"namespace": pod.namespace, "pod": pod.pod, "uid": pod.uid or None} for pod in snapshot.pods],
        "accounts": [_account(account) for account in snapshot.accounts],
        "container_xids": [
            {**one.name._asdict(), "uuid": one.uuid, "xid": one.code, "errors": one.errors}
            for one in snapshot.container_xids
        ],
        "device_health": _device_health(snapshot),
        "sources": [_source(health) for health in snapshot.sources],
        "capabilities": dict(snapshot.capabilities),
        "pid_visibility_reason": snapshot.visibility_reason or None,
        "remedies": _remedies(snapshot),
    }


def _account(account: ContainerAccount) -> Document:
    return {
        **account.name._asdict(),
        "uuid": account.uuid,
        "allocated_gpu_seconds": account.allocated_gpu_seconds,
        "sm_seconds": account.sm_seconds,
        "memory_byte_seconds": account.memory_byte_seconds,
        "energy_joules": account.energy_joules,
    }


def _device_health(snapshot: Snapshot) -> list[Document] | None:
    """Null where no plugin's word was told."""
    if snapshot.device_health is None:
        return None
    return [
        {
            **one.name._asdict(),
            "resource": one.health.resource,
            "device_id": one.health.device_id,
            "health": one.health.health,
        }
        for one in snapshot.device_health
    ]


def _remedies(snapshot: Snapshot) -> dict[str, str]:
    """What to do about capabilities that are missing. Those of a GPU need an answer of the driver to be judged."""
    missing = [name for name, present in snapshot.capabilities if not present and name in remedies.CAPABILITIES]
    measured = any(gpu.reading for gpu in snapshot.gpus)
    return {name: remedies.CAPABILITIES[name] for name in missing if measured or name not in OF_GPUS}


def _device(
    leaf: Leaf, gpu: Gpu | None, rows_of: Mapping[str, list[ContainerOnDevice]], processes: Iterable[ProcessUse]
) -> Document:
    """`gpu` is the one that the leaf is on, or the partitioned one that was given out whole; `rows_of` is by uuid."""
    mig = leaf.instance
    rows, processes = rows_of.get(leaf.uuid, []), list(processes)
    held_whole = rows_of.get(gpu.uuid, []) if gpu else []
    holders = {row.name for row in (*rows, *held_whole) if row.holds}
    return {
        "uuid": leaf.uuid,
        "gpu_uuid": gpu.uuid if gpu else None,
        "index": gpu.index if gpu else None,
        "model": gpu.model if gpu else None,
        "mig_profile": mig.profile if mig else None,
        "gpu_instance_id": mig.gpu_instance_id if mig else None,
        "compute_instance_id": mig.compute_instance_id if mig else None,
        "memory": memory_document(leaf.memory),
        "activity": leaf.activity._asdict() if leaf.activity is not None else None,
        "allocatable": [{"resource": resource, "slots": slots} for resource, slots in leaf.allocatable],
        "owners": [_owner(use) for use in leaf.owners],
        "holders": [_holder(row) for row in rows if row.holds],
        "holders_known": leaf.holders is not None,
        "users": [_user(row, use, _owner_of(row.name, holders, processes)) for row in rows if (use := row.use)],
        "processes": [_process(process) for process in processes],
    }


def _owner(use: OwnerUse) -> Document:
    return {"owner": use.owner.value, "memory_bytes": use.memory_bytes, "processes": use.processes}


def _holder(row: ContainerOnDevice) -> Document:
    return {
        **row.name._asdict(),
        "slots": [{"resource": resource, "slots": slots} for resource, slots in row.slots],
        "allocated_gpus": row.allocated_gpus,
        "allocated_memory_bytes": row.allocated_memory_bytes,
    }


def _owner_of(name: ContainerName, holders: set[ContainerName], processes: list[ProcessUse]) -> Owner:
    """What a container is on a device: a holder of it or of its whole GPU, or what its processes are said to be."""
    if name in holders:
        return Owner.ASSIGNED
    said = {process.owner for process in processes if process.name == name}
    return next((owner for owner in (Owner.UNASSIGNED, Owner.UNKNOWN, Owner.ASSIGNED) if owner in said), Owner.UNKNOWN)


def _user(row: ContainerOnDevice, use: ContainerUse, owner: Owner) -> Document:
    return {
        **row.name._asdict(),
        "owner": owner.value,
        "memory_bytes": use.memory_bytes,
        "memory_peak_bytes": use.memory_peak_bytes,
        "processes": use.processes,
        "sm_ratio": use.sm_ratio,
        "memory_controller_busy_ratio": use.memory_controller_ratio,
        "unassigned": use.unassigned,
        "last_active": use.last_active,
    }


def _process(process: ProcessUse) -> Document:
    name = process.name
    return {
        "pid": process.pid,
        "type": process.types,
        "name": process.comm or None,
        "owner": process.owner.value,
        "namespace": name.namespace if name else None,
        "pod": name.pod if name else None,
        "container": (name.container or None) if name else None,
        "pod_uid": process.pod_uid,
        "memory_bytes": process.memory_bytes,
        "sm_ratio": process.sm_ratio,
    }


def _source(health: SourceHealth) -> Document:
    return {
        "source": health.source.value,
        "up": health.up,
        "reason": health.reason or None,
        "detail": health.detail or None,
        "remedy": remedies.SOURCES[health.source].get(health.reason),
        "last_success": health.last_success.wall if health.last_success else None,
        "errors": dict(sorted(health.errors.items())),
    }
