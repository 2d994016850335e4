"""The kubelet's device checkpoint: which pod UID was given which device ids.

Read-only and best effort: the kubelet calls the file internal. It is rewritten whole (temporary file, then rename) at
each allocation, but not when a pod ends, so a row is no proof that its pod lives.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from gpumap.agent.sources import plugin_answers
from gpumap.agent.sources.json_files import ReplacedFile, StaleMountError, Text, each, is_text, parse_object
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


class CheckpointRow(msgspec.Struct, frozen=True):
    """A row of the file that is whole. `ids` and `answer` may be anything."""

    pod_uid: Text = msgspec.field(name="PodUID")
    container: Text = msgspec.field(name="ContainerName")
    resource: Text = msgspec.field(name="ResourceName")
    ids: object = msgspec.field(name="DeviceIDs", default=None)
    """Since kubelet 1.20 lists of ids by NUMA node, before that one list."""
    answer: object = msgspec.field(name="AllocResp", default=None)
    """The plugin's ContainerAllocateResponse in base64."""


class _Data(msgspec.Struct):
    rows: list[object] | None = msgspec.field(name="PodDeviceEntries", default=None)
    registered: dict[str, object] | None = msgspec.field(name="RegisteredDevices", default=None)


class _File(msgspec.Struct):
    data: _Data = msgspec.field(name="Data")


class CheckpointSource:
    """Reads the first of `candidates` that exists; a file that did not change is not read again."""

    def __init__(self, candidates: tuple[Path, ...]) -> None:
        self._files = tuple(ReplacedFile(path, parse) for path in candidates)

    def read(self) -> SourceAnswer[Checkpoint]:
        """Return the checkpoint, the very same object while the file is unchanged.

        Complaints: `checkpoint_row`, `plugin_answer`. Raises SourceError: `checkpoint_missing`,
        `checkpoint_unreadable`, `checkpoint_corrupt`.
        """
        for file in self._files:
            try:
                return file.read()
            except FileNotFoundError:
                continue
            except StaleMountError as error:
                # The kubelet renames a new file into place: of a file mounted by itself the old one stays visible.
                detail = f"{file.path}: was replaced; mount its directory instead"
                raise SourceError("checkpoint_unreadable", detail) from error
            except OSError as error:
                raise SourceError("checkpoint_unreadable", f"{file.path}: {error.strerror}") from error
            except ValueError as error:
                raise SourceError("checkpoint_corrupt", f"{file.path}: {error}") from error
        raise SourceError("checkpoint_missing", f"no file {' or '.join(str(file.path) for file in self._files)}")


def parse(text: bytes) -> SourceAnswer[Checkpoint]:
    """Read the checkpoint's JSON, in the format of kubelet ≤ 1.19 (ids as a list) or later (ids by NUMA node).

    The checksum is over Go's own dump of its structures and cannot be recomputed here; writes are atomic. Unknown keys
    are skipped. Rows that are not whole are skipped too, with a complaint, as are answers that cannot be read. Raises
    ValueError if the document is no checkpoint.
    """
    rows, registered = read(text)
    complaints: list[Complaint] = []
    entries = tuple(sorted(set(_entries(rows, complaints)), key=_order))
    devices = (ResourceDevices(resource, tuple(sorted(set(ids_in(value))))) for resource, value in registered.items())
    return SourceAnswer(Checkpoint(entries, tuple(sorted(devices))), tuple(complaints))


def read(text: bytes) -> tuple[tuple[CheckpointRow | None, ...], dict[str, object]]:
    """The file's rows, `None` for one that is not whole, and what is registered, by resource. Raises ValueError."""
    data = msgspec.convert(parse_object(text), _File).data
    registered = {resource: value for resource, value in (data.registered or {}).items() if is_text(resource)}
    return tuple(each(data.rows or (), CheckpointRow)), registered


def ids_in(value: object) -> Iterator[DeviceId]:
    """The ids in a list, or in an object's lists, whatever their keys; nothing lies deeper."""
    for group in value.values() if isinstance(value, dict) else [value]:
        if isinstance(group, list):
            yield from (DeviceId(item) for item in group if is_text(item))


def _entries(rows: Iterable[CheckpointRow | None], complaints: list[Complaint]) -> Iterator[CheckpointEntry]:
    for number, row in enumerate(rows):
        if row is None:
            complaints.append(Complaint("checkpoint_row", f"PodDeviceEntries[{number}]: not whole"))
            continue
        answer = None
        try:
            answer = _answer(row.answer)
        except ValueError as error:
            complaints.append(Complaint("plugin_answer", f"PodDeviceEntries[{number}].AllocResp: {error}"))
        yield CheckpointEntry(PodUid(row.pod_uid), row.container, row.resource, frozenset(ids_in(row.ids)), answer)


def _answer(text: object) -> PluginAnswer | None:
    """What the plugin answered to the allocation. Raises ValueError."""
    if text is None or text == "":
        return None
    if not isinstance(text, str):
        raise ValueError("no text")
    return plugin_answers.parse(base64.b64decode(text, validate=True))


def _order(entry: CheckpointEntry) -> tuple[str, str, str, list[DeviceId]]:
    return entry.pod_uid, entry.container, entry.resource, sorted(entry.ids)
