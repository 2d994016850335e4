"""Parse cgroup paths: which pod and container a process is in, and whether it is outside gpumap's own pod.

The input is the text of /proc/PID/cgroup. Its paths depend on the reader's cgroup namespace: no pattern starts at the
root or requires the word "kubepods".
"""

import re
from typing import NamedTuple

from gpumap.model.observations import CgroupKind, CgroupMembership, PodCgroup, PodUid

# A pod's directory: `pod<uid>`, `kubepods-burstable-pod<uid with _>.slice`; static pods have 32 hex digits
# (kubelet, pkg/kubelet/cm/pod_container_manager_linux.go and pkg/kubelet/config/common.go).
_POD = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?=[/:]|$)"
)
# A container's scope: `<64 hex>`, `crio-<id>.scope`, `…slice:cri-containerd:<id>`.
_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
_CONTAINER_SCOPE = re.compile(r"(?:[a-z0-9-]+[-:])?[0-9a-f]{64}(?:\.scope)?")


class OwnCgroup(NamedTuple):
    """gpumap's own cgroup. PID visibility and the meaning of a bare `/` depend on it."""

    paths: tuple[str, ...]
    membership: CgroupMembership

    @property
    def is_root(self) -> bool:
        return all(path == "/" for path in self.paths)


def paths(text: str) -> tuple[str, ...]:
    """Return the paths of a /proc/PID/cgroup file (`N:controllers:PATH` on each line, in v1 and v2), each once."""
    found = (line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2)
    # A process that outlives its cgroup keeps its path (cgroup v2, kernel/cgroup/cgroup.c: proc_cgroup_show).
    return tuple(dict.fromkeys(path.removesuffix(" (deleted)") for path in found))


def own(text: str) -> OwnCgroup:
    """Read gpumap's own /proc/self/cgroup."""
    found = paths(text)
    return OwnCgroup(found, _membership(found, own_is_root=False))


def parse(text: str, own_cgroup: OwnCgroup) -> CgroupMembership:
    """Return the pods and containers in a process's cgroup file.

    A bare `/` is the host's root, unless gpumap's own path is `/` too. Then it may be gpumap's own container, and the
    result is `UNKNOWN`.
    """
    return _membership(paths(text), own_cgroup.is_root)


def _membership(found: tuple[str, ...], own_is_root: bool) -> CgroupMembership:
    pods = max((_pods(path) for path in found), key=len, default=())
    if pods:
        return CgroupMembership(CgroupKind.POD, pods)
    placed = [path for path in found if path != "/"]
    if not placed and (own_is_root or not found):
        return CgroupMembership(CgroupKind.UNKNOWN)
    if placed and all(_is_own_sibling(path) for path in placed):
        return CgroupMembership(CgroupKind.UNKNOWN)
    return CgroupMembership(CgroupKind.HOST)


def _pods(path: str) -> tuple[PodCgroup, ...]:
    """Return all pods of one path, innermost first, each with the first container id after it."""
    matches = list(_POD.finditer(path))
    pods = []
    for number, match in enumerate(matches):
        end = matches[number + 1].start() if number + 1 < len(matches) else len(path)
        container = _CONTAINER.search(path, match.end(), end)
        pods.append(PodCgroup(PodUid(match[1].replace("_", "-")), container[1] if container else ""))
    return tuple(reversed(pods))


def _is_own_sibling(path: str) -> bool:
    """Whether a path is a sibling of gpumap's own container in a private namespace: `/../cri-containerd-<id>.scope`."""
    steps = [step for step in path.split("/") if step]
    if not steps or steps[0] != "..":
        return False
    after_dots = [step for step in steps if step != ".."]
    return bool(after_dots) and _CONTAINER_SCOPE.fullmatch(after_dots[0]) is not None


def is_outside(text: str, own_cgroup: OwnCgroup) -> bool:
    """Return whether a process is certainly outside gpumap's own pod: in another pod, or a process of the node.

    This needs no rights over the process. One such process that is not ending proves that gpumap sees the PIDs of other
    containers.
    """
    found = paths(text)
    member = _membership(found, own_is_root=False)
    own_uids = {pod.pod_uid for pod in own_cgroup.membership.pods}
    if member.pods:
        return all(pod.pod_uid not in own_uids for pod in member.pods[:1])
    own_in_pod = bool(own_uids)
    return any(
        (path.startswith("/..") and not _is_own_sibling(path)) or (own_in_pod and not path.startswith("/.."))
        for path in found
    )


def is_bare_host(own_cgroup: OwnCgroup) -> bool:
    """Return whether gpumap runs as a service or in a login session of the node: not `/`, no pod, no container."""
    if own_cgroup.membership.pods or own_cgroup.is_root or not own_cgroup.paths:
        return False
    return not any(_CONTAINER.search(path) or path.startswith("/..") for path in own_cgroup.paths)
