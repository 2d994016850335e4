"""The /proc entries of GPU processes, and whether PIDs of other containers are visible.

It reads `cgroup` and `stat`, which need no right over the process; never `environ` or `ns/`. `sources/workloads.py`
reads two more files of some, and remembers what the parents of a process showed. The tree may consist of plain files.
What it remembers saves reads: one PID to ask first, and processes that still run.
"""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from gpumap.agent.sources.processes import Basis, KnownProcesses, Stat, open_folder, parse_stat, read_text
from gpumap.agent.sources.workloads import Ancestors, JobIds, WorkloadReader, is_named_by_paths
from gpumap.model import cgroups
from gpumap.model.observations import (
    CgroupKind,
    CgroupMembership,
    Complaint,
    ProcEntry,
    ProcTable,
    SourceAnswer,
    SourceError,
)
from gpumap.model.terms import PodUid

SELF = Path("/proc/self")
SEARCH_SECONDS = 15.0
"""The shortest time between two searches for the processes of pods."""


class ProcfsSource:
    """Reads the tree `root` (`/proc`). `own_entry` is gpumap's own one, the reference for other paths.

    Without a kubelet (`has_kubelet`), a container is in no pod.
    """

    def __init__(self, root: Path, own_entry: Path = SELF, *, has_kubelet: bool = True) -> None:
        self._root = root
        self._own_cgroup = cgroups.own("")
        self._own_entry = own_entry
        self._has_kubelet = has_kubelet
        self.is_real = False
        """Whether the tree is known to be no tree of plain files: then `clock_ticks` reads no file."""
        self.pid_outside_pod: int | None = None
        """The process that showed in the last read that PIDs of other containers are visible."""
        self.job_ids = JobIds(root, self._pids)
        """The Slurm jobs of processes without a job id in their cgroup path."""
        self.ancestors = Ancestors(self._read_ancestor)
        """The parents of processes outside pods."""
        self.pod_pids: dict[PodUid, int] = {}
        """A process of each pod that `read` was asked about."""
        self._searched_at = -math.inf
        self._has_kthreadd = False
        self._known = KnownProcesses()
        self._last_table: ProcTable | None = None  # if a pidfd holds every process in it
        self._latest_start = 0  # of a process in it
        self._last_pids: frozenset[int] = frozenset()
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
            self._own_cgroup = cgroups.own(read_text(f"{self._own_entry}/cgroup"))
            visible, reason = self._visibility()
        except OSError as error:
            raise SourceError("unreadable", f"{error.filename}: {error.strerror}") from error
        readable_pids = frozenset(pids) if visible else frozenset()
        living = self._living_pods(pod_uids) if visible else frozenset()
        changed = self._known.drop_ended(readable_pids) | self._drop_changed()
        if readable_pids != self._last_pids:
            ticks = self.clock_ticks() if not_after is not None else None
            self._asked_since = {pid: self._asked_since.get(pid) or ticks for pid in readable_pids}
            self.ancestors.forget_others(readable_pids)
            # Without a clock, the next read notes it.
            self._last_pids = readable_pids if not_after is not None else frozenset()
            self._last_table = None
        if self._last_table and visible and not changed and (not_after is None or self._latest_start <= not_after):
            return SourceAnswer(replace(self._last_table, visibility_reason=reason, living_pods=living))
        answer = self._read_all(readable_pids, not_after, visible, reason)
        answer = answer._replace(value=replace(answer.value, living_pods=living, is_machine=self._find_kthreadd()))
        entries = answer.value.entries
        self._last_table = answer.value if visible and len(self._known) == len(readable_pids) == len(entries) else None
        self._latest_start = max((entry.start for entry in entries), default=0)
        return answer

    def _find_kthreadd(self) -> bool:
        """Return whether PID 2 is the kernel's `kthreadd`, which only the machine's own PID namespace has."""
        if not self._has_kthreadd:
            with contextlib.suppress(OSError, ValueError):
                self._has_kthreadd = parse_stat(read_text(f"{self._root}/2/stat")).comm == "kthreadd"
        return self._has_kthreadd

    def _living_pods(self, pod_uids: frozenset[PodUid]) -> frozenset[PodUid]:
        """Return the pods with a process. It searches all processes for new ones, but not in each read."""
        self.pod_pids = {uid: pid for uid, pid in self.pod_pids.items() if uid in self._pods_of(pid) & pod_uids}
        missing = pod_uids - self.pod_pids.keys()
        if missing and time.monotonic() - self._searched_at >= SEARCH_SECONDS:
            self._searched_at = time.monotonic()
            for pid in self._pids():
                self.pod_pids |= dict.fromkeys(self._pods_of(pid) & missing, pid)
        return frozenset(self.pod_pids)

    def _pods_of(self, pid: int) -> frozenset[PodUid]:
        """Return the pod of a process that is not ending; none if it cannot be read."""
        try:
            pods = cgroups.parse(read_text(f"{self._root}/{pid}/cgroup"), self._own_cgroup).pods
        except OSError:
            return frozenset()
        return frozenset(pod.pod_uid for pod in pods[:1])

    def _drop_changed(self) -> bool:
        """Read some held processes again, and drop those that changed. Return whether there were any."""
        changed = [
            pid
            for pid, basis in self._known.next_to_read(time.monotonic())
            if basis is None or basis != self._basis(pid)
        ]
        for pid in changed:
            self._known.drop(pid)
        return bool(changed)

    def _basis(self, pid: int) -> Basis | None:
        """Read what can change the entry of a process that still runs; `None` if that is not possible."""
        try:
            folder = f"{self._root}/{pid}"
            return Basis(self._own_cgroup, read_text(f"{folder}/cgroup"), read_text(f"{folder}/comm"))
        except OSError:
            return None

    def _read_all(
        self, readable_pids: frozenset[int], not_after: int | None, visible: bool, reason: str
    ) -> SourceAnswer[ProcTable]:
        entries: list[ProcEntry] = []
        unreadable: list[int] = []
        complaints: list[Complaint] = []
        passwd = self._own_entry / "root/etc/passwd" if self._is_on_bare_host() else None
        workloads = WorkloadReader(self.job_ids, passwd)
        for pid in sorted(readable_pids):
            try:
                entry = self._known.get(pid) or self._read_entry(pid, workloads, is_real=not_after is not None)
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

    def _read_entry(self, pid: int, workloads: WorkloadReader, *, is_real: bool) -> ProcEntry:
        """Read an entry. A process of a real tree is held, so that the next read can skip it."""
        pidfd = self._known.open(pid) if is_real else None
        is_kept = False
        try:
            with open_folder(self._root / str(pid)) as folder:
                process, cgroup = parse_stat(read_text("stat", folder)), read_text("cgroup", folder)
                member = path_member = self._membership(process, cgroup, folder)
                if path_member.kind is CgroupKind.HOST and self._has_kubelet:
                    member = self.ancestors.membership(pid, process, self._own_cgroup, is_real=is_real) or path_member
                work = None if process.is_ending else workloads.read(pid, member.kind, cgroups.paths(cgroup), folder)
            entry = ProcEntry(pid, process.start, process.comm, member, work)
            if not process.is_ending and pidfd is not None:
                is_settled = member is path_member or member.kind is CgroupKind.POD
                basis = Basis(self._own_cgroup, cgroup, f"{process.comm}\n")
                self._known.keep(pidfd, entry, basis if is_settled and is_named_by_paths(member.kind, work) else None)
                is_kept = True
            return entry
        finally:
            if pidfd is not None and not is_kept:
                os.close(pidfd)

    def _read_ancestor(self, pid: int) -> tuple[Stat, CgroupMembership]:
        with open_folder(self._root / str(pid)) as folder:
            process = parse_stat(read_text("stat", folder))
            return process, self._membership(process, read_text("cgroup", folder), folder)

    def _membership(self, process: Stat, cgroup: str, folder: int) -> CgroupMembership:
        member = cgroups.parse(cgroup, self._own_cgroup, has_kubelet=self._has_kubelet)
        return self._thread_membership(folder) if process.is_ending and member.kind is CgroupKind.HOST else member

    def _thread_membership(self, folder: int) -> CgroupMembership:
        """Return the cgroup of a process without a main thread: that of its first thread that runs.

        On cgroup v1 the main thread has left its cgroups. A process without another thread is a zombie, and unknown.
        """
        try:
            with open_folder(Path("task"), folder) as threads:
                for thread in os.listdir(threads):
                    with contextlib.suppress(OSError, ValueError):
                        if not parse_stat(read_text(f"{thread}/stat", threads)).is_ending:
                            paths = read_text(f"{thread}/cgroup", threads)
                            return cgroups.parse(paths, self._own_cgroup, has_kubelet=self._has_kubelet)
        except OSError:
            pass
        return CgroupMembership(CgroupKind.UNKNOWN)

    def _visibility(self) -> tuple[bool, str]:
        """Decide from visible processes whether PIDs of other containers are visible (attribution.md)."""
        try:
            named_pid = os.readlink(self._root / "self")
        except FileNotFoundError:
            named_pid = None  # a tree of plain files
        if named_pid is not None and named_pid != str(os.getpid()):
            return False, f"{self._root} is of another PID namespace: its self is {named_pid}, gpumap is {os.getpid()}"
        if self._is_on_bare_host():
            return True, "gpumap runs on the bare host"
        known = () if self.pid_outside_pod is None else (self.pid_outside_pod,)
        for pid in itertools.chain(known, self._pids()):
            try:
                cgroup = read_text(f"{self._root}/{pid}/cgroup")
            except OSError:
                continue
            if cgroups.is_outside(cgroup, self._own_cgroup) and not self._is_ending(pid):
                self.pid_outside_pod = pid
                return True, f"PID {pid} is outside gpumap's own pod"
        self.pid_outside_pod = None
        return False, f"no process outside gpumap's own pod in {self._root}: set hostPID: true for the pod"

    def _is_on_bare_host(self) -> bool:
        return cgroups.is_bare_host(self._own_cgroup) and (self._root / str(os.getpid())).exists()

    def _is_ending(self, pid: int) -> bool:
        """On cgroup v1 a zombie has left its cgroups: its bare `/` does not show that it came from outside."""
        try:
            return parse_stat(read_text(f"{self._root}/{pid}/stat")).is_ending
        except FileNotFoundError:
            return False  # a tree of plain files may have only cgroups
        except (OSError, ValueError):
            return True

    def _pids(self) -> Iterator[int]:
        yield from sorted(int(name) for name in os.listdir(self._root) if name.isascii() and name.isdigit())
