"""`gpumap waste`: what is found, worst first; what it adds up to; and what cannot be known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gpumap.cli.node_documents import Seen
from gpumap.cli.sort_keys import WASTE_ORDERS
from gpumap.cli.tables.amounts import UNKNOWN, ratio, size
from gpumap.cli.tables.document import cluster_values, few, in_order, of_each, pods_in
from gpumap.cli.tables.findings import SUMMED, Finding, findings, sums, unknown, worst_first
from gpumap.cli.tables.layout import Column, Row, Shape, aligned, joined, notes
from gpumap.cli.tables.namespace_filter import of_namespace
from gpumap.cli.tables.node_column import in_columns, with_node
from gpumap.cli.tables.unknowns import all_known, no_rows
from gpumap.model.document import VERSION, Document
from gpumap.model.units import counted

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
    "node": lambda one: one.node,
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
    of_nodes = _found(seen, shape)
    found = _sorted(of_nodes, shape)
    rows = [
        Row(
            [
                one.node,
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
    doubts = list(few(_unknown(seen, shape), seen.fleet))
    if rows:
        table = aligned(with_node(_COLUMNS, seen), in_columns(rows, seen), shape)
    elif not any(document["devices"] for document in of_namespace(seen, shape.namespace).documents):
        table = no_rows(seen, shape)
    elif _judged(seen):
        table = "No waste was found." if all_known(seen) else "No waste was found in what is known."
    else:
        table, doubts = notes(["Nothing could be judged.", *doubts], shape.screen), []
    remedies = notes((f"{one.key[1]}: {one.remedy}" for one in found if one.remedy and shape.wide), shape.screen)
    missing = notes(few(seen.missing, seen.fleet), shape.screen, "red")
    summary = notes([_summary(found, _sums(of_nodes, shape))], shape.screen, "bold")
    return joined([table, remedies, notes(doubts, shape.screen), missing, summary])


def waste_values(seen: Seen, shape: Shape) -> Document:
    """The same for scripts: findings, sums, and sentences on what is not known."""
    of_nodes = _found(seen, shape)
    found = [{"node": one.node, **_value(one)} if seen.fleet else _value(one) for one in _sorted(of_nodes, shape)]
    judged: Document = {"findings": found, "sums": _sums(of_nodes, shape), "unknown": list(_unknown(seen, shape))}
    if seen.fleet:
        return {**cluster_values(seen), **judged, "missing": list(seen.missing)}
    (document,) = seen.documents
    return {"version": VERSION, "timestamp": document["timestamp"], "node": document["node"], **judged}


def waste_names(seen: Seen, shape: Shape) -> list[tuple[str, str]]:
    """The pods that something was found of, in the findings' order; those that are there."""
    return pods_in(one.key for one in _sorted(_found(seen, shape), shape) if one.kind != "leftover")


def _judged(seen: Seen) -> bool:
    """Whether anything could have been found: somebody holds or uses what is measured."""
    for document in seen.documents:
        total = sums([], document)
        known = total["idle_holders"] is not None or total["squatter_bytes"] is not None
        if known and any(device["memory"] for device in document["devices"]):
            return True
    return False


def _unknown(seen: Seen, shape: Shape) -> Iterator[str]:
    return of_each(seen, lambda document: unknown(document, shape.idle_after_seconds, shape.namespace))


def _sums(of_nodes: Iterable[tuple[Document, list[Finding]]], shape: Shape) -> dict[str, float | None]:
    """Of all nodes of which something is known."""
    known = [sums(found, document, shape.namespace) for document, found in of_nodes]
    added: dict[str, float | None] = {}
    for name in SUMMED:
        told = [value for one in known if (value := one[name]) is not None]
        added[name] = sum(told) if told else None
    if added["idle_gpus"] is not None:
        added["idle_gpus"] = round(added["idle_gpus"], 3)
    return added


def _value(one: Finding) -> Document:
    names = dict(zip(("namespace", "pod", "container"), (part or None for part in one.key), strict=True))
    row = {"finding": one.kind, **names, **one._asdict()}
    row |= {"device": one.device or None, "uuid": one.uuid or None, "pids": list(one.pids)}
    return {key: value for key, value in row.items() if key not in ("kind", "key", "place", "node")}


def _found(seen: Seen, shape: Shape) -> list[tuple[Document, list[Finding]]]:
    """What is found of each node."""
    return [(one, findings(one, shape.idle_after_seconds, shape.namespace)) for one in seen.documents]


def _sorted(of_nodes: Iterable[tuple[Document, list[Finding]]], shape: Shape) -> list[Finding]:
    found = [one for _, of_node in of_nodes for one in of_node]
    order = shape.order or WASTE_ORDERS[0]
    if order == "severity":
        found.sort(key=worst_first)
        return found[::-1] if shape.reverse else found
    by: Callable[[Finding], str | float | None] = {**_BY_NUMBER, **_BY_NAME}[order]
    return in_order(found, by, largest_first=order in _BY_NUMBER, reverse=shape.reverse)


def _summary(found: list[Finding], total: dict[str, float | None]) -> str:
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
