"""The dialects of few families: cadvisor, dcgm-join, gpu-mem-monitor, and two of the "pod gpu metrics exporter"."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpumap.agent.dialects.common import gpus_by_uuid, mib, owns, percent, sees_processes
from gpumap.agent.dialects.dcgm_entities import entities, gpu_entities
from gpumap.model.families import Family, NumberedFamilies, Rows, Series
from gpumap.model.node import ContainerOnDevice, Gpu
from gpumap.model.snapshot import Snapshot, once_per_snapshot

# --- cadvisor: the accelerator metrics that its version 0.47 removed --------------------------------------------------
# The original gave each container the used memory and duty cycle of the whole GPU. This dialect gives its own.

_ACCELERATOR = ("acc_id", "container", "make", "model", "namespace", "pod")
"""As client_golang sorts them on the original's page. Its `id`, `image` and `name` are the container runtime's."""


def _accelerator(row: ContainerOnDevice, gpu: Gpu | None) -> tuple[str, ...]:
    return row.uuid, row.container, "nvidia", gpu.model if gpu is not None else "", row.namespace, row.pod


def _accelerator_memory(snapshot: Snapshot) -> Iterator[Series]:
    """The memory of each device that a container holds or uses.

    The holder of a partitioned GPU has its MIG devices, each with its own memory. If it uses one of them, the GPU
    itself would count them twice.
    """
    gpus = gpus_by_uuid(snapshot)
    totals = {leaf.uuid: leaf.memory.total_bytes for leaf in snapshot.node.devices if leaf.memory is not None}
    on_leaves = {(row.name, gpu.uuid) for row in snapshot.containers if (gpu := gpus.get(row.uuid)) and row.use}
    for row in _rows_by_device(snapshot):
        gpu = gpus.get(row.uuid)
        total = totals.get(row.uuid)
        if total is None and gpu is not None and gpu.uuid == row.uuid and (row.name, gpu.uuid) not in on_leaves:
            total = gpu.reading.memory.total_bytes if gpu.reading and gpu.reading.memory else None
        if total is not None:
            yield Series(_accelerator(row, gpu), total)


@once_per_snapshot
def _rows_by_device(snapshot: Snapshot) -> list[ContainerOnDevice]:
    return sorted(snapshot.containers, key=lambda row: (row.uuid, row.name.container, row.name))


_USES = Rows(
    _ACCELERATOR,
    lambda snapshot: (
        (_accelerator(row, gpus_by_uuid(snapshot).get(row.uuid)), row.use)
        for row in _rows_by_device(snapshot)
        if row.use is not None
    ),
)
CADVISOR = (
    _USES.gauge(
        "container_accelerator_duty_cycle",
        "Percent of time over the past sample period during which the accelerator was actively processing.",
        lambda use: None if use.sm_ratio is None else percent(use.sm_ratio),
    ),
    Family(
        "container_accelerator_memory_total_bytes",
        "gauge",
        "Total accelerator memory.",
        _ACCELERATOR,
        _accelerator_memory,
    ),
    _USES.gauge(
        "container_accelerator_memory_used_bytes", "Total accelerator memory allocated.", lambda use: use.memory_bytes
    ),
)

# --- dcgm-join: the owners of each GPU, with labels that match the series of a real dcgm-exporter ---------------------
# There is one row per container and entity of dcgm-exporter, never per slot: a join multiplies nothing.


def _owners(snapshot: Snapshot) -> Iterator[Series]:
    """The owner of a whole partitioned GPU also owns each of its instances."""
    partitioned = [entity for entity in gpu_entities(snapshot) if entity.gpu.partitioned]
    for entity in (*partitioned, *entities(snapshot)):
        number = "" if entity.gpu_instance_id is None else str(entity.gpu_instance_id)
        for owner in entity.owners:
            yield Series((entity.gpu.uuid, number, entity.profile, *owner), 1)
    known = {gpu.uuid for gpu in snapshot.node.gpus}
    for row in snapshot.containers:
        # While NVML is down: a GPU's uuid is dcgm-exporter's key, but the GPU of a MIG device is unknown.
        if owns(row) and row.uuid.startswith("GPU-") and row.uuid not in known:
            yield Series((row.uuid, "", "", *row.name), 1)


DCGM_JOIN = (
    Family(
        "gpumap_dcgm_owner_info",
        "gauge",
        "A container that holds the GPU or GPU instance, with the labels of dcgm-exporter.",
        ("UUID", "GPU_I_ID", "GPU_I_PROFILE", "namespace", "pod", "container"),
        _owners,
        optional_labels=frozenset({"GPU_I_ID", "GPU_I_PROFILE"}),
    ),
)

# --- gpu-mem-monitor: memory by process, whole MiB (the name says MB), a series per PID -------------------------------
# Where the original put words into `pod_name` for processes in no pod, this leaves it empty.


def _process_memory(snapshot: Snapshot) -> Iterator[Series]:
    if not sees_processes(snapshot):
        return  # the PIDs may be of another PID namespace
    gpus = gpus_by_uuid(snapshot)
    for process in sorted(snapshot.processes, key=lambda process: (process.uuid, process.pid)):
        if process.memory_bytes is not None:
            gpu = gpus.get(process.uuid)
            namespace, pod = process.name.pod_name if process.name is not None else ("", "")
            labels = (str(process.pid), gpu.model if gpu is not None else "", process.uuid, pod, namespace)
            yield Series(labels, mib(process.memory_bytes))


_PROCESS_LABELS = ("app_pid", "gpu_name", "gpu_uuid", "pod_name", "pod_namespace")
GPU_MEM_MONITOR = (Family("pod_used_gpu_mem_MB", "gauge", ". Pod使用的GPU显存大小", _PROCESS_LABELS, _process_memory),)

# --- pod-gpu-map: which pod holds which GPU, one row per (pod, device), value 1 ---------------------------------------
# The original repeated rows, and made invalid metric names out of node names. This dialect does neither.

_MAP_LABELS = ("gpu_id", "gpu_model", "namespace", "node", "pod_name")


def _map(snapshot: Snapshot) -> Iterator[Series]:
    models = {uuid: gpu.model for uuid, gpu in gpus_by_uuid(snapshot).items()}
    keys = sorted({(row.uuid, row.name.namespace, row.name.pod) for row in snapshot.containers if row.holds})
    for uuid, namespace, pod in keys:
        yield Series((uuid, models.get(uuid, ""), namespace, snapshot.node.name, pod), 1)


POD_GPU_MAP = (
    Family("pod_and_gpu_map_info", "gauge", "Provide a mapping relationship between pod and gpu", _MAP_LABELS, _map),
)


def node_family(node: str) -> Family:
    """The family of /metrics/nodes: `<node>_info`, the node's name made a valid metric name."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", node)
    name = f"_{name}" if name[:1].isdigit() else name
    return Family(f"{name}_info", "gauge", "Provide every node's pod and gpu mapping relationship", _MAP_LABELS, _map)


# --- pod-gpu-map-deprecated: a family for each row of the map, value 0, with the number of the row in the name --------
# The original numbered rows in random order. This dialect sorts them.

_NUMBERED = "POD_GPU_MAP_INFO_<n>"
_NUMBERED_HELP = "pod gpu map info - please use labels value to match pod and gpu"


def _numbered(snapshot: Snapshot) -> Iterator[Family]:
    labels = (series.labels for series in _map(snapshot))
    for number, row in enumerate(sorted(labels, key=lambda row: (row[2], row[4], row[0]))):
        yield _numbered_family(_NUMBERED.replace("<n>", str(number)), row)


def _numbered_family(name: str, row: tuple[str, ...]) -> Family:
    return Family(name, "gauge", _NUMBERED_HELP, _MAP_LABELS, lambda _: (Series(row, 0),))


POD_GPU_MAP_DEPRECATED = (NumberedFamilies(_NUMBERED, "gauge", _NUMBERED_HELP, _MAP_LABELS, _numbered),)
