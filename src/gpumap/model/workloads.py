"""Name the work of a process outside pods by its cgroup paths: a container, a job, a unit or a user. Pure.

Names are label values. A name with a PID, a UUID or a counter is new at each start: such work counts for its user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gpumap.model.node import OTHER, Workload

NAMES_MAX = 200
"""Names of a node. Work that comes later is `OTHER`."""

_ID = r"([0-9a-f]{12})[0-9a-f]{52}(?:\.scope)?(?=/|$)"
"""A container id. `docker ps` and `podman ps` show its first 12 digits."""
_SLUID = r"s[0-9A-HJKMNP-TV-Z]{13}"
"""Slurm's lasting id of a job (slurm, src/common/sluid.c). From 26.05 the job's directory has it as its name."""
_SLUID_FOLDER = re.compile(rf"^.*?/{_SLUID}(?=/step_[^/])")
_STEPD = re.compile(rf"/{_SLUID}/step_[^/]+/slurm$")
_UNIT_END = r"\.(?:service|scope)(?=/|$)"
_PASSING_UNIT = (
    r"(?:init|[^/]+-c?[0-9]+)\.scope(?=/|$)|run-[a-z]?[0-9a-f]+(?:-[a-z]?[0-9]+)*"
    + _UNIT_END
    + r"|[^/]+@[0-9]+-|[^/]*[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}"
)
"""Scopes of sessions and those with a PID, units of `systemd-run`, and the beginnings of units of one connection
(`<counter>-<addresses or PID>`, systemd.socket(5)) and of units with a UUID."""
LOGIN = re.compile(r"/user(?:-([0-9]+)\.slice|@([0-9]+)\.service|/[^/]+/[0-9]+)(?=/|$)")
"""A login session. Its user may name the directories in it as they like, also like a pod or a container. The last form
is that of cgroup v1 (lxc, src/lxc/pam/pam_cgfs.c)."""
# slurm, src/plugins/cgroup/v2/cgroup_v2.c and v1/xcgroup.c
_SLURM_JOB = {"slurm_job": re.compile(rf"(?:/[^/]*slurmstepd\.scope)?/(?:job_([0-9]+)|({_SLUID}))/step_[^/]")}
_SLURM_DAEMON = re.compile(r"slurmd(@.*)?\.service|(.*_)?slurmstepd\.scope")
_KINDS = {
    "user": LOGIN,
    # lxc, src/lxc/cgroups/cgroup.h; Proxmox has `/lxc/<id>/ns`.
    "lxc": re.compile(r"/(?:lxc|incus)\.payload\.([^/]+)|/lxc/([^/]+)"),
    # podman, libpod/container_internal_linux.go. A Quadlet is below its unit, which outlives the container.
    "podman": re.compile(rf"/([^/]+\.service)/libpod-payload-|/libpod-(?:payload-|conmon-)?{_ID}"),
    "docker": re.compile(rf"/docker[-/]{_ID}"),  # moby, daemon/oci_linux.go, with systemd or without
    "containerd": re.compile(rf"/(?:[a-z-]+-)?{_ID}"),  # nerdctl, run_cgroup_linux.go, and any other runtime
    **_SLURM_JOB,
    "pbs_job": re.compile(r"/pbs[^/]*\.service/jobid/([^/]+)"),  # OpenPBS, pbs_cgroups.PY
    # HTCondor, vanilla_proc.cpp: `<execute directory>_<slot>@<host>`
    "htcondor_slot": re.compile(r"(?:/(?=[^/]*condor)[^/]*\.service)?/htcondor/(?:[^/]*_)?(slot[0-9_]+@[^/]+)"),
    "systemd_unit": re.compile(rf"/(?=[^/]+{_UNIT_END})(?:{_PASSING_UNIT}|([^/]+))"),
}
"""What can begin at a part of a path. The first that matches counts. Without a group in the match, nothing names the
work."""


def workload(paths: Iterable[str]) -> Workload | None:
    """Return the work that a process with these cgroup paths belongs to; `None` if they name none.

    Hierarchies of cgroup v1 may name different work. Only root puts a process into a container or a job: these come
    before a login session, and a unit comes last. A process in a login session counts for the user who logged in, even
    if it runs as another user.
    """
    works = filter(None, (_outermost(path, _KINDS) for path in paths))
    return min(works, key=lambda work: {"user": 1, "systemd_unit": 2}.get(work.kind, 0), default=None)


def slurm_job(paths: Iterable[str]) -> Workload | None:
    """Return the Slurm job of a process, also inside a pod (Slinky)."""
    return next(filter(None, (_outermost(path, _SLURM_JOB) for path in paths)), None)


def sluid_folder(paths: Iterable[str]) -> str | None:
    """Return the directory of the job that has a SLUID as its name."""
    return next((match[0] for path in paths if (match := _SLUID_FOLDER.search(path))), None)


def stepd_folder(paths: Sequence[str]) -> str | None:
    """Return the directory of the job whose slurmstepd has these paths.

    Only root can move a process there. A user can make a directory of the same name, but elsewhere.
    """
    return sluid_folder(path for path in paths if _STEPD.search(path))


def is_sluid(work: Workload) -> bool:
    """Return whether a Slurm job has the SLUID of its path as its name, instead of its job id."""
    return work.kind == "slurm_job" and work.name.startswith("s")


def is_slurm_daemon(work: Workload) -> bool:
    """Return whether a process is in a cgroup of Slurm's own daemons, and so in that of no job."""
    return work.kind == "systemd_unit" and _SLURM_DAEMON.fullmatch(work.name) is not None


def remember_workloads(known: Sequence[Workload], present: Iterable[Workload]) -> tuple[Workload, ...]:
    """Return the work that has a name of its own, of all that is present: at most `NAMES_MAX`, the oldest first.

    `known` had one before. Work keeps its name while it is present: a series does not change its name because other
    work starts.
    """
    unnamed = set(present) - {OTHER}
    remaining = [work for work in known if work in unnamed]
    return (*remaining, *sorted(unnamed.difference(remaining)))[:NAMES_MAX]


def _outermost(path: str, kinds: Mapping[str, re.Pattern[str]]) -> Workload | None:
    """Return the work of the first part of a path that is of one of these kinds, if it names the work."""
    for slash in re.finditer("/", path):
        for kind, pattern in kinds.items():
            if match := pattern.match(path, slash.start()):
                return Workload(kind, match[match.lastindex]) if match.lastindex else None
    return None
