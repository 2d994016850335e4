"""DRA's local state: the pods for which the kubelet prepared a claim, and the devices that NVIDIA's DRA driver
prepared.

Read-only and best effort: both files are internal to their writers. Each is a step of the privilege ladder: a missing
file is not a complaint. Never raises.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
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
    each_converted,
    lower_case,
)
from gpumap.model.formatting import parse_quantity
from gpumap.model.grouping import grouped
from gpumap.model.names import PodUid
from gpumap.model.observations import ClaimPods, Complaint, DraState, PreparedDevice, SourceAnswer
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.readings import Uuid

_STALE_MOUNT = "was replaced, and this is the old file: mount its directory instead of the file"
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
        claims = _read(self._claims, "dra_state", complaints)
        devices = _read(self._prepared, "dra_checkpoint", complaints)
        if claims is not self._state.claims or devices is not self._state.prepared:
            self._state = DraState(claims, devices)
        return SourceAnswer(self._state, tuple(complaints))


def _read(file: ReplacedFile[tuple[T, int]], name: str, complaints: list[Complaint]) -> T | None:
    """Read a file. `None` if it is missing or damaged. The reasons of complaints begin with `name`."""
    try:
        value, skipped = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except StaleMountError:
        reason, detail = "stale_mount", _STALE_MOUNT
    except OSError as error:
        reason, detail = "unreadable", error.strerror or str(error)
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
        document = decode(decode(data, str) if _begins(data) == b'"' else data, dict[str, msgspec.Raw])
    elif _OUTERMOST.isdisjoint(document):
        raise ValueError("does not contain a list of claims")
    entries = next((document[name] for name in _ENTRIES if name in document), msgspec.Raw(b"null"))
    rows = () if _begins(entries) == b"n" else decode(entries, list[msgspec.Raw])
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


def _begins(part: msgspec.Raw) -> bytes:
    return bytes(memoryview(part)[:1])


# --- the driver's checkpoint ------------------------------------------------------------------------------------------
# Formats: kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin, `Checkpoint` and `PreparedDevice`; the results
# of an allocation are Kubernetes' own (`DeviceRequestAllocationResult` of resource.k8s.io). Here keys are lower case.


class _Result(msgspec.Struct):
    """The devices that the scheduler assigned to a claim."""

    device: str | None = None
    driver: str | None = None
    shareid: str | None = None
    adminaccess: bool | None = None
    consumedcapacity: dict[str, object] | None = None


class _Results(msgspec.Struct):
    results: list[object] | None = None


class _Allocation(msgspec.Struct):
    devices: _Results | None = None


class _Status(msgspec.Struct):
    allocation: _Allocation | None = None


class _Info(msgspec.Struct):
    uuid: Name


class _Concrete(msgspec.Struct):
    uuid: Name = msgspec.field(name="miguuid")


class _Named(msgspec.Struct):
    name: str = msgspec.field(name="devicename")
    share_id: str | None = msgspec.field(name="shareid", default=None)


class _Part(msgspec.Struct):
    """A GPU or a MIG device. A MIG device has `concrete`, before v25.12 `info`, as whole GPUs have."""

    device: _Named
    info: _Info | None = None
    concrete: _Concrete | None = None


class _Device(msgspec.Struct):
    gpu: _Part | None = None
    mig: _Part | None = None
    vfio: object = None
    """A device that is passed through to a virtual machine. NVML does not list it."""


class _Group(msgspec.Struct):
    """Devices with one configuration."""

    devices: list[object] | None = None


class _PreparedClaim(msgspec.Struct):
    checkpointstate: object = None
    name: str | None = None
    namespace: str | None = None
    status: _Status | None = None
    prepareddevices: list[object] | None = None


def parse_prepared(text: bytes) -> tuple[tuple[PreparedDevice, ...], int]:
    """Read the driver's checkpoint: devices of claims that are prepared to the end, and how many could not be read.

    Of the versions that are in it side by side the newest is taken; version 1 has no names of claims. Devices that are
    passed through to a virtual machine are left out. Raises ValueError if it is no such file.
    """
    version, claims = _newest(lower_case(decode(text, dict[str, msgspec.Raw]).items()))
    found: set[PreparedDevice] = set()
    skipped = 0
    # A bare list of devices is the form of the first drivers.
    found_in = map(decode_lower_case, claims.values())
    bodies = (claim if isinstance(claim, dict) else {"prepareddevices": claim} for claim in found_in)
    for claim in each_converted(bodies, _PreparedClaim):
        if claim is None:
            skipped += 1
        elif version == 1 or claim.checkpointstate == "PrepareCompleted":
            results = _results(claim)
            for group in each_converted(claim.prepareddevices or (), _Group):
                for device in each_converted((group.devices if group else None) or (), _Device):
                    rows = list(_rows(device, claim, results)) if device else []
                    found.update(rows)
                    skipped += not rows and not (device and device.vfio)
    return tuple(sorted(found, key=_order)), skipped


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


def _results(claim: _PreparedClaim) -> dict[str, list[_Result]]:
    """Return the scheduler's devices of the claim, by device: there may be several shares of one."""
    allocation = claim.status.allocation if claim.status else None
    results = allocation.devices.results if allocation and allocation.devices else None
    return grouped(
        (one.device, one)
        for one in each_converted(results or (), _Result)
        if one and one.device is not None and one.driver in (None, DRA_DRIVER)
    )


def _rows(device: _Device, claim: _PreparedClaim, allocated: Mapping[str, list[_Result]]) -> Iterator[PreparedDevice]:
    """Return a device as its claim got it: once, or once for each share of it."""
    for part in (device.gpu, device.mig):
        identity = (part.concrete or part.info) if part else None
        if part is None or identity is None:
            continue
        name, share = part.device.name, part.device.share_id
        results = [one for one in allocated.get(name, ()) if not share or one.shareid == share]
        for result in results or (_Result(),):
            yield PreparedDevice(
                claim_namespace=claim.namespace or "",
                claim=claim.name or "",
                device=name,
                share_id=share or result.shareid or "",
                uuid=Uuid(identity.uuid),
                admin_access=result.adminaccess is True,
                memory_bytes=_memory(result.consumedcapacity or {}),
            )


def _memory(capacity: Mapping[str, object]) -> int | None:
    """Return the memory that a share consumes; `None` if it is missing or unreadable."""
    amounts = (capacity.get(name) for name in _MEMORY)
    amount = next((one for one in amounts if isinstance(one, str)), None)
    try:
        return parse_quantity(amount) if amount is not None else None
    except ValueError:
        return None


def _order(one: PreparedDevice) -> tuple[str, ...]:
    return one.claim_namespace, one.claim, one.device, one.share_id, one.uuid, str(one.memory_bytes)
