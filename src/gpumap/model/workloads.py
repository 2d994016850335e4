"""Name the work of a process outside pods by its cgroup paths: a container, a job, a unit or a user. Pure.

Names are label values. A name with a PID, a UUID or a counter is new at each start: such work counts for its user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gpumap.model.node import OTHER, Workload

NAMES_MAX = 200
"""Names of a node. Work that comes later is `OTHER`."""

_ID = r"([0-9a-f]{12})[0-9a-f]{52}(?:\.scope)?(?=/|$)"
"""A container id. `docker ps` and `podman ps` show its first 12 digits."""
_SLUID = r"s[0-9A-HJKMNP-TV-Z]{13}"
"""Slurm's lasting id of a job (slurm, src/common/sluid.c). From 26.05 the job's directory has it as its name."""
_CONTAINERS = [
    # lxc, src/lxc/cgroups/cgroup.h; Proxmox has `/lxc/<id>/ns`.
    ("lxc", r"/(?:lxc|incus)\.payload\.([^/]+)|/lxc/([^/]+)"),
    # podman, libpod/container_internal_linux.go. A Quadlet is below its unit, which outlives the container.
    ("podman", rf"/((?!user@)[^/]+\.service)/libpod-payload-|/libpod-(?:payload-|conmon-)?{_ID}"),
    ("docker", rf"/docker[-/]{_ID}"),  # moby, daemon/oci_linux.go, with systemd or without
    ("containerd", rf"/(?:[a-z-]+-)?{_ID}"),  # nerdctl, run_cgroup_linux.go, and any other runtime
]
_JOBS = [
    # slurm, src/plugins/cgroup/v2/cgroup_v2.c and v1/xcgroup.c
    ("slurm_job", rf"/(?:job_([0-9]+)|({_SLUID}))/step_[^/]"),
    ("pbs_job", r"/pbs[^/]*\.service/jobid/([^/]+)"),  # OpenPBS, pbs_cgroups.PY
    # HTCondor, vanilla_proc.cpp: `<execute directory>_<slot>@<host>`
    ("htcondor_slot", r"/htcondor/(?:[^/]*_)?(slot[0-9_]+@[^/]+)"),
]
_CONTAINED = [(kind, re.compile(pattern)) for kind, pattern in (*_CONTAINERS, *_JOBS)]
_SLURM_JOB = [(kind, pattern) for kind, pattern in _CONTAINED if kind == "slurm_job"]
_SLUID_FOLDER = re.compile(rf"^.*?/{_SLUID}(?=/step_[^/])")
_STEPD = re.compile(rf"/{_SLUID}/step_[^/]+/slurm$")
LOGIN = re.compile(r"/user(?:-([0-9]+)\.slice|@([0-9]+)\.service)(?=/|$)")
"""A login session. Its user may name the directories in it as they like, also like a pod or a container."""
_UNIT = re.compile(r"/([^/]+\.service)(?=/|$)")
_SCOPE = re.compile(r"/[^/]+\.scope(?=/|$)")
_PASSING_UNIT = re.compile(
    r"run-[a-z]?[0-9a-f]+(?:-[a-z]?[0-9]+)*\.service|.+@[0-9]+-.*|.*[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}.*"
)
"""Units of `systemd-run`, units of one connection (`<counter>-<addresses or PID>`, systemd.socket(5)), and units with
a UUID."""


def workload(paths: Sequence[str], uid: int | None) -> Workload | None:
    """Return the work that a process with these cgroup paths and this user id belongs to; `None` if nothing names it.

    The outermost container or job counts, on whichever path it is. A process in a login session counts for the user who
    logged in, even if it runs as another user.
    """
    for find in (_contained, _logged_in, _unit):
        if found := next(filter(None, map(find, paths)), None):
            return found
    return None if uid is None else Workload("user", str(uid))


def slurm_job(paths: Iterable[str]) -> Workload | None:
    """Return the Slurm job of a process, also inside a pod (Slinky)."""
    return next(filter(None, (_first(path, _SLURM_JOB) for path in paths)), None)


def sluid_folder(paths: Iterable[str]) -> str | None:
    """Return the directory of the job that has a SLUID as its name."""
    return next((match[0] for path in paths if (match := _SLUID_FOLDER.search(path))), None)


def stepd_folder(paths: Sequence[str]) -> str | None:
    """Return the directory of the job whose slurmstepd has these paths.

    Only root can move a process there. A user can make a directory of the same name, but elsewhere.
    """
    return sluid_folder(path for path in paths if _STEPD.search(path))


def is_sluid(found: Workload) -> bool:
    """Return whether a Slurm job has the SLUID of its path as its name, instead of its job id."""
    return found.kind == "slurm_job" and found.name.startswith("s")


def with_own_names(before: Sequence[Workload], present: Iterable[Workload]) -> tuple[Workload, ...]:
    """Return the work that has a name of its own, of all that is present: at most `NAMES_MAX`, the oldest first.

    Work keeps its name while it is present: a series does not change its name because other work starts.
    """
    here = set(present) - {OTHER}
    kept = [one for one in before if one in here]
    return (*kept, *sorted(here.difference(kept)))[:NAMES_MAX]


def _contained(path: str) -> Workload | None:
    """Return the outermost container or job of a path.

    Batch systems have no jobs in a login session, and Slurm has none in a unit. There a user may name directories as
    they like.
    """
    found = _first(path, _CONTAINED)
    if found is None or found.kind not in dict(_JOBS):
        return found
    outer = LOGIN.search(path) or (_UNIT.search(path) if found.kind == "slurm_job" else None)
    return _first(path[: outer.start()], _CONTAINED) if outer else found


def _first(path: str, patterns: Iterable[tuple[str, re.Pattern[str]]]) -> Workload | None:
    matches = [(match.start(), kind, match) for kind, pattern in patterns if (match := pattern.search(path))]
    if not matches:
        return None
    _, kind, match = min(matches, key=lambda one: one[0])  # of two at one place, the first in the table
    return Workload(kind, match[match.lastindex or 0])


def _logged_in(path: str) -> Workload | None:
    """Return the user who logged in to the machine. Sessions in a unit or a scope are those of a guest."""
    match = LOGIN.search(path)
    if not match or _UNIT.search(path[: match.start()]) or _SCOPE.search(path[: match.start()]):
        return None
    return Workload("user", match[1] or match[2])


def _unit(path: str) -> Workload | None:
    """Return the outermost unit. Units in a scope are those of a guest."""
    match = _UNIT.search(path)
    if not match or _PASSING_UNIT.fullmatch(match[1]) or _SCOPE.search(path[: match.start()]):
        return None
    return Workload("systemd_unit", match[1])
