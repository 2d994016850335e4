"""The checks of `gpumap doctor` that are made of each GPU, one row each, and what a check returns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec import Struct

from gpumap.model.node import Gpu, Node
from gpumap.model.shown import counted, listed


class Outcome(NamedTuple):
    """What a check found. `state`: ok, degraded, missing, failed, warning (more rights than gpumap needs; errors that
    were counted), not needed, unknown."""

    state: str
    seen: str = ""
    why: str | None = None
    remedy: str | None = None


class Result(Struct, frozen=True):
    """A line of `gpumap doctor`: the name of a check, and its outcome."""

    check: str
    state: str
    required: bool
    seen: str
    why: str | None = None
    remedy: str | None = None


def result_of(name: str, outcome: Outcome, *, required: bool = False) -> Result:
    return Result(name, outcome.state, required, outcome.seen, outcome.why, outcome.remedy)


class GpuCheck(NamedTuple):
    """A check of each GPU. `judge` returns `None` if nothing is wrong."""

    name: str
    judge: Callable[[Gpu, Node], Outcome | None]


def _down(gpu: Gpu, _: Node) -> Outcome | None:
    if gpu.up:
        return None
    stuck = f" for {gpu.stuck_seconds:.0f} s" if gpu.stuck_seconds else ""
    return Outcome("failed", _identity(gpu), f"{gpu.fault}{stuck}", gpu.remedies.get("fault"))


def _recovery_action(gpu: Gpu, _: Node) -> Outcome | None:
    action = gpu.recovery_action
    if action in (None, "none"):
        return None
    remedy = gpu.remedies.get("recovery_action")
    return Outcome("degraded", _identity(gpu), f"the driver requests it: {action}", remedy)


def _row_remap_failure(gpu: Gpu, _: Node) -> Outcome | None:
    if gpu.reading is None or not gpu.reading.row_remap_failure:
        return None
    remedy = gpu.remedies.get("row_remap_failure")
    return Outcome("failed", _identity(gpu), "the GPU could not replace a row of its memory", remedy)


def _row_remap_pending(gpu: Gpu, _: Node) -> Outcome | None:
    if gpu.reading is None or not gpu.reading.row_remap_pending:
        return None
    remedy = gpu.remedies.get("row_remap_pending")
    return Outcome("degraded", _identity(gpu), "the GPU replaces rows of its memory at its next reset", remedy)


def _ecc_uncorrected(gpu: Gpu, _: Node) -> Outcome | None:
    counts = gpu.reading.ecc_errors.get("uncorrected", {}) if gpu.reading else {}
    if not any(counts.values()):
        return None
    where = ", ".join(f"{location} {errors}" for location, errors in counts.items() if errors)
    errors = counted(sum(counts.values()), "memory error")
    why = f"{errors} over its life were not correctable: {where}"
    return Outcome("warning", _identity(gpu), why, gpu.remedies.get("ecc_uncorrected"))


def _xid(gpu: Gpu, node_map: Node) -> Outcome | None:
    counts = next((one.counts for one in node_map.xids if one.uuid == gpu.uuid), {})
    if not counts:
        return None
    why = "XID " + ", ".join(f"{code} ({errors}×)" for code, errors in counts.items())
    pods = _pods_with_xids(gpu, node_map)
    why += f", while {pods} held or used it" if pods else ""
    return Outcome("warning", _identity(gpu), why, gpu.remedies.get("xid_errors"))


GPU_CHECKS = (
    GpuCheck("gpu/<index>", _down),
    GpuCheck("gpu/<index>/recovery_action", _recovery_action),
    GpuCheck("gpu/<index>/row_remap_failure", _row_remap_failure),
    GpuCheck("gpu/<index>/row_remap_pending", _row_remap_pending),
    GpuCheck("gpu/<index>/ecc_uncorrected", _ecc_uncorrected),
    GpuCheck("gpu/<index>/xid", _xid),
)
"""In this order for each GPU. `<index>` is NVML's index."""


def gpu_results(node_map: Node) -> Iterator[Result]:
    """Return a line for each thing that is wrong with a GPU; none for a GPU that is well."""
    for nameless in node_map.nameless_gpus:
        why = f"{nameless.fault}, and has not reported its uuid since gpumap's start"
        yield result_of(f"gpu/{nameless.index}", Outcome("failed", "", why, nameless.remedy))
    for gpu in node_map.gpus:
        for check in GPU_CHECKS:
            if outcome := check.judge(gpu, node_map):
                yield result_of(check.name.replace("<index>", str(gpu.index)), outcome)


def _identity(gpu: Gpu) -> str:
    return " ".join(part for part in (gpu.uuid, gpu.pci_bus_id, gpu.model) if part)


def _pods_with_xids(gpu: Gpu, node_map: Node) -> str:
    """Name the pods that held or used a GPU, or a part of it, when an XID error came."""
    parts = {gpu.uuid, *(one.uuid for one in node_map.devices if one.gpu_uuid == gpu.uuid)}
    return listed(sorted({f"{one.namespace}/{one.pod}" for one in node_map.container_xids if one.uuid in parts}))
