"""Name the work of processes outside pods: their cgroup paths, then their users, and the job ids of Slurm 26.05.

It reads `status` for the uid, only if the paths name nothing. Of slurmstepd, and of no other process, it reads
`cmdline`: Slurm 26.05 has no job id in the path.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from gpumap.agent.sources.proc_files import Stat, opened, stat, text
from gpumap.model import cgroups
from gpumap.model.node import Workload
from gpumap.model.observations import CgroupKind
from gpumap.model.workloads import is_sluid, sluid_folder, slurm_job, stepd_folder, workload

PASSWD_BYTES_MAX = 1 << 20
SEARCH_SECONDS = 15.0
"""The shortest time between two searches of all processes."""
PARENTS_MAX = 16
"""Processes between a process and its slurmstepd, with both."""
JOBS_MAX = 1024
"""Jobs to remember. Processes may choose their directory."""
_STEPD = "slurmstepd"
_STEPD_TITLE = re.compile(r"slurmstepd: \[(\d+)\b", re.ASCII)
"""`slurmstepd: [3385.0]` (slurm, src/slurmd/slurmstepd/slurmstepd.c, _set_job_log_prefix)."""


class Job(NamedTuple):
    """The id of a Slurm job, and the PIDs that show it: its slurmstepd, and the parents that led to it."""

    job_id: str
    stepd: int
    parents: tuple[int, ...]


class JobIds:
    """The ids of Slurm jobs with a SLUID as their directory's name, by this directory. It remembers them.

    The parents of a process lead to its slurmstepd. If one of them has ended, gpumap searches all processes: only for a
    job of the host, once for each, and not more often than every `SEARCH_SECONDS`. A search takes long on a node with
    many processes, and a process in a pod may name directories as it likes.
    """

    def __init__(
        self, root: Path, pids: Callable[[], Iterator[int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root
        self._pids = pids
        self._clock = clock
        self._search_at = -math.inf
        self._jobs: dict[str, Job | None] = {}
        """The last one was asked for last. `None`: a search found no slurmstepd."""

    def known(self) -> Iterator[Job]:
        """Yield the jobs with an id."""
        yield from filter(None, self._jobs.values())

    def job_id(self, pid: int, folder: str, *, in_pod: bool) -> str | None:
        """Return the job id of a process in the job's directory `folder`."""
        if folder in self._jobs:
            self._jobs[folder] = self._jobs.pop(folder)
        elif job := self._by_parents(pid, folder):
            self._jobs[folder] = job
        elif not in_pod and self._clock() >= self._search_at:
            self._search_at = self._clock() + SEARCH_SECONDS
            self._jobs |= self._search()
            self._jobs.setdefault(folder, None)
        while len(self._jobs) > JOBS_MAX:
            del self._jobs[next(iter(self._jobs))]
        job = self._jobs.get(folder)
        return job.job_id if job else None

    def _by_parents(self, pid: int, folder: str) -> Job | None:
        parents: list[int] = []
        with contextlib.suppress(OSError, ValueError):
            while len(parents) < PARENTS_MAX:
                with opened(self._root / str(pid)) as process:
                    now, paths = stat(text("stat", process)), cgroups.paths(text("cgroup", process))
                    if sluid_folder(paths) != folder:
                        return None
                    if job_id := _title(now, paths, process):
                        return Job(job_id, pid, tuple(parents[1:]))
                parents.append(pid)
                pid = now.parent
        return None

    def _search(self) -> dict[str, Job | None]:
        found: dict[str, Job | None] = {}
        for pid in self._pids():
            try:
                with opened(self._root / str(pid)) as process:
                    now = stat(text("stat", process))
                    if now.comm != _STEPD:
                        continue
                    paths = cgroups.paths(text("cgroup", process))
                    folder, job_id = stepd_folder(paths), _title(now, paths, process)
            except (OSError, ValueError):
                continue
            if folder and job_id:
                found[folder] = Job(job_id, pid, ())
        return found


def _title(now: Stat, paths: tuple[str, ...], process: int) -> str | None:
    """Return the job id in the title of a slurmstepd."""
    if now.comm != _STEPD or not stepd_folder(paths):
        return None
    match = _STEPD_TITLE.match(text("cmdline", process))
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
            job_id = self._job_ids.job_id(pid, job, in_pod=kind is CgroupKind.POD)
            return structs.replace(work, name=job_id or work.name)
        if work is not None and work.kind == "user":
            return structs.replace(work, name=self._users.get(work.name, work.name))
        return work

    @functools.cached_property
    def _users(self) -> Mapping[str, str]:
        """User names by uid. An unreadable or huge file has none. A name of digits could be another user's uid."""
        try:
            lines = text(str(self._passwd), None, PASSWD_BYTES_MAX).split("\n") if self._passwd else []
        except OSError:
            return {}
        found: dict[str, str] = {}
        for line in lines:
            name, *fields = line.split(":", 3)
            if len(fields) > 1 and name and not name.isdigit():
                found.setdefault(fields[1], name)  # of two names, the first counts, as in getpwuid(3)
        return found


def is_named_by_paths(kind: CgroupKind, work: Workload | None) -> bool:
    """Return whether the work of a process follows from its cgroup paths. A user and a SLUID depend on other files."""
    return kind is not CgroupKind.HOST if work is None else work.kind != "user" and not is_sluid(work)


def _user(folder: int) -> Workload | None:
    """Return the real user of a process; `None` if it cannot be read."""
    try:
        match = re.search(r"^Uid:\s+(\d+)", text("status", folder), re.MULTILINE | re.ASCII)
    except OSError:
        return None
    return Workload("user", match[1]) if match else None
