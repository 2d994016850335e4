"""`gpumap top` on a terminal: what a frame shows, and what a key changes.

One list of rows: what is wrong, then what is used; above it the sums of the findings, and the GPUs in a few lines.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from gpumap.cli.commands.map import shown_owner
from gpumap.cli.commands.top import COLUMNS, PROCESS_COLUMNS, SORT_KEYS
from gpumap.cli.commands.waste import finding_colour, shown_finding, sum_texts
from gpumap.cli.filter import select_rows
from gpumap.cli.parser import WORD_FIELDS
from gpumap.cli.rows import ContainerRow, GpuRow, NodeMaps, gpu_rows, process_rows, rows_with_findings
from gpumap.cli.screen import View, collected_long_ago, lines_above, notices_of, screen_of_stdout
from gpumap.cli.table import (
    GAPS_FIRST,
    Column,
    R,
    Shape,
    add_node_column,
    amount,
    name,
    sort_keys,
    sort_rows,
    table,
)
from gpumap.cli.terminal import Screen, cells, cropped, repainted, shortened, wrapped
from gpumap.cli.watch import KEY_NAMES, PASTE_BEGIN, PASTE_END, scrolled
from gpumap.model.errors import FatalError
from gpumap.model.findings import judged_kinds, worst_first
from gpumap.model.formatting import UNKNOWN, age, counted, gpus, one_line, percent, printable, size
from gpumap.model.remedies import advice
from gpumap.model.terms import FINDINGS, GPU_FINDINGS

ORDERS = {"f": "finding", "w": "waste", "m": "memory", "s": "sm", "n": "namespace", "d": "device"}
"""Keys of the orders of rows."""
_KEYS = ("? keys", "q quit", "Enter details", "/ filter: gpu:3", "w waste", "m memory", "p PIDs")
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
_QUERY_MAX = 256
"""In characters. Each row is compared with each word of the filter."""
_NOTICES_PART = 6
"""The part of a window that notices may take."""
_GPUS_FROM_LINES, _GPU_CELLS = 8, 8
"""The least height of a window with GPUs, and the least width of one of several GPUs in a line."""
_REMEMBERED, _CURVE_MIN = 60, 8
"""Utilizations of a GPU that are kept, and those that a narrow window shows."""
_LEVELS = "▁▂▃▄▅▆▇█"
RowKey = tuple[object, ...]


class Live(NamedTuple):
    """What the reader chose. `typing`: keys are text of the filter. `keys`: the keys are shown, `details`: those of the
    selected row.

    `cursor` is the place of the selected row, and `selected` its key until the cursor moves: the cursor follows the row
    to its new place. `offset` is the first row, or the first line of details, that is shown. `history` is the
    utilization of each GPU in the last collections, `collected_at` the time of the last one.
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
    collected_at: float = 0.0


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
        return _show_first_row(live, order=ORDERS[key], reverse=again and not live.reverse)
    match key:
        case "enter":
            return live._replace(details=True, offset=0)
        case "p":
            return _show_first_row(live, processes=not live.processes)
        case "r":
            return _show_first_row(live, reverse=not live.reverse)
        case "/":
            return live._replace(typing=True)
        case "escape":
            return _show_first_row(live, query="")
    return live


def _show_first_row(live: Live, **changes: object) -> Live:
    """Return another list of rows, from its first one."""
    return live._replace(cursor=0, selected=(), offset=0, **changes)  # type: ignore[arg-type]


def _typed(live: Live, key: str) -> Live:
    if key == "enter":
        return live._replace(typing=False)
    if key == "escape":
        return _show_first_row(live, typing=False, query="")
    if key == "backspace":
        return _show_first_row(live, query=live.query[:-1])
    if key.startswith(PASTE_BEGIN):
        text = key.removeprefix(PASTE_BEGIN).removesuffix(PASTE_END).strip()
        key = "".join(character if character.isprintable() else " " for character in text)
    elif len(key) > 1 or not key.isprintable():
        return live
    return _show_first_row(live, query=(live.query + key)[:_QUERY_MAX])


def remembered(live: Live, maps: NodeMaps | None) -> Live:
    """Add the utilizations of a node's new collection to the history. What is not known is a gap, also without an
    answer."""
    if maps is None:
        return live._replace(history={uuid: (*past, None)[-_REMEMBERED:] for uuid, past in live.history.items()})
    if maps.fleet or maps.maps[0].timestamp == live.collected_at:
        return live
    gpus = gpu_rows(maps.maps[0])
    history = {gpu.uuid: (*live.history.get(gpu.uuid, ()), gpu.utilization_ratio)[-_REMEMBERED:] for gpu in gpus}
    return live._replace(history=history, collected_at=maps.maps[0].timestamp)


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
    every = _rows(maps, shape.namespace, (), live)
    matching_rows = _sort_rows(_rows(maps, shape.namespace, (live.query,), live), live)
    place = _place(live, matching_rows)
    if live.details and live.selected and place is None:
        return _filled(head, ["This row is gone."], shortened("Esc back  q quit", columns), height, live)
    # If the selected row is gone, the cursor stays in its line, or on the last row.
    cursor = min(live.cursor, max(len(matching_rows) - 1, 0)) if place is None else place
    live = live._replace(cursor=cursor, selected=_key(matching_rows[cursor]) if matching_rows else ())
    if live.details and matching_rows:
        lines = list(details(matching_rows[live.cursor], maps, shape))
        page = max(height - len(head) - 1, 1)
        live = live._replace(offset=min(live.offset, max(len(lines) - page, 0)))
        return _filled(head, lines[live.offset :], shortened("Esc back  q quit  ↑↓ scroll", columns), height, live)
    above = [*head, *_sum_lines(maps, shape, max(height // 10, 1)), *_gpu_lines(maps, live, shape, height)]
    page = max(height - len(above) - 2, 1)
    live = live._replace(
        offset=max(min(live.offset, live.cursor, len(matching_rows) - page), live.cursor - page + 1, 0)
    )
    titles, lines = _row_lines(matching_rows, every, live, shape, fleet=maps.fleet)
    shown_lines = lines[live.offset : live.offset + page] or [shortened(_nothing(live), columns)]
    return _filled([*above, titles], shown_lines, _foot(live, matching_rows, columns), height, live, page)


def _rows(maps: NodeMaps, namespace: str, words: Sequence[str], live: Live) -> list[ContainerRow]:
    """Return the rows that match. The line of the GPU has memory without a process, the sibling's row its memory."""
    return [
        row
        for node in select_rows(maps, namespace, words).maps
        for row in rows_with_findings(node, processes=live.processes)
        if row.owner not in ("unaccounted", "sibling")
    ]


def _filled(
    head: Sequence[str], lines: Sequence[str], foot: str, height: int, live: Live, page: int | None = None
) -> Frame:
    """Return a frame of exactly so many lines, the last of which is `foot`."""
    room = max(height - 1, 0)
    shown_lines = [*head, *lines][:room]
    return Frame([*shown_lines, *[""] * (room - len(shown_lines)), foot], page or max(height - len(head) - 1, 1), live)


def _nothing(live: Live) -> str:
    if live.query:
        return f"Nothing matches. Try {' '.join(f'{field}:' for field in WORD_FIELDS)}"
    return "No process is known here." if live.processes else "No known use."


def _foot(live: Live, rows: Sequence[ContainerRow], columns: int) -> str:
    """Return what is typed, or the place of the cursor; then the keys for which there is room."""
    query = printable(live.query)
    if live.typing:
        return shortened(f"filter: {query}_  Enter keep  Esc clear", columns)
    keys: Sequence[str] = _KEYS
    place = [f"{live.cursor + 1}/{len(rows)}"] if rows else []
    if query:
        place, keys = ["Esc clear", f"filter: {query}"], (counted(len(rows), "row"), "Enter details")
    return shortened(next(_lines_of([*place, *keys], "  ", columns)), columns)


def _lines_of(parts: Sequence[str], between: str, columns: int) -> Iterator[str]:
    """Return lines of as many parts as have room."""
    line = parts[0]
    for text in parts[1:]:
        longer = line + between + text
        if cells(longer) > columns:
            yield line
            longer = text
        line = longer
    yield line


# --- above the rows ---------------------------------------------------------------------------------------------------


def _sum_lines(maps: NodeMaps, shape: Shape, lines_max: int) -> list[str]:
    """Return the sums of the findings, the worst first; nothing if no findings are known."""
    judged = frozenset.intersection(*map(judged_kinds, maps.maps)) if maps.maps else frozenset[str]()
    selected_maps = select_rows(maps, shape.namespace, ())
    findings = [finding for node in selected_maps.maps for finding in node.findings or ()]
    if not findings and not judged:
        return []
    known, columns = sum_texts(findings) or ["no findings"], shape.screen.columns or 80
    sources = (source for node in maps.maps for source in node.sources if not source.up)
    known = [*dict.fromkeys(f"{source.source} is down" for source in sources), *known]
    unknown = [kind.replace("_", " ") for kind in FINDINGS if kind not in judged]
    lines = list(_lines_of(known if unknown else [*known, "all judged"], ", ", columns))
    if len(lines) > lines_max:
        lines[lines_max - 1 :] = [f"{lines[lines_max - 1]}, …"]
    if unknown and lines_max > 1:
        lines.append(f"not all judged: {', '.join(unknown)}")
    return [shape.screen.paint(cropped(line, columns), "bold") for line in lines]


def _gpu_lines(maps: NodeMaps, live: Live, shape: Shape, height: int) -> list[str]:
    """Return the GPUs of a single node in a third of the window: as many in a line as necessary.

    If there is no room for all, those that are broken and the busiest are shown. A fleet has too many.
    """
    if maps.fleet or height < _GPUS_FROM_LINES or not (gpus := gpu_rows(maps.maps[0])):
        return []
    columns, lines_max = shape.screen.columns or 80, height // 3
    in_line = max(min(-(-len(gpus) // lines_max), (columns + 2) // (_GPU_CELLS + 2)), 1)
    width = (columns + 2) // in_line - 2
    hidden = len(gpus) - in_line * lines_max
    if hidden > 0:
        worst = sorted(gpus, key=lambda gpu: (not gpu.broken, -(gpu.utilization_ratio or 0.0)))
        gpus = [gpu for gpu in gpus if gpu in worst[: in_line * lines_max - 1]]
    visible = _visible_columns(_gpu_columns(gpus, live, width), width)
    titles, *lines = (line + " " * (width - cells(line)) for line in _fixed_table(visible, gpus, shape, width))
    colours = ("red" if gpu.broken else "" for gpu in gpus)
    texts = [*map(shape.screen.paint, lines, colours), *([f"and {hidden + 1} more"] if hidden > 0 else [])]
    rows = [texts[first : first + in_line] for first in range(0, len(texts), in_line)]
    return ["  ".join(row) for row in ([titles] * len(rows[0]), *rows)]


def _fixed_table(columns: Sequence[Column[R]], rows: Sequence[R], shape: Shape, width: int) -> list[str]:
    """Return the titles and lines of a table with all of the columns, in which gaps give way before names."""
    shape = replace(shape, wide=False, headers=True, order="", squeezes=GAPS_FIRST, screen=Screen(width))
    return table(columns, rows, shape).splitlines()


def _curve(gpu: GpuRow, live: Live, width: int) -> str:
    ratios = live.history.get(gpu.uuid, ())[-width:]
    levels = (" " if ratio is None else _LEVELS[min(int(ratio * len(_LEVELS)), len(_LEVELS) - 1)] for ratio in ratios)
    return "".join(levels).rjust(width)


def _gpu_columns(gpus: Sequence[GpuRow], live: Live, columns: int) -> list[Column[GpuRow]]:
    model: Column[GpuRow] = name("MODEL", lambda gpu: gpu.model)
    return [
        Column("GPU", lambda gpu: gpu.name + ("!" if gpu.broken else "")),
        Column("HISTORY", lambda gpu: _curve(gpu, live, max(_CURVE_MIN, columns // 5 - 12))),
        amount("UTIL", percent, lambda gpu: gpu.utilization_ratio),
        amount("MEMORY", size, lambda gpu: gpu.used_bytes),
        Column("TEMP", lambda gpu: UNKNOWN if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f}°C"),
        Column("POWER", lambda gpu: UNKNOWN if gpu.power_watts is None else f"{gpu.power_watts:.0f}W"),
        *([model] if len({gpu.model for gpu in gpus}) > 1 else []),
        amount("FREE", size, lambda gpu: gpu.free_bytes),
        name("HELD BY", lambda gpu: gpu.free_for),
    ]


# --- rows -------------------------------------------------------------------------------------------------------------


def _key(row: ContainerRow) -> RowKey:
    return row.node, row.device.uuid, row.container, row.owner, row.pid, row.work, row.finding and row.finding.reason


def _place(live: Live, rows: Sequence[ContainerRow]) -> int | None:
    """Return where the selected row is now, also if it has another finding; `None` if it is gone."""
    keys = [_key(row) for row in rows]
    alike = (place for place, key in enumerate(keys) if key[:-1] == live.selected[:-1])
    return keys.index(live.selected) if live.selected in keys else next(alike, None)


def _sort_rows(rows: list[ContainerRow], live: Live) -> list[ContainerRow]:
    rows = sort_rows(rows, SORT_KEYS["memory"], reverse=False)  # among equals
    if live.order != "finding":
        return sort_rows(rows, {**SORT_KEYS, **sort_keys(_COLUMNS)}[live.order], reverse=live.reverse)
    wrong = [(row.finding, row) for row in rows if row.finding]
    wrong.sort(key=lambda pair: worst_first(pair[0]), reverse=live.reverse)
    return [*(row for _, row in wrong), *(row for row in rows if not row.finding)]


_OF_TOP = {column.title: column for column in (*COLUMNS, *PROCESS_COLUMNS)}


def _top_columns(*titles: str) -> Iterator[Column[ContainerRow]]:
    """Return columns of the table of `top`."""
    return (_OF_TOP[title]._replace(wide=False, drop_rank=0, shortened_last=False) for title in titles)


def _waste(row: ContainerRow) -> int | None:
    return row.finding.memory_bytes if row.finding else None


_COLUMNS: tuple[Column[ContainerRow], ...] = (
    Column("FINDING", lambda row: shown_finding(row.finding) if row.finding else "", name=True),
    Column("FOR", lambda row: row.finding_age),
    Column("DEVICE", lambda row: row.device.name.partition(" ")[0]),
    *_top_columns("PID", "PROCESS", "NAMESPACE", "POD", "CONTAINER"),
    Column("WASTE", lambda row: size(_waste(row)) if row.finding else "", _waste, largest_first=True),
    *_top_columns("MEMORY", "GRANTED", "PEAK", "SM", "PROCESSES"),
    Column("OWNER", lambda row: shown_owner(row) if row.listed or row.processes else ""),
    Column("WHY", lambda row: row.finding.why if row.finding else "", name=True),
)
_OF_PROCESSES, _OF_CONTAINERS = ("PID", "PROCESS"), ("WASTE", "GRANTED", "PEAK", "PROCESSES")
"""Titles of columns that only one of the two views has."""
_CELLS = {
    **{"GPU": 3, "HISTORY": 8, "UTIL": 4, "MEMORY": 7, "MODEL": 16, "TEMP": 4, "POWER": 5, "FREE": 7, "HELD BY": 35},
    **{"FINDING": 9, "FOR": 5, "DEVICE": 6, "PID": 7, "PROCESS": 10, "NAMESPACE": 9, "CONTAINER": 9, "WASTE": 7},
    **{"GRANTED": 7, "PEAK": 7, "SM": 4, "PROCESSES": 9, "OWNER": 10, "WHY": 24},
}
"""Cells that a column needs, by title. Other columns have names, and need a fifth of the window, at most 15."""
_FIRST_TO_GO = (
    *("HISTORY", "POWER", "TEMP", "MODEL", "HELD BY"),
    *("WHY", "OWNER", "PROCESSES", "PEAK", "GRANTED", "CONTAINER", "FOR", "NAMESPACE", "WASTE"),
    *("NODE", "PROCESS", "DEVICE", "SM", "FINDING", "MEMORY", "PID", "FREE"),
)
"""Titles of columns that a narrow window has no room for, in this order."""


def _visible_columns(columns: Sequence[Column[R]], width: int, order: str = "") -> list[Column[R]]:
    """Return the columns that have room; always the one of the order.

    Does not look at the rows: otherwise columns would come and go while the reader looks at them.
    """
    visible = list(columns)
    for title in _FIRST_TO_GO:
        cells = sum(_CELLS.get(column.title, min(width // 5, 15)) for column in visible)
        if cells + len(visible) - 1 <= width:
            break
        visible = [column for column in visible if column.title != title or column.key == order]
    return visible


def _pod_text(row: ContainerRow, containers: int) -> str:
    return f"{row.pod}/{row.container.container if containers > 1 else ''}".rstrip("/") or UNKNOWN


def _row_lines(
    rows: Sequence[ContainerRow], all_rows: Sequence[ContainerRow], live: Live, shape: Shape, *, fleet: bool
) -> tuple[str, list[str]]:
    """Return the line of titles and those of the rows. The titles are those of all rows, whatever the filter."""
    screen = shape.screen
    width = max((screen.columns or 80) - 2, 1)  # beside the cursor
    hidden = _OF_CONTAINERS if live.processes else _OF_PROCESSES
    columns = [column for column in _COLUMNS if column.title not in hidden or column.key == live.order]
    visible = _visible_columns(add_node_column(columns, fleet=fleet), width, live.order)
    if all(column.title != "CONTAINER" for column in visible):  # POD has it if the pod has two
        counts = Counter(name.pod_name for name in {row.container for row in all_rows if row.container.container})
        visible = [
            column._replace(read=lambda row: _pod_text(row, counts[row.container.pod_name]))
            if column.title == "POD"
            else column
            for column in visible
        ]
    titles, *lines = _fixed_table(visible, rows or all_rows, shape, width)
    # A GPU's fault takes the place of the columns of containers.
    starts = [titles.index(title) for title in ("PID", "NAMESPACE", "POD") if f" {title}" in titles]
    fault_start = min(starts, default=0)
    lines_of_rows = []
    for place, (row, line) in enumerate(zip(rows, lines, strict=False)):
        if row.finding and row.finding.finding in GPU_FINDINGS:
            line = line[:fault_start] + shortened(printable(row.finding.why), max(width - fault_start, 1))
        at_cursor = place == live.cursor
        colour = "reverse" if at_cursor else finding_colour(row.finding) if row.finding else ""
        lines_of_rows.append(screen.paint(f"{'>' if at_cursor else ' '} {line}", colour))
    return screen.paint(f"  {titles}", "bold"), lines_of_rows


def details(row: ContainerRow, maps: NodeMaps, shape: Shape) -> Iterator[str]:
    """Return what is known of a row: what is wrong, since when, what to do; grant, use and processes."""
    columns, screen = shape.screen.columns or 80, shape.screen
    who = "/".join(filter(None, (*row.container[:2], row.container.container))) or row.pod or shown_owner(row)
    fault = row.finding is not None and row.finding.finding in GPU_FINDINGS
    place = f" on {row.device.name}" if row.device.uuid else ""
    yield screen.paint(shortened(f"GPU {row.device.name}" if fault else f"{printable(who)}{place}", columns), "bold")
    if finding := row.finding:
        sentence = f"{shown_finding(finding)} for {row.finding_age}: {finding.why}."
        yield from (screen.paint(line, finding_colour(finding)) for line in wrapped(printable(sentence), columns))
        yield from wrapped(printable(advice(finding.remedy)), columns)
    yield ""
    for title, text in _fields(row):
        if text != UNKNOWN:
            yield from wrapped(f"{title:<12}{printable(text)}", columns)
    node = next(node for node in maps.maps if node.name == row.node)
    of_row = [
        process
        for process in process_rows(node)
        if (process.device.uuid, process.container, process.owner, process.work)
        == (row.device.uuid, row.container, row.owner, row.work)
        and process.pid is not None
    ]
    if of_row:
        yield ""
        yield from table(_PROCESSES, of_row, replace(shape, wide=False, headers=True)).splitlines()


_PROCESSES = [column for column in PROCESS_COLUMNS if column.title in ("PID", "TYPE", "PROCESS", "MEMORY", "SM")]


def _fields(row: ContainerRow) -> Iterator[tuple[str, str]]:
    """Return what is known of the use and the grant of a row; `-` if nothing is."""
    slots = ", ".join(f"{counted(slots, 'slot')} of {resource}" for resource, slots in row.slots.items())
    granted = [size(row.granted_bytes), gpus(row.gpus), slots]
    yield "granted", ", ".join(text for text in granted if text not in ("", UNKNOWN)) or UNKNOWN
    of_device = f" of {size(row.device.total_bytes)}" if row.device.total_bytes is not None else ""
    yield "memory", UNKNOWN if row.memory_bytes is None else f"{size(row.memory_bytes)}{of_device}"
    yield "peak", size(row.memory_peak_bytes)
    yield "SM", percent(row.busy_ratio)
    yield "last active", UNKNOWN if row.last_active is None else f"{age(row.device.collected_at - row.last_active)} ago"
    yield "owner", shown_owner(row) if row.listed or row.processes else UNKNOWN
    yield "device", " ".join(filter(None, (row.device.uuid, row.device.model))) or UNKNOWN


# --- the window -------------------------------------------------------------------------------------------------------


class TopWindow:
    """What was last answered, and how the reader wants it shown."""

    def __init__(self, view: View) -> None:
        self._view = view
        shape = view.shape
        self._live = Live(order=shape.order or "finding", reverse=shape.reverse, processes=shape.processes)
        self._live = self._live._replace(query=" ".join(shape.words))
        self._maps: NodeMaps | None = None
        self._failed = ""
        self._page = 1

    def take(self, event: NodeMaps | FatalError | str) -> bool:
        """Take an answer, a failure or a key. Return whether the program goes on."""
        if isinstance(event, str):
            key = (
                event if self._live.typing and len(event) == 1 and event.isprintable() else KEY_NAMES.get(event, event)
            )
            live = pressed(self._live, key, self._page)
            self._live = live or self._live
            return live is not None
        if isinstance(event, FatalError):
            self._failed, self._live = one_line(event), remembered(self._live, None)
        else:
            self._maps, self._failed, self._live = event, "", remembered(self._live, event)
        return True

    def paint(self) -> None:
        size, screen = shutil.get_terminal_size(), screen_of_stdout()
        columns = max(size.columns, 1)
        head = [screen.paint(self._title(columns), "bold")]
        head += [screen.paint(line, "red") for line in self._notice_lines(columns, max(size.lines // _NOTICES_PART, 1))]
        head += lines_above((), self._failed, screen, columns, answered=self._maps is not None)
        if self._maps is None:
            lines = head if self._failed else [*head, "", "Waiting for the first answer …"]
        else:
            shape = replace(self._view.shape, screen=screen)
            lines, self._page, self._live = frame(self._maps, self._live, shape, head, size.lines)
        print(end=repainted(lines, columns, size.lines), flush=True)

    def _title(self, columns: int) -> str:
        """Return the node, the order and what else has room. A long name of the node is shortened."""
        parts = [f"by {self._live.order}{', reversed' if self._live.reverse else ''}", time.strftime("%H:%M:%S")]
        nodes = self._maps.maps if self._maps else ()
        node = f"{len(nodes)} nodes" if self._maps and self._maps.fleet else "".join(node.name for node in nodes)
        if len(nodes) == 1:
            gpus, models = nodes[0].gpus, {gpu.model for gpu in nodes[0].gpus}
            parts.insert(1, f"{len(gpus)} x {models.pop() or 'GPU'}" if len(models) == 1 else f"{len(gpus)} GPUs")
        parts = [*map(printable, (*parts, f"every {self._view.interval_seconds:g}s", self._view.head))]
        text = ""
        for part in parts:
            if cells(text) + cells(part) + 2 + min(cells(node), 20) <= columns:
                text += f"  {part}"
        return shortened(printable(node), columns - cells(text)) + text

    def _notice_lines(self, columns: int, lines_max: int) -> list[str]:
        """Return what is wrong, in at most so many lines: a small window has room for devices too."""
        maps = self._maps
        notices = [] if maps is None else [*notices_of(maps, self._view), collected_long_ago(maps, time.time())]
        lines = [line for notice in notices if notice for line in wrapped(notice, max(columns - 2, 1))]
        return lines if len(lines) <= lines_max else [*lines[: lines_max - 1], f"{lines[lines_max - 1]} …"]
