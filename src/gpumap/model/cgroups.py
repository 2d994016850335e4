"""Parse cgroup paths: which pod and container a process is in, and whether it is outside gpumap's own pod.

The input is the text of /proc/PID/cgroup. Its paths depend on the reader's cgroup namespace: no pattern starts at the
root or requires the word "kubepods".
"""

import functools
import itertools
import re
from dataclasses import replace
from typing import NamedTuple

from gpumap.model.observations import CgroupKind, CgroupMembership, PodCgroup
from gpumap.model.terms import PodUid
from gpumap.model.workloads import LOGIN, workload

# A pod's directory: `pod<uid>`, `kubepods-burstable-pod<uid with _>.slice`; static pods have 32 hex digits
# (kubelet, pkg/kubelet/cm/pod_container_manager_linux.go and pkg/kubelet/config/common.go).
_POD = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?=[/:]|$)"
)
# A pod's directory with any other UID, such as that of a static pod whose manifest sets it. It is below `kubepods`, or
# contains a container (the view of another container has no `kubepods` in the path).
_PODLIKE = re.compile(r"^/(?:\.\./)+pod[^/]+/(?:[a-z0-9-]+-)?[0-9a-f]{64}|^(?>(?P<above>.*?)kubepods).*[/-]pod[^/]")
# A container's scope: `<64 hex>`, `crio-<id>.scope`, `…slice:cri-containerd:<id>`.
_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
# A container that a CRI runtime started for a kubelet, in a pod or not.
_CRI_CONTAINER = re.compile(r"(?:^|/)(?:cri-containerd-|crio-|k8s\.io/)[0-9a-f]{64}(?:\.scope)?(?=/|$)")
_CONTAINER_SCOPE = re.compile(r"(?:[a-z0-9-]+[-:])?[0-9a-f]{64}(?:\.scope)?")

TEXTS_KEPT = 512
"""Results to remember: the processes of a container have the same text, and a process seldom moves."""


class OwnCgroup(NamedTuple):
    """gpumap's own cgroup. PID visibility and the meaning of a bare `/` depend on it."""

    paths: tuple[str, ...]
    membership: CgroupMembership

    @property
    def is_root(self) -> bool:
        return all(path == "/" for path in self.paths)


def paths(text: str) -> tuple[str, ...]:
    """Return the paths of a /proc/PID/cgroup file (`N:controllers:PATH` on each line, in v1 and v2), each once.

    Only a line feed ends a line. The kernel refuses it in a name, but not the other breaks that `splitlines` knows.
    """
    listed_paths = (line.split(":", 2)[2] for line in text.split("\n") if line.count(":") >= 2)
    # A process that outlives its cgroup keeps its path (cgroup v2, kernel/cgroup/cgroup.c: proc_cgroup_show).
    return tuple(dict.fromkeys(path.removesuffix(" (deleted)") for path in listed_paths))


@functools.lru_cache(1)
def own(text: str) -> OwnCgroup:
    """Read gpumap's own /proc/self/cgroup."""
    own_paths = paths(text)
    return OwnCgroup(own_paths, _membership(own_paths, own_paths, own_is_root=False))


@functools.lru_cache(TEXTS_KEPT)
def parse(text: str, own_cgroup: OwnCgroup, *, has_kubelet: bool = True) -> CgroupMembership:
    """Return the pods and containers in a process's cgroup file.

    The result is `UNKNOWN` if its hierarchies name different pods, or if a pod's UID cannot be parsed. A bare `/` is
    the host's root, unless gpumap's own path is `/` too. Then it may be gpumap's own container: `UNKNOWN`.

    If the kubelet runs in a pod, gpumap is in that pod too: it does not count. Without a kubelet, a container whose
    path names no pod is in none. A pod inside a container, a job, a unit or a session is then not one either.

    A pod in a login session is `UNKNOWN`, unless gpumap is in the same session (a rootless kubelet).
    """
    membership = _membership(paths(text), own_cgroup.paths, own_is_root=own_cgroup.is_root, has_kubelet=has_kubelet)
    outer = {pod.pod_uid for pod in own_cgroup.membership.pods[:-1]}
    skipped = sum(1 for _ in itertools.takewhile(lambda pod: pod.pod_uid in outer, membership.pods[:-1]))
    return replace(membership, pods=membership.pods[skipped:]) if skipped else membership


def _membership(
    all_paths: tuple[str, ...], own_paths: tuple[str, ...], *, own_is_root: bool, has_kubelet: bool = True
) -> CgroupMembership:
    believed = [path for path in all_paths if not _is_in_session_of_others(path, own_paths)]
    possible = all_paths if has_kubelet else [path for path in all_paths if not _has_work_outside_pods(path)]
    for path in possible:
        first = _POD.search(path)
        # The outermost pod has a UID of an unknown form, or a user may have made its directory.
        if _PODLIKE.match(path, 0, first.start() if first else len(path)) or (first and path not in believed):
            return CgroupMembership(CgroupKind.UNKNOWN)
    named = [pods for path in possible if (pods := _pods(path))]
    if named:
        pods = _agreed(named)
        return CgroupMembership(CgroupKind.POD, pods) if pods else CgroupMembership(CgroupKind.UNKNOWN)
    container_id = next((match[1] for path in believed if (match := _CONTAINER.search(path))), "")
    return CgroupMembership(_kind_outside_pods(all_paths, own_is_root, has_kubelet), (), container_id)


def _is_in_session_of_others(path: str, own_paths: tuple[str, ...]) -> bool:
    login = LOGIN.search(path)
    if login is None or _POD.search(path, 0, login.start()) or _CONTAINER.search(path, 0, login.start()):
        return False  # in a container there may be sessions, too
    return not any(own_path.startswith(path[: login.end()]) for own_path in own_paths)


def _kind_outside_pods(all_paths: tuple[str, ...], own_is_root: bool, has_kubelet: bool) -> CgroupKind:
    placed = [path for path in all_paths if path != "/"]
    if not placed and (own_is_root or not all_paths):
        return CgroupKind.UNKNOWN
    if not has_kubelet:
        return CgroupKind.HOST
    if placed and all(_is_own_sibling(path) for path in placed):
        return CgroupKind.UNKNOWN
    return CgroupKind.UNKNOWN if any(_CRI_CONTAINER.search(path) for path in placed) else CgroupKind.HOST


def _has_work_outside_pods(path: str) -> bool:
    """Whether a container, a job, a unit or a user is named before the first pod of a path."""
    pod, podlike = _POD.search(path), _PODLIKE.match(path)
    above = path[: pod.start()] if pod else path
    if podlike:
        above = min(above, podlike["above"] or "", key=len)
    return workload([above]) is not None


def _agreed(named: list[tuple[PodCgroup, ...]]) -> tuple[PodCgroup, ...]:
    """Return the pods of all hierarchies; none if they name different pods. A process may choose one of its paths.

    A hierarchy may show less than another: only the outer pod, or no container.
    """
    agreed = []
    for number in range(max(map(len, named))):
        at_level = [pods[number] for pods in named if len(pods) > number]
        container_ids = {pod.container_id for pod in at_level if pod.container_id}
        if len({pod.pod_uid for pod in at_level}) > 1:
            return ()
        agreed.append(PodCgroup(at_level[0].pod_uid, container_ids.pop() if len(container_ids) == 1 else ""))
    return tuple(agreed)


def _pods(path: str) -> tuple[PodCgroup, ...]:
    """Return all pods of one path, outermost first, each with the first container id after it."""
    matches = list(_POD.finditer(path))
    pods = []
    for number, match in enumerate(matches):
        end = matches[number + 1].start() if number + 1 < len(matches) else len(path)
        container = _CONTAINER.search(path, match.end(), end)
        pods.append(PodCgroup(PodUid(match[1].replace("_", "-")), container[1] if container else ""))
    return tuple(pods)


def _is_own_sibling(path: str) -> bool:
    """Whether a path is a sibling of gpumap's own container in a private namespace: `/../cri-containerd-<id>.scope`."""
    steps = [step for step in path.split("/") if step]
    if not steps or steps[0] != "..":
        return False
    after_dots = [step for step in steps if step != ".."]
    return bool(after_dots) and _CONTAINER_SCOPE.fullmatch(after_dots[0]) is not None


@functools.lru_cache(1)
def is_outside(text: str, own_cgroup: OwnCgroup) -> bool:
    """Return whether a process is certainly outside gpumap's own pod: in another pod, or a process of the node.

    This needs no rights over the process. One such process that is not ending proves that gpumap sees the PIDs of other
    containers.
    """
    all_paths = paths(text)
    member = _membership(all_paths, all_paths, own_is_root=False)
    own_uids = {pod.pod_uid for pod in own_cgroup.membership.pods}
    if any(_POD.search(path) for path in all_paths):
        return bool(member.pods) and member.pods[-1].pod_uid not in own_uids
    own_in_pod = bool(own_uids)
    return any(
        (path.startswith("/..") and not _is_own_sibling(path)) or (own_in_pod and not path.startswith("/.."))
        for path in all_paths
    )


def is_bare_host(own_cgroup: OwnCgroup) -> bool:
    """Return whether gpumap runs as a service or in a login session of the node: not `/`, no pod, no container."""
    if own_cgroup.membership.pods or own_cgroup.is_root or not own_cgroup.paths:
        return False
    return not any(_CONTAINER.search(path) or path.startswith("/..") for path in own_cgroup.paths)
