"""Reads the processes on a device, and their time on its engines: NVML's lists, and each process once.

`Lists` reads each list in one call, into an array that is kept. pynvml's wrappers call twice, race between the two
calls, and treat an idle GPU as an error. One thread at a time uses it. Some drivers report more rows than they write,
and rows of garbage (nvtop#110). So `Lists` clears the array before each call, and `Sampler` drops impossible samples.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref, c_ubyte, c_uint, c_ulonglong, memset
from struct import Struct
from typing import Any, NamedTuple

import pynvml

from gpumap.agent.nvml_worker.calls import NvmlCalls
from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError
from gpumap.model.readings import DeviceMemory, GpuProcess, ProcessSample

SILENCE_SECONDS = 60.0
SAMPLING_SECONDS = 1.2
"""A little more than the driver's time between two samples: 1/6 s to 1 s (nvml.h, nvmlUtilization_t)."""
KEPT_SECONDS = 10.0
"""A little less than the driver keeps samples: 72 of them, at most six a second (kernel,
NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL)."""
FULL_RATIO = 0.9
"""Part of an interval: an earlier reading is an early one."""
PID_MAX = 1 << 22
"""No kernel has a larger PID (include/linux/threads.h, PID_MAX_LIMIT)."""
SLOTS = 256
TRIES = 4

NO_ID = 0xFFFF_FFFF  # nvml.h, nvmlProcessInfo_t: "0xFFFFFFFF otherwise"
NOT_TOLD: int = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value


def _layout(structure: Any) -> Struct:
    """For arrays of structures of plain numbers: unpacking rows is cheaper than reading each field with ctypes."""
    return Struct("@" + "".join(kind._type_ for _, kind in structure._fields_))


ROW_V1 = Struct("@IQ")  # nvmlProcessInfo_v1_t: PID and memory. Not in nvidia-ml-py, whose drivers have newer ones
ROW_V2 = _layout(pynvml.c_nvmlProcessInfo_v2_t)  # also of _v3
ROW_535 = Struct(ROW_V2.format + "Q")  # of drivers 535.43 to 535.98, see `_row_of_v3`
SAMPLE = _layout(pynvml.c_nvmlProcessUtilizationSample_t)
LARGEST_ROW_BYTES = 32


class ProcessRow(NamedTuple):
    """A row of a process list. The ids are `None` on whole GPUs, and if the driver does not report them."""

    pid: int
    used_memory_bytes: int | None
    gpu_instance_id: int | None
    compute_instance_id: int | None


class RawList(NamedTuple):
    """A process list as NVML wrote it. Equal bytes mean equal rows, so the rows need not be decoded to compare."""

    data: bytes
    row: Struct

    @property
    def is_garbage(self) -> bool:
        """Whether a row has a PID that no process can have."""
        return any(not 0 < fields[0] <= PID_MAX for fields in self.row.iter_unpack(self.data))

    def rows(self) -> list[ProcessRow]:
        """Return it without rows that the driver counted, but did not write."""
        return [_process_row(*fields[:4]) for fields in self.row.iter_unpack(self.data) if any(fields[:2])]


SampleRow = tuple[int, ...]
"""A process's time on the engines: PID, the driver's time in microseconds since 1970, and in percent SM, memory
controller, encoder, decoder."""


class Lists:
    """Reads the lists of GPUs, one thread at a time. Raises `RefusedError`."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._functions: dict[str, tuple[str, Callable[..., int], Struct]] = {}
        self._processes_array, self._samples_array = _Array(), _Array()

    def compute(self, device: Handle) -> RawList:
        return self._processes("nvmlDeviceGetComputeRunningProcesses", device)

    def graphics(self, device: Handle) -> RawList:
        return self._processes("nvmlDeviceGetGraphicsRunningProcesses", device)

    def mps(self, device: Handle) -> RawList:
        return self._processes("nvmlDeviceGetMPSComputeRunningProcesses", device)

    def samples(self, device: Handle, since_us: int) -> list[SampleRow]:
        """Return the samples newer than `since_us`, as the driver reports them. Some may be garbage."""
        name = "nvmlDeviceGetProcessUtilization"
        ask, since = self._library.function(name), c_ulonglong(since_us)
        try:
            data = self._samples_array.fill(name, lambda rows, count: ask(device, rows, count, since), SAMPLE)
        except RefusedError as refused:
            if refused.code == pynvml.NVML_ERROR_NOT_FOUND:  # the answer of an idle GPU (nvml-wrapper#56)
                return []
            raise
        return list(SAMPLE.iter_unpack(data))

    def _processes(self, base: str, device: Handle) -> RawList:
        if base not in self._functions:
            self._functions[base] = self._newest(base)
        name, function, row = self._functions[base]
        return RawList(self._processes_array.fill(name, lambda rows, count: function(device, count, rows), row), row)

    def _newest(self, base: str) -> tuple[str, Callable[..., int], Struct]:
        for suffix, row in (("_v3", self._row_of_v3()), ("_v2", ROW_V2), ("", ROW_V1)):
            if self._library.has(base + suffix):
                return base + suffix, self._library.function(base + suffix), row
        raise RefusedError(base, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def _row_of_v3(self) -> Struct:
        """Drivers 535.43 to 535.98 wrote longer rows: they have one of the two symbols, but not the other.

        This is nvitop's rule (api/libnvml.py; its issues 75, 76, 79, 88). NVIDIA reverted the change with 535.104.05.
        """
        window = self._library.has("nvmlDeviceGetConfComputeMemSizeInfo")
        return ROW_535 if window and not self._library.has("nvmlDeviceGetRunningProcessDetailList") else ROW_V2


class _Array:
    """Room for the rows of one kind of call. It grows if the driver needs more."""

    def __init__(self) -> None:
        self._count = c_uint()
        self._make_room(SLOTS)

    def fill(self, name: str, ask: Callable[[Any, Any], int], row: Struct) -> bytes:
        """Return the rows that a call wrote. Raises `RefusedError`."""
        for _ in range(TRIES):
            memset(
                self._rows, 0, len(self._rows)
            )  # a row that the driver counts, but does not write, must not be an older one
            self._count.value = self._slots
            code = ask(self._rows, byref(self._count))
            if code == 0:
                return bytes(self._view[: min(self._count.value, self._slots) * row.size])
            if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                raise RefusedError(name, code)
            self._make_room(max(self._count.value, self._slots) * 2)
        raise RefusedError(name, pynvml.NVML_ERROR_INSUFFICIENT_SIZE)

    def _make_room(self, slots: int) -> None:
        # Slots of the longest row that exists: a driver with longer rows than expected cannot write past the end.
        self._slots = min(slots, 1 << 16)
        self._rows = (c_ubyte * (self._slots * LARGEST_ROW_BYTES))()
        self._view = memoryview(self._rows).cast("B")


def _process_row(pid: int, used: int, gpu_instance: int = NO_ID, compute_instance: int = NO_ID) -> ProcessRow:
    return ProcessRow(
        pid,
        None if used == NOT_TOLD else used,
        None if gpu_instance == NO_ID else gpu_instance,
        None if compute_instance == NO_ID else compute_instance,
    )


class Row(NamedTuple):
    """A row, and the type of its list: M (MPS client), C (compute) or G (graphics)."""

    kind: str
    process: ProcessRow


def read_lists(
    calls: NvmlCalls, lists: Lists, device: Handle, on: str = "gpu"
) -> tuple[tuple[str, RawList | None], ...] | None:
    """The three lists of a device. `None` if one is refused: then its processes are unknown, because another list may
    lack them.

    A driver or a device that never supported graphics or MPS has no such processes.
    """
    found: list[tuple[str, RawList | None]] = []
    for kind, ask in (("M", lists.mps), ("C", lists.compute), ("G", lists.graphics)):
        listed = calls.ask(ask, device, on=on)
        if listed is None and (kind == "C" or not calls.never_supported(ask, on)):
            return None
        found.append((kind, listed))
    return tuple(found)


def read_rows(calls: NvmlCalls, lists: Lists, device: Handle, on: str = "gpu") -> list[Row] | None:
    """Return their rows."""
    found = read_lists(calls, lists, device, on)
    return None if found is None else _rows(found)


def _rows(found: Iterable[tuple[str, RawList | None]]) -> list[Row]:
    return [Row(kind, process) for kind, listed in found if listed is not None for process in listed.rows()]


class ProcessesOfGpu:
    """The processes of a GPU without partitions: the same tuple while its lists stay the same.

    A GPU that has never reported its memory shares that of the machine (unified memory). Some of their drivers write
    rows of garbage: PID 0, PIDs that no process can have (NVIDIA Jetson Orin). The processes are then unknown: such a
    list is no evidence that a holder is idle.
    """

    def __init__(self) -> None:
        self._lists: tuple[tuple[str, RawList | None], ...] = ()
        self._most: int | None = None
        self._merged: tuple[GpuProcess, ...] = ()

    def read(
        self, calls: NvmlCalls, lists: Lists, device: Handle, memory: DeviceMemory | None
    ) -> tuple[GpuProcess, ...] | None:
        found = read_lists(calls, lists, device)
        if found is None:
            return None
        most = memory.total_bytes if memory else self._most
        if most is None:
            if any(listed.is_garbage for _, listed in found if listed is not None):
                return None
            most = machine_memory_bytes()
        if found != self._lists or most != self._most:
            self._lists, self._most, self._merged = found, most, merge(_rows(found), most)
        return self._merged


def machine_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def merge(rows: Iterable[Row], most: int | None) -> tuple[GpuProcess, ...]:
    """Return each PID once, sorted.

    Each list reports the whole memory of a PID, so a PID in several lists counts with the largest, not the sum. More
    than `most`, the memory of the GPU or machine, is garbage and becomes unknown.
    """
    by_pid: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_pid[row.process.pid].append(row)
    return tuple(
        GpuProcess(
            pid,
            max((used for row in mine if (used := _possible(row.process, most)) is not None), default=None),
            "+".join(dict.fromkeys(row.kind for row in mine)),
        )
        for pid, mine in sorted(by_pid.items())
    )


def _possible(process: ProcessRow, most: int | None) -> int | None:
    used = process.used_memory_bytes
    return None if used is None or (most is not None and used > most) else used


class Sampled(NamedTuple):
    """The `samples`, `sampled_seconds` and `unsampled` of a reading (`GpuReading`)."""

    samples: tuple[ProcessSample, ...] | None
    seconds: float | None
    unsampled: tuple[int, ...] = ()


class _Rows(NamedTuple):
    """Return the driver's new possible rows, and the PIDs that have only impossible ones."""

    taken: list[SampleRow]
    unsampled: tuple[int, ...]


class Sampler:
    """One GPU's process samples. Those of a full reading are since the last full one; any other reading's are of the
    interval.

    A reading is full if it is not much too early. The first one is full. The driver drops samples after
    `KEPT_SECONDS`: if the interval is longer, `keep` takes them in between. `clock` is monotonic. `wall_clock` returns
    microseconds since 1970, like the driver's time stamps. After that clock was set back, old samples look new: the
    service drops them (`SampleRing`).
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._full_at: float | None = None
        self._taken_at: float | None = None
        """Time of the last samples that count once: by a full reading, or by `keep`."""
        self._kept: list[Sampled] = []
        """Taken since the last full reading."""
        self._newest_us = 0
        """The driver's times of the last samples, which were then:"""
        self._newest_at = 0.0
        self._busy = False
        self._heard = clock()

    def read(self, calls: NvmlCalls, lists: Lists, device: Handle, interval_seconds: float, busy: bool) -> Sampled:
        """Return the mean of each process over them. No samples, if the GPU reports none; that is not an empty list."""
        self._busy = busy
        now = self._clock()
        window = max(interval_seconds, SAMPLING_SECONDS)
        if self._full_at is None or now - self._full_at >= interval_seconds * FULL_RATIO:
            sampled = _joined([*self._kept, self._take(calls, lists, device, now, window)])
            self._full_at = now
            self._kept.clear()
            return sampled
        if interval_seconds > KEPT_SECONDS:
            self.keep(calls, lists, device)
        # An early reading, after an allocation by the kubelet, also covers the interval. Otherwise a process without a
        # sample since the last reading would look idle.
        rows = self._ask(calls, lists, device, now, window)
        return Sampled(None, None) if rows is None else Sampled(_means(rows.taken), 0.0, rows.unsampled)

    def keep(self, calls: NvmlCalls, lists: Lists, device: Handle) -> None:
        """Take samples for the next full reading."""
        now = self._clock()
        if self._taken_at is not None and now - self._taken_at >= SAMPLING_SECONDS:
            self._kept.append(self._take(calls, lists, device, now, 0.0))

    def _take(self, calls: NvmlCalls, lists: Lists, device: Handle, now: float, first_seconds: float) -> Sampled:
        """Return the samples since the last ones."""
        seconds = first_seconds if self._taken_at is None else now - self._taken_at
        rows = self._ask(calls, lists, device, now, max(seconds, SAMPLING_SECONDS))
        self._taken_at = now
        if rows is None:
            return Sampled(None, None)
        if rows.taken:
            self._newest_us, self._newest_at = max([row[1] for row in rows.taken]), now
        return Sampled(_means(rows.taken), round(seconds, 3), rows.unsampled)

    def _ask(self, calls: NvmlCalls, lists: Lists, device: Handle, now: float, window: float) -> _Rows | None:
        since = self._since(now, window, busy=self._busy)
        rows = calls.ask(lists.samples, device, since)
        if rows is None:
            return None
        new = [row for row in rows if row[1] > (since or self._newest_us)]
        taken = self._plausible(new)
        if taken:
            self._heard = now
        return _Rows(taken, tuple(sorted({row[0] for row in new} - {row[0] for row in taken})))

    def _plausible(self, rows: Iterable[SampleRow]) -> list[SampleRow]:
        """Return the samples that are not of the future and not above 100 %. The two clocks may differ by less than a
        sample."""
        until = self._wall_clock() + int(SAMPLING_SECONDS * 1e6)
        return [row for row in rows if row[1] <= until and max(row[2:]) <= 100]

    def _since(self, now: float, window: float, *, busy: bool) -> int:
        wall = self._wall_clock()
        if not busy:
            self._heard = now
        elif now - self._heard > SILENCE_SECONDS:
            return 0  # the driver's clock and this one differ: ask for all samples
        of_window = wall - int(window * 1e6)
        since = self._newest_us
        if self._taken_at is not None:
            # If no samples were taken since then, all but the latest were already reported.
            since += int(max(self._taken_at - self._newest_at - SAMPLING_SECONDS, 0.0) * 1e6)
        if not 0 < self._newest_us <= since <= wall:  # the first time, or the wall clock was set back
            return of_window
        return min(since, of_window)


def _means(rows: Iterable[SampleRow]) -> tuple[ProcessSample, ...]:
    sums: dict[int, list[int]] = {}
    for pid, _, sm, controller, encoder, decoder in rows:
        of_pid = sums.setdefault(pid, [0, 0, 0, 0, 0])
        of_pid[0] += 1
        of_pid[1] += sm
        of_pid[2] += controller
        of_pid[3] += encoder
        of_pid[4] += decoder
    return tuple([_mean(pid, *found) for pid, found in sorted(sums.items())])


def _mean(pid: int, rows: int, sm: int, controller: int, encoder: int, decoder: int) -> ProcessSample:
    """Sum up percents over a number of rows and return ratios."""
    whole = 100 * rows
    return ProcessSample(pid, sm / whole, controller / whole, encoder / whole, decoder / whole)


def _joined(parts: Sequence[Sampled]) -> Sampled:
    """Return the means over the time of the known parts."""
    if len(parts) == 1:
        return parts[0]
    known = [(part.samples, part.seconds) for part in parts if part.samples is not None and part.seconds]
    if not known:
        return parts[-1]
    total = sum(seconds for _, seconds in known)
    ratios: dict[int, list[float]] = {}
    for found, seconds in known:
        for pid, *of_part in found:
            sums = ratios.setdefault(pid, [0.0] * len(of_part))
            ratios[pid] = [one + ratio * seconds / total for one, ratio in zip(sums, of_part, strict=True)]
    unsampled = {pid for part in parts for pid in part.unsampled}
    samples = [ProcessSample(pid, *sums) for pid, sums in sorted(ratios.items()) if pid not in unsampled]
    return Sampled(tuple(samples), round(total, 3), tuple(sorted(unsampled)))
