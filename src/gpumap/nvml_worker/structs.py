"""The structures of nvml.h that gpumap reads, and the prototypes of the functions that it calls.

Our own, because importing pynvml costs the worker 17 MB, and its wrappers several times the calls. A test compares
every layout, size and version with pynvml's.
"""

from ctypes import (
    POINTER,
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


VALUE_FIELDS = tuple(name for name, _ in Value._fields_)
"""By nvmlValueType_t."""
MEMORY_V2 = 0x0200_0028
TEMPERATURE_V1 = 0x0100_000C

_UINT = POINTER(c_uint)
_DEVICE_TO_UINT = (c_void_p, _UINT)
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
    "nvmlDeviceGetTotalEnergyConsumption": (c_void_p, POINTER(c_ulonglong)),
    "nvmlDeviceGetFieldValues": (c_void_p, c_int, POINTER(FieldValue)),
}
"""The arguments' types by function; each returns an nvmlReturn_t."""
