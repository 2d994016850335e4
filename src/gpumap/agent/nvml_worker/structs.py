"""The structures of nvml.h that gpumap reads, and the prototypes of the functions that it calls.

Our own, because importing pynvml costs the worker 17 MB, and its wrappers several times the calls. A test compares
every layout, size and version with pynvml's.
"""

from ctypes import (
    POINTER,
    Array,
    Structure,
    Union,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_longlong,
    c_uint,
    c_ulong,
    c_ulonglong,
    c_ushort,
    c_void_p,
)

TEXT_BYTES = 96
"""Room for every text that is asked for (nvml.h, NVML_DEVICE_UUID_V2_BUFFER_SIZE, the longest)."""


class PciInfo(Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("busIdLegacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pciDeviceId", c_uint),
        ("pciSubSystemId", c_uint),
        ("busId", c_char * 32),
    )
    busId: bytes  # noqa: N815 -- nvml.h's name


class DeviceAttributes(Structure):
    """nvmlDeviceAttributes_t."""

    _fields_ = (
        ("multiprocessorCount", c_uint),
        ("sharedCopyEngineCount", c_uint),
        ("sharedDecoderCount", c_uint),
        ("sharedEncoderCount", c_uint),
        ("sharedJpegCount", c_uint),
        ("sharedOfaCount", c_uint),
        ("gpuInstanceSliceCount", c_uint),
        ("computeInstanceSliceCount", c_uint),
        ("memorySizeMB", c_ulonglong),
    )
    gpuInstanceSliceCount: int  # noqa: N815
    computeInstanceSliceCount: int  # noqa: N815
    memorySizeMB: int  # noqa: N815


class GpuInstancePlacement(Structure):
    """nvmlGpuInstancePlacement_t: memory slices of the GPU."""

    _fields_ = (("start", c_uint), ("size", c_uint))
    start: int
    size: int


class GpuInstanceInfo(Structure):
    """nvmlGpuInstanceInfo_t."""

    _fields_ = (
        ("device", c_void_p),
        ("id", c_uint),
        ("profileId", c_uint),
        ("placement", GpuInstancePlacement),
    )
    profileId: int  # noqa: N815
    placement: GpuInstancePlacement


class Memory(Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))
    total: int
    free: int
    used: int


class MemoryV2(Structure):
    """nvmlMemory_v2_t."""

    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )
    total: int
    reserved: int
    free: int
    used: int


class Utilization(Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", c_uint), ("memory", c_uint))
    gpu: int
    memory: int


class Temperature(Structure):
    """nvmlTemperature_v1_t."""

    _fields_ = (("version", c_uint), ("sensorType", c_uint), ("temperature", c_int))
    temperature: int


class Value(Union):
    """nvmlValue_t."""

    _fields_ = (
        ("dVal", c_double),
        ("uiVal", c_uint),
        ("ulVal", c_ulong),
        ("ullVal", c_ulonglong),
        ("sllVal", c_longlong),
        ("siVal", c_int),
        ("usVal", c_ushort),
    )


class FieldValue(Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("fieldId", c_uint),
        ("scopeId", c_uint),
        ("timestamp", c_int64),
        ("latencyUsec", c_int64),
        ("valueType", c_uint),
        ("nvmlReturn", c_uint),
        ("value", Value),
    )
    valueType: int  # noqa: N815
    nvmlReturn: int  # noqa: N815
    value: Value


class GpmSupport(Structure):
    """nvmlGpmSupport_t."""

    _fields_ = (("version", c_uint), ("isSupportedDevice", c_uint))
    isSupportedDevice: int  # noqa: N815


class GpmMetricInfo(Structure):
    """What stands unnamed in nvmlGpmMetric_t."""

    _fields_ = (("shortName", c_char_p), ("longName", c_char_p), ("unit", c_char_p))


class GpmMetric(Structure):
    """nvmlGpmMetric_t."""

    _fields_ = (("metricId", c_uint), ("nvmlReturn", c_uint), ("value", c_double), ("metricInfo", GpmMetricInfo))
    metricId: int  # noqa: N815
    nvmlReturn: int  # noqa: N815
    value: float


class EventData(Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", c_void_p),
        ("eventType", c_ulonglong),
        ("eventData", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )
    eventType: int  # noqa: N815
    eventData: int  # noqa: N815
    gpuInstanceId: int  # noqa: N815
    computeInstanceId: int  # noqa: N815


class GpmMetricsGet(Structure):
    """nvmlGpmMetricsGet_t. Later headers have longer arrays of metrics, of which only so many as are told count."""

    _fields_ = (
        ("version", c_uint),
        ("numMetrics", c_uint),
        ("sample1", c_void_p),
        ("sample2", c_void_p),
        ("metrics", GpmMetric * 477),
    )
    version: int
    numMetrics: int  # noqa: N815
    sample1: int
    sample2: int
    metrics: Array[GpmMetric]


VALUE_FIELDS = tuple(name for name, _ in Value._fields_)
"""By nvmlValueType_t."""
MEMORY_V2 = 0x0200_0028
TEMPERATURE_V1 = 0x0100_000C
GPM_V1 = 1
"""Of both of GPM's structures, which do not have their size in it."""

_UINT = POINTER(c_uint)
_DEVICE_TO_UINT = (c_void_p, _UINT)
_DEVICE_TO_ULONGLONG = (c_void_p, POINTER(c_ulonglong))
_TEXT = (c_char_p, c_uint)

PROTOTYPES: dict[str, tuple[type, ...]] = {
    "nvmlInitWithFlags": (c_uint,),
    "nvmlShutdown": (),
    "nvmlSystemGetDriverVersion": _TEXT,
    "nvmlSystemGetNVMLVersion": _TEXT,
    "nvmlSystemGetCudaDriverVersion_v2": (POINTER(c_int),),
    "nvmlDeviceGetCount_v2": (_UINT,),
    "nvmlDeviceGetHandleByIndex_v2": (c_uint, POINTER(c_void_p)),
    "nvmlDeviceGetUUID": (c_void_p, *_TEXT),
    "nvmlDeviceGetMinorNumber": _DEVICE_TO_UINT,
    "nvmlDeviceGetPciInfo_v3": (c_void_p, POINTER(PciInfo)),
    "nvmlDeviceGetName": (c_void_p, *_TEXT),
    "nvmlDeviceGetMigMode": (c_void_p, _UINT, _UINT),
    "nvmlDeviceGetMaxMigDeviceCount": _DEVICE_TO_UINT,
    "nvmlDeviceGetMigDeviceHandleByIndex": (c_void_p, c_uint, POINTER(c_void_p)),
    "nvmlDeviceGetGpuInstanceId": _DEVICE_TO_UINT,
    "nvmlDeviceGetComputeInstanceId": _DEVICE_TO_UINT,
    "nvmlDeviceGetAttributes_v2": (c_void_p, POINTER(DeviceAttributes)),
    "nvmlDeviceGetGpuInstanceById": (c_void_p, c_uint, POINTER(c_void_p)),
    "nvmlGpuInstanceGetInfo": (c_void_p, POINTER(GpuInstanceInfo)),
    "nvmlDeviceGetMemoryInfo": (c_void_p, POINTER(Memory)),
    "nvmlDeviceGetMemoryInfo_v2": (c_void_p, POINTER(MemoryV2)),
    "nvmlDeviceGetUtilizationRates": (c_void_p, POINTER(Utilization)),
    "nvmlDeviceGetEncoderUtilization": (c_void_p, _UINT, _UINT),
    "nvmlDeviceGetDecoderUtilization": (c_void_p, _UINT, _UINT),
    "nvmlDeviceGetTemperatureV": (c_void_p, POINTER(Temperature)),
    "nvmlDeviceGetTemperature": (c_void_p, c_uint, _UINT),
    "nvmlDeviceGetPowerUsage": _DEVICE_TO_UINT,
    "nvmlDeviceGetEnforcedPowerLimit": _DEVICE_TO_UINT,
    "nvmlDeviceGetTotalEnergyConsumption": _DEVICE_TO_ULONGLONG,
    "nvmlDeviceGetFieldValues": (c_void_p, c_int, POINTER(FieldValue)),
    "nvmlDeviceGetClockInfo": (c_void_p, c_uint, _UINT),
    "nvmlDeviceGetCurrentClocksEventReasons": _DEVICE_TO_ULONGLONG,
    "nvmlDeviceGetSupportedClocksEventReasons": _DEVICE_TO_ULONGLONG,
    "nvmlDeviceGetCurrentClocksThrottleReasons": _DEVICE_TO_ULONGLONG,
    "nvmlDeviceGetSupportedClocksThrottleReasons": _DEVICE_TO_ULONGLONG,
    "nvmlDeviceGetPerformanceState": _DEVICE_TO_UINT,
    "nvmlDeviceGetComputeMode": _DEVICE_TO_UINT,
    "nvmlDeviceGetPowerManagementLimit": _DEVICE_TO_UINT,
    "nvmlDeviceGetPowerManagementDefaultLimit": _DEVICE_TO_UINT,
    "nvmlDeviceGetPowerManagementLimitConstraints": (c_void_p, _UINT, _UINT),
    "nvmlDeviceGetMaxClockInfo": (c_void_p, c_uint, _UINT),
    "nvmlDeviceGetVbiosVersion": (c_void_p, *_TEXT),
    "nvmlDeviceGetCudaComputeCapability": (c_void_p, POINTER(c_int), POINTER(c_int)),
    "nvmlDeviceGetNumFans": _DEVICE_TO_UINT,
    "nvmlDeviceGetFanSpeed_v2": (c_void_p, c_uint, _UINT),
    "nvmlDeviceGetFanSpeed": _DEVICE_TO_UINT,
    "nvmlDeviceGetMemoryErrorCounter": (c_void_p, c_uint, c_uint, c_uint, POINTER(c_ulonglong)),
    "nvmlGpmQueryDeviceSupport": (c_void_p, POINTER(GpmSupport)),
    "nvmlGpmSampleAlloc": (POINTER(c_void_p),),
    "nvmlGpmSampleFree": (c_void_p,),
    "nvmlGpmSampleGet": (c_void_p, c_void_p),
    "nvmlGpmMigSampleGet": (c_void_p, c_uint, c_void_p),
    "nvmlGpmMetricsGet": (POINTER(GpmMetricsGet),),
    "nvmlEventSetCreate": (POINTER(c_void_p),),
    "nvmlEventSetFree": (c_void_p,),
    "nvmlDeviceGetSupportedEventTypes": (c_void_p, POINTER(c_ulonglong)),
    "nvmlDeviceRegisterEvents": (c_void_p, c_ulonglong, c_void_p),
    "nvmlEventSetWait_v2": (c_void_p, POINTER(EventData), c_uint),
}
"""The arguments' types by function; each returns an nvmlReturn_t."""
