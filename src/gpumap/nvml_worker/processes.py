"""Which processes are on a device, and their time on its engines: NVML's rows, each process once."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpumap.model import GpuProcess, ProcessSample
from gpumap.nvml_worker.asking import Asking
from gpumap.nvml_worker.library import Handle
from gpumap.nvml_worker.lists import Lists, ProcessRow, SampleRow

SILENCE_SECONDS = 60.0


class Row(NamedTuple):
    """A row, and the list it stands in: M (MPS client), C (compute) or G (graphics)."""

    kind: str
    process: ProcessRow


def read_rows(asking: Asking, lists: Lists, device: Handle, on: str = "gpu") -> list[Row] | None:
    """The three lists of a device. `None` where the compute list is refused; the others cost only themselves."""
    compute = asking.ask(lists.compute, device, on=on)
    if compute is None:
        return None
    graphics = asking.ask(lists.graphics, device, on=on) or []
    mps = asking.ask(lists.mps, device, on=on) or []
    by_kind = (("M", mps), ("C", compute), ("G", graphics))
    return [Row(kind, process) for kind, processes in by_kind for process in processes]


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
    """One GPU's process samples: those since the last asking, so that none is counted twice."""

    def __init__(self) -> None:
        self._last_seen_us = 0
        self._heard = time.monotonic()

    def read(
        self, asking: Asking, lists: Lists, device: Handle, interval_seconds: float, busy: bool
    ) -> tuple[ProcessSample, ...] | None:
        """The mean of each process since the last reading, or of the interval; `None` where the GPU keeps none."""
        since = self._since(interval_seconds, busy)
        rows = asking.ask(lists.samples, device, since)
        if rows is None:
            return None
        if rows:
            self._heard = time.monotonic()
            self._last_seen_us = max(row.timestamp_us for row in rows)
        return tuple(_mean(pid, mine) for pid, mine in _by_pid(rows).items())

    def _since(self, interval_seconds: float, busy: bool) -> int:
        now = time.time_ns() // 1000
        if not busy:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > SILENCE_SECONDS:
            return 0  # the driver's clock and ours have parted: ask for all that it has
        if not 0 < self._last_seen_us <= now:  # the first time, or the wall clock was set back
            return now - int(interval_seconds * 1e6)
        return self._last_seen_us


def _by_pid(rows: Iterable[SampleRow]) -> dict[int, list[SampleRow]]:
    by_pid: dict[int, list[SampleRow]] = defaultdict(list)
    for row in sorted(rows):
        by_pid[row.pid].append(row)
    return by_pid


def _mean(pid: int, rows: Sequence[SampleRow]) -> ProcessSample:
    def ratio(percents: Iterable[int]) -> float:
        return min(sum(percents) / len(rows) / 100, 1.0)

    return ProcessSample(
        pid,
        sm_ratio=ratio(row.sm for row in rows),
        memory_controller_ratio=ratio(row.memory_controller for row in rows),
        encoder_ratio=ratio(row.encoder for row in rows),
        decoder_ratio=ratio(row.decoder for row in rows),
    )
