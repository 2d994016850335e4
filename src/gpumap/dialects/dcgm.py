"""The dialect of dcgm-exporter before 4.9: its `DCGM_FI_*` as far as NVML can tell them, with the pods of each GPU.

Names, labels, their order, units and help texts are those of its 4.5.3-4.8.2 (etc/default-counters.csv,
internal/pkg/rendermetrics), the label `hostname` as from 4.6.0-4.8.3 on. No value of a shared device is a container's.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumap.dialects.dcgm_entities import Entity
from gpumap.dialects.dcgm_readers import XIDS, of_activity, of_memory, on_cards, shared_out
from gpumap.dialects.rows import mib
from gpumap.families import Family
from gpumap.model import GpuReading

NEEDS = ("codec", "health", "links", "gpm")


def _mib(number_bytes: int | None) -> int | None:
    return None if number_bytes is None else mib(number_bytes)


def _scaled(value: float | None, by: float) -> float | None:
    """In the original's unit, without what binary fractions add to it: 57, not 56.99999999999999."""
    if value is None:
        return None
    scaled = round(value * by, 6)
    return int(scaled) if scaled == int(scaled) else scaled


def _of(pairs: tuple[tuple[str, float], ...], word: str) -> float | None:
    return dict(pairs).get(word)


def _clock(domain: str) -> Callable[[GpuReading], float | None]:
    return lambda reading: _scaled(_of(reading.clocks_hertz, domain), 1e-6)


def _temperature(sensor: str) -> Callable[[GpuReading], float | None]:
    return lambda reading: _scaled(_of(reading.temperatures_celsius, sensor), 1)


def _violation(reason: str) -> Callable[[GpuReading], float | None]:
    return lambda reading: _scaled(_of(reading.clock_event_seconds, reason), 1e9)


def _retired(word: str) -> Callable[[GpuReading], float | None]:
    return lambda reading: _of(reading.retired_pages, word)


def _remapped(word: str) -> Callable[[GpuReading], float | None]:
    return lambda reading: _of(reading.remapped_rows, word)


def _ecc(kind: str, since: str) -> Callable[[GpuReading], float | None]:
    return lambda reading: {(one, when): count for one, when, count in reading.ecc_totals}.get((kind, since))


def _whole_utilization(entity: Entity) -> float | None:
    """NVML has none of a GPU that is partitioned, nor of a GPU instance."""
    reading = entity.gpu.reading
    return None if reading is None or entity.gpu.partitioned else _scaled(reading.utilization_ratio, 100)


def _whether(value: bool | None) -> int | None:
    return None if value is None else int(value)


_CLOCKS_AND_POWER = (
    on_cards("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", _clock("sm")),
    on_cards("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", _clock("memory")),
    on_cards("DCGM_FI_DEV_MEMORY_TEMP", "Memory temperature (in C).", _temperature("memory")),
    on_cards("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", _temperature("gpu")),
    on_cards("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", lambda reading: reading.power_watts),
    on_cards(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Total energy consumption since boot (in mJ).",
        lambda reading: _scaled(reading.energy_joules, 1000),
        "counter",
    ),
    on_cards(
        "DCGM_FI_DEV_POWER_MGMT_LIMIT",
        "Power management limit (in W).",
        lambda reading: _of(reading.power_limits_watts, "requested"),
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
        lambda reading: _scaled(reading.memory_controller_ratio, 100),
    ),
    on_cards(
        "DCGM_FI_DEV_ENC_UTIL", "Encoder utilization (in %).", lambda reading: _scaled(reading.encoder_ratio, 100)
    ),
    on_cards(
        "DCGM_FI_DEV_DEC_UTIL", "Decoder utilization (in %).", lambda reading: _scaled(reading.decoder_ratio, 100)
    ),
)

_VIOLATIONS = tuple(
    on_cards(
        f"DCGM_FI_DEV_{name}_VIOLATION", f"Throttling duration due to {why} (in ns).", _violation(reason), "counter"
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
            _ecc(kind, since),
            "counter",
        )
        for short, lasting, since in (("VOL", "volatile", "volatile"), ("AGG", "persistent", "aggregate"))
        for bits, words, kind in (("SBE", "single-bit", "corrected"), ("DBE", "double-bit", "uncorrected"))
    ),
    *(
        on_cards(
            f"DCGM_FI_DEV_RETIRED_{bits}",
            f"Total number of retired pages due to {words} errors.",
            _retired(word),
            "counter",
        )
        for bits, words, word in (("SBE", "single-bit", "single_bit_ecc"), ("DBE", "double-bit", "double_bit_ecc"))
    ),
    on_cards(
        "DCGM_FI_DEV_RETIRED_PENDING",
        "Total number of pages pending retirement.",
        lambda reading: _whether(reading.retired_pages_pending),
        "counter",
    ),
    on_cards(
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for uncorrectable errors",
        _remapped("uncorrectable"),
        "counter",
    ),
    on_cards(
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for correctable errors",
        _remapped("correctable"),
        "counter",
    ),
    on_cards(
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        "Whether remapping of rows has failed",
        lambda reading: _whether(reading.row_remap_failure),
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
