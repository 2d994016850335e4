"""The kubelet's device checkpoint: which pod UID was given which device ids.

Read-only and best effort: the kubelet calls the file internal. It is rewritten whole (temporary file, then rename) at
each allocation, but not when a pod ends, so a row is no proof that its pod lives.
"""

import base64
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from gpumap import plugin_answers
from gpumap.model import (
    Checkpoint,
    CheckpointEntry,
    Complaint,
    DeviceId,
    PluginAnswer,
    PodUid,
    ResourceDevices,
    SourceError,
    Told,
)

CHECKPOINT_BYTES_MAX = 64 << 20
"""A larger file is not read. 110 pods with 1000 ids each make 6 MB."""


class CheckpointSource:
    """Reads the first of `candidates` that exists; a file that did not change is not read again."""

    def __init__(self, candidates: tuple[Path, ...]) -> None:
        self._candidates = candidates
        self._seen: tuple[Path, int, int, int] | None = None
        self._told = Told(Checkpoint((), ()))

    def read(self) -> Told[Checkpoint]:
        """Give the checkpoint, the very same object while the file is unchanged.

        Complaints: `checkpoint_row`, `plugin_answer`. Raises SourceError: `checkpoint_missing`,
        `checkpoint_unreadable`, `checkpoint_corrupt`.
        """
        for path in self._candidates:
            try:
                found = path.stat()
                if not stat.S_ISREG(found.st_mode):
                    raise SourceError("checkpoint_unreadable", f"{path}: not a regular file")
                if not found.st_nlink:
                    # The kubelet renames a new file into place: of a file mounted by itself the old one stays visible.
                    raise SourceError("checkpoint_unreadable", f"{path}: was replaced; mount its directory instead")
                if found.st_size > CHECKPOINT_BYTES_MAX:
                    raise SourceError("checkpoint_unreadable", f"{path}: larger than {CHECKPOINT_BYTES_MAX} bytes")
                key = (path, found.st_ino, found.st_mtime_ns, found.st_size)
                if key != self._seen:
                    self._told = parse(path.read_bytes())
                    self._seen = key
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SourceError("checkpoint_unreadable", f"{path}: {error.strerror}") from error
            except ValueError as error:
                self._seen = None
                raise SourceError("checkpoint_corrupt", f"{path}: {error}") from error
            return self._told
        raise SourceError("checkpoint_missing", f"no file {' or '.join(map(str, self._candidates))}")


def parse(text: bytes) -> Told[Checkpoint]:
    """Read the checkpoint's JSON, in the format of kubelet ≤ 1.19 (ids as a list) or later (ids by NUMA node).

    The checksum is over Go's own dump of its structures and cannot be recomputed here; writes are atomic. Unknown keys
    are skipped. Rows that are not whole are skipped too, and complained of, as are answers that cannot be read. Raises
    ValueError where the document is no checkpoint.
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
    complaints: list[Complaint] = []
    checkpoint = Checkpoint(
        entries=tuple(sorted(set(_entries(rows or [], complaints)), key=_order)),
        registered=tuple(
            ResourceDevices(resource, tuple(sorted(set(_ids(ids)))))
            for resource, ids in sorted((registered or {}).items())
            if _is_text(resource)
        ),
    )
    return Told(checkpoint, tuple(complaints))


def _entries(rows: list[object], complaints: list[Complaint]) -> Iterator[CheckpointEntry]:
    for number, row in enumerate(rows):
        found = row if isinstance(row, dict) else {}
        uid, container, resource = found.get("PodUID"), found.get("ContainerName"), found.get("ResourceName")
        if not (_is_text(uid) and _is_text(container) and _is_text(resource)):
            complaints.append(Complaint("checkpoint_row", f"PodDeviceEntries[{number}]: not whole"))
            continue
        answer = None
        try:
            answer = _answer(found.get("AllocResp"))
        except ValueError as error:
            complaints.append(Complaint("plugin_answer", f"PodDeviceEntries[{number}].AllocResp: {error}"))
        yield CheckpointEntry(PodUid(uid), container, resource, frozenset(_ids(found.get("DeviceIDs"))), answer)


def _answer(text: object) -> PluginAnswer | None:
    """What the plugin answered to the allocation. Raises ValueError."""
    if text is None or text == "":
        return None
    if not isinstance(text, str):
        raise ValueError("no text")
    return plugin_answers.parse(base64.b64decode(text, validate=True))


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
