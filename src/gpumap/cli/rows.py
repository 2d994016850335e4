"""The rows that tables consist of: the devices of a node, and on each its containers, other use and processes. Pure.

A column reads a field of a row. Only this file and the findings of `commands/waste.py` read a node's devices.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from gpumap.model.devices import (
    NO_CONTAINER,
    NodeDevice,
    container_of,
    device_name,
    has_kubelet,
    node_devices,
    sum_of,
)
from gpumap.model.errors import FatalError
from gpumap.model.findings import faulty_gpus, findings_of_gpus
from gpumap.model.formatting import UNKNOWN, age, size
from gpumap.model.gaps import use_known
from gpumap.model.node import (
    VERSION,
    ContainerOnDevice,
    Device,
    Finding,
    Gpu,
    Node,
    OtherUse,
    OwnerUse,
    Process,
    Workload,
)
from gpumap.model.readings import Uuid
from gpumap.model.terms import FINDINGS, GPU_FINDINGS, ContainerName, Owner

_REMAINDER_BYTES, _REMAINDER_RATIO = 512 << 20, 0.01
"""A larger remainder, or a larger part of the device, has a row."""


class DeviceRow(NamedTuple):
    """A device of a node. `collected_at` is in Unix seconds, `number` the place of the device among those of the node.

    Without `total_bytes`, the memory of the device cannot be read; then `used_bytes` are those of its processes.
    `short_uuid` is the beginning of the UUID that is unique on the node. `free`: its free memory and its holders.
    """

    node: str
    collected_at: float
    number: int
    name: str
    uuid: str
    model: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    short_uuid: str = ""
    free: str = ""
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


class GpuRow(NamedTuple):
    """A physical GPU. `broken`: it is down, or has another fault. `free_bytes` and `free_for` of a partitioned one are
    about its MIG devices."""

    name: str
    uuid: str
    model: str
    broken: bool
    utilization_ratio: float | None
    used_bytes: int | None
    total_bytes: int | None
    free_bytes: int | None
    free_for: str
    temperature_celsius: float | None
    power_watts: float | None


class ContainerRow(NamedTuple):
    """What a container holds of a device and uses there; or use of it by a process, or by an owner without containers.

    `listed`: the container holds the device, or is measured on it. What is not known is `None`. Of other use, `work`
    is that outside pods. Only the row of a process has the fields from `pid` to `command`. Only the rows of
    `rows_with_findings` have a `finding`.
    """

    device: DeviceRow
    container: ContainerName
    owner: Owner
    listed: bool = False
    holds: bool = False
    reservation: bool = False
    slots: Mapping[str, int] = MappingProxyType({})
    gpus: float | None = None
    granted_bytes: int | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    sm_ratio: float | None = None
    sm_activity_ratio: float | None = None
    processes: int | None = None
    last_active: float | None = None
    work: Workload | None = None
    pid: int | None = None
    type: str | None = None
    command: str | None = None
    finding: Finding | None = None

    @property
    def node(self) -> str:
        return self.device.node

    @property
    def pod(self) -> str:
        """The pod, or work outside pods such as `docker/4f1c9e0b7a2d`; empty if it has no name."""
        return self.container.pod or work_name(self.work)

    @property
    def finding_age(self) -> str:
        """For how long the finding has held; empty without one."""
        return age(self.device.collected_at - self.finding.since) if self.finding else ""

    @property
    def memory_ratio(self) -> float | None:
        """The part of the device's memory."""
        total_bytes = self.device.total_bytes
        return self.memory_bytes / total_bytes if total_bytes and self.memory_bytes is not None else None

    @property
    def is_small_remainder(self) -> bool:
        """Whether it is memory without a process that is too little for a row of its own: the device's row has it."""
        return (
            self.owner is Owner.UNACCOUNTED
            and abs(self.memory_bytes or 0) < _REMAINDER_BYTES
            and abs(self.memory_ratio or 0) < _REMAINDER_RATIO
        )

    @property
    def busy_ratio(self) -> float | None:
        """SM time, or SM activity on a MIG device."""
        return self.sm_activity_ratio if self.sm_ratio is None else self.sm_ratio


def work_name(work: Workload | None) -> str:
    """Return work outside pods as `docker/4f1c9e0b7a2d`; empty if it has no name."""
    return "" if work is None or work.kind == "other" else f"{work.kind}/{work.name}"


def rows(node: Node, whole_node: Node | None = None) -> Iterator[tuple[DeviceRow, list[ContainerRow]]]:
    """Return each device with its containers by name, then with other use by owner.

    `node` may be a selection of rows; the rows of devices are those of the whole node.
    """
    device_rows = {row.uuid: row for _, row in _devices(whole_node or node)}
    for device in node.devices:
        row = device_rows[device.uuid]
        containers = (_container(row, container) for container in device.containers)
        yield row, [*containers, *(_other(row, use) for use in device.others)]


def container_rows(node: Node) -> Iterator[ContainerRow]:
    """Return the rows of all devices, as `rows`."""
    return (row for _, of_device in rows(node) for row in of_device)


def process_rows(node: Node) -> Iterator[ContainerRow]:
    """Return each process, and memory without one."""
    for device, row in _devices(node):
        yield from (_process(row, process) for process in device.processes)
        for use in device.others:
            if use.owner in (Owner.UNACCOUNTED, Owner.SIBLING) and not use.processes and use.memory_bytes:
                yield ContainerRow(row, NO_CONTAINER, use.owner, memory_bytes=use.memory_bytes)


def rows_with_findings(node: Node, *, processes: bool = False) -> Iterator[ContainerRow]:
    """Return what uses or holds each device, or each process, with the worst finding of its container.

    Another finding of it, or one without such a row, has a row of its own, and so has one of a GPU.
    """
    findings = node.findings or ()
    of_rows = {
        finding_key(finding): finding
        for finding in reversed(findings)
        if finding.finding not in (*GPU_FINDINGS, "unexplained")
    }
    owners: dict[tuple[str | None, ContainerName, bool], Owner] = {}
    for row in (process_rows if processes else container_rows)(node):
        key = row.device.uuid, row.container, row.owner is Owner.GONE
        owners[key] = row.owner
        yield row._replace(finding=of_rows.get(key))
    devices = {row.uuid: row for _, row in _devices(node)}
    gpus = {gpu.uuid: DeviceRow(node.name, node.timestamp, gpu.index, str(gpu.index), gpu.uuid) for gpu in node.gpus}
    nowhere = DeviceRow(node.name, node.timestamp, len(devices), UNKNOWN, "")
    in_rows = {id(of_rows[key]) for key in owners if key in of_rows}
    other_findings = [
        finding for finding in findings if finding.finding not in GPU_FINDINGS and id(finding) not in in_rows
    ]
    for finding in (*findings_of_gpus(findings), *other_findings):
        device = devices.get(finding.uuid or "") or gpus.get(Uuid(finding.uuid or "")) or nowhere
        owner = owners.get(finding_key(finding), Owner.UNKNOWN) if finding.pod else Owner.UNKNOWN
        yield ContainerRow(device, finding.name, owner, finding=finding)


def finding_key(finding: Finding) -> tuple[str | None, ContainerName, bool]:
    """Return what a finding has in common with the row of its container."""
    return finding.uuid, finding.name, finding.finding == "leftover"


def gpu_rows(node: Node) -> list[GpuRow]:
    """Return the GPUs by index."""
    broken = {fault.uuid for fault in faulty_gpus(node.findings)}
    return [_gpu(gpu, gpu.uuid in broken or not gpu.up, node) for gpu in node.gpus]


def _gpu(gpu: Gpu, broken: bool, node: Node) -> GpuRow:
    reading = gpu.reading
    memory = reading.memory if reading else None
    devices = [device for device in node.devices if device.gpu_uuid == gpu.uuid]
    leaves = [device for device in devices if device.is_leaf]
    return GpuRow(
        name=str(gpu.index),
        uuid=gpu.uuid,
        model=gpu.model,
        broken=broken,
        utilization_ratio=reading.utilization_ratio if reading and not gpu.partitioned else None,
        used_bytes=memory.used_bytes
        if memory
        else _process_bytes(owner for device in devices for owner in device.owners),
        total_bytes=memory.total_bytes if memory else None,
        free_bytes=sum_of(device.memory.free_bytes for device in leaves if device.memory),
        free_for=_free_on_mig(leaves) if gpu.partitioned else ", ".join(map(free_for, leaves)) or UNKNOWN,
        temperature_celsius=reading.temperatures_celsius.get("gpu") if reading else None,
        power_watts=reading.power_watts if reading else None,
    )


def free_for(device: Device) -> str:
    """Return who holds a device, as `granted to trainer`; "free" for any pod, or why no pod can be given it."""
    holders, pods = _holders([device])
    if holders:
        return f"granted to {pods}" if holders == 1 else f"shared by {holders}: {pods}"
    if reason := device.not_free_reason.replace("_", " "):
        user = "" if device.not_free_reason in FINDINGS else "used by "
        return f"{'holders not known' if device.holders is None else 'not held'}, {user}{reason}"
    return "free" if device.free_ratio else UNKNOWN


def describe_free(device: Device, node: Node) -> str:
    """Return how much of a device is free and who holds it, as `free 8.1GiB, granted to trainer`."""
    memory = "partitioned" if device.partitioned else "" if use_known(device) else "no reading"
    memory = f"free {size(device.memory.free_bytes)}" if device.memory else memory
    for_whom, _, _ = free_for(device).partition(":")
    ratio, (holders, _) = device.free_ratio or 0.0, _holders([device])
    if not holders:
        state = "" if for_whom == UNKNOWN and not has_kubelet(node) else for_whom
        return memory.replace("free", "free,", 1) if state == "free" else "; ".join(filter(None, (state, memory)))
    totals = (device.allocatable.get(resource, 0) for row in device.containers for resource in row.slots)
    slots = [f"{round(ratio * total)} of {total} slots free" for total in totals if ratio and total][:1]
    reason = device.not_free_reason
    if reason and reason not in FINDINGS:
        slots = [f"no slot free, used by {reason}"]
    memory = ", ".join(filter(None, (memory, for_whom if holders > 1 or not ratio else "")))
    return "; ".join((*slots, memory))


def _free_on_mig(devices: Sequence[Device]) -> str:
    free = sum(device.free_ratio == 1 for device in devices)
    _, pods = _holders(devices)
    return f"MIG{f', {free} free' if free else ''}{pods and f': {pods}'}"


def _holders(devices: Iterable[Device]) -> tuple[int, str]:
    """Return how many containers hold one of the devices, and the names of their pods, the largest user first."""
    rows = [row for device in devices for row in device.containers if row.holds]
    rows = [row for row in rows if not row.reservation] or rows
    rows.sort(key=lambda row: -((row.use and row.use.memory_bytes) or 0))
    return len(rows), ", ".join(dict.fromkeys(row.pod for row in rows))


def _process_bytes(owners: Iterable[OwnerUse]) -> int | None:
    """Return the memory of the processes of a device that does not report its own. 0 is not all of it: `None`."""
    return sum_of(owner.memory_bytes for owner in owners) or None


def _devices(node: Node) -> Iterator[tuple[Device, DeviceRow]]:
    gpus = {gpu.uuid: gpu for gpu in node.gpus}
    uuids = {device.uuid for device in node.devices}
    lengths = (length for length in (12, 17, 22) if len({uuid[:length] for uuid in uuids}) == len(uuids))
    length = next(lengths, None)
    for place in node_devices(node):
        row = _device(place, gpus.get(place.device.gpu_uuid or place.device.uuid))
        yield place.device, row._replace(short_uuid=row.uuid[:length])


def _device(place: NodeDevice, gpu: Gpu | None) -> DeviceRow:
    device, memory = place.device, place.device.memory
    reading = gpu.reading if gpu and not device.mig else None
    activity = device.activity
    return DeviceRow(
        node=place.node.name,
        collected_at=place.node.timestamp,
        number=place.number,
        name=device_name(device),
        uuid=device.uuid,
        model=gpu.model or None if gpu else None,
        total_bytes=memory.total_bytes if memory else None,
        used_bytes=memory.used_bytes if memory else _process_bytes(device.owners),
        free=describe_free(device, place.node),
        utilization_ratio=reading.utilization_ratio if reading else activity.sm_ratio if activity else None,
        temperature_celsius=reading.temperatures_celsius.get("gpu") if reading else None,
        power_watts=reading.power_watts if reading else None,
    )


def _container(device: DeviceRow, container: ContainerOnDevice) -> ContainerRow:
    row = ContainerRow(
        device,
        container.name,
        container.owner,
        listed=True,
        holds=container.holds,
        reservation=container.reservation,
        slots=container.slots,
        gpus=container.allocated_gpus,
        granted_bytes=container.allocated_memory_bytes,
        last_active=container.last_active,
    )
    use = container.use
    if use is None:
        return row
    return row._replace(
        memory_bytes=use.memory_bytes,
        memory_peak_bytes=use.memory_peak_bytes,
        sm_ratio=use.sm_ratio,
        sm_activity_ratio=use.sm_activity_ratio,
        processes=use.processes,
    )


def _other(device: DeviceRow, use: OtherUse) -> ContainerRow:
    return ContainerRow(
        device,
        use.name,
        use.owner,
        memory_bytes=use.memory_bytes,
        sm_ratio=use.sm_ratio,
        processes=use.processes or None,
        work=use.work,
    )


def _process(device: DeviceRow, process: Process) -> ContainerRow:
    return ContainerRow(
        device,
        container_of(process),
        process.owner,
        memory_bytes=process.memory_bytes,
        sm_ratio=process.sm_ratio,
        processes=1,
        work=process.work,
        pid=process.pid,
        type=process.type,
        command=process.comm or None,
    )


class SumRow(NamedTuple):
    """The sums of a node or namespace, by their keys. Those that are not known are absent."""

    name: str
    values: Mapping[str, float]


class ClusterSums(NamedTuple):
    """A cluster in numbers. `level` is "node" or "namespace"."""

    level: str
    rows: tuple[SumRow, ...]


class NodeMaps(NamedTuple):
    """`maps` are in the order of their nodes' names. `missing` says what is not in them, a sentence each. `notices` are
    about agents that were not asked.

    `fleet`: more than one node was asked, and tables have a column with the node of a row. `sums`: a server was asked
    for sums, in the place of maps.
    """

    maps: tuple[Node, ...]
    missing: tuple[str, ...] = ()
    fleet: bool = False
    sums: ClusterSums = ClusterSums("", ())
    notices: tuple[str, ...] = ()


NodeMapStream = AsyncGenerator[NodeMaps | FatalError, None]
"""One answer after the other. A failed attempt is a FatalError in its place: a watch goes on after it."""


def values_of(maps: NodeMaps, **values: object) -> dict[str, object]:
    """Return `values` as -o json has them: after the node, or between the nodes of a fleet and what is missing."""
    if maps.fleet:
        nodes = [
            {"name": node.name, "internal_ip": node.internal_ip, "timestamp": node.timestamp} for node in maps.maps
        ]
        return {"version": VERSION, "nodes": nodes, **values, "missing": list(maps.missing)}
    (node,) = maps.maps
    identity = {"name": node.name, "internal_ip": node.internal_ip}
    return {"version": VERSION, "timestamp": node.timestamp, "node": identity, **values}


def pods_in(names: Iterable[ContainerName]) -> list[tuple[str, str]]:
    """Return namespace and name of each pod once, in the order of their first containers."""
    return list(dict.fromkeys((name.namespace, name.pod) for name in names if name.pod))
