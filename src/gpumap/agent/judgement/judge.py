"""Find what is wrong on a node: faults of GPUs, use without a grant, grants without use, slots without a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import structs

from gpumap.agent.judgement.holders import Unknown, holder_uses, judge_holder, leaves_of
from gpumap.agent.judgement.unjudged import Blockers, Tally, find_blockers
from gpumap.model import remedies
from gpumap.model.devices import (
    NO_CONTAINER,
    NodeDevice,
    container_of,
    has_kubelet,
    node_devices,
    other_uses,
    sources_up,
    sum_of,
)
from gpumap.model.findings import WHY, count_gpus_once, sort_findings, why_broken, why_missing, why_nameless, why_of
from gpumap.model.formatting import counted, listed, percent
from gpumap.model.grouping import grouped
from gpumap.model.node import Device, Finding, Gpu, Node, Process, Unexplained, Unjudged
from gpumap.model.observations import DeviceId, Moment
from gpumap.model.readings import Uuid
from gpumap.model.terms import BUSY_WITHOUT_PROCESS, FINDINGS, ContainerName, Owner, PodName

ENDING_SECONDS = 10.0
"""A leftover is of a pod that has been gone for that long: after `kubectl delete --force` the kubelet still ends
processes."""
RECENT_SECONDS = 3600.0
"""An error without a lasting state, such as an XID error, is a fault for so long."""


class AssignedTwice(NamedTuple):
    """A shared id of one of its containers, since when, and the other pods that hold it and exist."""

    container: ContainerName
    resource: str
    device_id: DeviceId
    uuid: Uuid
    since: Moment
    pods: tuple[PodName, ...]


def judge(
    node: Node, previous: Sequence[Finding] = (), clock_step_seconds: float = 0.0, twice: Sequence[AssignedTwice] = ()
) -> tuple[tuple[Finding, ...], dict[str, int], tuple[Unjudged, ...]]:
    """Judge a node. `previous` are the findings of the last snapshot: they know since when they hold.

    Returns all findings, worst first; for each kind how many GPUs, leaves, containers or holders were judged; and those
    that cannot be judged.

    The node's devices have the processes of squatters and leftovers. `clock_step_seconds`: by how much the wall clock
    was set since the last snapshot. `twice`: ids that several pods have held for `--grace`.
    """
    tally = Tally(kind for kind in FINDINGS if kind != "maybe_idle")
    faults = count_gpus_once([*_faults(node)])
    blockers = find_blockers(node)
    findings = [
        *faults,
        *_judge_offers(node, tally),
        *_judge_devices(node, blockers, tally),
        *_judge_holders(node, blockers, tally),
        *_unmatched(node),
        *_assigned_twice(twice),
    ]
    _count_gpus(node, tally)
    _count_containers(node, tally)
    since = {_key(finding): finding.since + clock_step_seconds for finding in previous}
    dated = [
        # It is never in the future.
        structs.replace(finding, since=min(since.get(_key(finding), finding.since or node.timestamp), node.timestamp))
        for finding in _counted_once(findings, node)
    ]
    return sort_findings(dated), dict(tally.judged), tally.unjudged()


def _key(finding: Finding) -> tuple[str, str, ContainerName, str | None]:
    return finding.finding, finding.reason, finding.name, finding.uuid


def _count_gpus(node: Node, tally: Tally) -> None:
    reason = None if "nvml" in sources_up(node) else "nvml_down"
    uuids = [*(gpu.uuid for gpu in node.gpus), *(None for _ in node.nameless_gpus)]
    for uuid in uuids or ((None,) if reason else ()):
        tally.count("fault", reason, uuid=uuid)


def _count_containers(node: Node, tally: Tally) -> None:
    """Count the containers with GPU slots."""
    reason = _why_not_listed(node)
    if reason:
        tally.count("unmatched", reason)
        return
    rows = (row.name for device in node.devices for row in device.containers if row.slots)
    for name in {*rows, *(entry.name for entry in node.unmatched)}:
        tally.count("unmatched", None, name)


def _why_not_listed(node: Node) -> str | None:
    """Return why no List is known; `None` if it is."""
    if not has_kubelet(node):
        return "no_kubelet"
    return None if "kubelet" in sources_up(node) else "kubelet_down"


def _judge_devices(node: Node, blockers: Mapping[Uuid, Blockers], tally: Tally) -> Iterator[Finding]:
    """Find use without a grant, leaf by leaf."""
    places = list(node_devices(node))
    for place in places:
        if place.device.is_leaf:
            uuid = place.device.uuid
            for kind in ("squatter", "leftover"):
                tally.count(kind, blockers[uuid].owner_reason, uuid=uuid)
            tally.count("unexplained", blockers[uuid].unexplained_reason, uuid=uuid)
        yield from _squatters(place)
        yield from _leftovers(place)
        yield from _unexplained(place)
    if not any(place.device.is_leaf for place in places):
        down = "nvml_down" if "nvml" not in sources_up(node) else None
        unlisted = down or _why_not_listed(node)
        for kind, unknown in (("squatter", unlisted), ("leftover", unlisted), ("unexplained", down)):
            if unknown:
                tally.count(kind, unknown)


def _judge_holders(node: Node, blockers: Mapping[Uuid, Blockers], tally: Tally) -> Iterator[Finding]:
    uses = holder_uses(node)
    for use in uses:
        reasons = (blockers[leaf.uuid].holder_reason for leaf in leaves_of(use.place))
        for kind, judgement in judge_holder(use, next(filter(None, reasons), None)):
            reason = judgement.reason if isinstance(judgement, Unknown) else None
            tally.count(kind, reason, use.holder.name, use.place.device.uuid)
            if isinstance(judgement, Finding):
                yield judgement
    unheld = [device.uuid for device in node.devices if device.holders is None and not device.containers]
    reason = _why_not_listed(node) if not uses else None
    for uuid in [None] if reason else unheld:
        for kind in ("over", "stalled", "idle", "unused"):
            tally.count(kind, reason or "unknown_assignment", uuid=uuid)


# --- GPUs that no container can be assigned ---------------------------------------------------------------------------


def _judge_offers(node: Node, tally: Tally) -> Iterator[Finding]:
    is_any_offered = any(slots for device in node.devices for slots in device.allocatable.values())
    if "nvml" not in sources_up(node):
        tally.count("not_offered", "nvml_down")
        return
    for _ in node.nameless_gpus:
        tally.count("not_offered", "gpu_down")
    for gpu in node.gpus:
        seconds = gpu.not_offered_seconds
        reason = _why_not_listed(node) if gpu.up else "gpu_down"
        reason = reason or ("offers_unknown" if seconds is None else None)
        tally.count("not_offered", reason, uuid=gpu.uuid)
        if reason is None and seconds is not None and seconds >= node.grace_seconds:
            reason = "left_out" if is_any_offered else "no_resource"
            yield Finding(
                *NO_CONTAINER,
                finding="not_offered",
                reason=reason,
                uuid=gpu.uuid,
                since=node.timestamp - seconds,
                gpus=1.0,
                why=why_of("not_offered", reason, seconds),
                remedy=remedies.FINDINGS["not_offered"],
            )


# --- ids that two pods hold -------------------------------------------------------------------------------------------


def _assigned_twice(twice: Iterable[AssignedTwice]) -> Iterator[Finding]:
    """Yield a finding for each container and device."""
    for (name, uuid), entries in grouped(((entry.container, entry.uuid), entry) for entry in twice).items():
        pods = sorted({"/".join(pod) for entry in entries for pod in entry.pods})
        slots = [
            counted(len(ids), f"slot of {resource}", f"slots of {resource}")
            for resource, ids in grouped((entry.resource, entry.device_id) for entry in entries).items()
        ]
        yield Finding(
            *name,
            finding="unmatched",
            reason="assigned_twice",
            uuid=uuid,
            since=min(entry.since.wall for entry in entries),
            why=f"{listed(slots)} also assigned to {listed(pods)}",
            remedy=remedies.UNMATCHED["assigned_twice"],
        )


# --- faults of GPUs ---------------------------------------------------------------------------------------------------


def _faults(node: Node) -> Iterator[Finding]:
    for gpu in node.gpus:
        yield from _faults_of(gpu, node)
    for reason, gpus in grouped((reason, gpu) for gpu in node.nameless_gpus for reason in gpu.reasons).items():
        number = float(sum(gpu.fault == reason for gpu in gpus))
        yield structs.replace(_fault(reason, gpus[0].index), gpus=number, why=why_nameless(reason, gpus))
    if (missing := node.missing_gpus) and missing.count:
        fault = _fault("not_in_nvml", None, since=missing.since)
        yield structs.replace(fault, gpus=float(missing.count), why=why_missing(missing))


def _faults_of(gpu: Gpu, node: Node) -> Iterator[Finding]:
    reading, action = gpu.reading, gpu.recovery_action
    fault = partial(_fault, index=gpu.index, uuid=gpu.uuid)
    if gpu.fault is not None:
        yield fault(gpu.fault, since=gpu.last_success)
    if reading and reading.row_remap_failure:
        yield fault("row_remap_failure")
    if action not in (None, "none"):
        yield fault(f"recovery_{action}")
    if _recent(gpu.ecc_uncorrected_at, node):
        yield fault("ecc_uncorrected", since=gpu.ecc_uncorrected_at)
    for xids in (xids for xids in node.xids if xids.uuid == gpu.uuid):
        for code, moment in sorted(xids.last_at.items()):
            if code in remedies.FATAL_XIDS and code not in xids.before_reset and _recent(moment, node):
                yield fault(f"xid_{code}")
    if reading and reading.row_remap_pending:
        yield fault("row_remap_pending")


def _fault(reason: str, index: int | None, uuid: Uuid | None = None, since: float | None = None) -> Finding:
    why, remedy = why_broken(reason), remedies.finding_remedy("fault", reason, index)
    return Finding(*NO_CONTAINER, finding="fault", reason=reason, uuid=uuid, since=since or 0.0, why=why, remedy=remedy)


def _recent(moment: float | None, node: Node) -> bool:
    return moment is not None and node.timestamp - moment < RECENT_SECONDS


def _finding(
    place: NodeDevice,
    name: ContainerName,
    kind: str,
    reason: str,
    why: str,
    since: float,
    *,
    gpus: float | None = None,
    memory_bytes: int | None = None,
    pids: tuple[int, ...] = (),
) -> Finding:
    """Return what is wrong on a device: `memory_bytes` are used without a grant."""
    return Finding(
        *name,
        finding=kind,
        reason=reason,
        uuid=place.device.uuid,
        since=since,
        gpus=gpus,
        used_bytes=memory_bytes,
        memory_bytes=memory_bytes,
        why=why,
        pids=pids,
        remedy=remedies.finding_remedy(kind, reason, place.device.index, pids),
    )


# --- use without a grant ----------------------------------------------------------------------------------------------


def _squatters(place: NodeDevice) -> Iterator[Finding]:
    """Find containers that use a leaf that no container of their pod holds. A debug container in the holder's pod is
    none."""
    users = [(row, row.use) for row in place.device.containers if row.owner is Owner.UNASSIGNED and row.use]
    if not users:
        return
    processes = [process for process in place.device.processes if process.owner is Owner.UNASSIGNED]
    gpu_uuid = place.device.gpu_uuid
    # A pod may also hold the partitioned GPU of a MIG device as a whole.
    gpus = (device for device in place.node.devices if device.partitioned and device.uuid == gpu_uuid)
    holding_pods = {row.pod_name for device in (place.device, *gpus) for row in device.containers if row.holds}
    for row, use in users:
        if row.pod_name not in holding_pods:
            own_processes = [process for process in processes if container_of(process) == row.name]
            pids = tuple(process.pid for process in own_processes)
            is_listed = bool(pids or place.device.processes)
            evidence = _named_pids(place.device, pids) if is_listed else _counted(use.processes)
            why = f"{WHY['squatter']}: {evidence}"
            since, memory_bytes = _since(own_processes), use.memory_bytes
            yield _finding(
                place, row.name, "squatter", "not_assigned", why, since, memory_bytes=memory_bytes, pids=pids
            )


def _leftovers(place: NodeDevice) -> Iterator[Finding]:
    if not any(use.owner is Owner.GONE and use.processes for use in place.device.owners):
        return
    latest = place.node.timestamp - ENDING_SECONDS
    for other_use in other_uses(place.device):
        processes = [process for process in place.device.processes if process.pid in other_use.pids]
        leftovers = [process for process in processes if process.owner_since is None or process.owner_since <= latest]
        if other_use.owner is Owner.GONE and (leftovers or not processes):
            pids = tuple(process.pid for process in leftovers)
            evidence = _named_pids(place.device, pids) if pids else _counted(other_use.processes)
            memory_bytes = (
                sum_of(process.memory_bytes for process in leftovers) if leftovers else other_use.memory_bytes
            )
            why, since = f"{WHY['leftover']}, but left {evidence}", _since(leftovers)
            yield _finding(
                place, other_use.name, "leftover", "pod_gone", why, since, memory_bytes=memory_bytes, pids=pids
            )


def _unexplained(place: NodeDevice) -> Iterator[Finding]:
    """Find memory and load of a leaf that no living process explains."""
    unexplained = place.device.unexplained or Unexplained()
    for reason, since in unexplained.since.items():
        why = why_of("unexplained", reason, place.node.timestamp - since)
        finding = partial(_finding, place, NO_CONTAINER, "unexplained", reason)
        if reason == BUSY_WITHOUT_PROCESS:
            readings = (gpu.reading for gpu in place.node.gpus if gpu.uuid == place.device.uuid and gpu.reading)
            why = why.replace("high utilization", percent(next(readings).utilization_ratio))
            yield finding(why, since, gpus=1.0)
            continue
        pids, memory_bytes = unexplained.pids, unexplained.memory_bytes
        if pids:
            why += f"; NVML still lists PID {listed([*map(str, pids)])}, which /proc lacks"
        yield finding(why, since, memory_bytes=memory_bytes, pids=pids)


def _since(processes: Iterable[Process]) -> float:
    """Return since when the first of them has had its owner; 0 if that is unknown."""
    return min((timestamp for process in processes if (timestamp := process.owner_since) is not None), default=0.0)


def _named_pids(device: Device, pids: tuple[int, ...]) -> str:
    names = {process.pid: process.comm for process in device.processes}
    return f"PID {listed([f'{pid} {names[pid]}'.strip() for pid in pids])}"


def _counted(processes: int | None) -> str:
    """Return the number of processes with unknown PIDs, or that there is memory in use."""
    return counted(processes, "process", "processes") if processes else "memory in use"


# --- slots without a device -------------------------------------------------------------------------------------------


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
            why=why_of("unmatched", reason, 0.0).replace("slots", slots, 1),
            remedy=entries[0].remedy,
        )


# --- bytes that add up ------------------------------------------------------------------------------------------------


def _counted_once(findings: Sequence[Finding], node: Node) -> list[Finding]:
    """Return findings with parts of the unused memory that add up.

    Compute instances share the memory of their GPU instance, claims that of a device, and plugins may assign a GPU
    twice. Of memory that is unused, each finding then has a part.
    """
    by_uuid = {device.uuid: device for device in node.devices}
    totals = {gpu.uuid: gpu.reading.memory.total_bytes for gpu in node.gpus if gpu.reading and gpu.reading.memory}
    parts = [
        finding.memory_bytes if finding.finding in ("idle", "maybe_idle", "unused") else None for finding in findings
    ]
    pools: dict[object, list[int]] = {}
    gpus: dict[Uuid, list[int]] = {}
    for number, finding in enumerate(findings):
        if parts[number] is not None:
            device = by_uuid[Uuid(finding.uuid or "")]
            pool = (device.gpu_uuid, device.mig.gpu_instance_id) if device.mig else finding.uuid
            pools.setdefault(pool, []).append(number)
            gpus.setdefault(device.gpu_uuid or device.uuid, []).append(number)
    for of_pool in pools.values():
        memory = by_uuid[Uuid(findings[of_pool[0]].uuid or "")].memory
        if memory is not None:
            used_bytes = sum(findings[number].used_bytes or 0 for number in of_pool)
            _share(parts, of_pool, max(memory.total_bytes - used_bytes, 0))
    for uuid, of_gpu in gpus.items():
        if uuid in totals:
            _share(parts, of_gpu, totals[uuid])
    return [
        finding
        if part_size is None or part_size == finding.memory_bytes
        else structs.replace(finding, memory_bytes=part_size)
        for finding, part_size in zip(findings, parts, strict=True)
    ]


def _share(parts: list[int | None], members: Sequence[int], max_bytes: int) -> None:
    """Reduce the parts of these members in proportion, so that they add up to `max_bytes`, if they are more."""
    total = sum(parts[position] or 0 for position in members)
    if total <= max_bytes:
        return
    remaining_bytes = max_bytes
    for position in members:
        part_size = parts[position] or 0
        parts[position] = remaining_bytes * part_size // total if total else 0
        remaining_bytes, total = remaining_bytes - (parts[position] or 0), total - part_size
