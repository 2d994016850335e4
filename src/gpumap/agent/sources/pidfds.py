"""Known processes, each held by a pidfd: while it runs, its entry need not be read again.

A pidfd stays with its process, so a reused PID is never taken for the first process.
"""

import contextlib
import itertools
import math
import os
import resource
import select
from typing import NamedTuple

from gpumap.model.cgroups import OwnCgroup
from gpumap.model.observations import ProcEntry

REREAD_SECONDS = 15.0
"""A process may be moved to another cgroup, or rename itself. In this time, each is read again."""
SHARE_OF_DESCRIPTORS = 0.5
"""The part of descriptors to use; the others are for clients, the kubelet and the worker."""


def raise_limit() -> None:
    """Raise this process's soft limit of open files to the hard limit. Usual soft limits are 1,024 descriptors.

    It stays as it is if the hard limit is above `fs.nr_open`, lowered since the boot: the kernel then refuses every
    change (kernel/sys.c, do_prlimit).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _share() -> int:
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * SHARE_OF_DESCRIPTORS)


class Basis(NamedTuple):
    """What the entry of a running process follows from: gpumap's own cgroup, and two files of the process."""

    own: OwnCgroup
    cgroup: str
    comm: str


class _Held(NamedTuple):
    pidfd: int
    entry: ProcEntry
    basis: Basis | None


class KnownProcesses:
    """Entries of processes that still run. Each needs one file descriptor; without one, the process is not remembered.

    `most` is the maximum: by default half of the descriptors of this process.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = _share() if most is None else most
        self._held: dict[int, _Held] = {}
        """By PID; the first one has not been read again for the longest time."""
        self._poll = select.poll()
        self._asked_at = math.inf
        self._due = 0.0

    def open(self, pid: int) -> int | None:
        """Hold a process before it is read. `None` if that is not possible; ProcessLookupError if it has ended."""
        if len(self._held) >= self._most:
            return None
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (OSError, OverflowError):
            return None

    def keep(self, pidfd: int, entry: ProcEntry, basis: Basis | None) -> None:
        """Remember the entry of the process that `pidfd` holds. `basis` is `None` if it also follows from more."""
        self._held[entry.pid] = _Held(pidfd, entry, basis)
        self._poll.register(pidfd, select.POLLIN)

    def __len__(self) -> int:
        return len(self._held)

    def get(self, pid: int) -> ProcEntry | None:
        """Return a process's entry. Call `drop_ended` first."""
        known = self._held.get(pid)
        return known.entry if known is not None else None

    def drop_ended(self, wanted: frozenset[int]) -> bool:
        """Forget processes that ended or that are no longer wanted. Return whether there were any."""
        try:
            ended = {pidfd for pidfd, _ in self._poll.poll(0)} if self._held else set()
        except OSError:  # poll(2): more descriptors than the limit of open files, which is lower now
            self.close()
            self._most = min(self._most, _share())
            return True
        if not ended and self._held.keys() <= wanted:
            return False
        left = [pid for pid, known in self._held.items() if known.pidfd in ended or pid not in wanted]
        for pid in left:
            self.drop(pid)
        return bool(left)

    def to_reread(self, now: float) -> list[tuple[int, Basis | None]]:
        """Return PIDs to read again, each with its basis: every process once in `REREAD_SECONDS`, evenly spread."""
        passed, self._asked_at = max(now - self._asked_at, 0.0), now
        self._due += len(self._held) * min(passed / REREAD_SECONDS, 1.0)
        count, self._due = int(self._due), self._due % 1
        pids = tuple(itertools.islice(self._held, count))
        for pid in pids:
            self._held[pid] = self._held.pop(pid)
        return [(pid, self._held[pid].basis) for pid in pids]

    def drop(self, pid: int) -> None:
        """Forget a process."""
        pidfd = self._held.pop(pid).pidfd
        self._poll.unregister(pidfd)
        os.close(pidfd)

    def close(self) -> None:
        """Forget all."""
        for pid in tuple(self._held):
            self.drop(pid)
