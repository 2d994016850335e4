"""Judge each holder of a device: does it use more than its grant, does it rest, does its work hang?

Each judgement is a finding, `None` (nothing is wrong), or the reason why the holder cannot be judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from msgspec import structs

from gpumap.model import remedies
from gpumap.model.devices import NodeDevice, container_of, node_devices
from gpumap.model.formatting import age, size
from gpumap.model.grouping import all_known, grouped, sum_all
from gpumap.model.node import ContainerOnDevice, Device, Finding, Gpu, Node, Watch

UNUSED_RATIO, UNUSED_BYTES = 0.2, 1 << 30
"""A holder is `unused` if its peak leaves more than this part of its granted memory, and more than these bytes."""
STALLED_SECONDS = 600.0
"""A holder may be stalled if its GPU has been busy without work for so long."""
READABLE_RATIO, WITHOUT_SIGN = 0.75, 2.0
"""A holder may be idle if gpumap could read its leaf for this part of so many times `--idle-after`, and saw no sign of
its work in that time."""
RESERVATION_CONTAINERS = frozenset({"resource-reservation", "runai-reservation"})
"""Names of the containers of KAI-Scheduler's reservations since 0.5, and before
(pkg/binder/binding/resourcereservation)."""


# --- what a holder uses -----------------------------------------------------------------------------------------------


T = TypeVar("T", int, float)


class HolderUse(NamedTuple):
    """What a holder uses of a leaf, or of all leaves of a GPU that it holds as a whole. `None`: unknown."""

    place: NodeDevice
    holder: ContainerOnDevice
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    watch: Watch | None = None
    readable_ratio: float | None = None

    @property
    def idle_seconds(self) -> float | None:
        """Return for how long its pod has certainly not worked."""
        if self.watch is None or self.watch.last_active is None:
            return None
        return max(self.place.node.timestamp - self.watch.last_active, 0.0)


def holder_uses(node: Node) -> list[HolderUse]:
    """Return the holders with a grant of their own. Admin access grants nothing, nor does a reservation."""
    return [use for place in node_devices(node) for use in _uses_of(place)]


def _uses_of(place: NodeDevice) -> Iterator[HolderUse]:
    leaves = leaves_of(place)
    rows = grouped((row.name, row) for leaf in leaves for row in leaf.containers)
    for holder in place.device.containers:
        if not holder.holds or holder.reservation or holder.allocated_gpus == 0:
            continue
        on_leaves = rows.get(holder.name, ())
        uses = [row.use for row in on_leaves if row.use]
        watches = [row.watch for row in on_leaves if row.watch]
        is_complete = bool(leaves) and len(uses) == len(leaves)
        yield HolderUse(
            place,
            holder,
            sum_all(use.memory_bytes for use in uses) if is_complete else None,
            # The peaks may be at different times.
            sum_all(use.memory_peak_bytes for use in uses) if is_complete else None,
            _watch_of_all(watches) if leaves and len(watches) == len(leaves) else None,
            min(ratios) if (ratios := all_known(leaf.readable_ratio for leaf in leaves)) else None,
        )


def _watch_of_all(watches: Sequence[Watch]) -> Watch:
    """Return what gpumap has seen on several leaves: the holder rests only if it rests on each."""
    if len(watches) == 1:
        return watches[0]
    last_active = all_known(watch.last_active for watch in watches)
    return structs.replace(
        watches[0],
        last_active=max(last_active) if last_active else None,
        seen_seconds=min(watch.seen_seconds for watch in watches),
        known_seconds=min(watch.known_seconds for watch in watches),
        worked_seconds_ago=min(watch.worked_seconds_ago for watch in watches),
        no_process_seconds=min(watch.no_process_seconds for watch in watches),
        unknown_seconds=max(watch.unknown_seconds for watch in watches),
        appeared=all(watch.appeared for watch in watches),
        measured=all(watch.measured for watch in watches),
        certain_pod=all(watch.certain_pod for watch in watches),
    )


def leaves_of(place: NodeDevice) -> Sequence[Device]:
    """Return the device, or the MIG devices of a GPU that is assigned as a whole."""
    if not place.device.partitioned:
        return (place.device,)
    return [
        device for device in place.node.devices if device.gpu_uuid == place.device.uuid and device is not place.device
    ]


class Unknown(NamedTuple):
    """A holder that cannot be judged, with the reason."""

    reason: str


Judgement = Finding | Unknown | None


def judge_holder(use: HolderUse, blocked: str | None) -> Iterator[tuple[str, Judgement]]:
    """Yield each kind of finding that counts the holder, with its judgement.

    `blocked` is why nothing of its leaf can be judged, if that is so.
    """
    grant = use.holder.grant
    has_grant = grant is not None and grant.memory_bytes is not None and grant.admin_access is False
    if blocked:
        unknown = Unknown(blocked)
        yield from ((kind, unknown) for kind in ("stalled", "idle", *(("over", "unused") if has_grant else ())))
        return
    if has_grant:
        yield "over", _judge_over(use)
    stalled = _judge_stalled(use)
    idle = _judge_idle(use) if not isinstance(stalled, Finding) else None
    yield "stalled", stalled
    yield "idle", idle
    if has_grant:
        yield "unused", None if isinstance(stalled, Finding) or isinstance(idle, Finding) else _judge_unused(use)


def _finding(
    use: HolderUse,
    kind: str,
    reason: str,
    why: str,
    since: float = 0.0,
    *,
    memory_bytes: int | None,
    gpus: bool = True,
    pids: tuple[int, ...] = (),
) -> Finding:
    return Finding(
        *use.holder.name,
        finding=kind,
        reason=reason,
        uuid=use.place.device.uuid,
        since=since,
        gpus=use.holder.allocated_gpus if gpus else None,
        granted_bytes=use.holder.allocated_memory_bytes,
        used_bytes=use.memory_bytes,
        memory_bytes=memory_bytes,
        why=why,
        pids=pids,
        remedy=remedies.finding_remedy(kind, reason, None, pids),
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def _judge_over(use: HolderUse) -> Judgement:
    granted, used = use.holder.allocated_memory_bytes or 0, use.memory_bytes
    if used is None:
        return _why_unmeasured(use)
    if used <= granted:
        return None
    why = f"uses {size(used)} of {size(granted)} granted"
    return _finding(use, "over", "over_grant", why, memory_bytes=used - granted, gpus=False)


def _judge_unused(use: HolderUse) -> Judgement:
    granted, used, peak = use.holder.allocated_memory_bytes or 0, use.memory_bytes, use.memory_peak_bytes
    if used is None or peak is None:
        return _why_unmeasured(use)
    watch, grace_seconds = use.watch, use.place.node.grace_seconds
    if watch is None or watch.seen_seconds < grace_seconds:
        is_young = watch is not None and watch.appeared and watch.known_seconds < grace_seconds
        return None if is_young else Unknown("just_started")
    unused_bytes = max(granted - max(used, peak), 0)
    if not peak or unused_bytes <= max(UNUSED_BYTES, UNUSED_RATIO * granted):
        return None
    return _finding(use, "unused", "peak_below_grant", f"peak so far {size(peak)}", memory_bytes=unused_bytes)


def _why_unmeasured(use: HolderUse) -> Unknown:
    return Unknown("unknown_process" if use.place.device.has_unowned else "use_not_measured")


# --- work that hangs --------------------------------------------------------------------------------------------------


def _judge_stalled(use: HolderUse) -> Judgement:
    place = use.place
    if place.device.mig is not None or place.device.partitioned:
        return Unknown("not_supported")
    if use.holder.use and not use.holder.use.processes:
        return None
    gpu = next((gpu for gpu in place.node.gpus if gpu.uuid == place.device.uuid), None)
    seconds = gpu.busy_without_work_seconds if gpu else None
    if gpu is None or gpu.reading is None or seconds is None:
        return _why_stall_unknown(use, gpu)
    if seconds >= STALLED_SECONDS and use.holder.use:
        watts, limit_watts = gpu.reading.power_watts or 0.0, gpu.reading.power_limit_watts or 0.0
        draw = f"{watts:.0f} of {limit_watts:.0f} W (idle {gpu.idle_power_watts or 0.0:.0f} W)"
        return _finding(
            use,
            "stalled",
            "busy_without_work",
            f"may be stalled: busy for {age(seconds)}, but draws {draw}",
            place.node.timestamp - seconds,
            memory_bytes=None,
            pids=tuple(process.pid for process in place.device.processes if container_of(process) == use.holder.name),
        )
    is_watched = use.watch is None or use.watch.appeared or use.watch.known_seconds >= STALLED_SECONDS
    return None if is_watched or not seconds else Unknown("just_started")


def _why_stall_unknown(use: HolderUse, gpu: Gpu | None) -> Unknown:
    if use.place.device.has_unowned:
        return Unknown("unknown_process")
    reading = gpu.reading if gpu else None
    if reading is None or reading.utilization_ratio is None or reading.power_watts is None:
        return Unknown("not_supported")
    is_idle_power_known = gpu is not None and gpu.idle_power_watts is not None
    return Unknown("use_not_measured" if is_idle_power_known else "idle_power_unknown")


# --- rest -------------------------------------------------------------------------------------------------------------


def _judge_idle(use: HolderUse) -> Judgement:
    node, watch = use.place.node, use.watch
    if watch is None:
        return _why_unmeasured(use)
    idle_seconds = use.idle_seconds
    if idle_seconds is not None and idle_seconds >= node.idle_after_seconds and watch.certain_pod:
        return _idle(use, watch, idle_seconds)
    if not watch.measured:
        return _why_unmeasured(use)
    is_readable = use.readable_ratio is not None and use.readable_ratio >= READABLE_RATIO
    if is_readable and watch.worked_seconds_ago >= WITHOUT_SIGN * node.idle_after_seconds:
        return _resting(
            use,
            "maybe_idle",
            "not_seen_working",
            _why_maybe_idle(watch) + _hint(use),
            node.timestamp - watch.worked_seconds_ago,
        )
    has_worked = watch.worked_seconds_ago < watch.known_seconds
    if watch.worked_seconds_ago < node.idle_after_seconds and (has_worked or watch.appeared):
        return None
    worked_since_gap = has_worked and watch.worked_seconds_ago < watch.seen_seconds
    is_new = watch.seen_seconds < node.idle_after_seconds and not worked_since_gap
    return Unknown("just_started" if is_new else "unknown_work")


def _idle(use: HolderUse, watch: Watch, idle_seconds: float) -> Finding:
    reason, why = _why_idle(watch, idle_seconds)
    since = use.place.node.timestamp - idle_seconds
    grant = use.holder.grant
    if grant is not None and grant.admin_access is None:
        why += "; only the DRA driver's checkpoint (`privileges.dra`) shows whether its claim has admin access"
        return _resting(use, "maybe_idle", "admin_access_unknown", why, since)
    return _resting(use, "idle", reason, why + _hint(use), since)


def _resting(use: HolderUse, kind: str, reason: str, why: str, since: float) -> Finding:
    granted, used = use.holder.allocated_memory_bytes, use.memory_bytes
    unused_bytes = max(granted - used, 0) if granted is not None and used is not None else None
    return _finding(use, kind, reason, why, since, memory_bytes=unused_bytes)


_ROUNDING_SECONDS = 1.0


def _why_idle(watch: Watch, idle_seconds: float) -> tuple[str, str]:
    """Return the reason, and its evidence as a phrase."""
    sign = "process" if watch.no_process_seconds > idle_seconds - _ROUNDING_SECONDS else "activity"
    # It worked before, or gpumap has watched it only since then.
    is_start_seen = watch.known_seconds - idle_seconds > _ROUNDING_SECONDS
    why = f"no {sign} seen for {'' if is_start_seen else 'at least '}{age(idle_seconds)}"
    if watch.worked_seconds_ago - idle_seconds > _ROUNDING_SECONDS:
        why += f", no sign of its own work for {age(watch.worked_seconds_ago)}"
    return f"no_{sign}", why


def _why_maybe_idle(watch: Watch) -> str:
    seconds = watch.worked_seconds_ago
    sign = "process" if watch.no_process_seconds > seconds - _ROUNDING_SECONDS else "sign of its work"
    why = f"may be idle: no {sign} seen for {age(seconds)}"
    if watch.unknown_seconds >= _ROUNDING_SECONDS:
        why += f"; for {age(watch.unknown_seconds)} of it gpumap cannot say who worked on this GPU"
    if not watch.certain_pod:
        why += "; its pod's UID is not certain (`privileges.checkpoint` and `privileges.podLogs` show it)"
    return why


def _hint(use: HolderUse) -> str:
    if use.holder.container not in RESERVATION_CONTAINERS:
        return ""
    return "; if a scheduler's reservation, name its namespace in `--reservation-namespace`"
