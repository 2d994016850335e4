"""Name the work of processes outside pods: their cgroup paths, then their users, and the job ids of Slurm 26.05.

It reads `status` for the uid, only if the paths name nothing. Of slurmstepd, and of no other process, it reads
`cmdline`: Slurm 26.05 has no job id in the path.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gpumap.agent.sources.proc_files import opened, stat, text
from gpumap.model import cgroups
from gpumap.model.observations import CgroupKind
from gpumap.model.workloads import Workload, is_sluid, sluid_folder, slurm_job, stepd_folder, workload

PASSWD_BYTES_MAX = 1 << 20
_STEPD_TITLE = re.compile(r"slurmstepd: \[(\d+)\b", re.ASCII)
"""`slurmstepd: [3385.0]` (slurm, src/slurmd/slurmstepd/slurmstepd.c, _set_job_log_prefix)."""


class WorkloadReader:
    """Names the work of processes in one read of the tree `root`. It reads what they share once, and only if needed.

    `passwd` has the user names; `None` gives uids. It must be of the same root directory as the processes.
    """

    def __init__(self, root: Path, pids: Callable[[], Iterator[int]], passwd: Path | None) -> None:
        self._root = root
        self._pids = pids
        self._passwd = passwd
        self.stepds: set[int] = set()
        """PIDs of the slurmstepds that gave a job id."""

    def read(self, kind: CgroupKind, paths: tuple[str, ...], folder: int) -> Workload | None:
        """Return the work of a process of the host, or the Slurm job of one in a pod; `None` if nothing names it.

        `folder` is the process's open directory.
        """
        if kind is CgroupKind.POD:
            found = slurm_job(paths)
        elif kind is CgroupKind.HOST:
            found = workload(paths, None) or workload(paths, _uid(folder))
        else:
            return None
        if found is None:
            return None
        if is_sluid(found):
            return found._replace(name=self._job_ids.get(sluid_folder(paths), found.name))
        return found._replace(name=self._users.get(found.name, found.name)) if found.kind == "user" else found

    @functools.cached_property
    def _job_ids(self) -> Mapping[str | None, str]:
        """Job ids by the directory of the job, from the titles of all slurmstepds."""
        found: dict[str | None, str] = {}
        for pid in self._pids():
            try:
                with opened(self._root / str(pid)) as folder:
                    if stat(text("stat", folder)).comm != "slurmstepd":
                        continue
                    job = stepd_folder(cgroups.paths(text("cgroup", folder)))
                    title = _STEPD_TITLE.match(text("cmdline", folder)) if job else None
            except (OSError, ValueError):
                continue
            if job and title:
                found[job] = title[1]
                self.stepds.add(pid)
        return found

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


def _uid(folder: int) -> int | None:
    """Return the real user id of a process; `None` if it cannot be read."""
    try:
        match = re.search(r"^Uid:\s+(\d+)", text("status", folder), re.MULTILINE | re.ASCII)
    except OSError:
        return None
    return int(match[1]) if match else None
