"""Reads the health and the links of a GPU: clocks and throttle reasons, fans, ECC errors, repairs, bytes.

All calls are on the card, also if it is partitioned.
"""

from ctypes import byref, c_uint, c_ulonglong

import pynvml

from gpumap.agent.nvml_worker.calls import UNSUPPORTED, NvmlCalls
from gpumap.agent.nvml_worker.card import CLOCKS, word_of
from gpumap.agent.nvml_worker.field_values import Values, flag
from gpumap.agent.nvml_worker.library import Handle, Library
from gpumap.model.readings import (
    CLOCK_EVENT_TIMES,
    CLOCK_EVENTS,
    ECC_LOCATIONS,
    ECC_TYPES,
    RECOVERY_ACTIONS,
    GpuReading,
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
HEALTH_FIELDS = (
    *(field for _, field in (*CLOCK_EVENT_FIELDS, *_REMAPPED, *_RETIRED)),
    pynvml.NVML_FI_DEV_REMAPPED_PENDING,
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
    pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
)
LINK_FIELDS = (
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
)
_ECC = tuple(
    (kind, location, type_, place, f"ecc {kind} {location}")
    for type_, kind in enumerate(ECC_TYPES)
    for place, location in enumerate(ECC_LOCATIONS)
)
_CLOCKS_ON = tuple((domain, number, f"clock {domain}") for domain, number in CLOCKS)


def recovery_word(action: float) -> str:
    return word_of(RECOVERY_ACTIONS, int(action))


def with_links(reading: GpuReading, values: Values) -> GpuReading:
    """Return the reading with the NVLinks of the group `links`, from its field values."""
    transmit, receive = (values.get(field) for field in LINK_FIELDS)
    return reading._replace(
        nvlink_transmit_bytes=None if transmit is None else int(transmit) << 10,
        nvlink_receive_bytes=None if receive is None else int(receive) << 10,
    )


class HealthOfGpu:
    """Reads the health of one handle. One thread at a time uses it."""

    def __init__(self, library: Library, calls: NvmlCalls, gpu: Handle) -> None:
        self._questions = _Questions(library)
        self._calls = calls
        self._gpu = gpu
        self._known_events: tuple[tuple[str, int], ...] | None = None
        self._events: dict[int, tuple[tuple[str, bool], ...]] = {}
        self._fans: tuple[tuple[int, str], ...] | None = None
        self._ecc = _ECC
        self._forgotten = calls.forgotten

    def add_to(self, reading: GpuReading, values: Values) -> GpuReading:
        """Return the reading with the group `health`. `values` are the field values.

        Raises `RefusedError` if the GPU is gone.
        """
        action = values.get(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        return reading._replace(
            clocks_hertz=self._read_clocks(),
            clock_events=self._read_clock_events(),
            clock_event_seconds=tuple(
                [(word, values[field] / 1e9) for word, field in CLOCK_EVENT_FIELDS if field in values]
            ),
            performance_state=self._read_performance_state(),
            fan_ratios=self._read_fans(),
            ecc_errors=self._read_ecc_errors(),
            remapped_rows=tuple([(word, int(values[field])) for word, field in _REMAPPED if field in values]),
            row_remap_pending=flag(values.get(pynvml.NVML_FI_DEV_REMAPPED_PENDING)),
            row_remap_failure=flag(values.get(pynvml.NVML_FI_DEV_REMAPPED_FAILURE)),
            retired_pages=tuple([(word, int(values[field])) for word, field in _RETIRED if field in values]),
            recovery_action=None if action is None else recovery_word(action),
        )

    def _read_clocks(self) -> tuple[tuple[str, float], ...]:
        clocks: list[tuple[str, float]] = []
        for domain, number, on in _CLOCKS_ON:
            hertz = self._calls.ask(self._questions.clock_hertz, self._gpu, number, on=on)
            if hertz is not None:
                clocks.append((domain, hertz))
        return tuple(clocks)

    def _read_clock_events(self) -> tuple[tuple[str, bool], ...]:
        ask, questions = self._calls.ask_newest, self._questions
        now = ask((questions.clock_events, questions.clock_throttling), self._gpu)
        if now is None:
            return ()
        if self._known_events is None:
            mask = ask((questions.supported_clock_events, questions.supported_clock_throttling), self._gpu)
            if mask is None and self._calls.refused_with not in (0, *UNSUPPORTED):
                return tuple(
                    [(word, True) for word, bit in _EVENT_BITS if now & bit]
                )  # the driver may not know the others
            self._known_events = tuple([one for one in _EVENT_BITS if mask is None or mask & one[1]])
        if now not in self._events:
            self._events = {now: _events_of(now, self._known_events)}
        return self._events[now]

    def _read_performance_state(self) -> int | None:
        state = self._calls.ask(self._questions.performance_state, self._gpu)
        return None if state == pynvml.NVML_PSTATE_UNKNOWN else state

    def _read_fans(self) -> tuple[tuple[str, float], ...]:
        """If the driver reports no fan by number, return the one fan that drivers before 450 report."""
        ask, questions = self._calls.ask, self._questions
        if self._fans is None:
            count = ask(questions.fans, self._gpu)
            if count is not None:
                self._fans = tuple([(fan, f"fan {fan}") for fan in range(min(count, 64))])
        fans: list[tuple[str, float]] = []
        for fan, on in self._fans or ():
            ratio = ask(questions.fan_ratio, self._gpu, fan, on=on)
            if ratio is not None:
                fans.append((str(fan), ratio))
        if not fans and (ratio := ask(questions.only_fan_ratio, self._gpu)) is not None:
            fans.append(("0", ratio))
        return tuple(fans)

    def _read_ecc_errors(self) -> tuple[tuple[str, str, int], ...]:
        """Return the ECC counts. Most cards count at few locations; the other locations are read once."""
        if self._forgotten != self._calls.forgotten:
            self._forgotten, self._ecc = self._calls.forgotten, _ECC
        question = self._questions.ecc_errors
        errors: list[tuple[str, str, int]] = []
        new = False
        for kind, location, type_, place, on in self._ecc:
            count = self._calls.ask(question, self._gpu, type_, place, on=on)
            if count is not None:
                errors.append((kind, location, count))
            else:
                new = True
        if new:
            self._ecc = tuple([row for row in self._ecc if self._calls.is_supported((question.__name__, row[-1]))])
        return tuple(errors)


class _Questions:
    """Single calls on a GPU, with plain values. Each raises `RefusedError`."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def clock_hertz(self, gpu: Handle, domain: int) -> float:
        megahertz = c_uint()
        self._library.ask("nvmlDeviceGetClockInfo", gpu, domain, byref(megahertz))
        return megahertz.value * 1e6

    def clock_events(self, gpu: Handle) -> int:
        return self._bits("nvmlDeviceGetCurrentClocksEventReasons", gpu)

    def clock_throttling(self, gpu: Handle) -> int:
        """The name until driver 535; removed in CUDA 14."""
        return self._bits("nvmlDeviceGetCurrentClocksThrottleReasons", gpu)

    def supported_clock_events(self, gpu: Handle) -> int:
        return self._bits("nvmlDeviceGetSupportedClocksEventReasons", gpu)

    def supported_clock_throttling(self, gpu: Handle) -> int:
        return self._bits("nvmlDeviceGetSupportedClocksThrottleReasons", gpu)

    def performance_state(self, gpu: Handle) -> int:
        return self._library.ask_number("nvmlDeviceGetPerformanceState", gpu)

    def fans(self, gpu: Handle) -> int:
        return self._library.ask_number("nvmlDeviceGetNumFans", gpu)

    def fan_ratio(self, gpu: Handle, fan: int) -> float:
        percent = c_uint()
        self._library.ask("nvmlDeviceGetFanSpeed_v2", gpu, fan, byref(percent))
        return percent.value / 100

    def only_fan_ratio(self, gpu: Handle) -> float:
        return self._library.ask_number("nvmlDeviceGetFanSpeed", gpu) / 100

    def ecc_errors(self, gpu: Handle, type_: int, location: int) -> int:
        count = c_ulonglong()
        # Unlike the volatile counts, these survive a reload of the driver.
        since = pynvml.NVML_AGGREGATE_ECC
        self._library.ask("nvmlDeviceGetMemoryErrorCounter", gpu, type_, since, location, byref(count))
        return count.value

    def _bits(self, call: str, gpu: Handle) -> int:
        bits = c_ulonglong()
        self._library.ask(call, gpu, byref(bits))
        return bits.value


def _events_of(now: int, known: tuple[tuple[str, int], ...]) -> tuple[tuple[str, bool], ...]:
    return tuple([(word, bool(now & bit)) for word, bit in known])
