"""The dialect of nvidia_gpu_exporter: `nvidia_smi_*` as far as its board 14574, its alerts and usual ones query them.

Names, labels and units are those of its 1.14 (internal/exporter, docs/METRICS.md). Values are NVML's own, where the
original reads what nvidia-smi has rounded.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumap.agent.dialects import nvidia_smi_readers as readers
from gpumap.agent.dialects.common import (
    Reading,
    all_known,
    clock,
    ecc_errors,
    ecc_total,
    event_seconds,
    max_clock,
    power_limit,
    remapped_rows,
    retired_pages,
    temperature,
)
from gpumap.agent.dialects.nvidia_smi_readers import (
    CARDS,
    COLLECTION,
    COMPUTE_APPS,
    GPUS,
    XIDS,
    field,
    on_gpu_instances,
)
from gpumap.model.families import Family, whether
from gpumap.model.readings import COMPUTE_MODES, ECC_LOCATIONS, ECC_TYPES, Activity, DeviceMemory, GpuReading

EVENTS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sw_thermal_slowdown",
    "sync_boost",
)
COUNTED_EVENTS = ("hw_power_brake_slowdown", "hw_thermal_slowdown", "sw_power_cap", "sw_thermal_slowdown", "sync_boost")
"""Both in nvidia-smi's order; words of `CLOCK_EVENTS` and of `CLOCK_EVENT_TIMES`."""


def _of_memory(value: Callable[[DeviceMemory], int | None]) -> Reading:
    return lambda reading: value(reading.memory) if reading.memory is not None else None


def _clock_event(reason: str) -> Reading:
    return lambda reading: whether(reading.clock_events.get(reason))


def _compute_mode(reading: GpuReading) -> int | None:
    return COMPUTE_MODES.index(reading.compute_mode) if reading.compute_mode in COMPUTE_MODES else None


FIELDS = (
    field("compute_mode", _compute_mode),
    field("pstate", lambda reading: reading.performance_state),
    field("utilization.gpu [%]", lambda reading: reading.utilization_ratio),
    field("utilization.memory [%]", lambda reading: reading.memory_controller_busy_ratio),
    field("utilization.encoder [%]", lambda reading: reading.encoder_ratio),
    field("utilization.decoder [%]", lambda reading: reading.decoder_ratio),
    field("memory.total [MiB]", _of_memory(lambda memory: memory.total_bytes)),
    field("memory.reserved [MiB]", _of_memory(lambda memory: memory.reserved_bytes)),
    field("memory.used [MiB]", _of_memory(lambda memory: memory.used_bytes)),
    field("memory.free [MiB]", _of_memory(lambda memory: memory.free_bytes)),
    field("power.draw [W]", lambda reading: reading.power_watts),
    field("power.limit [W]", power_limit("requested")),
    field("enforced.power.limit [W]", lambda reading: reading.power_limit_watts),
    field("power.default_limit [W]", power_limit("default")),
    field("power.min_limit [W]", power_limit("min")),
    field("power.max_limit [W]", power_limit("max")),
    field("temperature.gpu", temperature("gpu")),
    field("temperature.memory", temperature("memory")),
    field("fan.speed [%]", lambda reading: next(iter(reading.fan_speed_ratios.values()), None)),
    *(field(f"clocks.current.{domain} [MHz]", clock(domain)) for domain in ("graphics", "sm", "memory", "video")),
    *(field(f"clocks.max.{domain} [MHz]", max_clock(domain)) for domain in ("graphics", "sm", "memory")),
    # Drivers from 535 on have the first name, those before it the second; the original has the one that it finds.
    *(
        field(f"clocks_{generation}_reasons.{reason}", _clock_event(reason))
        for generation in ("event", "throttle")
        for reason in EVENTS
    ),
    *(field(f"clocks_event_reasons_counters.{reason} [us]", event_seconds(reason)) for reason in COUNTED_EVENTS),
    *(
        field(f"ecc.errors.{kind}.{since}.total", ecc_total(kind, since))
        for kind in ECC_TYPES
        for since in ("aggregate", "volatile")
    ),
    *(
        field(f"ecc.errors.{kind}.aggregate.{location}", ecc_errors(kind, location))
        for kind in ECC_TYPES
        for location in sorted(ECC_LOCATIONS)
    ),
    *(field(f"remapped_rows.{kind}", remapped_rows(kind)) for kind in ("correctable", "uncorrectable")),
    field("remapped_rows.pending", lambda reading: whether(reading.row_remap_pending)),
    field("remapped_rows.failure", lambda reading: whether(reading.row_remap_failure)),
    field("retired_pages.single_bit_ecc.count", retired_pages("single_bit_ecc")),
    field("retired_pages.double_bit.count", retired_pages("double_bit_ecc")),
    field("retired_pages.pending", lambda reading: whether(reading.retired_pages_pending)),
)


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
    COLLECTION.gauge("nvidia_smi_command_exit_code", "Exit code of the most recent nvidia-smi run", readers.exit_code),
    COLLECTION.counter(
        "nvidia_smi_failed_scrapes_total", "Number of failed collections", lambda health: health.failures
    ),
    COLLECTION.gauge(
        "nvidia_smi_last_collect_success",
        "Whether the most recent collection succeeded (1) or not (0)",
        lambda health: int(health.up),
    ),
    COLLECTION.gauge(
        "nvidia_smi_last_collect_success_timestamp_seconds",
        "Unix timestamp of the most recent successful collection",
        lambda health: health.last_success,
    ),
    COLLECTION.gauge(
        "nvidia_smi_last_collect_duration_seconds",
        "Duration of the most recent collection",
        lambda health: health.last_seconds,
    ),
)

_CARD = (
    Family(
        "nvidia_smi_gpu_info",
        "gauge",
        "A metric with a constant '1' value labeled by gpu uuid, name, driver_model_current, driver_model_pending, "
        "vbios_version, driver_version, pci_bus_id, compute_cap, index, cuda_version.",
        _INFO,
        readers.info,
    ),
    field("index", lambda reading: reading.index),
    GPUS.gauge("nvidia_smi_gpu_recovery_action", "gpu_recovery_action", readers.recovery_action),
    CARDS.counter(
        "nvidia_smi_energy_joules_total",
        "Total energy consumed by the GPU in joules since the driver was last loaded.",
        lambda reading: reading.energy_joules,
    ),
)

_XIDS = (
    XIDS.by(
        "xid",
        "nvidia_smi_xid_errors_total",
        "Number of XID errors observed on the GPU, by code.",
        lambda xids: {str(code): count for code, count in xids.counts.items()},
        "counter",
    ),
    XIDS.by(
        "xid",
        "nvidia_smi_xid_last_timestamp_seconds",
        "Unix timestamp of the most recently observed XID error, by code.",
        lambda xids: {str(code): moment for code, moment in xids.last_at.items()},
    ),
)

_PROCESSES = (
    COMPUTE_APPS.gauge(
        "nvidia_smi_compute_app_info",
        "A metric with a constant '1' value labeled by the identity of a process with a compute context on a GPU.",
        lambda memory: 1,
    ),
    COMPUTE_APPS.gauge(
        "nvidia_smi_compute_app_used_memory_bytes",
        "GPU memory used by the process. Absent when the driver cannot report it (e.g. Windows WDDM).",
        lambda memory: None if (known := all_known(memory)) is None else sum(known),
    ),
    Family(
        "nvidia_smi_compute_apps",
        "gauge",
        "Number of processes with a compute context on the GPU.",
        ("uuid",),
        readers.compute_apps,
    ),
    Family(
        "nvidia_smi_compute_apps_last_collect_success",
        "gauge",
        "Whether the most recent per-process collection succeeded (1) or not (0)",
        (),
        readers.compute_apps_success,
    ),
)


def _mig_memory(kind: str, value: Callable[[DeviceMemory], int | None]) -> Family:
    help = f"Memory of the GPU instance ({kind}), which its compute instances share."
    return on_gpu_instances(f"mig_memory_{kind}_bytes", help, lambda leaf: value(leaf.memory) if leaf.memory else None)


def _mig_activity(name: str, help: str, value: Callable[[Activity], float | None]) -> Family:
    return on_gpu_instances(f"mig_{name}_ratio", help, lambda leaf: value(leaf.activity) if leaf.activity else None)


_MIG = (
    Family(
        "nvidia_smi_mig_info",
        "gauge",
        "A metric with a constant '1' value labeled by the identity of a MIG device: the parent GPU's uuid, the MIG "
        "device's own uuid, its GPU instance and compute instance ids, and its profile.",
        ("compute_instance_id", "gpu_instance_id", "mig_uuid", "profile", "uuid"),
        readers.mig_info,
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

FAMILIES: tuple[Family, ...] = (*_COLLECTION, *_CARD, *FIELDS, *_XIDS, *_PROCESSES, *_MIG)
