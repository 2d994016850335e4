"""The mapping files of KAI-Scheduler's NvFractions: which container shares which GPU, and how much memory it may use.

From KAI-Scheduler 0.18 on, a daemon (kai-scheduler/kai-gpu-fractioning, fractiond) writes one file for each container
that shares a GPU: `<container id>.json`, by a rename, readable for everybody. gpumap does not trust them. It follows no
link, waits for no pipe, and a damaged file affects only itself.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from gpumap.agent.executors import open_at_once
from gpumap.agent.sources.json_files import Name, decode
from gpumap.agent.sources.messages import fit
from gpumap.model.device_ids import ByUuid, parse
from gpumap.model.formatting import and_more
from gpumap.model.observations import (
    Complaint,
    ContainerLink,
    DeviceId,
    ScheduledShare,
    SharingContainers,
    SourceAnswer,
)
from gpumap.model.plugins import MIB
from gpumap.model.terms import ContainerName, PodUid

MISSING, UNREADABLE, CORRUPT = "gpu_fractioning_missing", "gpu_fractioning_unreadable", "gpu_fractioning_corrupt"
FILES_MAX = 4096
"""A directory with more names is not read. A node has a few hundred containers."""
FILE_BYTES_MAX = 1 << 16
_VERSION = 1
_FILE = re.compile(r"([0-9a-f]{64})\.json")
_Stamp = tuple[int, int, int]
"""Inode, time of the last change in nanoseconds, and size of a file."""


class FractioningSource:
    """Reads one directory of mapping files. It parses a file again only after it changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, tuple[_Stamp, Record]] = {}
        self._value = SharingContainers()

    def read(self) -> SourceAnswer[SharingContainers]:
        """Return what the files note, the very same object while it is unchanged; nothing without a directory.

        Complaints: `gpu_fractioning_missing` (no directory), `gpu_fractioning_unreadable`, `gpu_fractioning_corrupt`.
        """
        try:
            with os.scandir(self._directory) as entries:
                names = [entry.name for entry in itertools.islice(entries, FILES_MAX + 1)]
        except FileNotFoundError:
            return self._remember({}, [Complaint(MISSING, f"no directory {self._directory}")])
        except OSError as error:
            return self._remember({}, [Complaint(UNREADABLE, f"{self._directory}: {error.strerror}")])
        if len(names) > FILES_MAX:
            return self._remember({}, [Complaint(UNREADABLE, f"{self._directory}: more than {FILES_MAX} files")])
        files: dict[str, tuple[_Stamp, Record]] = {}
        unreadable: list[str] = []
        corrupt: list[str] = []
        for name in sorted(names):
            match = _FILE.fullmatch(name)
            if match is None:
                continue  # a temporary name of the writer
            try:
                files[match[1]] = self._read_record(match[1], self._directory / name)
            except FileNotFoundError:
                continue  # removed between two reads
            except OSError as error:
                unreadable.append(f"{name}: {error.strerror}")
            except ValueError as error:
                corrupt.append(f"{name}: {error}")
        return self._remember(files, [*_complaint(UNREADABLE, unreadable), *_complaint(CORRUPT, corrupt)])

    def _remember(
        self, files: dict[str, tuple[_Stamp, Record]], complaints: list[Complaint]
    ) -> SourceAnswer[SharingContainers]:
        self._known = files
        records = [record for _, (_, record) in sorted(files.items())]
        value = SharingContainers(
            tuple(record.link for record in records),
            tuple(share for record in records for share in record.shares),
            complete=not complaints,
        )
        if value != self._value:
            self._value = value
        return SourceAnswer(self._value, tuple(complaints))

    def _read_record(self, container_id: str, path: Path) -> tuple[_Stamp, Record]:
        """Raises OSError and ValueError."""
        with open_at_once(path, os.O_NOFOLLOW) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "not a regular file")
            if status.st_size > FILE_BYTES_MAX:
                raise OSError(0, f"larger than {FILE_BYTES_MAX >> 10} KiB")
            stamp = status.st_ino, status.st_mtime_ns, status.st_size
            known = self._known.get(container_id)
            if known is not None and known[0] == stamp:
                return known
            return stamp, parse_record(container_id, file.read(FILE_BYTES_MAX))


# --- one file ---------------------------------------------------------------------------------------------------------

_Number = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _Gpu(Struct, frozen=True):
    """`uuid` is empty if fractiond found the device by its device node."""

    index: _Number | None = None
    minor_number: _Number | None = field(name="minorNumber", default=None)
    uuid: str | None = None


class _File(Struct, frozen=True):
    """fractiond, pkg/fsstore/record.go. Drafts have no version, another number, and the minor as `index`."""

    pod: Name
    namespace: Name
    pod_uid: Name = field(name="podUID")
    version: int | None = field(name="schemaVersion", default=None)
    gpus: tuple[_Gpu, ...] | None = field(name="gpuDevices", default=None)
    memory_mib: _Number | None = field(name="requestedMemoryMiB", default=None)
    draft_memory_mib: _Number | None = field(name="RequestedMemoryMB", default=None)


class Record(NamedTuple):
    """A container's pod, and a share for each of its GPUs. No file has the container's name."""

    link: ContainerLink
    shares: tuple[ScheduledShare, ...]


def parse_record(container_id: str, text: bytes) -> Record:
    """An amount of 0 is no limit. If there are several GPUs, it is unknown what the amount is of. Raises ValueError."""
    file = decode(text, _File)
    if file.version not in (None, _VERSION):
        raise ValueError(f"schemaVersion {file.version} is not {_VERSION}")
    is_draft = file.version is None
    uid, gpus = PodUid(fit(file.pod_uid)), file.gpus or ()
    amount = file.draft_memory_mib if is_draft else file.memory_mib
    memory_bytes = amount * MIB if amount and len(gpus) == 1 else None
    shares = []
    for gpu in gpus:
        meaning = parse(DeviceId(gpu.uuid)) if gpu.uuid else None
        uuid = meaning.device.uuid if meaning is not None and isinstance(meaning.device, ByUuid) else None
        minor = gpu.index if is_draft and gpu.minor_number is None else gpu.minor_number
        if uuid is not None or (minor is not None and not gpu.uuid):
            minor = minor if uuid is None else None
            shares.append(
                ScheduledShare(uid, container_id=container_id, uuid=uuid, minor=minor, memory_bytes=memory_bytes)
            )
    return Record(
        ContainerLink(container_id, uid, ContainerName(fit(file.namespace), fit(file.pod), "")), tuple(shares)
    )


def _complaint(reason: str, details: list[str]) -> Iterable[Complaint]:
    """One complaint for all files with the same problem."""
    return [Complaint(reason, and_more(details[0], len(details) - 1, "more file", "more files"))] if details else ()
