"""The dialect of dcgm-exporter before 4.9: its `DCGM_FI_*` as far as NVML can tell them, with the pods of each GPU.

Names, labels, their order, units and help texts are those of its 4.5.3-4.8.2 (etc/default-counters.csv,
internal/pkg/rendermetrics), the label `hostname` as from 4.6.0-4.8.3 on. No value of a shared device is a container's.
"""

from __future__ import annotations

from gpumap.agent.dialects.dcgm_entities import Entity
from gpumap.agent.dialects.dcgm_readers import XIDS, of_activity, of_memory, on_cards, shared_out
from gpumap.agent.dialects.reading import (
    Reading,
    clock,
    ecc_total,
    event_seconds,
    power_limit,
    remapped_rows,
    retired_pages,
    temperature,
)
from gpumap.agent.dialects.rows import mib
from gpumap.model.families import Family, whether

NEEDS = ("codec", "health", "links", "gpm", "card")


def _mib(number_bytes: int | None) -> int | None:
    return None if number_bytes is None else mib(number_bytes)


def _scaled(value: float | None, by: float) -> float | None:
    """In the original's unit, without what binary fractions add to it: 57, not 56.99999999999999."""
    if value is None:
        return None
    scaled = round(value * by, 6)
    return int(scaled) if scaled == int(scaled) else scaled


def _times(by: float, value: Reading) -> Reading:
    return lambda reading: _scaled(value(reading), by)


def _whole_utilization(entity: Entity) -> float | None:
    """NVML has none of a GPU that is partitioned, nor of a GPU instance."""
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
    shared_out(
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
    shared_out(
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
