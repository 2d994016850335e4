"""`gpumap waste`: what is found, worst first; what it adds up to; and what cannot be known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from gpumap.document import Document
from gpumap.look.orders import WASTE_ORDERS
from gpumap.look.seen import Seen
from gpumap.look.tables.amounts import UNKNOWN, ratio, size
from gpumap.look.tables.document import in_order, no_devices
from gpumap.look.tables.findings import Finding, findings, sums, unknown
from gpumap.look.tables.layout import Column, Row, Shape, aligned, joined, notes
from gpumap.units import counted

_BY_NUMBER: dict[str, Callable[[Finding], float | None]] = {
    "waste": lambda one: one.waste_bytes,
    "gpus": lambda one: one.gpus,
    "granted": lambda one: one.granted_bytes,
    "used": lambda one: one.used_bytes,
    "idle": lambda one: one.idle_seconds,
}
_BY_NAME: dict[str, Callable[[Finding], str | float | None]] = {
    "device": lambda one: one.place,
    "namespace": lambda one: one.key[0],
    "pod": lambda one: one.key[1],
    "container": lambda one: one.key[2],
}
_COLUMNS = (
    Column("FINDING"),
    Column("NAMESPACE", name=True),
    Column("POD", name=True),
    Column("CONTAINER", name=True),
    Column("DEVICE"),
    Column("GPUS"),
    Column("GRANTED", spare=True),
    Column("USED"),
    Column("WASTE"),
    Column("UUID", name=True, wide=True),
    Column("WHY", sentence=True),
)
_COLOURS = {"squatter": "red", "leftover": "red", "over": "red", "idle": "yellow", "unmatched": "yellow"}

_SUMS = {
    "unused": "granted but not used",
    "squatter": "used by squatters",
    "leftover": "used by leftovers",
    "over": "used over grants",
}


def waste_table(seen: Seen, shape: Shape) -> str:
    """Findings, what cannot be known, and a last line of sums."""
    (document,) = seen.documents
    found = _sorted(document, shape)
    rows = [
        Row(
            [
                one.kind.upper() if one.kind in ("squatter", "leftover") else one.kind,
                *(part or UNKNOWN for part in one.key),
                one.device or UNKNOWN,
                ratio(one.gpus),
                size(one.granted_bytes),
                size(one.used_bytes),
                size(one.waste_bytes),
                one.uuid or UNKNOWN,
                one.why,
            ],
            _COLOURS.get(one.kind, ""),
            0,
        )
        for one in found
    ]
    doubts = list(unknown(document, shape.idle_after_seconds))
    if rows:
        table = aligned(_COLUMNS, rows, shape)
    elif not document["devices"]:
        table = no_devices(document)
    elif _judged(found, document):
        table = "No waste was found."
    else:
        table, doubts = notes(["Nothing could be judged.", *doubts], shape.screen), []
    remedies = notes((f"{one.key[1]}: {one.remedy}" for one in found if one.remedy and shape.wide), shape.screen)
    summary = notes([_summary(found, document)], shape.screen, "bold")
    return joined([table, remedies, notes(doubts, shape.screen), summary])


def waste_values(seen: Seen, shape: Shape) -> Document:
    """The same for scripts: findings, sums, and sentences on what is not known."""
    (document,) = seen.documents
    found = _sorted(document, shape)
    return {
        "version": 1,
        "timestamp": document["timestamp"],
        "node": document["node"],
        "findings": [_value(one) for one in found],
        "sums": sums(found, document),
        "unknown": list(unknown(document, shape.idle_after_seconds)),
    }


def _judged(found: list[Finding], document: Document) -> bool:
    """Whether anything could have been found: somebody holds or uses what is measured."""
    total = sums(found, document)
    known = total["idle_holders"] is not None or total["squatter_bytes"] is not None
    return known and any(device["memory"] for device in document["devices"])


def _value(one: Finding) -> Document:
    names = dict(zip(("namespace", "pod", "container"), (part or None for part in one.key), strict=True))
    row = {"finding": one.kind, **names, **asdict(one)}
    row |= {"device": one.device or None, "uuid": one.uuid or None, "pids": list(one.pids)}
    return {key: value for key, value in row.items() if key not in ("kind", "key", "place")}


def _sorted(document: Document, shape: Shape) -> list[Finding]:
    found = findings(document, shape.idle_after_seconds)
    order = shape.order or WASTE_ORDERS[0]
    if order == "severity":
        return found[::-1] if shape.reverse else found
    by: Callable[[Finding], str | float | None] = {**_BY_NUMBER, **_BY_NAME}[order]
    return in_order(found, by, largest_first=order in _BY_NUMBER, reverse=shape.reverse)


def _summary(found: list[Finding], document: Document) -> str:
    total = sums(found, document)
    parts = []
    if total["idle_gpus"] is not None:
        shareless = sum(one.kind == "idle" and one.gpus is None for one in found)
        more = f" (and {counted(shareless, 'holder')} of unknown share)" if shareless else ""
        parts.append(f"{ratio(total['idle_gpus'])} GPUs held idle{more}")
    for name, says in _SUMS.items():
        if (value := total[f"{name}_bytes"]) is not None and (value or name == "unused"):
            parts.append(f"{size(int(value))} {says}")
    if total["unmatched_slots"]:
        parts.append(f"{counted(int(total['unmatched_slots']), 'slot')} on no device")
    return f"Sum: {', '.join(parts) or 'nothing is known'}."
