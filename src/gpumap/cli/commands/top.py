"""`gpumap top`: what is used now, by container and device or by process, and what no container accounts for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gpumap.cli.args import add_output, read_shape
from gpumap.cli.commands import Program
from gpumap.cli.commands.map import owner_colour, shown_owner
from gpumap.cli.filter import select_rows
from gpumap.cli.rows import ContainerRow, NodeMaps, container_rows, pods_in, process_rows, values_of
from gpumap.cli.screen import Report, View, Window
from gpumap.cli.table import (
    NODE,
    Column,
    Shape,
    add_node_column,
    amount,
    join_blocks,
    make_container_droppable,
    name,
    notes,
    sort_keys,
    sort_rows,
    table,
)
from gpumap.cli.unknowns import all_known, no_rows, troubles
from gpumap.model.formatting import UNKNOWN, age, number, percent, size

if TYPE_CHECKING:
    from gpumap.cli.commands import Commands

ORDERS = (
    *("memory", "sm", "peak", "granted", "processes"),
    *("device", "namespace", "pod", "container", "owner", "pid", "node"),
)
"""The keys of --sort-by. The first one is the default."""
_DETAILS = """\
There is one row for each container and device. Other rows show processes of the host, leftovers,
and memory that no process explains.
On a terminal, the table updates until you press q. There, findings come first; keys sort and filter the rows,
Enter opens the details of one (press ?). Only the GPUs above them show memory that no process explains."""
_EXAMPLES = {
    "gpumap": [
        ("this node", "gpumap top"),
        ("the table once, by SM time", "gpumap top --sort-by sm --once"),
        ("one row for each process, as in nvidia-smi", "gpumap top --processes"),
    ],
    "kubectl gpumap": [
        ("the whole cluster", "kubectl gpumap top -A"),
        ("the context's namespace, by SM time", "kubectl gpumap top --sort-by sm"),
        ("another cluster", "kubectl gpumap top -A --context prod"),
    ],
}


def add(commands: Commands, program: Program) -> None:
    parser = program.add_command(commands, "top", _top, _EXAMPLES, details=_DETAILS)
    output = add_output(parser, ORDERS, program.interval_help)
    output.add_argument("--processes", action="store_true", help="Show one row for each process.")
    output.add_argument("--once", action="store_true", help="Print the table once, also on a terminal.")
    program.add_source(parser, "top")


def _top(program: Program, args: argparse.Namespace) -> int:
    shape = read_shape(args, program.namespace(args), processes=args.processes)
    return program.show(args, REPORT, shape, None)


def _window(view: View) -> Window:
    from gpumap.cli.commands.top_screen import TopWindow

    return TopWindow(view)


# --- columns ----------------------------------------------------------------------------------------------------------


_NAMES: tuple[Column[ContainerRow], ...] = (
    name("NAMESPACE", lambda row: row.container.namespace),
    name("POD", lambda row: row.pod),
    name("CONTAINER", lambda row: row.container.container),
)
_DEVICE: Column[ContainerRow] = Column("DEVICE", lambda row: row.device.name, lambda row: row.device.number)
_MEMORY: tuple[Column[ContainerRow], ...] = (
    amount("MEMORY", size, lambda row: row.memory_bytes),
    Column("MEMORY%", lambda row: percent(row.memory_ratio), drop_rank=4),
)
_SM: Column[ContainerRow] = amount("SM", percent, lambda row: row.busy_ratio)
_OWNER: Column[ContainerRow] = Column("OWNER", shown_owner, lambda row: row.owner, colour=owner_colour)
_LAST: tuple[Column[ContainerRow], ...] = (
    Column("UUID", lambda row: row.device.uuid, name=True, wide=True),
    Column("MODEL", lambda row: row.device.model or UNKNOWN, name=True, wide=True),
)
COLUMNS: tuple[Column[ContainerRow], ...] = (
    *_NAMES,
    _DEVICE,
    *_MEMORY,
    amount("PEAK", size, lambda row: row.memory_peak_bytes, drop_rank=5),
    _SM,
    amount("PROCESSES", number, lambda row: row.processes, drop_rank=3),
    _OWNER,
    amount("GRANTED", size, lambda row: row.granted_bytes, wide=True),
    Column(
        "LAST ACTIVE",
        lambda row: UNKNOWN if row.last_active is None else age(row.device.collected_at - row.last_active),
        wide=True,
    ),
    *_LAST,
)
PROCESS_COLUMNS: tuple[Column[ContainerRow], ...] = (
    _DEVICE,
    Column("PID", lambda row: number(row.pid), lambda row: row.pid),
    Column("TYPE", lambda row: row.type or UNKNOWN, drop_rank=5),
    Column("PROCESS", lambda row: row.command or UNKNOWN, name=True),
    *_NAMES,
    *_MEMORY,
    _SM,
    _OWNER,
    *_LAST,
)
SORT_KEYS = sort_keys((NODE, *COLUMNS, *PROCESS_COLUMNS))
"""Either table is sorted by the columns of both."""


# --- what is shown ----------------------------------------------------------------------------------------------------


def top_table(maps: NodeMaps, shape: Shape) -> str:
    """Return the rows, then what keeps them from being whole."""
    selected_maps = select_rows(maps, shape.namespace, shape.words)
    table_rows = [row for row in top_rows(selected_maps, shape) if shape.wide or not row.is_small_remainder]
    if table_rows:
        columns = make_container_droppable(
            PROCESS_COLUMNS if shape.processes else COLUMNS, (row.container for row in table_rows)
        )
        block = table(add_node_column(columns, fleet=maps.fleet), table_rows, shape)
    elif not any(node.devices for node in selected_maps.maps):
        block = no_rows(maps, shape.namespace, shape.words)
    else:
        block = "Nothing is in use." if all_known(maps) else "No known use."
    return join_blocks([block, notes(troubles(selected_maps), shape.screen, "red")])


def top_values(maps: NodeMaps, shape: Shape) -> dict[str, object]:
    """Return the same rows for scripts, in bytes and ratios."""
    table_rows = top_rows(select_rows(maps, shape.namespace, shape.words), shape)
    return values_of(maps, rows=[_value(row, fleet=maps.fleet, processes=shape.processes) for row in table_rows])


def top_names(maps: NodeMaps, shape: Shape) -> list[tuple[str, str]]:
    """Return the pods of the rows, in their order; only pods that exist."""
    selected_maps = select_rows(maps, shape.namespace, shape.words)
    return pods_in(row.container for row in top_rows(selected_maps, shape) if row.owner != "gone")


def top_rows(maps: NodeMaps, shape: Shape) -> list[ContainerRow]:
    """Return the rows of the table, in its order."""
    find = process_rows if shape.processes else container_rows
    table_rows = [row for node_map in maps.maps for row in find(node_map)]
    table_rows = sort_rows(table_rows, SORT_KEYS["memory"], reverse=False)  # among equals
    return sort_rows(table_rows, SORT_KEYS[shape.order or ORDERS[0]], reverse=shape.reverse)


def _value(row: ContainerRow, *, fleet: bool, processes: bool) -> dict[str, object]:
    """Return a row as -o json has it."""
    return {
        **({"node": row.node} if fleet else {}),
        "device": row.device.name,
        "uuid": row.device.uuid,
        "model": row.device.model,
        "namespace": row.container.namespace or None,
        "pod": row.container.pod or None,
        "container": row.container.container or None,
        "work": row.work,
        "owner": row.owner,
        "memory_bytes": row.memory_bytes,
        "memory_ratio": row.memory_ratio,
        "memory_peak_bytes": row.memory_peak_bytes,
        "granted_bytes": row.granted_bytes,
        "sm_ratio": row.sm_ratio,
        "processes": row.processes,
        "last_active": row.last_active,
        "sm_activity_ratio": row.sm_activity_ratio,
        **({"pid": row.pid, "type": row.type, "name": row.command} if processes else {}),
    }


REPORT = Report(top_table, top_values, top_names, _window)
