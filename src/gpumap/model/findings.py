"""What is wasted on a node. Each finding is based only on known values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from gpumap.model.devices import (
    NodeDevice,
    container_of,
    device_name,
    grantees,
    has_kubelet,
    in_namespace,
    node_devices,
    other_uses,
    sources_up,
    sum_of,
)
from gpumap.model.gaps import gaps_of, invisible, named, unknown_of_devices, use_known
from gpumap.model.node import ContainerOnDevice, Device, Node, Use
from gpumap.model.readings import Uuid
from gpumap.model.remedies import FINDINGS
from gpumap.model.shown import age, counted, listed, size
from gpumap.model.terms import ContainerName, Owner, PodName


class Thresholds(NamedTuple):
    """From when on something is a finding. The defaults are those of `gpumap waste`."""

    idle_after_seconds: float = 300.0
    """A holder is idle if gpumap has watched it for so long, and it certainly did not work in that time."""
    grace_seconds: float = 120.0
    """A holder is unused only if gpumap has watched it for so long: it may still start."""
    unused_ratio: float = 0.2
    """A holder is `unused` if its peak leaves more than this part of its granted memory, and more than
    `unused_bytes`."""
    unused_bytes: int = 1 << 30


ENDING_SECONDS = 10.0
"""A leftover is of a pod that has been gone for that long: after `kubectl delete --force` the kubelet still ends
processes."""
DEFAULTS = Thresholds()
KINDS = ("squatter", "leftover", "over", "idle", "unused", "unmatched")
"""Worst first: use without a grant takes from others, an idle device only from its own budget."""


class Finding(NamedTuple):
    """`number` is the device's among its node's; `device` is `None` for slots on no device.

    `gpus` is the held share. `waste_bytes`: granted but not used (`unused`: not even at the peak, if that is known), or
    used but not granted.
    """

    kind: str
    node: str
    number: int
    device: Device | None
    container: ContainerName
    why: str
    gpus: float | None = None
    granted_bytes: int | None = None
    used_bytes: int | None = None
    waste_bytes: int | None = None
    idle_seconds: float | None = None
    pids: tuple[int, ...] = ()
    remedy: str | None = None


class _HolderUse(NamedTuple):
    """What a holder uses: of the leaf itself, or of the leaves of a GPU that it holds as a whole.

    `pod_at_work`: other containers of its pod are at work there, a sidecar, an init container: the pod uses its GPU.
    """

    memory_bytes: int | None
    memory_peak_bytes: int | None
    idle_seconds: float | None
    seen_seconds: float | None
    no_process_seconds: float | None
    pod_at_work: bool


_User = tuple[str, Use]
"""A container's name in its pod, and what it uses."""


def findings(node: Node, thresholds: Thresholds = DEFAULTS, namespace: str = "") -> list[Finding]:
    """Return all findings, worst first; only of pods of this namespace, if there is one.

    Pods of a namespace are judged by all that the node has.
    """
    found: list[Finding] = []
    for on in node_devices(node):
        found += _squatters(on)
        found += _leftovers(on)
        found += _of_holders(on, namespace, thresholds)
    found += _unmatched(node)
    return sorted((_remedied(one) for one in found if namespace in ("", one.container.namespace)), key=_rank)


def _remedied(one: Finding) -> Finding:
    return one if one.remedy else one._replace(remedy=FINDINGS.get(one.kind))


def worst_first(one: Finding) -> tuple[int, float, int, str, int, ContainerName]:
    """Sort key of the findings of many nodes."""
    kind, gpus, waste, number, container = _rank(one)
    return kind, gpus, waste, one.node, number, container


def _rank(one: Finding) -> tuple[int, float, int, int, ContainerName]:
    return KINDS.index(one.kind), -(one.gpus or 0.0), -(one.waste_bytes or 0), one.number, one.container


# --- use without a grant ----------------------------------------------------------------------------------------------


def _squatters(on: NodeDevice) -> Iterator[Finding]:
    processes = on.device.processes
    for one in on.device.containers:
        if one.owner is Owner.UNASSIGNED and one.use:
            of_one = (process for process in processes if process.owner is Owner.UNASSIGNED)
            pids = tuple(process.pid for process in of_one if container_of(process) == one.name)
            what = _named_pids(on.device, pids) if pids or processes else _counted(one.use.processes)
            why = f"uses a device that it does not hold: {what}"
            yield _ungranted("squatter", on, one.name, one.use.memory_bytes, pids, why)


def _leftovers(on: NodeDevice) -> Iterator[Finding]:
    latest = on.node.timestamp - ENDING_SECONDS
    for other in other_uses(on.device):
        left = [one for one in other.processes if one.owner_since is None or one.owner_since <= latest]
        if other.owner is Owner.GONE and (left or not other.processes):
            pids = tuple(one.pid for one in left)
            what = _named_pids(on.device, pids) if pids else _counted(other.process_count)
            used_bytes = sum_of(one.memory_bytes for one in left) if left else other.memory_bytes
            yield _ungranted("leftover", on, other.name, used_bytes, pids, f"its pod no longer exists, but left {what}")


def _ungranted(
    kind: str, on: NodeDevice, name: ContainerName, used_bytes: int | None, pids: tuple[int, ...], why: str
) -> Finding:
    return Finding(
        kind, on.node.name, on.number, on.device, name, why, used_bytes=used_bytes, waste_bytes=used_bytes, pids=pids
    )


def _named_pids(device: Device, pids: tuple[int, ...]) -> str:
    names = {one.pid: one.comm for one in device.processes}
    return f"PID {listed([f'{pid} {names[pid]}'.strip() for pid in pids])}"


def _counted(processes: int | None) -> str:
    """Name processes whose PIDs are unknown."""
    return counted(processes, "process", "processes") if processes else "memory in use"


# --- grants without use -----------------------------------------------------------------------------------------------


def _of_holders(on: NodeDevice, namespace: str, thresholds: Thresholds) -> Iterator[Finding]:
    for holder, use in _uses(on, namespace, thresholds):
        finding = _of_holder(on, holder, use, thresholds) if use else None
        if finding:
            yield finding


def _uses(
    on: NodeDevice, namespace: str, thresholds: Thresholds = DEFAULTS
) -> Iterator[tuple[ContainerOnDevice, _HolderUse | None]]:
    """Return the holders of a device with a grant of their own, each with what it uses. `None`: unknown."""
    leaves = _leaves(on)
    users: dict[PodName, list[_User]] = {}
    for one in (one for leaf in leaves for one in leaf.containers):
        if one.use:
            users.setdefault(one.pod_name, []).append((one.container, one.use))
    for holder in in_namespace(grantees(on.device), namespace):
        of_pod = users.get(holder.pod_name, ())
        yield holder, _use_of(on, holder, of_pod, len(leaves), thresholds)


def _held(node: Node, namespace: str) -> list[tuple[ContainerOnDevice, _HolderUse | None]]:
    """Return the holders of all devices with what they use, as `_uses`."""
    return [one for on in node_devices(node) for one in _uses(on, namespace)]


def _of_holder(on: NodeDevice, holder: ContainerOnDevice, use: _HolderUse, thresholds: Thresholds) -> Finding | None:
    if holder.allocated_gpus == 0:
        return None  # admin access: it was granted nothing that it could waste
    granted, used = holder.allocated_memory_bytes, use.memory_bytes
    finding = Finding(
        "unused",
        on.node.name,
        on.number,
        on.device,
        holder.name,
        "",
        gpus=holder.allocated_gpus,
        granted_bytes=granted,
        used_bytes=used,
        waste_bytes=max(granted - used, 0) if granted is not None and used is not None else None,
    )
    if granted is not None and used is not None and used > granted:
        return finding._replace(kind="over", waste_bytes=used - granted, why="uses more memory than granted")
    if use.pod_at_work:
        return None
    if use.idle_seconds is not None and use.idle_seconds >= thresholds.idle_after_seconds:
        return finding._replace(kind="idle", why=_idle_because(use, use.idle_seconds), idle_seconds=use.idle_seconds)
    grace = thresholds.grace_seconds
    if granted is None or used is None or not use.memory_peak_bytes or not _is_long(use.seen_seconds, grace):
        return None
    why = f"peak so far {size(use.memory_peak_bytes)}"
    finding = finding._replace(waste_bytes=max(granted - max(used, use.memory_peak_bytes), 0), why=why)
    return finding if _is_much(finding, thresholds) else None


def _is_long(seen_seconds: float | None, seconds: float) -> bool:
    return seen_seconds is not None and seen_seconds >= seconds


def _is_much(unused: Finding, thresholds: Thresholds) -> bool:
    left = unused.waste_bytes or 0
    return left > max(thresholds.unused_bytes, thresholds.unused_ratio * (unused.granted_bytes or 0))


def _idle_because(use: _HolderUse, idle_seconds: float) -> str:
    without_process = use.no_process_seconds is not None and use.no_process_seconds > idle_seconds - 1.0  # rounding
    # It worked before, or gpumap has watched it only since then.
    worked = use.seen_seconds is not None and use.seen_seconds - idle_seconds > 1.0  # more than rounding
    return f"no {'process' if without_process else 'activity'} for {'' if worked else 'at least '}{age(idle_seconds)}"


def _use_of(
    on: NodeDevice, holder: ContainerOnDevice, of_pod: Sequence[_User], leaves: int, thresholds: Thresholds
) -> _HolderUse | None:
    """Return what a holder uses, of the uses of its pod; `None` if it is not known of each leaf."""
    uses = [use for container, use in of_pod if container == holder.container]
    if not uses or len(uses) < leaves:
        return None
    now = on.node.timestamp
    others = (use for container, use in of_pod if container != holder.container)
    return _use_by(uses, now, pod_at_work=any(_is_at_work(use, now, thresholds) for use in others))


def _use_by(uses: Sequence[Use], now: float, *, pod_at_work: bool) -> _HolderUse:
    """Combine a holder's use of its leaves. Peaks may be of different times."""
    memory = [use.memory_bytes for use in uses]
    peaks = [use.memory_peak_bytes for use in uses]
    return _HolderUse(
        memory_bytes=None if None in memory else sum_of(memory),
        memory_peak_bytes=None if None in peaks else sum_of(peaks),
        idle_seconds=_least([_idle_seconds(use, now) for use in uses]),
        seen_seconds=_least([use.seen_seconds for use in uses]),
        no_process_seconds=_least([use.no_process_seconds for use in uses]),
        pod_at_work=pod_at_work,
    )


def _least(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if len(known) == len(values) else None


def _idle_seconds(use: Use, now: float) -> float | None:
    return None if use.last_active is None else max(now - use.last_active, 0.0)


def _leaves(on: NodeDevice) -> Sequence[Device]:
    """Return the device, or the MIG devices of a GPU that is assigned as a whole."""
    if not on.device.partitioned:
        return (on.device,)
    return [one for one in on.node.devices if one.gpu_uuid == on.device.uuid and one is not on.device]


def _is_at_work(use: Use, now: float, thresholds: Thresholds) -> bool:
    """Return whether it worked lately; if that is unknown, whether it has a process or memory."""
    idle_seconds = _idle_seconds(use, now)
    if idle_seconds is None:
        return bool(use.processes or use.memory_bytes)
    return idle_seconds < thresholds.idle_after_seconds


def _unmatched(node: Node) -> Iterator[Finding]:
    for entry in node.unmatched:
        why = f"{entry.slots} of {entry.resource} without a device: {entry.reason}"
        number = len(node.devices)
        yield Finding("unmatched", node.name, number, None, entry.name, why, remedy=entry.remedy)


# --- sums -------------------------------------------------------------------------------------------------------------

SUMMED = (
    *("idle_gpus", "idle_holders", "unused_bytes", "over_bytes", "squatter_bytes", "leftover_bytes"),
    "unmatched_slots",
)


def sums(
    found: Sequence[Finding], node: Node, namespace: str = "", thresholds: Thresholds = DEFAULTS
) -> dict[str, float | None]:
    """Return the sums of findings of a node, or of a namespace on it; `None` if nothing can be judged.

    GPUs of unknown share are not in them.
    """
    can = _summable(node, namespace, thresholds)
    unmatched = in_namespace(node.unmatched, namespace)
    shares = [one.gpus for one in found if one.kind == "idle" and one.gpus is not None]
    return {
        "idle_gpus": _known(round(sum(shares), 3), all_known=can.all_use) if can.use else None,
        "idle_holders": _known(sum(one.kind == "idle" for one in found), all_known=can.all_use) if can.use else None,
        "unused_bytes": _known(_unused(found, node), all_known=can.any_watched) if can.grants else None,
        "over_bytes": _wasted(found, "over") if can.grants else None,
        "squatter_bytes": _known(_wasted(found, "squatter"), all_known=can.all_owners) if can.owners else None,
        "leftover_bytes": _known(_wasted(found, "leftover"), all_known=can.all_owners) if can.owners else None,
        "unmatched_slots": sum(one.slots for one in unmatched) if can.slots else None,
    }


Sum = TypeVar("Sum", int, float)


def _known(value: Sum, *, all_known: bool) -> Sum | None:
    """Return a sum of what is known; `None` if that is 0 and something is unknown."""
    return value if value or all_known else None


class _Summable(NamedTuple):
    """What can be judged: use by holders, use of granted memory, owners of processes, slots on no device.

    `all_use`: it is known of each holder whether it works. `all_owners`: each process has a known owner.
    `any_watched`: gpumap has watched some holder for long enough to find it unused.
    """

    use: bool
    all_use: bool
    grants: bool
    any_watched: bool
    owners: bool
    all_owners: bool
    slots: bool


def _summable(node: Node, namespace: str, thresholds: Thresholds) -> _Summable:
    up, devices = sources_up(node), node.devices
    measured = "nvml" in up and bool(node.capabilities.get("pid_visibility"))
    measured = measured and (not devices or any(map(use_known, devices)))
    holders_known = any(one.holders is not None for one in devices) if devices else "kubelet" in up
    held = _held(node, namespace)
    use = measured and holders_known
    return _Summable(
        use=use and (not held or any(use for _, use in held)),
        all_use=all(use is not None and use.idle_seconds is not None for _, use in held)
        and _any_watched(held, thresholds.idle_after_seconds),
        grants=use and (not held or any(_is_grant_judged(*one) for one in held)),
        any_watched=_any_watched(held, thresholds.grace_seconds),
        owners=measured and up >= {"kubelet", "pod_identity"},
        all_owners=not any(map(_has_unowned, devices)),
        slots="kubelet" in up and holders_known,
    )


def _any_watched(held: Sequence[tuple[ContainerOnDevice, _HolderUse | None]], seconds: float) -> bool:
    """Return whether gpumap has watched a holder for so long. An agent that has just started has watched none."""
    return not held or any(use is not None and _is_long(use.seen_seconds, seconds) for _, use in held)


def _has_unowned(device: Device) -> bool:
    """Return whether the owner of a process on the device is unknown."""
    return any(one.owner is Owner.UNKNOWN and one.processes for one in device.owners)


def _is_grant_judged(holder: ContainerOnDevice, use: _HolderUse | None) -> bool:
    """Return whether a holder's grant and use of memory are known. Admin access grants nothing."""
    granted = holder.allocated_memory_bytes is not None or holder.allocated_gpus == 0
    return granted and use is not None and use.memory_bytes is not None


def _wasted(found: Iterable[Finding], kind: str) -> int:
    return sum_of(one.waste_bytes for one in found if one.kind == kind) or 0


def _unused(found: Iterable[Finding], node: Node) -> int:
    """Return the bytes that are granted but not used.

    Of memory that several share (compute instances, claims), no more than there is; of a GPU that is assigned twice, no
    more than it has.
    """
    by_gpu: dict[Uuid, int] = {}
    for device, of_pool in _pools(found):
        unused = sum(one.waste_bytes or 0 for one in of_pool)
        used = sum(one.used_bytes or 0 for one in of_pool)
        left = device.memory.total_bytes - used if device.memory else unused
        gpu = device.gpu_uuid or device.uuid
        by_gpu[gpu] = by_gpu.get(gpu, 0) + max(min(unused, left), 0)
    totals = {gpu.uuid: gpu.reading.memory.total_bytes for gpu in node.gpus if gpu.reading and gpu.reading.memory}
    return sum(min(unused, totals.get(gpu, unused)) for gpu, unused in by_gpu.items())


def _pools(found: Iterable[Finding]) -> Iterator[tuple[Device, list[Finding]]]:
    """Return the findings on each piece of memory, with a device on it: compute instances share that of their GPU
    instance."""
    pools: dict[object, tuple[Device, list[Finding]]] = {}
    for one in found:
        device = one.device
        if device is not None and one.kind in ("idle", "unused") and one.waste_bytes is not None:
            pool = (device.gpu_uuid, device.mig.gpu_instance_id) if device.mig else device.uuid
            pools.setdefault(pool, (device, []))[1].append(one)
    yield from pools.values()


NOTHING_ASSIGNED = (
    "This machine has no kubelet (--no-kubelet), so nothing is assigned and gpumap looks for no waste. `gpumap top` "
    "shows the use."
)


# --- what cannot be judged --------------------------------------------------------------------------------------------


def unknown(node: Node, thresholds: Thresholds = DEFAULTS, namespace: str = "") -> Iterator[str]:
    """Return what cannot be judged, and why, a sentence each; of containers only those of the namespace."""
    if node.stale:
        yield node.stale
        return
    yield from _silent_sources(node)
    for gpu in node.gpus:
        if not gpu.up:
            yield f"GPU {gpu.index} is down ({gpu.fault}): gpumap cannot check anything on it."
    for sentence in unknown_of_devices(node):
        yield f"{sentence[0].upper()}{sentence[1:]}."
    if unmeasured := unmeasured_pods(node, namespace):
        yield f"The use of some holders is not known, so gpumap cannot check them: {listed(unmeasured)}."
    yield from _without_grant(node, namespace)
    claims = {
        "/".join(one.pod_name)
        for device in node.devices
        for one in in_namespace(device.containers, namespace)
        if one.grant and one.grant.admin_access is None and one.grant.gpus != 0
    }
    if claims:
        yield (
            "A claim with admin access wastes nothing. Only the DRA driver's checkpoint (`privileges.dra`) shows "
            f"whether these claims have it: {listed(sorted(claims))}."
        )
    held = _held(node, namespace)
    if doubtful := {"/".join(holder.pod_name) for holder, use in held if use and use.idle_seconds is None}:
        yield f"It is not known whether these holders work, so none of them is idle: {listed(sorted(doubtful))}."
    yield from _not_yet(node, thresholds, namespace)


def _not_yet(node: Node, thresholds: Thresholds, namespace: str) -> Iterator[str]:
    """Name holders that may be found later: new ones, and those that have just stopped."""
    uses = [(one.pod_name, one.use) for one in in_namespace(_judged_users(node), namespace) if one.use]
    new = {pod for pod, use in uses if not _is_long(use.seen_seconds, thresholds.grace_seconds)}
    if new:
        yield f"Watched for less than {age(thresholds.grace_seconds)}, so not checked yet: {_pods_of(new)}."
    watched = ((pod, use) for pod, use in uses if _is_long(use.seen_seconds, thresholds.grace_seconds))
    inactive = {pod for pod, use in watched if _may_become_idle(use, node.timestamp, thresholds)}
    if inactive:
        since = age(thresholds.idle_after_seconds)
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


def unmeasured_pods(node: Node, namespace: str = "") -> list[str]:
    """Return the pods of holders whose use is not known although the use of their device is."""
    if "nvml" not in sources_up(node) or not node.capabilities.get("pid_visibility"):
        return []
    named = {one.uuid for one in node.gpus if not one.up}  # other sentences name what is on these
    named |= {one.uuid for one in gaps_of(node).unused}
    pods: set[str] = set()
    for on in node_devices(node):
        of_device = {on.device.gpu_uuid or "", *(one.uuid for one in _leaves(on))}
        if on.device.gpu_uuid and not of_device & named:
            unknown_uses = (one for one, use in _uses(on, namespace) if use is None)
            pods.update("/".join(one.pod_name) for one in unknown_uses)
    return sorted(pods)


def _without_grant(node: Node, namespace: str) -> Iterator[str]:
    """Name holders without a grant of memory. Others on the same device may have one."""
    without = [
        (device, "/".join(holder.pod_name))
        for device in node.devices
        for holder in in_namespace(grantees(device), namespace)
        if holder.allocated_memory_bytes is None
    ]
    if without:
        on = named(list({device.uuid: device for device, _ in without}.values()))
        pods = listed(sorted({pod for _, pod in without}))
        yield f"On {on} no grant of memory is known for {pods}. Without one, gpumap finds neither over nor unused."


def _may_become_idle(use: Use, now: float, thresholds: Thresholds) -> bool:
    return 0.0 < (_idle_seconds(use, now) or 0.0) < thresholds.idle_after_seconds
