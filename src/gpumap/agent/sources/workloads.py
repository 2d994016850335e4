"""Processes outside pods: the pod of their parents, or else a name for their work.

Docker in a privileged pod puts its containers at the host's root on cgroup v2, but their parents stay in the pod. Other
work is named by cgroup paths, then by users, and by the job ids of Slurm 26.05.

It reads `status` for the uid, only if the paths name nothing. Of slurmstepd, and of no other process, it reads
`cmdline`: Slurm 26.05 has no job id in the path.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from gpumap.agent.sources.processes import Stat, open_folder, parse_stat, read_text
from gpumap.model import cgroups
from gpumap.model.node import Workload
from gpumap.model.observations import CgroupKind, CgroupMembership
from gpumap.model.workloads import is_sluid, sluid_folder, slurm_job, stepd_folder, workload

INIT = 1
"""It has no parent, and is in no pod."""
ANCESTORS_MAX = 64
_UNKNOWN = CgroupMembership(CgroupKind.UNKNOWN)
PASSWD_BYTES_MAX = 1 << 20
PARENTS_MAX = 16
"""Processes between a process and its slurmstepd, with both."""
JOBS_MAX = 1024
"""Jobs to remember. Processes may choose their directory."""
_STEPD = "slurmstepd"
_STEPD_TITLE = re.compile(r"slurmstepd: \[(\d+)\b", re.ASCII)
"""`slurmstepd: [3385.0]` (slurm, src/slurmd/slurmstepd/slurmstepd.c, _set_job_log_prefix)."""


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

    def __init__(self, read: Callable[[int], tuple[Stat, CgroupMembership]]) -> None:
        self._read = read
        self._lineages: dict[int, tuple[int, cgroups.OwnCgroup, Lineage]] = {}
        """By PID, with the start time of the process."""

    def membership(
        self, pid: int, process: Stat, own_cgroup: cgroups.OwnCgroup, *, is_real: bool
    ) -> CgroupMembership | None:
        """Return the cgroup of the ancestor that decides, `UNKNOWN` if unreadable; `None` if all are of the host."""
        start, last_own, lineage = self._lineages.get(pid, (-1, own_cgroup, Lineage(_UNKNOWN, ())))
        is_known = lineage.membership is None or lineage.membership.kind is CgroupKind.POD
        if not is_known or (start, last_own) != (process.start, own_cgroup):
            lineage = self._walk(process, is_real=is_real)
            self._lineages[pid] = process.start, own_cgroup, lineage
        return lineage.membership

    def pids(self, pid: int) -> tuple[int, ...]:
        """Return the ancestors that decided about a process, and those between."""
        return self._lineages[pid][2].pids if pid in self._lineages else ()

    def forget_others(self, pids: frozenset[int]) -> None:
        """Remember only the ancestors of `pids`."""
        self._lineages = {pid: known for pid, known in self._lineages.items() if pid in pids}

    def _walk(self, process: Stat, *, is_real: bool) -> Lineage:
        pids: list[int] = []
        while process.parent > INIT:
            pids.append(process.parent)
            try:
                parent, membership = self._read(process.parent)
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


class Job(NamedTuple):
    """The id of a Slurm job, and the PIDs that show it: its slurmstepd, and the parents that led to it."""

    job_id: str
    stepd: int
    parents: tuple[int, ...]


class JobIds:
    """The ids of Slurm jobs with a SLUID as their directory's name, by this directory.

    The parents of a process lead to its slurmstepd. If one of them has ended, a search of all processes finds it. The
    first answer about a job of the host stays: a job never has two names.
    """

    def __init__(self, root: Path, pids: Callable[[], Iterator[int]]) -> None:
        self._root = root
        self._pids = pids
        self._jobs: dict[str, Job | None] = {}
        """The last one was asked for last. `None`: a search found no slurmstepd."""

    def known(self) -> Iterator[Job]:
        """Yield the jobs with an id."""
        yield from filter(None, self._jobs.values())

    def job_id(self, pid: int, folder: str, search: Callable[[], Mapping[str, Job]] | None) -> str | None:
        """Return the job id of a process in the job's directory `folder`. `search` returns the jobs that run."""
        if folder in self._jobs:
            self._jobs[folder] = self._jobs.pop(folder)
        elif job := self._find_stepd(pid, folder):
            self._jobs[folder] = job
        elif search:
            for running_folder, running_job in search().items():
                self._jobs.setdefault(running_folder, running_job)
            self._jobs.setdefault(folder, None)
        while len(self._jobs) > JOBS_MAX:
            del self._jobs[next(iter(self._jobs))]
        job = self._jobs.get(folder)
        return job.job_id if job else None

    def _find_stepd(self, pid: int, folder: str) -> Job | None:
        parents: list[int] = []
        with contextlib.suppress(OSError, ValueError):
            while len(parents) < PARENTS_MAX:
                with open_folder(self._root / str(pid)) as process:
                    process_stat = parse_stat(read_text("stat", process))
                    paths = cgroups.paths(read_text("cgroup", process))
                    if sluid_folder(paths) != folder:
                        return None
                    if job_id := _job_id_in_title(process_stat, paths, process):
                        return Job(job_id, pid, tuple(parents[1:]))
                parents.append(pid)
                pid = process_stat.parent
        return None

    def search(self) -> dict[str, Job]:
        """Return the jobs with a slurmstepd. It takes long on a node with many processes."""
        jobs: dict[str, Job] = {}
        for pid in self._pids():
            try:
                with open_folder(self._root / str(pid)) as process:
                    process_stat = parse_stat(read_text("stat", process))
                    if process_stat.comm != _STEPD:
                        continue
                    paths = cgroups.paths(read_text("cgroup", process))
                    folder, job_id = stepd_folder(paths), _job_id_in_title(process_stat, paths, process)
            except (OSError, ValueError):
                continue
            if folder and job_id:
                jobs[folder] = Job(job_id, pid, ())
        return jobs


def _job_id_in_title(process_stat: Stat, paths: tuple[str, ...], process: int) -> str | None:
    """Return the job id in the title of a slurmstepd."""
    if process_stat.comm != _STEPD or not stepd_folder(paths):
        return None
    match = _STEPD_TITLE.match(read_text("cmdline", process))
    return match[1] if match else None


class WorkloadReader:
    """Names the work of processes in one read of their tree. It reads what they share once, and only if needed.

    `passwd` has the user names; `None` gives uids. It must be of the same root directory as the processes.
    """

    def __init__(self, job_ids: JobIds, passwd: Path | None) -> None:
        self._job_ids = job_ids
        self._passwd = passwd

    def read(self, pid: int, kind: CgroupKind, paths: tuple[str, ...], folder: int) -> Workload | None:
        """Return the work of a process of the host, or the Slurm job of one in a pod; `None` if nothing names it.

        `folder` is the process's open directory.
        """
        work = slurm_job(paths) if kind is CgroupKind.POD else None
        if kind is CgroupKind.HOST:
            work = workload(paths) or _user(folder)
        if work is not None and is_sluid(work) and (job := sluid_folder(paths)):
            search = None if kind is CgroupKind.POD else lambda: self._running_jobs  # a pod may name directories freely
            job_id = self._job_ids.job_id(pid, job, search)
            return structs.replace(work, name=job_id or work.name)
        if work is not None and work.kind == "user":
            return structs.replace(work, name=self._users.get(work.name, work.name))
        return work

    @functools.cached_property
    def _running_jobs(self) -> Mapping[str, Job]:
        """The jobs of this read: each was started before its processes, and these before the read."""
        return self._job_ids.search()

    @functools.cached_property
    def _users(self) -> Mapping[str, str]:
        """User names by uid. An unreadable or huge file has none. A name of digits could be another user's uid."""
        try:
            lines = read_text(str(self._passwd), None, PASSWD_BYTES_MAX).split("\n") if self._passwd else []
        except OSError:
            return {}
        users: dict[str, str] = {}
        for line in lines:
            name, *fields = line.split(":", 3)
            if len(fields) > 1 and name and not name.isdigit():
                users.setdefault(fields[1], name)  # of two names, the first counts, as in getpwuid(3)
        return users


def is_named_by_paths(kind: CgroupKind, work: Workload | None) -> bool:
    """Return whether the work of a process follows from its cgroup paths. A user and a SLUID depend on other files."""
    return kind is not CgroupKind.HOST if work is None else work.kind != "user" and not is_sluid(work)


def _user(folder: int) -> Workload | None:
    """Return the real user of a process; `None` if it cannot be read."""
    try:
        match = re.search(r"^Uid:\s+(\d+)", read_text("status", folder), re.MULTILINE | re.ASCII)
    except OSError:
        return None
    return Workload("user", match[1]) if match else None
