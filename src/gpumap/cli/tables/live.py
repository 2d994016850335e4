"""`gpumap top` on a terminal: what a frame shows, and what a key changes. Pure.

A line for each device, then the containers, processes or groups that use them, as many as fit the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.rows import ContainerRow, DeviceRow, rows
from gpumap.cli.tables.layout import (
    Column,
    Shape,
    amount,
    in_order,
    name,
    sort_keys,
    spare_containers,
    table,
    with_node,
)
from gpumap.cli.tables.top import COLUMNS, PROCESS_COLUMNS, top_rows
from gpumap.cli.tables.unknowns import gpus_to_repair
from gpumap.model.shown import UNKNOWN, number, percent, printable, size

ORDERS = {"m": "memory", "s": "sm", "n": "namespace", "d": "device"}
"""Keys of the orders of rows."""
_GROUPS = ("", "namespace", "device", "node")
_KEYS = "q quit  ? keys  ↑↓ scroll  / filter  m memory  s SM  n name  g group  p PIDs"
_HELP = """\
q            quit
↑ ↓, k j     scroll by a line; PgUp PgDn by a page; Home End
m s n d      sort by memory, SM, namespace, device; again: reverse
r            reverse the order
g            one row for each namespace, device or node, or for each container
p            one row for each process
/            filter by the text of the rows; a UUID begins with GPU- or MIG-
Esc          clear the filter
? h          show these keys; any key closes the list"""
_BAR = 10


class Live(NamedTuple):
    """What the reader chose. `group` is empty for a row of each container. `typing`: keys are text of the filter.
    `keys`: the keys are shown."""

    order: str = "memory"
    reverse: bool = False
    group: str = ""
    processes: bool = False
    query: str = ""
    typing: bool = False
    offset: int = 0
    keys: bool = False


def pressed(live: Live, key: str, page: int, *, fleet: bool) -> Live | None:
    """Return what is shown after a key; `None` if it ends the program. `page` is the number of rows in the window."""
    if live.typing:
        return _typed(live, key)
    if key == "q":
        return None
    if live.keys or key in ("?", "h"):
        return live._replace(keys=not live.keys)
    if (offset := scrolled(live.offset, key, page)) is not None:
        return live._replace(offset=offset)
    live = live._replace(offset=0)
    if key in ORDERS:
        again = ORDERS[key] == live.order
        return live._replace(order=ORDERS[key], reverse=again and not live.reverse)
    if key == "g":
        groups = _GROUPS if fleet else _GROUPS[:-1]
        return live._replace(group=groups[(groups.index(live.group) + 1) % len(groups)])
    if key == "p":
        return live._replace(processes=not live.processes, group="")
    changes: dict[str, dict[str, object]] = {
        "r": {"reverse": not live.reverse},
        "/": {"typing": True},
        "escape": {"query": ""},
    }
    return live._replace(**changes.get(key, {}))  # type: ignore[arg-type]


def scrolled(offset: int, key: str, page: int) -> int | None:
    """Return the first row that is shown after a key; `None` if the key does not scroll."""
    moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -offset, "end": 1 << 30}
    return max(offset + moves[key], 0) if key in moves else None


def _typed(live: Live, key: str) -> Live:
    live = live._replace(offset=0)
    if key == "enter":
        return live._replace(typing=False)
    if key == "escape":
        return live._replace(typing=False, query="")
    if key == "backspace":
        return live._replace(query=live.query[:-1])
    return live._replace(query=live.query + key) if len(key) == 1 and key.isprintable() else live


class Frame(NamedTuple):
    """The lines of a frame. `page` is how many rows it has room for; `offset` is the first that it shows."""

    lines: list[str]
    page: int
    offset: int


def frame(maps: NodeMaps, live: Live, shape: Shape, head: Sequence[str], height: int) -> Frame:
    """Return the lines that fit a window of `height` lines. `head` is above them."""
    if live.keys:
        lines = [*head, *_HELP.splitlines()][: height - 1]
        return Frame([*lines, *[""] * (height - 1 - len(lines)), "any key: back   q quit"], 1, live.offset)
    devices, hidden = _device_lines(maps, shape, (height - len(head)) // 2, live.offset)
    lines = [*head, *devices]
    titles, *rows = _row_lines(maps, live, shape)
    page = max(height - len(lines) - 3, 1)
    below = max(len(rows) - page, 0)
    offset = min(live.offset, max(below, hidden))
    first = min(offset, below)
    lines.append(f"{first + 1}-{first + page} of {len(rows)}" if below else "")
    shown = rows[first : first + page] or [_nothing(live)]
    lines += [shape.screen.paint(titles, "bold"), *shown, *[""] * (page - len(shown)), _foot(live, len(rows))]
    return Frame(lines, page, offset)


def _nothing(live: Live) -> str:
    if live.query:
        return "Nothing matches the filter."
    return "No process is known here." if live.processes else "No known use."


def _foot(live: Live, rows: int) -> str:
    if live.typing:
        return f"filter: {printable(live.query)}_   Enter keep  Esc clear"
    return f"filter: {printable(live.query)}   {rows} rows   Esc clear" if live.query else _KEYS


# --- devices ----------------------------------------------------------------------------------------------------------


def _bar(on: DeviceRow) -> str:
    if not on.up:
        return f"[{'down'.center(_BAR)}]"
    if not on.total_bytes or on.used_bytes is None:
        return f"[{'?'.center(_BAR)}]"
    full = round(_BAR * min(on.used_bytes / on.total_bytes, 1.0))
    return f"[{'|' * full}{' ' * (_BAR - full)}]"


def _used(on: DeviceRow) -> str:
    return size(on.used_bytes) if on.total_bytes is None else f"{size(on.used_bytes)}/{size(on.total_bytes)}"


def _temperature(on: DeviceRow) -> str:
    return UNKNOWN if on.temperature_celsius is None else f"{on.temperature_celsius:.0f}°C"


def _power(on: DeviceRow) -> str:
    return UNKNOWN if on.power_watts is None else f"{on.power_watts:.0f}W"


def _colour(on: DeviceRow) -> str:
    return "" if on.up else "red"


_DEVICES: tuple[Column[DeviceRow], ...] = (
    Column("GPU", lambda on: on.name, colour=_colour),
    name("MODEL", lambda on: on.model),
    Column("MEMORY", _bar, colour=_colour),
    Column("USED", _used),
    amount("UTIL", percent, lambda on: on.utilization_ratio),
    Column("TEMP", _temperature, spare=2),
    Column("POWER", _power, spare=3),
    amount("HOLDERS", number, lambda on: on.holders),
)


def _device_lines(maps: NodeMaps, shape: Shape, most: int, offset: int) -> tuple[list[str], int]:
    """Return the table of devices of a single node, at most so many lines, and how many devices have no room.

    If some have none, those that are down are first, and they scroll with the rows. A fleet has too many devices.
    """
    if maps.fleet:
        return [], 0
    found = [on for node_map in maps.maps for on, _ in rows(node_map)]
    if not found:
        return ["No devices."], 0
    room = len(found) if len(found) < most else max(most - 2, 0)
    hidden = len(found) - room
    if hidden:
        found.sort(key=lambda on: on.up)
    titles, *lines = table(_DEVICES, found, shape).splitlines()
    if hidden:
        offset = min(offset, hidden)
        lines = [*lines[offset : offset + room], f"… and {hidden} more devices"]
    hints = [hint for node_map in maps.maps for hint in gpus_to_repair(node_map)]
    lines += hints[: max(most - len(lines) - 1, 0)]
    return [shape.screen.paint(titles, "bold"), *lines], hidden


# --- rows -------------------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """The rows of a namespace, a device or a node."""

    name: str
    rows: tuple[ContainerRow, ...]


def _sum(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """Return the sum of the known values. If there are others, it is at least that."""
    known = [value for value in values if value is not None]
    if not known:
        return UNKNOWN
    return ("" if len(known) == len(values) else "≥") + text(sum(known))


def _memories(group: _Group) -> list[int | None]:
    return [row.memory_bytes for row in group.rows]


def _ratios(group: _Group) -> list[float | None]:
    return [row.sm_ratio for row in group.rows]


def _known(values: Iterable[float | None]) -> float:
    return sum(value for value in values if value is not None)


def _group_columns(title: str) -> tuple[Column[_Group], ...]:
    return (
        name(title, lambda group: group.name),
        Column("DEVICES", lambda group: number(len({(row.node, row.on.uuid) for row in group.rows}))),
        Column(
            "CONTAINERS",
            lambda group: number(len({(row.node, row.container) for row in group.rows if row.container.pod})),
        ),
        Column(
            "MEMORY",
            lambda group: _sum(_memories(group), lambda total: size(int(total))),
            lambda group: _known(_memories(group)),
            largest_first=True,
        ),
        Column(
            "SM", lambda group: _sum(_ratios(group), percent), lambda group: _known(_ratios(group)), largest_first=True
        ),
    )


def _row_lines(maps: NodeMaps, live: Live, shape: Shape) -> list[str]:
    """Return the line of titles and those of the rows."""
    wanted = replace(shape, order=live.order, reverse=live.reverse, processes=live.processes)
    every = [row for row in top_rows(maps, wanted) if row.owner != "unaccounted"]  # the devices' lines have it
    found = [row for row in every if _matches(row, live.query, fleet=maps.fleet)]
    if live.group:
        columns = _group_columns(live.group.upper())
        keys = sort_keys(columns)
        order = keys.get(live.order, keys[live.group])
        return table(columns, in_order(_groups(found, live.group), order, reverse=live.reverse), shape).splitlines()
    shown = with_node(
        spare_containers(PROCESS_COLUMNS if live.processes else COLUMNS, (row.container for row in every)),
        fleet=maps.fleet,
    )
    if not every:  # the titles are those of a table with rows
        shown = [one for one in shown if not one.spare or shape.wide]
    lines = table(shown, found or every, shape).splitlines()
    return lines if found else lines[:1]


_NAMES: dict[str, Callable[[ContainerRow], str]] = {
    "namespace": lambda row: row.container.namespace or f"({row.owner})",
    "device": lambda row: row.on.name,
    "node": lambda row: row.node,
}


def _groups(found: Iterable[ContainerRow], by: str) -> list[_Group]:
    groups: dict[str, list[ContainerRow]] = {}
    for row in found:
        groups.setdefault(_NAMES[by](row), []).append(row)
    return [_Group(one, tuple(of_group)) for one, of_group in groups.items()]


def _matches(row: ContainerRow, query: str, *, fleet: bool) -> bool:
    """Return whether each word is in a name that the row shows, or begins its UUID."""
    process = (str(row.pid), row.command or "") if row.pid is not None else ()
    names = (row.node if fleet else "", *row.container, row.owner, row.on.name, *process)
    text, uuid = " ".join(names).lower(), row.on.uuid.lower()
    return all(
        word in text or (word.startswith(("gpu-", "mig-")) and uuid.startswith(word)) for word in query.lower().split()
    )
