"""The map as tables for a terminal, made of the document of /api/v1/map."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from gpumap.document import Document
from gpumap.terminal import printable

_GAP = "   "
_UNKNOWN = "-"
_Key = tuple[str, str, str]


def map_table(document: Document, *, wide: bool) -> str:
    """Who holds and who uses each device, a row per container; then what no container accounts for, and faults."""
    headers = ["DEVICE", "UUID", "NAMESPACE", "POD", "CONTAINER", "SLOTS", "GPUS", "GRANTED", "USED", "SM", "OWNER"]
    if wide:
        headers += ["MODEL", "PEAK", "PROCESSES", "RESOURCES"]
    rows = [row for device in document["devices"] for row in _device_rows(device, wide)]
    blocks = [_aligned([headers, *rows])] if rows else ["No devices."]
    unmatched = [
        [row["namespace"], row["pod"], row["container"], row["resource"], str(row["slots"]), row["reason"]]
        for row in document["unmatched"]
    ]
    if unmatched:
        blocks.append(_aligned([["NAMESPACE", "POD", "CONTAINER", "RESOURCE", "SLOTS", "NOT MATCHED"], *unmatched]))
    notes = list(_notes(document))
    if notes:
        blocks.append("\n".join(map(printable, notes)))
    return "\n\n".join(blocks) + "\n"


def _device_rows(device: Document, wide: bool) -> Iterator[list[str]]:
    holders = {_key(row): row for row in device["holders"]}
    users = {_key(row): row for row in device["users"]}
    memory = device["memory"]
    used, total = (memory["used_bytes"], memory["total_bytes"]) if memory else (None, None)
    whole = [_device_name(device), device["uuid"], "", "", "", "", "", _bytes(total), _bytes(used), "", _state(device)]
    yield [*whole, device["model"] or _UNKNOWN, "", "", ""] if wide else whole
    for key in sorted({*holders, *users}):
        holder, user = holders.get(key), users.get(key)
        owner = user["owner"] if user else "assigned"
        row = [
            "",
            "",
            *(part or _UNKNOWN for part in key),
            *_grant(holder, owner),
            _bytes(user["memory_bytes"]) if user else _UNKNOWN,
            _percent(user["sm_ratio"]) if user else _UNKNOWN,
            owner.upper() if owner == "unassigned" else owner,
        ]
        if wide:
            resources = ",".join(slot["resource"] for slot in holder["slots"]) if holder else ""
            row += ["", _bytes(user["memory_peak_bytes"]) if user else _UNKNOWN]
            row += [str(user["processes"]) if user else _UNKNOWN, resources]
        yield row
    yield from _rest(device, users.keys(), wide)


def _grant(holder: Document | None, owner: str) -> tuple[str, str, str]:
    """Slots, GPUs and bytes that a container was given here: none, where it is known to hold none."""
    if holder is None:
        return ("0", "0", "0") if owner == "unassigned" else (_UNKNOWN, _UNKNOWN, _UNKNOWN)
    slots = str(sum(slot["slots"] for slot in holder["slots"]))
    return slots, _ratio(holder["allocated_gpus"]), _bytes(holder["allocated_memory_bytes"])


def _rest(device: Document, users: Collection[_Key], wide: bool) -> Iterator[list[str]]:
    """What is used by processes of no container that has a row, and by none at all."""
    for owner in device["owners"]:
        name = owner["owner"]
        of_owner = [process for process in device["processes"] if process["owner"] == name]
        others = [one for one in of_owner if _key(one) not in users]
        if name == "unaccounted":
            used = owner["memory_bytes"]
        elif others:
            told = [process["memory_bytes"] for process in others if process["memory_bytes"] is not None]
            used = sum(told) if told else None
        elif name == "sibling":
            used = owner["memory_bytes"]
        else:
            continue
        if not used and not others:
            continue
        named = ", ".join(sorted({f"{one['namespace']}/{one['pod']}" for one in others if one["pod"]}))
        row = ["", "", "", named, "", "", "", "", _bytes(used), "", name]
        yield [*row, "", "", str(len(others) or ""), ""] if wide else row


def _device_name(device: Document) -> str:
    if device["index"] is None:
        return "?"
    if device["mig_profile"] is None:
        return str(device["index"])
    return f"{device['index']}/{device['gpu_instance_id']}/{device['compute_instance_id']} {device['mig_profile']}"


def _state(device: Document) -> str:
    return "" if device["memory"] else "no reading"


def _notes(document: Document) -> Iterator[str]:
    for gpu in document["gpus"]:
        if not gpu["up"]:
            yield f"GPU {gpu['index']} {gpu['uuid']} is down: {gpu['fault']}"
    for source in document["sources"]:
        if not source["up"]:
            yield f"{source['source']} is down: {source['reason']} ({source['detail'] or ''})"
    if not document["capabilities"].get("pid_visibility"):
        yield "Processes of other containers are not visible: use by container is not known (hostPID: true is needed)."


def _key(row: Document) -> _Key:
    return row["namespace"] or "", row["pod"] or "", row["container"] or ""


def _bytes(value: int | None) -> str:
    if value is None:
        return _UNKNOWN
    size = float(value)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f}{unit}" if value else "0"
        size /= 1024
    return f"{size:.1f}GiB"


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value * 100:.0f}%"


def _ratio(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.3g}"


def _aligned(rows: Iterable[Sequence[str]]) -> str:
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    return "\n".join(_line(row, widths) for row in shown)


def _line(row: Iterable[str], widths: Sequence[int]) -> str:
    return _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
