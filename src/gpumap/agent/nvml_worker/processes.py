"""Reads the processes on a device, and their time on its engines: NVML's lists, and each process once.

`Lists` reads each list in one call, into an array that is kept. pynvml's wrappers call twice, race between the two
calls, and treat an idle GPU as an error. One thread at a time uses it. Some drivers report more rows than they write,
and rows of garbage (nvtop#110). So `Lists` clears the array before each call, and `Sampler` drops impossible samples.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, byref, c_ubyte, c_uint, c_ulonglong, cast
from operator import add
from struct import Struct
from typing import Any, NamedTuple

import pynvml
from msgspec import structs

from gpumap.agent.nvml_worker.calls import NvmlCalls
from gpumap.agent.nvml_worker.library import Handle, Library, PreparedCall, layout
from gpumap.model.readings import SAMPLES_NEW, SAMPLES_OLD, DeviceMemory, GpuProcess, ProcessSample

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
NOT_AVAILABLE: int = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value


ROW_V1 = Struct("@IQ")  # nvmlProcessInfo_v1_t: PID and memory. Not in nvidia-ml-py, whose drivers have newer ones
ROW_V2 = layout(pynvml.c_nvmlProcessInfo_v2_t)  # also of _v3
ROW_535 = Struct(ROW_V2.format + "Q")  # of drivers 535.43 to 535.98, see `_row_of_v3`
SAMPLE = layout(pynvml.c_nvmlProcessUtilizationSample_t)
_SAMPLE_POINTER = POINTER(pynvml.c_nvmlProcessUtilizationInfo_v1_t)
SAMPLE_NEW = layout(pynvml.c_nvmlProcessUtilizationInfo_v1_t)
LARGEST_ROW_BYTES = 40


Memory = tuple[str, int, int | None]
"""The first columns of a `ProcessRow`: type, PID, used memory."""


class ProcessRow(NamedTuple):
    """A row of the list of a type: M (MPS client), C (compute) or G (graphics). Ids are `None` if unknown."""

    kind: str
    pid: int
    used_memory_bytes: int | None
    gpu_instance_id: int | None
    compute_instance_id: int | None


class RawList(NamedTuple):
    """A process list as NVML wrote it. Equal bytes mean equal rows, so the rows need not be decoded to compare."""

    kind: str
    data: bytes
    row: Struct

    @property
    def is_garbage(self) -> bool:
        """Whether a row has a PID that no process can have."""
        return any(not 0 < fields[0] <= PID_MAX for fields in self.row.iter_unpack(self.data))

    def rows(self) -> list[ProcessRow]:
        """Return it without rows that the driver counted, but did not write."""
        rows = []
        for pid, used, *ids in self.row.iter_unpack(self.data):
            if pid or used:
                gpu_instance, compute_instance = [None if id_ == NO_ID else id_ for id_ in ids[:2]] or (None, None)
                used = None if used == NOT_AVAILABLE else used
                rows.append(ProcessRow(self.kind, pid, used, gpu_instance, compute_instance))
        return rows

    def memories(self) -> list[Memory]:
        """Return the first columns of `rows`, which is cheaper."""
        kind = self.kind
        rows = self.row.iter_unpack(self.data)
        return [(kind, row[0], None if row[1] == NOT_AVAILABLE else row[1]) for row in rows if row[0] or row[1]]


SampleRow = tuple[int, ...]
"""A process's time on the engines: PID, the driver's time in microseconds since 1970, and in percent SM, memory
controller, encoder, decoder; by the new call also JPEG and OFA."""

AskSamples = Callable[[int], Iterable[SampleRow] | None]
"""Returns the samples newer than a time in microseconds, some of them garbage; `None` if the driver refuses both calls
(`SAMPLES_OLD`, `SAMPLES_NEW`)."""


class ProcessLists(NamedTuple):
    """The calls for the lists of a device."""

    mps: PreparedCall[RawList]
    compute: PreparedCall[RawList]
    graphics: PreparedCall[RawList]

    def read(self, calls: NvmlCalls) -> tuple[RawList, ...] | None:
        """Return the lists. `None` if one is refused: then its processes are unknown, because another list may lack
        them.

        A driver or a device that never supported graphics or MPS has no such processes.
        """
        lists: list[RawList] = []
        for call in self:
            raw_list = calls.ask(call)
            if raw_list is not None:
                lists.append(raw_list)
            elif call is self.compute or not calls.never_supported(call):
                return None
        return tuple(lists)

    def read_rows(self, calls: NvmlCalls) -> list[ProcessRow] | None:
        """Return their rows."""
        lists = self.read(calls)
        return None if lists is None else [row for raw_list in lists for row in raw_list.rows()]


class Lists:
    """Prepares the calls for lists, which share their memory: one thread at a time makes them."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._processes_array, self._samples_array = _Array(), _Array()

    def prepare(self, device: Handle, subject: str = "gpu") -> ProcessLists:
        return ProcessLists(
            self._prepare("M", "nvmlDeviceGetMPSComputeRunningProcesses", device, subject),
            self._prepare("C", "nvmlDeviceGetComputeRunningProcesses", device, subject),
            self._prepare("G", "nvmlDeviceGetGraphicsRunningProcesses", device, subject),
        )

    def samples(self, calls: NvmlCalls, device: Handle) -> AskSamples:
        array, since, info = self._samples_array, c_ulonglong(), pynvml.c_nvmlProcessesUtilizationInfo_v1_t()
        old_call, new_call = map(self._library.function, (SAMPLES_OLD, SAMPLES_NEW))

        def ask_old(rows: object, count: object) -> int:
            return check(old_call(device, rows, count, since))

        def ask_new(rows: Any, count: object) -> int:
            info.version, info.processSamplesCount = pynvml.ProcessesUtilizationInfo_v1, array.count.value
            info.lastSeenTimeStamp, info.procUtilArray = since, cast(rows, _SAMPLE_POINTER)
            code = new_call(device, byref(info))
            array.count.value = info.processSamplesCount
            return check(code)

        def check(code: int) -> int:
            if code == pynvml.NVML_ERROR_NOT_FOUND:  # the answer of an idle GPU (nvml-wrapper#56)
                array.count.value = code = 0
            return code

        def read_new() -> Iterable[SampleRow]:
            rows = SAMPLE_NEW.iter_unpack(array.written_rows(SAMPLE_NEW))
            return ((pid, timestamp_us, *percents) for timestamp_us, pid, *percents in rows)

        ways: tuple[PreparedCall[Iterable[SampleRow]], ...] = (
            PreparedCall(SAMPLES_OLD, array.fill, (ask_old,), lambda: SAMPLE.iter_unpack(array.written_rows(SAMPLE))),
            PreparedCall(SAMPLES_NEW, array.fill, (ask_new,), read_new),
        )

        def samples(since_us: int) -> Iterable[SampleRow] | None:
            since.value = since_us
            return calls.ask_first(ways)

        return samples

    def _prepare(self, kind: str, base: str, device: Handle, subject: str) -> PreparedCall[RawList]:
        name, row = self._newest(base)
        function, array = self._library.function(name), self._processes_array

        def ask(rows: object, count: object) -> int:
            return function(device, count, rows)

        return PreparedCall(name, array.fill, (ask,), lambda: RawList(kind, array.written_rows(row), row), subject)

    def _newest(self, base: str) -> tuple[str, Struct]:
        for suffix, row in (("_v3", self._row_of_v3()), ("_v2", ROW_V2)):
            if self._library.has(base + suffix):
                return base + suffix, row
        return base, ROW_V1

    def _row_of_v3(self) -> Struct:
        """Drivers 535.43 to 535.98 wrote longer rows: they have one of the two symbols, but not the other.

        This is nvitop's rule (api/libnvml.py; its issues 75, 76, 79, 88). NVIDIA reverted the change with 535.104.05.
        """
        window = self._library.has("nvmlDeviceGetConfComputeMemSizeInfo")
        return ROW_535 if window and not self._library.has("nvmlDeviceGetRunningProcessDetailList") else ROW_V2


class _Array:
    """Room for the rows of one kind of call. It grows if the driver needs more."""

    def __init__(self) -> None:
        self.count = c_uint()
        """Number of rows: of the room before a call, and of the driver's rows after it."""
        self._make_room(SLOTS)

    def fill(self, ask: Callable[[object, object], int]) -> int:
        """Make a call that writes rows, and return its code."""
        for _ in range(TRIES):
            self._view[:] = self._zeros  # a row that the driver counts, but does not write, must not be an older one
            self.count.value = self._slots
            code = ask(self._rows, self._count_pointer)
            if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
            self._make_room(max(self.count.value, self._slots) * 2)
        return code

    def written_rows(self, row: Struct) -> bytes:
        """Return the rows that a call wrote."""
        return self._view[: min(self.count.value, self._slots) * row.size].tobytes()

    def _make_room(self, slots: int) -> None:
        # Slots of the longest row that exists: a driver with longer rows than expected cannot write past the end.
        self._slots = min(slots, 1 << 16)
        self._zeros = bytes(self._slots * LARGEST_ROW_BYTES)
        self._rows = (c_ubyte * len(self._zeros))()
        self._view = memoryview(self._rows).cast("B")
        self._count_pointer = byref(self.count)


class GpuProcesses:
    """The processes of a GPU without partitions: the same tuple while its lists stay the same.

    A GPU that has never reported its memory shares that of the machine (unified memory). Some of their drivers write
    rows of garbage: PID 0, PIDs that no process can have (NVIDIA Jetson Orin). The processes are then unknown: such a
    list is no evidence that a holder is idle.
    """

    def __init__(self) -> None:
        self._lists: tuple[RawList, ...] = ()
        self._bytes_max: int | None = None
        self._merged: tuple[GpuProcess, ...] = ()

    def read(self, calls: NvmlCalls, lists: ProcessLists, memory: DeviceMemory | None) -> tuple[GpuProcess, ...] | None:
        raw_lists = lists.read(calls)
        if raw_lists is None:
            return None
        bytes_max = memory.total_bytes if memory else self._bytes_max
        if bytes_max is None:
            if any(raw_list.is_garbage for raw_list in raw_lists):
                return None
            bytes_max = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # the memory of the machine
        if raw_lists != self._lists or bytes_max != self._bytes_max:
            self._lists, self._bytes_max = raw_lists, bytes_max
            self._merged = merge([row for raw_list in raw_lists for row in raw_list.memories()], bytes_max)
        return self._merged


def merge(rows: Iterable[Memory], bytes_max: int | None) -> tuple[GpuProcess, ...]:
    """Return each PID once, sorted.

    Each list reports the whole memory of a PID, so a PID in several lists counts with the largest, not the sum. More
    than `bytes_max`, the memory of the GPU or machine, is garbage and becomes unknown.
    """
    processes: dict[int, GpuProcess] = {}
    for kind, pid, used in rows:
        if used is not None and bytes_max is not None and used > bytes_max:
            used = None
        if (process := processes.get(pid)) is not None:
            used = max((amount for amount in (process.used_memory_bytes, used) if amount is not None), default=None)
            kind = process.types if kind in process.types else f"{process.types}+{kind}"
        processes[pid] = GpuProcess(pid, used, kind)
    return tuple([processes[pid] for pid in sorted(processes)])


class Sampled(NamedTuple):
    """The `samples`, `sampled_seconds` and `unsampled` of a reading (`GpuReading`), and the newest row's time."""

    samples: tuple[ProcessSample, ...] | None
    seconds: float | None
    unsampled: tuple[int, ...] = ()
    newest_us: int = 0


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
        self._sampled_at = clock()

    def read(self, ask: AskSamples, interval_seconds: float, busy: bool) -> Sampled:
        """Return the mean of each process over them. No samples, if the GPU reports none; that is not an empty list."""
        self._busy = busy
        monotonic = self._clock()
        window = max(interval_seconds, SAMPLING_SECONDS)
        if self._full_at is None or monotonic - self._full_at >= interval_seconds * FULL_RATIO:
            sampled = _joined([*self._kept, self._take(ask, monotonic, window)])
            self._full_at = monotonic
            self._kept.clear()
            return sampled
        if interval_seconds > KEPT_SECONDS:
            self.keep(ask)
        # An early reading, after an allocation by the kubelet, also covers the interval. Otherwise a process without a
        # sample since the last reading would look idle.
        return self._ask_means(ask, monotonic, window, 0.0)

    def keep(self, ask: AskSamples) -> None:
        """Take samples for the next full reading."""
        monotonic = self._clock()
        if self._taken_at is not None and monotonic - self._taken_at >= SAMPLING_SECONDS:
            self._kept.append(self._take(ask, monotonic, 0.0))

    def _take(self, ask: AskSamples, taken_at: float, first_seconds: float) -> Sampled:
        """Return the samples since the last ones."""
        seconds = first_seconds if self._taken_at is None else taken_at - self._taken_at
        sampled = self._ask_means(ask, taken_at, max(seconds, SAMPLING_SECONDS), round(seconds, 3))
        self._taken_at = taken_at
        if sampled.samples:
            self._newest_us, self._newest_at = sampled.newest_us, taken_at
        return sampled

    def _ask_means(self, ask: AskSamples, asked_at: float, window: float, seconds: float) -> Sampled:
        since = self._since(asked_at, window)
        rows = ask(since)
        if rows is None:
            return Sampled(None, None)
        # The two clocks may differ by less than a sample.
        means = _means(rows, since or self._newest_us, self._wall_clock() + int(SAMPLING_SECONDS * 1e6))
        if means.samples:
            self._sampled_at = asked_at
        return means._replace(seconds=seconds)

    def _since(self, asked_at: float, window: float) -> int:
        wall = self._wall_clock()
        if not self._busy:
            self._sampled_at = asked_at
        elif asked_at - self._sampled_at > SILENCE_SECONDS:
            return 0  # the driver's clock and this one differ: ask for all samples
        of_window = wall - int(window * 1e6)
        since = self._newest_us
        if self._taken_at is not None:
            # If no samples were taken since then, all but the latest were already reported.
            since += int(max(self._taken_at - self._newest_at - SAMPLING_SECONDS, 0.0) * 1e6)
        if not 0 < self._newest_us <= since <= wall:  # the first time, or the wall clock was set back
            return of_window
        return min(since, of_window)


def _means(rows: Iterable[SampleRow], since_us: int, until_us: int) -> Sampled:
    """Sum up the rows of each PID. Rows of the future or above 100 % are impossible, and older rows do not count."""
    sums: dict[int, tuple[int, ...]] = {}
    newest_us, impossible = 0, set[int]()
    for pid, timestamp_us, sm, memory, encoder, decoder, *newer_engines in rows:
        if timestamp_us <= since_us:
            continue
        jpeg, ofa = newer_engines or (0, 0)
        if timestamp_us > until_us or max(sm, memory, encoder, decoder, jpeg, ofa) > 100:
            impossible.add(pid)
            continue
        newest_us = max(newest_us, timestamp_us)
        row = 100, sm, memory, encoder, decoder, jpeg, ofa
        sum_of_rows = sums.get(pid)
        sums[pid] = row if sum_of_rows is None else tuple(map(add, sum_of_rows, row))
    samples = [
        ProcessSample(pid, *[percent / total for percent in percents])
        for pid, (total, *percents) in sorted(sums.items())
    ]
    return Sampled(tuple(samples), None, tuple(sorted(impossible - sums.keys())), newest_us)


def _joined(periods: Sequence[Sampled]) -> Sampled:
    """Return the means over the time of the periods with known samples."""
    if len(periods) == 1:
        return periods[0]
    known = [(period.samples, period.seconds) for period in periods if period.samples is not None and period.seconds]
    if not known:
        return periods[-1]
    total = sum(seconds for _, seconds in known)
    ratios: dict[int, list[float]] = {}
    for samples, seconds in known:
        for pid, *engines in map(structs.astuple, samples):
            sums = ratios.setdefault(pid, [0.0] * len(engines))
            ratios[pid] = [mean + ratio * seconds / total for mean, ratio in zip(sums, engines, strict=True)]
    unsampled = {pid for period in periods for pid in period.unsampled}
    means = [ProcessSample(pid, *sums) for pid, sums in sorted(ratios.items()) if pid not in unsampled]
    return Sampled(tuple(means), round(total, 3), tuple(sorted(unsampled)))
