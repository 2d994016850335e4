"""gpumap's own process: its limits of files and threads, and the signals that it gets.

gRPC crashes or hangs if it cannot open files and start threads. A limit that is too low at the start ends the process.
One that is reached later is no reason to end: a source reports it. Signal handlers never raise into running code.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable

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
        raise FatalError(f"{_threads_sentence(started)}: gpumap needs at least {THREADS}")


def raise_limit() -> None:
    """Raise this process's soft limit of open files to the hard limit. Usual soft limits are 1,024 descriptors.

    It stays as it is if the hard limit is above `fs.nr_open`, lowered since the boot: the kernel then refuses every
    change (kernel/sys.c, do_prlimit).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def clients_max() -> int:
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
    return Complaint("no_threads", _threads_sentence(started)) if started < threads else None


def _threads_sentence(started: int) -> str:
    return f"only {started} more threads can be started (ulimit -u, or the cgroup's pids.max)"


def _startable(threads: int) -> int:
    """Return how many more threads can be started, up to `threads`. They end at once."""
    with (gate := _thread.allocate_lock()):
        for started in range(threads):
            try:
                _thread.start_new_thread(_pass, (gate,))  # a tenth of the CPU time of threading.Thread
            except RuntimeError:
                return started
    return threads


def _pass(gate: _thread.LockType) -> None:
    with gate:
        pass


def stop_by_signal() -> asyncio.Event:
    """Return an event that SIGTERM, SIGINT and SIGHUP set from now on. A second one ends the process at once, even if
    the event loop is busy. SIGUSR1 has no effect."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    numbers = [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]

    def first(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            loop.call_soon_threadsafe(stop.set)

    for number in numbers:
        signal.signal(number, first)
    release_by_signal(lambda: None)
    return stop


def release_by_signal(release: Callable[[], None]) -> None:
    """Call `release` on each SIGUSR1 from now on."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, release)
