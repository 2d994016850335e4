"""What is wasted on a node, found in the document: each finding rests on known values alone, never on unknown ones."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from gpumap.cli.tables.amounts import size
from gpumap.cli.tables.document import Key, device_name, invisible, key_of, name_of, others, sources_up, sum_of
from gpumap.cli.tables.unknowns import holders_known, untold, use_known
from gpumap.cli.words import age
from gpumap.model.document import Document
from gpumap.model.units import counted

KINDS = ("squatter", "leftover", "over", "idle", "unused", "unmatched")
"""Worst first: use that nobody granted takes from others, an idle device only from who pays."""


class Finding(NamedTuple):
    """`gpus` is the share that is held. `waste_bytes`: granted but not used, or used but not granted."""

    kind: str
    place: int
    device: str
    uuid: str
    key: Key
    gpus: float | None
    granted_bytes: int | None
    used_bytes: int | None
    waste_bytes: int | None
    why: str
    idle_seconds: float | None = None
    pids: tuple[int, ...] = ()
    remedy: str | None = None
    node: str = ""


class _Use(NamedTuple):
    """What a holder uses of what it holds: on the leaf itself, or on the leaves of a GPU that it holds whole.

    `pod_at_work`: other containers of its pod are at work there, a sidecar, an init container: the pod uses its GPU.
    """

    memory_bytes: int | None
    processes: int | None
    sm_ratio: float | None
    last_active: float | None
    tells_sm: bool
    pod_at_work: bool


def findings(document: Document, idle_after_seconds: float, namespace: str = "") -> list[Finding]:
    """Everything that is found, worst first; of pods of this namespace alone, where one is named: they are judged by
    all that the node has."""
    found: list[Finding] = []
    node = name_of(document)
    partitioned = {gpu["uuid"] for gpu in document["gpus"] if gpu["partitioned"]}
    for place, device in enumerate(document["devices"]):
        found += [one for one in _squatters(place, device, node) if _is_in(one.key[0], namespace)]
        found += [one for one in _leftovers(place, device, node) if _is_in(one.key[0], namespace)]
        for holder in _of(namespace, device["holders"]):
            use = _use_of(document, device, holder, partitioned, idle_after_seconds)
            if use is not None:
                found += _of_holder(place, device, holder, use, document, idle_after_seconds)
    found += [one for one in _unmatched(document) if _is_in(one.key[0], namespace)]
    return sorted(found, key=_rank)


def worst_first(one: Finding) -> tuple[int, float, int, str, int, Key]:
    """Sorts the findings of many nodes."""
    kind, gpus, waste, place, key = _rank(one)
    return kind, gpus, waste, one.node, place, key


def unknown(document: Document, idle_after_seconds: float, namespace: str = "") -> Iterator[str]:
    """What cannot be judged here, and why, a sentence each; of rows, those of the namespace that is named."""
    if document.get("stale"):
        yield document["stale"]
        return
    up = sources_up(document)
    if "nvml" not in up:
        yield "NVML does not answer: nothing is known of any use."
    elif not document["capabilities"].get("pid_visibility"):
        yield f"No verdict on idleness, squatters and leftovers. {invisible(document)}"
    if "kubelet" not in up:
        what = "may be old" if any(map(holders_known, document["devices"])) else "is not known"
        yield f"The kubelet does not answer: who holds what {what}, and squatters and leftovers are not told."
    elif "pod_identity" not in up:
        yield "Processes cannot be named: squatters and leftovers are not told."
    for gpu in document["gpus"]:
        if not gpu["up"]:
            yield f"GPU {gpu['index']} is down ({gpu['fault']}): nothing on it is judged."
    for sentence in untold(document):
        yield f"{sentence[0].upper()}{sentence[1:]}."
    yield from _ungranted(document, namespace)
    silent = [device_name(device) for device in document["devices"] if _tells_no_time(device, namespace)]
    if silent:
        yield f"Time on SMs is not told of all on {', '.join(silent)}: there, idle is who has no memory and no process."
    users = (user for device in document["devices"] for user in _of(namespace, device["users"]))
    waiting = [user for user in users if _may_become_idle(user)]
    young = [one for one in waiting if document["timestamp"] - one["last_active"] < idle_after_seconds]
    if young:
        yield f"Not idle for {age(idle_after_seconds)} yet, but not computing just now: {_names(young)}."


def _ungranted(document: Document, namespace: str) -> Iterator[str]:
    """Holders without a grant of memory; others on the same device may have one."""
    without = [
        (device_name(device), key_of(holder))
        for device in document["devices"]
        for holder in _of(namespace, device["holders"])
        if holder["allocated_memory_bytes"] is None
    ]
    if without:
        names = ", ".join(dict.fromkeys(name for name, _ in without))
        holders = len({key for _, key in without})
        verdict = "it is" if holders == 1 else "they are"
        yield (
            f"No memory of their own is known to be granted to {counted(holders, 'holder')} (on {names}): "
            f"{verdict} neither over nor under a grant."
        )


SUMMED = (
    *("idle_gpus", "idle_holders", "unused_bytes", "over_bytes", "squatter_bytes", "leftover_bytes"),
    "unmatched_slots",
)


def sums(found: list[Finding], document: Document, namespace: str = "") -> dict[str, float | None]:
    """What adds up; `None` where nothing can be judged. GPUs whose share nobody knows are not in it."""
    up, devices = sources_up(document), document["devices"]
    measured = "nvml" in up and bool(document["capabilities"].get("pid_visibility"))
    measured = measured and (not devices or any(map(use_known, devices)))
    told = any(map(holders_known, devices)) if devices else "kubelet" in up
    held = measured and told
    accused = measured and up >= {"kubelet", "pod_identity"}
    unmatched = _of(namespace, document["unmatched"])
    shares = [one.gpus for one in found if one.kind == "idle" and one.gpus is not None]
    return {
        "idle_gpus": round(sum(shares), 3) if held else None,
        "idle_holders": sum(one.kind == "idle" for one in found) if held else None,
        "unused_bytes": _unused(found, document) if held else None,
        "over_bytes": _wasted(found, "over") if held else None,
        "squatter_bytes": _wasted(found, "squatter") if accused else None,
        "leftover_bytes": _wasted(found, "leftover") if accused else None,
        "unmatched_slots": sum(row["slots"] for row in unmatched) if "kubelet" in up and told else None,
    }


def _wasted(found: list[Finding], kind: str) -> int:
    return sum_of(one.waste_bytes for one in found if one.kind == kind) or 0


def _unused(found: list[Finding], document: Document) -> int:
    """Bytes granted but not used; of memory that several share (compute instances, claims) no more than there is, of a
    GPU that is given out twice no more than it has."""
    pools: dict[object, list[Finding]] = {}
    devices = document["devices"]
    for one in found:
        if one.kind in ("idle", "unused") and one.waste_bytes is not None:
            device = devices[one.place]
            instance = device["gpu_instance_id"]
            pools.setdefault(one.uuid if instance is None else (device["gpu_uuid"], instance), []).append(one)
    by_gpu: dict[str, int] = {}
    for rows in pools.values():
        unused = sum(one.waste_bytes or 0 for one in rows)
        device = devices[rows[0].place]
        memory = device["memory"]
        left = memory["total_bytes"] - sum(one.used_bytes or 0 for one in rows) if memory else unused
        gpu = device["gpu_uuid"] or device["uuid"]
        by_gpu[gpu] = by_gpu.get(gpu, 0) + max(min(unused, left), 0)
    totals = {gpu["uuid"]: gpu["memory"]["total_bytes"] for gpu in document["gpus"] if gpu["memory"]}
    return sum(min(unused, totals.get(gpu, unused)) for gpu, unused in by_gpu.items())


def _squatters(place: int, device: Document, node: str) -> Iterator[Finding]:
    for user in device["users"]:
        if user["unassigned"]:
            key = key_of(user)
            used = user["memory_bytes"]
            pids = tuple(
                one["pid"] for one in device["processes"] if key_of(one) == key and one["owner"] == "unassigned"
            )
            who = _named(device, pids) if pids or device["processes"] else _counted(user["processes"])
            yield Finding(
                "squatter", place, device_name(device), device["uuid"], key, None, None, used, used,
                f"uses what it was not assigned: {who}", pids=pids, node=node,
            )  # fmt: skip


def _leftovers(place: int, device: Document, node: str) -> Iterator[Finding]:
    for other in others(device):
        if other.owner == "gone":
            pids = tuple(one["pid"] for one in other.processes)
            used = other.memory_bytes
            who = _named(device, pids) if pids else _counted(other.running)
            yield Finding(
                "leftover", place, device_name(device), device["uuid"], other.key, None, None, used, used,
                f"its pod is gone, and left {who}", pids=pids, node=node,
            )  # fmt: skip


def _of_holder(
    place: int, device: Document, holder: Document, use: _Use, document: Document, idle_after_seconds: float
) -> Iterator[Finding]:
    if holder["allocated_gpus"] == 0:
        return  # admin access: it was given nothing that it could waste
    granted, used = holder["allocated_memory_bytes"], use.memory_bytes
    idle_seconds = None if use.last_active is None else max(document["timestamp"] - use.last_active, 0.0)
    waste = max(granted - used, 0) if granted is not None and used is not None else None
    kind = why = ""
    if granted is not None and used is not None and used > granted:
        kind, waste, why = "over", used - granted, "uses more memory than it was granted"
    elif use.pod_at_work:
        return
    elif use.processes == 0 and used == 0 and not use.sm_ratio:
        since = f"; SM 0 for {age(idle_seconds)}" if use.tells_sm and idle_seconds is not None else ""
        kind, why = "idle", f"no process{since}"
    elif use.tells_sm and use.sm_ratio == 0 and idle_seconds is not None and idle_seconds >= idle_after_seconds:
        kind, why = "idle", f"SM 0 for {age(idle_seconds)}"
    elif waste:
        kind, why = "unused", _peak(holder, device)
    if kind:
        yield Finding(
            kind, place, device_name(device), device["uuid"], key_of(holder), holder["allocated_gpus"],
            granted, used, waste, why, idle_seconds=idle_seconds if kind == "idle" and use.tells_sm else None,
            node=name_of(document),
        )  # fmt: skip


def _use_of(
    document: Document, device: Document, holder: Document, partitioned: Container[str], idle_after_seconds: float
) -> _Use | None:
    key = key_of(holder)
    leaves = [device]
    if device["uuid"] in partitioned:
        leaves = [one for one in document["devices"] if one["gpu_uuid"] == device["uuid"] and one is not device]
    of_pod = [user for leaf in leaves for user in leaf["users"] if key_of(user)[:2] == key[:2]]
    users = [user for user in of_pod if key_of(user) == key]
    if not users or len(users) < len(leaves):
        return None
    memories = [user["memory_bytes"] for user in users]
    one = users[0] if len(users) == 1 else {}
    return _Use(
        memory_bytes=None if None in memories else sum(memories),
        processes=sum(user["processes"] for user in users),
        sm_ratio=one.get("sm_ratio"),
        last_active=one.get("last_active"),
        tells_sm=one.get("sm_ratio") is not None,
        pod_at_work=any(
            key_of(user) != key and _is_at_work(user, document["timestamp"], idle_after_seconds) for user in of_pod
        ),
    )


def _is_at_work(user: Document, now: float, idle_after_seconds: float) -> bool:
    """It has processes or memory, and is not known to have rested for long."""
    last = user["last_active"]
    rests = user["sm_ratio"] == 0 and last is not None and now - last >= idle_after_seconds
    return bool(user["processes"] or user["memory_bytes"]) and not rests


def _peak(holder: Document, device: Document) -> str:
    peaks = [user["memory_peak_bytes"] for user in device["users"] if key_of(user) == key_of(holder)]
    return f"peak so far {size(peaks[0])}" if peaks and peaks[0] is not None else ""


def _unmatched(document: Document) -> Iterator[Finding]:
    for row in document["unmatched"]:
        why = f"{row['slots']} of {row['resource']} on no device: {row['reason']}"
        yield Finding(
            "unmatched", len(document["devices"]), "", "", key_of(row), None, None, None, None, why,
            remedy=row.get("remedy"), node=name_of(document),
        )  # fmt: skip


def _of(namespace: str, rows: list[Document]) -> list[Document]:
    """The rows of a namespace; all of them, where none is named."""
    return [row for row in rows if row["namespace"] == namespace] if namespace else rows


def _is_in(named: str, namespace: str) -> bool:
    return not namespace or named == namespace


def _tells_no_time(device: Document, namespace: str) -> bool:
    holders = {key_of(row) for row in _of(namespace, device["holders"])}
    return any(user["sm_ratio"] is None for user in device["users"] if key_of(user) in holders)


def _may_become_idle(user: Document) -> bool:
    return user["sm_ratio"] == 0 and bool(user["memory_bytes"]) and user["last_active"] is not None


def _names(rows: list[Document]) -> str:
    shown = sorted({f"{one['namespace']}/{one['pod']}" for one in rows})
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _named(device: Document, pids: tuple[int, ...]) -> str:
    names = {one["pid"]: one["name"] for one in device["processes"]}
    shown = ", ".join(f"{pid} {names[pid] or ''}".strip() for pid in pids[:3])
    more = f" and {len(pids) - 3} more" if len(pids) > 3 else ""
    return f"PID {shown}{more}"


def _counted(processes: int | None) -> str:
    """Processes whose PIDs are not told."""
    return counted(processes, "process", "processes") if processes else "memory in use"


def _rank(one: Finding) -> tuple[int, float, int, int, Key]:
    return KINDS.index(one.kind), -(one.gpus or 0.0), -(one.waste_bytes or 0), one.place, one.key
