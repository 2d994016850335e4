"""GPM (Hopper and later): how busy the parts of a device were between two samples.

The older sample is kept from one reading to the next, so no call waits. One thread at a time uses it.
"""

import contextlib
import time
from ctypes import byref
from typing import Any, NamedTuple

import pynvml

from gpumap.agent.nvml_worker.calls import UNSUPPORTED, NvmlCalls
from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError
from gpumap.model.readings import Activity

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
APART_SECONDS = 0.1
"""nvml.h, nvmlGpmMetricsGet_t: "Samples must be >100ms apart". An early reading may come sooner."""
_ROUNDING_PERCENT = 101.0

Sample = Any
"""nvmlGpmSample_t, a pointer."""


class Measured(NamedTuple):
    """A measured object: a GPU (`gpu_instance_id` is `None`), or one of its GPU instances.

    `being` separates an instance from a later one with the same id: their samples are unrelated.
    """

    gpu_instance_id: int | None = None
    being: tuple[object, ...] = ()


WHOLE_GPU = Measured()


class _Meter:
    """Two samples, and the last activity between two samples."""

    def __init__(self) -> None:
        self.older: Sample | None = None
        self.spare: Sample | None = None
        self.taken_at = 0.0
        self.activity: Activity | None = None


class Activities:
    """The samples of one GPU's handle. Before it is dropped, call `free` while NVML is initialized."""

    def __init__(self, library: Library, calls: NvmlCalls, gpu: Handle) -> None:
        self._library = library
        self._calls = calls
        self._gpu = gpu
        self._supported: bool | None = None
        self._meters: dict[Measured, _Meter] = {}
        self._in_use: set[Measured] = set()
        self._get: Any = None

    def free_unused(self) -> None:
        """Free the samples that were not used since the last call: of removed instances, or of a group that is not
        wanted."""
        for measured in self._meters.keys() - self._in_use:
            self._free(self._meters.pop(measured))
        self._in_use.clear()

    def free(self) -> None:
        for meter in self._meters.values():
            self._free(meter)
        self._meters.clear()

    def read(self, measured: Measured) -> Activity | None:
        """Return the activity since the reading before; `None` in the first one. Raises `RefusedError` if the GPU is
        gone."""
        if self._supported is None:
            self._supported = self._calls.ask(self._gpm_support)
        if not self._supported:
            return None
        on = "gpu" if measured.gpu_instance_id is None else f"gpu instance {measured.gpu_instance_id}"
        if not self._calls.is_supported((self._activity.__name__, on)):
            return None
        self._in_use.add(measured)
        meter = self._meters.get(measured)
        if meter is None:
            meter = self._meters[measured] = _Meter()
        elif meter.older is not None and time.monotonic() - meter.taken_at <= APART_SECONDS:
            return meter.activity  # of an interval that ended now
        # NVML may refuse this without privilege, like the place of a GPU instance. Then the value is absent, without a
        # fault.
        meter.activity = self._calls.ask(self._activity, measured, meter, on=on, privileged=True)
        return meter.activity

    # --- single questions; each raises RefusedError ---

    def _gpm_support(self) -> bool:
        support = pynvml.c_nvmlGpmSupport_t(pynvml.NVML_GPM_SUPPORT_VERSION)
        self._library.ask("nvmlGpmQueryDeviceSupport", self._gpu, byref(support))
        return bool(support.isSupportedDevice)

    def _activity(self, measured: Measured, meter: _Meter) -> Activity | None:
        if meter.spare is None:
            meter.spare = self._allocate()
        if measured.gpu_instance_id is None:
            self._library.ask("nvmlGpmSampleGet", self._gpu, meter.spare)
        else:
            self._library.ask("nvmlGpmMigSampleGet", self._gpu, measured.gpu_instance_id, meter.spare)
        meter.taken_at = time.monotonic()
        older, newer = meter.older, meter.spare
        meter.older, meter.spare = newer, older
        return None if older is None else self._between(older, newer)

    def _between(self, older: Sample, newer: Sample) -> Activity:
        if self._get is None:
            self._get = _laid_out()
        get = self._get
        get.sample1, get.sample2 = older, newer
        self._library.ask("nvmlGpmMetricsGet", byref(get))
        return Activity(*[self._ratio(metric) for metric in get.metrics[: len(METRICS)]])

    def _ratio(self, metric: Any) -> float | None:
        """Return the activity. A refused metric affects only itself. A value that is not a percentage is absent."""
        code = metric.nvmlReturn
        if code and code not in _UNKNOWN_METRIC:
            call = f"nvmlGpmMetricsGet({metric.metricId})"
            self._calls.take(RefusedError(call, code), (call, "gpu"))
        percent = metric.value
        return min(percent / 100, 1.0) if not code and 0.0 <= percent <= _ROUNDING_PERCENT else None

    def _allocate(self) -> Sample:
        sample = pynvml.c_nvmlGpmSample_t()
        self._library.ask("nvmlGpmSampleAlloc", byref(sample))
        return sample

    def _free(self, meter: _Meter) -> None:
        for sample in (meter.older, meter.spare):
            if sample is not None:
                with contextlib.suppress(RefusedError):  # if the driver is gone, there is nothing to free
                    self._library.ask("nvmlGpmSampleFree", sample)


def _laid_out() -> Any:
    """Return the structure with the wanted metrics."""
    get = pynvml.c_nvmlGpmMetricsGet_t(pynvml.NVML_GPM_METRICS_GET_VERSION, len(METRICS))
    for metric, wanted in zip(get.metrics, METRICS, strict=False):
        metric.metricId = wanted
    return get
