"""Name the work of a host process, which is in no pod, by its cgroup paths: a container, a job, a unit or a user. Pure.

Names are values of a label. A name with a PID, a UUID or a counter is new at each start. Such work counts for its user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SHORT_ID_DIGITS = 12
"""Digits of a container id that `docker ps` and `podman ps` show."""

# `docker-<id>.scope`, `libpod-payload-<id>` or a bare id. Docker: moby, daemon/oci_linux.go. Podman: libpod/
# container_internal_linux.go; the hex digits of `libpod_pod_<id>.slice` are the pod's. nerdctl: run_cgroup_linux.go.
_CONTAINER = re.compile(
    r"(?:(docker|libpod(?:-payload|-conmon)?|nerdctl|crio(?:-conmon)?|cri-containerd)-)?([0-9a-f]{64})(?:\.scope)?"
)
_RUNTIMES = {"docker": "docker", "libpod": "podman", "libpod-payload": "podman", "libpod-conmon": "podman"}
_OTHER_RUNTIMES = "containerd"
# lxc, src/lxc/cgroups/cgroup.h; Proxmox has `/lxc/<id>/ns`.
_LXC = re.compile(r"(?:lxc|incus)\.payload\.(.+)")
# slurm, src/plugins/cgroup/v2/cgroup_v2.c and v1/xcgroup.c. From 26.05 a job's directory has its SLUID (sluid.c).
_JOB = re.compile(r"job_(\d+)|(s[0-9A-HJKMNP-TV-Z]{13})")
_STEP = re.compile(r"step_.+")
# OpenPBS, pbs_cgroups.PY: `<prefix>.service/jobid/<job>`. HTCondor, vanilla_proc.cpp: `htcondor/<dir>_<slot>@<host>`.
_SLOT = re.compile(r"(?:.*_)?(slot[0-9_]+@.+)")
_USER = re.compile(r"user-(\d+)\.slice|user@(\d+)\.service")
_UNIT = re.compile(r"(?!user@).+\.service")
_PASSING = re.compile(r"run-[a-z]?[0-9a-f][0-9a-f-]*\.service|.*[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}.*")
"""Units that `systemd-run` made, and units with a UUID."""


class Workload(NamedTuple):
    """Work outside pods. `kind` and `name` are values of labels."""

    kind: str
    name: str


OTHER = Workload("other", "other")
"""Work that nothing names, and all work after the first `NAMES_MAX` names of a node."""
NAMES_MAX = 200


def is_sluid(found: Workload) -> bool:
    """Return whether a Slurm job is named by the id in its path, as Slurm 26.05 has it, instead of its job id."""
    return found.kind == "slurm_job" and found.name.startswith("s")


def named(before: Sequence[Workload], present: Iterable[Workload]) -> tuple[Workload, ...]:
    """Return the work that keeps a name of its own, of all that is present: at most `NAMES_MAX`, the oldest first.

    Work that had a name keeps it while it is present: a series does not change its name because another work starts.
    """
    here = set(present) - {OTHER}
    kept = [one for one in before if one in here]
    return (*kept, *sorted(here.difference(kept)))[:NAMES_MAX]


def workload(paths: Iterable[str], uid: int | None) -> Workload | None:
    """Return the work that a process with these cgroup paths and this user id belongs to; `None` if nothing names it.

    The outermost container or job counts, on whichever path it is. A process in a login session counts for the user who
    logged in, even if it runs as another user.
    """
    split = [[step for step in path.split("/") if step not in ("", "..")] for path in paths]
    for find in (_contained, _logged_in, _unit):
        for steps in split:
            if found := find(steps):
                return found
    return None if uid is None else Workload("user", str(uid))


def _contained(steps: Sequence[str]) -> Workload | None:
    """Return the outermost container or job of a path."""
    for number in range(len(steps)):
        before = steps[number - 1] if number else ""
        after = steps[number + 1] if number + 1 < len(steps) else ""
        if found := _container(before, steps[number]) or _job(steps[number], after, steps[number + 2 : number + 3]):
            return found
    return None


def _container(before: str, step: str) -> Workload | None:
    if match := _LXC.fullmatch(step):
        return Workload("lxc", match[1])
    if before == "lxc":
        return Workload("lxc", step)
    match = _CONTAINER.fullmatch(step)
    if match is None:
        return None
    prefix, container_id = match[1] or before, match[2]
    if prefix == "libpod-payload" and _UNIT.fullmatch(before):
        return Workload("podman", before)  # a Quadlet: its unit outlives the container
    return Workload(_RUNTIMES.get(prefix, _OTHER_RUNTIMES), container_id[:SHORT_ID_DIGITS])


def _job(step: str, after: str, third: Sequence[str]) -> Workload | None:
    if (match := _JOB.fullmatch(step)) and _STEP.fullmatch(after):
        return Workload("slurm_job", match[1] or match[2])
    if step.startswith("pbs") and step.endswith(".service") and after == "jobid" and third:
        return Workload("pbs_job", third[0])
    if step == "htcondor" and after:
        match = _SLOT.fullmatch(after)
        return Workload("htcondor_slot", match[1] if match else after)
    return None


def _logged_in(steps: Sequence[str]) -> Workload | None:
    for step in steps:
        if match := _USER.fullmatch(step):
            return Workload("user", match[1] or match[2])
    return None


def _unit(steps: Sequence[str]) -> Workload | None:
    for step in steps:
        if _UNIT.fullmatch(step):
            return None if _PASSING.fullmatch(step) else Workload("systemd_unit", step)
    return None
