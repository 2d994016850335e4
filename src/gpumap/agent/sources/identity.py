"""Pod identity: which pod UID and container id has which name.

Log directories and links name them without any API. The device checkpoint, DRA's state, the Pods API and the files of
a scheduler add to that. Each is optional, and one must answer. DRA's state and a scheduler's files do not count: they
have only pods with claims, and pods that share GPUs.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from gpumap.agent.sources.checkpoint import CheckpointSource
from gpumap.agent.sources.dra import DraSource
from gpumap.model.formatting import and_more
from gpumap.model.observations import (
    Complaint,
    ContainerLink,
    LogTree,
    PodIdentity,
    PodLogs,
    ReportedPod,
    SharingContainers,
    SourceAnswer,
    SourceError,
)
from gpumap.model.terms import ContainerName, PodUid

_NOT_TAKEN = frozenset({"checkpoint_missing", "pod_logs_missing"})
# Names longer than 255 bytes lose the end of the id (kubelet, pkg/kubelet/kuberuntime/legacy.go). The rest must still
# separate containers of a pod.
_CONTAINER_ID = re.compile(r"[0-9a-f]{12,64}")
SETTLED_SECONDS = 2.0
"""A directory whose time stamp is younger than this may still change within the stamp's resolution: read it again."""
ENTRIES_MAX = 1 << 14
"""A larger directory is not read. Ended pods keep their directories until they are deleted. Kubernetes' default for
a whole cluster is 12,500 (kube-controller-manager, --terminated-pod-gc-threshold)."""


class PodIdentitySource:
    """Reads all identity sources. The Pods API and a scheduler's files are `None` if they are not configured.

    A file that is not mounted is not a complaint: the user did not grant this privilege.
    """

    def __init__(
        self,
        checkpoint: CheckpointSource,
        logs: PodLogsSource,
        dra: DraSource,
        wall: Callable[[], float],
        read_pods: Callable[[], SourceAnswer[tuple[ReportedPod, ...] | None]] | None = None,
        read_sharing: Callable[[], SourceAnswer[SharingContainers]] | None = None,
        pods_at: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._checkpoint = checkpoint
        self._logs = logs
        self._dra = dra
        self._wall = wall
        self._read_pods = read_pods
        self._read_sharing = read_sharing
        self._pods_at = pods_at

    def read(self) -> SourceAnswer[PodIdentity]:
        """Return what is readable. Raises SourceError with all reasons if no required source is readable."""
        pods_at = self._pods_at()  # before the pods: they may become newer in between, not older
        pods, complaints_of_pods = self._read_pods() if self._read_pods else (None, ())
        dra, complaints_of_dra = self._dra.read()
        sharing, complaints_of_sharing = self._read_sharing() if self._read_sharing else (SharingContainers(), ())
        complaints: list[Complaint] = [*complaints_of_pods, *complaints_of_dra, *complaints_of_sharing]
        checkpoint = logs = None
        try:
            checkpoint, complaints_of_checkpoint = self._checkpoint.read()
            complaints.extend(complaints_of_checkpoint)
        except SourceError as error:
            complaints.extend(error.complaints)
        try:
            logs, complaints_of_logs = self._logs.read(self._wall())
            complaints.extend(complaints_of_logs)
        except SourceError as error:
            complaints.extend(error.complaints)
        if checkpoint is None and logs is None and pods is None:
            reason, detail = complaints.pop()
            raise SourceError(reason, detail, tuple(complaints))
        identity = PodIdentity(checkpoint, logs, dra, pods, sharing, pods_at)
        complaints = [complaint for complaint in complaints if complaint.reason not in _NOT_TAKEN]
        return SourceAnswer(identity, tuple(complaints))


# --- the names of log directories and links ---------------------------------------------------------------------------


class PodLogsSource:
    """Reads the names below a log root (`/var/log`). It reads a directory again only after its time stamp changed.

    It reads only names, never a log. The kubelet makes `pods/<namespace>_<pod>_<uid>/<container>/` before a container
    starts and removes it after the pod. `containers/<pod>_<namespace>_<container>-<id>.log` links to the file in it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees_of: dict[str, tuple[int | None, LogTree]] = {}
        self._trees: tuple[LogTree, ...] = ()
        self._link_of: dict[str, ContainerLink] = {}
        self._links: tuple[int | None, tuple[ContainerLink, ...]] | None = None
        self._logs = PodLogs((), ())

    def read(self, wall: float) -> SourceAnswer[PodLogs]:
        """Return all names, the very same object while nothing changed. `wall` is the time of the wall clock.

        Raises SourceError: `pod_logs_missing`, `pod_logs_unreadable`. Links may be missing: the trees are enough to
        name pods.
        """
        complaints: list[Complaint] = []
        try:
            trees, links = self._read_trees(wall, complaints), self._read_links(wall, complaints)
        except FileNotFoundError as error:
            raise SourceError("pod_logs_missing", f"no directory {self._root / 'pods'}") from error
        except OSError as error:
            raise SourceError("pod_logs_unreadable", f"{error.filename}: {error.strerror}") from error
        if trees is not self._logs.trees or links is not self._logs.links:
            self._logs = PodLogs(trees, links)
        return SourceAnswer(self._logs, tuple(complaints))

    def _read_trees(self, wall: float, complaints: list[Complaint]) -> tuple[LogTree, ...]:
        root = str(self._root / "pods")
        names = _names(root)
        known, self._trees_of = self._trees_of, {}
        trees: list[LogTree] = []
        unreadable: list[str] = []
        for name in names:
            words, entry = name.split("_"), known.get(name)
            if not entry and (len(words) != 3 or not all(words) or not name.isprintable()):
                continue
            path = f"{root}/{name}"
            try:
                changed_ns = _settled_ns(path, wall)
                if entry is None or changed_ns is None or entry[0] != changed_ns:
                    tree = _tree(path, words)
                    entry = changed_ns, entry[1] if entry and entry[1] == tree else tree
                self._trees_of[name] = entry
                trees.append(entry[1])
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed between two reads, or not a directory
            except OSError as error:
                # Its name identifies its pod; only its content stays unknown.
                unreadable.append(f"{path}: {error.strerror}")
                trees.append(LogTree(PodUid(words[2]), words[0], words[1], ()))
        if unreadable:
            detail = and_more(unreadable[0], len(unreadable) - 1, "more directory", "more directories")
            complaints.append(Complaint("pod_logs_unreadable", detail))
        if set(map(id, trees)) != set(map(id, self._trees)):
            sorted_trees = tuple(sorted(trees))
            self._trees = self._trees if sorted_trees == self._trees else sorted_trees
        return self._trees

    def _read_links(self, wall: float, complaints: list[Complaint]) -> tuple[ContainerLink, ...]:
        folder = self._root / "containers"
        known = self._links
        try:
            changed_ns = _settled_ns(str(folder), wall)
            if known is not None and changed_ns is not None and known[0] == changed_ns:
                return known[1]
            names = _names(str(folder))
        except OSError as error:
            if error.errno == errno.EFBIG:
                complaints.append(Complaint("pod_logs_unreadable", f"{folder}: {error.strerror}"))
            return ()  # an optional source: not mounted, or a runtime that makes no links
        entries = ((name, self._link_of.get(name) or _link(folder / name)) for name in names)
        self._link_of = {name: link for name, link in entries if link is not None}
        links = tuple(sorted(self._link_of.values()))
        self._links = (changed_ns, known[1] if known is not None and links == known[1] else links)
        return self._links[1]


def _names(folder: str) -> list[str]:
    names = os.listdir(folder)
    if len(names) > ENTRIES_MAX:
        raise OSError(errno.EFBIG, f"{len(names)} entries; gpumap reads at most {ENTRIES_MAX}", folder)
    return names


def _tree(path: str, words: list[str]) -> LogTree:
    """Read the containers of a pod's directory."""
    namespace, pod, uid = words
    # A link to itself would raise an error if it was followed.
    folders = (entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    return LogTree(PodUid(uid), namespace, pod, tuple(sorted(name for name in folders if name.isprintable())))


def _settled_ns(path: str, wall: float) -> int | None:
    """Return the time stamp of a directory; `None` if the directory may still change within it."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError
    return status.st_mtime_ns if abs(wall - status.st_mtime) > SETTLED_SECONDS else None


def _link(path: Path) -> ContainerLink | None:
    """Read one link. Its target names the container: the link's own name is cut if it is too long."""
    try:
        target = os.readlink(path)
    except OSError:
        return None
    steps = target.split("/")
    tree = steps[-3].split("_") if len(steps) >= 3 else []
    if len(tree) != 3 or not target.isprintable():
        return None
    name = ContainerName(tree[0], tree[1], steps[-2])
    full_name = f"{name.pod}_{name.namespace}_{name.container}-"
    container_id = path.name.removesuffix(".log").removeprefix(full_name)
    if not path.name.startswith(full_name) or _CONTAINER_ID.fullmatch(container_id) is None:
        return None
    return ContainerLink(container_id, PodUid(tree[2]), name)
