"""Loads and initializes the NVIDIA library, and prepares calls that return plain values.

Structures, constants and the table of functions are NVIDIA's (nvidia-ml-py). Its wrappers are not used: each call of a
wrapper makes its arguments and buffers again, and its structures are slow to read. A `PreparedCall` makes them once.
This module does not decide what a refusal affects. It stores only the loaded library.
"""

import contextlib
from collections.abc import Callable
from ctypes import CDLL, byref, c_int, c_ubyte, c_uint, create_string_buffer, sizeof
from functools import partial
from struct import Struct
from typing import Any, Generic, NewType, TypeVar

import pynvml

from gpumap.agent.nvml_worker.wire import MAX_GPUS, word
from gpumap.model.readings import DeviceMemory

T = TypeVar("T")

Handle = NewType("Handle", object)
"""nvmlDevice_t, a pointer."""
SONAME = "libnvidia-ml.so.1"
NOT_AVAILABLE: int = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
TEXT_BYTES = pynvml.NVML_DEVICE_UUID_V2_BUFFER_SIZE
"""Room for every text that gpumap reads: this is the longest."""


def layout(structure: Any) -> Struct:
    """Return the layout of a structure of numbers. To unpack it is cheaper than to read each field with ctypes."""
    fields = Struct("@" + "".join(kind._type_ for _, kind in structure._fields_))
    return Struct(f"{fields.format}{sizeof(structure) - fields.size}x")


_MEMORY, _MEMORY_V2 = layout(pynvml.c_nvmlMemory_t), layout(pynvml.c_nvmlMemory_v2_t)
_UTILIZATION = layout(pynvml.c_nvmlUtilization_t)


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


class PreparedCall(Generic[T]):
    """A call with its arguments, and the reader of its buffers. `function(*arguments)` returns NVML's code.

    One thread at a time makes the call. The buffers are its own and live as long as it does, also if it hangs for ever.
    It is valid as long as the handle in its arguments. `key` names what NVML may support or not.
    """

    __slots__ = ("arguments", "function", "key", "name", "read")

    def __init__(
        self,
        name: str,
        function: Callable[..., int],
        arguments: tuple[object, ...],
        read: Callable[[], T],
        subject: str = "gpu",
    ) -> None:
        self.name = name
        self.function = function
        self.arguments = arguments
        self.read = read
        self.key = key_of(name, subject)

    def once(self) -> T:
        """Make the call. Raises `RefusedError`."""
        code = self.function(*self.arguments)
        if code:
            raise RefusedError(self.name, code)
        return self.read()


def key_of(name: str, subject: str) -> str:
    """Return the key of a call. `subject` separates MIG devices from GPUs, and the parts of a GPU from each other."""
    return f"{subject}: {name}"


class Library:
    """The library at `path`, or where the loader finds it. Any thread may use it. A process has only one."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path or SONAME
        self._loaded = False

    def open(self) -> None:
        """Load what is not loaded yet, and initialize NVML. Raises `LibraryError`."""
        if not self._loaded:
            try:
                # Otherwise pynvml would load the library that the loader finds by its name.
                pynvml.nvmlLib = CDLL(self._path)
            except OSError as error:  # absent, not an ELF file, or made for another libc: the loader says which
                code = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
                raise LibraryError(code, word(code), str(error)) from error
            self._loaded = True
        try:
            self._initialise()
        except RefusedError as refused:
            raise LibraryError(refused.code, word(refused.code), str(refused)) from refused

    def close(self) -> None:
        with contextlib.suppress(RefusedError):  # it is closed because it has lost its driver
            self.ask("nvmlShutdown")

    def _initialise(self) -> None:
        try:
            self.ask("nvmlInitWithFlags", 0)
        except RefusedError as refused:
            if refused.code != pynvml.NVML_ERROR_NOT_FOUND:
                raise
            # nvml.h: "Don't fail nvmlInit() when no GPUs are found"
            self.ask("nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)

    # --- calls ---

    def function(self, name: str) -> Callable[..., int]:
        """Return the function. If an older library lacks it, return one that answers so.

        It has no prototype: integers are passed as C's int, and longer values must be wrapped. It stays valid if NVML
        is initialized again: the library stays loaded.
        """
        try:
            function: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)
        except pynvml.NVMLError as error:
            code: int = error.value
            return lambda *_: code
        return function

    def has(self, name: str) -> bool:
        try:
            pynvml._nvmlGetFunctionPointer(name)
        except pynvml.NVMLError:
            return False
        return True

    def ask(self, name: str, *arguments: object) -> None:
        """Make a call that is not worth preparing. Raises `RefusedError`."""
        code = self.function(name)(*arguments)
        if code:
            raise RefusedError(name, code)

    def number(
        self, name: str, *arguments: object, read: Callable[[int], T | None], kind: Any = c_uint, subject: str = "gpu"
    ) -> PreparedCall[T | None]:
        """Prepare a call with a number of a `kind` as the last parameter. -1 of the kind is no value (nvml.h)."""
        number, nothing = kind(), kind(-1).value

        def value() -> T | None:
            return None if number.value == nothing else read(number.value)

        return PreparedCall(name, self.function(name), (*arguments, byref(number)), value, subject)

    def pair(
        self, name: str, device: Handle, read: Callable[[int, int], T | None], kind: Any = c_uint
    ) -> PreparedCall[T | None]:
        """Prepare a call with two numbers as the last parameters. No value if one of them is -1 of the kind."""
        numbers, nothing = (kind * 2)(), kind(-1).value
        arguments = device, byref(numbers), byref(numbers, sizeof(kind))
        return PreparedCall(
            name, self.function(name), arguments, lambda: None if nothing in numbers else read(*numbers)
        )

    def structure(
        self, name: str, *arguments: object, out: Any, read: Callable[[Any], T], subject: str = "gpu"
    ) -> PreparedCall[T]:
        """Prepare a call with a structure as the last parameter. Before each call it is as it was given: with its
        version, and without values of an earlier answer. Also a call that is refused may have written to it."""
        function, empty = self.function(name), bytes(out)
        view = memoryview((c_ubyte * len(empty)).from_buffer(out)).cast("B")

        def ask(*arguments: object) -> int:
            view[:] = empty
            return function(*arguments)

        return PreparedCall(name, ask, (*arguments, byref(out)), partial(read, out), subject)

    def text(self, name: str, *device: Handle, subject: str = "gpu") -> PreparedCall[str]:
        """Prepare a call that writes a text."""
        text = create_string_buffer(TEXT_BYTES)
        return self._decoded(name, (*device, text, TEXT_BYTES), lambda: text.value, subject)

    def _decoded(
        self, name: str, arguments: tuple[object, ...], text: Callable[[], bytes], subject: str = "gpu"
    ) -> PreparedCall[str]:
        """Prepare a call that answers with a text. One that is not UTF-8 is an unknown error."""

        def read() -> str:
            try:
                return text().decode()
            except UnicodeDecodeError:
                raise RefusedError(name, pynvml.NVML_ERROR_UNKNOWN) from None

        return PreparedCall(name, self.function(name), arguments, read, subject)

    # --- the driver ---

    def driver_version(self) -> str:
        return self.text("nvmlSystemGetDriverVersion").once()

    def nvml_version(self) -> str:
        return self.text("nvmlSystemGetNVMLVersion").once()

    def cuda_version(self) -> str:
        version = self.number("nvmlSystemGetCudaDriverVersion_v2", read=int, kind=c_int).once()  # 12040 is 12.4
        return "" if version is None else f"{version // 1000}.{version % 1000 // 10}"

    def count(self) -> int:
        name = "nvmlDeviceGetCount_v2"
        count = self.number(name, read=int).once()
        if count is None or count > MAX_GPUS:
            raise RefusedError(name, pynvml.NVML_ERROR_UNKNOWN)
        return count

    def handle(self, index: int) -> Handle:
        handle = pynvml.c_nvmlDevice_t()
        self.ask("nvmlDeviceGetHandleByIndex_v2", index, byref(handle))
        return Handle(handle)

    # --- calls on GPUs and MIG devices ---

    def uuid(self, device: Handle, subject: str = "gpu") -> PreparedCall[str]:
        return self.text("nvmlDeviceGetUUID", device, subject=subject)

    def model(self, device: Handle, subject: str = "gpu") -> PreparedCall[str]:
        return self.text("nvmlDeviceGetName", device, subject=subject)

    def pci_bus_id(self, device: Handle) -> PreparedCall[str]:
        info: Any = pynvml.nvmlPciInfo_t()
        start = type(info).busId.offset
        return self._decoded(
            "nvmlDeviceGetPciInfo_v3", (device, byref(info)), lambda: bytes(info)[start:].partition(b"\0")[0]
        )

    def mig_enabled(self, device: Handle) -> PreparedCall[bool | None]:
        """Whether the GPU is partitioned now, without pending changes."""
        return self.pair("nvmlDeviceGetMigMode", device, lambda mode, _: mode == int(pynvml.NVML_DEVICE_MIG_ENABLE))

    def memory(self, device: Handle, subject: str = "gpu") -> tuple[PreparedCall[DeviceMemory | None], ...]:
        """The newest call first. No memory if the total is 0: some drivers of unified memory answer so, others refuse
        (NVIDIA Jetson). No memory either if a part is larger than the total."""

        def known(total: int, used: int, free: int, reserved: int | None = None) -> DeviceMemory | None:
            is_known = 0 < total < NOT_AVAILABLE and max(used, free, reserved or 0) <= total
            return DeviceMemory(total, used, free, reserved) if is_known else None

        def read_v2(info: Any) -> DeviceMemory | None:
            _, total, reserved, free, used = _MEMORY_V2.unpack_from(info)
            return known(total, used, free, reserved)

        def read_v1(info: Any) -> DeviceMemory | None:
            total, free, used = _MEMORY.unpack_from(info)  # before 510, `used` has what the driver reserves
            return known(total, used, free)

        v2, v1 = pynvml.c_nvmlMemory_v2_t(pynvml.nvmlMemory_v2), pynvml.c_nvmlMemory_t()
        return (
            self.structure("nvmlDeviceGetMemoryInfo_v2", device, out=v2, read=read_v2, subject=subject),
            self.structure("nvmlDeviceGetMemoryInfo", device, out=v1, read=read_v1, subject=subject),
        )

    def utilization_ratios(self, device: Handle) -> PreparedCall[tuple[float | None, float | None]]:
        def read(rates: Any) -> tuple[float | None, float | None]:
            gpu, memory = _UTILIZATION.unpack_from(rates)
            return ratio(gpu), ratio(memory)

        return self.structure("nvmlDeviceGetUtilizationRates", device, out=pynvml.c_nvmlUtilization_t(), read=read)


def ratio(percent: int) -> float | None:
    """`None` if there is none."""
    return percent / 100 if percent <= 100 else None
