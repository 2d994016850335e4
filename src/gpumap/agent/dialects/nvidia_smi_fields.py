"""What the dialect nvidia-smi has of nvidia-smi's own fields: names, units and HELP texts by the original's rules.

A field's name becomes the family's, `[W]` `_watts`, `[MHz]` `_clock_hz`, `[MiB]` `_bytes`, `[%]` `_ratio`, `[us]`
`_seconds`, in base units; its HELP is the field, and each is a gauge.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumap.agent.dialects.nvidia_smi_readers import on_gpus
from gpumap.agent.dialects.reading import (
    Reading,
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
from gpumap.model.families import whether
from gpumap.model.readings import COMPUTE_MODES, ECC_LOCATIONS, ECC_TYPES, DeviceMemory, GpuReading

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
COUNTED_EVENTS = (
    "hw_power_brake_slowdown",
    "hw_thermal_slowdown",
    "sw_power_cap",
    "sw_thermal_slowdown",
    "sync_boost",
)
"""Both in nvidia-smi's order; words of `CLOCK_EVENTS` and of `CLOCK_EVENT_TIMES`."""


def _of_memory(value: Callable[[DeviceMemory], int | None]) -> Reading:
    return lambda reading: value(reading.memory) if reading.memory is not None else None


def _clock_event(reason: str) -> Reading:
    return lambda reading: whether(dict(reading.clock_events).get(reason))


def _first_fan(reading: GpuReading) -> float | None:
    return reading.fan_ratios[0][1] if reading.fan_ratios else None


def _compute_mode(reading: GpuReading) -> int | None:
    return COMPUTE_MODES.index(reading.compute_mode) if reading.compute_mode in COMPUTE_MODES else None


_STATES = (
    on_gpus("compute_mode", "compute_mode", _compute_mode),
    on_gpus("pstate", "pstate", lambda reading: reading.performance_state),
)

_LOAD = (
    on_gpus("utilization_gpu_ratio", "utilization.gpu [%]", lambda reading: reading.utilization_ratio),
    on_gpus("utilization_memory_ratio", "utilization.memory [%]", lambda reading: reading.memory_controller_ratio),
    on_gpus("utilization_encoder_ratio", "utilization.encoder [%]", lambda reading: reading.encoder_ratio),
    on_gpus("utilization_decoder_ratio", "utilization.decoder [%]", lambda reading: reading.decoder_ratio),
    on_gpus("memory_total_bytes", "memory.total [MiB]", _of_memory(lambda memory: memory.total_bytes)),
    on_gpus("memory_reserved_bytes", "memory.reserved [MiB]", _of_memory(lambda memory: memory.reserved_bytes)),
    on_gpus("memory_used_bytes", "memory.used [MiB]", _of_memory(lambda memory: memory.used_bytes)),
    on_gpus("memory_free_bytes", "memory.free [MiB]", _of_memory(lambda memory: memory.free_bytes)),
)


_POWER_AND_HEAT = (
    on_gpus("power_draw_watts", "power.draw [W]", lambda reading: reading.power_watts),
    on_gpus("power_limit_watts", "power.limit [W]", power_limit("requested")),
    on_gpus("enforced_power_limit_watts", "enforced.power.limit [W]", lambda reading: reading.power_limit_watts),
    on_gpus("power_default_limit_watts", "power.default_limit [W]", power_limit("default")),
    on_gpus("power_min_limit_watts", "power.min_limit [W]", power_limit("min")),
    on_gpus("power_max_limit_watts", "power.max_limit [W]", power_limit("max")),
    on_gpus("temperature_gpu", "temperature.gpu", temperature("gpu")),
    on_gpus("temperature_memory", "temperature.memory", temperature("memory")),
    on_gpus("fan_speed_ratio", "fan.speed [%]", _first_fan),
)

_CLOCKS = (
    *(
        on_gpus(f"clocks_current_{domain}_clock_hz", f"clocks.current.{domain} [MHz]", clock(domain))
        for domain in ("graphics", "sm", "memory", "video")
    ),
    *(
        on_gpus(f"clocks_max_{domain}_clock_hz", f"clocks.max.{domain} [MHz]", max_clock(domain))
        for domain in ("graphics", "sm", "memory")
    ),
    # Drivers from 535 on have the first name, those before it the second; the original has the one that it finds.
    *(
        on_gpus(f"clocks_{generation}_reasons_{reason}", f"clocks_{generation}_reasons.{reason}", _clock_event(reason))
        for generation in ("event", "throttle")
        for reason in EVENTS
    ),
    *(
        on_gpus(
            f"clocks_event_reasons_counters_{reason}_seconds",
            f"clocks_event_reasons_counters.{reason} [us]",
            event_seconds(reason),
        )
        for reason in COUNTED_EVENTS
    ),
)

_MEMORY_ERRORS = (
    *(
        on_gpus(f"ecc_errors_{kind}_{since}_total", f"ecc.errors.{kind}.{since}.total", ecc_total(kind, since))
        for kind in ECC_TYPES
        for since in ("aggregate", "volatile")
    ),
    *(
        on_gpus(
            f"ecc_errors_{kind}_aggregate_{location}",
            f"ecc.errors.{kind}.aggregate.{location}",
            ecc_errors(kind, location),
        )
        for kind in ECC_TYPES
        for location in sorted(ECC_LOCATIONS)
    ),
    *(
        on_gpus(
            f"remapped_rows_{kind}",
            f"remapped_rows.{kind}",
            remapped_rows(kind),
        )
        for kind in ("correctable", "uncorrectable")
    ),
    on_gpus("remapped_rows_pending", "remapped_rows.pending", lambda reading: whether(reading.row_remap_pending)),
    on_gpus("remapped_rows_failure", "remapped_rows.failure", lambda reading: whether(reading.row_remap_failure)),
    on_gpus(
        "retired_pages_single_bit_ecc_count",
        "retired_pages.single_bit_ecc.count",
        retired_pages("single_bit_ecc"),
    ),
    on_gpus(
        "retired_pages_double_bit_count",
        "retired_pages.double_bit.count",
        retired_pages("double_bit_ecc"),
    ),
    on_gpus("retired_pages_pending", "retired_pages.pending", lambda reading: whether(reading.retired_pages_pending)),
)

FIELDS = (*_STATES, *_LOAD, *_POWER_AND_HEAT, *_CLOCKS, *_MEMORY_ERRORS)
