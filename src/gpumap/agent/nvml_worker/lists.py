"""NVML's lists of processes and of their time on the engines, asked in one call each into an array that is kept.

pynvml's own wrappers ask twice, race between the two calls, and take an idle GPU for an error.
One thread at a time asks a `Lists`. Raises `RefusedError`.
"""

from collections.abc import Callable
from ctypes import byref, c_ubyte, c_uint, c_ulonglong
from struct import Struct
from typing import Any, NamedTuple

import pynvml

from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError

SLOTS = 256
TRIES = 4

NO_ID = 0xFFFF_FFFF  # nvml.h, nvmlProcessInfo_t: "0xFFFFFFFF otherwise"
NOT_TOLD: int = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value


def _layout(structure: Any) -> Struct:
    """Of an array of structures of plain numbers: unpacking rows costs less than asking ctypes for each field."""
    return Struct("@" + "".join(kind._type_ for _, kind in structure._fields_))


ROW_V1 = Struct("@IQ")  # nvmlProcessInfo_v1_t: PID and memory; not in nvidia-ml-py, whose drivers have newer ones
ROW_V2 = _layout(pynvml.c_nvmlProcessInfo_v2_t)  # also _v3's
ROW_535 = Struct(ROW_V2.format + "Q")  # of drivers 535.43 to 535.98, see `_row_of_v3`
SAMPLE = _layout(pynvml.c_nvmlProcessUtilizationSample_t)
LARGEST_ROW_BYTES = 32


class ProcessRow(NamedTuple):
    """A row of a process list. The ids are `None` on whole GPUs, and where the driver keeps them back."""

    pid: int
    used_memory_bytes: int | None
    gpu_instance_id: int | None
    compute_instance_id: int | None


class RawList(NamedTuple):
    """A process list as NVML wrote it. Equal ones say the same, so that rows need not be made to know it."""

    data: bytes
    row: Struct

    def rows(self) -> list[ProcessRow]:
        return [_process_row(*fields[:4]) for fields in self.row.iter_unpack(self.data)]


SampleRow = tuple[int, ...]
"""A process's time on the engines: PID, the driver's time in microseconds since 1970, and in percent SM, memory
controller, encoder, decoder."""


class Lists:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._functions: dict[str, tuple[str, Callable[..., int], Struct]] = {}
        self._count = c_uint()
        self._make_room(SLOTS)

    def compute(self, device: Handle) -> RawList:
        return self._processes("nvmlDeviceGetComputeRunningProcesses", device)

    def graphics(self, device: Handle) -> RawList:
        return self._processes("nvmlDeviceGetGraphicsRunningProcesses", device)

    def mps(self, device: Handle) -> RawList:
        return self._processes("nvmlDeviceGetMPSComputeRunningProcesses", device)

    def samples(self, device: Handle, since_us: int) -> list[SampleRow]:
        """The samples newer than `since_us`."""
        name = "nvmlDeviceGetProcessUtilization"
        ask, since = self._library.function(name), c_ulonglong(since_us)
        try:
            data = self._data(name, lambda: ask(device, self._array, byref(self._count), since), SAMPLE)
        except RefusedError as refused:
            if refused.code == pynvml.NVML_ERROR_NOT_FOUND:  # how an idle GPU answers (nvml-wrapper#56)
                return []
            raise
        return list(SAMPLE.iter_unpack(data))

    def _processes(self, base: str, device: Handle) -> RawList:
        if base not in self._functions:
            self._functions[base] = self._newest(base)
        name, function, row = self._functions[base]
        return RawList(self._data(name, lambda: function(device, byref(self._count), self._array), row), row)

    def _newest(self, base: str) -> tuple[str, Callable[..., int], Struct]:
        for suffix, row in (("_v3", self._row_of_v3()), ("_v2", ROW_V2), ("", ROW_V1)):
            if self._library.has(base + suffix):
                return base + suffix, self._library.function(base + suffix), row
        raise RefusedError(base, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def _row_of_v3(self) -> Struct:
        """Drivers 535.43 to 535.98 wrote longer rows: they have the one symbol and not yet the other.

        nvitop's rule (api/libnvml.py; its issues 75, 76, 79, 88); NVIDIA took the change back with 535.104.05.
        """
        window = self._library.has("nvmlDeviceGetConfComputeMemSizeInfo")
        return ROW_535 if window and not self._library.has("nvmlDeviceGetRunningProcessDetailList") else ROW_V2

    def _data(self, name: str, ask: Callable[[], int], row: Struct) -> bytes:
        for _ in range(TRIES):
            self._count.value = self._slots
            code = ask()
            if code == 0:
                return bytes(self._view[: min(self._count.value, self._slots) * row.size])
            if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                raise RefusedError(name, code)
            self._make_room(max(self._count.value, self._slots) * 2)
        raise RefusedError(name, pynvml.NVML_ERROR_INSUFFICIENT_SIZE)

    def _make_room(self, slots: int) -> None:
        # Slots of the longest row there is: a driver whose rows are longer than we think cannot write past the end.
        self._slots = min(slots, 1 << 16)
        self._array = (c_ubyte * (self._slots * LARGEST_ROW_BYTES))()
        self._view = memoryview(self._array).cast("B")


def _process_row(pid: int, used: int, gpu_instance: int = NO_ID, compute_instance: int = NO_ID) -> ProcessRow:
    return ProcessRow(
        pid,
        None if used == NOT_TOLD else used,
        None if gpu_instance == NO_ID else gpu_instance,
        None if compute_instance == NO_ID else compute_instance,
    )
