"""The kubelet's device checkpoint: which pod UID was given which device ids.

Read-only and best effort: the kubelet calls the file internal. It is rewritten whole (temporary file, then rename) at
each allocation, but not when a pod ends, so a row is no proof that its pod lives.
"""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from gpumap.model import Checkpoint, CheckpointEntry, DeviceId, PodUid, ResourceDevices, SourceError


class CheckpointSource:
    """Reads the first of `candidates` that exists; a file that did not change is not read again."""

    def __init__(self, candidates: tuple[Path, ...]) -> None:
        self._candidates = candidates
        self._seen: tuple[Path, int, int, int] | None = None
        self._checkpoint = Checkpoint((), ())

    def read(self) -> Checkpoint:
        """Give the checkpoint, the very same object while the file is unchanged.

        Raises SourceError: `checkpoint_missing`, `checkpoint_unreadable`, `checkpoint_corrupt`.
        """
        for path in self._candidates:
            try:
                found = path.stat()
                if not stat.S_ISREG(found.st_mode):
                    raise SourceError("checkpoint_unreadable", f"{path}: not a regular file")
                key = (path, found.st_ino, found.st_mtime_ns, found.st_size)
                if key != self._seen:
                    self._checkpoint = parse(path.read_bytes())
                    self._seen = key
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SourceError("checkpoint_unreadable", f"{path}: {error.strerror}") from error
            except ValueError as error:
                self._seen = None
                raise SourceError("checkpoint_corrupt", f"{path}: {error}") from error
            return self._checkpoint
        raise SourceError("checkpoint_missing", f"no file {' or '.join(map(str, self._candidates))}")


def parse(text: bytes) -> Checkpoint:
    """Read the checkpoint's JSON, in the format of kubelet ≤ 1.19 (ids as a list) or later (ids by NUMA node).

    The checksum is over Go's own dump of its structures and cannot be recomputed here; writes are atomic. Unknown keys
    are skipped, rows that are not whole too. Raises ValueError where the document is no checkpoint.
    """
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    data = document.get("Data") if isinstance(document, dict) else None
    if not isinstance(data, dict):
        raise ValueError("no object Data in it")
    rows, registered = data.get("PodDeviceEntries"), data.get("RegisteredDevices")
    if not isinstance(rows, list | None) or not isinstance(registered, dict | None):
        raise ValueError("PodDeviceEntries is no list, or RegisteredDevices no object")
    return Checkpoint(
        entries=tuple(sorted(set(_entries(rows or [])), key=_order)),
        registered=tuple(
            ResourceDevices(resource, tuple(sorted(set(_ids(ids)))))
            for resource, ids in sorted((registered or {}).items())
            if _is_text(resource)
        ),
    )


def _entries(rows: list[object]) -> Iterator[CheckpointEntry]:
    for row in rows:
        if not isinstance(row, dict):
            continue
        uid, container, resource = row.get("PodUID"), row.get("ContainerName"), row.get("ResourceName")
        if _is_text(uid) and _is_text(container) and _is_text(resource):
            yield CheckpointEntry(PodUid(uid), container, resource, frozenset(_ids(row.get("DeviceIDs"))))


def _ids(value: object) -> Iterator[DeviceId]:
    groups = value.values() if isinstance(value, dict) else [value]
    for group in groups:
        if isinstance(group, list):
            yield from (DeviceId(item) for item in group if _is_text(item))


def _is_text(value: object) -> TypeGuard[str]:
    """A string that can be written out again: JSON can name half a character, which no page can hold."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _order(entry: CheckpointEntry) -> tuple[str, str, str, list[DeviceId]]:
    return entry.pod_uid, entry.container, entry.resource, sorted(entry.ids)
