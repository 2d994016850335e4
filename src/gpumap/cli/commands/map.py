"""`gpumap map`: the holders and users of each device, a row per container below each device.

With --prometheus it is one table of sums: `map_sums`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumap.cli.args import SUMS_BY, add_by, add_output, read_shape
from gpumap.cli.commands import Program
from gpumap.cli.filter import select_rows
from gpumap.cli.rows import ContainerRow, DeviceRow, NodeMaps, pods_in, rows
from gpumap.cli.screen import Report
from gpumap.cli.table import (
    Column,
    Shape,
    SortKey,
    add_node_column,
    join_blocks,
    make_container_droppable,
    notes,
    sort_keys,
    sort_rows,
    table,
)
from gpumap.cli.unknowns import no_rows, troubles
from gpumap.model.devices import has_kubelet
from gpumap.model.errors import UsageError
from gpumap.model.formatting import UNKNOWN, number, percent, ratio, size
from gpumap.model.node import VERSION, Node, UnmatchedSlots

if TYPE_CHECKING:
    from gpumap.cli.commands import Commands

COLUMNS_MAX, _UUID_COLUMNS = 120, 100
"""Cells of a line: -o wide shortens nothing. On a terminal narrower than the second, devices have no UUID."""
ORDERS = ("namespace", "memory", "sm", "peak", "granted", "gpus", "processes")
"""The keys of --sort-by. The first one is the default."""
_EXAMPLES = {
    "gpumap": [
        ("this node, once", "gpumap map"),
        ("a running agent, updated every 2 seconds", "gpumap map --watch --url http://127.0.0.1:9401"),
        ("the largest users of memory first", "gpumap map --sort-by memory"),
        ("sums of the whole cluster, by node", "gpumap map --prometheus http://prom:9090"),
        (
            "for scripts: pods that use a device that they do not hold",
            """gpumap map -o json | jq -r '.devices[].containers[] | select(.owner == "unassigned") | .pod'""",
        ),
    ],
    "kubectl gpumap": [
        ("the whole cluster, every namespace", "kubectl gpumap map -A"),
        ("one node, updated every 2 seconds", "kubectl gpumap map gpu-1 -A -w"),
        ("the pods of a namespace that hold or use a GPU", "kubectl gpumap map -n ml-team -o name"),
    ],
}
_COLOURS = {"unassigned": "red", "gone": "yellow", "unknown": "yellow"}
MapRow = DeviceRow | ContainerRow


class UnmatchedRow(NamedTuple):
    """Slots on no device."""

    node: str
    entry: UnmatchedSlots


def add(commands: Commands, program: Program) -> None:
    parser = program.add_command(commands, "map", _map, _EXAMPLES)
    output = add_output(parser, ORDERS, program.interval_help)
    if program.has_prometheus:
        add_by(output, SUMS_BY, cluster=True)
    program.add_source(parser, "map")


def _map(program: Program, args: argparse.Namespace) -> int:
    shape = read_shape(args, program.namespace(args))
    if getattr(args, "prometheus", None) is not None:
        from gpumap.cli.commands.map_sums import SUMS_REPORT, check_flags, cluster_sums

        level = check_flags(args, shape)
        return program.show(args, SUMS_REPORT, shape, partial(cluster_sums, level=level))
    if getattr(args, "by", None):
        raise UsageError("--by requires --prometheus")
    return program.show(args, REPORT, shape, None)


# --- columns ----------------------------------------------------------------------------------------------------------


def _column(
    title: str,
    device: Callable[[DeviceRow], str] | None = None,
    container: Callable[[ContainerRow], str] | None = None,
    *,
    sort: Callable[[ContainerRow], float | None] | None = None,
    **style: Any,
) -> Column[MapRow]:
    """Return a column that reads devices and containers in its own way each; without one it is empty.

    What is not known of memory without a process is empty. `sort` is of containers: they are sorted below their
    device. `style` are other fields of the column.
    """

    def read(row: MapRow) -> str:
        if isinstance(row, DeviceRow):
            return device(row) if device else ""
        text = container(row) if container else ""
        return "" if text == UNKNOWN and not (row.listed or row.processes) else text

    def value(row: MapRow) -> float | None:
        return sort(row) if sort and isinstance(row, ContainerRow) else None

    return Column(title, read, value if sort else None, largest_first=True, **style)


def _name(row: ContainerRow, text: str) -> str:
    return text or (UNKNOWN if row.listed else "")


def _granted(row: ContainerRow, text: str) -> str:
    """A container that uses the device and is known not to hold it was granted 0."""
    if row.holds or not row.listed:
        return text if row.holds else ""
    return "0" if row.owner == "unassigned" else UNKNOWN


def _describe(device: DeviceRow, uuid: str) -> str:
    """Return the line of a device: a text over the columns of names."""
    index, _, profile = device.name.partition(" ")
    return "  ".join(filter(None, (f"{index:<6}", " ".join(filter(None, (uuid, profile))), device.free)))


def _sensors(device: DeviceRow) -> str:
    values = (device.temperature_celsius, "°C"), (device.power_watts, "W")
    return " ".join(f"{value:.0f}{unit}" for value, unit in values if value is not None)


def shown_owner(row: ContainerRow) -> str:
    """Return the owner, or that the container only reserves the device for other pods."""
    return "reservation" if row.reservation else row.owner


def owner_colour(row: MapRow) -> str:
    return _COLOURS.get(shown_owner(row), "") if isinstance(row, ContainerRow) else ""


_DEVICE_WITHOUT_UUID = _column("DEVICE", lambda device: _describe(device, ""), spans=True)
COLUMNS: tuple[Column[MapRow], ...] = (
    _column("DEVICE", lambda device: _describe(device, device.short_uuid), spans=True),
    _column("NAMESPACE", None, lambda row: _name(row, row.container.namespace), name=True),
    _column("POD", None, lambda row: _name(row, row.pod), name=True, shortened_last=True),
    _column("CONTAINER", None, lambda row: _name(row, row.container.container), name=True),
    # Slots of several resources are not added up: they are of different units.
    _column("SLOTS", None, lambda row: _granted(row, "+".join(map(str, row.slots.values())) or "0"), drop_rank=3),
    _column("GPUS", None, lambda row: _granted(row, ratio(row.gpus)), sort=lambda row: row.gpus, drop_rank=4),
    _column("GRANTED", None, lambda row: _granted(row, size(row.granted_bytes)), sort=lambda row: row.granted_bytes),
    _column(
        "USED",
        lambda device: size(device.used_bytes) + (f"/{size(device.total_bytes)}" if device.total_bytes else ""),
        lambda row: size(row.memory_bytes),
        sort=lambda row: row.memory_bytes,
        sort_name="memory",
    ),
    _column(
        "SM",
        lambda device: percent(device.utilization_ratio),
        lambda row: percent(row.busy_ratio),
        sort=lambda row: row.busy_ratio,
    ),
    _column("OWNER", _sensors, shown_owner, colour=owner_colour),
    _column("UUID", lambda device: device.uuid, wide=True),
    _column("MODEL", lambda device: device.model or UNKNOWN, wide=True),
    _column("PEAK", None, lambda row: size(row.memory_peak_bytes), sort=lambda row: row.memory_peak_bytes, wide=True),
    _column("PROCESSES", None, lambda row: number(row.processes), sort=lambda row: row.processes, wide=True),
    _column("RESOURCES", None, lambda row: ",".join(row.slots), wide=True),
)
_ASSIGNED = frozenset({"SLOTS", "GPUS", "GRANTED", "RESOURCES"})
"""Titles of columns that show what the kubelet assigned: machines without a kubelet do not have them."""
_UNMATCHED_COLUMNS: tuple[Column[UnmatchedRow], ...] = (
    Column("NAMESPACE", lambda row: row.entry.namespace, name=True),
    Column("POD", lambda row: row.entry.pod, name=True, shortened_last=True),
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
    if not shape.wide:
        cells = min(shape.screen.columns or COLUMNS_MAX, COLUMNS_MAX)
        shape = replace(shape, screen=replace(shape.screen, columns=cells))
    selected_maps = select_rows(maps, shape.namespace, shape.words)
    nodes = zip(selected_maps.maps, maps.maps, strict=True)
    table_rows = [row for selected_node, node in nodes for row in _rows(selected_node, node, shape)]
    containers = (row.container for row in table_rows if isinstance(row, ContainerRow) and row.listed)
    columns = make_container_droppable(COLUMNS, containers)
    if shape.wide or (shape.screen.columns or 0) < _UUID_COLUMNS:
        columns = (_DEVICE_WITHOUT_UUID, *columns[1:])
    if not any(map(has_kubelet, maps.maps)):
        columns = tuple(column for column in columns if column.title not in _ASSIGNED)
    unmatched = [UnmatchedRow(node.name, entry) for node in selected_maps.maps for entry in node.unmatched]
    return join_blocks(
        [
            table(add_node_column(columns, fleet=maps.fleet), table_rows, shape)
            if table_rows
            else ""
            if unmatched and shape.words
            else no_rows(maps, shape.namespace, shape.words),
            table(add_node_column(_UNMATCHED_COLUMNS, fleet=maps.fleet), unmatched, shape) if unmatched else "",
            notes(troubles(selected_maps), shape.screen, "red"),
        ]
    )


def map_values(maps: NodeMaps, shape: Shape) -> Node | dict[str, object]:
    """Return the same for scripts: the map as it is, or those of a fleet."""
    maps = select_rows(maps, shape.namespace, shape.words)
    if maps.fleet:
        return {"version": VERSION, "nodes": list(maps.maps), "missing": list(maps.missing)}
    (node_map,) = maps.maps
    return node_map


def map_names(maps: NodeMaps, shape: Shape) -> list[tuple[str, str]]:
    """Return the pods that hold or use a device, or hold slots on no device."""
    return pods_in(
        name
        for node_map in select_rows(maps, shape.namespace, shape.words).maps
        for names in (
            (
                row.container
                for _, container_rows in rows(node_map)
                for row in sorted(container_rows, key=lambda row: not row.holds)
                if row.listed
            ),
            (slots.name for slots in node_map.unmatched),
        )
        for name in names
    )


def _rows(selected_node: Node, node: Node, shape: Shape) -> Iterator[MapRow]:
    order = SORT_KEYS[shape.order or ORDERS[0]]
    for device, container_rows in rows(selected_node, node):
        yield device
        yield from sort_rows((row for row in container_rows if row.listed), order, reverse=shape.reverse)
        yield from (row for row in container_rows if not row.listed and (shape.wide or not row.is_small_remainder))


REPORT = Report(map_table, map_values, map_names)
