"""GPM (Hopper and later): how busy the parts of a device were between two samples, and its traffic over PCIe.

The older sample is kept from one reading to the next, so no call waits. One thread at a time uses it.
"""

import contextlib
import time
from ctypes import byref, c_void_p, sizeof
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

import pynvml

from gpumap.agent.nvml_worker.calls import UNSUPPORTED, NvmlCalls
from gpumap.agent.nvml_worker.library import Handle, Library, PreparedCall, RefusedError, key_of
from gpumap.model.readings import PCIE_RATES, PCIE_TOTALS, Activity

_UNKNOWN_METRIC = UNSUPPORTED | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
"""The answers for a metric that the GPU does not measure, or that the driver does not know."""
METRICS = (
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    pynvml.NVML_GPM_METRIC_FP64_UTIL,
    pynvml.NVML_GPM_METRIC_FP32_UTIL,
    pynvml.NVML_GPM_METRIC_FP16_UTIL,
)
"""In the order of `Activity`."""
_VIDEO = (
    (
        *range(pynvml.NVML_GPM_METRIC_NVDEC_0_UTIL, pynvml.NVML_GPM_METRIC_NVDEC_7_UTIL + 1),
        *range(pynvml.NVML_GPM_METRIC_NVJPG_0_UTIL, pynvml.NVML_GPM_METRIC_NVJPG_7_UTIL + 1),
        pynvml.NVML_GPM_METRIC_NVOFA_0_UTIL,
    ),
    (
        pynvml.NVML_GPM_METRIC_NVOFA_1_UTIL,
        *range(pynvml.NVML_GPM_METRIC_NVENC_0_UTIL, pynvml.NVML_GPM_METRIC_NVENC_3_UTIL + 1),
    ),
)
"""The video engines. Older drivers do not know the second part."""
_RATES = pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC
"""MiB/s, means between the samples."""
_TOTALS = pynvml.NVML_GPM_METRIC_PCIE_TX, pynvml.NVML_GPM_METRIC_PCIE_RX
"""Bytes since the machine started. Drivers before R595 do not know them."""
_MIB = 1 << 20
_MIB_PER_SECOND_MAX = 1e6
"""Eight times PCIe 6 with 16 lanes. A larger rate is no rate, and would be in the counter for ever."""
_TOTAL_MAX = 2.0**63
APART_SECONDS = 0.1
"""nvml.h, nvmlGpmMetricsGet_t: "Samples must be >100ms apart". An early reading may come sooner."""
_ROUNDING_PERCENT = 101.0

_METRIC: Any = pynvml.c_nvmlGpmMetric_t
_ROW = f"4xId{sizeof(_METRIC) - _METRIC.metricInfo.offset}x"
"""Of nvmlGpmMetric_t: nvmlReturn and value."""
_SAMPLES = Struct("@PP")
_GET_METRICS = "nvmlGpmMetricsGet"
MetricRow = tuple[int, int, float]
"""A metric, its nvmlReturn and its value."""


class Sample(NamedTuple):
    """nvmlGpmSample_t, a pointer, and the call that takes the sample."""

    pointer: c_void_p
    take: PreparedCall[None]


class Measured(NamedTuple):
    """A measured object: a GPU (`gpu_instance_id` is `None`), or one of its GPU instances.

    `identity` separates an instance from a later one with the same id: their samples are unrelated.
    """

    gpu_instance_id: int | None = None
    identity: tuple[object, ...] = ()


WHOLE_GPU = Measured()


class Traffic(NamedTuple):
    """As `GpuReading` names it: the driver's totals, or the sums of its rates × seconds since the first sample."""

    pcie_source: str
    pcie_transmit_bytes: int
    pcie_receive_bytes: int


class GpmReading(NamedTuple):
    """What GPM measured. `traffic` is only of whole GPUs. A link belongs to the card, not to its GPU instances."""

    activity: Activity | None = None
    traffic: Traffic | None = None


NOTHING = GpmReading()


class _Meter:
    """Two samples, and the last values between two samples. `key` names what may be unsupported."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.used = True
        self.older: Sample | None = None
        self.spare: Sample | None = None
        self.taken_at = 0.0
        self.reading = NOTHING
        self.has_totals = False
        self.transmitted = 0.0  # bytes by the rates, as `received` is
        self.received = 0.0


class Activities:
    """The samples of one GPU's handle. Before it is dropped, call `free` while NVML is initialized."""

    def __init__(self, library: Library, calls: NvmlCalls, gpu: Handle) -> None:
        self._library = library
        self._calls = calls
        self._gpu = gpu
        self._supported: bool | None = None
        self._meters: dict[Measured, _Meter] = {}
        self._support = library.structure(
            "nvmlGpmQueryDeviceSupport",
            gpu,
            out=pynvml.c_nvmlGpmSupport_t(pynvml.NVML_GPM_SUPPORT_VERSION),
            read=lambda support: bool(support.isSupportedDevice),
        )
        self._metrics, self._totals = _Metrics(library, METRICS + _RATES), _Metrics(library, _TOTALS)
        self._video = [_Metrics(library, engines) for engines in _VIDEO]

    def free_unused(self) -> None:
        """Free the samples that nothing used since the last call: of removed instances, or of a group that is off."""
        for measured, meter in list(self._meters.items()):
            if not meter.used:
                self._free(self._meters.pop(measured))
            meter.used = False

    def free(self) -> None:
        for meter in self._meters.values():
            self._free(meter)
        self._meters.clear()

    def read(self, measured: Measured) -> GpmReading:
        """Return what was measured since the last reading, if any. Raises `RefusedError` if the GPU is gone."""
        if self._supported is None:
            self._supported = self._calls.ask(self._support)
        if not self._supported:
            return NOTHING
        meter = self._meters.get(measured)
        if meter is None:
            instance_id = measured.gpu_instance_id
            subject = "gpu" if instance_id is None else f"gpu instance {instance_id}"
            meter = self._meters[measured] = _Meter(key_of("nvmlGpmSampleGet", subject))
        meter.used = True
        if not self._calls.is_supported(meter.key):
            return NOTHING
        if meter.older is not None and time.monotonic() - meter.taken_at <= APART_SECONDS:
            return meter.reading  # of an interval that ended now
        # NVML may refuse this without privilege, like the place of a GPU instance. Then the value is absent, without a
        # fault.
        reading = self._calls.attempt(meter.key, lambda: self._sample(measured, meter), privileged=True)
        meter.reading = reading or NOTHING
        return meter.reading

    # --- several calls; each raises RefusedError ---

    def _sample(self, measured: Measured, meter: _Meter) -> GpmReading | None:
        if meter.spare is None:
            meter.spare = self._allocate(measured)
        meter.spare.take.once()
        taken_before, meter.taken_at = meter.taken_at, time.monotonic()
        older, newer = meter.older, meter.spare
        meter.older, meter.spare = newer, older
        if older is None:
            return None
        rows = self._metrics.between(older, newer)
        percents = [*self._values(rows[: len(METRICS)], _ROUNDING_PERCENT), self._video_percent(meter, older, newer)]
        activity = Activity(*[None if percent is None else min(percent / 100, 1.0) for percent in percents])
        if measured != WHOLE_GPU:
            return GpmReading(activity)
        rates = self._values(rows[len(METRICS) :], _MIB_PER_SECOND_MAX)
        return GpmReading(activity, self._traffic(meter, rates, meter.taken_at - taken_before, older, newer))

    def _video_percent(self, meter: _Meter, older: Sample, newer: Sample) -> float | None:
        """Return the time of the busiest engine. Engines that the device lacks are not asked for again."""
        values: list[float] = []
        for index, metrics in enumerate(self._video):
            ask = partial(self._ask_apart, metrics, _ROUNDING_PERCENT, older, newer)
            answer = self._calls.attempt(f"{meter.key}: video {index}", ask)
            values += [value for value in answer or () if value is not None]
        return max(values, default=None)

    def _traffic(
        self, meter: _Meter, rates: list[float | None], seconds: float, older: Sample, newer: Sample
    ) -> Traffic | None:
        """Return the totals. If the driver does not know them, add up the rates."""
        totals = self._calls.attempt(key_of("totals", "gpu"), lambda: self._read_totals(older, newer))
        if totals is not None:
            meter.has_totals = True
            return totals
        transmit, receive = rates
        if meter.has_totals or transmit is None or receive is None:
            return None
        meter.transmitted += transmit * _MIB * seconds
        meter.received += receive * _MIB * seconds
        return Traffic(PCIE_RATES, int(meter.transmitted), int(meter.received))

    def _read_totals(self, older: Sample, newer: Sample) -> Traffic:
        transmit, receive = self._ask_apart(self._totals, _TOTAL_MAX, older, newer)
        if transmit is None or receive is None:
            raise RefusedError(_GET_METRICS, pynvml.NVML_ERROR_NOT_SUPPORTED)
        return Traffic(PCIE_TOTALS, int(transmit), int(receive))

    def _ask_apart(self, metrics: "_Metrics", maximum: float, older: Sample, newer: Sample) -> list[float | None]:
        """Return the values of metrics that a driver may not know: it may refuse the whole call for that."""
        try:
            rows = metrics.between(older, newer)
        except RefusedError as refused:
            if refused.code not in _UNKNOWN_METRIC:
                raise
            rows = []
        if all(code in _UNKNOWN_METRIC for _, code, _ in rows):
            raise RefusedError(_GET_METRICS, pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self._values(rows, maximum)

    def _values(self, rows: list[MetricRow], maximum: float) -> list[float | None]:
        """Return the values. A refused metric affects only itself. A value that is not possible is absent."""
        for metric, code, _ in rows:
            if code and code not in _UNKNOWN_METRIC:
                call = f"{_GET_METRICS}({metric})"
                self._calls.take(RefusedError(call, code), key_of(call, "gpu"))
        return [value if not code and 0.0 <= value <= maximum else None for _, code, value in rows]

    def _allocate(self, measured: Measured) -> Sample:
        pointer = c_void_p()
        self._library.ask("nvmlGpmSampleAlloc", byref(pointer))
        name = "nvmlGpmSampleGet"
        arguments: tuple[object, ...] = self._gpu, pointer
        if measured.gpu_instance_id is not None:
            name, arguments = "nvmlGpmMigSampleGet", (self._gpu, measured.gpu_instance_id, pointer)
        return Sample(pointer, PreparedCall(name, self._library.function(name), arguments, lambda: None))

    def _free(self, meter: _Meter) -> None:
        for sample in (meter.older, meter.spare):
            if sample is not None:
                with contextlib.suppress(RefusedError):  # if the driver is gone, there is nothing to free
                    self._library.ask("nvmlGpmSampleFree", sample.pointer)


class _Metrics:
    """Gets some metrics between any two samples."""

    def __init__(self, library: Library, metrics: tuple[int, ...]) -> None:
        get: Any = pynvml.c_nvmlGpmMetricsGet_t(pynvml.NVML_GPM_METRICS_GET_VERSION, len(metrics))
        for row, metric in zip(get.metrics, metrics, strict=False):
            row.metricId = metric
        rows = Struct("@" + _ROW * len(metrics))

        def read() -> list[MetricRow]:
            columns = rows.unpack_from(get, type(get).metrics.offset)
            return list(zip(metrics, columns[::2], columns[1::2], strict=True))

        self._get = get
        self._call = PreparedCall(_GET_METRICS, library.function(_GET_METRICS), (byref(get),), read)

    def between(self, older: Sample, newer: Sample) -> list[MetricRow]:
        """Raises `RefusedError`."""
        _SAMPLES.pack_into(self._get, type(self._get).sample1.offset, older.pointer.value, newer.pointer.value)
        return self._call.once()
