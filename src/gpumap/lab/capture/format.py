"""A capture on disk: the first frame at the top of the folder, each later one in `frames/<n>/` with its changes.

It reads only regular files of known names, and reports an error of a folder in one line. It writes a capture whole or
not at all. `contents` explains the files.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from gpumap.lab.capture import checkpoints, contents
from gpumap.lab.capture.limits import LIMITS, BoundedReader, Limits, refused
from gpumap.lab.decoding import decode_json, matching
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.terms import DEFAULT_RESOURCE_PATTERN

VERSION = 1
EXPECTED = "expected.prom"

_FILE = re.compile(
    r"kubelet/(?:list|allocatable)\.(?:pb|json)|kubelet/socket|pods_api\.json|kubelet_internal_checkpoint"
    r"|log\.tree|nvml\.json|pci\.json|dra_manager_state|dra_checkpoint\.json|down\.json|own/(?:cgroup|pid_in_tree)"
    r"|proc/[1-9]\d{0,9}/(?:cgroup|stat|status|cmdline)"
    rf"|{checkpoints.SHARING_PATH.pattern}",
    re.ASCII,
)
"""A frame's files. gpumap ignores other files in the folder (notes, expected.prom)."""


class About(Struct, frozen=True, omit_defaults=True, tag_field="version", tag=VERSION):
    """Data of the whole capture. `podresources` is the API's version, `resource` the flag --resource.

    `kubelet` is false for a machine without one (--no-kubelet).
    """

    node: Annotated[str, Meta(min_length=1)]
    kubelet: bool = True
    podresources: Annotated[str, matching("v1|v1alpha1", "v1 or v1alpha1")] = "v1"
    origin: str = ""
    description: str = ""
    resource: str = DEFAULT_RESOURCE_PATTERN


@dataclass(frozen=True, slots=True)
class Frame:
    """The sources' answers in one collection: all its files by path, `offset_seconds` after the first frame."""

    offset_seconds: float
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Capture:
    """At least one frame, in the order of their offsets."""

    about: About
    frames: tuple[Frame, ...]

    @property
    def size_bytes(self) -> int:
        """What writing it takes."""
        return sum(len(content) for _, changed, _ in _deltas(self) for content in changed.values())


# --- in ---------------------------------------------------------------------------------------------------------------


def load(folder: Path, limits: Limits = LIMITS) -> Capture:
    """Read and check a capture. Raises UsageError with one line that names the file."""
    reader = BoundedReader(folder, limits)
    try:
        about = _about(reader, folder)
        frames = [Frame(0.0, reader.files(folder, _FILE))]
        reader.hold(len(frames[0].files))
        _check(about, folder, frames[0].files, None)
        for path in reader.frame_folders():
            frame = _frame(reader, path, frames[-1])
            if frame.files is not frames[-1].files:
                reader.hold(len(frame.files))
                _check(about, path, frame.files, frames[-1].files)
            frames.append(frame)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Capture(about, tuple(frames))


def _check(about: About, folder: Path, files: Mapping[str, bytes], last_files: Mapping[str, bytes] | None) -> None:
    try:
        contents.check(files, last_files, has_kubelet=about.kubelet)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


class _FrameFile(Struct, frozen=True, omit_defaults=True):
    """frame.json. `gone_paths` are the paths of files of the frame before that this one does not have."""

    offset_seconds: float
    gone_paths: tuple[str, ...] = field(name="gone", default=())


def _about(reader: BoundedReader, folder: Path) -> About:
    path = folder / "capture.json"
    about = decode_json(reader.read_description(path), About, str(path))
    why = refused(about.resource)
    if why is not None:
        raise UsageError(f"{path}: resource {why}")
    return about


def _frame(reader: BoundedReader, folder: Path, last_frame: Frame) -> Frame:
    path = folder / "frame.json"
    file = decode_json(reader.read_description(path), _FrameFile, str(path))
    if not last_frame.offset_seconds <= file.offset_seconds < 1e9:
        raise UsageError(f"{path}: offset_seconds is not a number from {last_frame.offset_seconds:g} on")
    changed = reader.files(folder, _FILE)
    if not changed and not file.gone_paths:
        return Frame(file.offset_seconds, last_frame.files)
    gone_paths = set(file.gone_paths)
    kept_files = {name: content for name, content in last_frame.files.items() if name not in gone_paths}
    return Frame(file.offset_seconds, {**kept_files, **changed})


# --- out --------------------------------------------------------------------------------------------------------------


def refuse_unless_new(folder: Path) -> None:
    """Raise UsageError if a capture cannot be written, because the path exists or is not writable."""
    try:
        if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise UsageError(f"{folder}: is there already, and is not an empty folder")
        parent = Path(os.path.abspath(folder)).parent
        if not parent.is_dir():
            raise UsageError(f"{parent}: is not a folder")
        if os.path.ismount(folder):
            raise UsageError(f"{folder}: is a mount, which cannot be replaced: name a folder in it")
        probe = _beside(folder)
        probe.mkdir(mode=0o700)
        probe.rmdir()
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}") from error


def write(capture: Capture, folder: Path, expected: bytes) -> None:
    """Write it readable only for its owner, first next to `folder`, and then move it to its place at once."""
    temporary = _beside(folder)
    try:
        temporary.mkdir(mode=0o700)
        try:
            about = msgspec.json.format(msgspec.json.encode(capture.about), indent=2)
            _put(temporary / "capture.json", about + b"\n")
            _put(temporary / EXPECTED, expected)
            for number, (frame, changed, gone_paths) in enumerate(_deltas(capture)):
                place = temporary / "frames" / f"{number:04}" if number else temporary
                for name, content in changed.items():
                    _put(place / name, content)
                if number:
                    file = _FrameFile(round(frame.offset_seconds, 3), tuple(gone_paths))
                    _put(place / "frame.json", msgspec.json.encode(file) + b"\n")
            temporary.rename(os.path.abspath(folder))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise FatalError(f"{folder}: cannot be written: {error.strerror}") from error


def _beside(folder: Path) -> Path:
    """Return an unused name in the same folder."""
    place = Path(os.path.abspath(folder))
    return place.with_name(f".{place.name[:64]}.{secrets.token_hex(4)}")


def _deltas(capture: Capture) -> Iterator[tuple[Frame, dict[str, bytes], list[str]]]:
    """Return each frame with the files that differ from the frame before, and those that are gone."""
    last_files: Mapping[str, bytes] = {}
    for frame in capture.frames:
        changed = {name: content for name, content in frame.files.items() if last_files.get(name) != content}
        yield frame, changed, sorted(last_files.keys() - frame.files.keys())
        last_files = frame.files


def _put(path: Path, content: bytes) -> None:
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
