"""The documents of nodes, as /api/v1/map has them, made again of the series that a server holds of them. Pure.

What series do not tell is null, or an empty list: processes, reasons, counters. So is what was not asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpumap.cli.fleet import families
from gpumap.cli.fleet.cluster import Cluster, Container, OfTarget, devices_of, newest
from gpumap.cli.fleet.gpus import gpu_document, memory_document, remedy_of
from gpumap.cli.fleet.targets import Key, Node, Target
from gpumap.cli.fleet.users import users_by_owner
from gpumap.model import remedies
from gpumap.model.document import OF_GPUS, VERSION, Document

_SOURCES = ("kubelet", "nvml", "procfs", "pod_identity")
_NO_INFO = ("",) * (len(families.DEVICE_INFO.by) - 1)


def document_of(node: Node, targets: Mapping[Key, Target], cluster: Cluster) -> Document:
    """One node's document."""
    target = targets[node.keys[0]]
    said = newest(cluster, node)
    devices = sorted((_device(uuid, cluster) for uuid in devices_of(cluster, node)), key=_place)
    gpus = sorted(_gpus(devices, said, cluster), key=lambda gpu: (gpu["index"], gpu["uuid"]))
    measured = any(gpu["up"] for gpu in gpus)
    unmatched = list(_unmatched(said))
    return {
        "version": VERSION,
        "timestamp": target.collected_at,
        "interval_seconds": target.interval_seconds,
        "collect": None,
        "stale": None,
        "node": {"name": node.shown, "internal_ip": node.internal_ip},
        "driver": _driver(said),
        "gpus": gpus,
        "nameless_gpus": [_nameless(int(index), reason) for uuid, index, *_, reason in said.deviceless if not uuid],
        "devices": devices,
        "unmatched": unmatched,
        "pods": _pods(devices, unmatched, said),
        "accounts": [],
        "container_xids": [],
        "device_health": None,
        "sources": list(_sources(said)),
        "capabilities": said.capabilities,
        "pid_visibility_reason": None,
        "remedies": {
            name: remedies.CAPABILITIES[name]
            for name, present in said.capabilities.items()
            if not present and name in remedies.CAPABILITIES and (measured or name not in OF_GPUS)
        },
    }


def faults_of_nameless(node: Node, cluster: Cluster) -> Iterator[str]:
    """GPUs that do not answer, and have no device of which anything is told: a sentence each."""
    known = {cluster.infos[uuid][1] for uuid in devices_of(cluster, node) if uuid in cluster.infos}
    said = newest(cluster, node)
    known |= {uuid for uuid, *_ in said.deviceless}
    for uuid in said.down:
        if uuid not in known:
            yield f"node {node.shown}: GPU {uuid} is down: {cluster.faults.get(uuid, 'unknown')}"


# --- devices ----------------------------------------------------------------------------------------------------------


def _device(uuid: str, cluster: Cluster) -> Document:
    _, gpu_uuid, index, _, _, model, profile, gpu_instance, compute_instance = cluster.infos.get(
        uuid, (uuid, *_NO_INFO)
    )
    holders = cluster.holders.get(uuid, {})
    whole = cluster.holders.get(gpu_uuid, {}) if gpu_uuid != uuid else {}
    key = (uuid,)
    return {
        "uuid": uuid,
        "gpu_uuid": gpu_uuid or None,
        "index": _number(index),
        "model": model or None,
        "mig_profile": profile or None,
        "gpu_instance_id": _number(gpu_instance),
        "compute_instance_id": _number(compute_instance),
        "memory": memory_document(
            cluster.of(families.MEMORY_TOTAL).get(key),
            cluster.of(families.MEMORY_USED).get(key),
            cluster.of(families.MEMORY_RESERVED).get(key),
            asked=families.MEMORY_USED.name in cluster.told,
        ),
        "activity": None,
        "allocatable": _slots(cluster.offers.get(uuid, {})),
        "owners": [
            {"owner": owner, "memory_bytes": memory_bytes, "processes": processes}
            for owner, memory_bytes, processes in cluster.owners.get(uuid, ())
        ],
        "holders": [_holder(name, uuid, cluster) for name in sorted(holders)],
        "holders_known": uuid in cluster.held,
        "users": [
            _user(name, uuid, cluster, owner) for name, owner in users_by_owner(uuid, {*holders, *whole}, cluster)
        ],
        "processes": [],
    }


def _holder(name: Container, uuid: str, cluster: Cluster) -> Document:
    key = (*name, uuid)
    return {
        **_names(name),
        "slots": _slots(cluster.holders[uuid][name]),
        "allocated_gpus": cluster.of(families.ALLOCATED_GPUS).get(key),
        "allocated_memory_bytes": cluster.of(families.ALLOCATED_MEMORY).get(key),
    }


def _user(name: Container, uuid: str, cluster: Cluster, owner: str) -> Document:
    key = (*name, uuid)
    return {
        **_names(name),
        "owner": owner,
        "memory_bytes": cluster.of(families.USED).get(key),
        "memory_peak_bytes": cluster.of(families.PEAK).get(key),
        "processes": cluster.of(families.PROCESSES)[key],
        "sm_ratio": cluster.of(families.SM).get(key),
        "memory_controller_busy_ratio": None,
        "unassigned": key in cluster.of(families.UNASSIGNED),
        "last_active": cluster.of(families.LAST_ACTIVE).get(key),
    }


def _names(name: Container) -> Document:
    return {"namespace": name[0], "pod": name[1], "container": name[2]}


def _slots(slots: Mapping[str, int]) -> list[Document]:
    return [{"resource": resource, "slots": count} for resource, count in sorted(slots.items())]


def _place(device: Document) -> tuple[float, float, float, str]:
    """As NVML numbers them; what it does not tell of stands last."""
    parts = (device["index"], device["gpu_instance_id"], device["compute_instance_id"])
    index, gpu_instance, compute_instance = (float("inf") if part is None else part for part in parts)
    return index, gpu_instance, compute_instance, device["uuid"]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


# --- GPUs, and the node as a whole ------------------------------------------------------------------------------------


def _gpus(devices: Iterable[Document], said: OfTarget, cluster: Cluster) -> Iterator[Document]:
    """The physical GPUs that these devices are on, and those that have none."""
    leaves: dict[str, list[Document]] = {}
    for device in devices:
        if device["gpu_uuid"] is not None and device["index"] is not None:
            leaves.setdefault(device["gpu_uuid"], []).append(device)
    for uuid, *_ in said.deviceless:
        if uuid:
            leaves.setdefault(uuid, [])
    for uuid, of_gpu in leaves.items():
        info = cluster.infos[of_gpu[0]["uuid"] if of_gpu else uuid]
        total = cluster.of(families.GPU_MEMORY_TOTAL).get((uuid,))
        used = cluster.of(families.GPU_MEMORY_USED).get((uuid,))
        own = next((device["memory"] for device in of_gpu if device["uuid"] == uuid), None)
        yield gpu_document(
            uuid=uuid,
            index=int(info[2]),
            minor=_number(info[3]),
            pci_bus_id=info[4],
            model=info[5],
            partitioned=total is not None or not of_gpu or any(device["uuid"] != uuid for device in of_gpu),
            fault=cluster.faults.get(uuid),
            memory=own or memory_document(total, used, asked=families.GPU_MEMORY_USED.name in cluster.told),
            utilization_ratio=cluster.of(families.UTILIZATION).get((uuid,)),
            stuck_seconds=cluster.of(families.STUCK).get((uuid,), 0.0),
        )


def _nameless(index: int, fault: str) -> Document:
    return {"index": index, "fault": fault, "remedy": remedy_of(fault, index)}


def _driver(said: OfTarget) -> Document | None:
    return dict(zip(families.DRIVER_INFO.by, said.driver[0], strict=True)) if said.driver else None


def _pods(devices: Iterable[Document], unmatched: Iterable[Document], said: OfTarget) -> list[Document]:
    rows = (row for device in devices for row in (*device["holders"], *device["users"]))
    uids: dict[tuple[str, str], str] = {(row["namespace"], row["pod"]): "" for row in (*rows, *unmatched)}
    uids.update({(namespace, pod): uid for namespace, pod, uid in said.pods})
    return [{"namespace": namespace, "pod": pod, "uid": uid or None} for (namespace, pod), uid in sorted(uids.items())]


def _sources(said: OfTarget) -> Iterator[Document]:
    for source in _SOURCES:
        if source in said.sources:
            yield {
                "source": source,
                "up": said.sources[source],
                "reason": None,
                "detail": None,
                "remedy": None,
                "last_success": said.successes.get(source),
                "errors": {},
            }


def _unmatched(said: OfTarget) -> Iterator[Document]:
    for (namespace, pod, container, resource, reason), slots in said.unmatched.items():
        if slots:
            yield {
                **_names((namespace, pod, container)),
                "resource": resource,
                "reason": reason,
                "slots": slots,
                "remedy": remedies.UNMATCHED.get(reason),
            }
