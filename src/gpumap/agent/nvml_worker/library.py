"""Loads and initializes the NVIDIA library, and makes single calls that return plain values.

Structures, constants and the table of functions are NVIDIA's (nvidia-ml-py). Its wrappers are not used: a call through
its function pointers is cheaper, and a refused call keeps its name and code in a `RefusedError`. This module does not
decide what a refusal affects. It stores only the loaded library.
"""

from collections.abc import Callable
from ctypes import CDLL, byref, c_int, c_uint, c_ulonglong, create_string_buffer
from typing import NamedTuple, NewType

import pynvml

from gpumap.agent.nvml_worker.codes import word
from gpumap.model.readings import DeviceMemory

Handle = NewType("Handle", object)
"""nvmlDevice_t, a pointer."""
SONAME = "libnvidia-ml.so.1"
TEXT_BYTES = pynvml.NVML_DEVICE_UUID_V2_BUFFER_SIZE
"""Room for every text that gpumap reads: this is the longest."""


class RefusedError(Exception):
    """NVML answered a call with a code other than success."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} said {code} ({word(code)})")
        self.call = call
        self.code = code


class LibraryError(Exception):
    """The library cannot be loaded or initialized. `code` is NVML's; 0 if NVML was not reached."""

    def __init__(self, code: int, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.reason = reason


class Attributes(NamedTuple):
    """The part of nvmlDeviceAttributes_t of a MIG device that the name of its profile needs."""

    gpu_slices: int
    compute_slices: int
    memory_mib: int


class Placement(NamedTuple):
    """nvmlGpuInstanceInfo_t. `profile_id` is the number in `nvidia-smi mig -lgip`, without an NVML constant."""

    profile_id: int
    start: int
    size: int


def _ratio(percent: int) -> float | None:
    """`None` if there is none."""
    return percent / 100 if percent <= 100 else None


class Library:
    """The library at `path`, or where the loader finds it. Any thread may use it. A process has only one."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path or SONAME
        self._loaded = False
        self._functions: dict[str, Callable[..., int]] = {}

    def open(self) -> None:
        """Load what is not loaded yet, and initialize NVML. Raises `LibraryError`."""
        if not self._loaded:
            try:
                pynvml.nvmlLib = CDLL(
                    self._path
                )  # otherwise pynvml would load the library that the loader finds by its name
            except OSError as error:  # absent, not an ELF file, or made for another libc: the loader says which
                code = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
                raise LibraryError(code, word(code), str(error)) from error
            self._loaded = True
        try:
            self._initialise()
        except RefusedError as refused:
            raise LibraryError(refused.code, word(refused.code), str(refused)) from refused

    def close(self) -> None:
        try:
            self.ask("nvmlShutdown")
        except RefusedError:
            pass  # it was closed because it had lost its driver

    def _initialise(self) -> None:
        try:
            self.ask("nvmlInitWithFlags", 0)
        except RefusedError as refused:
            if refused.code != pynvml.NVML_ERROR_NOT_FOUND:
                raise
            # nvml.h: "Don't fail nvmlInit() when no GPUs are found"
            self.ask("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)

    # --- the driver ---

    def driver_version(self) -> str:
        return self._text("nvmlSystemGetDriverVersion")

    def nvml_version(self) -> str:
        return self._text("nvmlSystemGetNVMLVersion")

    def cuda_version(self) -> str:
        version = c_int()
        self.ask("nvmlSystemGetCudaDriverVersion_v2", byref(version))  # 12040 is 12.4
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def count(self) -> int:
        count = c_uint()
        self.ask("nvmlDeviceGetCount_v2", byref(count))
        return count.value

    # --- what a device is ---

    def handle(self, index: int) -> Handle:
        handle = pynvml.c_nvmlDevice_t()
        self.ask("nvmlDeviceGetHandleByIndex_v2", index, byref(handle))
        return Handle(handle)

    def uuid(self, device: Handle) -> str:
        return self._text("nvmlDeviceGetUUID", device)

    def minor(self, device: Handle) -> int:
        return self.ask_number("nvmlDeviceGetMinorNumber", device)

    def pci_bus_id(self, device: Handle) -> str:
        info = pynvml.nvmlPciInfo_t()
        self.ask("nvmlDeviceGetPciInfo_v3", device, byref(info))
        try:
            bus_id: str = info.busId  # pynvml decodes it
        except UnicodeDecodeError:
            raise RefusedError("nvmlDeviceGetPciInfo_v3", pynvml.NVML_ERROR_UNKNOWN) from None
        return bus_id

    def model(self, device: Handle) -> str:
        return self._text("nvmlDeviceGetName", device)

    def vbios_version(self, device: Handle) -> str:
        return self._text("nvmlDeviceGetVbiosVersion", device)

    def compute_capability(self, device: Handle) -> str:
        major, minor = c_int(), c_int()
        self.ask("nvmlDeviceGetCudaComputeCapability", device, byref(major), byref(minor))
        return f"{major.value}.{minor.value}"

    def mig_enabled(self, device: Handle) -> bool:
        """Return whether the GPU is partitioned now, without pending changes."""
        current, pending = c_uint(), c_uint()
        self.ask("nvmlDeviceGetMigMode", device, byref(current), byref(pending))
        return bool(current.value == pynvml.NVML_DEVICE_MIG_ENABLE)

    def max_mig_devices(self, device: Handle) -> int:
        return self.ask_number("nvmlDeviceGetMaxMigDeviceCount", device)

    def mig_handle(self, device: Handle, slot: int) -> Handle:
        handle = pynvml.c_nvmlDevice_t()
        self.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, slot, byref(handle))
        return Handle(handle)

    def gpu_instance_id(self, instance: Handle) -> int:
        return self.ask_number("nvmlDeviceGetGpuInstanceId", instance)

    def compute_instance_id(self, instance: Handle) -> int:
        return self.ask_number("nvmlDeviceGetComputeInstanceId", instance)

    def attributes(self, instance: Handle) -> Attributes:
        info = pynvml.c_nvmlDeviceAttributes()
        self.ask("nvmlDeviceGetAttributes_v2", instance, byref(info))
        return Attributes(info.gpuInstanceSliceCount, info.computeInstanceSliceCount, info.memorySizeMB)

    def placement(self, device: Handle, gpu_instance_id: int) -> Placement:
        """Return the GPU instance. NVML refuses without the right to read instances of others (nvml.h, MIG monitor)."""
        instance, info = pynvml.c_nvmlGpuInstance_t(), pynvml.c_nvmlGpuInstanceInfo_t()
        self.ask("nvmlDeviceGetGpuInstanceById", device, gpu_instance_id, byref(instance))
        self.ask("nvmlGpuInstanceGetInfo", instance, byref(info))
        return Placement(info.profileId, info.placement.start, info.placement.size)

    # --- what a device measures ---

    def memory(self, device: Handle) -> DeviceMemory | None:
        """Return `None` if the total is 0: some drivers of unified memory answer so, others refuse (NVIDIA Jetson)."""
        info = pynvml.c_nvmlMemory_v2_t(pynvml.nvmlMemory_v2)
        self.ask("nvmlDeviceGetMemoryInfo_v2", device, byref(info))
        return DeviceMemory(info.total, info.used, info.free, info.reserved) if info.total else None

    def memory_v1(self, device: Handle) -> DeviceMemory | None:
        """Drivers before 510: `used` includes the memory that the driver reserves."""
        info = pynvml.c_nvmlMemory_t()
        self.ask("nvmlDeviceGetMemoryInfo", device, byref(info))
        return DeviceMemory(info.total, info.used, info.free) if info.total else None

    def utilization_ratios(self, device: Handle) -> tuple[float | None, float | None]:
        info = pynvml.c_nvmlUtilization_t()
        self.ask("nvmlDeviceGetUtilizationRates", device, byref(info))
        return _ratio(info.gpu), _ratio(info.memory)

    def encoder_ratio(self, device: Handle) -> float | None:
        percent, period = c_uint(), c_uint()
        self.ask("nvmlDeviceGetEncoderUtilization", device, byref(percent), byref(period))
        return _ratio(percent.value)

    def decoder_ratio(self, device: Handle) -> float | None:
        percent, period = c_uint(), c_uint()
        self.ask("nvmlDeviceGetDecoderUtilization", device, byref(percent), byref(period))
        return _ratio(percent.value)

    def temperature(self, device: Handle) -> float:
        info = pynvml.c_nvmlTemperature_v1_t(pynvml.nvmlTemperature_v1)
        self.ask("nvmlDeviceGetTemperatureV", device, byref(info))
        return float(info.temperature)

    def temperature_v1(self, device: Handle) -> float:
        """The deprecated call: before driver 565 the only one, removed in CUDA 14."""
        celsius = c_uint()
        self.ask("nvmlDeviceGetTemperature", device, pynvml.NVML_TEMPERATURE_GPU, byref(celsius))
        return float(celsius.value)

    def power_watts(self, device: Handle) -> float:
        return self.ask_number("nvmlDeviceGetPowerUsage", device) / 1000

    def power_limit_watts(self, device: Handle) -> float:
        return self.ask_number("nvmlDeviceGetEnforcedPowerLimit", device) / 1000

    def energy_joules(self, device: Handle) -> float:
        millijoules = c_ulonglong()
        self.ask("nvmlDeviceGetTotalEnergyConsumption", device, byref(millijoules))
        return millijoules.value / 1000

    # --- calls ---

    def function(self, call: str) -> Callable[..., int]:
        """Return the function of this name. Raises `RefusedError` if an older library lacks it.

        It has no prototype: integers are passed as C's int, and longer values must be wrapped.
        """
        try:
            self._functions[call] = pynvml._nvmlGetFunctionPointer(call)
        except pynvml.NVMLError as error:
            raise RefusedError(call, error.value) from None
        return self._functions[call]

    def has(self, call: str) -> bool:
        try:
            self.function(call)
        except RefusedError:
            return False
        return True

    def ask(self, call: str, *arguments: object) -> None:
        """Make a call that this class has no method for. Raises `RefusedError`."""
        function = self._functions.get(call) or self.function(call)
        code = function(*arguments)
        if code:
            raise RefusedError(call, code)

    def ask_number(self, call: str, device: Handle) -> int:
        number = c_uint()
        self.ask(call, device, byref(number))
        return number.value

    def _text(self, call: str, *device: Handle) -> str:
        text = create_string_buffer(TEXT_BYTES)
        self.ask(call, *device, text, TEXT_BYTES)
        try:
            return text.value.decode()
        except UnicodeDecodeError:
            raise RefusedError(call, pynvml.NVML_ERROR_UNKNOWN) from None
