"""The NVIDIA library: loads and initialises it, and asks single questions, answered in plain values.

Every refusal is a `RefusedError` with NVML's code. What one costs is not decided here, and nothing is remembered but
what is loaded.
"""

from collections.abc import Callable
from ctypes import CDLL, byref, c_int, c_uint, c_ulonglong, c_void_p, create_string_buffer
from typing import NamedTuple, NewType

from gpumap.agent.nvml_worker.codes import FUNCTION_NOT_FOUND, LIBRARY_NOT_FOUND, NOT_FOUND, UNKNOWN, word
from gpumap.agent.nvml_worker.structs import (
    MEMORY_V2,
    PROTOTYPES,
    TEMPERATURE_V1,
    TEXT_BYTES,
    DeviceAttributes,
    GpuInstanceInfo,
    Memory,
    MemoryV2,
    PciInfo,
    Temperature,
    Utilization,
)
from gpumap.model.readings import DeviceMemory

Handle = NewType("Handle", int)
"""nvmlDevice_t, a pointer."""
SONAME = "libnvidia-ml.so.1"

_NO_GPUS = 1  # nvml.h, NVML_INIT_FLAG_NO_GPUS: "Don't fail nvmlInit() when no GPUs are found"


class RefusedError(Exception):
    """NVML answered a call with a code other than success."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} said {code} ({word(code)})")
        self.call = call
        self.code = code


class LibraryError(Exception):
    """The library cannot be loaded or initialised. `code` is NVML's, 0 where NVML was not reached."""

    def __init__(self, code: int, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.reason = reason


class Attributes(NamedTuple):
    """nvmlDeviceAttributes_t of a MIG device, as far as its profile's name needs it."""

    gpu_slices: int
    compute_slices: int
    memory_mib: int


class Placement(NamedTuple):
    """nvmlGpuInstanceInfo_t. `profile_id` is the number that `nvidia-smi mig -lgip` shows, of no NVML constant."""

    profile_id: int
    start: int
    size: int


class Library:
    """The library at `path`, by default where the loader finds it. Its questions are safe to ask from any thread."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path or SONAME
        self._functions: dict[str, Callable[..., int]] = {}
        self.loaded: CDLL | None = None

    def open(self) -> None:
        """Load what is not loaded yet, and initialise NVML. Raises `LibraryError`."""
        if self.loaded is None:
            try:
                self.loaded = CDLL(self._path)
            except OSError as error:  # absent, not an ELF file, or made for another libc: the loader says which
                raise LibraryError(LIBRARY_NOT_FOUND, word(LIBRARY_NOT_FOUND), str(error)) from error
            self._functions = dict(_found(self.loaded))
        try:
            self._initialise()
        except RefusedError as refused:
            raise LibraryError(refused.code, word(refused.code), str(refused)) from refused

    def close(self) -> None:
        try:
            self.ask("nvmlShutdown")
        except RefusedError:
            pass  # it had lost its driver: that is why it is closed

    def _initialise(self) -> None:
        try:
            self.ask("nvmlInitWithFlags", 0)
        except RefusedError as refused:
            if refused.code != NOT_FOUND:
                raise
            self.ask("nvmlInitWithFlags", _NO_GPUS)

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
        handle = c_void_p()
        self.ask("nvmlDeviceGetHandleByIndex_v2", index, byref(handle))
        return Handle(handle.value or 0)

    def uuid(self, device: Handle) -> str:
        return self._text("nvmlDeviceGetUUID", device)

    def minor(self, device: Handle) -> int:
        return self.ask_number("nvmlDeviceGetMinorNumber", device)

    def pci_bus_id(self, device: Handle) -> str:
        info = PciInfo()
        self.ask("nvmlDeviceGetPciInfo_v3", device, byref(info))
        return _decoded("nvmlDeviceGetPciInfo_v3", info.busId)

    def model(self, device: Handle) -> str:
        return self._text("nvmlDeviceGetName", device)

    def vbios_version(self, device: Handle) -> str:
        return self._text("nvmlDeviceGetVbiosVersion", device)

    def compute_capability(self, device: Handle) -> str:
        major, minor = c_int(), c_int()
        self.ask("nvmlDeviceGetCudaComputeCapability", device, byref(major), byref(minor))
        return f"{major.value}.{minor.value}"

    def mig_enabled(self, device: Handle) -> bool:
        """Whether it is partitioned now, whatever is pending."""
        current, pending = c_uint(), c_uint()
        self.ask("nvmlDeviceGetMigMode", device, byref(current), byref(pending))
        return current.value == 1

    def max_mig_devices(self, device: Handle) -> int:
        return self.ask_number("nvmlDeviceGetMaxMigDeviceCount", device)

    def mig_handle(self, device: Handle, slot: int) -> Handle:
        handle = c_void_p()
        self.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, slot, byref(handle))
        return Handle(handle.value or 0)

    def gpu_instance_id(self, instance: Handle) -> int:
        return self.ask_number("nvmlDeviceGetGpuInstanceId", instance)

    def compute_instance_id(self, instance: Handle) -> int:
        return self.ask_number("nvmlDeviceGetComputeInstanceId", instance)

    def attributes(self, instance: Handle) -> Attributes:
        said = DeviceAttributes()
        self.ask("nvmlDeviceGetAttributes_v2", instance, byref(said))
        return Attributes(said.gpuInstanceSliceCount, said.computeInstanceSliceCount, said.memorySizeMB)

    def placement(self, device: Handle, gpu_instance_id: int) -> Placement:
        """Of a GPU instance: not permitted to who may not look at others' instances (nvml.h, MIG monitor)."""
        instance, said = c_void_p(), GpuInstanceInfo()
        self.ask("nvmlDeviceGetGpuInstanceById", device, gpu_instance_id, byref(instance))
        self.ask("nvmlGpuInstanceGetInfo", instance, byref(said))
        return Placement(said.profileId, said.placement.start, said.placement.size)

    # --- what a device measures ---

    def memory(self, device: Handle) -> DeviceMemory:
        said = MemoryV2(MEMORY_V2)
        self.ask("nvmlDeviceGetMemoryInfo_v2", device, byref(said))
        return DeviceMemory(said.total, said.used, said.free, said.reserved)

    def memory_v1(self, device: Handle) -> DeviceMemory:
        """Of drivers before 510: `used` includes what the driver reserves."""
        said = Memory()
        self.ask("nvmlDeviceGetMemoryInfo", device, byref(said))
        return DeviceMemory(said.total, said.used, said.free)

    def utilization_ratios(self, device: Handle) -> tuple[float, float]:
        said = Utilization()
        self.ask("nvmlDeviceGetUtilizationRates", device, byref(said))
        return said.gpu / 100, said.memory / 100

    def encoder_ratio(self, device: Handle) -> float:
        percent, period = c_uint(), c_uint()
        self.ask("nvmlDeviceGetEncoderUtilization", device, byref(percent), byref(period))
        return percent.value / 100

    def decoder_ratio(self, device: Handle) -> float:
        percent, period = c_uint(), c_uint()
        self.ask("nvmlDeviceGetDecoderUtilization", device, byref(percent), byref(period))
        return percent.value / 100

    def temperature(self, device: Handle) -> float:
        said = Temperature(TEMPERATURE_V1)
        self.ask("nvmlDeviceGetTemperatureV", device, byref(said))
        return float(said.temperature)

    def temperature_v1(self, device: Handle) -> float:
        """The deprecated call: before driver 565 the only one, from CUDA 14 on gone."""
        celsius = c_uint()
        self.ask("nvmlDeviceGetTemperature", device, 0, byref(celsius))
        return float(celsius.value)

    def power_watts(self, device: Handle) -> float:
        return self.ask_number("nvmlDeviceGetPowerUsage", device) / 1000

    def power_limit_watts(self, device: Handle) -> float:
        return self.ask_number("nvmlDeviceGetEnforcedPowerLimit", device) / 1000

    def energy_joules(self, device: Handle) -> float:
        millijoules = c_ulonglong()
        self.ask("nvmlDeviceGetTotalEnergyConsumption", device, byref(millijoules))
        return millijoules.value / 1000

    # --- asking ---

    def ask(self, call: str, *arguments: object) -> None:
        """For what this class has no question of. Raises `RefusedError`."""
        function = self._functions.get(call)
        code = FUNCTION_NOT_FOUND if function is None else function(*arguments)
        if code:
            raise RefusedError(call, code)

    def ask_number(self, call: str, device: Handle) -> int:
        number = c_uint()
        self.ask(call, device, byref(number))
        return number.value

    def _text(self, call: str, *device: Handle) -> str:
        text = create_string_buffer(TEXT_BYTES)
        self.ask(call, *device, text, TEXT_BYTES)
        return _decoded(call, text.value)


def _found(library: CDLL) -> list[tuple[str, Callable[..., int]]]:
    """What the library exports of what gpumap calls: an older one lacks some of it."""
    found: list[tuple[str, Callable[..., int]]] = []
    for name, arguments in PROTOTYPES.items():
        try:
            function = library[name]
        except AttributeError:
            continue
        function.argtypes = arguments
        found.append((name, function))
    return found


def _decoded(call: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise RefusedError(call, UNKNOWN) from None
