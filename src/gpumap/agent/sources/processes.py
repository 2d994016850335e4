"""Files of single processes, and known processes: while a pidfd holds one that runs, its entry need not be read again.

A pidfd stays with its process, so a reused PID is never taken for the first process. A process tree may consist of
plain files.
"""

import contextlib
import errno
import itertools
import math
import os
import resource
import select
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpumap.model.cgroups import OwnCgroup
from gpumap.model.observations import ProcEntry

FILE_BYTES_MAX = 1 << 16
"""The kernel writes at most a page for each hierarchy of cgroups (kernel/cgroup/cgroup.c: proc_cgroup_show)."""
REREAD_SECONDS = 15.0
"""A process may be moved to another cgroup, or rename itself. In this time, each is read again."""
SHARE_OF_DESCRIPTORS = 0.5
"""The part of descriptors to use; the others are for clients, the kubelet and the worker."""


class Stat(NamedTuple):
    comm: str
    is_ending: bool
    parent: int
    start: int


@contextlib.contextmanager
def open_folder(path: Path, folder: int | None = None) -> Iterator[int]:
    """Open a directory, below `folder` if given. It stays that of its process, also if the PID is reused."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        yield directory
    finally:
        os.close(directory)


def read_text(path: str, folder: int | None = None, bytes_max: int = FILE_BYTES_MAX) -> str:
    """Return the text of a file below `folder`. Raises OSError, also for a file that is too large."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)  # a pipe in a plain tree does not block a read
    try:
        data = b""
        while chunk := os.read(file, bytes_max):
            data += chunk
            if len(data) > bytes_max:
                raise OSError(errno.EFBIG, f"larger than {bytes_max >> 10} KiB", path)
    finally:
        os.close(file)
    return data.decode(errors="replace")


def parse_stat(line: str) -> Stat:
    """Return fields 2, 3, 4 and 22 of /proc/PID/stat. The name, in brackets, may itself contain brackets."""
    name, _, values = line.rpartition(")")
    fields = values.split()
    if len(fields) < 20:
        raise ValueError("its stat has too few fields")
    return Stat(name.partition("(")[2], is_ending=fields[0] in ("Z", "X"), parent=int(fields[1]), start=int(fields[19]))


def _share() -> int:
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * SHARE_OF_DESCRIPTORS)


class Basis(NamedTuple):
    """What the entry of a running process follows from: gpumap's own cgroup, and two files of the process."""

    own_cgroup: OwnCgroup
    cgroup: str
    comm: str


class _Known(NamedTuple):
    pidfd: int
    entry: ProcEntry
    basis: Basis | None


class KnownProcesses:
    """Entries of processes that still run. Each needs one file descriptor; without one, the process is not remembered.

    `processes_max` is by default half of the descriptors of this process.
    """

    def __init__(self, processes_max: int | None = None) -> None:
        self._processes_max = _share() if processes_max is None else processes_max
        self._processes: dict[int, _Known] = {}
        """By PID; the first one has not been read again for the longest time."""
        self._poll = select.poll()
        self._asked_at = math.inf
        self._due = 0.0

    def open(self, pid: int) -> int | None:
        """Hold a process before it is read. `None` if that is not possible; ProcessLookupError if it has ended."""
        if len(self._processes) >= self._processes_max:
            return None
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (OSError, OverflowError):
            return None

    def keep(self, pidfd: int, entry: ProcEntry, basis: Basis | None) -> None:
        """Remember the entry of the process that `pidfd` holds. `basis` is `None` if it also follows from more."""
        self._processes[entry.pid] = _Known(pidfd, entry, basis)
        self._poll.register(pidfd, select.POLLIN)

    def __len__(self) -> int:
        return len(self._processes)

    def get(self, pid: int) -> ProcEntry | None:
        """Return a process's entry. Call `drop_ended` first."""
        known = self._processes.get(pid)
        return known.entry if known is not None else None

    def drop_ended(self, pids: frozenset[int]) -> bool:
        """Forget processes that ended or are not in `pids`. Return whether there were any."""
        try:
            ended = {pidfd for pidfd, _ in self._poll.poll(0)} if self._processes else set()
        except OSError:  # poll(2): more descriptors than the limit of open files, which is lower now
            self.close()
            self._processes_max = min(self._processes_max, _share())
            return True
        if not ended and self._processes.keys() <= pids:
            return False
        dropped = [pid for pid, known in self._processes.items() if known.pidfd in ended or pid not in pids]
        for pid in dropped:
            self.drop(pid)
        return bool(dropped)

    def next_to_read(self, monotonic: float) -> list[tuple[int, Basis | None]]:
        """Return PIDs to read again, each with its basis: every process once in `REREAD_SECONDS`, evenly spread."""
        passed, self._asked_at = max(monotonic - self._asked_at, 0.0), monotonic
        self._due += len(self._processes) * min(passed / REREAD_SECONDS, 1.0)
        count, self._due = int(self._due), self._due % 1
        pids = tuple(itertools.islice(self._processes, count))
        for pid in pids:
            self._processes[pid] = self._processes.pop(pid)
        return [(pid, self._processes[pid].basis) for pid in pids]

    def drop(self, pid: int) -> None:
        """Forget a process."""
        pidfd = self._processes.pop(pid).pidfd
        self._poll.unregister(pidfd)
        os.close(pidfd)

    def close(self) -> None:
        """Forget all."""
        for pid in tuple(self._processes):
            self.drop(pid)
