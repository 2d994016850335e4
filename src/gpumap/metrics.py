"""The native families, group by group: how each sample is read out of a snapshot (contract §3).

Pure. An unknown value gives no sample, never a 0. No device's value is ever given to a container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from gpumap.families import Family, Kind, Series
from gpumap.model import ContainerOnDevice, ContainerUse, DeviceMemory, Gpu, GpuReading, Leaf, Snapshot

_CONTAINER = ("namespace", "pod", "container", "uuid")


def _labels(row: ContainerOnDevice) -> tuple[str, str, str, str]:
    return (*row.name, row.uuid)


def _held(name: str, help: str, value: Callable[[ContainerOnDevice], float | None]) -> Family:
    """A family on what a container holds."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for row in snapshot.containers:
            if row.holds and (found := value(row)) is not None:
                yield Series(_labels(row), found)

    return Family(name, "gauge", help, _CONTAINER, read)


def _used(name: str, help: str, value: Callable[[ContainerUse], float | None]) -> Family:
    """A family on what a container was measured to use."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for row in snapshot.containers:
            if row.use is not None and (found := value(row.use)) is not None:
                yield Series(_labels(row), found)

    return Family(name, "gauge", help, _CONTAINER, read)


def _on_leaf_memory(name: str, help: str, value: Callable[[DeviceMemory], float | None]) -> Family:
    def read(snapshot: Snapshot) -> Iterator[Series]:
        for leaf in snapshot.leaves:
            if leaf.memory is not None and (found := value(leaf.memory)) is not None:
                yield Series((leaf.uuid,), found)

    return Family(name, "gauge", help, ("uuid",), read)


def _measured(name: str, help: str, value: Callable[[GpuReading], float | None], kind: Kind = "gauge") -> Family:
    """A family on what NVML measured of a GPU."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for gpu in snapshot.gpus:
            if gpu.reading is not None and (found := value(gpu.reading)) is not None:
                yield Series((gpu.uuid,), found)

    return Family(name, kind, help, ("uuid",), read)


def _partitioned_memory(value: Callable[[DeviceMemory], float]) -> Callable[[GpuReading], float | None]:
    return lambda reading: value(reading.memory) if reading.partitioned and reading.memory else None


# --- [allocation]: the kubelet's word ---------------------------------------------------------------------------------


def _slots(snapshot: Snapshot) -> Iterator[Series]:
    for row in snapshot.containers:
        for resource, count in row.slots:
            yield Series((*_labels(row), resource), count)


def _allocatable(snapshot: Snapshot) -> Iterator[Series]:
    for leaf in snapshot.leaves:
        for resource, count in leaf.allocatable:
            yield Series((leaf.uuid, resource), count)


def _holders(snapshot: Snapshot) -> Iterator[Series]:
    for leaf in snapshot.leaves:
        if leaf.holders is not None:
            yield Series((leaf.uuid,), leaf.holders)


def _unmatched(snapshot: Snapshot) -> Iterator[Series]:
    for row in snapshot.unmatched:
        yield Series((*row.name, row.resource, row.reason), row.slots)


def _pod_info(snapshot: Snapshot) -> Iterator[Series]:
    for pod in snapshot.pods:
        yield Series((pod.namespace, pod.pod, pod.uid), 1)


ALLOCATION = (
    _held("gpumap_allocation_info", "The kubelet gave this container a slot of this device.", lambda row: 1),
    Family(
        "gpumap_allocation_slots",
        "gauge",
        "Slots (device ids) of the device that the container holds, by resource.",
        (*_CONTAINER, "resource"),
        _slots,
    ),
    Family(
        "gpumap_device_slots_allocatable",
        "gauge",
        "Slots that the kubelet offers on this device. 0: the resource is offered without it.",
        ("uuid", "resource"),
        _allocatable,
    ),
    Family("gpumap_device_holders", "gauge", "Containers that hold a slot of this device.", ("uuid",), _holders),
    Family(
        "gpumap_unmatched_slots",
        "gauge",
        "Slots of a GPU resource that stand for no device that NVML knows, and why.",
        ("namespace", "pod", "container", "resource", "reason"),
        _unmatched,
    ),
    _held(
        "gpumap_container_allocated_gpus",
        "Share of a physical GPU that the container was given: 1 is a whole one.",
        lambda row: row.allocated_gpus,
    ),
    _held(
        "gpumap_container_allocated_gpu_memory_bytes",
        "GPU memory that the container was given. Absent where sharing grants none.",
        lambda row: row.allocated_memory_bytes,
    ),
    Family("gpumap_pod_info", "gauge", "A pod that holds or uses a GPU.", ("namespace", "pod", "pod_uid"), _pod_info),
    Family(
        "gpumap_node_info",
        "gauge",
        "The node that this gpumap serves.",
        ("node", "internal_ip"),
        lambda snapshot: [Series((snapshot.node.name, snapshot.node.internal_ip), 1)],
    ),
)

# --- [use]: measured --------------------------------------------------------------------------------------------------


def _owner_bytes(snapshot: Snapshot) -> Iterator[Series]:
    for leaf in snapshot.leaves:
        for use in leaf.owners if leaf.memory is not None else ():
            if use.memory_bytes is not None:
                yield Series((leaf.uuid, use.owner.value), use.memory_bytes)


def _owner_processes(snapshot: Snapshot) -> Iterator[Series]:
    for leaf in snapshot.leaves:
        for use in leaf.owners:
            if use.processes is not None:
                yield Series((leaf.uuid, use.owner.value), use.processes)


USE = (
    _used(
        "gpumap_container_gpu_memory_used_bytes",
        "GPU memory of the container's processes on the device, as the driver tells it by process.",
        lambda use: use.memory_bytes,
    ),
    _used(
        "gpumap_container_gpu_memory_peak_bytes",
        "The most GPU memory that the container used since it was first seen, at the collection interval.",
        lambda use: use.memory_peak_bytes,
    ),
    _used("gpumap_container_gpu_processes", "Processes of the container on the device.", lambda use: use.processes),
    _used(
        "gpumap_container_sm_utilization_ratio",
        "Time that the container's kernels kept the device's SMs busy, 0-1, mean over the interval.",
        lambda use: use.sm_ratio,
    ),
    _used(
        "gpumap_container_memory_controller_busy_ratio",
        "Time that the container kept the device's memory controller busy, 0-1, mean over the interval.",
        lambda use: use.memory_controller_ratio,
    ),
    _used(
        "gpumap_container_unassigned_use",
        "The container uses a device that it was not assigned.",
        lambda use: 1 if use.unassigned else None,
    ),
    _used(
        "gpumap_container_last_active_timestamp_seconds",
        "When the container was last seen computing; until then, when it was first seen.",
        lambda use: use.last_active,
    ),
    Family(
        "gpumap_device_memory_used_by_owner_bytes",
        "gauge",
        "The device's used memory, split by whose it is; the sum is gpumap_device_memory_used_bytes.",
        ("uuid", "owner"),
        _owner_bytes,
    ),
    Family(
        "gpumap_device_processes",
        "gauge",
        "Processes on the device, by whose they are.",
        ("uuid", "owner"),
        _owner_processes,
    ),
)

# --- [codec] ----------------------------------------------------------------------------------------------------------

CODEC = (
    _used(
        "gpumap_container_encoder_utilization_ratio",
        "Time that the container kept the device's video encoders busy, 0-1, mean over the interval.",
        lambda use: use.encoder_ratio,
    ),
    _used(
        "gpumap_container_decoder_utilization_ratio",
        "Time that the container kept the device's video decoders busy, 0-1, mean over the interval.",
        lambda use: use.decoder_ratio,
    ),
    _measured(
        "gpumap_gpu_encoder_utilization_ratio",
        "Time that the video encoders were busy, 0-1.",
        lambda r: r.encoder_ratio,
    ),
    _measured(
        "gpumap_gpu_decoder_utilization_ratio",
        "Time that the video decoders were busy, 0-1.",
        lambda r: r.decoder_ratio,
    ),
)

# --- [device]: leaves and GPUs ----------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _device_info_labels(leaf: Leaf, gpu: Gpu) -> tuple[str, ...]:
    mig = leaf.instance
    return (
        leaf.uuid,
        gpu.uuid,
        str(gpu.index),
        _text(gpu.minor),
        gpu.pci_bus_id,
        gpu.model,
        mig.profile if mig else "",
        _text(mig.gpu_instance_id if mig else None),
        _text(mig.compute_instance_id if mig else None),
    )


def _device_info(snapshot: Snapshot) -> Iterator[Series]:
    for leaf in snapshot.leaves:
        if leaf.gpu is not None:
            yield Series(_device_info_labels(leaf, leaf.gpu), 1)


def _last_success(snapshot: Snapshot) -> Iterator[Series]:
    for gpu in snapshot.gpus:
        if gpu.last_success is not None:
            yield Series((gpu.uuid,), gpu.last_success)


def _temperatures(snapshot: Snapshot) -> Iterator[Series]:
    for gpu in snapshot.gpus:
        for sensor, celsius in gpu.reading.temperatures_celsius if gpu.reading else ():
            yield Series((gpu.uuid, sensor), celsius)


def _driver_info(snapshot: Snapshot) -> Iterator[Series]:
    if snapshot.driver is not None:
        yield Series((snapshot.driver.driver_version, snapshot.driver.cuda_version, snapshot.driver.nvml_version), 1)


DEVICE = (
    Family(
        "gpumap_device_info",
        "gauge",
        "A device that can be given away, a GPU or a MIG device, and the GPU that it is on.",
        (
            "uuid",
            "gpu_uuid",
            "index",
            "minor",
            "pci_bus_id",
            "model",
            "mig_profile",
            "gpu_instance_id",
            "compute_instance_id",
        ),
        _device_info,
    ),
    _on_leaf_memory("gpumap_device_memory_total_bytes", "Memory of the device.", lambda memory: memory.total_bytes),
    _on_leaf_memory(
        "gpumap_device_memory_used_bytes",
        "Memory in use on the device; without what the driver reserves, where it tells that.",
        lambda memory: memory.used_bytes,
    ),
    _on_leaf_memory(
        "gpumap_device_memory_reserved_bytes",
        "Memory that the driver keeps for itself.",
        lambda memory: memory.reserved_bytes,
    ),
    _on_leaf_memory("gpumap_device_memory_free_bytes", "Memory free on the device.", lambda memory: memory.free_bytes),
    Family(
        "gpumap_gpu_up",
        "gauge",
        "Whether the GPU answered in the last collection.",
        ("uuid",),
        lambda snapshot: [Series((gpu.uuid,), int(gpu.fault is None)) for gpu in snapshot.gpus],
    ),
    Family(
        "gpumap_gpu_fault_info",
        "gauge",
        "Why the GPU did not answer.",
        ("uuid", "reason"),
        lambda snapshot: [Series((gpu.uuid, gpu.fault), 1) for gpu in snapshot.gpus if gpu.fault is not None],
    ),
    Family(
        "gpumap_gpu_last_success_timestamp_seconds",
        "gauge",
        "When the GPU last answered.",
        ("uuid",),
        _last_success,
    ),
    _measured(
        "gpumap_gpu_utilization_ratio",
        "Time that any kernel ran on the GPU, 0-1, over the driver's last sample period.",
        lambda reading: reading.utilization_ratio,
    ),
    _measured(
        "gpumap_gpu_memory_controller_busy_ratio",
        "Time that the GPU's memory was read or written, 0-1, over the driver's last sample period.",
        lambda reading: reading.memory_controller_ratio,
    ),
    _measured(
        "gpumap_gpu_memory_total_bytes",
        "Memory of a partitioned GPU as a whole.",
        _partitioned_memory(lambda memory: memory.total_bytes),
    ),
    _measured(
        "gpumap_gpu_memory_used_bytes",
        "Memory in use on a partitioned GPU as a whole.",
        _partitioned_memory(lambda memory: memory.used_bytes),
    ),
    Family("gpumap_gpu_temperature_celsius", "gauge", "Temperature, by sensor.", ("uuid", "sensor"), _temperatures),
    _measured("gpumap_gpu_power_watts", "Power drawn by the GPU.", lambda reading: reading.power_watts),
    _measured(
        "gpumap_gpu_power_limit_watts", "Power limit that is enforced.", lambda reading: reading.power_limit_watts
    ),
    _measured(
        "gpumap_gpu_energy_joules_total",
        "Energy that the GPU used since its driver was loaded, as the driver counts.",
        lambda reading: reading.energy_joules,
        "counter",
    ),
    Family(
        "gpumap_driver_info",
        "gauge",
        "The NVIDIA driver and its libraries.",
        ("driver_version", "cuda_version", "nvml_version"),
        _driver_info,
    ),
)

# --- self: always there -----------------------------------------------------------------------------------------------


def _sources_last_success(snapshot: Snapshot) -> Iterator[Series]:
    for health in snapshot.sources:
        if health.last_success is not None:
            yield Series((health.source.value,), health.last_success.wall)


def _sources_errors(snapshot: Snapshot) -> Iterator[Series]:
    for health in snapshot.sources:
        for reason, count in sorted(health.errors.items()):
            yield Series((health.source.value, reason), count)


def _sources_duration(snapshot: Snapshot) -> Iterator[Series]:
    for health in snapshot.sources:
        yield Series((health.source.value,), health.seconds, "_sum")
        yield Series((health.source.value,), health.attempts, "_count")


def self_families(version: str, python_version: str) -> tuple[Family, ...]:
    """The families on gpumap itself; they stand whatever is collected, and whatever has failed."""
    return (
        Family(
            "gpumap_build_info",
            "gauge",
            "This gpumap's version.",
            ("version", "python_version"),
            lambda snapshot: [Series((version, python_version), 1)],
        ),
        Family(
            "gpumap_source_up",
            "gauge",
            "Whether the last attempt to ask this source succeeded.",
            ("source",),
            lambda snapshot: [Series((health.source.value,), int(health.up)) for health in snapshot.sources],
        ),
        Family(
            "gpumap_source_last_success_timestamp_seconds",
            "gauge",
            "When this source last answered.",
            ("source",),
            _sources_last_success,
        ),
        Family(
            "gpumap_source_errors_total",
            "counter",
            "What went wrong in asking this source, by reason.",
            ("source", "reason"),
            _sources_errors,
        ),
        Family(
            "gpumap_source_duration_seconds",
            "summary",
            "Time spent in asking this source.",
            ("source",),
            _sources_duration,
        ),
        Family(
            "gpumap_snapshot_timestamp_seconds",
            "gauge",
            "When the data of this page was collected.",
            (),
            lambda snapshot: [Series((), snapshot.at.wall)],
        ),
        Family(
            "gpumap_collections_total",
            "counter",
            "Collections made, by what started them.",
            ("trigger",),
            lambda snapshot: [Series((trigger,), count) for trigger, count in snapshot.collections],
        ),
        Family(
            "gpumap_capability",
            "gauge",
            "What gpumap can do here with the privileges and the driver that it has.",
            ("capability",),
            lambda snapshot: [Series((name,), int(present)) for name, present in snapshot.capabilities],
        ),
        Family(
            "gpumap_nvml_stuck_seconds",
            "gauge",
            "How long a driver call on this GPU has not returned.",
            ("uuid",),
            lambda snapshot: [Series((gpu.uuid,), gpu.stuck_seconds) for gpu in snapshot.gpus],
        ),
    )


# --- on request -------------------------------------------------------------------------------------------------------


def _process_memory(snapshot: Snapshot) -> Iterator[Series]:
    for process in snapshot.processes:
        if process.memory_bytes is not None:
            name = process.name or ("", "", "")
            yield Series((*name, process.uuid, str(process.pid), process.types), process.memory_bytes)


PROCESSES = (
    Family(
        "gpumap_process_gpu_memory_used_bytes",
        "gauge",
        "GPU memory of one process. Its pod is empty where it is in none, or none can be named.",
        (*_CONTAINER, "pid", "type"),
        _process_memory,
    ),
)

GROUPS: Mapping[str, tuple[Family, ...]] = {
    "allocation": ALLOCATION,
    "use": USE,
    "device": DEVICE,
    "codec": CODEC,
}
"""The groups of `--collect` that are built."""
DEFAULT_GROUPS = ("allocation", "use", "device")
LATER_GROUPS = ("accounting", "health", "links", "gpm")


def native(groups: Iterable[str], process_metrics: bool) -> tuple[Family, ...]:
    """The native families of the chosen groups, in the page's order."""
    chosen = set(groups)
    families = [family for group, rows in GROUPS.items() if group in chosen for family in rows]
    return (*families, *(PROCESSES if process_metrics else ()))
