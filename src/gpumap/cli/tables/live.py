"""`gpumap top` on a terminal: what a frame shows, and what a key changes. Pure.

One list of rows: what is wrong, then what is used; above it the sums of the findings, and the GPUs in a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.rows import ContainerRow, GpuRow, gpu_rows, rows_with_findings
from gpumap.cli.tables.details import details
from gpumap.cli.tables.layout import Column, Shape, SortKey, amount, in_order, name, spare_containers, table, with_node
from gpumap.cli.tables.map import shown_owner
from gpumap.cli.tables.top import COLUMNS, PROCESS_COLUMNS, SORT_KEYS
from gpumap.cli.tables.waste import finding_colour, shown_finding
from gpumap.cli.terminal import cells, shortened
from gpumap.model.findings import judged_kinds, sums, worst_first
from gpumap.model.formatting import UNKNOWN, counted, gpus, number, percent, printable, size
from gpumap.model.names import GPU_FINDINGS
from gpumap.model.node import Finding

ORDERS = {"f": "finding", "w": "waste", "m": "memory", "s": "sm", "n": "namespace", "d": "device"}
"""Keys of the orders of rows."""
_KEYS = ("? keys", "q quit", "Enter details", "/ filter", "f finding", "m memory", "s SM", "p PIDs")
"""Of them, the last line of a frame has those for which there is room."""
_HELP = """\
q            quit
↑ ↓, k j     move the cursor by a row; PgUp PgDn by a page; Home End
Enter        details of the row: grant, use, processes, what to do; Esc closes
f w          sort by finding (the worst first), by waste
m s n d      sort by memory, SM, namespace, device; again: reverse
r            reverse the order
p            one row for each process
/            filter: text, a UUID, or as on the page gpu:5 ns:ml finding:idle
Esc          close the details, or clear the filter
? h          show these keys; any key closes the list"""
PASTE_BEGIN, PASTE_END = "\x1b[200~", "\x1b[201~"
"""A terminal sends them around pasted text. All of it is one key, which is text of the filter, or does nothing."""
_QUERY_MAX = 256
"""In characters. Each row is compared with each word of the filter."""
_REMEMBERED, _IN_STRIP = 60, 8
"""Utilizations of a GPU that are kept, and those that one of several GPUs in a line shows."""
_LEVELS = "▁▂▃▄▅▆▇█"
RowKey = tuple[object, ...]


class Live(NamedTuple):
    """What the reader chose. `typing`: keys are text of the filter. `keys`: the keys are shown, `details`: those of the
    selected row.

    `cursor` is the place of the selected row, and `selected` its key until the cursor moves: the cursor follows the row
    to its new place. `offset` is the first row, or the first line of details, that is shown. `history` is the
    utilization of each GPU in the last collections, `at` the time of the last one.
    """

    order: str = "finding"
    reverse: bool = False
    processes: bool = False
    query: str = ""
    typing: bool = False
    keys: bool = False
    details: bool = False
    cursor: int = 0
    selected: RowKey = ()
    offset: int = 0
    history: Mapping[str, tuple[float | None, ...]] = MappingProxyType({})
    at: float = 0.0


def pressed(live: Live, key: str, page: int) -> Live | None:
    """Return what is shown after a key; `None` if it ends the program. `page` is the number of rows in the window."""
    if live.typing:
        return _typed(live, key)
    if key == "q":
        return None
    if live.keys or key in ("?", "h"):
        return live._replace(keys=not live.keys)
    if live.details:
        if key in ("escape", "enter"):
            return live._replace(details=False, offset=0)
        offset = scrolled(live.offset, key, page)
        return live if offset is None else live._replace(offset=offset)
    if (cursor := scrolled(live.cursor, key, page)) is not None:
        return live._replace(cursor=cursor, selected=())
    if key in ORDERS:
        again = ORDERS[key] == live.order and key not in "fw"
        return _from_top(live, order=ORDERS[key], reverse=again and not live.reverse)
    match key:
        case "enter":
            return live._replace(details=True, offset=0)
        case "p":
            return _from_top(live, processes=not live.processes)
        case "r":
            return _from_top(live, reverse=not live.reverse)
        case "/":
            return live._replace(typing=True)
        case "escape":
            return _from_top(live, query="")
    return live


def _from_top(live: Live, **changes: object) -> Live:
    """Return another list of rows, from its first one."""
    return live._replace(cursor=0, selected=(), offset=0, **changes)  # type: ignore[arg-type]


def scrolled(offset: int, key: str, page: int) -> int | None:
    """Return the first row that is shown after a key; `None` if the key does not scroll."""
    moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -offset, "end": 1 << 30}
    return max(offset + moves[key], 0) if key in moves else None


def _typed(live: Live, key: str) -> Live:
    if key == "enter":
        return live._replace(typing=False)
    if key == "escape":
        return _from_top(live, typing=False, query="")
    if key == "backspace":
        return _from_top(live, query=live.query[:-1])
    if key.startswith(PASTE_BEGIN):
        text = key.removeprefix(PASTE_BEGIN).removesuffix(PASTE_END).strip()
        key = "".join(character if character.isprintable() else " " for character in text)
    elif len(key) > 1 or not key.isprintable():
        return live
    return _from_top(live, query=(live.query + key)[:_QUERY_MAX])


def remembered(live: Live, maps: NodeMaps | None) -> Live:
    """Add the utilizations of a node's new collection to the history. What is not known is a gap, also without an
    answer."""
    if maps is None:
        return live._replace(history={uuid: (*past, None)[-_REMEMBERED:] for uuid, past in live.history.items()})
    if maps.fleet or maps.maps[0].timestamp == live.at:
        return live
    gpus = gpu_rows(maps.maps[0])
    history = {one.uuid: (*live.history.get(one.uuid, ()), one.utilization_ratio)[-_REMEMBERED:] for one in gpus}
    return live._replace(history=history, at=maps.maps[0].timestamp)


class Frame(NamedTuple):
    """The lines of a frame, how many rows have room in it, and the state with the selected row."""

    lines: list[str]
    page: int
    live: Live


def frame(maps: NodeMaps, live: Live, shape: Shape, head: Sequence[str], height: int) -> Frame:
    """Return the lines that fit a window of `height` lines. `head` is above them."""
    columns = shape.screen.columns or 80
    if live.keys:
        return _filled(
            head,
            [line[:columns] for line in _HELP.splitlines()],
            shortened("any key: back  q quit", columns),
            height,
            live,
        )
    every = [
        row
        for node in maps.maps
        for row in rows_with_findings(node, shape.namespace, processes=live.processes)
        if row.owner not in ("unaccounted", "sibling")  # the line of the GPU, or the row of the sibling, has it
    ]
    words = live.query.lower().split()
    found = _in_order([row for row in every if all(_matches(row, word, fleet=maps.fleet) for word in words)], live)
    place = _place(live, found)
    if live.details and live.selected and place is None:
        return _filled(head, ["This row is gone."], shortened("Esc back  q quit", columns), height, live)
    live = _with_cursor(live, found, place)
    if live.details and found:
        lines = list(details(found[live.cursor], maps, shape))
        page = max(height - len(head) - 1, 1)
        live = live._replace(offset=min(live.offset, max(len(lines) - page, 0)))
        return _filled(head, lines[live.offset :], shortened("Esc back  q quit  ↑↓ scroll", columns), height, live)
    above = [*head, *_sum_lines(maps, shape, max(height // 10, 1)), *_gpu_lines(maps, live, shape, height)]
    page = max(height - len(above) - 2, 1)
    live = live._replace(offset=max(min(live.offset, live.cursor, len(found) - page), live.cursor - page + 1, 0))
    titles, lines = _row_lines(found, every, live, shape, fleet=maps.fleet)
    shown = lines[live.offset : live.offset + page] or [shortened(_nothing(live), columns)]
    return _filled([*above, titles], shown, _foot(live, found, columns), height, live, page)


def _filled(
    head: Sequence[str], lines: Sequence[str], foot: str, height: int, live: Live, page: int | None = None
) -> Frame:
    """Return a frame of exactly so many lines, the last of which is `foot`."""
    room = max(height - 1, 0)
    shown = [*head, *lines][:room]
    return Frame([*shown, *[""] * (room - len(shown)), foot], page or max(height - len(head) - 1, 1), live)


def _nothing(live: Live) -> str:
    if live.query:
        return f"Nothing matches. Terms: {' '.join(f'{field}:' for field in ('gpu', *_FIELDS))}"
    return "No process is known here." if live.processes else "No known use."


def _foot(live: Live, found: Sequence[ContainerRow], columns: int) -> str:
    """Return what is typed, or the place of the cursor; then the keys for which there is room."""
    query = printable(live.query)
    if live.typing:
        return shortened(f"filter: {query}_  Enter keep  Esc clear", columns)
    keys: Sequence[str] = _KEYS
    place = [f"{live.cursor + 1}/{len(found)}"] if found else []
    if query:
        place, keys = ["Esc clear", f"filter: {query}"], (counted(len(found), "row"), "Enter details")
    return shortened(next(_lines_of([*place, *keys], "  ", columns)), columns)


def _lines_of(parts: Sequence[str], between: str, columns: int) -> Iterator[str]:
    """Return lines of as many parts as have room."""
    line = parts[0]
    for part in parts[1:]:
        longer = line + between + part
        if cells(longer) > columns:
            yield line
            longer = part
        line = longer
    yield line


# --- above the rows ---------------------------------------------------------------------------------------------------


def _sum_lines(maps: NodeMaps, shape: Shape, most: int) -> list[str]:
    """Return the sums of the findings, the worst first; nothing if no findings are known."""
    judged = frozenset.intersection(*map(judged_kinds, maps.maps)) if maps.maps else frozenset[str]()
    found = [one for node in maps.maps for one in node.findings or () if shape.namespace in ("", one.namespace)]
    if not found and not judged:
        return []
    total = sums(found, judged)
    shown = {
        "fault": number(total["faults"]),
        "not offered": number(total["not_offered_gpus"]),
        "squatter": size(total["squatter_bytes"]),
        "leftover": size(total["leftover_bytes"]),
        "unexplained": size(total["unexplained_bytes"]),
        "busy without a process": gpus(total["unexplained_gpus"] or 0),
        "over": size(total["over_bytes"]),
        "stalled": gpus(total["stalled_gpus"]),
        "idle": gpus(total["idle_gpus"]),
        "maybe idle": gpus(total["maybe_idle_gpus"]),
        "granted but not used": size(total["unused_bytes"]),
        "unmatched": number(total["unmatched"]),
    }
    parts = [f"{kind} {value}" for kind, value in shown.items() if value not in ("0", UNKNOWN)] or ["no findings"]
    unknown = [kind for kind, value in shown.items() if value == UNKNOWN]
    parts += [f"not known: {kind}" if kind == unknown[0] else kind for kind in unknown]
    lines = list(_lines_of(parts, ", ", shape.screen.columns or 80))
    if len(lines) > most:
        lines[most - 1] = shortened(f"{lines[most - 1]}, …", shape.screen.columns or 80)
    return [shape.screen.paint(shortened(line, shape.screen.columns or 80), "bold") for line in lines[:most]]


def _gpu_lines(maps: NodeMaps, live: Live, shape: Shape, height: int) -> list[str]:
    """Return the GPUs of a single node: a line for each in a large window, else several in a line.

    If there is no room for all, those that are broken and the busiest are shown. A fleet has too many.
    """
    found = [] if maps.fleet else gpu_rows(maps.maps[0])
    columns = shape.screen.columns or 80
    if not found:
        return []
    if len(found) < height // 4:
        return table(_gpu_columns(found, live), found, shape, lambda one: "red" if one.broken else "").splitlines()
    cell = f"{'GPU':<4}{'UTIL':<{_IN_STRIP}} {'':>4} {'MEM':>4}"
    in_line = max((columns + 2) // (len(cell) + 2), 1)
    room = (height // 6 - 1) * in_line
    if room <= 0:
        return []
    hidden = len(found) - room
    if hidden > 0:
        worst = sorted(found, key=lambda one: (not one.broken, -(one.utilization_ratio or 0.0)))[: room - 1]
        found = [one for one in found if one in worst]
    shown = [shape.screen.paint(_in_strip(one, live), "red" if one.broken else "") for one in found]
    shown += [f"and {hidden + 1} more"] if hidden > 0 else []
    lines = ["  ".join(shown[first : first + in_line]) for first in range(0, len(shown), in_line)]
    return ["  ".join([cell] * min(in_line, len(shown))), *lines]


def _in_strip(one: GpuRow, live: Live) -> str:
    part = one.used_bytes / one.total_bytes if one.total_bytes and one.used_bytes is not None else None
    mark = "!" if one.broken else ""
    return f"{one.name + mark:<4}{_curve(one, live, _IN_STRIP)} {percent(one.utilization_ratio):>4} {percent(part):>4}"


def _curve(one: GpuRow, live: Live, width: int) -> str:
    past = live.history.get(one.uuid, ())[-width:]
    levels = (" " if each is None else _LEVELS[min(int(each * len(_LEVELS)), len(_LEVELS) - 1)] for each in past)
    return "".join(levels).rjust(width)


def _gpu_columns(gpus: Sequence[GpuRow], live: Live) -> list[Column[GpuRow]]:
    model: Column[GpuRow] = name("MODEL", lambda one: one.model, spare=1)
    return [
        Column("GPU", lambda one: one.name + ("!" if one.broken else "")),
        Column("HISTORY", lambda one: _curve(one, live, 3 * _IN_STRIP), spare=2),
        amount("UTIL", percent, lambda one: one.utilization_ratio),
        Column("MEMORY", lambda one: size(one.used_bytes) + (f"/{size(one.total_bytes)}" if one.total_bytes else "")),
        Column("TEMP", lambda one: UNKNOWN if one.temperature_celsius is None else f"{one.temperature_celsius:.0f}°C"),
        Column("POWER", lambda one: UNKNOWN if one.power_watts is None else f"{one.power_watts:.0f}W", spare=3),
        *([model] if len({one.model for one in gpus}) > 1 else []),
    ]


# --- rows -------------------------------------------------------------------------------------------------------------


def _key(row: ContainerRow) -> RowKey:
    return row.node, row.device.uuid, row.container, row.owner, row.pid, row.work, row.finding and row.finding.reason


def _place(live: Live, found: Sequence[ContainerRow]) -> int | None:
    """Return where the selected row is now, also if it has another finding; `None` if it is gone."""
    keys = [_key(row) for row in found]
    alike = (place for place, key in enumerate(keys) if key[:-1] == live.selected[:-1])
    return keys.index(live.selected) if live.selected in keys else next(alike, None)


def _with_cursor(live: Live, found: Sequence[ContainerRow], place: int | None) -> Live:
    """Put the cursor on the selected row. If that is gone, the cursor stays in its line, or on the last row."""
    cursor = min(live.cursor, max(len(found) - 1, 0)) if place is None else place
    return live._replace(cursor=cursor, selected=_key(found[cursor]) if found else ())


def _in_order(found: list[ContainerRow], live: Live) -> list[ContainerRow]:
    found = in_order(found, SORT_KEYS["memory"], reverse=False)  # among equals
    if live.order != "finding":
        return in_order(found, {**SORT_KEYS, "waste": _BY_WASTE}[live.order], reverse=live.reverse)
    wrong = [(row.finding, row) for row in found if row.finding]
    wrong.sort(key=lambda pair: worst_first(pair[0]), reverse=live.reverse)
    return [*(row for _, row in wrong), *(row for row in found if not row.finding)]


def _waste(row: ContainerRow) -> int | None:
    return row.finding.memory_bytes if row.finding else None


_BY_WASTE: SortKey[ContainerRow] = SortKey(_waste, largest_first=True)
_FINDING: tuple[Column[ContainerRow], ...] = (
    Column("FINDING", lambda row: shown_finding(row.finding) if row.finding else ""),
    Column("FOR", lambda row: row.finding_age, spare=1),
    Column("DEVICE", lambda row: row.device.name.partition(" ")[0], spare=2),
)
_OF_TOP = {column.title: column for column in (*COLUMNS, *PROCESS_COLUMNS)}


def _of_top(title: str, spare: int = 0) -> Column[ContainerRow]:
    """Return a column of the table of `top`."""
    return _OF_TOP[title]._replace(spare=spare, wide=False)


_PROCESS: tuple[Column[ContainerRow], ...] = (_of_top("PID"), _of_top("PROCESS", 4))
_USE: tuple[Column[ContainerRow], ...] = (
    _of_top("NAMESPACE", 5),
    _of_top("POD")._replace(kept=False),
    _of_top("CONTAINER"),
    Column("WASTE", lambda row: size(_waste(row)) if row.finding else "", spare=3),
    _of_top("MEMORY", 6),
    _of_top("GRANTED", 9),
    _of_top("PEAK", 10),
    _of_top("SM", 7),
    _of_top("PROCESSES", 11),
    Column("OWNER", lambda row: shown_owner(row) if row.listed or row.processes else "", spare=12),
    Column("WHY", lambda row: row.finding.why if row.finding else "", name=True, spare=13),
)
_OF_CONTAINERS = frozenset({"WASTE", "GRANTED", "PEAK", "PROCESSES"})
"""Titles of columns that are not about a single process."""


def _row_lines(
    found: Sequence[ContainerRow], every: Sequence[ContainerRow], live: Live, shape: Shape, *, fleet: bool
) -> tuple[str, list[str]]:
    """Return the line of titles and those of the rows. The titles are those of all rows, whatever the filter."""
    columns = (*_FINDING, *_PROCESS, *_USE) if live.processes else (*_FINDING, *_USE)
    columns = tuple(one for one in columns if not live.processes or one.title not in _OF_CONTAINERS)
    if not any(row.finding for row in every):
        columns = tuple(one for one in columns if one.title not in ("FINDING", "FOR", "WASTE", "WHY"))
    columns = tuple(spare_containers(columns, (row.container for row in every), spare=8))
    screen = shape.screen
    plain = replace(
        shape, wide=False, headers=True, screen=replace(screen, columns=_beside_cursor(shape), colours=False)
    )
    titles, *lines = table(with_node(columns, fleet=fleet), found or every, plain).splitlines()
    shown = []
    for place, (row, line) in enumerate(zip(found, lines, strict=False)):
        if row.finding and row.finding.finding in GPU_FINDINGS:
            line = _fault_line(row.finding, line, titles, _beside_cursor(shape))
        at_cursor = place == live.cursor
        colour = "reverse" if at_cursor else finding_colour(row.finding) if row.finding else ""
        shown.append(screen.paint(f"{'>' if at_cursor else ' '} {line}", colour))
    return screen.paint(f"  {titles}", "bold"), shown


def _beside_cursor(shape: Shape) -> int:
    return max((shape.screen.columns or 80) - 2, 1)


def _fault_line(one: Finding, line: str, titles: str, columns: int) -> str:
    """Return the line of a GPU's fault: what is wrong takes the place of the columns of containers."""
    start = min((titles.index(title) for title in ("PID", "NAMESPACE", "POD") if f" {title}" in titles), default=0)
    return line[:start] + shortened(printable(one.why), max(columns - start, 1))


_FIELDS: Mapping[str, Callable[[ContainerRow], str]] = {
    "ns": lambda row: row.container.namespace,
    "pod": lambda row: row.pod,
    "container": lambda row: row.container.container,
    "owner": lambda row: row.owner,
    "uuid": lambda row: row.device.uuid,
    "finding": lambda row: row.finding.finding if row.finding else "",
}
"""Terms of the filter that test one field. `gpu:` tests the whole index."""


def _matches(row: ContainerRow, word: str, *, fleet: bool) -> bool:
    """Return whether a word is in a name that the row shows, or begins its UUID. `ns:ml` tests one field."""
    field, _, value = word.partition(":")
    if field == "gpu" and value:
        place = row.device.name.partition(" ")[0]
        return value in (place, place.partition("/")[0])
    if field in _FIELDS and value:
        return value in _FIELDS[field](row).lower()
    process = (str(row.pid), row.command or "") if row.pid is not None else ()
    finding = (row.finding.finding, row.finding.why) if row.finding else ()
    names = (row.node if fleet else "", *row.container, row.pod, row.owner, row.device.name, *process, *finding)
    return word in " ".join(names).lower() or (
        word.startswith(("gpu-", "mig-")) and row.device.uuid.lower().startswith(word)
    )
