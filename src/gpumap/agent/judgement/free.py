"""Which part of each device a new pod could be given. Judged after the findings, which may forbid it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import structs

from gpumap.model.devices import has_kubelet
from gpumap.model.node import Device, Grant, Node
from gpumap.model.terms import Owner

USED_BYTES_MAX = 512 << 20
"""A device is free although processes on it use together so much: monitoring, a display, an idle CUDA context."""

WHOLE_GPU = 1 - 1e-9
"""Shares that add up to so much fill a GPU; they are rounded."""

_HINDRANCES = ("fault", "not_offered", "squatter", "leftover", "unexplained")
_HARMLESS = frozenset({Owner.ASSIGNED, Owner.SCHEDULED, Owner.MPS_SERVER, Owner.SIBLING, Owner.UNACCOUNTED})


def add_free(node: Node) -> Node:
    """Return the judged node with `free_ratio` and `not_free_reason` of its devices."""
    if not has_kubelet(node):
        return node
    hindrances: dict[str | None, str] = {}
    for finding in node.findings or ():
        if finding.finding in _HINDRANCES:
            hindrances.setdefault(finding.uuid, finding.finding)
    devices = []
    for device in node.devices:
        if device.is_leaf:
            hindrance = hindrances.get(device.gpu_uuid) or hindrances.get(device.uuid, "")
            if device.holders is not None:
                hindrance = hindrance or _large_user(device)
            ratio = 0.0 if hindrance else _free_ratio(device)
            device = structs.replace(device, free_ratio=ratio, not_free_reason=hindrance)
        devices.append(device)
    return structs.replace(node, devices=tuple(devices))


def _large_user(device: Device) -> str:
    """Return the owner that uses most, if processes without a grant use too much; else nothing."""
    sizes = {use.owner: use.memory_bytes for use in device.owners if use.memory_bytes and use.owner not in _HARMLESS}
    if sum(sizes.values()) <= USED_BYTES_MAX:
        return ""
    return max(sizes, key=sizes.__getitem__).value


def _free_ratio(device: Device) -> float | None:
    if device.holders is None or not device.owners:
        return None
    if any(use.memory_bytes is None and use.processes and use.owner not in _HARMLESS for use in device.owners):
        return None
    grants = [row.grant for row in device.containers if row.grant]
    if len(grants) < device.holders:
        return 0.0  # a container holds the whole partitioned GPU
    reserving = [grant for grant in grants if not grant.admin_access]
    ratio = _free_slots_ratio(device, reserving) if reserving else 1.0
    return None if ratio and device.may_have_more else ratio


def _free_slots_ratio(device: Device, grants: Sequence[Grant]) -> float | None:
    """Return the free part of the slots of a device that containers hold; `None` if their number is not known."""
    slots_of: Counter[str] = Counter()
    for grant in grants:
        slots_of.update(grant.slots)
    if sum(grant.gpus or 0.0 for grant in grants) >= WHOLE_GPU or any("/" not in resource for resource in slots_of):
        return 0.0  # the shares fill the GPU, or a DRA claim reserves the device
    offered = device.allocatable
    if not slots_of.keys() <= offered.keys():
        return None
    ratios = (max(offered[resource] - slots, 0) / max(offered[resource], 1) for resource, slots in slots_of.items())
    return min(ratios, default=0.0)
