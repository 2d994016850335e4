"""The files of a simulated or captured node, below one directory. Nothing is written outside it.

What others read while it changes appears and disappears whole, by renaming, as it does on a real node. Only what
changed is written. After an error, such as a full disk, the next call writes what is missing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gpumap.model.errors import FatalError
from gpumap.model.grouping import grouped

Content = bytes | str | None
"""A file's bytes, a link's target, or a folder."""
Tree = Mapping[str, Content]
"""By path, a folder before what is in it, in the order in which it appears."""

TEMPORARY_BYTES_MAX = 48
"""A longer name of the temporary folder leaves no room for the path of the kubelet's socket (107 bytes)."""


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a short enough path for a socket. If the root is read-only, only /dev/shm may be writable.

    Raises FatalError if there is none.
    """
    for place in (os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108
        if place and len(os.fsencode(place)) <= TEMPORARY_BYTES_MAX and os.access(place, os.W_OK | os.X_OK):
            return tempfile.TemporaryDirectory(prefix="gpumap-", dir=place)
    raise FatalError("no folder to write to for a moment: set $TMPDIR to one with a short name")


class NodeFiles:
    """The files below `directory`, as they were shown last."""

    def __init__(self, directory: Path) -> None:
        self.staging = directory / "staging"
        self._root = directory
        self._shown: dict[str, Content] = {}
        self._number = 0

    def show(self, tree: Tree) -> None:
        """Remove what is gone, the last of the tree first; then add what is new in the order of the tree."""
        self.staging.mkdir(exist_ok=True)
        gone_paths = {
            path: None
            for path, content in self._shown.items()
            # A file that gets another content is only replaced.
            if path not in tree or not (_same(content, tree[path]) or type(content) is type(tree[path]) is bytes)
        }
        for path in [path for path in reversed(gone_paths) if gone_paths.keys().isdisjoint(parents(path))]:
            self._remove(path)
        below = grouped((path.rpartition("/")[0], path) for path in tree)  # what is in each folder
        for path, content in tree.items():
            if path not in self._shown or not _same(self._shown[path], content):
                self._add(path, tree, below)

    def add(self, path: str, content: bytes) -> None:
        """Add a file that its reader removes."""
        self._add(path, {path: content}, {})
        del self._shown[path]

    def _remove(self, path: str) -> None:
        aside = self._aside()
        os.rename(self._root / path, aside)
        self._shown = {
            shown_path: content
            for shown_path, content in self._shown.items()
            if not f"{shown_path}/".startswith(f"{path}/")
        }
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink()

    def _add(self, path: str, tree: Tree, below: Mapping[str, list[str]]) -> None:
        """Make a thing, and what is below it, beside the tree; then put all of it in its place."""
        aside = self._aside()
        added_paths = [path]
        for added_path in added_paths:  # grows in the loop: a folder before what is in it
            _make(aside / added_path.removeprefix(path).removeprefix("/"), tree[added_path])
            added_paths += below.get(added_path, ())
        if path.startswith("kubelet/") and aside.is_file():
            aside.chmod(0o600)  # as the kubelet's file store does
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        os.rename(aside, self._root / path)
        self._shown |= {added_path: tree[added_path] for added_path in added_paths}

    def _aside(self) -> Path:
        """A new name, of a constant length: that of a pod's directory may be as long as names can be."""
        self._number += 1
        return self.staging / str(self._number)


def parents(path: str) -> list[str]:
    """The folders above a path, the first one first."""
    steps = path.split("/")
    return ["/".join(steps[:number]) for number in range(1, len(steps))]


def _same(content: Content, other_content: Content) -> bool:
    return type(content) is type(other_content) and content == other_content


def _make(place: Path, content: Content) -> None:
    if content is None:
        place.mkdir()
    elif isinstance(content, str):
        place.symlink_to(content)
    else:
        place.write_bytes(content)
