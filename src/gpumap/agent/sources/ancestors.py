"""Find the pod of a process outside pods by its parents.

Docker in a privileged pod puts its containers at the host's root on cgroup v2, but their parents stay in the pod.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpumap.agent.sources.proc_files import Stat
from gpumap.model.cgroups import OwnCgroup
from gpumap.model.observations import CgroupKind, CgroupMembership

INIT = 1
"""It has no parent, and is in no pod."""
ANCESTORS_MAX = 64
_UNKNOWN = CgroupMembership(CgroupKind.UNKNOWN)


class Lineage(NamedTuple):
    """The ancestors of a process, nearest first, up to the one that is not of the host: its cgroup decides.

    Without such an ancestor, both are empty.
    """

    membership: CgroupMembership | None
    pids: tuple[int, ...]


class Ancestors:
    """Reads the ancestors of each process once: if a parent ends, its children get another one.

    `read` returns `stat` and cgroup of a process. If the tree consists of plain files, a missing parent is of the host.
    """

    def __init__(self, read: Callable[[int, OwnCgroup], tuple[Stat, CgroupMembership]]) -> None:
        self._read = read
        self._lineages: dict[int, tuple[int, OwnCgroup, Lineage]] = {}
        """By PID, with the start time of the process."""

    def membership(self, pid: int, process: Stat, own: OwnCgroup, *, is_real: bool) -> CgroupMembership | None:
        """Return the cgroup of the ancestor that decides; `None` if all are of the host.

        It is `UNKNOWN` if an ancestor cannot be read. The next call then tries again.
        """
        start, own_then, lineage = self._lineages.get(pid, (-1, own, Lineage(_UNKNOWN, ())))
        is_known = lineage.membership is None or lineage.membership.kind is CgroupKind.POD
        if not is_known or (start, own_then) != (process.start, own):
            lineage = self._walk(process, own, is_real=is_real)
            self._lineages[pid] = process.start, own, lineage
        return lineage.membership

    def pids(self, pid: int) -> tuple[int, ...]:
        """Return the ancestors that decided about a process, and those between."""
        return self._lineages[pid][2].pids if pid in self._lineages else ()

    def forget_others(self, pids: frozenset[int]) -> None:
        """Remember only the ancestors of `pids`."""
        self._lineages = {pid: known for pid, known in self._lineages.items() if pid in pids}

    def _walk(self, process: Stat, own: OwnCgroup, *, is_real: bool) -> Lineage:
        pids: list[int] = []
        while process.parent > INIT:
            pids.append(process.parent)
            try:
                parent, membership = self._read(process.parent, own)
            except FileNotFoundError:
                return Lineage(_UNKNOWN, tuple(pids)) if is_real else Lineage(None, ())
            except (OSError, ValueError):
                return Lineage(_UNKNOWN, tuple(pids))
            if parent.start > process.start or len(pids) > ANCESTORS_MAX:  # the first is another process with its PID
                return Lineage(_UNKNOWN, tuple(pids))
            if membership.kind is not CgroupKind.HOST:
                return Lineage(membership, tuple(pids))
            process = parent
        return Lineage(None, ())
