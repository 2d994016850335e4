"""DRA's local state: for which pods a claim is prepared, as the kubelet has it, and with which devices, as NVIDIA's DRA
driver has it.

Read-only and best effort: both files are internal to their writers, which replace them whole (temporary file, then
rename). Each is a step of the privilege ladder: a file that is merely missing is no complaint. Never raises.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeGuard, TypeVar

from gpumap.agent.sources import prepared
from gpumap.agent.sources.json_texts import is_object, is_text, parse_object
from gpumap.model.observations import ClaimPods, Complaint, DraState, PodUid, PreparedDevice, SourceAnswer

FILE_BYTES_MAX = 64 << 20
"""A larger file is not read. What bloats the kubelet's List (kubernetes/kubernetes#141335) stands in its state too."""
_ENTRIES = ("Entries", "ClaimInfoStateList", "entries")
_OUTERMOST = frozenset({"version", "checksum", "Checksum", *_ENTRIES})

T = TypeVar("T")


class DraSource:
    """Reads the kubelet's `dra_manager_state` and the driver's `checkpoint.json`, where they are."""

    def __init__(self, state: Path, driver_checkpoint: Path) -> None:
        self._claims = _File[tuple[ClaimPods, ...]](state, "dra_state", parse_state)
        self._prepared = _File[tuple[PreparedDevice, ...]](driver_checkpoint, "dra_checkpoint", prepared.parse)
        self._told = DraState()

    def read(self) -> SourceAnswer[DraState]:
        """Give what can be read, the very same object while it is unchanged.

        Complaints: `dra_state_` or `dra_checkpoint_` with `unreadable`, `corrupt`, `stale_mount` (that file is then
        `None`), or `row` (the rest of it stands).
        """
        complaints: list[Complaint] = []
        claims, devices = self._claims.read(complaints), self._prepared.read(complaints)
        if claims is not self._told.claims or devices is not self._told.prepared:
            self._told = DraState(claims, devices)
        return SourceAnswer(self._told, tuple(complaints))


class _File(Generic[T]):
    """A file that is replaced as a whole. One that did not change is not read again."""

    def __init__(self, path: Path, name: str, parse: Callable[[bytes], tuple[T, int]]) -> None:
        """`name` begins the reasons of complaints; `parse` gives what it read, and how many rows it could not."""
        self._path = path
        self._name = name
        self._parse = parse
        self._seen: tuple[int, int, int] | None = None
        self._value: T | None = None
        self._skipped = 0

    def read(self, complaints: list[Complaint]) -> T | None:
        """Give its content, the very same object while it is unchanged; `None` where it is missing or broken."""
        reason = detail = ""
        try:
            self._refresh()
        except (FileNotFoundError, NotADirectoryError):
            self._seen = self._value = None
        except _StaleMountError:
            reason, detail = "stale_mount", "was replaced, and this is the old one: mount its directory, not the file"
        except OSError as error:
            reason, detail = "unreadable", error.strerror or str(error)
        except ValueError as error:
            reason, detail = "corrupt", str(error)
        if reason:
            self._seen = self._value = None
        elif self._value is not None and self._skipped:
            reason, detail = "row", f"{self._skipped} entries are not whole"
        if reason:
            complaints.append(Complaint(f"{self._name}_{reason}", f"{self._path}: {detail}"))
        return self._value

    def _refresh(self) -> None:
        found = self._path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "not a regular file")
        if not found.st_nlink:
            raise _StaleMountError
        key = (found.st_ino, found.st_mtime_ns, found.st_size)
        if key == self._seen:
            return
        with self._path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise OSError(0, f"larger than {FILE_BYTES_MAX >> 20} MiB")
        value, self._skipped = self._parse(text)
        self._seen = key
        if value != self._value:
            self._value = value


class _StaleMountError(Exception):
    """The file has no name any more: it was mounted by itself, and its writer has renamed another into its place."""


def parse_state(text: bytes) -> tuple[tuple[ClaimPods, ...], int]:
    """Read the kubelet's state: claims with the UIDs of their pods, and how many entries are not whole.

    Formats (kubernetes/kubernetes pkg/kubelet/cm/dra/state): since 1.32 JSON in a JSON string `Data`, with a list
    `Entries` (until 1.33 `ClaimInfoStateList`); before that a list `entries`, which is left out where it is empty.
    The checksum is not checked: writes are atomic. Unknown keys are skipped. Raises ValueError for any other.
    """
    document = parse_object(text)
    if "Data" in document:
        data = document["Data"]
        document = data if is_object(data) else parse_object(data if isinstance(data, str) else "")
    elif _OUTERMOST.isdisjoint(document):
        raise ValueError("no list of claims in it")
    entries = next((document[name] for name in _ENTRIES if name in document), None)
    if not isinstance(entries, list | None):
        raise ValueError("its claims are no list")
    skipped = 0
    pods: dict[tuple[str, str], set[PodUid]] = {}
    for entry in entries or ():
        found = entry if is_object(entry) else {}
        namespace, claim = found.get("Namespace"), found.get("ClaimName")
        if _is_name(namespace) and _is_name(claim):
            pods.setdefault((namespace, claim), set()).update(_pod_uids(found))
        else:
            skipped += 1
    claims = (ClaimPods(namespace, claim, tuple(sorted(uids))) for (namespace, claim), uids in pods.items())
    return tuple(sorted(claims)), skipped


def _pod_uids(entry: Mapping[str, object]) -> Iterator[PodUid]:
    """A set as Go writes it: an object with empty objects in it."""
    uids = entry.get("PodUIDs")
    return (PodUid(uid) for uid in uids if _is_name(uid)) if isinstance(uids, dict | list) else iter(())


def _is_name(value: object) -> TypeGuard[str]:
    return is_text(value) and bool(value)
