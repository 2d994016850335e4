"""The groups `device`, `codec`, `links` and `gpm`: what NVML measures of leaves and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import structs

from gpumap.agent.metrics.allocation import NODE
from gpumap.agent.metrics.use import USES
from gpumap.model.families import Family, Rows, Series
from gpumap.model.readings import Activity
from gpumap.model.snapshot import Snapshot

GPUS = Rows(("gpu_uuid",), lambda snapshot: (((gpu.uuid,), gpu) for gpu in snapshot.node.gpus))
READINGS = Rows(
    ("gpu_uuid",), lambda snapshot: (((gpu.uuid,), gpu.reading) for gpu in snapshot.node.gpus if gpu.reading)
)
_MEMORY = Rows(
    ("uuid",), lambda snapshot: (((device.uuid,), device.memory) for device in snapshot.node.devices if device.memory)
)
_ACTIVITY = Rows(
    ("uuid",),
    lambda snapshot: (((device.uuid,), device.activity) for device in snapshot.node.devices if device.activity),
)


def _label(value: object) -> str:
    return "" if value is None else str(value)


def _device_info(snapshot: Snapshot) -> Iterator[Series]:
    gpus = {gpu.uuid: gpu for gpu in snapshot.node.gpus}
    for device in snapshot.node.devices:
        if device.is_leaf and device.gpu_uuid in gpus:
            gpu, mig = gpus[device.gpu_uuid], device.mig
            place = gpu.uuid, str(gpu.index), _label(gpu.minor), gpu.pci_bus_id, gpu.model
            instance = (mig.profile, str(mig.gpu_instance_id), str(mig.compute_instance_id)) if mig else ("", "", "")
            yield Series((device.uuid, *place, *instance), 1)


def _missing_devices(snapshot: Snapshot) -> Iterator[Series]:
    """Yield the GPUs without gpumap_device_info. With them, a count of the node's GPUs is complete."""
    with_device = {device.gpu_uuid for device in snapshot.node.devices if device.is_leaf}
    for gpu in snapshot.node.gpus:
        if gpu.uuid not in with_device:
            place = (str(gpu.index), _label(gpu.minor), gpu.pci_bus_id, gpu.model)
            yield Series((gpu.uuid, *place, gpu.fault or ""), 1)
    for nameless in snapshot.node.nameless_gpus:
        yield Series(("", str(nameless.index), "", nameless.pci_bus_id, "", nameless.fault), 1)


DEVICE = (
    Family(
        "gpumap_device_info",
        "gauge",
        "Identity of a device that a container can be assigned: a GPU without partitions, or a MIG device.",
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
    _MEMORY.gauge("gpumap_device_memory_total_bytes", "Total memory of the device.", lambda memory: memory.total_bytes),
    _MEMORY.gauge(
        "gpumap_device_memory_used_bytes",
        "Used memory of the device. Excludes memory reserved by the driver, if the driver reports it.",
        lambda memory: memory.used_bytes,
    ),
    _MEMORY.gauge(
        "gpumap_device_memory_reserved_bytes",
        "Memory of the device that the driver reserves for itself.",
        lambda memory: memory.reserved_bytes,
    ),
    _MEMORY.gauge("gpumap_device_memory_free_bytes", "Free memory of the device.", lambda memory: memory.free_bytes),
    GPUS.gauge("gpumap_gpu_up", "1 if the GPU answered in the last collection, else 0.", lambda gpu: int(gpu.up)),
    GPUS.info(
        ("reason",),
        "gpumap_gpu_fault_info",
        "Reason why the GPU did not answer in the last collection.",
        lambda gpu: (gpu.fault,) if gpu.fault is not None else None,
    ),
    Family(
        "gpumap_gpu_without_device_info",
        "gauge",
        "A GPU without gpumap_device_info: it has no MIG devices, or has not reported its uuid. `reason` is its fault.",
        ("gpu_uuid", "index", "minor", "pci_bus_id", "model", "reason"),
        _missing_devices,
    ),
    GPUS.gauge(
        "gpumap_gpu_last_success_timestamp_seconds", "Unix time of the GPU's last answer.", lambda gpu: gpu.last_success
    ),
    READINGS.gauge(
        "gpumap_gpu_utilization_ratio",
        "Share of time in which any kernel ran on the GPU (0-1), in the driver's last sample period.",
        lambda reading: reading.utilization_ratio,
    ),
    READINGS.gauge(
        "gpumap_gpu_memory_controller_busy_ratio",
        "Share of time in which the GPU's memory was read or written (0-1), in the driver's last sample period.",
        lambda reading: reading.memory_controller_busy_ratio,
    ),
    READINGS.gauge(
        "gpumap_gpu_memory_total_bytes",
        "Total memory of the GPU, over all its MIG devices.",
        lambda reading: reading.memory.total_bytes if reading.memory else None,
    ),
    READINGS.gauge(
        "gpumap_gpu_memory_used_bytes",
        "Used memory of the GPU, over all its MIG devices. Excludes memory reserved by the driver, if the driver "
        "reports it.",
        lambda reading: reading.memory.used_bytes if reading.memory else None,
    ),
    READINGS.by(
        "sensor",
        "gpumap_gpu_temperature_celsius",
        "Temperature of the GPU, by sensor.",
        lambda reading: reading.temperatures_celsius,
    ),
    READINGS.gauge("gpumap_gpu_power_watts", "Power draw of the GPU.", lambda reading: reading.power_watts),
    READINGS.gauge(
        "gpumap_gpu_power_limit_watts",
        "Power limit that the driver enforces.",
        lambda reading: reading.power_limit_watts,
    ),
    READINGS.counter(
        "gpumap_gpu_energy_joules_total",
        "Energy that the GPU used since its driver was loaded, as counted by the driver.",
        lambda reading: reading.energy_joules,
    ),
    NODE.info(
        ("driver_version", "cuda_version", "nvml_version"),
        "gpumap_driver_info",
        "Versions of the NVIDIA driver, CUDA and NVML.",
        lambda node: structs.astuple(node.driver) if node.driver else None,
    ),
)

CODEC = (
    READINGS.gauge(
        "gpumap_gpu_encoder_utilization_ratio",
        "Share of time in which the GPU's video encoders were busy (0-1).",
        lambda r: r.encoder_ratio,
    ),
    READINGS.gauge(
        "gpumap_gpu_decoder_utilization_ratio",
        "Share of time in which the GPU's video decoders were busy (0-1).",
        lambda r: r.decoder_ratio,
    ),
)

# --- the group links --------------------------------------------------------------------------------------------------


LINKS = (
    READINGS.counter(
        "gpumap_gpu_pcie_transmit_bytes_total",
        "Bytes that the GPU sent over PCIe, as counted by the driver. If it reports only rates (GPM), gpumap "
        "integrates them over time.",
        lambda reading: reading.pcie_transmit_bytes,
    ),
    READINGS.counter(
        "gpumap_gpu_pcie_receive_bytes_total",
        "Bytes that the GPU received over PCIe, as counted by the driver. If it reports only rates (GPM), gpumap "
        "integrates them over time.",
        lambda reading: reading.pcie_receive_bytes,
    ),
    READINGS.counter(
        "gpumap_gpu_nvlink_transmit_bytes_total",
        "Bytes that the GPU sent over all of its NVLinks.",
        lambda reading: reading.nvlink_transmit_bytes,
    ),
    READINGS.counter(
        "gpumap_gpu_nvlink_receive_bytes_total",
        "Bytes that the GPU received over all of its NVLinks.",
        lambda reading: reading.nvlink_receive_bytes,
    ),
    READINGS.by(
        "type",
        "gpumap_gpu_nvlink_errors_total",
        "Errors of all NVLinks of the GPU, by type, as counted by the driver. GPUs before Blackwell.",
        lambda reading: reading.nvlink_errors,
        "counter",
    ),
    READINGS.info(
        ("state", "status"),
        "gpumap_gpu_fabric_info",
        "Registration of the GPU with the fabric of NVSwitches. The status is empty until it is completed.",
        lambda reading: structs.astuple(reading.fabric) if reading.fabric else None,
    ),
)

# --- the group gpm ----------------------------------------------------------------------------------------------------


def _busy(name: str, words: str, value: Callable[[Activity], float | None]) -> Family:
    help = f"Share of time in which {words}, mean over the interval."
    return _ACTIVITY.gauge(f"gpumap_device_{name}_activity_ratio", help, value)


GPM = (
    _ACTIVITY.gauge(
        "gpumap_device_sm_activity_ratio",
        "Share of the device's SMs that were busy (0-1), mean over the interval. Hopper and later.",
        lambda activity: activity.sm_ratio,
    ),
    _ACTIVITY.gauge(
        "gpumap_device_sm_occupancy_ratio",
        "Warps on the device's SMs as a ratio of their maximum (0-1), mean over the interval.",
        lambda activity: activity.sm_occupancy_ratio,
    ),
    _busy("tensor", "the device's tensor cores were busy (0-1)", lambda activity: activity.tensor_ratio),
    _ACTIVITY.gauge(
        "gpumap_device_dram_activity_ratio",
        "Used share of the device's memory bandwidth (0-1), mean over the interval.",
        lambda activity: activity.dram_ratio,
    ),
    _busy(
        "graphics",
        "a graphics or compute engine of the device was busy (0-1)",
        lambda activity: activity.graphics_ratio,
    ),
    _busy(
        "fp64", "the device's FP64 pipes were busy (0-1), without tensor cores", lambda activity: activity.fp64_ratio
    ),
    _busy("fp32", "the device's FP32 pipes were busy (0-1)", lambda activity: activity.fp32_ratio),
    _busy(
        "fp16", "the device's FP16 pipes were busy (0-1), without tensor cores", lambda activity: activity.fp16_ratio
    ),
    USES.gauge(
        "gpumap_container_sm_activity_ratio",
        "Share of the device's SMs that were busy (0-1), mean over the interval. Absent if several containers or "
        "unknown processes used the device, also for a short time.",
        lambda use: use.sm_activity_ratio,
    ),
)
