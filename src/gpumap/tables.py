"""The map as tables for a terminal, made of the document of /api/v1/map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpumap.document import Document

_GAP = "   "
_UNKNOWN = "-"


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
        blocks.append("\n".join(notes))
    return "\n\n".join(blocks) + "\n"


def _device_rows(device: Document, wide: bool) -> Iterator[list[str]]:
    name = _device_name(device)
    holders = {_key(row): row for row in device["holders"]}
    users = {_key(row): row for row in device["users"]}
    memory = device["memory"]
    used, total = (memory["used_bytes"], memory["total_bytes"]) if memory else (None, None)
    whole = [name, device["uuid"], "", "", "", "", "", _bytes(total), _bytes(used), "", _state(device)]
    yield [*whole, device["model"] or _UNKNOWN, "", "", ""] if wide else whole
    for key in sorted({*holders, *users}):
        holder, user = holders.get(key), users.get(key)
        row = [
            "",
            "",
            *(_printable(part) or _UNKNOWN for part in key),
            str(sum(slot["slots"] for slot in holder["slots"])) if holder else "0",
            _ratio(holder["allocated_gpus"]) if holder else "0",
            _bytes(holder["allocated_memory_bytes"]) if holder else "0",
            _bytes(user["memory_bytes"]) if user else _UNKNOWN,
            _percent(user["sm_ratio"]) if user else _UNKNOWN,
            _standing(holder, user),
        ]
        if wide:
            resources = ",".join(slot["resource"] for slot in holder["slots"]) if holder else ""
            row += ["", _bytes(user["memory_peak_bytes"]) if user else _UNKNOWN]
            row += [str(user["processes"]) if user else _UNKNOWN, resources]
        yield row
    for owner in device["owners"]:
        if owner["owner"] in ("assigned", "unassigned") or not (owner["memory_bytes"] or owner["processes"]):
            continue
        named = sorted(
            {
                f"{process['namespace']}/{process['pod']}"
                for process in device["processes"]
                if process["owner"] == owner["owner"] and process["pod"]
            }
        )
        row = ["", "", "", _printable(", ".join(named)), "", "", "", "", _bytes(owner["memory_bytes"]), ""]
        yield [*row, owner["owner"], "", "", str(owner["processes"] or ""), ""] if wide else [*row, owner["owner"]]


def _device_name(device: Document) -> str:
    if device["index"] is None:
        return "?"
    if device["mig_profile"] is None:
        return str(device["index"])
    return f"{device['index']}/{device['gpu_instance_id']}/{device['compute_instance_id']} {device['mig_profile']}"


def _state(device: Document) -> str:
    return "" if device["memory"] else "no reading"


def _standing(holder: Document | None, user: Document | None) -> str:
    if holder is not None:
        return "assigned"
    return "UNASSIGNED" if user and user["unassigned"] else "not a holder"


def _notes(document: Document) -> Iterator[str]:
    for gpu in document["gpus"]:
        if not gpu["up"]:
            yield f"GPU {gpu['index']} {gpu['uuid']} is down: {gpu['fault']}"
    for source in document["sources"]:
        if not source["up"]:
            yield f"{source['source']} is down: {source['reason']} ({_printable(source['detail'] or '')})"
    if not document["capabilities"].get("pid_visibility"):
        yield "Processes of other containers are not visible: use by container is not known (hostPID: true is needed)."


def _key(row: Document) -> tuple[str, str, str]:
    return row["namespace"], row["pod"], row["container"]


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


def _printable(text: str) -> str:
    """Names come from outside: nothing in them may steer a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Iterable[str], widths: Sequence[int]) -> str:
    return _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
