"""Reads the health, the links and the properties of a GPU: clocks and throttle reasons, fans, ECC errors, settings.

All calls are on the card, also if it is partitioned. A table names the field values of each group. Properties that do
not change while the handle is valid are read once and kept with it. Only dialects show them.
"""

from collections.abc import Callable, Iterable, Iterator
from ctypes import c_int, c_ulonglong
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pynvml

from gpumap.agent.nvml_worker.calls import UNSUPPORTED, NvmlCalls
from gpumap.agent.nvml_worker.field_values import Values
from gpumap.agent.nvml_worker.library import Handle, Library, PreparedCall
from gpumap.agent.nvml_worker.wire import word
from gpumap.model.grouping import grouped
from gpumap.model.readings import (
    CLOCK_EVENT_TIMES,
    CLOCK_EVENTS,
    COMPUTE_MODES,
    ECC_LOCATIONS,
    ECC_TYPES,
    FABRIC_STATES,
    RECOVERY_ACTIONS,
    Fabric,
)

CLOCKS = (
    ("graphics", pynvml.NVML_CLOCK_GRAPHICS),
    ("sm", pynvml.NVML_CLOCK_SM),
    ("memory", pynvml.NVML_CLOCK_MEM),
    ("video", pynvml.NVML_CLOCK_VIDEO),
)
_EVENT_BITS = tuple([(reason, 1 << bit) for bit, reason in enumerate(CLOCK_EVENTS)])
_EVENTS = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
"""The second is the name before driver 535. CUDA 14 removes it."""
_KNOWN_EVENTS = "nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetSupportedClocksThrottleReasons"
_MILLIWATTS_MAX = 5_000_000
"""No GPU uses that much. A larger value is not of a sensor."""


def word_of(words: tuple[str, ...], number: int) -> str:
    return words[number] if 0 <= number < len(words) else f"code_{number}"


def recovery_word(action: float) -> str:
    return word_of(RECOVERY_ACTIONS, int(action))


def hertz(megahertz: int) -> float:
    return megahertz * 1e6


def watts(milliwatts: int) -> float | None:
    return milliwatts / 1000 if milliwatts <= _MILLIWATTS_MAX else None


def known_values(values: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Return the named values without those that the driver does not report."""
    return {name: value for name, value in values if value is not None}


# --- field values -----------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """A field value: its place in a `GpuReading`, its number in NVML, and how to convert it.

    `key` is that in a mapping; empty for a single value.
    """

    name: str
    key: str
    number: int
    convert: Callable[[float], Any] = int


def _kib(number: float) -> int:
    return int(number) << 10


_CLOCK_EVENT_TIMES = (
    pynvml.NVML_FI_DEV_PERF_POLICY_POWER,
    pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL,
    pynvml.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST,
    pynvml.NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT,
    pynvml.NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION,
    pynvml.NVML_FI_DEV_PERF_POLICY_RELIABILITY,
    pynvml.NVML_FI_DEV_PERF_POLICY_TOTAL_APP_CLOCKS,
    pynvml.NVML_FI_DEV_PERF_POLICY_TOTAL_BASE_CLOCKS,
    # nvml.h, NVML_FI_DEV_CLOCKS_EVENT_REASON_{SW_THERM_SLOWDOWN,HW_THERM_SLOWDOWN,HW_POWER_BRAKE_SLOWDOWN}, which
    # nvidia-ml-py 12.570 does not have yet.
    *(269, 270, 271),
)
"""In nanoseconds."""
CLOCK_EVENT_FIELDS = tuple(
    [
        Field("clock_event_seconds", reason, number, lambda nanoseconds: nanoseconds / 1e9)
        for reason, number in zip(CLOCK_EVENT_TIMES, _CLOCK_EVENT_TIMES, strict=True)
    ]
)
HEALTH_FIELDS = (
    *CLOCK_EVENT_FIELDS,
    Field("recovery_action", "", pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, recovery_word),
)
SLOW_HEALTH_FIELDS = (
    Field("remapped_rows", "correctable", pynvml.NVML_FI_DEV_REMAPPED_COR),
    Field("remapped_rows", "uncorrectable", pynvml.NVML_FI_DEV_REMAPPED_UNC),
    Field("row_remap_pending", "", pynvml.NVML_FI_DEV_REMAPPED_PENDING, bool),
    Field("row_remap_failure", "", pynvml.NVML_FI_DEV_REMAPPED_FAILURE, bool),
    Field("retired_pages", "single_bit_ecc", pynvml.NVML_FI_DEV_RETIRED_SBE),
    Field("retired_pages", "double_bit_ecc", pynvml.NVML_FI_DEV_RETIRED_DBE),
)
LINK_FIELDS = (
    Field("nvlink_transmit_bytes", "", pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _kib),
    Field("nvlink_receive_bytes", "", pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _kib),
)
SLOW_LINK_FIELDS = (  # Blackwell has none of these counters
    Field("nvlink_errors", "replay", pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL),
    Field("nvlink_errors", "recovery", pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL),
    Field("nvlink_errors", "crc_flit", pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL),
    Field("nvlink_errors", "crc_data", pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL),
)
_ECC_TOTALS = (
    Field("corrected", "volatile", pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL),
    Field("uncorrected", "volatile", pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL),
    Field("corrected", "aggregate", pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL),
    Field("uncorrected", "aggregate", pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL),
)
"""By the keys of `ecc_totals`."""
_OTHER_CARD_FIELDS = (
    Field("retired_pages_pending", "", pynvml.NVML_FI_DEV_RETIRED_PENDING, bool),
    Field("pcie_replays", "", pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER),
)
CARD_FIELDS = _ECC_TOTALS + _OTHER_CARD_FIELDS


def convert_fields(fields: Iterable[Field], values: Values) -> dict[str, Any]:
    """Return the parts of a `GpuReading`. A value that the driver does not report is `None`; a mapping lacks it."""
    columns: dict[str, Any] = {}
    for name, key, number, convert in fields:
        value = convert(values[number]) if number in values else None
        if not key:
            columns[name] = value
        elif value is not None:
            columns.setdefault(name, {})[key] = value
        else:
            columns.setdefault(name, {})
    return columns


# --- health -----------------------------------------------------------------------------------------------------------


class HealthReader:
    """Reads the health of one handle. One thread at a time uses it."""

    def __init__(self, library: Library, calls: NvmlCalls, gpu: Handle) -> None:
        number = library.number
        self._calls = calls
        self._clocks = [
            (domain, number("nvmlDeviceGetClockInfo", gpu, clock, read=hertz, subject=f"clock {domain}"))
            for domain, clock in CLOCKS
        ]
        self._events = [number(name, gpu, read=int, kind=c_ulonglong) for name in _EVENTS]
        self._supported_events = [number(name, gpu, read=int, kind=c_ulonglong) for name in _KNOWN_EVENTS]
        self._performance_state = number(
            "nvmlDeviceGetPerformanceState",
            gpu,
            read=lambda state: None if state == pynvml.NVML_PSTATE_UNKNOWN else state,
        )
        self._fan_count = number("nvmlDeviceGetNumFans", gpu, read=int)
        self._fan = partial(number, "nvmlDeviceGetFanSpeed_v2", gpu, read=lambda percent: percent / 100)
        self._ecc = list(_ecc_calls(library, gpu))
        self._known_events: tuple[tuple[str, int], ...] | None = None
        self._fans: list[tuple[str, PreparedCall[float | None]]] | None = None

    def read(self, values: Values) -> dict[str, Any]:
        """Return the fields of the group `health` that change quickly. Raises `RefusedError` if the GPU is gone."""
        return convert_fields(HEALTH_FIELDS, values) | {
            "clocks_hertz": known_values([(domain, self._calls.ask(call)) for domain, call in self._clocks]),
            "clock_events": self._read_clock_events(),
            "performance_state": self._calls.ask(self._performance_state),
            "fan_speed_ratios": self._read_fans(),
        }

    def read_slow(self, values: Values) -> dict[str, Any]:
        """Return the other fields of the group. Raises `RefusedError` if the GPU is gone."""
        return convert_fields(SLOW_HEALTH_FIELDS, values) | {"ecc_errors": self._read_ecc_errors()}

    def _read_clock_events(self) -> dict[str, bool]:
        events = self._calls.ask_first(self._events)
        if events is None:
            return {}
        if self._known_events is None:
            mask = self._calls.ask_first(self._supported_events)
            if mask is None and self._calls.refused_with not in (0, *UNSUPPORTED):
                # The driver may not know the others.
                return {reason: True for reason, bit in _EVENT_BITS if events & bit}
            self._known_events = tuple([row for row in _EVENT_BITS if mask is None or mask & row[1]])
        return {reason: bool(events & bit) for reason, bit in self._known_events}

    def _read_fans(self) -> dict[str, float]:
        ask = self._calls.ask
        if self._fans is None:
            count = ask(self._fan_count)
            if count is not None:
                self._fans = [(str(fan), self._fan(fan, subject=f"fan {fan}")) for fan in range(min(count, 64))]
        return known_values([(fan, ask(call)) for fan, call in self._fans or ()])

    def _read_ecc_errors(self) -> dict[str, dict[str, int]]:
        counts = ((type_, location, self._calls.ask(call)) for type_, location, call in self._ecc)
        known = grouped((type_, (location, count)) for type_, location, count in counts if count is not None)
        return {type_: dict(by_location) for type_, by_location in known.items()}


def _ecc_calls(library: Library, gpu: Handle) -> Iterator[tuple[str, str, PreparedCall[int | None]]]:
    """Unlike the volatile counts, the aggregate ones survive a reload of the driver."""
    for (code, type_), (place, location) in product(enumerate(ECC_TYPES), enumerate(ECC_LOCATIONS)):
        arguments = gpu, code, pynvml.NVML_AGGREGATE_ECC, place
        name, key = "nvmlDeviceGetMemoryErrorCounter", f"ecc {type_} {location}"
        yield type_, location, library.number(name, *arguments, read=int, kind=c_ulonglong, subject=key)


def fabric(library: Library, gpu: Handle) -> PreparedCall[Fabric | None]:
    def read(info: Any) -> Fabric | None:
        state = info.state & 0xFF  # nvml.h, nvmlGpuFabricState_t: one byte
        if state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
            return None
        # nvml.h: the status "must be checked only if state returns complete"
        completed = state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
        return Fabric(word_of(FABRIC_STATES, state), word(info.status) if completed else "")

    return library.structure("nvmlDeviceGetGpuFabricInfoV", gpu, out=pynvml.c_nvmlGpuFabricInfo_v2_t(), read=read)


# --- the group `card` -------------------------------------------------------------------------------------------------


class CardReader:
    """Reads the properties of the card of one handle. One thread at a time uses it."""

    def __init__(self, library: Library, calls: NvmlCalls, gpu: Handle) -> None:
        number = library.number
        self._calls = calls
        self._vbios_version = library.text("nvmlDeviceGetVbiosVersion", gpu)
        self._compute_capability = library.pair("nvmlDeviceGetCudaComputeCapability", gpu, "{}.{}".format, c_int)
        self._max_clocks = [
            (domain, number("nvmlDeviceGetMaxClockInfo", gpu, clock, read=hertz, subject=f"max clock {domain}"))
            for domain, clock in CLOCKS
        ]
        self._compute_mode = number("nvmlDeviceGetComputeMode", gpu, read=lambda mode: word_of(COMPUTE_MODES, mode))
        self._requested_limit = number("nvmlDeviceGetPowerManagementLimit", gpu, read=watts)
        self._default_limit = number("nvmlDeviceGetPowerManagementDefaultLimit", gpu, read=watts)
        self._limits = library.pair(
            "nvmlDeviceGetPowerManagementLimitConstraints", gpu, lambda lowest, highest: (watts(lowest), watts(highest))
        )
        self._constants: dict[str, Any] = {"vbios_version": "", "compute_capability": ""}
        """Also the power limits that a user cannot set."""
        self._asked_after = -1  # `NvmlCalls.forgotten` when the driver reported all of them, or does not support them

    def read(self, values: Values) -> dict[str, Any]:
        """Return the fields of the group `card`. Raises `RefusedError` if the GPU is gone."""
        constants = self._read_constants()
        totals = convert_fields(_ECC_TOTALS, values)
        requested = known_values([("requested", self._calls.ask(self._requested_limit))])
        return {
            **convert_fields(_OTHER_CARD_FIELDS, values),
            **constants,
            "ecc_totals": {type_: counts for type_, counts in totals.items() if counts},
            "compute_mode": self._calls.ask(self._compute_mode),
            "power_limits_watts": requested | constants["power_limits_watts"],
        }

    def _read_constants(self) -> dict[str, Any]:
        if self._asked_after == self._calls.forgotten:
            return self._constants
        ask, incomplete = self._calls.ask, self._calls.incomplete
        vbios_version, capability = ask(self._vbios_version), ask(self._compute_capability)
        max_clocks = known_values([(domain, ask(call)) for domain, call in self._max_clocks])
        default, limits = ask(self._default_limit), ask(self._limits)
        lowest, highest = limits or (None, None)
        self._constants = {
            "vbios_version": vbios_version or self._constants["vbios_version"],
            "compute_capability": capability or self._constants["compute_capability"],
            "max_clocks_hertz": max_clocks,
            "power_limits_watts": known_values([("default", default), ("min", lowest), ("max", highest)]),
        }
        self._asked_after = self._calls.forgotten if self._calls.incomplete == incomplete else -1
        return self._constants
