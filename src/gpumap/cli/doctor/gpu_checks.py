"""The checks of `gpumap doctor` that are made of each GPU, one row each, and what a check returns. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpumap.model.findings import condition_of, findings_of_gpus
from gpumap.model.node import Node
from gpumap.model.readings import Uuid


class Result(NamedTuple):
    """What a check found: a line of `gpumap doctor`. `check` is its name, and `required` whether it must work.

    `state`: ok, degraded, missing, failed, warning (more rights than gpumap needs; errors that were counted), not
    needed, unknown.
    """

    state: str
    seen: str = ""
    why: str | None = None
    remedy: str | None = None
    check: str = ""
    required: bool = False


GPU_CHECKS = {
    "gpu/<index>": "failed",
    "gpu/<index>/recovery_action": "degraded",
    "gpu/<index>/row_remap_failure": "failed",
    "gpu/<index>/row_remap_pending": "degraded",
    "gpu/<index>/ecc_uncorrected": "warning",
    "gpu/<index>/xid": "warning",
    "gpu/<index>/not_offered": "degraded",
}
"""The state of each condition. `<index>` is NVML's index."""


def gpu_results(node_map: Node) -> Iterator[Result]:
    """Return a line for each GPU with a fault, with its worst one, and for each that is not offered."""
    gpus = {gpu.uuid: gpu for gpu in node_map.gpus}
    for fault in findings_of_gpus(node_map.findings):
        condition, gpu = condition_of(fault), gpus.get(Uuid(fault.uuid or ""))
        name = "gpu/<index>" if condition == "down" else f"gpu/<index>/{condition}"
        seen = " ".join(filter(None, (gpu.uuid, gpu.pci_bus_id, gpu.model))) if gpu else ""
        check = name.replace("<index>", str(gpu.index) if gpu else "?")
        yield Result(GPU_CHECKS[name], seen, f"{fault.reason}: {fault.why}", fault.remedy, check)
