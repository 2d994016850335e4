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
from gpumap.agent.dialects.dcgm_entities import Entity, cards, entities
from gpumap.model.families import Family, Kind, Series, whether
from gpumap.model.node import Use
from gpumap.model.readings import Activity, DeviceMemory
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import ContainerName

_ENTITY_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "hostname")
_POD_LABELS = ("container", "namespace", "pod")


class Value(NamedTuple):
    """A field's value of an entity, in the unit since 4.9. `container` is the one that the row names."""

    entity: Entity
    container: ContainerName | None
    value: float
    more: tuple[str, ...] = ()
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
    """The names of the labels `more`."""


def families(fields: Iterable[Field], *, since_4_9: bool) -> tuple[Family, ...]:
    """Return the fields under the names, labels and units of dcgm-exporter before or since 4.9."""
    return tuple(_family(field, since_4_9=since_4_9) for field in fields)


def _family(field: Field, *, since_4_9: bool) -> Family:
    unit = field.unit
    # In the original's order: those of the entity, those that are the same on all, then the pod's by their names.
    entity_labels = (*_ENTITY_LABELS, "DCGM_FI_SYSTEM_DRIVER_VERSION" if since_4_9 else "DCGM_FI_DRIVER_VERSION")

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for entity, container, value, more in field.values(snapshot):
            if unit is not None:
                value = _tidy(value if since_4_9 else unit.to_before(value))
            yield Series(_labels(snapshot, entity, container, more), value)

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


def _labels(snapshot: Snapshot, entity: Entity, name: ContainerName | None, more: tuple[str, ...]) -> tuple[str, ...]:
    gpu = entity.gpu
    namespace, pod, container = name or ("", "", "")
    return (
        str(gpu.index),
        gpu.uuid,
        gpu.pci_bus_id,
        device_node(gpu),
        gpu.model,
        entity.profile,
        "" if entity.gpu_instance_id is None else str(entity.gpu_instance_id),
        snapshot.node.name,
        driver_version(snapshot),
        container,
        *more,
        namespace,
        pod,
    )


def on_cards(value: Reading) -> Values:
    """Return one value for each card, also if it is partitioned."""

    def read(snapshot: Snapshot) -> Iterator[Value]:
        for card in cards(snapshot):
            reading = card.gpu.reading
            if reading is not None and (found := value(reading)) is not None:
                yield Value(card, card.sole, found)

    return read


def of_memory(value: Callable[[DeviceMemory], float | None]) -> Values:
    """Return a value of the memory of each GPU or GPU instance."""
    return _on_entities(lambda entity: None if entity.memory is None else value(entity.memory))


def of_activity(value: Callable[[Activity], float | None]) -> Values:
    """Return a value that GPM measured of each GPU or GPU instance."""
    return _on_entities(lambda entity: None if entity.activity is None else value(entity.activity))


def _on_entities(value: Callable[[Entity], float | None]) -> Values:
    def read(snapshot: Snapshot) -> Iterator[Value]:
        for entity in entities(snapshot):
            if (found := value(entity)) is not None:
                yield Value(entity, entity.sole, found)

    return read


def of_containers(whole: Callable[[Entity], float | None], own: Callable[[Use], float | None]) -> Values:
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
                if (found := whole(entity)) is not None:
                    yield Value(entity, sole, found)
                continue
            for container in entity.containers:
                if (found := entity.own(container, own)) is not None:
                    yield Value(entity, container, found)

    return read


def _xids(snapshot: Snapshot) -> Iterator[Value]:
    """0 without an error. It also exists while the GPU does not answer, when it is needed most.

    A code belongs to the container that it affected, which may not hold the GPU now. If it affected several, the row
    names none of them.
    """
    by_gpu = {xids.uuid: xids for xids in snapshot.node.xids}
    for card in cards(snapshot):
        xids = by_gpu.get(card.gpu.uuid)
        code = None if xids is None else xids.last_code if xids.counts else 0
        if code is not None:
            affected = _affected(snapshot, card, code)
            name = card.sole if code == 0 else next(iter(affected)) if len(affected) == 1 else None
            yield Value(card, name, code, (str(code),))


def _affected(snapshot: Snapshot, card: Entity, code: int) -> set[ContainerName]:
    """Return the containers that errors of a code affected, on the card or on a part of it."""
    devices = {card.gpu.uuid, *(leaf.uuid for leaf in card.leaves)}
    return {one.name for one in snapshot.node.container_xids if one.code == code and one.uuid in devices}


def _whole_utilization(entity: Entity) -> float | None:
    """NVML has none for a partitioned GPU or a GPU instance."""
    reading = entity.gpu.reading
    return None if reading is None or entity.gpu.partitioned else reading.utilization_ratio


def _tidy(value: float) -> float:
    return int(value) if value == int(value) else value


def _times(factor: float) -> Callable[[float], float]:
    """Return a product without the noise of binary fractions: 57, not 56.99999999999999."""
    return lambda value: round(value * factor, 6)


def _throttled_nanoseconds(reason: str) -> Reading:
    seconds = event_seconds(reason)
    return lambda reading: None if (found := seconds(reading)) is None else found * 1e9


NEEDS = ("codec", "health", "links", "gpm", "card")

_FREQUENCY = Unit("in MHz", "in Hz", _times(1e-6))
_ENERGY = Unit("in mJ", "in J", _times(1000))
_RATIO = Unit("in %", "0-1", _times(100))
_MEMORY = Unit("in MiB", "in bytes", lambda number_bytes: mib(int(number_bytes)))
_TEMPERATURE = Unit("in C", "in C")
_DURATION = Unit("in ns", "in ns", _times(1))

FIELDS: tuple[Field, ...] = (
    Field("DEV_SM_CLOCK", "DEV_SM_CLOCK_HERTZ", "SM clock frequency ({}).", on_cards(clock("sm")), _FREQUENCY),
    Field(
        "DEV_MEM_CLOCK",
        "DEV_MEMORY_CLOCK_HERTZ",
        "Memory clock frequency ({}).",
        on_cards(clock("memory")),
        _FREQUENCY,
    ),
    Field(
        "DEV_MEMORY_TEMP",
        "DEV_MEMORY_TEMP_CELSIUS",
        "Memory temperature ({}).",
        on_cards(temperature("memory")),
        _TEMPERATURE,
    ),
    Field("DEV_GPU_TEMP", "DEV_GPU_TEMP_CELSIUS", "GPU temperature ({}).", on_cards(temperature("gpu")), _TEMPERATURE),
    Field(
        "DEV_POWER_USAGE",
        "DEV_BOARD_POWER_WATTS",
        "Power draw (in W).",
        on_cards(lambda reading: reading.power_watts),
    ),
    Field(
        "DEV_TOTAL_ENERGY_CONSUMPTION",
        "DEV_GPU_ENERGY_JOULES_TOTAL",
        "Total energy consumption since boot ({}).",
        on_cards(lambda reading: reading.energy_joules),
        _ENERGY,
        "counter",
    ),
    Field(
        "DEV_POWER_MGMT_LIMIT",
        "DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS",
        "Power management limit (in W).",
        on_cards(power_limit("requested")),
    ),
    Field(
        "DEV_ENFORCED_POWER_LIMIT",
        "DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS",
        "Enforced power limit (in W).",
        on_cards(lambda reading: reading.power_limit_watts),
    ),
    Field(
        "DEV_PCIE_REPLAY_COUNTER",
        "DEV_PCIE_REPLAY_TOTAL",
        "Total number of PCIe retries.",
        on_cards(lambda reading: reading.pcie_replays),
        kind="counter",
    ),
    Field(
        "DEV_GPU_UTIL",
        "DEV_GPU_UTIL_RATIO",
        "GPU utilization ({}).",
        of_containers(_whole_utilization, lambda use: use.sm_ratio),
        _RATIO,
    ),
    Field(
        "DEV_MEM_COPY_UTIL",
        "DEV_MEMORY_UTIL_RATIO",
        "Memory utilization ({}).",
        on_cards(lambda reading: reading.memory_controller_busy_ratio),
        _RATIO,
    ),
    Field(
        "DEV_ENC_UTIL",
        "DEV_ENC_UTIL_RATIO",
        "Encoder utilization ({}).",
        on_cards(lambda reading: reading.encoder_ratio),
        _RATIO,
    ),
    Field(
        "DEV_DEC_UTIL",
        "DEV_DEC_UTIL_RATIO",
        "Decoder utilization ({}).",
        on_cards(lambda reading: reading.decoder_ratio),
        _RATIO,
    ),
    Field(
        "DEV_XID_ERRORS",
        "DEV_XID_ERROR",
        "Value of the last XID error encountered.",
        _xids,
        labels=("err_code",),
    ),
    *(
        Field(
            f"DEV_{name}_VIOLATION",
            f"DEV_{name}_VIOLATION",
            f"Throttling duration due to {why} ({{}}).",
            on_cards(_throttled_nanoseconds(reason)),
            _DURATION,
            "counter",
        )
        for name, why, reason in (
            ("POWER", "power constraints", "sw_power_cap"),
            ("THERMAL", "thermal constraints", "thermal"),
            ("SYNC_BOOST", "sync-boost constraints", "sync_boost"),
            ("BOARD_LIMIT", "board limit constraints", "board_limit"),
            ("LOW_UTIL", "low utilization", "low_utilization"),
            ("RELIABILITY", "reliability constraints", "reliability"),
        )
    ),
    Field(
        "DEV_FB_FREE",
        "DEV_FB_FREE_BYTES",
        "Framebuffer memory free ({}).",
        of_memory(lambda memory: memory.free_bytes),
        _MEMORY,
    ),
    Field(
        "DEV_FB_USED",
        "DEV_FB_USED_BYTES",
        "Framebuffer memory used ({}).",
        of_containers(
            lambda entity: None if entity.memory is None else entity.memory.used_bytes, lambda use: use.memory_bytes
        ),
        _MEMORY,
    ),
    Field(
        "DEV_FB_RESERVED",
        "DEV_FB_RESERVED_BYTES",
        "Framebuffer memory reserved ({}).",
        of_memory(lambda memory: memory.reserved_bytes),
        _MEMORY,
    ),
    Field(
        "DEV_FB_TOTAL",
        "DEV_FB_CAPACITY_BYTES",
        "Framebuffer memory total ({}).",
        of_memory(lambda memory: memory.total_bytes),
        _MEMORY,
    ),
    *(
        Field(
            f"DEV_ECC_{bits}_{short}_TOTAL",
            f"DEV_ECC_{bits}_{short}_TOTAL",
            f"Total number of {words} {lasting} ECC errors.",
            on_cards(ecc_total(kind, since)),
            kind="counter",
        )
        for short, lasting, since in (("VOL", "volatile", "volatile"), ("AGG", "persistent", "aggregate"))
        for bits, words, kind in (("SBE", "single-bit", "corrected"), ("DBE", "double-bit", "uncorrected"))
    ),
    *(
        Field(
            f"DEV_RETIRED_{bits}",
            f"DEV_PAGE_RETIRED_{bits}_TOTAL",
            f"Total number of retired pages due to {words} errors.",
            on_cards(retired_pages(cause)),
            kind="counter",
        )
        for bits, words, cause in (("SBE", "single-bit", "single_bit_ecc"), ("DBE", "double-bit", "double_bit_ecc"))
    ),
    Field(
        "DEV_RETIRED_PENDING",
        "DEV_PAGE_RETIRED_PENDING",
        "Total number of pages pending retirement.",
        on_cards(lambda reading: whether(reading.retired_pages_pending)),
        kind="counter",
    ),
    *(
        Field(
            f"DEV_{cause.upper()}_REMAPPED_ROWS",
            f"DEV_ROW_REMAP_{cause.upper()}_TOTAL",
            f"Number of remapped rows for {cause} errors",
            on_cards(remapped_rows(cause)),
            kind="counter",
        )
        for cause in ("uncorrectable", "correctable")
    ),
    Field(
        "DEV_ROW_REMAP_FAILURE",
        "DEV_ROW_REMAP_FAILED",
        "Whether remapping of rows has failed",
        on_cards(lambda reading: whether(reading.row_remap_failure)),
    ),
    Field(
        "PROF_GR_ENGINE_ACTIVE",
        "PROF_GR_ENGINE_UTIL_RATIO",
        "Ratio of time the graphics engine is active.",
        of_activity(lambda activity: activity.graphics_ratio),
    ),
    Field(
        "PROF_SM_ACTIVE",
        "PROF_SM_UTIL_RATIO",
        "The ratio of cycles an SM has at least 1 warp assigned.",
        of_activity(lambda activity: activity.sm_ratio),
    ),
    Field(
        "PROF_SM_OCCUPANCY",
        "PROF_SM_OCCUPANCY_RATIO",
        "The ratio of number of warps resident on an SM.",
        of_activity(lambda activity: activity.sm_occupancy_ratio),
    ),
    Field(
        "PROF_PIPE_TENSOR_ACTIVE",
        "PROF_TENSOR_UTIL_RATIO",
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        of_activity(lambda activity: activity.tensor_ratio),
    ),
    Field(
        "PROF_DRAM_ACTIVE",
        "PROF_DRAM_UTIL_RATIO",
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        of_activity(lambda activity: activity.dram_ratio),
    ),
    Field(
        "PROF_PIPE_FP64_ACTIVE",
        "PROF_FP64_UTIL_RATIO",
        "Ratio of cycles the fp64 pipes are active.",
        of_activity(lambda activity: activity.fp64_ratio),
    ),
    Field(
        "PROF_PIPE_FP32_ACTIVE",
        "PROF_FP32_UTIL_RATIO",
        "Ratio of cycles the fp32 pipes are active.",
        of_activity(lambda activity: activity.fp32_ratio),
    ),
    Field(
        "PROF_PIPE_FP16_ACTIVE",
        "PROF_FP16_UTIL_RATIO",
        "Ratio of cycles the fp16 pipes are active.",
        of_activity(lambda activity: activity.fp16_ratio),
    ),
)
"""The fields of ECC and the times of throttling have the same names before and since 4.9."""

BEFORE_4_9 = families(FIELDS, since_4_9=False)
SINCE_4_9 = families(FIELDS, since_4_9=True)
