"""The dialect of dcgm-exporter before 4.9: the `DCGM_FI_*` that NVML can provide, with the pods of each GPU.

Names, labels, their order, units and help texts are those of its 4.5.3-4.8.2 (etc/default-counters.csv,
internal/pkg/rendermetrics), the label `hostname` as from 4.6.0-4.8.3 on. A container never gets the value of a shared
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from gpumap.model.observations import ContainerName
from gpumap.model.readings import Activity, DeviceMemory
from gpumap.model.snapshot import ContainerUse, Snapshot

LABELS = (
    "gpu",
    "UUID",
    "pci_bus_id",
    "device",
    "modelName",
    "GPU_I_PROFILE",
    "GPU_I_ID",
    "hostname",
    "DCGM_FI_DRIVER_VERSION",
    "container",
    "namespace",
    "pod",
)
"""In the original's order: those of the entity, those that are the same on all, then the pod's by their names."""
_OPTIONAL = frozenset(LABELS[:-3])
"""Left out if empty, as in the original. The pod's labels are written empty: if they were missing and Prometheus honors
labels, it would take those of the target, which name gpumap's own pod."""
_XID_LABELS = (*LABELS[:-2], "err_code", *LABELS[-2:])


def _labels(snapshot: Snapshot, entity: Entity, name: ContainerName | None) -> tuple[str, ...]:
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
        namespace,
        pod,
    )


def _family(name: str, help: str, read: Callable[[Snapshot], Iterator[Series]], kind: Kind = "gauge") -> Family:
    return Family(name, kind, help, LABELS, read, optional_labels=_OPTIONAL)


def on_cards(name: str, help: str, value: Reading, kind: Kind = "gauge") -> Family:
    """Return a family with one value for each card, also if it is partitioned."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for card in cards(snapshot):
            reading = card.gpu.reading
            if reading is not None and (found := value(reading)) is not None:
                yield Series(_labels(snapshot, card, card.sole), found)

    return _family(name, help, read, kind)


def of_memory(name: str, help: str, value: Callable[[DeviceMemory], float | None]) -> Family:
    """Return a family on the memory of each GPU or GPU instance."""
    return _on_entities(name, help, lambda entity: None if entity.memory is None else value(entity.memory))


def of_activity(name: str, help: str, value: Callable[[Activity], float | None]) -> Family:
    """Return a family on GPM's measurements of each GPU or GPU instance."""
    return _on_entities(name, help, lambda entity: None if entity.activity is None else value(entity.activity))


def _on_entities(name: str, help: str, value: Callable[[Entity], float | None]) -> Family:
    def read(snapshot: Snapshot) -> Iterator[Series]:
        for entity in entities(snapshot):
            if (found := value(entity)) is not None:
                yield Series(_labels(snapshot, entity, entity.sole), found)

    return _family(name, help, read)


def of_containers(
    name: str,
    help: str,
    whole: Callable[[Entity], float | None],
    own: Callable[[ContainerUse], float | None],
) -> Family:
    """Return a family with values of containers.

    A container that is the only one on a device gets the device's value. A device without containers keeps its own
    row. Otherwise each container gets its measured value, and the device has no row.
    """

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for entity in entities(snapshot):
            if entity.gpu_instance_id is not None and entity.memory is None:
                continue  # a grant of all of its memory shows that no other container holds it
            sole = entity.sole
            if sole is not None or not entity.containers:
                if (found := whole(entity)) is not None:
                    yield Series(_labels(snapshot, entity, sole), found)
                continue
            for container in entity.containers:
                if (found := entity.own(container, own)) is not None:
                    yield Series(_labels(snapshot, entity, container), found)

    return _family(name, help, read)


def _xid_rows(snapshot: Snapshot) -> Iterator[Series]:
    """0 without an error. It also exists while the GPU does not answer, when it is needed most.

    A code belongs to the container that it affected, which may not hold the GPU now. If it affected several, the row
    names none of them.
    """
    by_gpu = {xids.uuid: xids for xids in snapshot.xids}
    for card in cards(snapshot):
        xids = by_gpu.get(card.gpu.uuid)
        code = None if xids is None else xids.last_code if xids.counts else 0
        if code is not None:
            affected = _affected(snapshot, card, code)
            name = card.sole if code == 0 else next(iter(affected)) if len(affected) == 1 else None
            labels = _labels(snapshot, card, name)
            yield Series((*labels[:-2], str(code), *labels[-2:]), code)


def _affected(snapshot: Snapshot, card: Entity, code: int) -> set[ContainerName]:
    """Return the containers that errors of a code affected, on the card or on a part of it."""
    devices = {card.gpu.uuid, *(leaf.uuid for leaf in card.leaves)}
    return {one.name for one in snapshot.container_xids if one.code == code and one.uuid in devices}


XIDS = Family(
    "DCGM_FI_DEV_XID_ERRORS",
    "gauge",
    "Value of the last XID error encountered.",
    _XID_LABELS,
    _xid_rows,
    optional_labels=_OPTIONAL,
)


NEEDS = ("codec", "health", "links", "gpm", "card")


def _mib(number_bytes: int | None) -> int | None:
    return None if number_bytes is None else mib(number_bytes)


def _scaled(value: float | None, by: float) -> float | None:
    """Return the value in the original's unit, without the noise of binary fractions: 57, not 56.99999999999999."""
    if value is None:
        return None
    scaled = round(value * by, 6)
    return int(scaled) if scaled == int(scaled) else scaled


def _times(by: float, value: Reading) -> Reading:
    return lambda reading: _scaled(value(reading), by)


def _whole_utilization(entity: Entity) -> float | None:
    """NVML has none for a partitioned GPU or a GPU instance."""
    reading = entity.gpu.reading
    return None if reading is None or entity.gpu.partitioned else _scaled(reading.utilization_ratio, 100)


_CLOCKS_AND_POWER = (
    on_cards("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", _times(1e-6, clock("sm"))),
    on_cards("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", _times(1e-6, clock("memory"))),
    on_cards("DCGM_FI_DEV_MEMORY_TEMP", "Memory temperature (in C).", _times(1, temperature("memory"))),
    on_cards("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", _times(1, temperature("gpu"))),
    on_cards("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", lambda reading: reading.power_watts),
    on_cards(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Total energy consumption since boot (in mJ).",
        _times(1000, lambda reading: reading.energy_joules),
        "counter",
    ),
    on_cards(
        "DCGM_FI_DEV_POWER_MGMT_LIMIT",
        "Power management limit (in W).",
        power_limit("requested"),
    ),
    on_cards(
        "DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "Enforced power limit (in W).", lambda reading: reading.power_limit_watts
    ),
    on_cards(
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
        "Total number of PCIe retries.",
        lambda reading: reading.pcie_replays,
        "counter",
    ),
)

_UTILIZATION = (
    of_containers(
        "DCGM_FI_DEV_GPU_UTIL",
        "GPU utilization (in %).",
        _whole_utilization,
        lambda use: _scaled(use.sm_ratio, 100),
    ),
    on_cards(
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "Memory utilization (in %).",
        _times(100, lambda reading: reading.memory_controller_ratio),
    ),
    on_cards("DCGM_FI_DEV_ENC_UTIL", "Encoder utilization (in %).", _times(100, lambda reading: reading.encoder_ratio)),
    on_cards("DCGM_FI_DEV_DEC_UTIL", "Decoder utilization (in %).", _times(100, lambda reading: reading.decoder_ratio)),
)

_VIOLATIONS = tuple(
    on_cards(
        f"DCGM_FI_DEV_{name}_VIOLATION",
        f"Throttling duration due to {why} (in ns).",
        _times(1e9, event_seconds(reason)),
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
)

_MEMORY = (
    of_memory("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", lambda memory: _mib(memory.free_bytes)),
    of_containers(
        "DCGM_FI_DEV_FB_USED",
        "Framebuffer memory used (in MiB).",
        lambda entity: _mib(entity.memory.used_bytes if entity.memory is not None else None),
        lambda use: _mib(use.memory_bytes),
    ),
    of_memory(
        "DCGM_FI_DEV_FB_RESERVED",
        "Framebuffer memory reserved (in MiB).",
        lambda memory: _mib(memory.reserved_bytes),
    ),
    of_memory("DCGM_FI_DEV_FB_TOTAL", "Framebuffer memory total (in MiB).", lambda memory: _mib(memory.total_bytes)),
)

_MEMORY_ERRORS = (
    *(
        on_cards(
            f"DCGM_FI_DEV_ECC_{bits}_{short}_TOTAL",
            f"Total number of {words} {lasting} ECC errors.",
            ecc_total(kind, since),
            "counter",
        )
        for short, lasting, since in (("VOL", "volatile", "volatile"), ("AGG", "persistent", "aggregate"))
        for bits, words, kind in (("SBE", "single-bit", "corrected"), ("DBE", "double-bit", "uncorrected"))
    ),
    *(
        on_cards(
            f"DCGM_FI_DEV_RETIRED_{bits}",
            f"Total number of retired pages due to {words} errors.",
            retired_pages(cause),
            "counter",
        )
        for bits, words, cause in (("SBE", "single-bit", "single_bit_ecc"), ("DBE", "double-bit", "double_bit_ecc"))
    ),
    on_cards(
        "DCGM_FI_DEV_RETIRED_PENDING",
        "Total number of pages pending retirement.",
        lambda reading: whether(reading.retired_pages_pending),
        "counter",
    ),
    on_cards(
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for uncorrectable errors",
        remapped_rows("uncorrectable"),
        "counter",
    ),
    on_cards(
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for correctable errors",
        remapped_rows("correctable"),
        "counter",
    ),
    on_cards(
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        "Whether remapping of rows has failed",
        lambda reading: whether(reading.row_remap_failure),
    ),
)

_PROFILING = (
    of_activity(
        "DCGM_FI_PROF_SM_ACTIVE",
        "The ratio of cycles an SM has at least 1 warp assigned.",
        lambda activity: activity.sm_ratio,
    ),
    of_activity(
        "DCGM_FI_PROF_SM_OCCUPANCY",
        "The ratio of number of warps resident on an SM.",
        lambda activity: activity.sm_occupancy_ratio,
    ),
    of_activity(
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        lambda activity: activity.tensor_ratio,
    ),
    of_activity(
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        lambda activity: activity.dram_ratio,
    ),
)

FAMILIES: tuple[Family, ...] = (
    *_CLOCKS_AND_POWER,
    *_UTILIZATION,
    XIDS,
    *_VIOLATIONS,
    *_MEMORY,
    *_MEMORY_ERRORS,
    *_PROFILING,
)
