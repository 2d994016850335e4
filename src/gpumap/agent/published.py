"""The node as /api/v1/map shows it: with processes and sums of findings, and without the driver's raw rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from gpumap.agent.judgement.unjudged import sentences
from gpumap.model.devices import add_processes, other_uses, place_of
from gpumap.model.findings import judged_kinds, sums
from gpumap.model.node import Device, Gpu, Node
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
    node = add_processes(snapshot.node, snapshot.processes)
    return structs.replace(
        node,
        interval_seconds=interval_seconds,
        collect=None if collect is None else tuple(collect),
        stale=stale or None,
        gpus=tuple(map(_gpu, node.gpus)),
        devices=tuple(sorted(map(_device, node.devices), key=place_of)),
        finding_sums=sums(node.findings, judged_kinds(node)) if node.findings is not None else {},
        unjudged_sentences=tuple(sentences(structs.replace(node, stale=stale or None))),
    )


def _gpu(gpu: Gpu) -> Gpu:
    """Return a GPU without what its devices have."""
    if gpu.reading is None:
        return gpu
    return structs.replace(gpu, reading=structs.replace(gpu.reading, **NOT_PUBLISHED[GpuReading]))


def _device(device: Device) -> Device:
    """Return a device with its other use, and without what it has in a better form."""
    device = structs.replace(device, others=tuple(other_uses(device)))
    if device.mig is None:
        return device
    return structs.replace(device, mig=structs.replace(device.mig, **NOT_PUBLISHED[MigInstance]))
