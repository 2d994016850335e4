"""What is read out of a map: its devices with their containers, other use, the entries of one namespace. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from gpumap.model.map import (
    DeviceEntry,
    HolderEntry,
    HostEntry,
    NodeMap,
    OwnerEntry,
    ProcessEntry,
    UserEntry,
)
from gpumap.model.terms import ContainerName, Source

NO_CONTAINER = ContainerName("", "", "")
_NO_USERS = ("gone", "mps_server")
"""Processes of these owners belong to no container, also if a user of the device has the same name."""


class InNamespace(Protocol):
    """An entry that may belong to a namespace."""

    @property
    def namespace(self) -> str | None: ...


class OfContainer(InNamespace, Protocol):
    """An entry that may belong to a container."""

    @property
    def pod(self) -> str | None: ...
    @property
    def container(self) -> str | None: ...


Owned = TypeVar("Owned", bound=InNamespace)


def container_of(entry: OfContainer) -> ContainerName:
    """Return the entry's container. Names that it does not have are empty."""
    return ContainerName(entry.namespace or "", entry.pod or "", entry.container or "")


# --- devices and their containers -------------------------------------------------------------------------------------


class NodeDevice(NamedTuple):
    """A device, its node, and its number among the node's devices."""

    node_map: NodeMap
    number: int
    device: DeviceEntry


class OtherUse(NamedTuple):
    """Use of a device by processes without a row of a container, or by no process at all (`unaccounted`).

    `name` names the pod and container if they are known, `work` the work outside pods. `processes` is empty in a map
    that is made of series, and `process_count` is known also there.
    """

    owner: str
    name: ContainerName
    memory_bytes: int | None
    processes: tuple[ProcessEntry, ...]
    process_count: int | None
    work: HostEntry | None = None


def node_devices(node_map: NodeMap) -> Iterator[NodeDevice]:
    """Return the devices of a node, in its order."""
    return (NodeDevice(node_map, number, device) for number, device in enumerate(node_map.devices))


def device_name(device: DeviceEntry) -> str:
    """Return the index, as nvidia-smi has it; of a MIG device with its instances and profile."""
    if device.index is None:
        return "?"
    if device.mig_profile is None:
        return str(device.index)
    return f"{device.index}/{device.gpu_instance_id}/{device.compute_instance_id} {device.mig_profile}"


def grantees(device: DeviceEntry) -> list[HolderEntry]:
    """Return the holders with a grant of their own: those that are no scheduler's reservation."""
    return [one for one in device.holders if not one.reservation]


def other_uses(device: DeviceEntry) -> Iterator[OtherUse]:
    """Return other use by owner, then by container. Leaves out owners without memory and processes."""
    users = {container_of(one): one for one in device.users}
    for owner in device.owners:
        rest: dict[ContainerName, list[ProcessEntry]] = {}
        for one in device.processes:
            if one.owner == owner.owner and not _is_in_row(one, users):
                rest.setdefault(container_of(one), []).append(one)
        if owner.owner == "unaccounted" or (owner.owner == "sibling" and not rest):
            if owner.memory_bytes:
                yield OtherUse(owner.owner, NO_CONTAINER, owner.memory_bytes, (), None)
            continue
        if owner.owner == "host" and device.host:
            yield from _host_uses(device)
            continue
        if not device.processes and owner.owner not in ("assigned", "unassigned", "scheduled"):
            yield from _without_processes(device, owner)
        for name, processes in sorted(rest.items(), key=lambda pair: pair[0]):
            memory_bytes = sum_of(one.memory_bytes for one in processes)
            yield OtherUse(owner.owner, name, memory_bytes, tuple(processes), len(processes))


def _host_uses(device: DeviceEntry) -> Iterator[OtherUse]:
    """Return the work outside pods. Processes without a name in the map belong to `other`."""
    named = {(one.kind, one.name) for one in device.host}
    of_work: dict[tuple[str, str], list[ProcessEntry]] = {}
    for process in device.processes:
        if process.owner == "host":
            work = (process.work.kind, process.work.name) if process.work else None
            of_work.setdefault(work if work in named else ("other", "other"), []).append(process)
    for one in device.host:
        processes = tuple(of_work.get((one.kind, one.name), ()))
        yield OtherUse("host", NO_CONTAINER, one.memory_used_bytes, processes, one.processes, one)


def _is_in_row(process: ProcessEntry, users: Mapping[ContainerName, UserEntry]) -> bool:
    """Return whether the row of a container counts the process."""
    user = users.get(container_of(process))
    return user is not None and process.owner not in _NO_USERS and user.pod_uid in (process.pod_uid, None)


def _without_processes(device: DeviceEntry, owner: OwnerEntry) -> Iterator[OtherUse]:
    """Return an owner's use in a map without processes, less the containers that have rows of their own."""
    users = [user for user in device.users if user.owner == owner.owner]
    memory_bytes, count = owner.memory_bytes, owner.processes
    of_users = [user.memory_bytes for user in users]
    if memory_bytes is not None:
        memory_bytes = None if None in of_users else max(memory_bytes - (sum_of(of_users) or 0), 0)
    if count is not None:
        count = max(count - sum(user.processes for user in users), 0)
    if memory_bytes or count:
        yield OtherUse(owner.owner, NO_CONTAINER, memory_bytes, (), count)


def sum_of(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values; `None` if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def sources_up(node_map: NodeMap) -> set[str]:
    """Return the sources that answer; none if the map is stale."""
    return {source.source for source in node_map.sources if source.up and not node_map.stale}


def has_kubelet(node_map: NodeMap) -> bool:
    """Return whether the kubelet is a source of the node. It is none with --no-kubelet: nothing is assigned there."""
    return not node_map.sources or any(source.source == Source.KUBELET for source in node_map.sources)


def partitioned_gpus(node_map: NodeMap) -> set[str]:
    """Return the UUIDs of GPUs in MIG mode."""
    return {gpu.uuid for gpu in node_map.gpus if gpu.partitioned}


# --- one namespace ----------------------------------------------------------------------------------------------------


def in_namespace(entries: Iterable[Owned], namespace: str) -> tuple[Owned, ...]:
    """Return the entries of this namespace; all of them if it is empty."""
    return tuple(one for one in entries if not namespace or one.namespace == namespace)


def node_of_namespace(node_map: NodeMap, namespace: str) -> NodeMap:
    devices = [_device_of_namespace(device, namespace) for device in node_map.devices]
    return msgspec.structs.replace(
        node_map,
        devices=tuple(one for one in devices if one.holders or one.users or one.processes),
        unmatched=in_namespace(node_map.unmatched, namespace),
        pods=in_namespace(node_map.pods, namespace),
        accounts=in_namespace(node_map.accounts, namespace),
        container_xids=in_namespace(node_map.container_xids, namespace),
        device_health=in_namespace(node_map.device_health, namespace) if node_map.device_health is not None else None,
        findings=in_namespace(node_map.findings, namespace) if node_map.findings is not None else None,
        finding_sums={},
        unjudged=(),
    )


def _device_of_namespace(device: DeviceEntry, namespace: str) -> DeviceEntry:
    processes = in_namespace(device.processes, namespace)
    remaining = {process.owner for process in processes}
    return msgspec.structs.replace(
        device,
        owners=tuple(owner for owner in device.owners if owner.owner in remaining),
        holders=in_namespace(device.holders, namespace),
        users=in_namespace(device.users, namespace),
        host=(),
        processes=processes,
    )
