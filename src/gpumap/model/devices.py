"""What is read out of a node: its devices with their containers, other use, the parts of one namespace. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec import structs

from gpumap.model.grouping import grouped
from gpumap.model.node import OTHER, ContainerOnDevice, Device, Node, OtherUse, OwnerUse, Process
from gpumap.model.readings import Uuid
from gpumap.model.terms import ContainerName, Owner, Source

NO_CONTAINER = ContainerName("", "", "")
_NO_USERS = (Owner.GONE, Owner.MPS_SERVER)
"""Processes of these owners belong to no container, also if a user of the device has the same name."""


class OfContainer(Protocol):
    """An entry that may belong to a container."""

    @property
    def namespace(self) -> str | None: ...
    @property
    def pod(self) -> str | None: ...
    @property
    def container(self) -> str | None: ...


def container_of(entry: OfContainer) -> ContainerName:
    """Return the entry's container. Names that it does not have are empty."""
    return ContainerName(entry.namespace or "", entry.pod or "", entry.container or "")


# --- devices and their containers -------------------------------------------------------------------------------------


class NodeDevice(NamedTuple):
    """A device, its node, and its number among the node's devices."""

    node: Node
    number: int
    device: Device


def node_devices(node: Node) -> Iterator[NodeDevice]:
    """Return the devices of a node, in its order."""
    return (NodeDevice(node, number, device) for number, device in enumerate(node.devices))


def add_processes(node: Node, processes: Iterable[Process]) -> Node:
    """Return the node with the processes of its devices."""
    on_device = grouped((process.uuid, process) for process in processes)
    devices = (structs.replace(device, processes=tuple(on_device.get(device.uuid, ()))) for device in node.devices)
    return structs.replace(node, devices=tuple(devices))


def place_of(device: Device) -> tuple[float, int, int, Uuid]:
    """Return the device's place among the node's: by GPU, then by instance, as nvidia-smi lists them."""
    mig = device.mig
    index = math.inf if device.index is None else device.index
    return index, mig.gpu_instance_id if mig else -1, mig.compute_instance_id if mig else -1, device.uuid


def device_name(device: Device) -> str:
    """Return the index, as nvidia-smi has it; of a MIG device with its instances and profile."""
    if device.index is None:
        return "?"
    mig = device.mig
    if mig is None:
        return str(device.index)
    return f"{device.index}/{mig.gpu_instance_id}/{mig.compute_instance_id} {mig.profile}"


def other_uses(device: Device) -> Iterator[OtherUse]:
    """Return other use by owner, then by container. Leaves out owners without memory and processes."""
    users = {row.name: row for row in device.containers if row.use}
    for owner in device.owners:
        of_owner = (
            process for process in device.processes if process.owner == owner.owner and not _is_in_row(process, users)
        )
        by_container = grouped((container_of(process), process) for process in of_owner)
        if owner.owner is Owner.UNACCOUNTED or (owner.owner is Owner.SIBLING and not by_container):
            if owner.memory_bytes:
                yield OtherUse(*NO_CONTAINER, owner.owner, owner.memory_bytes)
            continue
        if owner.owner is Owner.HOST and device.host:
            yield from _host_uses(device)
            continue
        if not device.processes and owner.owner not in (Owner.ASSIGNED, Owner.UNASSIGNED, Owner.SCHEDULED):
            yield from _unlisted_use(device, owner)
        for name, processes in sorted(by_container.items(), key=lambda pair: pair[0]):
            yield _process_use(owner.owner, name, processes)


def _process_use(owner: Owner, name: ContainerName, processes: Sequence[Process]) -> OtherUse:
    ratios = [process.sm_ratio for process in processes if process.sm_ratio is not None]
    uids = {process.pod_uid for process in processes}
    return OtherUse(
        *name,
        owner,
        sum_of(process.memory_bytes for process in processes),
        sm_ratio=min(sum(ratios), 1.0) if len(ratios) == len(processes) else None,
        processes=len(processes),
        pids=tuple(process.pid for process in processes),
        pod_uid=uids.pop() if len(uids) == 1 else None,
    )


def _host_uses(device: Device) -> Iterator[OtherUse]:
    """Return the work outside pods. Processes without a name in the map belong to `other`."""
    named = {use.work for use in device.host}
    of_host = (process for process in device.processes if process.owner is Owner.HOST)
    pids = grouped(
        (process.work if process.work and process.work in named else OTHER, process.pid) for process in of_host
    )
    for use in device.host:
        yield OtherUse(
            *NO_CONTAINER,
            Owner.HOST,
            use.memory_bytes,
            sm_ratio=use.sm_ratio,
            processes=use.processes,
            pids=tuple(pids.get(use.work, ())),
            work=use.work,
        )


def _is_in_row(process: Process, users: Mapping[ContainerName, ContainerOnDevice]) -> bool:
    """Return whether the row of a container counts the process."""
    user = users.get(container_of(process))
    uid = user.use.pod_uid if user and user.use else None
    return user is not None and process.owner not in _NO_USERS and uid in (process.pod_uid, None)


def _unlisted_use(device: Device, owner: OwnerUse) -> Iterator[OtherUse]:
    """Return an owner's use in a map without processes, less the containers that have rows of their own."""
    uses = [row.use for row in device.containers if row.use and row.owner is owner.owner]
    memory_bytes, count = owner.memory_bytes, owner.processes
    of_users = [use.memory_bytes for use in uses]
    if memory_bytes is not None:
        memory_bytes = None if None in of_users else max(memory_bytes - (sum_of(of_users) or 0), 0)
    if count is not None:
        count = max(count - sum(use.processes for use in uses), 0)
    if memory_bytes or count:
        yield OtherUse(*NO_CONTAINER, owner.owner, memory_bytes, processes=count)


def sum_of(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values; `None` if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def sources_up(node: Node) -> set[str]:
    """Return the sources that answer; none if the map is stale."""
    return {source.source for source in node.sources if source.up and not node.stale}


def has_kubelet(node: Node) -> bool:
    """Return whether the kubelet is a source of the node. It is none with --no-kubelet: nothing is assigned there."""
    return not node.sources or any(source.source == Source.KUBELET for source in node.sources)
