"""The part of the document that is about physical GPUs: what they measure, their health, what they need.

What is not known is null, or, where words are keys, has no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpumap.model import remedies
from gpumap.model.readings import DeviceMemory, GpuReading, Uuid
from gpumap.model.snapshot import Gpu, GpuAccount, GpuXids, NamelessGpu, Snapshot

GpuDocument = dict[str, Any]


def gpu_documents(snapshot: Snapshot) -> list[GpuDocument]:
    """Every GPU that has a uuid, also one that does not answer."""
    xids = {one.uuid: one for one in snapshot.xids}
    accounts = {one.uuid: one for one in snapshot.gpu_accounts}
    return [_gpu(gpu, xids, accounts) for gpu in snapshot.gpus]


def nameless_documents(snapshot: Snapshot) -> list[GpuDocument]:
    return [_nameless(gpu) for gpu in snapshot.nameless_gpus]


def memory_document(memory: DeviceMemory | None) -> GpuDocument | None:
    if memory is None:
        return None
    return {
        "total_bytes": memory.total_bytes,
        "used_bytes": memory.used_bytes,
        "free_bytes": memory.free_bytes,
        "reserved_bytes": memory.reserved_bytes,
    }


def _gpu(gpu: Gpu, xids: Mapping[Uuid, GpuXids], accounts: Mapping[Uuid, GpuAccount]) -> GpuDocument:
    reading = gpu.reading or GpuReading(gpu.index)
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "minor": gpu.minor,
        "pci_bus_id": gpu.pci_bus_id,
        "model": gpu.model,
        "partitioned": gpu.partitioned,
        "up": gpu.fault is None,
        "fault": gpu.fault,
        "remedy": _remedy(gpu.fault, gpu.index),
        "recovery_action": _recovery(gpu),
        "remedies": _remedies(reading, xids.get(gpu.uuid)),
        "stuck_seconds": gpu.stuck_seconds,
        "last_success": gpu.last_success,
        "memory": memory_document(reading.memory),
        "utilization_ratio": reading.utilization_ratio,
        "memory_controller_busy_ratio": reading.memory_controller_ratio,
        "temperatures_celsius": dict(reading.temperatures_celsius),
        "power_watts": reading.power_watts,
        "power_limit_watts": reading.power_limit_watts,
        "energy_joules": reading.energy_joules,
        **_clocks(reading),
        **_memory_errors(reading),
        "pcie": _link(reading.pcie_transmit_bytes, reading.pcie_receive_bytes),
        "nvlink": _link(reading.nvlink_transmit_bytes, reading.nvlink_receive_bytes),
        "xids": _xids(xids.get(gpu.uuid)),
        "account": _account(accounts.get(gpu.uuid)),
    }


def _nameless(gpu: NamelessGpu) -> GpuDocument:
    return {"index": gpu.index, "fault": gpu.fault, "remedy": _remedy(gpu.fault, gpu.index)}


def _remedy(fault: str | None, index: int) -> str | None:
    return _of_index(remedies.FAULTS.get(fault), index) if fault else None


def _recovery(gpu: Gpu) -> GpuDocument | None:
    action = gpu.recovery_action
    if action is None:
        return None
    return {"action": action, "remedy": _of_index(remedies.RECOVERY.get(action), gpu.index)}


def _remedies(reading: GpuReading, xids: GpuXids | None) -> dict[str, str]:
    """What to do about what is wrong with a GPU besides its fault."""
    wrong = {
        "ecc_uncorrected": any(errors for kind, _, errors in reading.ecc_errors if kind == "uncorrected"),
        "row_remap_pending": reading.row_remap_pending,
        "row_remap_failure": reading.row_remap_failure,
        "xid_errors": xids is not None and xids.counts,
    }
    return {name: remedies.HEALTH[name].replace("<index>", str(reading.index)) for name in wrong if wrong[name]}


def _of_index(remedy: str | None, index: int) -> str | None:
    return remedy.replace("<index>", str(index)) if remedy else None


def _clocks(reading: GpuReading) -> GpuDocument:
    return {
        "clocks_hertz": dict(reading.clocks_hertz),
        "clock_events": dict(reading.clock_events),
        "clock_event_seconds": dict(reading.clock_event_seconds),
        "performance_state": reading.performance_state,
        "fan_speed_ratios": dict(reading.fan_ratios),
    }


def _memory_errors(reading: GpuReading) -> GpuDocument:
    counts = {(kind, location): errors for kind, location, errors in reading.ecc_errors}
    return {
        "ecc_errors": [
            {"type": kind, "location": location, "errors": errors} for (kind, location), errors in counts.items()
        ],
        "remapped_rows": dict(reading.remapped_rows),
        "row_remap_pending": reading.row_remap_pending,
        "row_remap_failure": reading.row_remap_failure,
        "retired_pages": dict(reading.retired_pages),
    }


def _link(transmit_bytes: int | None, receive_bytes: int | None) -> GpuDocument:
    return {"transmit_bytes": transmit_bytes, "receive_bytes": receive_bytes}


def _xids(xids: GpuXids | None) -> GpuDocument | None:
    if xids is None:
        return None
    return {
        "counts": [{"xid": code, "errors": errors} for code, errors in xids.counts],
        "blind_seconds": xids.blind_seconds,
    }


def _account(account: GpuAccount | None) -> GpuDocument | None:
    if account is None:
        return None
    return {
        "energy_unattributed_joules": account.energy_unattributed_joules,
        "gap_seconds": account.gap_seconds,
    }
