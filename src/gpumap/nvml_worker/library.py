"""The NVIDIA library through pynvml: loads and initialises it, and asks single questions, answered in plain values.

Every refusal is a `RefusedError` with NVML's code. What one costs is not decided here, and nothing is remembered but
what is loaded. The only module that imports pynvml.
"""

import importlib
from ctypes import CDLL
from types import ModuleType
from typing import Any, NamedTuple, NewType

from gpumap.model import DeviceMemory
from gpumap.nvml_worker.codes import FUNCTION_NOT_FOUND, LIBRARY_NOT_FOUND, NOT_FOUND, UNKNOWN, word

Handle = NewType("Handle", object)
SONAME = "libnvidia-ml.so.1"

# Of nvidia-ml-py >= 12.570. The PyPI projects `pynvml` <= 11 and `nvidia-ml-py3` install another module of this name.
_NEEDED = ("nvmlLib", "NVMLLibraryMismatchError", "nvmlMemory_v2", "nvmlDeviceGetTemperatureV", "nvmlInitWithFlags")
_NO_GPUS = 1  # nvml.h, NVML_INIT_FLAG_NO_GPUS: "Don't fail nvmlInit() when no GPUs are found"
_MEMORY_TEMPERATURE = 82  # nvml.h, NVML_FI_DEV_MEMORY_TEMP
_VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


class RefusedError(Exception):
    """NVML answered a call with a code other than success. (pynvml's NVMLError cannot be hashed.)"""

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


class Library:
    """The library at `path`, by default where the loader finds it. Its questions are safe to ask from any thread."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path or SONAME
        self._pynvml: Any = None
        self.loaded: CDLL | None = None

    def open(self) -> None:
        """Load what is not loaded yet, and initialise NVML. Raises `LibraryError`."""
        if self._pynvml is None:
            self._pynvml = _pynvml()
        if self.loaded is None:
            try:
                self.loaded = CDLL(self._path)
            except OSError as error:  # absent, not an ELF file, or made for another libc: the loader says which
                raise LibraryError(LIBRARY_NOT_FOUND, word(LIBRARY_NOT_FOUND), str(error)) from error
            self._pynvml.nvmlLib = self.loaded
        try:
            self._initialise()
        except RefusedError as refused:
            raise LibraryError(refused.code, word(refused.code), str(refused)) from refused

    def close(self) -> None:
        try:
            self._said("nvmlShutdown")
        except RefusedError:
            pass  # it had lost its driver: that is why it is closed

    def _initialise(self) -> None:
        try:
            self._said("nvmlInitWithFlags", 0)
        except RefusedError as refused:
            if refused.code != NOT_FOUND:
                raise
            self._said("nvmlInitWithFlags", _NO_GPUS)

    # --- the driver ---

    def driver_version(self) -> str:
        return str(self._said("nvmlSystemGetDriverVersion"))

    def nvml_version(self) -> str:
        return str(self._said("nvmlSystemGetNVMLVersion"))

    def cuda_version(self) -> str:
        version = int(self._said("nvmlSystemGetCudaDriverVersion_v2"))  # 12040 is 12.4
        return f"{version // 1000}.{version % 1000 // 10}"

    def count(self) -> int:
        return int(self._said("nvmlDeviceGetCount"))

    # --- what a device is ---

    def handle(self, index: int) -> Handle:
        return Handle(self._said("nvmlDeviceGetHandleByIndex", index))

    def uuid(self, device: Handle) -> str:
        return str(self._said("nvmlDeviceGetUUID", device))

    def minor(self, device: Handle) -> int:
        return int(self._said("nvmlDeviceGetMinorNumber", device))

    def pci_bus_id(self, device: Handle) -> str:
        return str(self._said("nvmlDeviceGetPciInfo", device).busId)

    def model(self, device: Handle) -> str:
        return str(self._said("nvmlDeviceGetName", device))

    def mig_enabled(self, device: Handle) -> bool:
        """Whether it is partitioned now, whatever is pending."""
        return int(self._said("nvmlDeviceGetMigMode", device)[0]) == 1

    def max_mig_devices(self, device: Handle) -> int:
        return int(self._said("nvmlDeviceGetMaxMigDeviceCount", device))

    def mig_handle(self, device: Handle, slot: int) -> Handle:
        return Handle(self._said("nvmlDeviceGetMigDeviceHandleByIndex", device, slot))

    def gpu_instance_id(self, instance: Handle) -> int:
        return int(self._said("nvmlDeviceGetGpuInstanceId", instance))

    def compute_instance_id(self, instance: Handle) -> int:
        return int(self._said("nvmlDeviceGetComputeInstanceId", instance))

    def attributes(self, instance: Handle) -> Attributes:
        said = self._said("nvmlDeviceGetAttributes", instance)
        return Attributes(said.gpuInstanceSliceCount, said.computeInstanceSliceCount, said.memorySizeMB)

    # --- what a device measures ---

    def memory(self, device: Handle) -> DeviceMemory:
        said = self._said("nvmlDeviceGetMemoryInfo", device, self._pynvml.nvmlMemory_v2)
        return DeviceMemory(said.total, said.used, said.free, said.reserved)

    def memory_v1(self, device: Handle) -> DeviceMemory:
        """Of drivers before 510: `used` includes what the driver reserves."""
        said = self._said("nvmlDeviceGetMemoryInfo", device)
        return DeviceMemory(said.total, said.used, said.free)

    def utilization_ratios(self, device: Handle) -> tuple[float, float]:
        said = self._said("nvmlDeviceGetUtilizationRates", device)
        return said.gpu / 100, said.memory / 100

    def encoder_ratio(self, device: Handle) -> float:
        return int(self._said("nvmlDeviceGetEncoderUtilization", device)[0]) / 100

    def decoder_ratio(self, device: Handle) -> float:
        return int(self._said("nvmlDeviceGetDecoderUtilization", device)[0]) / 100

    def temperature(self, device: Handle) -> float:
        return float(self._said("nvmlDeviceGetTemperatureV", device, 0))

    def temperature_v1(self, device: Handle) -> float:
        """The deprecated call: before driver 565 the only one, from CUDA 14 on gone."""
        return float(self._said("nvmlDeviceGetTemperature", device, 0))

    def memory_temperature(self, device: Handle) -> float:
        return self._field(device, _MEMORY_TEMPERATURE)

    def power_watts(self, device: Handle) -> float:
        return int(self._said("nvmlDeviceGetPowerUsage", device)) / 1000

    def power_limit_watts(self, device: Handle) -> float:
        return int(self._said("nvmlDeviceGetEnforcedPowerLimit", device)) / 1000

    def energy_joules(self, device: Handle) -> float:
        return int(self._said("nvmlDeviceGetTotalEnergyConsumption", device)) / 1000

    def _field(self, device: Handle, field: int) -> float:
        # The call succeeds although a value failed: each has its own code (nvml.h, nvmlFieldValue_t).
        value = self._said("nvmlDeviceGetFieldValues", device, [field])[0]
        if value.nvmlReturn != 0:
            # Drivers that do not know a field say "invalid argument": for us, not supported.
            raise RefusedError(f"nvmlDeviceGetFieldValues({field})", 3 if value.nvmlReturn == 2 else value.nvmlReturn)
        return float(getattr(value.value, _VALUE_FIELDS[value.valueType]))

    def _said(self, call: str, *arguments: object) -> Any:
        try:
            return getattr(self._pynvml, call)(*arguments)
        except self._pynvml.NVMLError as error:
            code = int(error.value)
        except self._pynvml.NVMLLibraryMismatchError:  # no NVMLError: pynvml.throwOnVersionMismatch
            code = FUNCTION_NOT_FOUND
        except UnicodeDecodeError:
            code = UNKNOWN
        raise RefusedError(call, code)


def _pynvml() -> ModuleType:
    try:
        module = importlib.import_module("pynvml")
    except ImportError as error:
        raise LibraryError(0, "pynvml_missing", f"nvidia-ml-py is not installed: {error}") from error
    if not all(hasattr(module, name) for name in _NEEDED):
        where = getattr(module, "__file__", None)
        detail = f"{where} is not nvidia-ml-py's: remove the packages pynvml and nvidia-ml-py3, or a file of that name"
        raise LibraryError(0, "wrong_pynvml", detail)
    return module
