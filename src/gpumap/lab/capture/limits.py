"""Protects against a capture from a stranger: bytes, files and regular expressions have limits.

`BoundedReader` limits the number and size of the files, and reads only regular ones. It checks each limit before it
reads, and raises UsageError, one line with the path. `refused` checks the capture's `--resource`: Python's `re` can
take for ever with a short expression.
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpumap.model.errors import UsageError
from gpumap.model.terms import DEFAULT_RESOURCE_PATTERN

_FOLDER = re.compile(r"kubelet|own|gpu_fractioning|proc|proc/[1-9]\d{0,9}", re.ASCII)
"""The folders of a frame's files, in addition to its own. The reader opens no other."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum size of a capture. `files` counts a file once for each frame that contains it, as in memory."""

    file_bytes: int = 64 << 20
    """The maximum answer of the kubelet's source."""
    description_bytes: int = 4 << 20
    """For capture.json and frame.json."""
    total_bytes: int = 256 << 20
    frames: int = 10_000
    frame_files: int = 20_000
    """Two for each process."""
    files: int = 5_000_000


LIMITS = Limits()


class BoundedReader:
    """Reads one capture, and counts what remains of its limits."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._bytes_left = limits.total_bytes
        self._files_left = limits.files

    def files(self, folder: Path, known: re.Pattern[str]) -> dict[str, bytes]:
        """The files below a frame's folder whose paths are known, in the order of their paths."""
        paths: dict[str, Path] = {}
        for name, path in _known(folder, "", known):
            paths[name] = path
            if len(paths) > self._limits.frame_files:
                raise UsageError(f"{folder}: more than {self._limits.frame_files} files")
        return {name: self.read(path) for name, path in sorted(paths.items())}

    def read_description(self, path: Path) -> bytes:
        """capture.json or frame.json."""
        return self.read(path, self._limits.description_bytes)

    def read(self, path: Path, most_bytes: int | None = None) -> bytes:
        """Read a regular file of at most this size."""
        limit_bytes = self._limits.file_bytes if most_bytes is None else most_bytes
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path}: is not a regular file")
        if status.st_size > limit_bytes:
            raise UsageError(f"{path}: is larger than {limit_bytes >> 20} MiB")
        self._bytes_left -= status.st_size
        if self._bytes_left < 0:
            raise UsageError(f"{self._folder}: is larger than {self._limits.total_bytes >> 20} MiB")
        # A file that became a link or a pipe meanwhile is neither followed nor waited for.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            content = file.read(status.st_size + 1)
        if len(content) > status.st_size:
            raise UsageError(f"{path}: grew while it was read")
        return content

    def hold(self, files: int) -> None:
        """Maximum number of files of a frame."""
        self._files_left -= files
        if self._files_left < 0:
            raise UsageError(f"{self._folder}: more than {self._limits.files} files, each counted once a frame")

    def frame_folders(self) -> list[Path]:
        """The folders of the later frames, in order."""
        folder = self._folder / "frames"
        if folder.is_symlink():
            raise UsageError(f"{folder}: is a link")
        paths: list[Path] = []
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_symlink() or not path.is_dir() or re.fullmatch(r"[0-9]{4}", path.name) is None:
                raise UsageError(f"{path}: is not a frame, a folder named by four digits")
            paths.append(path)
            if len(paths) >= self._limits.frames:
                raise UsageError(f"{folder}: more than {self._limits.frames} frames")
        return sorted(paths)


def _known(folder: Path, prefix: str, known: re.Pattern[str]) -> Iterator[tuple[str, Path]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if known.fullmatch(name):
                yield name, Path(entry.path)
            elif _FOLDER.fullmatch(name) and entry.is_dir(follow_symlinks=False):
                yield from _known(Path(entry.path), f"{name}/", known)


# --- regular expressions ----------------------------------------------------------------------------------------------

PATTERN_CHARACTERS_MAX = 1024
PATTERN_CHOICES_MAX = 3
"""Groups and repetitions: each may make a name take as much longer as the name or the group is long."""

_LITERAL = re.compile(r"\\[^0-9A-Za-z]|\\[dDwWsSbB]|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[aimsu-]*:|<?[=!])", re.DOTALL)
_DEFAULT = re.compile(rf"(?:(?<=\|)|^){re.escape(DEFAULT_RESOURCE_PATTERN)}(?=\||$)")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_CHOICE = re.compile(r"\(|[*+?{]\??")


def refused(pattern: str) -> str | None:
    """Return why a capture must not use this expression; `None` if it may. The default's alternatives are no risk."""
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        return f"is longer than {PATTERN_CHARACTERS_MAX} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # Python would print it: a later `re` may read it otherwise
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError, FutureWarning) as error:
        return f"is not a regular expression: {error}"
    # An expression for one character becomes one, and a group's head a mere parenthesis.
    bare = _LITERAL.sub(lambda match: "(" if match[0].startswith("(") else "x", _DEFAULT.sub("x", pattern, count=1))
    if _REPEATED_GROUP.search(bare):
        return "repeats a group, which may take for ever"
    if "\\" in bare or "(?" in bare:
        return "refers to a group, or names a character in a way that a capture may not"
    if len(_CHOICE.findall(bare)) > PATTERN_CHOICES_MAX:
        return f"has more than {PATTERN_CHOICES_MAX} groups and repetitions, which may take for ever"
    return None
