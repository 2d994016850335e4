"""The dialects dcgm and dcgm49: the `DCGM_FI_*` that NVML can provide, with the pods of each GPU.

`dcgm` has the names, labels, their order, units and help texts of dcgm-exporter 4.5.3-4.8.2 (etc/default-counters.csv,
internal/pkg/rendermetrics), the label `hostname` as from 4.6.0-4.8.3 on. `dcgm49` has the names, labels and units since
4.9. One table has both. A container never gets the value of a shared device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from gpumap.agent.dialects.common import (
    Reading,
    clock,
    device_node,
    driver_version,
    ecc_total,
    event_seconds,
    mib,
    power_limit,
    remapped_rows,
    retired_pages,
    temperature,
)
from gpumap.agent.dialects.dcgm_entities import Entity, entities, gpu_entities
from gpumap.model.families import Family, Kind, Series, whether
from gpumap.model.node import Use
from gpumap.model.readings import Activity, DeviceMemory, GpuReading
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import ContainerName

_ENTITY_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "hostname")
_POD_LABELS = ("container", "namespace", "pod")


class Value(NamedTuple):
    """A field's value of an entity, in the unit since 4.9. `container` is the one that the row names."""

    entity: Entity
    container: ContainerName | None
    value: float
    field_labels: tuple[str, ...] = ()
    """Labels of the field, between `container` and `namespace`."""


Values = Callable[[Snapshot], Iterator[Value]]


class Unit(NamedTuple):
    """The unit of a field, as help texts name it before and since 4.9, and how to convert to the older one."""

    before: str
    since: str
    to_before: Callable[[float], float] = lambda value: value


class Field(NamedTuple):
    """Names without `DCGM_FI_`. In the help text `{}` is the unit."""

    before: str
    since: str
    help: str
    values: Values
    unit: Unit | None = None
    kind: Kind = "gauge"
    labels: tuple[str, ...] = ()
    """The names of the labels `field_labels`."""


def _family(field: Field, *, since_4_9: bool) -> Family:
    """Return the field under the name, labels and unit of dcgm-exporter before or since 4.9."""
    unit = field.unit
    # In the original's order: those of the entity, those that are the same on all, then the pod's by their names.
    entity_labels = (*_ENTITY_LABELS, "DCGM_FI_SYSTEM_DRIVER_VERSION" if since_4_9 else "DCGM_FI_DRIVER_VERSION")

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for entity, container, value, field_labels in field.values(snapshot):
            if unit is not None:
                value = value if since_4_9 else unit.to_before(value)
                value = int(value) if value == int(value) else value
            yield Series(_labels(snapshot, entity, container, field_labels), value)

    return Family(
        f"DCGM_FI_{field.since if since_4_9 else field.before}",
        field.kind,
        field.help.format("" if unit is None else unit.since if since_4_9 else unit.before),
        (*entity_labels, _POD_LABELS[0], *field.labels, *_POD_LABELS[1:]),
        read,
        # Left out if empty, as in the original. The pod's labels are written empty: if they were missing and
        # Prometheus honors labels, it would take those of the target, which name gpumap's own pod.
        optional_labels=frozenset(entity_labels),
    )


def _labels(
    snapshot: Snapshot, entity: Entity, name: ContainerName | None, field_labels: tuple[str, ...]
) -> tuple[str, ...]:
    gpu = entity.gpu
    namespace, pod, container = name or ("", "", "")
    gpu_labels = str(gpu.index), gpu.uuid, gpu.pci_bus_id, device_node(gpu), gpu.model
    instance_labels = entity.profile, "" if entity.gpu_instance_id is None else str(entity.gpu_instance_id)
    node_labels = snapshot.node.name, driver_version(snapshot)
    return (*gpu_labels, *instance_labels, *node_labels, container, *field_labels, namespace, pod)


def _entity_values(
    value: Callable[[Entity], float | None], list_entities: Callable[[Snapshot], Iterable[Entity]] = entities
) -> Values:
    """Return a value of each entity, by default of each GPU or GPU instance."""

    def read(snapshot: Snapshot) -> Iterator[Value]:
        for entity in list_entities(snapshot):
            if (number := value(entity)) is not None:
                yield Value(entity, entity.sole, number)

    return read


def _container_values(
    entity_value: Callable[[Entity], float | None], use_value: Callable[[Use], float | None]
) -> Values:
    """Return values of containers.

    A container that is the only one on a device gets the device's value. A device without containers keeps its own
    row. Otherwise each container gets its measured value, and the device has no row.
    """

    def read(snapshot: Snapshot) -> Iterator[Value]:
        for entity in entities(snapshot):
            if entity.gpu_instance_id is not None and entity.memory is None:
                continue  # a grant of all of its memory shows that no other container holds it
            sole = entity.sole
            if sole is not None or not entity.containers:
                if (value := entity_value(entity)) is not None:
                    yield Value(entity, sole, value)
                continue
            for container in entity.containers:
                if (value := entity.own(container, use_value)) is not None:
                    yield Value(entity, container, value)

    return read


def _xids(snapshot: Snapshot) -> Iterator[Value]:
    """0 without an error. It also exists while the GPU does not answer, when it is needed most.

    A code belongs to the container that it affected, which may not hold the GPU now. If it affected several, the row
    names none of them.
    """
    by_gpu = {xids.uuid: xids for xids in snapshot.node.xids}
    for entity in gpu_entities(snapshot):
        xids = by_gpu.get(entity.gpu.uuid)
        code = None if xids is None else xids.last_code if xids.counts else 0
        if code is not None:
            uuids = {entity.gpu.uuid, *(leaf.uuid for leaf in entity.leaves)}
            affected = {row.name for row in snapshot.node.container_xids if row.code == code and row.uuid in uuids}
            name = entity.sole if code == 0 else next(iter(affected)) if len(affected) == 1 else None
            yield Value(entity, name, code, (str(code),))


def _times(factor: float) -> Callable[[float], float]:
    """Return a product without the noise of binary fractions: 57, not 56.99999999999999."""
    return lambda value: round(value * factor, 6)


# --- the table --------------------------------------------------------------------------------------------------------

_HERTZ = Unit("in MHz", "in Hz", _times(1e-6))
_JOULES = Unit("in mJ", "in J", _times(1000))
_RATIO = Unit("in %", "0-1", _times(100))
_BYTES = Unit("in MiB", "in bytes", mib)
_CELSIUS = Unit("in C", "in C")
_NANOSECONDS = Unit("in ns", "in ns", _times(1))


def _gpu(before: str, since: str, help: str, value: Reading, unit: Unit | None = None, kind: Kind = "gauge") -> Field:
    """A value of each GPU, also if it is partitioned."""
    values = _entity_values(
        lambda entity: None if entity.gpu.reading is None else value(entity.gpu.reading), gpu_entities
    )
    return Field(f"DEV_{before}", f"DEV_{since}", help, values, unit, kind)


def _counter(before: str, since: str, help: str, value: Reading, unit: Unit | None = None) -> Field:
    return _gpu(before, since, help, value, unit, "counter")


def _throttled(name: str, cause: str, reason: str) -> Field:
    seconds = event_seconds(reason)

    def nanoseconds(reading: GpuReading) -> float | None:
        return None if (duration := seconds(reading)) is None else duration * 1e9

    name = f"{name}_VIOLATION"
    return _counter(name, name, f"Throttling duration due to {cause} ({{}}).", nanoseconds, _NANOSECONDS)


def _ecc(name: str, words: str, kind: str, since: str) -> Field:
    name = f"ECC_{name}_TOTAL"
    return _counter(name, name, f"Total number of {words} ECC errors.", ecc_total(kind, since))


def _retired(bits: str, words: str, cause: str) -> Field:
    help = f"Total number of retired pages due to {words} errors."
    return _counter(f"RETIRED_{bits}", f"PAGE_RETIRED_{bits}_TOTAL", help, retired_pages(cause))


def _remapped(cause: str) -> Field:
    help, word = f"Number of remapped rows for {cause} errors", cause.upper()
    return _counter(f"{word}_REMAPPED_ROWS", f"ROW_REMAP_{word}_TOTAL", help, remapped_rows(cause))


def _memory(before: str, since: str, help: str, value: Callable[[DeviceMemory], float | None]) -> Field:
    """A value of the memory of each GPU or GPU instance."""
    values = _entity_values(lambda entity: None if entity.memory is None else value(entity.memory))
    return Field(f"DEV_FB_{before}", f"DEV_FB_{since}", f"Framebuffer memory {help} ({{}}).", values, _BYTES)


def _gpm(name: str, help: str, value: Callable[[Activity], float | None]) -> Field:
    """A value that GPM measured of each GPU or GPU instance. `PIPE_X_ACTIVE` is `X_UTIL_RATIO` since 4.9."""
    values = _entity_values(lambda entity: None if entity.activity is None else value(entity.activity))
    since = name.removeprefix("PIPE_").replace("ACTIVE", "UTIL")
    return Field(f"PROF_{name}", f"PROF_{since}_RATIO", help, values)


_UTILIZATION = _container_values(
    # NVML has none for a partitioned GPU or a GPU instance.
    lambda entity: entity.gpu.reading.utilization_ratio if entity.gpu.reading and not entity.gpu.partitioned else None,
    lambda use: use.sm_ratio,
)
_USED = _container_values(
    lambda entity: None if entity.memory is None else entity.memory.used_bytes, lambda use: use.memory_bytes
)

NEEDS = ("codec", "health", "links", "gpm", "card")
FIELDS: tuple[Field, ...] = (
    _gpu("SM_CLOCK", "SM_CLOCK_HERTZ", "SM clock frequency ({}).", clock("sm"), _HERTZ),
    _gpu("MEM_CLOCK", "MEMORY_CLOCK_HERTZ", "Memory clock frequency ({}).", clock("memory"), _HERTZ),
    _gpu("MEMORY_TEMP", "MEMORY_TEMP_CELSIUS", "Memory temperature ({}).", temperature("memory"), _CELSIUS),
    _gpu("GPU_TEMP", "GPU_TEMP_CELSIUS", "GPU temperature ({}).", temperature("gpu"), _CELSIUS),
    _gpu("POWER_USAGE", "BOARD_POWER_WATTS", "Power draw (in W).", lambda reading: reading.power_watts),
    _counter(
        "TOTAL_ENERGY_CONSUMPTION",
        "GPU_ENERGY_JOULES_TOTAL",
        "Total energy consumption since boot ({}).",
        lambda reading: reading.energy_joules,
        _JOULES,
    ),
    _gpu(
        "POWER_MGMT_LIMIT",
        "BOARD_POWER_LIMIT_REQUESTED_WATTS",
        "Power management limit (in W).",
        power_limit("requested"),
    ),
    _gpu(
        "ENFORCED_POWER_LIMIT",
        "BOARD_POWER_LIMIT_ENFORCED_WATTS",
        "Enforced power limit (in W).",
        lambda reading: reading.power_limit_watts,
    ),
    _counter(
        "PCIE_REPLAY_COUNTER",
        "PCIE_REPLAY_TOTAL",
        "Total number of PCIe retries.",
        lambda reading: reading.pcie_replays,
    ),
    Field("DEV_GPU_UTIL", "DEV_GPU_UTIL_RATIO", "GPU utilization ({}).", _UTILIZATION, _RATIO),
    _gpu(
        "MEM_COPY_UTIL",
        "MEMORY_UTIL_RATIO",
        "Memory utilization ({}).",
        lambda reading: reading.memory_controller_busy_ratio,
        _RATIO,
    ),
    _gpu("ENC_UTIL", "ENC_UTIL_RATIO", "Encoder utilization ({}).", lambda reading: reading.encoder_ratio, _RATIO),
    _gpu("DEC_UTIL", "DEC_UTIL_RATIO", "Decoder utilization ({}).", lambda reading: reading.decoder_ratio, _RATIO),
    Field("DEV_XID_ERRORS", "DEV_XID_ERROR", "Value of the last XID error encountered.", _xids, labels=("err_code",)),
    _throttled("POWER", "power constraints", "sw_power_cap"),
    _throttled("THERMAL", "thermal constraints", "thermal"),
    _throttled("SYNC_BOOST", "sync-boost constraints", "sync_boost"),
    _throttled("BOARD_LIMIT", "board limit constraints", "board_limit"),
    _throttled("LOW_UTIL", "low utilization", "low_utilization"),
    _throttled("RELIABILITY", "reliability constraints", "reliability"),
    _memory("FREE", "FREE_BYTES", "free", lambda memory: memory.free_bytes),
    Field("DEV_FB_USED", "DEV_FB_USED_BYTES", "Framebuffer memory used ({}).", _USED, _BYTES),
    _memory("RESERVED", "RESERVED_BYTES", "reserved", lambda memory: memory.reserved_bytes),
    _memory("TOTAL", "CAPACITY_BYTES", "total", lambda memory: memory.total_bytes),
    _ecc("SBE_VOL", "single-bit volatile", "corrected", "volatile"),
    _ecc("DBE_VOL", "double-bit volatile", "uncorrected", "volatile"),
    _ecc("SBE_AGG", "single-bit persistent", "corrected", "aggregate"),
    _ecc("DBE_AGG", "double-bit persistent", "uncorrected", "aggregate"),
    _retired("SBE", "single-bit", "single_bit_ecc"),
    _retired("DBE", "double-bit", "double_bit_ecc"),
    _counter(
        "RETIRED_PENDING",
        "PAGE_RETIRED_PENDING",
        "Total number of pages pending retirement.",
        lambda reading: whether(reading.retired_pages_pending),
    ),
    _remapped("uncorrectable"),
    _remapped("correctable"),
    _gpu(
        "ROW_REMAP_FAILURE",
        "ROW_REMAP_FAILED",
        "Whether remapping of rows has failed",
        lambda reading: whether(reading.row_remap_failure),
    ),
    _gpm("GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", lambda activity: activity.graphics_ratio),
    _gpm("SM_ACTIVE", "The ratio of cycles an SM has at least 1 warp assigned.", lambda activity: activity.sm_ratio),
    _gpm(
        "SM_OCCUPANCY", "The ratio of number of warps resident on an SM.", lambda activity: activity.sm_occupancy_ratio
    ),
    _gpm(
        "PIPE_TENSOR_ACTIVE",
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        lambda activity: activity.tensor_ratio,
    ),
    _gpm(
        "DRAM_ACTIVE",
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        lambda activity: activity.dram_ratio,
    ),
    _gpm("PIPE_FP64_ACTIVE", "Ratio of cycles the fp64 pipes are active.", lambda activity: activity.fp64_ratio),
    _gpm("PIPE_FP32_ACTIVE", "Ratio of cycles the fp32 pipes are active.", lambda activity: activity.fp32_ratio),
    _gpm("PIPE_FP16_ACTIVE", "Ratio of cycles the fp16 pipes are active.", lambda activity: activity.fp16_ratio),
)
"""The fields of ECC and the times of throttling have the same names before and since 4.9."""

BEFORE_4_9 = tuple(_family(field, since_4_9=False) for field in FIELDS)
SINCE_4_9 = tuple(_family(field, since_4_9=True) for field in FIELDS)
