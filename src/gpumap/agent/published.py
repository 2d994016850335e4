"""The node as /api/v1/map shows it: with processes and findings, and without the driver's raw rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct, structs

from gpumap.model.findings import Finding, findings, sums, unknown
from gpumap.model.node import Device, FindingEntry, Gpu, Node, Process
from gpumap.model.readings import GpuReading, MigInstance
from gpumap.model.snapshot import Snapshot

_OF_GPU = (
    "uuid",
    "minor",
    "pci_bus_id",
    "model",
    "fault",
    "stuck_seconds",
    "partitioned",
    "recovery_action",
    "samples_from",
)
_OF_DEVICES = ("instances", "activity", "processes", "samples", "unsampled")
NOT_PUBLISHED: dict[type[Struct], dict[str, object]] = {
    kind: {field.name: field.default for field in structs.fields(kind) if field.name in names}
    for kind, names in (
        (GpuReading, {*_OF_GPU, *_OF_DEVICES}),
        (MigInstance, {"memory", "activity", "processes"}),
    )
}
"""What the GPU or its devices have in a better form, with the value that leaves it out."""


def published(
    snapshot: Snapshot,
    interval_seconds: float | None = None,
    collect: Sequence[str] | None = None,
    stale: str = "",
) -> Node:
    """Return the node of a snapshot with all that clients get.

    `interval_seconds` is the configured time between collections; `None` if a command collected once. `collect` are the
    collected groups of families. `stale` says why there is no current data; the snapshot is empty then.
    """
    on_device: dict[str, list[Process]] = {}
    for process in snapshot.processes:
        on_device.setdefault(process.uuid, []).append(process)
    devices = (_device(device, on_device.get(device.uuid, ())) for device in snapshot.node.devices)
    return _judged(
        structs.replace(
            snapshot.node,
            interval_seconds=interval_seconds,
            collect=None if collect is None else tuple(collect),
            stale=stale or None,
            gpus=tuple(map(_gpu, snapshot.node.gpus)),
            devices=tuple(sorted(devices, key=_place)),
        )
    )


def _judged(node: Node) -> Node:
    """Return the node with its findings, by the rules of `gpumap waste` and its defaults. A stale one has none."""
    unjudged = tuple(unknown(node))
    if node.stale:
        return structs.replace(node, unjudged=unjudged)
    found = findings(node)
    return structs.replace(
        node, findings=tuple(map(_finding, found)), finding_sums=sums(found, node), unjudged=unjudged
    )


def _finding(one: Finding) -> FindingEntry:
    return FindingEntry(
        *one.container,
        finding=one.kind,
        uuid=one.device.uuid if one.device else None,
        gpus=one.gpus,
        granted_bytes=one.granted_bytes,
        used_bytes=one.used_bytes,
        waste_bytes=one.waste_bytes,
        idle_seconds=one.idle_seconds,
        why=one.why,
        pids=one.pids,
        remedy=one.remedy,
    )


def _gpu(gpu: Gpu) -> Gpu:
    """Return a GPU without what its devices have."""
    if gpu.reading is None:
        return gpu
    return structs.replace(gpu, reading=structs.replace(gpu.reading, **NOT_PUBLISHED[GpuReading]))


def _device(device: Device, processes: Sequence[Process]) -> Device:
    mig = device.mig and structs.replace(device.mig, **NOT_PUBLISHED[MigInstance])
    return structs.replace(device, mig=mig, processes=tuple(processes))


def _place(device: Device) -> tuple[float, int, int]:
    """Return the device's place among the node's: by GPU, then by instance, as nvidia-smi lists them."""
    mig = device.mig
    index = math.inf if device.index is None else device.index
    return index, mig.gpu_instance_id if mig else -1, mig.compute_instance_id if mig else -1
