"""`gpumap top` on a terminal: what Enter shows of a row. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.rows import ContainerRow, process_rows
from gpumap.cli.tables.layout import Shape, table
from gpumap.cli.tables.map import shown_owner
from gpumap.cli.tables.top import PROCESS_COLUMNS
from gpumap.cli.tables.waste import finding_colour, shown_finding
from gpumap.cli.terminal import shortened, wrapped
from gpumap.model.formatting import UNKNOWN, age, counted, gpus, percent, printable, size
from gpumap.model.names import GPU_FINDINGS


def details(row: ContainerRow, maps: NodeMaps, shape: Shape) -> Iterator[str]:
    """Return what is known of a row: what is wrong, since when, what to do; grant, use and processes."""
    columns, screen = shape.screen.columns or 80, shape.screen
    who = "/".join(filter(None, (*row.container[:2], row.container.container))) or row.pod or shown_owner(row)
    fault = row.finding is not None and row.finding.finding in GPU_FINDINGS
    place = f" on {row.device.name}" if row.device.uuid else ""
    yield screen.paint(shortened(f"GPU {row.device.name}" if fault else f"{printable(who)}{place}", columns), "bold")
    if one := row.finding:
        said = f"{shown_finding(one)} for {row.finding_age}: {one.why}."
        yield from (screen.paint(line, finding_colour(one)) for line in wrapped(printable(said), columns))
        yield from wrapped(printable(one.remedy or ""), columns)
    yield ""
    for title, text in _fields(row):
        if text != UNKNOWN:
            yield from wrapped(f"{title:<12}{printable(text)}", columns)
    node = next(one for one in maps.maps if one.name == row.node)
    of_row = [
        one
        for one in process_rows(node)
        if (one.device.uuid, one.container, one.owner, one.work)
        == (row.device.uuid, row.container, row.owner, row.work)
        and one.pid is not None
    ]
    if of_row:
        yield ""
        yield from table(_PROCESSES, of_row, replace(shape, wide=False, headers=True)).splitlines()


_PROCESSES = [one for one in PROCESS_COLUMNS if one.title in ("PID", "TYPE", "PROCESS", "MEMORY", "SM")]


def _fields(row: ContainerRow) -> Iterator[tuple[str, str]]:
    """Return what is known of the use and the grant of a row; `-` if nothing is."""
    slots = ", ".join(f"{counted(slots, 'slot')} of {resource}" for resource, slots in row.slots.items())
    granted = [size(row.granted_bytes), gpus(row.gpus), slots]
    yield "granted", ", ".join(one for one in granted if one not in ("", UNKNOWN)) or UNKNOWN
    of_device = f" of {size(row.device.total_bytes)}" if row.device.total_bytes is not None else ""
    yield "memory", UNKNOWN if row.memory_bytes is None else f"{size(row.memory_bytes)}{of_device}"
    yield "peak", size(row.memory_peak_bytes)
    yield "SM", percent(row.busy_ratio)
    yield "last active", UNKNOWN if row.last_active is None else f"{age(row.device.at - row.last_active)} ago"
    yield "owner", shown_owner(row) if row.listed or row.processes else UNKNOWN
    yield "device", " ".join(filter(None, (row.device.uuid, row.device.model))) or UNKNOWN
