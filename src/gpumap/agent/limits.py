"""Checks whether this process can open files and start threads: gRPC crashes or hangs if it cannot.

A limit that is too low at the start ends it. One that is reached later is no reason to end: a source reports it.
"""

from __future__ import annotations

import _thread
import os
import resource

from gpumap.model.errors import FatalError
from gpumap.model.observations import Complaint

DESCRIPTORS = 64
OWN_DESCRIPTORS = 26
"""gpumap has about 20 open files, and more at times. `sources.processes` has half of all files."""
THREADS = 40
"""gpumap has 14 threads, and its NVML worker 5: more while a GPU hangs, and on a machine with more than 4 CPUs."""
GRPC_DESCRIPTORS, GRPC_THREADS = 16, 20
"""For a channel. gRPC starts a thread for each CPU, but at least 4 and at most 16, and 3 others."""
WORKER_DESCRIPTORS, WORKER_THREADS = 16, 8
"""For an NVML worker: its pipes, its threads, and a thread that waits for its end."""


def check_limits() -> None:
    """Raise FatalError if this process cannot have as many open files and threads as gpumap needs."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < DESCRIPTORS:
        raise FatalError(f"the limit of open files is {files} (ulimit -n): gpumap needs at least {DESCRIPTORS}")
    started = _startable(THREADS)
    if started < THREADS:
        raise FatalError(f"{_few_threads(started)}: gpumap needs at least {THREADS}")


def most_clients() -> int:
    """Return for how many clients this process has open files: half of all files, without its own."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, files // 2 - OWN_DESCRIPTORS)


def lack(descriptors: int, threads: int) -> Complaint | None:
    """Return what this process lacks now to open so many more files and to start so many more threads, if anything."""
    opened: list[int] = []
    try:
        for _ in range(descriptors):
            opened.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401 -- those that were opened must be closed
    except OSError as error:
        return Complaint("no_descriptors", f"only {len(opened)} more files can be opened: {error.strerror}")
    finally:
        for descriptor in opened:
            os.close(descriptor)
    started = _startable(threads)
    return Complaint("no_threads", _few_threads(started)) if started < threads else None


def _few_threads(started: int) -> str:
    return f"only {started} more threads can be started (ulimit -u, or the cgroup's pids.max)"


def _startable(most: int) -> int:
    """Return how many more threads can be started, up to `most`. They end at once."""
    with (gate := _thread.allocate_lock()):
        for started in range(most):
            try:
                _thread.start_new_thread(_pass, (gate,))  # a tenth of the CPU time of threading.Thread
            except RuntimeError:
                return started
    return most


def _pass(gate: _thread.LockType) -> None:
    with gate:
        pass
