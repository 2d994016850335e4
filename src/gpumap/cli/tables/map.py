"""`gpumap map`: who holds and who uses each device, a row per container below each device."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gpumap.cli.node_documents import Seen
from gpumap.cli.sort_keys import MAP_ORDERS
from gpumap.cli.tables.amounts import UNKNOWN, number, percent, ratio, size
from gpumap.cli.tables.document import Key, device_name, in_order, key_of, name_of, others, pods_in
from gpumap.cli.tables.layout import Column, Row, Shape, aligned, joined, notes
from gpumap.cli.tables.namespace_filter import of_namespace
from gpumap.cli.tables.node_column import in_columns, with_node
from gpumap.cli.tables.unknowns import no_rows, troubles
from gpumap.model.document import VERSION, Document

_COLUMNS = (
    Column("DEVICE"),
    Column("UUID", name=True, spare=True),
    Column("NAMESPACE", name=True),
    Column("POD", name=True),
    Column("CONTAINER", name=True),
    Column("SLOTS"),
    Column("GPUS", spare=True),
    Column("GRANTED"),
    Column("USED"),
    Column("SM"),
    Column("OWNER"),
    Column("MODEL", wide=True),
    Column("PEAK", wide=True),
    Column("PROCESSES", wide=True),
    Column("RESOURCES", wide=True),
)
_OWNER = 10
COLOURS = {"unassigned": "red", "gone": "yellow", "unknown": "yellow"}
"""Of owners. `unassigned` is in capitals besides."""


def map_table(seen: Seen, shape: Shape) -> str:
    """Each device with its holders and users; then slots on no device, and what keeps the map from being whole."""
    shown = of_namespace(seen, shape.namespace)
    rows = [
        row._replace(cells=[name_of(document), *row.cells])
        for document in shown.documents
        for row in _rows(document, shape)
    ]
    columns = with_node(_COLUMNS, seen)
    blocks = [aligned(columns, in_columns(rows, seen), shape) if rows else no_rows(seen, shape)]
    return joined([*blocks, unmatched_table(shown, shape), notes(troubles(seen), shape.screen, "red")])


def map_values(seen: Seen, shape: Shape) -> Document:
    """The same for scripts: the document as it is, or those of a cluster."""
    seen = of_namespace(seen, shape.namespace)
    if seen.fleet:
        return {"version": VERSION, "nodes": list(seen.documents), "missing": list(seen.missing)}
    (document,) = seen.documents
    return document


def map_names(seen: Seen, shape: Shape) -> list[tuple[str, str]]:
    """The pods that hold or use a device, or hold slots on none."""
    found = [
        key_of(row)
        for document in of_namespace(seen, shape.namespace).documents
        for rows in (*((*one["holders"], *one["users"]) for one in document["devices"]), document["unmatched"])
        for row in rows
    ]
    return pods_in(found)


def _rows(document: Document, shape: Shape) -> Iterator[Row]:
    partitioned = {gpu["uuid"] for gpu in document["gpus"] if gpu["partitioned"]}
    for device in document["devices"]:
        yield from _device_rows(device, partitioned, shape)


def unmatched_table(seen: Seen, shape: Shape) -> str:
    """Slots that no device answers to; empty where there are none."""
    columns = [Column("NAMESPACE", name=True), Column("POD", name=True), Column("CONTAINER", name=True)]
    columns += [Column("RESOURCE", name=True), Column("SLOTS"), Column("NOT MATCHED")]
    rows = [
        Row([name_of(document), *key_of(row), row["resource"], str(row["slots"]), row["reason"]], "yellow", 5)
        for document in seen.documents
        for row in document["unmatched"]
    ]
    return aligned(with_node(columns, seen), in_columns(rows, seen), shape) if rows else ""


def _device_rows(device: Document, partitioned: Collection[str], shape: Shape) -> Iterator[Row]:
    holders = {key_of(row): row for row in device["holders"]}
    users = {key_of(row): row for row in device["users"]}
    memory = device["memory"]
    used, total = (memory["used_bytes"], memory["total_bytes"]) if memory else (None, None)
    state = "" if memory else "partitioned" if device["uuid"] in partitioned else "no reading"
    whole = [device_name(device), device["uuid"], "", "", "", "", "", size(total), size(used), "", state]
    yield Row([*whole, device["model"] or UNKNOWN, "", "", ""], "yellow", _OWNER)
    keys = sorted({*holders, *users})
    order = shape.order or MAP_ORDERS[0]
    by_name = order == MAP_ORDERS[0]
    for key in in_order(
        keys,
        lambda one: "\0".join(one) if by_name else _value(holders.get(one), users.get(one), order),
        largest_first=not by_name,
        reverse=shape.reverse,
    ):
        yield _container_row(key, holders.get(key), users.get(key))
    yield from _rest(device)


def _value(holder: Document | None, user: Document | None, order: str) -> float | None:
    of_user = {"memory": "memory_bytes", "sm": "sm_ratio", "peak": "memory_peak_bytes", "processes": "processes"}
    of_holder = {"granted": "allocated_memory_bytes", "gpus": "allocated_gpus"}
    row, name = (user, of_user[order]) if order in of_user else (holder, of_holder[order])
    value: float | None = row[name] if row else None
    return value


def _container_row(key: Key, holder: Document | None, user: Document | None) -> Row:
    owner = user["owner"] if user else "assigned"
    row = [
        "",
        "",
        *(part or UNKNOWN for part in key),
        *_grant(holder, owner),
        size(user["memory_bytes"]) if user else UNKNOWN,
        percent(user["sm_ratio"]) if user else UNKNOWN,
        owner.upper() if owner == "unassigned" else owner,
        "",
        size(user["memory_peak_bytes"]) if user else UNKNOWN,
        number(user["processes"]) if user else UNKNOWN,
        ",".join(slot["resource"] for slot in holder["slots"]) if holder else "",
    ]
    return Row(row, COLOURS.get(owner, ""), _OWNER)


def _grant(holder: Document | None, owner: str) -> tuple[str, str, str]:
    """Slots, GPUs and bytes that a container was given here: none, where it is known to hold none.

    Slots of several resources are not added up: they are of different units.
    """
    if holder is None:
        return ("0", "0", "0") if owner == "unassigned" else (UNKNOWN, UNKNOWN, UNKNOWN)
    slots = "+".join(str(slot["slots"]) for slot in holder["slots"]) or "0"
    return slots, ratio(holder["allocated_gpus"]), size(holder["allocated_memory_bytes"])


def _rest(device: Document) -> Iterator[Row]:
    for other in others(device):
        row = ["", "", *other.key, "", "", "", size(other.memory_bytes), "", other.owner, "", ""]
        yield Row([*row, str(other.running or ""), ""], COLOURS.get(other.owner, ""), _OWNER)
