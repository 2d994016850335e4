"""`gpumap map`: the holders and users of each device, a row per container below each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.rows import ContainerRow, DeviceRow, rows
from gpumap.cli.sort_keys import MAP_ORDERS
from gpumap.cli.tables.fleets import of_namespace, pods_in
from gpumap.cli.tables.layout import (
    Column,
    Shape,
    SortKey,
    in_order,
    joined,
    notes,
    sort_keys,
    spare_containers,
    table,
    with_node,
)
from gpumap.cli.tables.unknowns import no_rows, troubles
from gpumap.model.devices import container_of, has_kubelet, select_namespace
from gpumap.model.formatting import UNKNOWN, number, percent, ratio, size
from gpumap.model.names import ContainerName
from gpumap.model.node import VERSION, Node, UnmatchedSlots

_COLOURS = {"UNASSIGNED": "red", "gone": "yellow", "unknown": "yellow"}
MapRow = DeviceRow | ContainerRow


class UnmatchedRow(NamedTuple):
    """Slots on no device."""

    node: str
    entry: UnmatchedSlots


# --- columns ----------------------------------------------------------------------------------------------------------


def _column(
    title: str,
    device: Callable[[DeviceRow], str] | None = None,
    container: Callable[[ContainerRow], str] | None = None,
    other: Callable[[ContainerRow], str] | None = None,
    *,
    sort: Callable[[ContainerRow], float | None] | None = None,
    sort_name: str = "",
) -> Column[MapRow]:
    """Return a column that reads devices, containers and other use in its own way each; without one it is empty.

    `sort` is of containers: they are sorted below their device.
    """

    def read(row: MapRow) -> str:
        if isinstance(row, DeviceRow):
            return device(row) if device else ""
        of_kind = container if row.listed else other
        return of_kind(row) if of_kind else ""

    def value(row: MapRow) -> float | None:
        return sort(row) if sort and isinstance(row, ContainerRow) else None

    return Column(title, read, value if sort else None, largest_first=True, sort_name=sort_name)


def _name_column(title: str, part: Callable[[ContainerName], str]) -> Column[MapRow]:
    return _column(title, None, lambda row: part(row.container) or UNKNOWN, lambda row: part(row.container))._replace(
        name=True
    )


def _granted(row: ContainerRow, shown: str) -> str:
    """A container that uses the device and is known not to hold it was granted 0."""
    if row.holds:
        return shown
    return "0" if row.owner == "unassigned" else UNKNOWN


def _slots(row: ContainerRow) -> str:
    """Slots of several resources are not added up: they are of different units."""
    return "+".join(map(str, row.slots.values())) or "0"


def _state(device: DeviceRow) -> str:
    if device.total_bytes is not None or device.use_known:
        return ""
    return "partitioned" if device.partitioned else "no reading"


def shown_owner(row: ContainerRow) -> str:
    """Return the owner, or that the container only reserves the device for other pods."""
    if row.reservation:
        return "reservation"
    return row.owner.upper() if row.owner == "unassigned" else row.owner


def owner_colour(row: MapRow) -> str:
    return _COLOURS.get(shown_owner(row), "") if isinstance(row, ContainerRow) else "yellow"


COLUMNS: tuple[Column[MapRow], ...] = (
    _column("DEVICE", lambda device: device.name)._replace(spans=True),
    _column("UUID", lambda device: device.uuid)._replace(name=True, spare=5),
    _name_column("NAMESPACE", lambda name: name.namespace),
    _column("POD", None, lambda row: row.pod or UNKNOWN, lambda row: row.pod)._replace(name=True, kept=True),
    _name_column("CONTAINER", lambda name: name.container),
    _column("SLOTS", None, lambda row: _granted(row, _slots(row)))._replace(spare=3),
    _column("GPUS", None, lambda row: _granted(row, ratio(row.gpus)), sort=lambda row: row.gpus)._replace(spare=4),
    _column(
        "GRANTED",
        None,
        lambda row: _granted(row, size(row.granted_bytes)),
        sort=lambda row: row.granted_bytes,
    ),
    _column(
        "USED",
        lambda device: (
            size(device.used_bytes) + ("" if device.total_bytes is None else f" of {size(device.total_bytes)}")
        ),
        lambda row: size(row.memory_bytes),
        lambda row: size(row.memory_bytes),
        sort=lambda row: row.memory_bytes,
        sort_name="memory",
    )._replace(spans=True),
    _column(
        "SM",
        None,
        lambda row: percent(row.busy_ratio),
        lambda row: percent(row.sm_ratio) if row.processes else "",
        sort=lambda row: row.busy_ratio,
    ),
    _column("OWNER", _state, shown_owner, shown_owner)._replace(colour=owner_colour),
    _column("MODEL", lambda device: device.model or UNKNOWN)._replace(wide=True),
    _column("PEAK", None, lambda row: size(row.memory_peak_bytes), sort=lambda row: row.memory_peak_bytes)._replace(
        wide=True
    ),
    _column(
        "PROCESSES",
        None,
        lambda row: number(row.processes),
        lambda row: str(row.processes or ""),
        sort=lambda row: row.processes,
    )._replace(wide=True),
    _column("RESOURCES", None, lambda row: ",".join(row.slots))._replace(wide=True),
)
_ASSIGNED = frozenset({"SLOTS", "GPUS", "GRANTED", "RESOURCES"})
"""Titles of columns that show what the kubelet assigned: machines without a kubelet do not have them."""
_UNMATCHED_COLUMNS: tuple[Column[UnmatchedRow], ...] = (
    Column("NAMESPACE", lambda row: row.entry.namespace, name=True),
    Column("POD", lambda row: row.entry.pod, name=True, kept=True),
    Column("CONTAINER", lambda row: row.entry.container, name=True),
    Column("RESOURCE", lambda row: row.entry.resource, name=True),
    Column("SLOTS", lambda row: str(row.entry.slots)),
    Column("NOT MATCHED", lambda row: row.entry.reason, colour=lambda _: "yellow"),
)
SORT_KEYS: dict[str, SortKey[MapRow]] = {
    "namespace": SortKey(lambda row: "\0".join(row.container) if isinstance(row, ContainerRow) else None, False),
    **sort_keys(COLUMNS),
}


# --- what is shown ----------------------------------------------------------------------------------------------------


def map_table(maps: NodeMaps, shape: Shape) -> str:
    """Return each device with its holders and users; then slots on no device, and what is not known."""
    found = [row for node_map in maps.maps for row in _rows(node_map, shape)]
    containers = (row.container for row in found if isinstance(row, ContainerRow) and row.listed)
    columns = spare_containers(COLUMNS, containers)
    if not any(map(has_kubelet, maps.maps)):
        columns = tuple(column for column in columns if column.title not in _ASSIGNED)
    unmatched = [
        UnmatchedRow(one.name, entry) for one in maps.maps for entry in select_namespace(one.unmatched, shape.namespace)
    ]
    return joined(
        [
            table(with_node(columns, fleet=maps.fleet), found, shape) if found else no_rows(maps, shape),
            table(with_node(_UNMATCHED_COLUMNS, fleet=maps.fleet), unmatched, shape) if unmatched else "",
            notes(troubles(maps), shape.screen, "red"),
        ]
    )


def map_values(maps: NodeMaps, shape: Shape) -> Node | dict[str, object]:
    """Return the same for scripts: the map as it is, or those of a fleet."""
    maps = of_namespace(maps, shape.namespace)
    if maps.fleet:
        return {"version": VERSION, "nodes": list(maps.maps), "missing": list(maps.missing)}
    (node_map,) = maps.maps
    return node_map


def map_names(maps: NodeMaps, shape: Shape) -> list[tuple[str, str]]:
    """Return the pods that hold or use a device, or hold slots on no device."""
    namespace = shape.namespace
    return pods_in(
        one
        for node_map in maps.maps
        for names in (
            (
                row.container
                for _, found in rows(node_map, namespace)
                for row in sorted(found, key=lambda row: not row.holds)
                if row.listed
            ),
            map(container_of, select_namespace(node_map.unmatched, namespace)),
        )
        for one in names
    )


def _rows(node_map: Node, shape: Shape) -> Iterator[MapRow]:
    order = SORT_KEYS[shape.order or MAP_ORDERS[0]]
    for device, found in rows(node_map, shape.namespace):
        yield device
        yield from in_order((row for row in found if row.listed), order, reverse=shape.reverse)
        yield from (row for row in found if not row.listed and (shape.wide or not row.is_small_remainder))
