"""What NVIDIA's DRA driver writes down of claims that it has prepared: which GPU or MIG device is behind a name.

Pure. Formats: kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin, `Checkpoint` and `PreparedDevice`; the
results of an allocation are Kubernetes' own (`DeviceRequestAllocationResult` of resource.k8s.io).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gpumap.agent.sources.json_texts import Object, is_object, is_text, member, parse_object
from gpumap.model.observations import PreparedDevice
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.readings import Uuid
from gpumap.model.units import parse_quantity

_NEWEST_KNOWN = 3
"""Versions up to this one leave `preparedClaims` out where there are none."""
_MEMORY = ("memory", f"{DRA_DRIVER}/memory")


def parse(text: bytes) -> tuple[tuple[PreparedDevice, ...], int]:
    """Read the driver's checkpoint: devices of claims that are prepared to the end, and how many could not be read.

    Of the versions that stand in it side by side the newest is taken; version 1 has no names of claims. Devices that
    are passed through to a virtual machine are left out. Raises ValueError where it is no such file.
    """
    version, claims = _newest(parse_object(text))
    found: set[PreparedDevice] = set()
    skipped = 0
    for claim in claims.values():
        # A bare list of devices is the form of the first drivers.
        body = claim if isinstance(claim, dict) else {"preparedDevices": claim}
        if version > 1 and member(body, "checkpointState") != "PrepareCompleted":
            continue
        results = _results(body)
        for device in _devices(member(body, "preparedDevices")):
            rows = list(_rows(device, body, results))
            found.update(rows)
            skipped += not rows and not member(device, "vfio")
    return tuple(sorted(found, key=_order)), skipped


def _newest(document: Object) -> tuple[int, Object]:
    numbers = sorted(int(key[1:]) for key in document if re.fullmatch(r"v[1-9][0-9]?", key, re.ASCII))
    for number in reversed(numbers):
        version = document[f"v{number}"]
        claims = version.get("preparedClaims", {} if number <= _NEWEST_KNOWN else None) if is_object(version) else None
        if is_object(claims):
            return number, claims
    raise ValueError("no version of its claims that is known")


def _devices(groups: object) -> Iterator[Object]:
    """Devices stand in groups, one for each configuration; a group may be null."""
    for group in groups if isinstance(groups, list) else ():
        if is_object(group):
            devices = member(group, "devices")
            yield from filter(is_object, devices if isinstance(devices, list) else ())


def _rows(device: Object, claim: Object, allocated: Mapping[str, list[Object]]) -> Iterator[PreparedDevice]:
    """A device as its claim got it: once, or once for each share of it."""
    for part in (member(device, "gpu"), member(device, "mig")):
        told = member(part, "device")
        name, share, uuid = member(told, "DeviceName"), member(told, "ShareID"), _uuid(part)
        if not is_text(name) or not is_text(uuid) or not uuid:
            continue
        results = [one for one in allocated.get(name, ()) if not share or member(one, "shareID") == share]
        for result in results or ({},):
            yield PreparedDevice(
                claim_namespace=_text(member(claim, "namespace")),
                claim=_text(member(claim, "name")),
                device=name,
                share_id=_text(share or member(result, "shareID")),
                uuid=Uuid(uuid),
                admin_access=member(result, "adminAccess") is True,
                memory_bytes=_memory(member(result, "consumedCapacity")),
            )


def _uuid(part: object) -> object:
    """A MIG device has `concrete`, before v25.12 `info`, as whole GPUs have."""
    return member(member(part, "concrete"), "migUUID") or member(member(part, "info"), "uuid")


def _results(claim: Object) -> dict[str, list[Object]]:
    """What the scheduler gave the claim, by device: several shares of one may be among it."""
    results = member(member(member(member(claim, "status"), "allocation"), "devices"), "results")
    found: dict[str, list[Object]] = {}
    for result in filter(is_object, results if isinstance(results, list) else ()):
        device = member(result, "device")
        if is_text(device) and member(result, "driver") in (None, DRA_DRIVER):
            found.setdefault(device, []).append(result)
    return found


def _memory(capacity: object) -> int | None:
    """What is not told, or not in a form that can be read, is not known."""
    amounts = (member(capacity, name) for name in _MEMORY)
    amount = next((one for one in amounts if isinstance(one, str)), None)
    try:
        return parse_quantity(amount) if amount is not None else None
    except ValueError:
        return None


def _text(value: object) -> str:
    return value if is_text(value) else ""


def _order(one: PreparedDevice) -> tuple[str, ...]:
    return one.claim_namespace, one.claim, one.device, one.share_id, one.uuid, str(one.memory_bytes)
