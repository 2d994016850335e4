"""What cannot be judged on a node, and why: for each kind of finding, and as sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from gpumap.agent.judgement.holder_use import (
    HolderUse,
    HolderUses,
    holder_uses,
    idle_seconds,
    is_watched_for,
    leaves_of,
    uses_of,
)
from gpumap.model.devices import device_name, grantees, has_kubelet, node_devices, sources_up
from gpumap.model.gaps import gaps_of, invisible, named, unknown_of_devices, use_known
from gpumap.model.node import ContainerOnDevice, Device, Gpu, Node
from gpumap.model.readings import GpuReading
from gpumap.model.shown import age, listed
from gpumap.model.terms import Owner, PodName

STALLED_SECONDS = 600.0
"""A holder may be stalled if its GPU has been busy without work for so long."""
NOTHING_ASSIGNED = (
    "This machine has no kubelet (--no-kubelet), so nothing is assigned and gpumap looks for no waste. `gpumap top` "
    "shows the use."
)


def judged(node: Node, held: HolderUses) -> dict[str, bool]:
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
        "stalled": used and not stalls_unknown(node) and _any_watched(held, STALLED_SECONDS),
        "idle": used
        and not any(use is None or _may_be_idle(use, node) for *_, use in held)
        and _any_watched(held, node.idle_after_seconds),
        "unused": grants
        and _any_watched(held, node.grace_seconds)
        and not any(use and _has_gap_within(use, node.grace_seconds) for *_, use in held),
        "unmatched": "kubelet" in up and holders_known,
    }


def _any_watched(held: HolderUses, seconds: float) -> bool:
    """Return whether gpumap has watched a holder for so long. An agent that has just started has watched none."""
    return not held or any(is_watched_for(use, seconds) for *_, use in held)


def _may_be_idle(use: HolderUse, node: Node) -> bool:
    """Return whether a holder may be idle, and gpumap does not know it: it may have worked lately, or a source was
    down."""
    after, worked = node.idle_after_seconds, use.worked_seconds_ago
    return use.idle_seconds is None or (use.idle_seconds < after and worked is not None and worked >= after)


def _has_gap_within(use: HolderUse, seconds: float) -> bool:
    """Return whether gpumap has known a holder for so long, but could not watch it all that time."""
    return use.known_seconds is not None and use.known_seconds >= seconds and not is_watched_for(use, seconds)


def _has_unowned(device: Device) -> bool:
    """Return whether the owner of a process on the device is unknown."""
    return any(one.owner is Owner.UNKNOWN and one.processes for one in device.owners)


def _is_grant_judged(holder: ContainerOnDevice, use: HolderUse | None) -> bool:
    """Return whether a holder's grant and use of memory are known. Admin access grants nothing."""
    granted = holder.allocated_memory_bytes is not None or holder.allocated_gpus == 0
    return granted and use is not None and use.memory_bytes is not None


def stalls_unknown(node: Node) -> list[Gpu]:
    """Return the GPUs with processes of which it is not known whether they hang."""
    return [gpu for gpu in node.gpus if gpu.busy_without_work_seconds is None and _may_have_process(gpu.reading)]


def _may_have_process(reading: GpuReading | None) -> bool:
    return reading is None or bool(reading.processes) or any(mig.processes for mig in reading.instances)


# --- as sentences -----------------------------------------------------------------------------------------------------


def unjudged(node: Node) -> Iterator[str]:
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
    held = holder_uses(node)
    doubtful = {holder.pod_name for _, holder, use in held if use and _may_be_idle(use, node)}
    if doubtful:
        yield f"It is not known whether these holders are idle: {_pods_of(doubtful)}."
    unclear = [str(gpu.index) for gpu in stalls_unknown(node) if gpu.up]
    if unclear and has_kubelet(node):
        yield (
            f"It is not known whether the work on GPU {listed(unclear)} hangs. gpumap needs the GPU's utilization (not "
            "reported with MIG), its power now and without a process, and clocks that are not lowered."
        )
    yield from _not_yet(node, doubtful)


def _not_yet(node: Node, doubtful: Set[PodName]) -> Iterator[str]:
    """Name holders that may be found later: new ones, and those that have just stopped, without the `doubtful`."""
    users = list(_judged_users(node))
    with_memory = (one for one in users if not one.holds or one.allocated_memory_bytes is not None)
    new = {one.pod_name for one in with_memory if not is_watched_for(one.use, node.grace_seconds)}
    if new:
        yield f"Watched for less than {age(node.grace_seconds)}, so not yet checked for unused memory: {_pods_of(new)}."
    idle = ((one.pod_name, idle_seconds(one.use, node.timestamp) or 0.0) for one in users if one.use)
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
    """Return the pods of holders with an unknown use, on devices with a known one."""
    if "nvml" not in sources_up(node) or not node.capabilities.get("pid_visibility"):
        return []
    named = {one.uuid for one in node.gpus if not one.up}  # other sentences name what is on these
    named |= {one.uuid for one in gaps_of(node).unused}
    pods: set[str] = set()
    for place in node_devices(node):
        of_device = {place.device.gpu_uuid or "", *(one.uuid for one in leaves_of(place))}
        if place.device.gpu_uuid and not of_device & named:
            unknown_uses = (one for one, use in uses_of(place) if use is None)
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
