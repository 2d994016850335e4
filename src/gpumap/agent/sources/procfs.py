"""The /proc entries of GPU processes, and whether PIDs of other containers are visible.

It reads `cgroup` and `stat`, which need no right over the process; never `environ` or `ns/`. `sources/workloads.py`
reads two more files of some. The tree may consist of plain files. What it remembers saves reads: one PID to ask first,
and processes that still run. `sources/ancestors.py` remembers what the parents of a process showed.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from gpumap.agent.sources.ancestors import Ancestors
from gpumap.agent.sources.pidfds import Basis, KnownProcesses
from gpumap.agent.sources.proc_files import Stat, opened, stat, text
from gpumap.agent.sources.workloads import SEARCH_SECONDS, JobIds, WorkloadReader, is_named_by_paths
from gpumap.model import cgroups
from gpumap.model.names import PodUid
from gpumap.model.observations import (
    CgroupKind,
    CgroupMembership,
    Complaint,
    ProcEntry,
    ProcTable,
    SourceAnswer,
    SourceError,
)

SELF = Path("/proc/self")


class ProcfsSource:
    """Reads the tree `root` (`/proc`). `own` is gpumap's own entry, the reference for other paths.

    Without a kubelet (`has_kubelet`), a container is in no pod.
    """

    def __init__(self, root: Path, own: Path = SELF, *, has_kubelet: bool = True) -> None:
        self._root = root
        self._own = own
        self._has_kubelet = has_kubelet
        self.is_real = False
        """Whether the tree is known to be no tree of plain files: then `clock_ticks` reads no file."""
        self.witness: int | None = None
        """The process that showed in the last read that PIDs of other containers are visible."""
        self.job_ids = JobIds(root, self._pids)
        """The Slurm jobs of processes without a job id in their cgroup path."""
        self.ancestors = Ancestors(self._ancestor)
        """The parents of processes outside pods."""
        self.pod_pids: dict[PodUid, int] = {}
        """A process of each pod that `read` was asked about."""
        self._searched_at = -math.inf
        self._has_kthreadd = False
        self._known = KnownProcesses()
        self._held: ProcTable | None = None  # the last table, if every process in it is held by a pidfd
        self._latest_start = 0  # of a process in it
        self._wanted: frozenset[int] = frozenset()  # in the last read
        # By PID: when it was first asked for, if every read since then asked for it.
        self._asked_since: dict[int, int | None] = {}

    def read(
        self, pids: Iterable[int], not_after: int | None, pod_uids: frozenset[PodUid] = frozenset()
    ) -> SourceAnswer[ProcTable]:
        """Read the entries of `pids`, and find out which of the pods have a process.

        A process that started after `not_after` (clock ticks) may have a re-used PID: it counts as unreadable. So does
        one that started after its PID was first asked for: NVML may go on listing a dead process.

        Raises SourceError `unreadable` where the tree itself cannot be read.
        """
        try:
            own = cgroups.own(text(f"{self._own}/cgroup"))
            visible, reason = self._visibility(own)
        except OSError as error:
            raise SourceError("unreadable", f"{error.filename}: {error.strerror}") from error
        wanted = frozenset(pids) if visible else frozenset()
        living = self._living_pods(pod_uids, own) if visible else frozenset()
        changed = self._known.drop_ended(wanted) | self._drop_changed(own)
        if wanted != self._wanted:
            now = self.clock_ticks() if not_after is not None else None
            self._asked_since = {pid: self._asked_since.get(pid) or now for pid in wanted}
            self.ancestors.forget_others(wanted)
            self._wanted = wanted if not_after is not None else frozenset()  # without a clock, the next read notes it
            self._held = None
        if self._held and visible and not changed and (not_after is None or self._latest_start <= not_after):
            return SourceAnswer(replace(self._held, visibility_reason=reason, living_pods=living))
        answer = self._read_all(wanted, own, not_after, visible, reason)
        answer = answer._replace(value=replace(answer.value, living_pods=living, is_machine=self._find_kthreadd()))
        entries = answer.value.entries
        self._held = answer.value if visible and len(self._known) == len(wanted) == len(entries) else None
        self._latest_start = max((entry.start for entry in entries), default=0)
        return answer

    def _find_kthreadd(self) -> bool:
        """Return whether PID 2 is the kernel's `kthreadd`, which only the machine's own PID namespace has."""
        if not self._has_kthreadd:
            with contextlib.suppress(OSError, ValueError):
                self._has_kthreadd = stat(text(f"{self._root}/2/stat")).comm == "kthreadd"
        return self._has_kthreadd

    def _living_pods(self, pod_uids: frozenset[PodUid], own: cgroups.OwnCgroup) -> frozenset[PodUid]:
        """Return the pods with a process. It searches all processes for new ones, but not in each read."""
        self.pod_pids = {uid: pid for uid, pid in self.pod_pids.items() if uid in self._pods_of(pid, own) & pod_uids}
        missing = pod_uids - self.pod_pids.keys()
        if missing and time.monotonic() - self._searched_at >= SEARCH_SECONDS:
            self._searched_at = time.monotonic()
            for pid in self._pids():
                self.pod_pids |= dict.fromkeys(self._pods_of(pid, own) & missing, pid)
        return frozenset(self.pod_pids)

    def _pods_of(self, pid: int, own: cgroups.OwnCgroup) -> frozenset[PodUid]:
        """Return the pod of a process that is not ending; none if it cannot be read."""
        try:
            pods = cgroups.parse(text(f"{self._root}/{pid}/cgroup"), own).pods
        except OSError:
            return frozenset()
        return frozenset(pod.pod_uid for pod in pods[:1])

    def _drop_changed(self, own: cgroups.OwnCgroup) -> bool:
        """Read some held processes again, and drop those that changed. Return whether there were any."""
        changed = [
            pid
            for pid, basis in self._known.to_reread(time.monotonic())
            if basis is None or basis != self._basis(pid, own)
        ]
        for pid in changed:
            self._known.drop(pid)
        return bool(changed)

    def _basis(self, pid: int, own: cgroups.OwnCgroup) -> Basis | None:
        """Read what can change the entry of a process that still runs; `None` if that is not possible."""
        try:
            return Basis(own, text(f"{self._root}/{pid}/cgroup"), text(f"{self._root}/{pid}/comm"))
        except OSError:
            return None

    def _read_all(
        self, wanted: frozenset[int], own: cgroups.OwnCgroup, not_after: int | None, visible: bool, reason: str
    ) -> SourceAnswer[ProcTable]:
        entries: list[ProcEntry] = []
        unreadable: list[int] = []
        complaints: list[Complaint] = []
        passwd = self._own / "root/etc/passwd" if self._is_on_bare_host(own) else None
        workloads = WorkloadReader(self.job_ids, passwd)
        for pid in sorted(wanted):
            try:
                entry = self._known.get(pid) or self._read(pid, own, workloads, is_real=not_after is not None)
            except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
                continue
            except (OSError, ValueError, OverflowError) as error:
                unreadable.append(pid)
                complaints.append(Complaint("unreadable", f"{self._root / str(pid)}: {error}"))
                continue
            latest = (tick for tick in (not_after, self._asked_since[pid]) if tick is not None)
            if all(entry.start <= tick for tick in latest):
                entries.append(entry)
            else:  # it may use the GPU: NVML read it late, or it has a reused PID
                unreadable.append(pid)
        return SourceAnswer(ProcTable(tuple(entries), tuple(unreadable), visible, reason), tuple(complaints))

    def clock_ticks(self) -> int | None:
        """Return the time since boot in clock ticks, the unit of `ProcEntry.start`; `None` for a tree of plain files.

        It uses the clock, not /proc/uptime: lxcfs puts a container's own uptime there.
        """
        if not self.is_real:
            self.is_real = os.path.islink(self._root / "self")
            if not self.is_real:
                return None
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

    def close(self) -> None:
        """Release every process."""
        self._known.close()

    def _read(self, pid: int, own: cgroups.OwnCgroup, workloads: WorkloadReader, *, is_real: bool) -> ProcEntry:
        """Read an entry. A process of a real tree is held, so that the next read can skip it."""
        pidfd = self._known.open(pid) if is_real else None
        kept = False
        try:
            with opened(self._root / str(pid)) as folder:
                now, cgroup = stat(text("stat", folder)), text("cgroup", folder)
                member = path_member = self._membership(now, cgroup, folder, own)
                if path_member.kind is CgroupKind.HOST and self._has_kubelet:
                    member = self.ancestors.membership(pid, now, own, is_real=is_real) or path_member
                work = None if now.is_ending else workloads.read(pid, member.kind, cgroups.paths(cgroup), folder)
            entry = ProcEntry(pid, now.start, now.comm, member, work)
            if not now.is_ending and pidfd is not None:
                is_settled = member is path_member or member.kind is CgroupKind.POD
                basis = Basis(own, cgroup, f"{now.comm}\n")
                self._known.keep(pidfd, entry, basis if is_settled and is_named_by_paths(member.kind, work) else None)
                kept = True
            return entry
        finally:
            if pidfd is not None and not kept:
                os.close(pidfd)

    def _ancestor(self, pid: int, own: cgroups.OwnCgroup) -> tuple[Stat, CgroupMembership]:
        with opened(self._root / str(pid)) as folder:
            now = stat(text("stat", folder))
            return now, self._membership(now, text("cgroup", folder), folder, own)

    def _membership(self, now: Stat, cgroup: str, folder: int, own: cgroups.OwnCgroup) -> CgroupMembership:
        member = cgroups.parse(cgroup, own, has_kubelet=self._has_kubelet)
        return self._of_threads(folder, own) if now.is_ending and member.kind is CgroupKind.HOST else member

    def _of_threads(self, folder: int, own: cgroups.OwnCgroup) -> CgroupMembership:
        """Return the cgroup of a process without a main thread: that of its first thread that runs.

        On cgroup v1 the main thread has left its cgroups. A process without another thread is a zombie, and unknown.
        """
        try:
            with opened(Path("task"), folder) as threads:
                for thread in os.listdir(threads):
                    with contextlib.suppress(OSError, ValueError):
                        if not stat(text(f"{thread}/stat", threads)).is_ending:
                            paths = text(f"{thread}/cgroup", threads)
                            return cgroups.parse(paths, own, has_kubelet=self._has_kubelet)
        except OSError:
            pass
        return CgroupMembership(CgroupKind.UNKNOWN)

    def _visibility(self, own: cgroups.OwnCgroup) -> tuple[bool, str]:
        """Decide from visible processes whether PIDs of other containers are visible (attribution.md)."""
        try:
            named = os.readlink(self._root / "self")
        except FileNotFoundError:
            named = None  # a tree of plain files
        if named is not None and named != str(os.getpid()):
            return False, f"{self._root} is of another PID namespace: its self is {named}, gpumap is {os.getpid()}"
        if self._is_on_bare_host(own):
            return True, "gpumap runs on the bare host"
        for pid in self._candidates():
            try:
                found = text(str(self._root / str(pid) / "cgroup"))
            except OSError:
                continue
            if cgroups.is_outside(found, own) and not self._is_ending(pid):
                self.witness = pid
                return True, f"PID {pid} is outside gpumap's own pod"
        self.witness = None
        return False, f"no process outside gpumap's own pod in {self._root}: set hostPID: true for the pod"

    def _is_on_bare_host(self, own: cgroups.OwnCgroup) -> bool:
        return cgroups.is_bare_host(own) and (self._root / str(os.getpid())).exists()

    def _is_ending(self, pid: int) -> bool:
        """On cgroup v1 a zombie has left its cgroups: its bare `/` does not show that it came from outside."""
        try:
            return stat(text(str(self._root / str(pid) / "stat"))).is_ending
        except FileNotFoundError:
            return False  # a tree of plain files may have only cgroups
        except (OSError, ValueError):
            return True

    def _candidates(self) -> Iterator[int]:
        if self.witness is not None:
            yield self.witness
        yield from self._pids()

    def _pids(self) -> Iterator[int]:
        yield from sorted(int(name) for name in os.listdir(self._root) if name.isascii() and name.isdigit())
