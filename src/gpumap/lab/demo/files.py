"""Keeps a node's files true to a `World`: its checkpoints, /var/log and /proc. Writes only what changed.

What others read while it changes appears and disappears whole, by renaming, as it does on a real node.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from gpumap.lab.demo.texts import link_name, link_target, tree_name
from gpumap.lab.demo.world import World

Folder = tuple[tuple[str, str], ...]
"""Files of a folder: relative path and content."""


class NodeFiles:
    """The files below `directory`, as they were shown last."""

    def __init__(self, directory: Path) -> None:
        self.staging = directory / "staging"
        self._checkpoint = directory / "kubelet" / "device-plugins" / "kubelet_internal_checkpoint"
        self._notes = directory / "kubelet" / "plugins" / "gpu.nvidia.com" / "checkpoint.json"
        self._pods = directory / "log" / "pods"
        self._containers = directory / "log" / "containers"
        self._proc = directory / "proc"
        self._written: dict[Path, str] = {}
        self._trees: dict[str, Folder] = {}
        self._processes: dict[str, Folder] = {}
        self._links: dict[str, str] = {}

    def show(self, now: World) -> None:
        """What appears does so from the kubelet's files to the processes; what disappears, the other way round."""
        for folder in (self.staging, self._pods, self._containers, self._proc):
            folder.mkdir(parents=True, exist_ok=True)
        trees = {
            tree_name(tree): tuple((f"{container}/0.log", "") for container in tree.containers)
            for tree in now.logs.trees
        }
        links = {link_name(link): link_target(link) for link in now.logs.links}
        processes = {
            str(proc.pid): (("comm", f"{proc.comm}\n"), ("stat", proc.stat), ("cgroup", proc.cgroup))
            for proc in now.procs
        }
        self._write(self._checkpoint, now.checkpoint)
        if now.notes:
            self._write(self._notes, now.notes)
        self._add(self._pods, self._trees, trees)
        self._link(links)
        self._add(self._proc, self._processes, processes)
        self._remove(self._proc, self._processes, processes)
        self._unlink(links)
        self._remove(self._pods, self._trees, trees)

    def _write(self, path: Path, text: str) -> None:
        """As the kubelet's file store: a temporary file in the same directory, then a rename."""
        if text == self._written.get(path):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o600)
        temporary.rename(path)
        self._written[path] = text

    def _add(self, root: Path, shown: dict[str, Folder], wanted: Mapping[str, Folder]) -> None:
        for name, files in wanted.items():
            if shown.get(name) == files:
                continue
            new = name not in shown
            folder = self.staging / name if new else root / name
            folder.mkdir(exist_ok=True)
            for relative, content in files:
                (folder / relative).parent.mkdir(exist_ok=True)
                (folder / relative).write_text(content, encoding="utf-8")
            if new:
                folder.rename(root / name)
            shown[name] = files

    def _remove(self, root: Path, shown: dict[str, Folder], wanted: Mapping[str, Folder]) -> None:
        for name in shown.keys() - wanted.keys():
            gone = self.staging / "gone"  # a longer name than its own might be too long
            (root / name).rename(gone)
            shutil.rmtree(gone)
            del shown[name]

    def _link(self, wanted: Mapping[str, str]) -> None:
        for name in wanted.keys() - self._links.keys():
            (self._containers / name).symlink_to(wanted[name])
            self._links[name] = wanted[name]

    def _unlink(self, wanted: Mapping[str, str]) -> None:
        for name in self._links.keys() - wanted.keys():
            (self._containers / name).unlink(missing_ok=True)
            del self._links[name]
