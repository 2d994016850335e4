"""DRA's local state: the pods for which the kubelet prepared a claim, and the devices that NVIDIA's DRA driver
prepared.

Read-only and best effort: both files are internal to their writers. Each is a step of the privilege ladder: a missing
file is not a complaint. Never raises.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import msgspec

from gpumap.agent.sources.json_files import (
    Name,
    ReplacedFile,
    StaleMountError,
    decode,
    decode_lower_case,
    each,
    lower_case,
)
from gpumap.model.formatting import parse_quantity
from gpumap.model.grouping import grouped
from gpumap.model.observations import ClaimPods, Complaint, DraState, PreparedDevice, SourceAnswer
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.readings import Uuid
from gpumap.model.terms import PodUid

_ENTRIES = ("Entries", "ClaimInfoStateList", "entries")
_OUTERMOST = frozenset({"version", "checksum", "Checksum", *_ENTRIES})
_NEWEST_KNOWN = 3
"""Versions of the driver's checkpoint up to this one leave `preparedClaims` out if there are none."""
_MEMORY = ("memory", f"{DRA_DRIVER}/memory")

T = TypeVar("T")


class DraSource:
    """Reads the kubelet's `dra_manager_state` and the driver's `checkpoint.json`, if they exist."""

    def __init__(self, state: Path, driver_checkpoint: Path) -> None:
        self._claims = ReplacedFile(state, parse_state)
        self._prepared = ReplacedFile(driver_checkpoint, parse_prepared)
        self._state = DraState()

    def read(self) -> SourceAnswer[DraState]:
        """Return what can be read, the very same object while it is unchanged.

        Complaints: `dra_state_` or `dra_checkpoint_` with `unreadable`, `corrupt`, `stale_mount` (that file is then
        `None`), or `row` (only these rows are missing).
        """
        complaints: list[Complaint] = []
        claims = _read_file(self._claims, "dra_state", complaints)
        devices = _read_file(self._prepared, "dra_checkpoint", complaints)
        if claims is not self._state.claims or devices is not self._state.prepared:
            self._state = DraState(claims, devices)
        return SourceAnswer(self._state, tuple(complaints))


def _read_file(file: ReplacedFile[tuple[T, int]], name: str, complaints: list[Complaint]) -> T | None:
    """Read a file. `None` if it is missing or damaged. The reasons of complaints begin with `name`."""
    try:
        value, skipped = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = "stale_mount" if isinstance(error, StaleMountError) else "unreadable"
        detail = error.strerror or str(error)
    except ValueError as error:
        reason, detail = "corrupt", str(error)
    else:
        if skipped:
            complaints.append(Complaint(f"{name}_row", f"{file.path}: {skipped} entries are incomplete"))
        return value
    complaints.append(Complaint(f"{name}_{reason}", f"{file.path}: {detail}"))
    return None


# --- the kubelet's state ----------------------------------------------------------------------------------------------


class _Claim(msgspec.Struct):
    namespace: Name = msgspec.field(name="Namespace")
    claim: Name = msgspec.field(name="ClaimName")
    pod_uids: object = msgspec.field(name="PodUIDs", default=None)
    """A set as Go writes it: an object that contains empty objects."""


def parse_state(text: bytes) -> tuple[tuple[ClaimPods, ...], int]:
    """Read the kubelet's state: claims with the UIDs of their pods, and the number of incomplete entries.

    Formats (kubernetes/kubernetes pkg/kubelet/cm/dra/state). Since 1.32: JSON in a JSON string `Data`, with a list
    `Entries` (until 1.33 `ClaimInfoStateList`). Before that: a list `entries`, which is absent if it is empty. The
    checksum is not checked: writes are atomic. Unknown keys are skipped. Raises ValueError for any other format.
    """
    document = decode(text, dict[str, msgspec.Raw])
    if "Data" in document:
        data = document["Data"]
        document = decode(decode(data, str) if _first_byte(data) == b'"' else data, dict[str, msgspec.Raw])
    elif _OUTERMOST.isdisjoint(document):
        raise ValueError("does not contain a list of claims")
    entries = next((document[name] for name in _ENTRIES if name in document), msgspec.Raw(b"null"))
    rows = () if _first_byte(entries) == b"n" else decode(entries, list[msgspec.Raw])
    skipped = 0
    pods: dict[tuple[str, str], set[PodUid]] = {}
    for entry in each(rows, _Claim):
        if entry is None:
            skipped += 1
            continue
        uids = entry.pod_uids if isinstance(entry.pod_uids, dict | list) else ()
        pods.setdefault((entry.namespace, entry.claim), set()).update(
            PodUid(uid) for uid in uids if isinstance(uid, str) and uid
        )
    claims = (ClaimPods(namespace, claim, tuple(sorted(uids))) for (namespace, claim), uids in pods.items())
    return tuple(sorted(claims)), skipped


def _first_byte(value: msgspec.Raw) -> bytes:
    return bytes(memoryview(value)[:1])


# --- the driver's checkpoint ------------------------------------------------------------------------------------------
# Formats: kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin, `Checkpoint` and `PreparedDevice`; the results
# of an allocation are Kubernetes' own (`DeviceRequestAllocationResult` of resource.k8s.io). Here keys are lower case.


def _value(document: object, *keys: str) -> object:
    """Return the value below these keys; `None` if there is none."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _text(document: object, *keys: str) -> str:
    value = _value(document, *keys)
    return value if isinstance(value, str) else ""


def _items(document: object, *keys: str) -> list[object]:
    value = _value(document, *keys)
    return value if isinstance(value, list) else []


def parse_prepared(text: bytes) -> tuple[tuple[PreparedDevice, ...], int]:
    """Read the driver's checkpoint: devices of claims that are prepared to the end, and how many could not be read.

    Of the versions that are in it side by side the newest is taken; version 1 has no names of claims. Devices that are
    passed through to a virtual machine are left out. Raises ValueError if it is no such file.
    """
    version, claims = _newest(lower_case(decode(text, dict[str, msgspec.Raw]).items()))
    prepared: set[PreparedDevice] = set()
    skipped = 0
    for claim in map(decode_lower_case, claims.values()):
        if not isinstance(claim, dict):
            claim = {"prepareddevices": claim}  # the form of the first drivers
        if not isinstance(claim.get("prepareddevices"), list | None):
            skipped += 1
        elif version == 1 or claim.get("checkpointstate") == "PrepareCompleted":
            results = _results(claim)
            for group in _items(claim, "prepareddevices"):  # devices with one configuration
                for device in _items(group, "devices"):
                    rows = list(_rows(device, claim, results))
                    prepared.update(rows)
                    skipped += not rows and not _value(device, "vfio")
    names = attrgetter("claim_namespace", "claim", "device", "share_id", "uuid")
    return tuple(sorted(prepared, key=lambda device: (*names(device), str(device.memory_bytes)))), skipped


def _newest(document: Mapping[str, msgspec.Raw]) -> tuple[int, Mapping[str, msgspec.Raw]]:
    numbers = sorted(int(key[1:]) for key in document if re.fullmatch(r"v[1-9][0-9]?", key, re.ASCII))
    for number in reversed(numbers):
        with contextlib.suppress(msgspec.ValidationError):
            version = lower_case(decode(document[f"v{number}"], dict[str, msgspec.Raw]).items())
            if "preparedclaims" in version:
                return number, decode(version["preparedclaims"], dict[str, msgspec.Raw])
            if number <= _NEWEST_KNOWN:
                return number, {}
    raise ValueError("unknown version of its claims")


def _results(claim: object) -> dict[str, list[object]]:
    """Return the devices that the scheduler assigned to a claim, by device: there may be several shares of one."""
    return grouped(
        (_text(result, "device"), result)
        for result in _items(claim, "status", "allocation", "devices", "results")
        if _value(result, "driver") in (None, DRA_DRIVER)
    )


def _rows(device: object, claim: object, allocated: Mapping[str, list[object]]) -> Iterator[PreparedDevice]:
    """Return a device as its claim got it: once, or once for each share of it."""
    for kind in ("gpu", "mig"):
        name, share = _text(device, kind, "device", "devicename"), _text(device, kind, "device", "shareid")
        # Before v25.12, a MIG device has `info`, as whole GPUs have.
        uuid = _text(device, kind, "concrete", "miguuid") or _text(device, kind, "info", "uuid")
        if not name or not uuid:
            continue
        results = [result for result in allocated.get(name, ()) if share in ("", _text(result, "shareid"))]
        for result in results or [None]:
            yield PreparedDevice(
                claim_namespace=_text(claim, "namespace"),
                claim=_text(claim, "name"),
                device=name,
                share_id=share or _text(result, "shareid"),
                uuid=Uuid(uuid),
                admin_access=_value(result, "adminaccess") is True,
                memory_bytes=_memory(_value(result, "consumedcapacity")),
            )


def _memory(capacity: object) -> int | None:
    """Return the memory that a share consumes; `None` if it is missing or unreadable."""
    amount = next(filter(None, (_text(capacity, name) for name in _MEMORY)), "")
    try:
        return parse_quantity(amount) if amount else None
    except ValueError:
        return None
