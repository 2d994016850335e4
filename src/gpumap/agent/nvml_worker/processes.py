"""Which processes are on a device, and their time on its engines: NVML's rows, each process once."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpumap.agent.nvml_worker.calls import NvmlCalls
from gpumap.agent.nvml_worker.library import Handle
from gpumap.agent.nvml_worker.lists import Lists, ProcessRow, RawList, SampleRow
from gpumap.model.readings import GpuProcess, ProcessSample

SILENCE_SECONDS = 60.0
SAMPLING_SECONDS = 1.2
"""A little more than a driver lets pass from one sample to the next: 1/6 s to 1 s (nvml.h, nvmlUtilization_t)."""
FULL_RATIO = 0.9
"""Of an interval: what comes earlier is a reading before its time."""


class Row(NamedTuple):
    """A row, and the list it stands in: M (MPS client), C (compute) or G (graphics)."""

    kind: str
    process: ProcessRow


def read_lists(
    asking: NvmlCalls, lists: Lists, device: Handle, on: str = "gpu"
) -> tuple[tuple[str, RawList | None], ...] | None:
    """The three lists of a device. `None` where the compute list is refused; the others cost only themselves."""
    compute = asking.ask(lists.compute, device, on=on)
    if compute is None:
        return None
    graphics = asking.ask(lists.graphics, device, on=on)
    mps = asking.ask(lists.mps, device, on=on)
    return ("M", mps), ("C", compute), ("G", graphics)


def read_rows(asking: NvmlCalls, lists: Lists, device: Handle, on: str = "gpu") -> list[Row] | None:
    """Their rows."""
    found = read_lists(asking, lists, device, on)
    return None if found is None else _rows(found)


def _rows(found: Iterable[tuple[str, RawList | None]]) -> list[Row]:
    return [Row(kind, process) for kind, listed in found if listed is not None for process in listed.rows()]


class ProcessesOfGpu:
    """The processes of a GPU that is not partitioned: the very same tuple while its lists stay the same."""

    def __init__(self) -> None:
        self._lists: tuple[tuple[str, RawList | None], ...] = ()
        self._merged: tuple[GpuProcess, ...] = ()

    def read(self, asking: NvmlCalls, lists: Lists, device: Handle) -> tuple[GpuProcess, ...] | None:
        found = read_lists(asking, lists, device)
        if found is None:
            return None
        if found != self._lists:
            self._lists, self._merged = found, merge(_rows(found))
        return self._merged


def merge(rows: Iterable[Row]) -> tuple[GpuProcess, ...]:
    """Each PID once, sorted. A PID in several lists has one memory, which each tells: the largest, not the sum."""
    by_pid: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_pid[row.process.pid].append(row)
    return tuple(
        GpuProcess(
            pid,
            max((m for row in mine if (m := row.process.used_memory_bytes) is not None), default=None),
            "+".join(dict.fromkeys(row.kind for row in mine)),
        )
        for pid, mine in sorted(by_pid.items())
    )


class Sampled(NamedTuple):
    """A reading's `samples` and `sampled_seconds` (`GpuReading`)."""

    samples: tuple[ProcessSample, ...] | None
    seconds: float | None


class Sampler:
    """One GPU's process samples: a full reading's are those since the last full one, any other's of the interval.

    A reading is full if it is not much before its time, and the first one is. `clock` is monotonic, `wall_clock`
    tells microseconds since 1970.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._full_at: float | None = None
        self._newest_us = 0
        """Of the driver's times, as the last full reading that had samples saw it, which was then:"""
        self._newest_at = 0.0
        self._heard = clock()

    def read(self, asking: NvmlCalls, lists: Lists, device: Handle, interval_seconds: float, busy: bool) -> Sampled:
        """The mean of each process over them; no samples, which is not an empty list, where the GPU keeps none."""
        now = self._clock()
        window = max(interval_seconds, SAMPLING_SECONDS)
        seconds = window if self._full_at is None else now - self._full_at
        full = self._full_at is None or seconds >= interval_seconds * FULL_RATIO
        # A reading before its time, because the kubelet has allocated, is of the interval too: what has no sample since
        # the last reading would be told as idle.
        since = self._since(now, max(seconds, SAMPLING_SECONDS) if full else window, busy=busy)
        rows = asking.ask(lists.samples, device, since)
        if rows:
            self._heard = now
        if full:
            self._full_at = now
            if rows:
                self._newest_us, self._newest_at = max([row[1] for row in rows]), now
        if rows is None:
            return Sampled(None, None)
        return Sampled(_means(rows), round(seconds, 3) if full else 0.0)

    def _since(self, now: float, window: float, *, busy: bool) -> int:
        wall = self._wall_clock()
        if not busy:
            self._heard = now
        elif now - self._heard > SILENCE_SECONDS:
            return 0  # the driver's clock and ours have parted: ask for all that it has
        of_window = wall - int(window * 1e6)
        since = self._newest_us
        if self._full_at is not None:
            # Full readings that had none since then have been told all but what was still on its way.
            since += int(max(self._full_at - self._newest_at - SAMPLING_SECONDS, 0.0) * 1e6)
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
    """Percents, summed up over so many rows, as ratios of at most 1."""
    whole = 100 * rows
    return ProcessSample(
        pid,
        sm / whole if sm < whole else 1.0,
        controller / whole if controller < whole else 1.0,
        encoder / whole if encoder < whole else 1.0,
        decoder / whole if decoder < whole else 1.0,
    )
