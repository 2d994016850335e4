"""A capture on disk: the first frame at the top of the folder, each later one in `frames/<n>/` with what changed.

Reads nothing but regular files of known names, and says in one line what is wrong with a folder. Writes a capture whole
or not at all. What the files mean is in `contents`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpumap.lab.capture import contents
from gpumap.lab.capture import resource as expressions
from gpumap.lab.capture.bounded import LIMITS, BoundedReader, Limits
from gpumap.model.device_ids import DEFAULT_RESOURCE_PATTERN
from gpumap.model.errors import FatalError, UsageError

VERSION = 1
EXPECTED = "expected.prom"

_FILE = re.compile(
    r"kubelet/(?:list|allocatable)\.(?:pb|json)|kubelet/socket|kubelet_internal_checkpoint|log\.tree|nvml\.json"
    r"|dra_manager_state|dra_checkpoint\.json|down\.json|own/(?:cgroup|pid_in_tree)|proc/[1-9]\d{0,9}/(?:cgroup|stat)",
    re.ASCII,
)
"""A frame's files. What else stands in the folder (notes, expected.prom) is nobody's business here."""


@dataclass(frozen=True, slots=True)
class About:
    """What is said once of a capture. `podresources` is the API's version, `resource` the flag --resource."""

    node: str
    podresources: str = "v1"
    origin: str = ""
    description: str = ""
    resource: str = DEFAULT_RESOURCE_PATTERN


@dataclass(frozen=True, slots=True)
class Frame:
    """What the sources said in one collection: all its files by path, `offset_seconds` after the first frame."""

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
        return sum(len(said) for _, changed, _ in _deltas(self) for said in changed.values())


# --- in ---------------------------------------------------------------------------------------------------------------


def load(folder: Path, limits: Limits = LIMITS) -> Capture:
    """Read and check a capture. Raises UsageError with one line that names the file."""
    reader = BoundedReader(folder, limits)
    try:
        about = _about(folder / "capture.json", _object(reader, folder, "capture.json"))
        frames = [Frame(0.0, reader.files(folder, _FILE))]
        reader.hold(len(frames[0].files))
        _check(folder, frames[0].files, None)
        for path in reader.frame_folders():
            told = _object(reader, path, "frame.json")
            frame = _frame(path, frames[-1], told, reader.files(path, _FILE))
            if frame.files is not frames[-1].files:
                reader.hold(len(frame.files))
                _check(path, frame.files, frames[-1].files)
            frames.append(frame)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: {error.strerror}") from error
    return Capture(about, tuple(frames))


def _check(folder: Path, files: Mapping[str, bytes], before: Mapping[str, bytes] | None) -> None:
    try:
        contents.check(files, before)
    except ValueError as error:
        raise UsageError(f"{folder}: {error}") from error


def _about(path: Path, said: Mapping[str, object]) -> About:
    def text(key: str, default: str = "") -> str:
        value = said.get(key, default)
        if not isinstance(value, str):
            raise UsageError(f"{path}: {key} is not a text")
        return value

    version = said.get("version")
    if type(version) is not int or version != VERSION:
        raise UsageError(f"{path}: version {version!r:.40} is not understood; this gpumap reads {VERSION}")
    about = About(
        text("node"),
        text("podresources", "v1"),
        text("origin"),
        text("description"),
        text("resource", DEFAULT_RESOURCE_PATTERN),
    )
    if not about.node:
        raise UsageError(f"{path}: no node")
    if about.podresources not in ("v1", "v1alpha1"):
        raise UsageError(f'{path}: podresources "{about.podresources:.40}" is neither v1 nor v1alpha1')
    why = expressions.refused(about.resource)
    if why is not None:
        raise UsageError(f"{path}: resource {why}")
    return about


def _frame(path: Path, before: Frame, told: Mapping[str, object], changed: Mapping[str, bytes]) -> Frame:
    offset, gone = told.get("offset_seconds"), told.get("gone", [])
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not before.offset_seconds <= offset < 1e9:
        raise UsageError(f"{path}/frame.json: offset_seconds is not a number from {before.offset_seconds:g} on")
    if not isinstance(gone, list) or not all(isinstance(name, str) for name in gone):
        raise UsageError(f"{path}/frame.json: gone is not a list of paths")
    if not changed and not gone:
        return Frame(float(offset), before.files)
    left = set(gone)
    kept = {name: said for name, said in before.files.items() if name not in left}
    return Frame(float(offset), {**kept, **changed})


def _object(reader: BoundedReader, folder: Path, name: str) -> Mapping[str, object]:
    try:
        return contents.parsed(reader.said(folder / name), name)
    except ValueError as error:
        raise UsageError(f"{folder}/{error}") from error


# --- out --------------------------------------------------------------------------------------------------------------


def refuse_unless_new(folder: Path) -> None:
    """Raises UsageError where a capture cannot be written because something is there, or nothing can be."""
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
    """Write it for its owner's eyes alone, beside `folder` first, and then all at once in its place."""
    temporary = _beside(folder)
    try:
        temporary.mkdir(mode=0o700)
        try:
            _put(temporary / "capture.json", _about_text(capture.about))
            _put(temporary / EXPECTED, expected)
            for number, (frame, changed, gone) in enumerate(_deltas(capture)):
                place = temporary / "frames" / f"{number:04}" if number else temporary
                for name, said in changed.items():
                    _put(place / name, said)
                if number:
                    _put(place / "frame.json", _frame_text(frame, gone))
            temporary.rename(os.path.abspath(folder))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise FatalError(f"{folder}: cannot be written: {error.strerror}") from error


def _beside(folder: Path) -> Path:
    """A name in the same folder that nobody has."""
    place = Path(os.path.abspath(folder))
    return place.with_name(f".{place.name[:64]}.{secrets.token_hex(4)}")


def _deltas(capture: Capture) -> Iterator[tuple[Frame, dict[str, bytes], list[str]]]:
    """Each frame with the files that differ from the frame before, and those that are gone."""
    before: Mapping[str, bytes] = {}
    for frame in capture.frames:
        changed = {name: said for name, said in frame.files.items() if before.get(name) != said}
        yield frame, changed, sorted(before.keys() - frame.files.keys())
        before = frame.files


def _about_text(about: About) -> bytes:
    said: dict[str, object] = {
        "version": VERSION,
        "node": about.node,
        "podresources": about.podresources,
        "origin": about.origin,
        "description": about.description,
    }
    if about.resource != DEFAULT_RESOURCE_PATTERN:
        said["resource"] = about.resource
    return json.dumps(said, indent=2, ensure_ascii=False).encode() + b"\n"


def _frame_text(frame: Frame, gone: list[str]) -> bytes:
    said: dict[str, object] = {"offset_seconds": round(frame.offset_seconds, 3)}
    if gone:
        said["gone"] = gone
    return json.dumps(said).encode() + b"\n"


def _put(path: Path, said: bytes) -> None:
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(said)
