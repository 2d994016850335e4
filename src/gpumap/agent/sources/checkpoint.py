"""The kubelet's device checkpoint: which pod UID was given which device ids.

Read-only and best effort: the kubelet calls the file internal. It is rewritten whole (temporary file, then rename) at
each allocation, but not when a pod ends, so a row is no proof that its pod lives.
"""

import base64
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gpumap.agent.sources import plugin_answers
from gpumap.agent.sources.json_texts import Object, is_object, is_text, parse_object
from gpumap.model.observations import (
    Checkpoint,
    CheckpointEntry,
    Complaint,
    DeviceId,
    PluginAnswer,
    PodUid,
    ResourceDevices,
    SourceAnswer,
    SourceError,
)

CHECKPOINT_BYTES_MAX = 64 << 20
"""A larger file is not read. 110 pods with 1000 ids each make 6 MB."""


class CheckpointSource:
    """Reads the first of `candidates` that exists; a file that did not change is not read again."""

    def __init__(self, candidates: tuple[Path, ...]) -> None:
        self._candidates = candidates
        self._seen: tuple[Path, int, int, int] | None = None
        self._told = SourceAnswer(Checkpoint((), ()))

    def read(self) -> SourceAnswer[Checkpoint]:
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


def parse(text: bytes) -> SourceAnswer[Checkpoint]:
    """Read the checkpoint's JSON, in the format of kubelet ≤ 1.19 (ids as a list) or later (ids by NUMA node).

    The checksum is over Go's own dump of its structures and cannot be recomputed here; writes are atomic. Unknown keys
    are skipped. Rows that are not whole are skipped too, and complained of, as are answers that cannot be read. Raises
    ValueError where the document is no checkpoint.
    """
    rows, registered = read(text)
    complaints: list[Complaint] = []
    entries = tuple(sorted(set(_entries(rows, complaints)), key=_order))
    devices = (ResourceDevices(resource, tuple(sorted(set(ids_in(value))))) for resource, value in registered.items())
    return SourceAnswer(Checkpoint(entries, tuple(sorted(devices))), tuple(complaints))


class Row(NamedTuple):
    """A row of the file that is whole. `ids` and `answer` are as they stand there: anything."""

    pod_uid: PodUid
    container: str
    resource: str
    ids: object
    answer: object


def read(text: bytes) -> tuple[tuple[Row | None, ...], dict[str, object]]:
    """The file's rows, `None` for one that is not whole, and what is registered, by resource. Raises ValueError."""
    data = parse_object(text).get("Data")
    if not is_object(data):
        raise ValueError("no object Data in it")
    rows, registered = data.get("PodDeviceEntries"), data.get("RegisteredDevices")
    if not isinstance(rows, list | None) or not isinstance(registered, dict | None):
        raise ValueError("PodDeviceEntries is no list, or RegisteredDevices no object")
    return (
        tuple(_row(row if is_object(row) else {}) for row in rows or ()),
        {resource: value for resource, value in (registered or {}).items() if is_text(resource)},
    )


def ids_in(value: object) -> Iterator[DeviceId]:
    """The ids in a list, or in an object's lists, whatever their keys; nothing lies deeper."""
    for group in value.values() if isinstance(value, dict) else [value]:
        if isinstance(group, list):
            yield from (DeviceId(item) for item in group if is_text(item))


def _row(row: Object) -> Row | None:
    uid, container, resource = row.get("PodUID"), row.get("ContainerName"), row.get("ResourceName")
    if not (is_text(uid) and is_text(container) and is_text(resource)):
        return None
    return Row(PodUid(uid), container, resource, row.get("DeviceIDs"), row.get("AllocResp"))


def _entries(rows: Iterable[Row | None], complaints: list[Complaint]) -> Iterator[CheckpointEntry]:
    for number, row in enumerate(rows):
        if row is None:
            complaints.append(Complaint("checkpoint_row", f"PodDeviceEntries[{number}]: not whole"))
            continue
        answer = None
        try:
            answer = _answer(row.answer)
        except ValueError as error:
            complaints.append(Complaint("plugin_answer", f"PodDeviceEntries[{number}].AllocResp: {error}"))
        yield CheckpointEntry(row.pod_uid, row.container, row.resource, frozenset(ids_in(row.ids)), answer)


def _answer(text: object) -> PluginAnswer | None:
    """What the plugin answered to the allocation. Raises ValueError."""
    if text is None or text == "":
        return None
    if not isinstance(text, str):
        raise ValueError("no text")
    return plugin_answers.parse(base64.b64decode(text, validate=True))


def _order(entry: CheckpointEntry) -> tuple[str, str, str, list[DeviceId]]:
    return entry.pod_uid, entry.container, entry.resource, sorted(entry.ids)
