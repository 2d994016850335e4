"""Known processes, each held by a pidfd: while it runs, its entry need not be read again.

A pidfd stays with its process, so a reused PID is never taken for the first process.
"""

import os
import resource
import select

from gpumap.model.observations import ProcEntry

REREAD_SECONDS = 15.0
"""A process may be moved to another cgroup: it is read again after this time."""
SHARE_OF_DESCRIPTORS = 0.5
"""The part of descriptors to use; the others are for clients, the kubelet and the worker."""


class KnownProcesses:
    """Entries of processes that still run. Each needs one file descriptor; without one, the process is not remembered.

    `most` is the maximum: by default half of the descriptors of this process.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * SHARE_OF_DESCRIPTORS) if most is None else most
        self._entries: dict[int, tuple[int, float, ProcEntry]] = {}
        self._poll = select.poll()
        self._reread_at = float("inf")

    def open(self, pid: int) -> int | None:
        """Hold a process before it is read. `None` if that is not possible; ProcessLookupError if it has ended."""
        if len(self._entries) >= self._most:
            return None
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (OSError, OverflowError):
            return None

    def keep(self, pidfd: int, entry: ProcEntry, now: float) -> None:
        """Remember the entry of the process that `pidfd` holds."""
        self._entries[entry.pid] = (pidfd, now + REREAD_SECONDS, entry)
        self._reread_at = min(self._reread_at, now + REREAD_SECONDS)
        self._poll.register(pidfd, select.POLLIN)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, pid: int) -> ProcEntry | None:
        """Return a process's entry. Call `drop_ended` first."""
        known = self._entries.get(pid)
        return known[2] if known is not None else None

    def drop_ended(self, wanted: frozenset[int], now: float) -> bool:
        """Forget processes that ended, that are no longer wanted, or that must be read again.

        Return whether there were any.
        """
        ended = {pidfd for pidfd, _ in self._poll.poll(0)} if self._entries else set()
        if not ended and self._entries.keys() <= wanted and now <= self._reread_at:
            return False
        entries = self._entries.items()
        left = [pid for pid, known in entries if known[0] in ended or pid not in wanted or known[1] < now]
        for pid in left:
            self._drop(pid)
        self._reread_at = min((known[1] for known in self._entries.values()), default=float("inf"))
        return bool(left)

    def close(self) -> None:
        """Forget all."""
        for pid in list(self._entries):
            self._drop(pid)

    def _drop(self, pid: int) -> None:
        pidfd, _, _ = self._entries.pop(pid)
        self._poll.unregister(pidfd)
        os.close(pidfd)
