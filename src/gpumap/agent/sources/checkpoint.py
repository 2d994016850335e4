"""The kubelet's device checkpoint: which pod UID has which device ids.

Read-only and best effort: the kubelet calls the file internal. The kubelet rewrites it whole (temporary file, then
rename) at each allocation, but not when a pod ends. So a row does not prove that its pod lives.

A row has the device plugin's answer (ContainerAllocateResponse). A plugin may put anything into a container: the
environment may contain a password. This module keeps only the entries of the lists below.
"""

from __future__ import annotations

import base64
import functools
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from google.protobuf.message import DecodeError

from gpumap.agent._proto.deviceplugin.v1beta1_pb2 import ContainerAllocateResponse
from gpumap.agent.sources.json_files import ReplacedFile, decode, each
from gpumap.agent.sources.messages import fit
from gpumap.model.formatting import and_more
from gpumap.model.observations import (
    Checkpoint,
    CheckpointEntry,
    Complaint,
    DeviceId,
    PluginAnswer,
    ResourceDevices,
    SourceAnswer,
    SourceError,
)
from gpumap.model.terms import PodUid

ENVS = re.compile(
    r"NVIDIA_VISIBLE_DEVICES|CUDA_MPS_(?:PIPE_DIRECTORY|PINNED_DEVICE_MEM_LIMIT)"
    r"|CUDA_DEVICE_MEMORY_LIMIT_[0-9]{1,3}|CUDA_DEVICE_SM_LIMIT"
    r"|VOLCANO_GPU_(?:ALLOCATED|FACTOR)|ALIYUN_COM_GPU_MEM_(?:IDX|DEV)"
)
"""Environment of NVIDIA's plugin, MPS, HAMi, volcano and gpushare."""
ANNOTATIONS = re.compile(r"tencent\.com/vcuda-device|(?:nvidia\.)?cdi\.k8s\.io/nvidia-device-plugin[A-Za-z0-9._-]*")
VALUE = re.compile(r"[A-Za-z0-9_.,:;=/+ -]{0,4096}")
DEVICE_PATH = re.compile(r"/dev/(?:nvidia|dri/)[A-Za-z0-9/_-]{0,80}")
MOUNT_PATH = re.compile(r"/var/run/nvidia-container-devices/[A-Za-z0-9:/-]{1,120}")
"""NVIDIA's plugin names devices by mounts with --device-list-strategy=volume-mounts."""
CDI_DEVICE = re.compile(r"(?:[a-z0-9-]+\.)*nvidia\.com/[A-Za-z0-9._-]{1,63}=[A-Za-z0-9._:-]{1,253}")


class CheckpointRow(msgspec.Struct, frozen=True):
    """A complete row of the file. `ids` and `answer` may be anything."""

    pod_uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    ids: object = msgspec.field(name="DeviceIDs", default=None)
    """Since kubelet 1.20 lists of ids by NUMA node; before that one list."""
    answer: object = msgspec.field(name="AllocResp", default=None)
    """The plugin's ContainerAllocateResponse in base64."""


class _Data(msgspec.Struct):
    rows: list[msgspec.Raw] | None = msgspec.field(name="PodDeviceEntries", default=None)
    registered: dict[str, object] | None = msgspec.field(name="RegisteredDevices", default=None)


class _File(msgspec.Struct):
    data: _Data = msgspec.field(name="Data")


class CheckpointSource:
    """Reads the newest of `candidates`. It does not read a file again that did not change."""

    def __init__(self, candidates: tuple[Path, ...]) -> None:
        self._files = {path: ReplacedFile(path, parse) for path in candidates}

    def read(self) -> SourceAnswer[Checkpoint]:
        """Return the checkpoint, the very same object while the file is unchanged.

        Complaints: `checkpoint_row`, `plugin_answer`. Raises SourceError: `checkpoint_missing`,
        `checkpoint_unreadable`, `checkpoint_corrupt`.
        """
        for path in newest_first(self._files):
            file = self._files[path]
            try:
                return file.read()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SourceError("checkpoint_unreadable", f"{file.path}: {error.strerror}") from error
            except ValueError as error:
                raise SourceError("checkpoint_corrupt", f"{file.path}: {error}") from error
        raise SourceError("checkpoint_missing", f"no file {' or '.join(map(str, self._files))}")


def newest_first(candidates: Iterable[Path]) -> list[Path]:
    """Sort the candidates by the time of their last write.

    The kubelet writes in /var/lib/kubelet, whatever its root is; some distributions move that too. The other one may be
    a copy from when the root was moved, or of a kubelet that no longer runs. One that gpumap may not look at comes
    first: it may be the newest.
    """
    return sorted(candidates, key=_written_at, reverse=True)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return -math.inf
    except OSError:
        return math.inf


def parse(text: bytes) -> SourceAnswer[Checkpoint]:
    """Read the checkpoint's JSON, in the format of kubelet ≤ 1.19 (ids as a list) or later (ids by NUMA node).

    The checksum is over Go's own dump of its structures and cannot be recomputed here; writes are atomic. Unknown keys
    are skipped. Rows that are not whole are skipped too, with a complaint, as are answers that cannot be read. Raises
    ValueError if the document is no checkpoint.
    """
    rows, registered = read(text)
    broken: dict[str, tuple[str, int]] = {}
    entries = list(set(_entries(rows, broken)))
    entries.sort(key=lambda entry: (entry.pod_uid, entry.container, entry.resource, sorted(entry.ids)))
    devices = (
        ResourceDevices(fit(resource), tuple(sorted(set(ids_in(value))))) for resource, value in registered.items()
    )
    complaints = (
        Complaint(reason, and_more(f"PodDeviceEntries{first}", count, "more row"))
        for reason, (first, count) in broken.items()
    )
    return SourceAnswer(Checkpoint(tuple(entries), tuple(sorted(devices))), tuple(complaints))


def read(text: bytes) -> tuple[Iterator[CheckpointRow | None], dict[str, object]]:
    """Return the rows of the file, `None` for an incomplete one, and the registered ids by resource. Raises
    ValueError."""
    data = decode(text, _File).data
    return each(data.rows or (), CheckpointRow), data.registered or {}


def ids_in(value: object) -> Iterator[DeviceId]:
    """Return the ids in a list, or in the lists of an object, whatever their keys. Nothing is nested deeper."""
    for group in value.values() if isinstance(value, dict) else [value]:
        if isinstance(group, list):
            yield from (DeviceId(fit(item)) for item in group if isinstance(item, str))


def _entries(rows: Iterable[CheckpointRow | None], broken: dict[str, tuple[str, int]]) -> Iterator[CheckpointEntry]:
    """Convert rows. `broken` gets the first problem of a kind, and the number of others.

    Equal parts of rows become one object: the next row of a device repeats its ids and the plugin's answer.
    """
    texts: dict[str, str] = {}
    sets: dict[frozenset[DeviceId], frozenset[DeviceId]] = {}
    read_answer = functools.cache(lambda text: parse_plugin_answer(base64.b64decode(text, validate=True)))
    for number, row in enumerate(rows):
        if row is None:
            _note(broken, "checkpoint_row", f"[{number}]: incomplete")
            continue
        answer = None
        try:
            if not isinstance(row.answer, str | None):
                raise ValueError("no text")
            answer = read_answer(row.answer) if row.answer else None
        except ValueError as error:
            _note(broken, "plugin_answer", f"[{number}].AllocResp: {error}")
        ids = frozenset(ids_in(row.ids))
        container, resource = (texts.setdefault(text, fit(text)) for text in (row.container, row.resource))
        yield CheckpointEntry(PodUid(fit(row.pod_uid)), container, resource, sets.setdefault(ids, ids), answer)


def _note(broken: dict[str, tuple[str, int]], reason: str, detail: str) -> None:
    first, count = broken.get(reason, (detail, -1))
    broken[reason] = first, count + 1


def parse_plugin_answer(message: bytes) -> PluginAnswer:
    """Read the GPU part of an answer. Raises ValueError if the bytes are not an answer."""
    try:
        answer = ContainerAllocateResponse.FromString(message)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    mounts = (mount.container_path for mount in answer.mounts)
    devices = (device.host_path for device in answer.devices)
    names = (device.name for device in answer.cdi_devices)
    return PluginAnswer(
        envs=_allowed(answer.envs.items(), ENVS),
        annotations=_allowed(answer.annotations.items(), ANNOTATIONS),
        device_paths=tuple(path for path in devices if DEVICE_PATH.fullmatch(path)),
        mount_paths=tuple(path for path in mounts if MOUNT_PATH.fullmatch(path)),
        cdi_devices=tuple(name for name in names if CDI_DEVICE.fullmatch(name)),
    )


def _allowed(entries: Iterable[tuple[str, str]], keys: re.Pattern[str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, value) for key, value in entries if keys.fullmatch(key) and VALUE.fullmatch(value)))
