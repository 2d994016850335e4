"""The dialect of nvidia_gpu_exporter: `nvidia_smi_*` as far as its board 14574, its alerts and usual ones query them.

Names, labels and units are those of its 1.14 (internal/exporter, docs/METRICS.md). Values are NVML's own, where the
original reads what nvidia-smi has rounded. The label `uuid` is always the GPU's, in lower case and without
NVML's prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from gpumap.agent.dialects.common import (
    Reading,
    clock,
    driver_version,
    ecc_errors,
    ecc_total,
    event_seconds,
    gpus_by_uuid,
    max_clock,
    power_limit,
    remapped_rows,
    retired_pages,
    sees_processes,
    temperature,
)
from gpumap.model.families import Family, Rows, Series, whether
from gpumap.model.grouping import grouped, sum_all
from gpumap.model.node import Device, Gpu
from gpumap.model.readings import (
    COMPUTE_MODES,
    ECC_LOCATIONS,
    ECC_TYPES,
    RECOVERY_ACTIONS,
    Activity,
    DeviceMemory,
    GpuReading,
    Uuid,
)
from gpumap.model.snapshot import Snapshot, once_per_snapshot
from gpumap.model.terms import Source

_EXIT_CODES = {
    "no_permission": 4,
    "insufficient_power": 8,
    "driver_not_loaded": 9,
    "irq_issue": 10,
    "library_not_found": 12,
    "function_not_found": 13,
    "corrupted_inforom": 14,
    "lost": 15,
    "gpu_is_lost": 15,
}
"""nvidia-smi(1), RETURN VALUE, by what gpumap calls the reason why NVML does not answer."""
_OTHER_ERROR = 255


def plain(uuid: Uuid) -> str:
    """Return a uuid as the original writes it."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


# --- GPUs -------------------------------------------------------------------------------------------------------------


_READINGS = Rows(
    ("uuid",), lambda snapshot: (((plain(gpu.uuid),), gpu.reading) for gpu in snapshot.node.gpus if gpu.reading)
)
"""The GPUs that answer."""
_GPUS = Rows(("uuid",), lambda snapshot: (((plain(gpu.uuid),), gpu) for gpu in snapshot.node.gpus))
_XIDS = Rows(("uuid",), lambda snapshot: (((plain(xids.uuid),), xids) for xids in snapshot.node.xids))


_UNITS = {"[W]": "watts", "[MHz]": "clock_hz", "[MiB]": "bytes", "[%]": "ratio", "[us]": "seconds"}


def _field(name: str, value: Reading) -> Family:
    """Return a gauge of a field, its help text, in base units: `power.draw [W]` is `nvidia_smi_power_draw_watts`."""
    words = [_UNITS.get(word, word) for word in name.replace(".", "_").split()]
    return _READINGS.gauge(f"nvidia_smi_{'_'.join(words)}", name, value)


def _read_info(snapshot: Snapshot) -> Iterator[Series]:
    """Only for GPUs that answer: the original drops the others."""
    cuda_version = snapshot.node.driver.cuda_version if snapshot.node.driver is not None else ""
    # Driver models exist on Windows; elsewhere nvidia-smi prints this.
    versions = cuda_version, "[N/A]", "[N/A]", driver_version(snapshot)
    for gpu in snapshot.node.gpus:
        if gpu.reading is not None:
            identity = str(gpu.index), gpu.model, gpu.pci_bus_id, plain(gpu.uuid)
            yield Series((gpu.reading.compute_capability, *versions, *identity, gpu.reading.vbios_version), 1)


def _read_recovery_action(gpu: Gpu) -> int | None:
    """Return nvml.h's number; also of a GPU that answers nothing else until it is reset."""
    action = gpu.recovery_action or ""
    if action in RECOVERY_ACTIONS:
        return RECOVERY_ACTIONS.index(action)
    number = action.removeprefix("code_")  # one that nvml.h has not had yet
    return int(number) if number.isascii() and number.isdecimal() else None


# --- GPU instances ----------------------------------------------------------------------------------------------------


def _read_mig_info(snapshot: Snapshot) -> Iterator[Series]:
    for leaf, gpu in _mig_devices(snapshot):
        mig = leaf.mig
        if mig is not None:
            ids = str(mig.compute_instance_id), str(mig.gpu_instance_id)
            yield Series((*ids, plain(leaf.uuid), mig.profile, plain(gpu.uuid)), 1)


def _instance_family(name: str, help: str, value: Callable[[Device], float | None]) -> Family:
    """Return a family with one value for each GPU instance: that of its first compute instance with a value."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        written: set[tuple[str, ...]] = set()
        for leaf, gpu in _mig_devices(snapshot):
            labels = str(leaf.mig.gpu_instance_id if leaf.mig else ""), plain(gpu.uuid)
            if labels not in written and (number := value(leaf)) is not None:
                written.add(labels)
                yield Series(labels, number)

    return Family(f"nvidia_smi_{name}", "gauge", help, ("gpu_instance_id", "uuid"), read)


@once_per_snapshot
def _mig_devices(snapshot: Snapshot) -> list[tuple[Device, Gpu]]:
    """Return the MIG devices of GPUs that answer."""
    gpus = gpus_by_uuid(snapshot)
    devices = ((leaf, gpus.get(leaf.uuid)) for leaf in snapshot.node.devices if leaf.mig is not None)
    return [(leaf, gpu) for leaf, gpu in devices if gpu is not None and gpu.reading is not None]


# --- processes --------------------------------------------------------------------------------------------------------


@once_per_snapshot
def _compute_apps(snapshot: Snapshot) -> list[tuple[tuple[str, ...], list[int | None]]]:
    """Return the memory of each process with a compute context, on each device of the GPU."""
    if not sees_processes(snapshot):
        return []
    gpus = gpus_by_uuid(snapshot)
    memory = grouped(
        ((str(process.pid), process.comm, plain(gpus[process.uuid].uuid)), process.memory_bytes)
        for process in snapshot.processes
        if process.uuid in gpus and "C" in process.type.split("+")
    )
    return sorted(memory.items())


_COMPUTE_APPS = Rows(("pid", "process_name", "uuid"), _compute_apps)


def _read_compute_apps(snapshot: Snapshot) -> Iterator[Series]:
    """0 if there is none; absent if NVML does not list the GPU's processes."""
    if not sees_processes(snapshot):
        return
    counts = Counter(uuid for (_, _, uuid), _ in _compute_apps(snapshot))
    for gpu in snapshot.node.gpus:
        if (reading := gpu.reading) is None:
            continue
        lists = [instance.processes for instance in reading.instances] if reading.partitioned else [reading.processes]
        is_listed = None not in lists and not (reading.partitioned and reading.mig_unknown)
        if is_listed:
            yield Series((plain(gpu.uuid),), counts[plain(gpu.uuid)])


# --- the collection ---------------------------------------------------------------------------------------------------

_COLLECTION = Rows(
    (),
    lambda snapshot: (
        ((), health) for health in snapshot.node.sources if health.source == Source.NVML and health.attempts
    ),
)
"""NVML's record after the first attempt."""


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


def _memory_value(value: Callable[[DeviceMemory], int | None]) -> Reading:
    return lambda reading: value(reading.memory) if reading.memory is not None else None


def _clock_event(reason: str) -> Reading:
    return lambda reading: whether(reading.clock_events.get(reason))


def _compute_mode(reading: GpuReading) -> int | None:
    return COMPUTE_MODES.index(reading.compute_mode) if reading.compute_mode in COMPUTE_MODES else None


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


def _mig_memory(kind: str, value: Callable[[DeviceMemory], int | None]) -> Family:
    help = f"Memory of the GPU instance ({kind}), which its compute instances share."
    return _instance_family(f"mig_memory_{kind}_bytes", help, lambda leaf: value(leaf.memory) if leaf.memory else None)


def _mig_activity(name: str, help: str, value: Callable[[Activity], float | None]) -> Family:
    return _instance_family(f"mig_{name}_ratio", help, lambda leaf: value(leaf.activity) if leaf.activity else None)


FAMILIES: tuple[Family, ...] = (
    _COLLECTION.gauge(
        "nvidia_smi_command_exit_code",
        "Exit code of the most recent nvidia-smi run",
        lambda health: 0 if health.up else _EXIT_CODES.get(health.reason, _OTHER_ERROR),
    ),
    _COLLECTION.counter(
        "nvidia_smi_failed_scrapes_total", "Number of failed collections", lambda health: health.failures
    ),
    _COLLECTION.gauge(
        "nvidia_smi_last_collect_success",
        "Whether the most recent collection succeeded (1) or not (0)",
        lambda health: int(health.up),
    ),
    _COLLECTION.gauge(
        "nvidia_smi_last_collect_success_timestamp_seconds",
        "Unix timestamp of the most recent successful collection",
        lambda health: health.last_success,
    ),
    _COLLECTION.gauge(
        "nvidia_smi_last_collect_duration_seconds",
        "Duration of the most recent collection",
        lambda health: health.last_seconds,
    ),
    Family(
        "nvidia_smi_gpu_info",
        "gauge",
        "A metric with a constant '1' value labeled by gpu uuid, name, driver_model_current, driver_model_pending, "
        "vbios_version, driver_version, pci_bus_id, compute_cap, index, cuda_version.",
        _INFO,
        _read_info,
    ),
    _field("index", lambda reading: reading.index),
    _GPUS.gauge("nvidia_smi_gpu_recovery_action", "gpu_recovery_action", _read_recovery_action),
    _READINGS.counter(
        "nvidia_smi_energy_joules_total",
        "Total energy consumed by the GPU in joules since the driver was last loaded.",
        lambda reading: reading.energy_joules,
    ),
    _field("compute_mode", _compute_mode),
    _field("pstate", lambda reading: reading.performance_state),
    _field("utilization.gpu [%]", lambda reading: reading.utilization_ratio),
    _field("utilization.memory [%]", lambda reading: reading.memory_controller_busy_ratio),
    _field("utilization.encoder [%]", lambda reading: reading.encoder_ratio),
    _field("utilization.decoder [%]", lambda reading: reading.decoder_ratio),
    _field("memory.total [MiB]", _memory_value(lambda memory: memory.total_bytes)),
    _field("memory.reserved [MiB]", _memory_value(lambda memory: memory.reserved_bytes)),
    _field("memory.used [MiB]", _memory_value(lambda memory: memory.used_bytes)),
    _field("memory.free [MiB]", _memory_value(lambda memory: memory.free_bytes)),
    _field("power.draw [W]", lambda reading: reading.power_watts),
    _field("power.limit [W]", power_limit("requested")),
    _field("enforced.power.limit [W]", lambda reading: reading.power_limit_watts),
    _field("power.default_limit [W]", power_limit("default")),
    _field("power.min_limit [W]", power_limit("min")),
    _field("power.max_limit [W]", power_limit("max")),
    _field("temperature.gpu", temperature("gpu")),
    _field("temperature.memory", temperature("memory")),
    _field("fan.speed [%]", lambda reading: next(iter(reading.fan_speed_ratios.values()), None)),
    *(_field(f"clocks.current.{domain} [MHz]", clock(domain)) for domain in ("graphics", "sm", "memory", "video")),
    *(_field(f"clocks.max.{domain} [MHz]", max_clock(domain)) for domain in ("graphics", "sm", "memory")),
    # Drivers from 535 on have the first name, those before it the second; the original has the one that it finds.
    *(
        _field(f"clocks_{generation}_reasons.{reason}", _clock_event(reason))
        for generation in ("event", "throttle")
        for reason in EVENTS
    ),
    *(_field(f"clocks_event_reasons_counters.{reason} [us]", event_seconds(reason)) for reason in COUNTED_EVENTS),
    *(
        _field(f"ecc.errors.{kind}.{since}.total", ecc_total(kind, since))
        for kind in ECC_TYPES
        for since in ("aggregate", "volatile")
    ),
    *(
        _field(f"ecc.errors.{kind}.aggregate.{location}", ecc_errors(kind, location))
        for kind in ECC_TYPES
        for location in sorted(ECC_LOCATIONS)
    ),
    *(_field(f"remapped_rows.{kind}", remapped_rows(kind)) for kind in ("correctable", "uncorrectable")),
    _field("remapped_rows.pending", lambda reading: whether(reading.row_remap_pending)),
    _field("remapped_rows.failure", lambda reading: whether(reading.row_remap_failure)),
    _field("retired_pages.single_bit_ecc.count", retired_pages("single_bit_ecc")),
    _field("retired_pages.double_bit.count", retired_pages("double_bit_ecc")),
    _field("retired_pages.pending", lambda reading: whether(reading.retired_pages_pending)),
    _XIDS.by(
        "xid",
        "nvidia_smi_xid_errors_total",
        "Number of XID errors observed on the GPU, by code.",
        lambda xids: {str(code): count for code, count in xids.counts.items()},
        "counter",
    ),
    _XIDS.by(
        "xid",
        "nvidia_smi_xid_last_timestamp_seconds",
        "Unix timestamp of the most recently observed XID error, by code.",
        lambda xids: {str(code): moment for code, moment in xids.last_at.items()},
    ),
    _COMPUTE_APPS.gauge(
        "nvidia_smi_compute_app_info",
        "A metric with a constant '1' value labeled by the identity of a process with a compute context on a GPU.",
        lambda memory: 1,
    ),
    _COMPUTE_APPS.gauge(
        "nvidia_smi_compute_app_used_memory_bytes",
        "GPU memory used by the process. Absent when the driver cannot report it (e.g. Windows WDDM).",
        sum_all,
    ),
    Family(
        "nvidia_smi_compute_apps",
        "gauge",
        "Number of processes with a compute context on the GPU.",
        ("uuid",),
        _read_compute_apps,
    ),
    Family(
        "nvidia_smi_compute_apps_last_collect_success",
        "gauge",
        "Whether the most recent per-process collection succeeded (1) or not (0)",
        (),
        lambda snapshot: (
            Series((), int(health.up and sees_processes(snapshot))) for _, health in _COLLECTION.read(snapshot)
        ),
    ),
    Family(
        "nvidia_smi_mig_info",
        "gauge",
        "A metric with a constant '1' value labeled by the identity of a MIG device: the parent GPU's uuid, the MIG "
        "device's own uuid, its GPU instance and compute instance ids, and its profile.",
        ("compute_instance_id", "gpu_instance_id", "mig_uuid", "profile", "uuid"),
        _read_mig_info,
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
