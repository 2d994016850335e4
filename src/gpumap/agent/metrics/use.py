"""The groups `use` and `codec`: measurements of containers. Also the series of each process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumap.agent.metrics.allocation import CONTAINER_LABELS, container_labels
from gpumap.model.families import Family, Series
from gpumap.model.node import Use
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner


def used(name: str, help: str, value: Callable[[Use], float | None]) -> Family:
    """Return a family on the measured use of containers."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for row in snapshot.containers:
            if row.use is not None and (found := value(row.use)) is not None:
                yield Series(container_labels(row), found)

    return Family(name, "gauge", help, CONTAINER_LABELS, read)


def _owner_bytes(snapshot: Snapshot) -> Iterator[Series]:
    for leaf in snapshot.node.devices:
        for use in leaf.owners:
            if use.memory_bytes is not None:
                yield Series((leaf.uuid, use.owner.value), use.memory_bytes)


def _owner_processes(snapshot: Snapshot) -> Iterator[Series]:
    for leaf in snapshot.node.devices:
        for use in leaf.owners:
            if use.processes is not None:
                yield Series((leaf.uuid, use.owner.value), use.processes)


def _unassigned(snapshot: Snapshot) -> Iterator[Series]:
    return (Series(container_labels(row), 1) for row in snapshot.containers if row.owner is Owner.UNASSIGNED)


USE = (
    used(
        "gpumap_container_gpu_memory_used_bytes",
        "Used GPU memory of the container on the device, as reported by the driver for each process. With unified "
        "memory, only what was allocated through the driver.",
        lambda use: use.memory_bytes,
    ),
    used(
        "gpumap_container_gpu_memory_peak_bytes",
        "Highest GPU memory use since gpumap first saw the container, sampled at the collection interval.",
        lambda use: use.memory_peak_bytes,
    ),
    used("gpumap_container_gpu_processes", "Processes of the container on the device.", lambda use: use.processes),
    used(
        "gpumap_container_sm_utilization_ratio",
        "Share of time in which the container's kernels kept the device's SMs busy (0-1), mean over the interval.",
        lambda use: use.sm_ratio,
    ),
    used(
        "gpumap_container_memory_controller_busy_ratio",
        "Share of time in which the container kept the memory controller busy (0-1), mean over the interval.",
        lambda use: use.memory_controller_busy_ratio,
    ),
    Family(
        "gpumap_container_unassigned_use",
        "gauge",
        "1: the container uses a device that it does not hold.",
        CONTAINER_LABELS,
        _unassigned,
    ),
    used(
        "gpumap_container_last_active_timestamp_seconds",
        "Unix time at which the container last worked on any engine, or may have worked. Until then, when gpumap first "
        "saw it. Absent if it is unknown whether it works now.",
        lambda use: use.last_active,
    ),
    Family(
        "gpumap_device_memory_used_by_owner_bytes",
        "gauge",
        "Used memory of the device, by category of its owner. The sum is gpumap_device_memory_used_bytes, if the "
        "device reports it.",
        ("uuid", "owner"),
        _owner_bytes,
    ),
    Family(
        "gpumap_device_processes",
        "gauge",
        "Processes on the device, by category of their owner.",
        ("uuid", "owner"),
        _owner_processes,
    ),
)

CODEC = (
    used(
        "gpumap_container_encoder_utilization_ratio",
        "Share of time in which the container kept the video encoders busy (0-1), mean over the interval.",
        lambda use: use.encoder_ratio,
    ),
    used(
        "gpumap_container_decoder_utilization_ratio",
        "Share of time in which the container kept the video decoders busy (0-1), mean over the interval.",
        lambda use: use.decoder_ratio,
    ),
)


def _process_memory(snapshot: Snapshot) -> Iterator[Series]:
    for process in snapshot.processes:
        if process.memory_bytes is not None:
            name = process.namespace or "", process.pod or "", process.container or ""
            yield Series((*name, process.uuid, str(process.pid), process.type), process.memory_bytes)


PROCESSES = (
    Family(
        "gpumap_process_gpu_memory_used_bytes",
        "gauge",
        "Used GPU memory of one process. The pod is empty if the process is in no pod or its pod is unknown.",
        (*CONTAINER_LABELS, "pid", "type"),
        _process_memory,
    ),
)
