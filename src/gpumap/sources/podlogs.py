"""The names of log directories and links: pod UIDs and container ids with their names, without any API.

Only names are read, never a log. The kubelet makes `pods/<namespace>_<pod>_<uid>/<container>/` before a container
starts and removes it after the pod; `containers/<pod>_<namespace>_<container>-<id>.log` links to the file in it.
"""

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from gpumap.model import Complaint, ContainerLink, ContainerName, LogTree, PodLogs, PodUid, SourceError, Told

# Names longer than 255 bytes lose the end of the id (kubelet, pkg/kubelet/kuberuntime/legacy.go); what is left of one
# must still tell containers of a pod apart.
_CONTAINER_ID = re.compile(r"[0-9a-f]{12,64}")
SETTLED_SECONDS = 2.0
"""A directory whose time stamp is younger than this may still change within the stamp's resolution: read it again."""


class _Directory(NamedTuple):
    changed_ns: int
    settled: bool


class PodLogsSource:
    """Reads the names below a log root (`/var/log`), a directory again only after its time stamp changed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._containers_of: dict[str, tuple[_Directory, tuple[str, ...]]] = {}
        self._link_of: dict[str, ContainerLink] = {}
        self._links: tuple[_Directory, tuple[ContainerLink, ...]] | None = None
        self._logs = PodLogs((), ())

    def read(self, now: float) -> Told[PodLogs]:
        """Give all names, the very same object while nothing changed. `now` is the wall clock.

        Raises SourceError: `pod_logs_missing`, `pod_logs_unreadable`. Links may lack: the trees alone name pods.
        """
        complaints: list[Complaint] = []
        try:
            logs = PodLogs(self._read_trees(now, complaints), self._read_links(now))
        except FileNotFoundError as error:
            raise SourceError("pod_logs_missing", f"no directory {self._root / 'pods'}") from error
        except OSError as error:
            raise SourceError("pod_logs_unreadable", f"{error.filename}: {error.strerror}") from error
        if logs != self._logs:
            self._logs = logs
        return Told(self._logs, tuple(complaints))

    def _read_trees(self, now: float, complaints: list[Complaint]) -> tuple[LogTree, ...]:
        trees: list[LogTree] = []
        containers_of: dict[str, tuple[_Directory, tuple[str, ...]]] = {}
        for name in os.listdir(self._root / "pods"):
            parts = name.split("_")
            if len(parts) != 3 or not all(parts) or not name.isprintable():
                continue
            path = self._root / "pods" / name
            containers: tuple[str, ...] = ()
            try:
                seen = _directory(path, now)
                known = self._containers_of.get(name)
                if known is None or known[0] != seen or not seen.settled:
                    known = (seen, tuple(sorted(entry.name for entry in os.scandir(path) if _is_container(entry))))
                containers_of[name] = known
                containers = known[1]
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed between two reads, or no directory
            except OSError as error:
                # Its name says which pod it is of; only what is in it stays unknown.
                complaints.append(Complaint("pod_logs_unreadable", f"{path}: {error.strerror}"))
            trees.append(LogTree(PodUid(parts[2]), parts[0], parts[1], containers))
        self._containers_of = containers_of
        return tuple(sorted(trees))

    def _read_links(self, now: float) -> tuple[ContainerLink, ...]:
        folder = self._root / "containers"
        try:
            seen = _directory(folder, now)
            if self._links is not None and self._links[0] == seen and seen.settled:
                return self._links[1]
            names = os.listdir(folder)
        except OSError:
            return ()  # an optional source: not mounted, or a runtime that makes no links
        known = self._link_of
        found = {name: known.get(name) or _link(folder / name) for name in names}
        self._link_of = {name: link for name, link in found.items() if link is not None}
        links = tuple(sorted(self._link_of.values()))
        self._links = (seen, links)
        return links


def _directory(path: Path, now: float) -> _Directory:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError
    return _Directory(found.st_mtime_ns, settled=abs(now - found.st_mtime) > SETTLED_SECONDS)


def _is_container(entry: os.DirEntry[str]) -> bool:
    return entry.name.isprintable() and entry.is_dir()


def _link(path: Path) -> ContainerLink | None:
    """Read one link. Its target is what names the container: the link's own name is cut where it is too long."""
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
