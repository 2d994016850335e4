"""Find what is wrong on a node: faults of GPUs, use without a grant, grants without use, slots without a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import structs

from gpumap.agent.judgement.holder_use import HolderUse, holder_uses, is_watched_for
from gpumap.agent.judgement.unjudged import STALLED_SECONDS, judged
from gpumap.model import remedies
from gpumap.model.devices import NO_CONTAINER, NodeDevice, container_of, node_devices, other_uses, sum_of
from gpumap.model.findings import WHY, count_gpus_once, in_order, why_broken, why_nameless
from gpumap.model.grouping import grouped
from gpumap.model.node import ContainerOnDevice, Device, Finding, Gpu, Node, Process
from gpumap.model.readings import Uuid
from gpumap.model.shown import age, counted, listed, size
from gpumap.model.terms import ContainerName, Owner

UNUSED_RATIO, UNUSED_BYTES = 0.2, 1 << 30
"""A holder is `unused` if its peak leaves more than this part of its granted memory, and more than these bytes."""


ENDING_SECONDS = 10.0
"""A leftover is of a pod that has been gone for that long: after `kubectl delete --force` the kubelet still ends
processes."""


RECENT_SECONDS = 3600.0
"""An error without a lasting state, such as an XID error, is a fault for so long."""


FATAL_XIDS = frozenset({46, 48, 54, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 142, 143, 151, 155, 156, 158})
"""Those that EKS's node monitoring agent 1.7 counts as fatal, without 63 and 109. With 63 the driver marked bad memory
for replacement, and work continues. NVIDIA's device plugin counts 109 as an error of the application."""


_Key = tuple[str, str, ContainerName, str | None]


class Judgement(NamedTuple):
    """All findings of a node, worst first, and for each kind whether the whole node can be judged now. If not, findings
    may be missing."""

    findings: tuple[Finding, ...]
    judged: dict[str, bool]


def judge(node: Node, before: Sequence[Finding] = ()) -> Judgement:
    """Judge a node. `before` are the findings of the last snapshot: they know since when they hold.

    The node's devices have the processes of squatters and leftovers.
    """
    held = holder_uses(node)
    findings = [*count_gpus_once([*_faults(node)])]
    for place in node_devices(node):
        findings += _squatters(place)
        findings += _leftovers(place)
    findings += [finding for place, holder, use in held if use and (finding := _of_holder(place, holder, use))]
    findings += _unmatched(node)
    since = {_key(one): one.since for one in before}
    dated = [_dated(one, since, node.timestamp) for one in _counted_once(findings, node)]
    return Judgement(in_order(dated), judged(node, held))


def _key(one: Finding) -> _Key:
    return one.finding, one.reason, one.name, one.uuid


def _dated(one: Finding, since: Mapping[_Key, float], now: float) -> Finding:
    if one.finding in ("idle", "stalled"):
        return one  # its evidence is a time
    return structs.replace(one, since=since.get(_key(one), one.since or now))


# --- faults of GPUs ---------------------------------------------------------------------------------------------------


def _faults(node: Node) -> Iterator[Finding]:
    for gpu in node.gpus:
        yield from _faults_of(gpu, node)
    for reason, gpus in grouped((reason, gpu) for gpu in node.nameless_gpus for reason in gpu.reasons).items():
        fault = _fault(reason, None, remedies.of_finding("fault", reason, gpus[0].index))
        yield structs.replace(
            fault, gpus=float(sum(gpu.fault == reason for gpu in gpus)), why=why_nameless(reason, gpus)
        )


def _faults_of(gpu: Gpu, node: Node) -> Iterator[Finding]:
    reading, action = gpu.reading, gpu.recovery_action
    if gpu.fault is not None:
        yield _fault(gpu.fault, gpu.uuid, gpu.remedies.get("fault"), since=gpu.last_success)
    if reading and reading.row_remap_failure:
        yield _fault("row_remap_failure", gpu.uuid, gpu.remedies.get("row_remap_failure"))
    if action not in (None, "none"):
        yield _fault(f"recovery_{action}", gpu.uuid, gpu.remedies.get("recovery_action"))
    if _recent(gpu.ecc_uncorrected_at, node):
        yield _fault("ecc_uncorrected", gpu.uuid, gpu.remedies.get("ecc_uncorrected"), since=gpu.ecc_uncorrected_at)
    last_at = next((one.last_at for one in node.xids if one.uuid == gpu.uuid), {})
    for code, at in sorted(last_at.items()):
        if code in FATAL_XIDS and _recent(at, node):
            yield _fault(f"xid_{code}", gpu.uuid, gpu.remedies.get("xid_errors"))
    if reading and reading.row_remap_pending:
        yield _fault("row_remap_pending", gpu.uuid, gpu.remedies.get("row_remap_pending"))


def _fault(reason: str, uuid: Uuid | None, remedy: str | None, since: float | None = None) -> Finding:
    why = why_broken(reason)
    return Finding(*NO_CONTAINER, finding="fault", reason=reason, uuid=uuid, since=since or 0.0, why=why, remedy=remedy)


def _recent(moment: float | None, node: Node) -> bool:
    return moment is not None and node.timestamp - moment < RECENT_SECONDS


def _finding(
    place: NodeDevice,
    name: ContainerName,
    kind: str,
    reason: str,
    why: str,
    since: float = 0.0,
    *,
    gpus: float | None = None,
    granted_bytes: int | None = None,
    used_bytes: int | None = None,
    memory_bytes: int | None = None,
    pids: tuple[int, ...] = (),
) -> Finding:
    """Return what is wrong with a container on a device."""
    return Finding(
        *name,
        finding=kind,
        reason=reason,
        uuid=place.device.uuid,
        since=since,
        gpus=gpus,
        granted_bytes=granted_bytes,
        used_bytes=used_bytes,
        memory_bytes=memory_bytes,
        why=why,
        pids=pids,
        remedy=remedies.FINDINGS[kind],
    )


# --- use without a grant ----------------------------------------------------------------------------------------------


def _squatters(place: NodeDevice) -> Iterator[Finding]:
    processes = place.device.processes
    for one in place.device.containers:
        if one.owner is Owner.UNASSIGNED and one.use:
            of_one = [
                process
                for process in processes
                if process.owner is Owner.UNASSIGNED and container_of(process) == one.name
            ]
            pids = tuple(process.pid for process in of_one)
            what = _named_pids(place.device, pids) if pids or processes else _counted(one.use.processes)
            why = f"{WHY['squatter']}: {what}"
            used_bytes = one.use.memory_bytes
            finding = partial(_finding, place, one.name, used_bytes=used_bytes, memory_bytes=used_bytes, pids=pids)
            yield finding("squatter", "not_assigned", why, _since(of_one))


def _leftovers(place: NodeDevice) -> Iterator[Finding]:
    if not any(one.owner is Owner.GONE and one.processes for one in place.device.owners):
        return
    latest = place.node.timestamp - ENDING_SECONDS
    for other in other_uses(place.device):
        processes = [one for one in place.device.processes if one.pid in other.pids]
        left = [one for one in processes if one.owner_since is None or one.owner_since <= latest]
        if other.owner is Owner.GONE and (left or not processes):
            pids = tuple(one.pid for one in left)
            what = _named_pids(place.device, pids) if pids else _counted(other.processes)
            used_bytes = sum_of(one.memory_bytes for one in left) if left else other.memory_bytes
            why = f"{WHY['leftover']}, but left {what}"
            finding = partial(_finding, place, other.name, used_bytes=used_bytes, memory_bytes=used_bytes, pids=pids)
            yield finding("leftover", "pod_gone", why, _since(left))


def _since(processes: Iterable[Process]) -> float:
    """Return since when the first of them has had its owner; 0 if that is unknown."""
    return min((at for one in processes if (at := one.owner_since) is not None), default=0.0)


def _named_pids(device: Device, pids: tuple[int, ...]) -> str:
    names = {one.pid: one.comm for one in device.processes}
    return f"PID {listed([f'{pid} {names[pid]}'.strip() for pid in pids])}"


def _counted(processes: int | None) -> str:
    """Return the number of processes with unknown PIDs, or that there is memory in use."""
    return counted(processes, "process", "processes") if processes else "memory in use"


# --- grants without use -----------------------------------------------------------------------------------------------


def _of_holder(place: NodeDevice, holder: ContainerOnDevice, use: HolderUse) -> Finding | None:
    if holder.allocated_gpus == 0:
        return None  # admin access: it was granted nothing that it could waste
    node, granted, used = place.node, holder.allocated_memory_bytes, use.memory_bytes
    finding = partial(_finding, place, holder.name, gpus=holder.allocated_gpus, granted_bytes=granted, used_bytes=used)
    if granted is not None and used is not None and used > granted:
        why = f"uses {size(used)} of {size(granted)} granted"
        return finding("over", "over_grant", why, gpus=None, memory_bytes=used - granted)
    if holder.use and holder.use.processes and (stalled := _stalled(place)):
        seconds, why = stalled
        return finding("stalled", "busy_without_work", why, node.timestamp - seconds)
    if use.pod_at_work:
        return None
    if use.idle_seconds is not None and use.idle_seconds >= node.idle_after_seconds:
        reason, why = _idle_because(use, use.idle_seconds)
        left = max(granted - used, 0) if granted is not None and used is not None else None
        return finding("idle", reason, why, node.timestamp - use.idle_seconds, memory_bytes=left)
    if granted is None or used is None or not use.memory_peak_bytes or not is_watched_for(use, node.grace_seconds):
        return None
    left = max(granted - max(used, use.memory_peak_bytes), 0)
    if left <= max(UNUSED_BYTES, UNUSED_RATIO * granted):
        return None
    return finding("unused", "peak_below_grant", f"peak so far {size(use.memory_peak_bytes)}", memory_bytes=left)


def _stalled(place: NodeDevice) -> tuple[float, str] | None:
    """Return for how long the GPU of the only container that computes there has been busy without work, and the
    evidence as a phrase."""
    gpu = next((one for one in place.node.gpus if one.uuid == place.device.uuid), None)
    seconds = gpu.busy_without_work_seconds if gpu else None
    if gpu is None or gpu.reading is None or seconds is None or seconds < STALLED_SECONDS:
        return None
    reading, idle = gpu.reading, gpu.idle_power_watts or 0.0
    watts = f"{reading.power_watts or 0.0:.0f} of {reading.power_limit_watts or 0.0:.0f} W (idle {idle:.0f} W)"
    return seconds, f"may be stalled: busy for {age(seconds)}, but draws {watts}"


def _idle_because(use: HolderUse, idle_seconds: float) -> tuple[str, str]:
    """Return the reason, and its evidence as a phrase."""
    without_process = use.no_process_seconds is not None and use.no_process_seconds > idle_seconds - 1.0  # rounding
    # It worked before, or gpumap has watched it only since then.
    worked = use.seen_seconds is not None and use.seen_seconds - idle_seconds > 1.0  # more than rounding
    what = "process" if without_process else "activity"
    return f"no_{what}", f"no {what} for {'' if worked else 'at least '}{age(idle_seconds)}"


def _unmatched(node: Node) -> Iterator[Finding]:
    alike = grouped(((entry.name, entry.reason), entry) for entry in node.unmatched)
    for (name, reason), entries in alike.items():
        slots = listed([f"{counted(entry.slots, 'slot')} of {entry.resource}" for entry in entries])
        yield Finding(
            *name,
            finding="unmatched",
            reason=reason,
            uuid=None,
            since=0.0,
            why=f"{slots} without a device: {reason}",
            remedy=entries[0].remedy,
        )


# --- bytes that add up ------------------------------------------------------------------------------------------------


def _counted_once(found: Sequence[Finding], node: Node) -> list[Finding]:
    """Return findings with parts of the unused memory that add up.

    Compute instances share the memory of their GPU instance, claims that of a device, and plugins may assign a GPU
    twice. Of memory that is unused, each finding then has a part.
    """
    by_uuid = {device.uuid: device for device in node.devices}
    totals = {gpu.uuid: gpu.reading.memory.total_bytes for gpu in node.gpus if gpu.reading and gpu.reading.memory}
    parts = [one.memory_bytes if one.finding in ("idle", "unused") else None for one in found]
    pools: dict[object, list[int]] = {}
    gpus: dict[Uuid, list[int]] = {}
    for at, one in enumerate(found):
        if parts[at] is not None:
            device = by_uuid[Uuid(one.uuid or "")]
            pools.setdefault((device.gpu_uuid, device.mig.gpu_instance_id) if device.mig else one.uuid, []).append(at)
            gpus.setdefault(device.gpu_uuid or device.uuid, []).append(at)
    for of_pool in pools.values():
        memory = by_uuid[Uuid(found[of_pool[0]].uuid or "")].memory
        if memory is not None:
            _share(parts, of_pool, max(memory.total_bytes - sum(found[at].used_bytes or 0 for at in of_pool), 0))
    for uuid, of_gpu in gpus.items():
        if uuid in totals:
            _share(parts, of_gpu, totals[uuid])
    return [
        one if part is None or part == one.memory_bytes else structs.replace(one, memory_bytes=part)
        for one, part in zip(found, parts, strict=True)
    ]


def _share(parts: list[int | None], members: Sequence[int], most: int) -> None:
    """Reduce the parts of these members in proportion, so that they add up to `most`, if they are more."""
    whole = sum(parts[at] or 0 for at in members)
    if whole <= most:
        return
    left = most
    for at in members:
        part = parts[at] or 0
        parts[at] = left * part // whole if whole else 0
        left, whole = left - (parts[at] or 0), whole - part
