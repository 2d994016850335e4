"""Reads the health and the links of a GPU: clocks and throttle reasons, fans, ECC errors, repairs, bytes.

All calls are on the card, also if it is partitioned.
"""

from ctypes import c_ulonglong
from functools import partial
from typing import Any

import pynvml

from gpumap.agent.nvml_worker.calls import UNSUPPORTED, NvmlCalls
from gpumap.agent.nvml_worker.card import CLOCKS, answered, counted, hertz, word_of
from gpumap.agent.nvml_worker.codes import word
from gpumap.agent.nvml_worker.field_values import Values, flag
from gpumap.agent.nvml_worker.library import Handle, Library, PreparedCall
from gpumap.model.readings import (
    CLOCK_EVENT_TIMES,
    CLOCK_EVENTS,
    ECC_LOCATIONS,
    ECC_TYPES,
    FABRIC_STATES,
    NVLINK_ERRORS,
    RECOVERY_ACTIONS,
    Fabric,
)

_EVENT_BITS = tuple([(word, 1 << bit) for bit, word in enumerate(CLOCK_EVENTS)])
"""Reasons and their bits."""
_CLOCK_EVENT_TIME_FIELDS = (
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
CLOCK_EVENT_FIELDS = tuple(zip(CLOCK_EVENT_TIMES, _CLOCK_EVENT_TIME_FIELDS, strict=True))
"""Reasons and the field values of their times, in nanoseconds."""
_REMAPPED = (("correctable", pynvml.NVML_FI_DEV_REMAPPED_COR), ("uncorrectable", pynvml.NVML_FI_DEV_REMAPPED_UNC))
_RETIRED = (("single_bit_ecc", pynvml.NVML_FI_DEV_RETIRED_SBE), ("double_bit_ecc", pynvml.NVML_FI_DEV_RETIRED_DBE))
HEALTH_FIELDS = (*(field for _, field in CLOCK_EVENT_FIELDS), pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
SLOW_HEALTH_FIELDS = (
    *(field for _, field in (*_REMAPPED, *_RETIRED)),
    pynvml.NVML_FI_DEV_REMAPPED_PENDING,
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
)
LINK_FIELDS = (
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
)
_NVLINK_ERRORS = tuple(
    zip(
        NVLINK_ERRORS,
        (
            pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
            pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
            pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
            pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        ),
        strict=True,
    )
)
SLOW_LINK_FIELDS = tuple(field for _, field in _NVLINK_ERRORS)
_EVENTS = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
"""The second is the name before driver 535. CUDA 14 removes it."""
_KNOWN_EVENTS = "nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetSupportedClocksThrottleReasons"


def recovery_word(action: float) -> str:
    return word_of(RECOVERY_ACTIONS, int(action))


def link_errors(values: Values) -> dict[str, int]:
    """Return the errors of NVLinks by type, from its field values. Blackwell has no such counters."""
    return {word: int(values[field]) for word, field in _NVLINK_ERRORS if field in values}


def fabric(library: Library, gpu: Handle) -> PreparedCall[Fabric | None]:
    out = pynvml.c_nvmlGpuFabricInfo_v2_t()
    return library.structure("nvmlDeviceGetGpuFabricInfoV", gpu, out=out, read=_fabric)


def links(values: Values) -> dict[str, Any]:
    """Return the NVLinks of the group `links`, from its field values."""
    transmit, receive = (values.get(field) for field in LINK_FIELDS)
    return {
        "nvlink_transmit_bytes": None if transmit is None else int(transmit) << 10,
        "nvlink_receive_bytes": None if receive is None else int(receive) << 10,
    }


class HealthOfGpu:
    """Reads the health of one handle. One thread at a time uses it."""

    def __init__(self, library: Library, calls: NvmlCalls, gpu: Handle) -> None:
        number = library.number
        self._calls = calls
        self._clocks = [
            (domain, number("nvmlDeviceGetClockInfo", gpu, place, read=hertz, on=f"clock {domain}"))
            for domain, place in CLOCKS
        ]
        self._events = [number(name, gpu, read=int, kind=c_ulonglong) for name in _EVENTS]
        self._supported_events = [number(name, gpu, read=int, kind=c_ulonglong) for name in _KNOWN_EVENTS]
        self._performance_state = number("nvmlDeviceGetPerformanceState", gpu, read=_state)
        self._fan_count = number("nvmlDeviceGetNumFans", gpu, read=int)
        self._fan = partial(number, "nvmlDeviceGetFanSpeed_v2", gpu, read=_fan_ratio)
        self._only_fan = number("nvmlDeviceGetFanSpeed", gpu, read=_fan_ratio)
        self._all_ecc = [
            # Unlike the volatile counts, the aggregate ones survive a reload of the driver.
            (
                kind,
                location,
                number(
                    "nvmlDeviceGetMemoryErrorCounter",
                    *(gpu, type_, pynvml.NVML_AGGREGATE_ECC, place),
                    read=int,
                    kind=c_ulonglong,
                    on=f"ecc {kind} {location}",
                ),
            )
            for type_, kind in enumerate(ECC_TYPES)
            for place, location in enumerate(ECC_LOCATIONS)
        ]
        self._ecc = self._all_ecc
        self._known_events: tuple[tuple[str, int], ...] | None = None
        self._last_events: tuple[int, dict[str, bool]] = (-1, {})
        self._fans: list[tuple[str, PreparedCall[float | None]]] | None = None
        self._forgotten = calls.forgotten

    def read(self, values: Values) -> dict[str, Any]:
        """Return the fields of the group `health` that change quickly. `values` are the field values.

        Raises `RefusedError` if the GPU is gone.
        """
        action = values.get(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        ask = self._calls.ask
        return {
            "clocks_hertz": answered([(domain, ask(call)) for domain, call in self._clocks]),
            "clock_events": self._read_clock_events(),
            "clock_event_seconds": {word: values[field] / 1e9 for word, field in CLOCK_EVENT_FIELDS if field in values},
            "performance_state": ask(self._performance_state),
            "fan_speed_ratios": self._read_fans(),
            "recovery_action": None if action is None else recovery_word(action),
        }

    def read_slow(self, values: Values) -> dict[str, Any]:
        """Return the other fields of the group. Raises `RefusedError` if the GPU is gone."""
        return {
            "ecc_errors": self._read_ecc_errors(),
            "remapped_rows": {word: int(values[field]) for word, field in _REMAPPED if field in values},
            "row_remap_pending": flag(values.get(pynvml.NVML_FI_DEV_REMAPPED_PENDING)),
            "row_remap_failure": flag(values.get(pynvml.NVML_FI_DEV_REMAPPED_FAILURE)),
            "retired_pages": {word: int(values[field]) for word, field in _RETIRED if field in values},
        }

    def _read_clock_events(self) -> dict[str, bool]:
        now = self._calls.ask_first(self._events)
        if now is None:
            return {}
        if self._known_events is None:
            mask = self._calls.ask_first(self._supported_events)
            if mask is None and self._calls.refused_with not in (0, *UNSUPPORTED):
                return {word: True for word, bit in _EVENT_BITS if now & bit}  # the driver may not know the others
            self._known_events = tuple([one for one in _EVENT_BITS if mask is None or mask & one[1]])
        if now != self._last_events[0]:
            self._last_events = now, {word: bool(now & bit) for word, bit in self._known_events}
        return self._last_events[1]

    def _read_fans(self) -> dict[str, float]:
        """If the driver reports no fan by number, return the one fan that drivers before 450 report."""
        ask = self._calls.ask
        if self._fans is None:
            count = ask(self._fan_count)
            if count is not None:
                self._fans = [(str(fan), self._fan(fan, on=f"fan {fan}")) for fan in range(min(count, 64))]
        fans = answered([(fan, ask(call)) for fan, call in self._fans or ()])
        return fans or answered([("0", ask(self._only_fan))])

    def _read_ecc_errors(self) -> dict[str, dict[str, int]]:
        """Return the ECC counts. Most cards count at few locations; the other locations are read once."""
        if self._forgotten != self._calls.forgotten:
            self._forgotten, self._ecc = self._calls.forgotten, self._all_ecc
        found = [(kind, location, self._calls.ask(call)) for kind, location, call in self._ecc]
        if any(count is None for _, _, count in found):
            self._ecc = [row for row in self._ecc if self._calls.is_supported(row[2].key)]
        return counted(found)


def _fabric(info: Any) -> Fabric | None:
    state = info.state & 0xFF  # nvml.h, nvmlGpuFabricState_t: one byte
    if state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    # nvml.h: the status "must be checked only if state returns complete"
    completed = state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    return Fabric(word_of(FABRIC_STATES, state), word(info.status) if completed else "")


def _fan_ratio(percent: int) -> float:
    return percent / 100


def _state(number: int) -> int | None:
    return None if number == pynvml.NVML_PSTATE_UNKNOWN else number
