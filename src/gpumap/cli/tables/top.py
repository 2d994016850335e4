"""`gpumap top`: who uses what now, by container and device or by process, and what no container accounts for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpumap.cli.node_documents import Seen
from gpumap.cli.sort_keys import TOP_ORDERS
from gpumap.cli.tables.amounts import UNKNOWN, number, percent, size
from gpumap.cli.tables.document import Key, cluster_values, device_name, in_order, key_of, name_of, others, pods_in
from gpumap.cli.tables.layout import Column, Row, Shape, aligned, joined, notes
from gpumap.cli.tables.map import COLOURS
from gpumap.cli.tables.namespace_filter import of_namespace
from gpumap.cli.tables.node_column import in_columns, with_node
from gpumap.cli.tables.unknowns import all_known, no_rows, troubles
from gpumap.cli.words import age
from gpumap.model.document import VERSION, Document


class Use(NamedTuple):
    """One row. `pid`, `type` and `name` are a single process's."""

    place: int
    device: str
    uuid: str
    model: str | None
    namespace: str
    pod: str
    container: str
    owner: str
    memory_bytes: int | None
    memory_ratio: float | None
    memory_peak_bytes: int | None
    granted_bytes: int | None
    sm_ratio: float | None
    processes: int | None
    last_active: float | None
    pid: int | None = None
    type: str | None = None
    name: str | None = None
    node: str = ""


class _Place(NamedTuple):
    """A device, its number among its node's, and the node."""

    number: int
    device: Document
    node: str


_BY_NUMBER: dict[str, Callable[[Use], float | None]] = {
    "memory": lambda use: use.memory_bytes,
    "sm": lambda use: use.sm_ratio,
    "peak": lambda use: use.memory_peak_bytes,
    "granted": lambda use: use.granted_bytes,
    "processes": lambda use: use.processes,
}
_BY_NAME: dict[str, Callable[[Use], str | float | None]] = {
    "device": lambda use: use.place,
    "namespace": lambda use: use.namespace,
    "pod": lambda use: use.pod,
    "container": lambda use: use.container,
    "owner": lambda use: use.owner,
    "pid": lambda use: use.pid,
    "node": lambda use: use.node,
}


def top_table(seen: Seen, shape: Shape) -> str:
    """The rows, then what keeps them from being whole."""
    uses = _sorted(seen, shape)
    moments = {name_of(document): document["timestamp"] for document in seen.documents}
    columns = with_node(_PROCESS_COLUMNS if shape.processes else _COLUMNS, seen)
    if not uses and (shape.namespace or not any(document["devices"] for document in seen.documents)):
        table = no_rows(seen, shape)
    elif not uses:
        table = "Nothing is in use." if all_known(seen) else "Nothing is known to be in use."
    elif shape.processes:
        table = aligned(columns, in_columns(map(_process_row, uses), seen), shape)
    else:
        rows = (_container_row(use, moments[use.node]) for use in uses)
        table = aligned(columns, in_columns(rows, seen), shape)
    return joined([table, notes(troubles(seen), shape.screen, "red")])


def top_values(seen: Seen, shape: Shape) -> Document:
    """The same rows for scripts, in bytes and ratios; what is not known is null."""
    rows = []
    for use in _sorted(seen, shape):
        row = {key: value for key, value in use._asdict().items() if key not in ("place", "node")}
        row |= {key: row[key] or None for key in ("namespace", "pod", "container")}
        if not shape.processes:
            row = {key: value for key, value in row.items() if key not in ("pid", "type", "name")}
        rows.append({"node": use.node, **row} if seen.fleet else row)
    if seen.fleet:
        return {**cluster_values(seen), "rows": rows, "missing": list(seen.missing)}
    (document,) = seen.documents
    return {"version": VERSION, "timestamp": document["timestamp"], "node": document["node"], "rows": rows}


def top_names(seen: Seen, shape: Shape) -> list[tuple[str, str]]:
    """The pods of the rows, in their order; those that are there."""
    uses = (use for use in _sorted(seen, shape) if use.owner != "gone")
    return pods_in((use.namespace, use.pod, use.container) for use in uses)


def _sorted(seen: Seen, shape: Shape) -> list[Use]:
    find = _of_processes if shape.processes else _of_containers
    uses = [
        use
        for document in of_namespace(seen, shape.namespace).documents
        for place, device in enumerate(document["devices"])
        for use in find(_Place(place, device, name_of(document)))
    ]
    order = shape.order or TOP_ORDERS[0]
    by: Callable[[Use], str | float | None] = {**_BY_NUMBER, **_BY_NAME}[order]
    uses = in_order(uses, _BY_NUMBER["memory"], largest_first=True, reverse=False)  # among equals
    return in_order(uses, by, largest_first=order in _BY_NUMBER, reverse=shape.reverse)


def _of_containers(place: _Place) -> Iterator[Use]:
    device = place.device
    holders = {key_of(row): row for row in device["holders"]}
    users = {key_of(row): row for row in device["users"]}
    for key in sorted({*holders, *users}):
        holder, user = holders.get(key), users.get(key) or {}
        yield _use(
            place,
            key,
            user.get("owner") or "assigned",
            user.get("memory_bytes"),
            memory_peak_bytes=user.get("memory_peak_bytes"),
            granted_bytes=holder["allocated_memory_bytes"] if holder else None,
            sm_ratio=user.get("sm_ratio"),
            processes=user.get("processes"),
            last_active=user.get("last_active"),
        )
    for other in others(device):
        told = [one["sm_ratio"] for one in other.processes]
        yield _use(
            place,
            other.key,
            other.owner,
            other.memory_bytes,
            sm_ratio=min(sum(told), 1.0) if told and None not in told else None,
            processes=other.running or None,
        )


def _of_processes(place: _Place) -> Iterator[Use]:
    device = place.device
    for one in device["processes"]:
        yield _use(
            place,
            key_of(one),
            one["owner"],
            one["memory_bytes"],
            sm_ratio=one["sm_ratio"],
            processes=1,
            pid=one["pid"],
            type=one["type"],
            name=one["name"],
        )
    for owner in device["owners"]:
        if owner["owner"] in ("unaccounted", "sibling") and owner["memory_bytes"]:
            yield _use(place, ("", "", ""), owner["owner"], owner["memory_bytes"])


def _use(
    place: _Place,
    key: Key,
    owner: str,
    memory_bytes: int | None,
    *,
    memory_peak_bytes: int | None = None,
    granted_bytes: int | None = None,
    sm_ratio: float | None = None,
    processes: int | None = None,
    last_active: float | None = None,
    pid: int | None = None,
    type: str | None = None,
    name: str | None = None,
) -> Use:
    device = place.device
    memory = device["memory"]
    total = memory["total_bytes"] if memory else None
    return Use(
        place.number,
        device_name(device),
        device["uuid"],
        device["model"],
        *key,
        owner,
        memory_bytes,
        memory_bytes / total if total and memory_bytes is not None else None,
        memory_peak_bytes,
        granted_bytes,
        sm_ratio,
        processes,
        last_active,
        pid,
        type,
        name,
        place.node,
    )


_NAMES = (Column("NAMESPACE", name=True), Column("POD", name=True), Column("CONTAINER", name=True))
_COLUMNS = (
    *_NAMES,
    Column("DEVICE"),
    Column("MEMORY"),
    Column("MEMORY%", spare=True),
    Column("PEAK", spare=True),
    Column("SM"),
    Column("PROCESSES"),
    Column("OWNER"),
    Column("GRANTED", wide=True),
    Column("LAST ACTIVE", wide=True),
    Column("UUID", name=True, wide=True),
    Column("MODEL", name=True, wide=True),
)
_PROCESS_COLUMNS = (
    Column("DEVICE"),
    Column("PID"),
    Column("TYPE", spare=True),
    Column("PROCESS", name=True),
    *_NAMES,
    Column("MEMORY"),
    Column("MEMORY%", spare=True),
    Column("SM"),
    Column("OWNER"),
    Column("UUID", name=True, wide=True),
    Column("MODEL", name=True, wide=True),
)


def _container_row(use: Use, now: float) -> Row:
    return Row(
        [
            use.node,
            *_names(use),
            use.device,
            size(use.memory_bytes),
            percent(use.memory_ratio),
            size(use.memory_peak_bytes),
            percent(use.sm_ratio),
            number(use.processes),
            _owner(use),
            size(use.granted_bytes),
            UNKNOWN if use.last_active is None else age(now - use.last_active),
            use.uuid,
            use.model or UNKNOWN,
        ],
        COLOURS.get(use.owner, ""),
        9,
    )


def _process_row(use: Use) -> Row:
    return Row(
        [
            use.node,
            use.device,
            number(use.pid),
            use.type or UNKNOWN,
            use.name or UNKNOWN,
            *_names(use),
            size(use.memory_bytes),
            percent(use.memory_ratio),
            percent(use.sm_ratio),
            _owner(use),
            use.uuid,
            use.model or UNKNOWN,
        ],
        COLOURS.get(use.owner, ""),
        10,
    )


def _names(use: Use) -> list[str]:
    return [part or UNKNOWN for part in (use.namespace, use.pod, use.container)]


def _owner(use: Use) -> str:
    return use.owner.upper() if use.owner == "unassigned" else use.owner
