"""Which processes are on a device, and their time on its engines: NVML's rows, each process once."""

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from gpumap.nvml_worker.asking import Asking
from gpumap.nvml_worker.library import Handle
from gpumap.nvml_worker.lists import Lists, ProcessRow, RawList
from gpumap.readings import GpuProcess, ProcessSample

SILENCE_SECONDS = 60.0
SAMPLING_SECONDS = 1.2
"""A little more than a driver lets pass from one sample to the next: 1/6 s to 1 s (nvml.h, nvmlUtilization_t)."""


class Row(NamedTuple):
    """A row, and the list it stands in: M (MPS client), C (compute) or G (graphics)."""

    kind: str
    process: ProcessRow


def read_lists(
    asking: Asking, lists: Lists, device: Handle, on: str = "gpu"
) -> tuple[tuple[str, RawList | None], ...] | None:
    """The three lists of a device. `None` where the compute list is refused; the others cost only themselves."""
    compute = asking.ask(lists.compute, device, on=on)
    if compute is None:
        return None
    graphics = asking.ask(lists.graphics, device, on=on)
    mps = asking.ask(lists.mps, device, on=on)
    return ("M", mps), ("C", compute), ("G", graphics)


def read_rows(asking: Asking, lists: Lists, device: Handle, on: str = "gpu") -> list[Row] | None:
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

    def read(self, asking: Asking, lists: Lists, device: Handle) -> tuple[GpuProcess, ...] | None:
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


class Sampler:
    """One GPU's process samples: those of the interval, or since the last asking where that is longer ago."""

    def __init__(self) -> None:
        self._last_seen_us = 0
        self._heard = time.monotonic()

    def read(
        self, asking: Asking, lists: Lists, device: Handle, interval_seconds: float, busy: bool
    ) -> tuple[ProcessSample, ...] | None:
        """The mean of each process over them; `None` where the GPU keeps none."""
        since = self._since(interval_seconds, busy)
        rows = asking.ask(lists.samples, device, since)
        if rows is None:
            return None
        if rows:
            self._heard = time.monotonic()
            self._last_seen_us = max([row[1] for row in rows])
        sums: dict[int, list[int]] = {}
        for pid, _, sm, controller, encoder, decoder in rows:
            of_pid = sums.setdefault(pid, [0, 0, 0, 0, 0])
            of_pid[0] += 1
            of_pid[1] += sm
            of_pid[2] += controller
            of_pid[3] += encoder
            of_pid[4] += decoder
        return tuple([_mean(pid, *found) for pid, found in sorted(sums.items())])

    def _since(self, interval_seconds: float, busy: bool) -> int:
        now = time.time_ns() // 1000
        if not busy:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > SILENCE_SECONDS:
            return 0  # the driver's clock and ours have parted: ask for all that it has
        of_interval = now - int(max(interval_seconds, SAMPLING_SECONDS) * 1e6)
        if not 0 < self._last_seen_us <= now:  # the first time, or the wall clock was set back
            return of_interval
        # A reading before its time, because the kubelet has allocated, is of the interval too: what has no sample since
        # the last reading would be told as idle.
        return min(self._last_seen_us, of_interval)


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
