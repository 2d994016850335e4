"""What the dialect nvidia-smi has of nvidia-smi's own fields: names, units and HELP texts by the original's rules.

A field's name becomes the family's, `[W]` `_watts`, `[MHz]` `_clock_hz`, `[MiB]` `_bytes`, `[%]` `_ratio`, `[us]`
`_seconds`, in base units; its HELP is the field, and each is a gauge.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumap.dialects.nvidia_smi_readers import Reading, on_gpus
from gpumap.families import Family
from gpumap.model import DeviceMemory, GpuReading
from gpumap.readings import COMPUTE_MODES

_EVENTS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sw_thermal_slowdown",
    "sync_boost",
)
_COUNTED_EVENTS = (
    "hw_power_brake_slowdown",
    "hw_thermal_slowdown",
    "sw_power_cap",
    "sw_thermal_slowdown",
    "sync_boost",
)
_ECC_LOCATIONS = ("cbu", "dram", "l1_cache", "l2_cache", "register_file", "sram", "texture_memory", "texture_shm")


def _field(name: str, field: str, value: Reading) -> Family:
    """What nvidia-smi calls a field, and what the original makes of it: a gauge, whose HELP is the field."""
    return on_gpus(name, field, value)


def _of_memory(value: Callable[[DeviceMemory], int | None]) -> Reading:
    return lambda reading: value(reading.memory) if reading.memory is not None else None


def _word(values: Callable[[GpuReading], tuple[tuple[str, float], ...]], word: str) -> Reading:
    return lambda reading: dict(values(reading)).get(word)


def _flag(value: Callable[[GpuReading], bool | None]) -> Reading:
    return lambda reading: None if (found := value(reading)) is None else int(found)


def _clock_event(reason: str) -> Reading:
    return _flag(lambda reading: dict(reading.clock_events).get(reason))


def _ecc(kind: str, location: str) -> Reading:
    return lambda reading: {row[:2]: row[2] for row in reading.ecc_errors}.get((kind, location))


def _ecc_total(kind: str, since: str) -> Reading:
    return lambda reading: {row[:2]: row[2] for row in reading.ecc_totals}.get((kind, since))


def _first_fan(reading: GpuReading) -> float | None:
    return reading.fan_ratios[0][1] if reading.fan_ratios else None


def _compute_mode(reading: GpuReading) -> int | None:
    return COMPUTE_MODES.index(reading.compute_mode) if reading.compute_mode in COMPUTE_MODES else None


_STATES = (
    _field("compute_mode", "compute_mode", _compute_mode),
    _field("pstate", "pstate", lambda reading: reading.performance_state),
)

_LOAD = (
    _field("utilization_gpu_ratio", "utilization.gpu [%]", lambda reading: reading.utilization_ratio),
    _field("utilization_memory_ratio", "utilization.memory [%]", lambda reading: reading.memory_controller_ratio),
    _field("utilization_encoder_ratio", "utilization.encoder [%]", lambda reading: reading.encoder_ratio),
    _field("utilization_decoder_ratio", "utilization.decoder [%]", lambda reading: reading.decoder_ratio),
    _field("memory_total_bytes", "memory.total [MiB]", _of_memory(lambda memory: memory.total_bytes)),
    _field("memory_reserved_bytes", "memory.reserved [MiB]", _of_memory(lambda memory: memory.reserved_bytes)),
    _field("memory_used_bytes", "memory.used [MiB]", _of_memory(lambda memory: memory.used_bytes)),
    _field("memory_free_bytes", "memory.free [MiB]", _of_memory(lambda memory: memory.free_bytes)),
)


def _limit(word: str) -> Reading:
    return _word(lambda reading: reading.power_limits_watts, word)


def _temperature(sensor: str) -> Reading:
    return _word(lambda reading: reading.temperatures_celsius, sensor)


def _clock(domain: str) -> Reading:
    return _word(lambda reading: reading.clocks_hertz, domain)


def _max_clock(domain: str) -> Reading:
    return _word(lambda reading: reading.max_clocks_hertz, domain)


def _event_seconds(reason: str) -> Reading:
    return _word(lambda reading: reading.clock_event_seconds, reason)


_POWER_AND_HEAT = (
    _field("power_draw_watts", "power.draw [W]", lambda reading: reading.power_watts),
    _field("power_limit_watts", "power.limit [W]", _limit("requested")),
    _field("enforced_power_limit_watts", "enforced.power.limit [W]", lambda reading: reading.power_limit_watts),
    _field("power_default_limit_watts", "power.default_limit [W]", _limit("default")),
    _field("power_min_limit_watts", "power.min_limit [W]", _limit("min")),
    _field("power_max_limit_watts", "power.max_limit [W]", _limit("max")),
    _field("temperature_gpu", "temperature.gpu", _temperature("gpu")),
    _field("temperature_memory", "temperature.memory", _temperature("memory")),
    _field("fan_speed_ratio", "fan.speed [%]", _first_fan),
)

_CLOCKS = (
    *(
        _field(f"clocks_current_{domain}_clock_hz", f"clocks.current.{domain} [MHz]", _clock(domain))
        for domain in ("graphics", "sm", "memory", "video")
    ),
    *(
        _field(f"clocks_max_{domain}_clock_hz", f"clocks.max.{domain} [MHz]", _max_clock(domain))
        for domain in ("graphics", "sm", "memory")
    ),
    # Drivers from 535 on have the first name, those before it the second; the original has the one that it finds.
    *(
        _field(f"clocks_{generation}_reasons_{reason}", f"clocks_{generation}_reasons.{reason}", _clock_event(reason))
        for generation in ("event", "throttle")
        for reason in _EVENTS
    ),
    *(
        _field(
            f"clocks_event_reasons_counters_{reason}_seconds",
            f"clocks_event_reasons_counters.{reason} [us]",
            _event_seconds(reason),
        )
        for reason in _COUNTED_EVENTS
    ),
)

_MEMORY_ERRORS = (
    *(
        _field(f"ecc_errors_{kind}_{since}_total", f"ecc.errors.{kind}.{since}.total", _ecc_total(kind, since))
        for kind in ("corrected", "uncorrected")
        for since in ("aggregate", "volatile")
    ),
    *(
        _field(
            f"ecc_errors_{kind}_aggregate_{location}",
            f"ecc.errors.{kind}.aggregate.{location}",
            _ecc(kind, location),
        )
        for kind in ("corrected", "uncorrected")
        for location in _ECC_LOCATIONS
    ),
    *(
        _field(
            f"remapped_rows_{kind}",
            f"remapped_rows.{kind}",
            _word(lambda reading: reading.remapped_rows, kind),
        )
        for kind in ("correctable", "uncorrectable")
    ),
    _field("remapped_rows_pending", "remapped_rows.pending", _flag(lambda reading: reading.row_remap_pending)),
    _field("remapped_rows_failure", "remapped_rows.failure", _flag(lambda reading: reading.row_remap_failure)),
    _field(
        "retired_pages_single_bit_ecc_count",
        "retired_pages.single_bit_ecc.count",
        _word(lambda reading: reading.retired_pages, "single_bit_ecc"),
    ),
    _field(
        "retired_pages_double_bit_count",
        "retired_pages.double_bit.count",
        _word(lambda reading: reading.retired_pages, "double_bit_ecc"),
    ),
    _field("retired_pages_pending", "retired_pages.pending", _flag(lambda reading: reading.retired_pages_pending)),
)

FIELDS = (*_STATES, *_LOAD, *_POWER_AND_HEAT, *_CLOCKS, *_MEMORY_ERRORS)
