"""The part of a document that is about physical GPUs, with what series tell of them. Pure."""

from __future__ import annotations

from gpumap.cli.fleet.values import Value
from gpumap.model import remedies
from gpumap.model.document import Document


def gpu_document(
    *,
    uuid: str,
    index: int,
    minor: int | None,
    pci_bus_id: str,
    model: str,
    partitioned: bool,
    fault: str | None,
    memory: Document | None,
    utilization_ratio: Value | None,
    stuck_seconds: Value,
) -> Document:
    """A GPU. What is measured of it besides is in other series, and not asked for."""
    return {
        "uuid": uuid,
        "index": index,
        "minor": minor,
        "pci_bus_id": pci_bus_id,
        "model": model,
        "partitioned": partitioned,
        "up": fault is None,
        "fault": fault,
        "remedy": remedy_of(fault, index),
        "recovery_action": None,
        "remedies": {},
        "stuck_seconds": stuck_seconds,
        "last_success": None,
        "memory": memory,
        "utilization_ratio": utilization_ratio,
        "memory_controller_busy_ratio": None,
        "temperatures_celsius": {},
        "power_watts": None,
        "power_limit_watts": None,
        "energy_joules": None,
        "clocks_hertz": {},
        "clock_events": {},
        "clock_event_seconds": {},
        "performance_state": None,
        "fan_speed_ratios": {},
        "ecc_errors": [],
        "remapped_rows": {},
        "row_remap_pending": None,
        "row_remap_failure": None,
        "retired_pages": {},
        "pcie": {"transmit_bytes": None, "receive_bytes": None},
        "nvlink": {"transmit_bytes": None, "receive_bytes": None},
        "xids": None,
        "account": None,
    }


def remedy_of(fault: str | None, index: int) -> str | None:
    """What to do about a GPU that does not answer."""
    remedy = remedies.FAULTS.get(fault) if fault else None
    return remedy.replace("<index>", str(index)) if remedy else None


def memory_document(
    total: Value | None, used: Value | None, reserved: Value | None = None, *, asked: bool = True
) -> Document | None:
    """`None` where it cannot be read; where use was not asked for, the size alone. What is free is the rest: NVML's
    parts add up (nvml.h, nvmlMemory_v2_t)."""
    if total is None or (asked and used is None):
        return None
    return {
        "total_bytes": total,
        "used_bytes": used,
        "free_bytes": None if used is None else max(total - used - (reserved or 0), 0),
        "reserved_bytes": reserved,
    }
