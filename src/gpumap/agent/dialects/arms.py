"""The dialect of Aliyun's GPU monitoring 2.0: its own metrics, `DCGM_CUSTOM_*`, on processes, containers and GPUs.

`UUID` is the GPU's in all of them, so that they can be joined: what is on several MIG devices of a GPU is added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from gpumap.agent.dialects.allocate_mode import Mode, combine, mode_of_node, modes_by_device, modes_by_holder
from gpumap.agent.dialects.common import (
    ON_SOME_GPU,
    device_node,
    driver_version,
    gpu_uuid,
    gpus_by_uuid,
    granted_bytes,
    granted_mib,
    leaves_by_uuid,
    mib,
    percent,
    sees_processes,
    sum_known,
)
from gpumap.model.families import Family, Rows
from gpumap.model.grouping import all_known, grouped
from gpumap.model.node import ContainerOnDevice, Device, Gpu, Process, UnmatchedSlots
from gpumap.model.plugins import Limit, limit_of
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot, once_per_snapshot
from gpumap.model.terms import ContainerName, Owner

_GPU_LABELS = ("UUID", "device", "gpu", "modelName")
_DEVICE_LABELS = ("DriverVersion", "NodeName", *_GPU_LABELS)
_OWNER_LABELS = ("AllocateMode", "ContainerName", "NamespaceName", "NodeName", "PodName")
_CONTAINER_LABELS = (*_OWNER_LABELS, *_GPU_LABELS)
_PROCESS_LABELS = (*_OWNER_LABELS, "ProcessId", "ProcessName", "ProcessType", *_GPU_LABELS)
_NOT_ASSIGNED = frozenset({Owner.UNASSIGNED, Owner.GONE, Owner.HOST, Owner.MPS_SERVER})
_Modes = Mapping[tuple[ContainerName, Uuid], Mode | None]
_Leaves = Mapping[Uuid, Device]


def _gpu_labels(uuid: Uuid, gpu: Gpu | None) -> tuple[str, ...]:
    """Return the labels of a GPU; only the id of a device that NVML does not list. `device` is its node below /dev."""
    if gpu is None:
        return (uuid, "", "", "")
    return (gpu.uuid, device_node(gpu), str(gpu.index), gpu.model)


def _owner(mode: Mode | None, name: ContainerName | None, node: str) -> tuple[str, ...]:
    namespace, pod, container = name if name is not None else ("", "", "")
    return (mode.name.lower() if mode is not None else "", container, namespace, node, pod)


@once_per_snapshot
def _processes_on_gpus(snapshot: Snapshot) -> list[tuple[tuple[str, ...], list[Process]]]:
    """Return the labels of each process on each GPU, and its rows there."""
    if not sees_processes(snapshot):
        return []  # the PIDs may be of another PID namespace
    gpus, modes = gpus_by_uuid(snapshot), modes_by_device(snapshot)
    processes = sorted(snapshot.processes, key=lambda process: (process.uuid, process.pid))
    on_gpu = grouped(((gpu_uuid(process.uuid, gpus), process.pid), process) for process in processes)
    labelled = []
    for (uuid, pid), rows in sorted(on_gpu.items()):
        owner = _owner(_mode_of(rows, uuid, modes), rows[0].name, snapshot.node.name)
        types = "+".join(sorted({row.type for row in rows}))
        labelled.append(((*owner, str(pid), rows[0].comm, types, *_gpu_labels(uuid, gpus.get(uuid))), rows))
    return labelled


def _mode_of(rows: Iterable[Process], gpu: Uuid, modes: _Modes) -> Mode | None:
    """Return how its container holds the devices of a process; `NONE` if one is certainly not assigned to it."""
    holder_modes: list[Mode | None] = []
    for row in rows:
        if row.owner in _NOT_ASSIGNED:
            return Mode.NONE
        name = row.name if row.owner is Owner.ASSIGNED else None
        holder_modes.append(None if name is None else modes.get((name, row.uuid), modes.get((name, gpu))))
    return combine(holder_modes)


def _held_gpus(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], tuple[list[ContainerOnDevice], _Leaves]]]:
    """Yield the labels of each container and GPU that it holds a part of, its rows there, and the node's leaves."""
    gpus, leaves, modes = gpus_by_uuid(snapshot), leaves_by_uuid(snapshot), modes_by_holder(snapshot)
    for (container, uuid), rows in sorted(_held_rows(snapshot).items()):
        owner = _owner(modes[container, uuid], container, snapshot.node.name)
        yield (*owner, *_gpu_labels(uuid, gpus.get(uuid))), (rows, leaves)


@once_per_snapshot
def _held_rows(snapshot: Snapshot) -> Mapping[tuple[ContainerName, Uuid], list[ContainerOnDevice]]:
    """Return the rows of what containers hold, by container and GPU."""
    gpus = gpus_by_uuid(snapshot)
    return grouped(((row.name, gpu_uuid(row.uuid, gpus)), row) for row in snapshot.containers if row.holds)


def _compute_limit(row: ContainerOnDevice, leaf: Device | None) -> float | None:
    """Return the largest share of a GPU that a container may use; 0 is no limit.

    Known by the resource or by MIG. The snapshot does not have the limits of replicas with memory (MPS, HAMi).
    """
    limits = {limit_of(resource) for resource in row.slots}
    is_whole = leaf is not None and leaf.memory is not None and row.allocated_memory_bytes == leaf.memory.total_bytes
    if Limit.COMPUTE in limits:
        return row.allocated_gpus  # its slots are shares of a GPU's compute
    if leaf is not None and leaf.mig is not None:
        return row.allocated_gpus if is_whole else None
    if limits <= {Limit.MEMORY} or is_whole or (row.allocated_gpus or 0) >= 1:
        return 0
    return 0 if row.allocated_memory_bytes is None and row.allocated_gpus is not None else None


def _gpus_with_memory(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], tuple[Snapshot, Gpu, int]]]:
    """Yield the labels of each GPU, and the GPU with its memory in bytes."""
    for gpu in sorted(snapshot.node.gpus, key=lambda gpu: gpu.uuid):
        if gpu.reading is not None and gpu.reading.memory is not None:
            labels = driver_version(snapshot), snapshot.node.name, *_gpu_labels(gpu.uuid, gpu)
            yield labels, (snapshot, gpu, gpu.reading.memory.total_bytes)


def _allocated_ratio(row: tuple[Snapshot, Gpu, int]) -> float | None:
    """Absent while an unknown container may hold the GPU, and if assigned slots have no size (time-slicing)."""
    snapshot, gpu, total_bytes = row
    leaves = [leaf for leaf in snapshot.node.devices if leaf.is_leaf and leaf.gpu_uuid == gpu.uuid]
    if any(leaf.holders is None for leaf in leaves or snapshot.node.devices):
        return None
    if any(_may_be_on(gpu, slots, snapshot.node.devices) for slots in snapshot.node.unmatched):
        return None
    held_rows = [row for (_, uuid), rows in _held_rows(snapshot).items() if uuid == gpu.uuid for row in rows]
    granted = granted_bytes(held_rows, leaves_by_uuid(snapshot))
    return granted / total_bytes if granted is not None and total_bytes else None


def _may_be_on(gpu: Gpu, slots: UnmatchedSlots, leaves: Iterable[Device]) -> bool:
    """Slots of a resource are on a GPU that offers it; if no GPU is known to, on any GPU."""
    if slots.reason not in ON_SOME_GPU:
        return False
    offered = [leaf for leaf in leaves if slots.resource in leaf.allocatable]
    return not offered or any(leaf.is_leaf and leaf.gpu_uuid == gpu.uuid for leaf in offered)


_NODE = Rows(("NodeName",), lambda snapshot: [((snapshot.node.name,), snapshot)])
_PROCESSES = Rows(_PROCESS_LABELS, _processes_on_gpus)
_HELD_GPUS = Rows(_CONTAINER_LABELS, _held_gpus)
_GPUS = Rows(_DEVICE_LABELS, _gpus_with_memory)


def _process(
    name: str, help: str, value: Callable[[Process], float | None], convert: Callable[[float], float] = percent
) -> Family:
    """Return a family with a sum for each process on a GPU."""

    def read(rows: list[Process]) -> float | None:
        values = all_known(map(value, rows))
        return None if values is None else convert(sum(values))

    return _PROCESSES.gauge(f"DCGM_CUSTOM_PROCESS_{name}", help, read)


FAMILIES = (
    _NODE.gauge(
        "DCGM_CUSTOM_ALLOCATE_MODE", "GPU allocate mode of node,value in [None:0,Exclusive:1,Share:2]", mode_of_node
    ),
    _HELD_GPUS.gauge(
        "DCGM_CUSTOM_CONTAINER_CP_ALLOCATED",
        "Allocated compute ratio(0~1) of one gpu of container,0 is not limited",
        lambda held_part: sum_known(_compute_limit(row, held_part[1].get(row.uuid)) for row in held_part[0]),
    ),
    _HELD_GPUS.gauge(
        "DCGM_CUSTOM_CONTAINER_MEM_ALLOCATED",
        "Allocated gpu memory of container(in MiB)",
        lambda held_part: granted_mib(*held_part),
    ),
    _GPUS.gauge(
        "DCGM_CUSTOM_DEV_FB_ALLOCATED",
        "Allocated framebuffer memory ratio(0~1) of device,it is a custom metric created by ack",
        _allocated_ratio,
    ),
    _GPUS.gauge(
        "DCGM_CUSTOM_DEV_FB_TOTAL",
        "Total framebuffer memory of device(in MiB),it is a custom metric created by ack",
        lambda row: mib(row[2]),
    ),
    _process("DECODE_UTIL", "Decode utilization of gpu process(in %)", lambda process: process.decoder_ratio),
    _process("ENCODE_UTIL", "Encode utilization of gpu process(in %)", lambda process: process.encoder_ratio),
    _process(
        "MEM_COPY_UTIL",
        "Memory copy utilization of gpu process(in %)",
        lambda process: process.memory_controller_busy_ratio,
    ),
    _process("MEM_USED", "Used memory(in MiB) of gpu process", lambda process: process.memory_bytes, mib),
    _process("SM_UTIL", "SM utilization of gpu process(in %)", lambda process: process.sm_ratio),
)
