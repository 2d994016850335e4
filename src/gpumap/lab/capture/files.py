"""The files of a frame where the real sources find them, below a folder of our own. Nothing is written outside it.

What others read while it changes appears and disappears whole, by renaming, as it does on a real node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpumap.lab.capture import contents

CHECKPOINT = "kubelet/device-plugins/kubelet_internal_checkpoint"
DRA_STATE = "kubelet/dra_manager_state"
DRA_CHECKPOINT = "kubelet/plugins/gpu.nvidia.com/checkpoint.json"
LOGS = "var/log"
PROC = "proc"
OWN = "own"
NVML = "nvml.json"

Thing = bytes | str | None
"""A file's bytes, a link's target, or a folder."""


class CapturedFiles:
    """The files below `directory`, as they were shown last."""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        self._staging = directory / "staging"
        self._shown: dict[str, Thing] = {}
        self._number = 0

    def show(self, frame: Mapping[str, bytes]) -> None:
        """What appears does so from the kubelet's files to NVML's processes; what disappears, the other way round."""
        self._staging.mkdir(exist_ok=True)
        wanted = things(frame)
        kept = {path: thing for path, thing in self._shown.items() if path in wanted and _same(thing, wanted[path])}
        changed = [path for path in wanted if path not in kept]
        gone = [path for path in self._shown if path not in kept and not _is_file(self._shown, wanted, path)]
        for path in _tops(gone):
            self._remove(path)
        below = _below(wanted)
        done: set[str] = set()
        for path in changed:
            if path not in done:
                done.update(self._add(path, wanted, below))
        self._shown = dict(wanted)

    def _remove(self, path: str) -> None:
        aside = self._aside()
        os.rename(self._root / path, aside)
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink()

    def _add(self, path: str, wanted: Mapping[str, Thing], below: Mapping[str, list[str]]) -> list[str]:
        """Make a thing, and what is below it, beside the tree; then put all of it in its place. Gives their paths."""
        aside = self._aside()
        made = [path]
        for one in made:  # grows while it is gone through: a folder before what is in it
            _make(aside / one.removeprefix(path).removeprefix("/"), wanted[one])
            made += below.get(one, ())
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        os.rename(aside, self._root / path)
        return made

    def _aside(self) -> Path:
        self._number += 1
        return self._staging / str(self._number)


def things(frame: Mapping[str, bytes]) -> dict[str, Thing]:
    """What stands on the node, a folder before what is in it, in the order in which it appears."""
    down = contents.down(frame)
    found: dict[str, Thing] = {}
    if "checkpoint" in down:
        found |= _DOWN_CHECKPOINTS.get(down["checkpoint"].reason, {})
    elif contents.CHECKPOINT in frame:
        found[CHECKPOINT] = frame[contents.CHECKPOINT]
    for place, name in ((DRA_STATE, contents.DRA_STATE), (DRA_CHECKPOINT, contents.DRA_CHECKPOINT)):
        if name in frame:
            found[place] = frame[name]
    if "pod_logs" not in down:
        for entry in contents.log_entries(frame) or ():
            for parent in _parents(entry.path):
                found.setdefault(parent, None)
            found[entry.path] = entry.target if entry.kind == "l" else None if entry.kind == "d" else b""
    elif down["pod_logs"].reason != "pod_logs_missing":
        found |= {**dict.fromkeys(_parents(LOGS)), LOGS: None, f"{LOGS}/pods": b""}  # no directory: nobody can read it
    found[PROC] = None
    if "procfs" not in down:  # without its own entry gpumap cannot judge any other
        found |= {OWN: None, f"{OWN}/cgroup": frame[contents.OWN_CGROUP]}
        if contents.OWN_PID_IN_TREE in frame:
            found[f"{PROC}/{os.getpid()}"] = None
        for path in sorted(frame):
            if path.startswith("proc/"):
                found.setdefault(path.rpartition("/")[0], None)
                found[path] = frame[path]
    return found | {NVML: frame[contents.NVML]}


_DOWN_CHECKPOINTS: Mapping[str, dict[str, Thing]] = {
    "checkpoint_unreadable": {CHECKPOINT: None},
    "checkpoint_corrupt": {CHECKPOINT: b"{"},
    "deadline_exceeded": {CHECKPOINT: None},
}


def _parents(path: str) -> list[str]:
    steps = path.split("/")
    return ["/".join(steps[:number]) for number in range(1, len(steps))]


def _below(wanted: Iterable[str]) -> dict[str, list[str]]:
    """What is in each folder."""
    found: dict[str, list[str]] = {}
    for path in wanted:
        found.setdefault(path.rpartition("/")[0], []).append(path)
    return found


def _same(before: Thing, after: Thing) -> bool:
    return type(before) is type(after) and before == after


def _is_file(before: Mapping[str, Thing], after: Mapping[str, Thing], path: str) -> bool:
    """A file whose text changes is replaced, not removed."""
    return isinstance(before[path], bytes) and isinstance(after.get(path), bytes)


def _tops(paths: list[str]) -> list[str]:
    """Those that are not below another, the last first."""
    gone = set(paths)
    return [path for path in reversed(paths) if gone.isdisjoint(_parents(path))]


def _make(place: Path, thing: Thing) -> None:
    if thing is None:
        place.mkdir()
    elif isinstance(thing, str):
        place.symlink_to(thing)
    else:
        place.write_bytes(thing)
