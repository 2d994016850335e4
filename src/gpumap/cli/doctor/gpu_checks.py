"""The checks of `gpumap doctor` that are made of each GPU, one row each, and what a check returns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpumap.model.map import Entry, GpuEntry, NodeMap
from gpumap.model.units import counted
from gpumap.model.words import listed


class Verdict(NamedTuple):
    """What a check found. `state`: ok, degraded, missing, failed, warning (more rights than gpumap needs; errors that
    were counted), not needed, unknown."""

    state: str
    seen: str = ""
    why: str | None = None
    remedy: str | None = None


class Result(Entry, frozen=True):
    """A line of `gpumap doctor`: the name of a check, and its verdict."""

    check: str
    state: str
    required: bool
    seen: str
    why: str | None = None
    remedy: str | None = None


def result_of(name: str, verdict: Verdict, *, required: bool = False) -> Result:
    return Result(name, verdict.state, required, verdict.seen, verdict.why, verdict.remedy)


class GpuCheck(NamedTuple):
    """A check of each GPU. `judge` returns `None` if nothing is wrong."""

    name: str
    judge: Callable[[GpuEntry, NodeMap], Verdict | None]


def _down(gpu: GpuEntry, _: NodeMap) -> Verdict | None:
    if gpu.up:
        return None
    stuck = f" for {gpu.stuck_seconds:.0f} s" if gpu.stuck_seconds else ""
    return Verdict("failed", _identity(gpu), f"{gpu.fault}{stuck}", gpu.remedy)


def _recovery_action(gpu: GpuEntry, _: NodeMap) -> Verdict | None:
    recovery = gpu.recovery_action
    if recovery is None or recovery.action == "none":
        return None
    return Verdict("degraded", _identity(gpu), f"the driver requests it: {recovery.action}", recovery.remedy)


def _row_remap_failure(gpu: GpuEntry, _: NodeMap) -> Verdict | None:
    if not gpu.row_remap_failure:
        return None
    remedy = gpu.remedies.get("row_remap_failure")
    return Verdict("failed", _identity(gpu), "the GPU could not replace a row of its memory", remedy)


def _row_remap_pending(gpu: GpuEntry, _: NodeMap) -> Verdict | None:
    if not gpu.row_remap_pending:
        return None
    remedy = gpu.remedies.get("row_remap_pending")
    return Verdict("degraded", _identity(gpu), "the GPU replaces rows of its memory at its next reset", remedy)


def _ecc_uncorrected(gpu: GpuEntry, _: NodeMap) -> Verdict | None:
    lost = [one for one in gpu.ecc_errors if one.type == "uncorrected" and one.errors]
    if not lost:
        return None
    where = ", ".join(f"{one.location} {one.errors}" for one in lost)
    errors = counted(sum(one.errors for one in lost), "memory error")
    why = f"{errors} over its life were not correctable: {where}"
    return Verdict("warning", _identity(gpu), why, gpu.remedies.get("ecc_uncorrected"))


def _xid(gpu: GpuEntry, node_map: NodeMap) -> Verdict | None:
    if gpu.xids is None or not gpu.xids.counts:
        return None
    why = "XID " + ", ".join(f"{one.xid} ({one.errors}×)" for one in gpu.xids.counts)
    pods = _pods_with_xids(gpu, node_map)
    why += f", while {pods} held or used it" if pods else ""
    return Verdict("warning", _identity(gpu), why, gpu.remedies.get("xid_errors"))


GPU_CHECKS = (
    GpuCheck("gpu/<index>", _down),
    GpuCheck("gpu/<index>/recovery_action", _recovery_action),
    GpuCheck("gpu/<index>/row_remap_failure", _row_remap_failure),
    GpuCheck("gpu/<index>/row_remap_pending", _row_remap_pending),
    GpuCheck("gpu/<index>/ecc_uncorrected", _ecc_uncorrected),
    GpuCheck("gpu/<index>/xid", _xid),
)
"""In this order for each GPU. `<index>` is NVML's index."""


def gpu_results(node_map: NodeMap) -> Iterator[Result]:
    """Return a line for each thing that is wrong with a GPU; none for a GPU that is well."""
    for nameless in node_map.nameless_gpus:
        why = f"{nameless.fault}, and has not reported its uuid since gpumap's start"
        yield result_of(f"gpu/{nameless.index}", Verdict("failed", "", why, nameless.remedy))
    for gpu in node_map.gpus:
        for check in GPU_CHECKS:
            if verdict := check.judge(gpu, node_map):
                yield result_of(check.name.replace("<index>", str(gpu.index)), verdict)


def _identity(gpu: GpuEntry) -> str:
    return " ".join(part for part in (gpu.uuid, gpu.pci_bus_id, gpu.model) if part)


def _pods_with_xids(gpu: GpuEntry, node_map: NodeMap) -> str:
    """Name the pods that held or used a GPU, or a part of it, when an XID error came."""
    parts = {gpu.uuid, *(one.uuid for one in node_map.devices if one.gpu_uuid == gpu.uuid)}
    return listed(sorted({f"{one.namespace}/{one.pod}" for one in node_map.container_xids if one.uuid in parts}))
