"""The dialect of nvidia_gpu_exporter: `nvidia_smi_*` as far as its board 14574, its alerts and usual ones query them.

Names, labels and units are those of its 1.14 (internal/exporter, docs/METRICS.md). Values are NVML's own, where the
original reads what nvidia-smi has rounded.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumap.agent.dialects import nvidia_smi_readers as of
from gpumap.agent.dialects.nvidia_smi_fields import FIELDS
from gpumap.agent.dialects.nvidia_smi_readers import on_gpu_instances, on_gpus
from gpumap.model.families import Family
from gpumap.model.readings import Activity, DeviceMemory
from gpumap.model.snapshot import Leaf

NEEDS = ("codec", "health", "gpm", "card")

_INFO = (
    "compute_cap",
    "cuda_version",
    "driver_model_current",
    "driver_model_pending",
    "driver_version",
    "index",
    "name",
    "pci_bus_id",
    "uuid",
    "vbios_version",
)
"""In the order in which client_golang writes them; the original's `serial` and `pci_sub_device_id` are not asked."""
_COLLECTION = (
    Family("nvidia_smi_command_exit_code", "gauge", "Exit code of the most recent nvidia-smi run", (), of.exit_code),
    Family("nvidia_smi_failed_scrapes_total", "counter", "Number of failed collections", (), of.failures),
    Family(
        "nvidia_smi_last_collect_success",
        "gauge",
        "Whether the most recent collection succeeded (1) or not (0)",
        (),
        of.success,
    ),
    Family(
        "nvidia_smi_last_collect_success_timestamp_seconds",
        "gauge",
        "Unix timestamp of the most recent successful collection",
        (),
        of.success_moment,
    ),
    Family(
        "nvidia_smi_last_collect_duration_seconds", "gauge", "Duration of the most recent collection", (), of.duration
    ),
)

_CARD = (
    Family(
        "nvidia_smi_gpu_info",
        "gauge",
        "A metric with a constant '1' value labeled by gpu uuid, name, driver_model_current, driver_model_pending, "
        "vbios_version, driver_version, pci_bus_id, compute_cap, index, cuda_version.",
        _INFO,
        of.info,
    ),
    Family("nvidia_smi_index", "gauge", "index", ("uuid",), of.index),
    Family("nvidia_smi_gpu_recovery_action", "gauge", "gpu_recovery_action", ("uuid",), of.recovery_action),
    on_gpus(
        "energy_joules_total",
        "Total energy consumed by the GPU in joules since the driver was last loaded.",
        lambda reading: reading.energy_joules,
        "counter",
    ),
)

_XIDS = (
    Family(
        "nvidia_smi_xid_errors_total",
        "counter",
        "Number of XID errors observed on the GPU, by code.",
        ("uuid", "xid"),
        of.xid_errors,
    ),
    Family(
        "nvidia_smi_xid_last_timestamp_seconds",
        "gauge",
        "Unix timestamp of the most recently observed XID error, by code.",
        ("uuid", "xid"),
        of.xid_moments,
    ),
)

_PROCESS = ("pid", "process_name", "uuid")
_PROCESSES = (
    Family(
        "nvidia_smi_compute_app_info",
        "gauge",
        "A metric with a constant '1' value labeled by the identity of a process with a compute context on a GPU.",
        _PROCESS,
        of.process_info,
    ),
    Family(
        "nvidia_smi_compute_app_used_memory_bytes",
        "gauge",
        "GPU memory used by the process. Absent when the driver cannot report it (e.g. Windows WDDM).",
        _PROCESS,
        of.process_memory,
    ),
    Family(
        "nvidia_smi_compute_apps",
        "gauge",
        "Number of processes with a compute context on the GPU.",
        ("uuid",),
        of.compute_apps,
    ),
    Family(
        "nvidia_smi_compute_apps_last_collect_success",
        "gauge",
        "Whether the most recent per-process collection succeeded (1) or not (0)",
        (),
        of.compute_apps_success,
    ),
)


def _mig_memory(kind: str, value: Callable[[DeviceMemory], int | None]) -> Family:
    def read(leaf: Leaf) -> int | None:
        return value(leaf.memory) if leaf.memory is not None else None

    help = f"Memory of the GPU instance ({kind}), which its compute instances share."
    return on_gpu_instances(f"mig_memory_{kind}_bytes", help, read)


def _mig_activity(name: str, help: str, value: Callable[[Activity], float | None]) -> Family:
    def read(leaf: Leaf) -> float | None:
        return value(leaf.activity) if leaf.activity is not None else None

    return on_gpu_instances(f"mig_{name}_ratio", help, read)


_MIG = (
    Family(
        "nvidia_smi_mig_info",
        "gauge",
        "A metric with a constant '1' value labeled by the identity of a MIG device: the parent GPU's uuid, the MIG "
        "device's own uuid, its GPU instance and compute instance ids, and its profile.",
        ("compute_instance_id", "gpu_instance_id", "mig_uuid", "profile", "uuid"),
        of.mig_info,
    ),
    _mig_memory("total", lambda memory: memory.total_bytes),
    _mig_memory("used", lambda memory: memory.used_bytes),
    _mig_memory("free", lambda memory: memory.free_bytes),
    _mig_memory("reserved", lambda memory: memory.reserved_bytes),
    _mig_activity(
        "sm_activity", "Fraction of time the GPU instance's SMs were active.", lambda activity: activity.sm_ratio
    ),
    _mig_activity(
        "sm_occupancy",
        "Fraction of the GPU instance's resident warp slots that were occupied.",
        lambda activity: activity.sm_occupancy_ratio,
    ),
    _mig_activity(
        "tensor_activity",
        "Fraction of time the GPU instance's tensor pipes were active.",
        lambda activity: activity.tensor_ratio,
    ),
)

FAMILIES: tuple[Family, ...] = (
    *_COLLECTION,
    *_CARD,
    *FIELDS,
    *_XIDS,
    *_PROCESSES,
    *_MIG,
)
