"""What is wrong on a node: broken GPUs, and what is wasted. Only the agent decides it, once per snapshot. Pure.

Each finding is based only on known values. What cannot be judged is not judged: it is never 0 findings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import structs

from gpumap.model import remedies
from gpumap.model.devices import (
    NO_CONTAINER,
    NodeDevice,
    container_of,
    device_name,
    grantees,
    has_kubelet,
    node_devices,
    other_uses,
    sources_up,
    sum_of,
)
from gpumap.model.gaps import gaps_of, invisible, named, unknown_of_devices, use_known
from gpumap.model.grouping import grouped
from gpumap.model.node import ContainerOnDevice, Device, Finding, Gpu, Node, Use
from gpumap.model.readings import GpuReading, Uuid
from gpumap.model.shown import age, counted, listed, size
from gpumap.model.terms import FINDINGS, GPU_CONDITIONS, ContainerName, Owner, PodName

UNUSED_RATIO, UNUSED_BYTES = 0.2, 1 << 30
"""A holder is `unused` if its peak leaves more than this part of its granted memory, and more than these bytes."""
STALLED_SECONDS = 600.0
"""A holder may be stalled if its GPU has been busy without work for so long."""
ENDING_SECONDS = 10.0
"""A leftover is of a pod that has been gone for that long: after `kubectl delete --force` the kubelet still ends
processes."""
RECENT_SECONDS = 3600.0
"""An error without a lasting state, such as an XID error, is a fault for so long."""
FATAL_XIDS = frozenset({46, 48, 54, 62, 63, 64, 74, 79, 95, 110, 119, 120, 136, 140, 142, 143, 151, 155, 156, 158})
"""Those that EKS's node monitoring agent 1.7 counts as fatal, without 109, which NVIDIA's device plugin counts as an
error of the application."""


class _HolderUse(NamedTuple):
    """What a holder uses: of the leaf itself, or of the leaves of a GPU that it holds as a whole.

    `pod_at_work`: other containers of its pod are at work there.
    """

    memory_bytes: int | None
    memory_peak_bytes: int | None
    idle_seconds: float | None
    seen_seconds: float | None
    known_seconds: float | None
    worked_seconds_ago: float | None
    no_process_seconds: float | None
    pod_at_work: bool


_User = tuple[str, Use]
"""A container's name in its pod, and what it uses."""
_Held = Sequence[tuple[NodeDevice, ContainerOnDevice, _HolderUse | None]]
"""Holders, each with its device and what it uses."""
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
    held = _held(node)
    found = [*_faults(node)]
    for place in node_devices(node):
        found += _squatters(place)
        found += _leftovers(place)
    found += [one for place, holder, use in held if use and (one := _of_holder(place, holder, use))]
    found += _unmatched(node)
    since = {_key(one): one.since for one in before}
    dated = [_dated(one, since, node.timestamp) for one in _counted_once(found, node)]
    return Judgement(in_order(dated), _judged(node, held))


def in_order(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, the worst first."""
    return tuple(sorted(found, key=worst_first))


def worst_first(one: Finding) -> tuple[int, int, int, float, ContainerName]:
    """Sort key: the worst kind first; of faults the worst condition, of other kinds the larger waste."""
    condition = GPU_CONDITIONS.index(condition_of(one)) if one.finding == "fault" else 0
    return FINDINGS.index(one.finding), condition, *by_waste(one), one.name


def condition_of(fault: Finding) -> str:
    """Return the condition of `gpumap check` that a fault belongs to."""
    if fault.reason in GPU_CONDITIONS:
        return fault.reason
    kinds = {"recovery_": "recovery_action", "xid_": "xid"}
    return next((condition for start, condition in kinds.items() if fault.reason.startswith(start)), "down")


def by_waste(one: Finding) -> tuple[int, float]:
    """Sort key: the larger waste first."""
    return -(one.memory_bytes or 0), -(one.gpus or 0.0)


def _key(one: Finding) -> _Key:
    return one.finding, one.reason, one.name, one.uuid


def _dated(one: Finding, since: Mapping[_Key, float], now: float) -> Finding:
    if one.finding in ("idle", "stalled"):
        return one  # its evidence is a time
    return structs.replace(one, since=since.get(_key(one), one.since or now))


_XIDS = {str(code): meaning for code, meaning in remedies.XIDS.items()}
_WHY = {
    "squatter": "uses a device that it does not hold",
    "leftover": "its pod no longer exists",
    "over": "uses more memory than granted",
    "stalled": "may be stalled: its GPU has been busy for {age}, but does next to nothing",
    "unused": "its peak leaves memory unused",
}


def why_of(kind: str, reason: str, seconds: float) -> str:
    """Return why, as far as the reason and the time for which a finding has held show it."""
    if kind == "fault":
        return _why_broken(reason)
    if kind == "unmatched":
        return f"slots without a device: {reason}"
    if kind == "idle":
        return f"no {reason.removeprefix('no_')} for {age(seconds)}"
    return _WHY[kind].format(age=age(seconds))


# --- faults of GPUs ---------------------------------------------------------------------------------------------------


def _faults(node: Node) -> Iterator[Finding]:
    for gpu in node.gpus:
        yield from _faults_of(gpu, node)
    for fault, indices in grouped((one.fault, one.index) for one in node.nameless_gpus).items():
        remedy = next(one.remedy for one in node.nameless_gpus if one.fault == fault)
        why = f"GPU {listed([str(index) for index in indices])}: {_why_broken(fault)}"
        yield _fault(fault, None, remedy, gpus=float(len(indices)), why=why)


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


def _fault(
    reason: str,
    uuid: Uuid | None,
    remedy: str | None,
    *,
    since: float | None = None,
    gpus: float = 1.0,
    why: str = "",
) -> Finding:
    return Finding(
        *NO_CONTAINER,
        finding="fault",
        reason=reason,
        uuid=uuid,
        since=since or 0.0,
        gpus=gpus,
        why=why or _why_broken(reason),
        remedy=remedy,
    )


def _why_broken(reason: str) -> str:
    """Return what is wrong with a GPU, for a line of 80 bytes."""
    if reason.startswith("xid_"):
        code = reason.removeprefix("xid_")
        return f"had XID {code}: {_XIDS.get(code, 'see dmesg')}"
    action = reason.removeprefix("recovery_")
    if words := remedies.IN_SHORT.get(action):
        return words
    return f"needs recovery: {action[:20]}" if action != reason else f"cannot be read: {reason}"


def _recent(moment: float | None, node: Node) -> bool:
    return moment is not None and node.timestamp - moment < RECENT_SECONDS


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
            why = f"{_WHY['squatter']}: {what}"
            since = min((at for process in of_one if (at := process.owner_since) is not None), default=0.0)
            yield _ungranted("squatter", "not_assigned", place, one.name, one.use.memory_bytes, pids, why, since)


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
            why = f"{_WHY['leftover']}, but left {what}"
            since = min((at for one in left if (at := one.owner_since) is not None), default=0.0)
            yield _ungranted("leftover", "pod_gone", place, other.name, used_bytes, pids, why, since)


def _ungranted(
    kind: str,
    reason: str,
    place: NodeDevice,
    name: ContainerName,
    used_bytes: int | None,
    pids: tuple[int, ...],
    why: str,
    since: float,
) -> Finding:
    return Finding(
        *name,
        finding=kind,
        reason=reason,
        uuid=place.device.uuid,
        since=since,
        used_bytes=used_bytes,
        memory_bytes=used_bytes,
        why=why,
        pids=pids,
        remedy=remedies.FINDINGS[kind],
    )


def _named_pids(device: Device, pids: tuple[int, ...]) -> str:
    names = {one.pid: one.comm for one in device.processes}
    return f"PID {listed([f'{pid} {names[pid]}'.strip() for pid in pids])}"


def _counted(processes: int | None) -> str:
    """Name processes whose PIDs are unknown."""
    return counted(processes, "process", "processes") if processes else "memory in use"


# --- grants without use -----------------------------------------------------------------------------------------------


def _uses(place: NodeDevice) -> Iterator[tuple[ContainerOnDevice, _HolderUse | None]]:
    """Return the holders of a device with a grant of their own, each with what it uses. `None`: unknown."""
    leaves = _leaves(place)
    users = grouped((one.pod_name, (one.container, one.use)) for leaf in leaves for one in leaf.containers if one.use)
    for holder in grantees(place.device):
        yield holder, _use_of(place, holder, users.get(holder.pod_name, ()), len(leaves))


def _held(node: Node) -> _Held:
    """Return the holders of all devices with what they use, as `_uses`."""
    return [(place, *one) for place in node_devices(node) for one in _uses(place)]


def _of_holder(place: NodeDevice, holder: ContainerOnDevice, use: _HolderUse) -> Finding | None:
    if holder.allocated_gpus == 0:
        return None  # admin access: it was granted nothing that it could waste
    node, granted, used = place.node, holder.allocated_memory_bytes, use.memory_bytes
    finding = partial(_granted, place, holder, use)
    if granted is not None and used is not None and used > granted:
        return finding("over", "over_grant", f"uses {size(used)} of {size(granted)} granted", used - granted)
    if holder.use and holder.use.processes and (stalled := _stalled(place)):
        seconds, why = stalled
        return finding("stalled", "busy_without_work", why, None, node.timestamp - seconds)
    if use.pod_at_work:
        return None
    if use.idle_seconds is not None and use.idle_seconds >= node.idle_after_seconds:
        reason, why = _idle_because(use, use.idle_seconds)
        left = max(granted - used, 0) if granted is not None and used is not None else None
        return finding("idle", reason, why, left, node.timestamp - use.idle_seconds)
    if granted is None or used is None or not use.memory_peak_bytes or not _is_long(use, node.grace_seconds):
        return None
    left = max(granted - max(used, use.memory_peak_bytes), 0)
    if left <= max(UNUSED_BYTES, UNUSED_RATIO * granted):
        return None
    return finding("unused", "peak_below_grant", f"peak so far {size(use.memory_peak_bytes)}", left)


def _granted(
    place: NodeDevice,
    holder: ContainerOnDevice,
    use: _HolderUse,
    kind: str,
    reason: str,
    why: str,
    memory_bytes: int | None,
    since: float = 0.0,
) -> Finding:
    return Finding(
        *holder.name,
        finding=kind,
        reason=reason,
        uuid=place.device.uuid,
        since=since,
        gpus=None if kind == "over" else holder.allocated_gpus,
        granted_bytes=holder.allocated_memory_bytes,
        used_bytes=use.memory_bytes,
        memory_bytes=memory_bytes,
        why=why,
        remedy=remedies.FINDINGS[kind],
    )


def _is_long(use: _HolderUse | Use | None, seconds: float) -> bool:
    """Return whether gpumap has watched a holder for so long."""
    return use is not None and use.seen_seconds is not None and use.seen_seconds >= seconds


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


def _idle_because(use: _HolderUse, idle_seconds: float) -> tuple[str, str]:
    """Return the reason, and its evidence as a phrase."""
    without_process = use.no_process_seconds is not None and use.no_process_seconds > idle_seconds - 1.0  # rounding
    # It worked before, or gpumap has watched it only since then.
    worked = use.seen_seconds is not None and use.seen_seconds - idle_seconds > 1.0  # more than rounding
    what = "process" if without_process else "activity"
    return f"no_{what}", f"no {what} for {'' if worked else 'at least '}{age(idle_seconds)}"


def _use_of(place: NodeDevice, holder: ContainerOnDevice, of_pod: Sequence[_User], leaves: int) -> _HolderUse | None:
    """Return what a holder uses, of the uses of its pod; `None` if it is not known of each leaf.

    It rests only for as long as the other containers of its pod do, a sidecar, an init container: they use its GPU.
    Peaks of several leaves may be of different times.
    """
    uses = [use for container, use in of_pod if container == holder.container]
    if not uses or len(uses) < leaves:
        return None
    others = [use for container, use in of_pod if container != holder.container]
    resting = [*uses, *(use for use in others if use.last_active is not None)]
    memory, peaks, seen, known = zip(*map(_OF_HOLDER, uses), strict=True)
    active, worked, no_process = zip(*map(_OF_RESTING, resting), strict=True)
    return _HolderUse(
        memory_bytes=None if None in memory else sum(memory),
        memory_peak_bytes=None if None in peaks else sum(peaks),
        idle_seconds=None if None in active else max(place.node.timestamp - max(active), 0.0),
        seen_seconds=_least(seen),
        known_seconds=_least(known),
        worked_seconds_ago=_least(worked),
        no_process_seconds=_least(no_process),
        pod_at_work=any(_is_at_work(use, place.node) for use in others),
    )


_OF_HOLDER = attrgetter("memory_bytes", "memory_peak_bytes", "seen_seconds", "known_seconds")
_OF_RESTING = attrgetter("last_active", "worked_seconds_ago", "no_process_seconds")
"""Fields of `Use`."""


def _least(values: Collection[Any]) -> float | None:
    """Return the least of the values; `None` if one is unknown."""
    return None if None in values else min(values)


def _idle_seconds(use: Use, now: float) -> float | None:
    return None if use.last_active is None else max(now - use.last_active, 0.0)


def _leaves(place: NodeDevice) -> Sequence[Device]:
    """Return the device, or the MIG devices of a GPU that is assigned as a whole."""
    if not place.device.partitioned:
        return (place.device,)
    return [one for one in place.node.devices if one.gpu_uuid == place.device.uuid and one is not place.device]


def _is_at_work(use: Use, node: Node) -> bool:
    """Return whether it worked lately; if that is unknown, whether it has a process or memory."""
    idle_seconds = _idle_seconds(use, node.timestamp)
    if idle_seconds is None:
        return bool(use.processes or use.memory_bytes)
    return idle_seconds < node.idle_after_seconds


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


# --- sums -------------------------------------------------------------------------------------------------------------


class _Sum(NamedTuple):
    """What a sum adds up: GPUs or bytes of findings of these kinds, or their number."""

    kinds: tuple[str, ...]
    of: str = ""


SUMS = {
    "faults": _Sum(("fault",)),
    "squatter_bytes": _Sum(("squatter",), "memory_bytes"),
    "leftover_bytes": _Sum(("leftover",), "memory_bytes"),
    "over_bytes": _Sum(("over",), "memory_bytes"),
    "stalled_gpus": _Sum(("stalled",), "gpus"),
    "idle_gpus": _Sum(("idle",), "gpus"),
    "idle_holders": _Sum(("idle",)),
    "unused_bytes": _Sum(("idle", "unused"), "memory_bytes"),
    "unmatched": _Sum(("unmatched",)),
}
"""By name, worst first."""


def sums(found: Iterable[Finding], judged: Mapping[str, bool]) -> dict[str, float | None]:
    """Return the sums of findings, such as those of one namespace. What is not known is not in them.

    `None`: 0, but not all of it could be judged.
    """
    found = list(found)
    return {name: _added(found, one, judged) for name, one in SUMS.items()}


def _added(found: Sequence[Finding], one: _Sum, judged: Mapping[str, bool]) -> float | None:
    of_kinds = [each for each in found if each.finding in one.kinds]
    values = [getattr(each, one.of) for each in of_kinds] if one.of else [1] * len(of_kinds)
    total = sum(value for value in values if value is not None)
    return round(total, 3) if total or all(judged.get(kind) for kind in one.kinds) else None


def _counted_once(found: Sequence[Finding], node: Node) -> list[Finding]:
    """Return findings whose bytes of unused memory add up.

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


# --- what can be judged -----------------------------------------------------------------------------------------------


def _judged(node: Node, held: _Held) -> dict[str, bool]:
    up, devices = sources_up(node), node.devices
    measured = "nvml" in up and bool(node.capabilities.get("pid_visibility"))
    measured = measured and (not devices or any(map(use_known, devices)))
    holders_known = any(one.holders is not None for one in devices) if devices else "kubelet" in up
    used = measured and holders_known
    owners = measured and up >= {"kubelet", "pod_identity"} and not any(map(_has_unowned, devices))
    grants = used and (not held or any(_is_grant_judged(holder, use) for _, holder, use in held))
    return {
        "fault": "nvml" in up,
        "squatter": owners,
        "leftover": owners,
        "over": grants,
        "stalled": used and not _stalls_unknown(node) and _any_watched(held, STALLED_SECONDS),
        "idle": used
        and not any(use is None or _may_be_idle(use, node) for *_, use in held)
        and _any_watched(held, node.idle_after_seconds),
        "unused": grants
        and _any_watched(held, node.grace_seconds)
        and not any(use and _has_gap_within(use, node.grace_seconds) for *_, use in held),
        "unmatched": "kubelet" in up and holders_known,
    }


def _any_watched(held: _Held, seconds: float) -> bool:
    """Return whether gpumap has watched a holder for so long. An agent that has just started has watched none."""
    return not held or any(_is_long(use, seconds) for *_, use in held)


def _may_be_idle(use: _HolderUse, node: Node) -> bool:
    """Return whether a holder may be idle, and gpumap does not know it: it may have worked lately, or a source was
    down."""
    after, worked = node.idle_after_seconds, use.worked_seconds_ago
    return use.idle_seconds is None or (use.idle_seconds < after and worked is not None and worked >= after)


def _has_gap_within(use: _HolderUse, seconds: float) -> bool:
    """Return whether gpumap has known a holder for so long, but could not watch it all that time."""
    return use.known_seconds is not None and use.known_seconds >= seconds and not _is_long(use, seconds)


def _has_unowned(device: Device) -> bool:
    """Return whether the owner of a process on the device is unknown."""
    return any(one.owner is Owner.UNKNOWN and one.processes for one in device.owners)


def _is_grant_judged(holder: ContainerOnDevice, use: _HolderUse | None) -> bool:
    """Return whether a holder's grant and use of memory are known. Admin access grants nothing."""
    granted = holder.allocated_memory_bytes is not None or holder.allocated_gpus == 0
    return granted and use is not None and use.memory_bytes is not None


def _stalls_unknown(node: Node) -> list[Gpu]:
    """Return the GPUs with processes of which it is not known whether they hang."""
    return [gpu for gpu in node.gpus if gpu.busy_without_work_seconds is None and _may_have_process(gpu.reading)]


def _may_have_process(reading: GpuReading | None) -> bool:
    return reading is None or bool(reading.processes) or any(mig.processes for mig in reading.instances)


NOTHING_ASSIGNED = (
    "This machine has no kubelet (--no-kubelet), so nothing is assigned and gpumap looks for no waste. `gpumap top` "
    "shows the use."
)


# --- what cannot be judged --------------------------------------------------------------------------------------------


def unknown(node: Node) -> Iterator[str]:
    """Return what cannot be judged, and why, a sentence each."""
    if node.stale:
        yield node.stale
        return
    yield from _silent_sources(node)
    for gpu in node.gpus:
        if not gpu.up:
            yield f"GPU {gpu.index} is down ({gpu.fault}): gpumap cannot check anything on it."
    for sentence in unknown_of_devices(node):
        yield f"{sentence[0].upper()}{sentence[1:]}."
    if unmeasured := unmeasured_pods(node):
        yield f"The use of some holders is not known, so gpumap cannot check them: {listed(unmeasured)}."
    yield from _without_grant(node)
    claims = {
        "/".join(one.pod_name)
        for device in node.devices
        for one in device.containers
        if one.grant and one.grant.admin_access is None and one.grant.gpus != 0
    }
    if claims:
        yield (
            "A claim with admin access wastes nothing. Only the DRA driver's checkpoint (`privileges.dra`) shows "
            f"whether these claims have it: {listed(sorted(claims))}."
        )
    held = _held(node)
    doubtful = {holder.pod_name for _, holder, use in held if use and _may_be_idle(use, node)}
    if doubtful:
        yield f"It is not known whether these holders are idle: {_pods_of(doubtful)}."
    unclear = [str(gpu.index) for gpu in _stalls_unknown(node) if gpu.up]
    if unclear and has_kubelet(node):
        yield (
            f"It is not known whether the work on GPU {listed(unclear)} hangs. gpumap needs the GPU's utilization (not "
            "reported with MIG), its power now and without a process, and clocks that are not lowered."
        )
    yield from _not_yet(node, doubtful)


def _not_yet(node: Node, doubtful: Set[PodName]) -> Iterator[str]:
    """Name holders that may be found later: new ones, and those that have just stopped, without the `doubtful`."""
    uses = [(one.pod_name, one.use) for one in _judged_users(node) if one.use]
    new = {pod for pod, use in uses if not _is_long(use, node.grace_seconds)}
    if new:
        yield f"Watched for less than {age(node.grace_seconds)}, so not yet checked for unused memory: {_pods_of(new)}."
    idle = ((pod, _idle_seconds(use, node.timestamp) or 0.0) for pod, use in uses)
    inactive = {pod for pod, seconds in idle if 0.0 < seconds < node.idle_after_seconds} - doubtful
    if inactive:
        since = age(node.idle_after_seconds)
        yield f"Not idle for {since} yet, but no activity now: {_pods_of(inactive)}."


def _judged_users(node: Node) -> Iterator[ContainerOnDevice]:
    """Return the users that hold their device, or its partitioned GPU, with a grant of their own."""
    for one in (one for device in node.devices for one in device.containers):
        if one.use and (not one.reservation if one.holds else one.owner is Owner.ASSIGNED):
            yield one


def _pods_of(pods: Iterable[PodName]) -> str:
    return listed(sorted(map("/".join, pods)))


def _silent_sources(node: Node) -> Iterator[str]:
    up = sources_up(node)
    if "nvml" not in up:
        yield "NVML does not answer. The use of GPUs is not known."
    elif not node.capabilities.get("pid_visibility") and has_kubelet(node):
        yield f"gpumap cannot detect idle holders, squatters and leftovers. {invisible(node)}"
    if not has_kubelet(node):
        yield NOTHING_ASSIGNED
    elif "kubelet" not in up:
        what = "may be old" if any(one.holders is not None for one in node.devices) else "are not known"
        yield f"The kubelet does not answer. The assignments {what}; gpumap cannot detect squatters and leftovers."
    elif "pod_identity" not in up:
        yield "gpumap cannot name the pods of processes, so it cannot detect squatters and leftovers."
    else:
        unowned = [one for one in node.devices if _has_unowned(one)]
        if unowned:
            names = listed([device_name(one) for one in unowned])
            yield f"The owner of some processes on GPU {names} is not known: each may be a squatter or a leftover."


def unmeasured_pods(node: Node) -> list[str]:
    """Return the pods of holders whose use is not known although the use of their device is."""
    if "nvml" not in sources_up(node) or not node.capabilities.get("pid_visibility"):
        return []
    named = {one.uuid for one in node.gpus if not one.up}  # other sentences name what is on these
    named |= {one.uuid for one in gaps_of(node).unused}
    pods: set[str] = set()
    for place in node_devices(node):
        of_device = {place.device.gpu_uuid or "", *(one.uuid for one in _leaves(place))}
        if place.device.gpu_uuid and not of_device & named:
            unknown_uses = (one for one, use in _uses(place) if use is None)
            pods.update("/".join(one.pod_name) for one in unknown_uses)
    return sorted(pods)


def _without_grant(node: Node) -> Iterator[str]:
    """Name holders without a grant of memory. Others on the same device may have one."""
    without = [
        (device, "/".join(holder.pod_name))
        for device in node.devices
        for holder in grantees(device)
        if holder.allocated_memory_bytes is None
    ]
    if without:
        gpus = named(list({device.uuid: device for device, _ in without}.values()))
        pods = listed(sorted({pod for _, pod in without}))
        yield f"On {gpus} no grant of memory is known for {pods}. Without one, gpumap finds neither over nor unused."
