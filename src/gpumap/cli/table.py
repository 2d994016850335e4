"""A table is a list of `Column`s: the cells, the colours and the keys of --sort-by come from it, and nowhere else.

Lines are aligned as kubectl aligns them. On a narrow terminal long names are shortened to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from gpumap.cli.terminal import PIPE, Screen, all_contained, cells, cropped, painted_cells, shortened, widest, wrapped
from gpumap.model.errors import FatalError
from gpumap.model.formatting import UNKNOWN, printable
from gpumap.model.terms import ContainerName

R = TypeVar("R")
V = TypeVar("V", int, float)
R_contra = TypeVar("R_contra", contravariant=True)
SortValue = str | float | None

_SQUEEZES = ((3, 1 << 30), (3, 12), (2, 12), (2, 9), (1, 9), (1, 6), (1, 4), (1, 0))
"""Cells between columns, and remaining cells of a long name: the first pair that fits the terminal.

Different names stay different, except with the last pair. Titles are never shortened.
"""
GAPS_FIRST = (*((gap, 1 << 30) for gap in (3, 2, 1)), *_SQUEEZES[4:])
"""The same for a screen of fixed size: gaps give way before names."""
_SHORTEST = 4
_ROOMY = 3
"""This many of them are tried before a sentence gets lines of its own."""
_COMPARED_MAX = 500
"""So many names are compared: a screen shows fewer."""
_SENTENCE, _INDENT = 24, 4
"""The least number of cells of a sentence beside its row; and the indent of a sentence below its row."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a user wants a table. `order` is a key of --sort-by, empty for the table's own order.

    `namespace`: only its rows are shown; empty for all. `words`: only rows that match them. `sums_by`: a line for each
    namespace or node, not for each row.
    `source_flags`: flags with which another command asks the same source. `squeezes`: how gaps and names give way.
    """

    wide: bool = False
    headers: bool = True
    order: str = ""
    reverse: bool = False
    processes: bool = False
    sums_by: str = ""
    namespace: str = ""
    words: tuple[str, ...] = ()
    source_flags: str = ""
    squeezes: Sequence[tuple[int, int]] = _SQUEEZES
    screen: Screen = field(default=PIPE)


class Column(NamedTuple, Generic[R_contra]):
    """A column of a table, and all that one has to declare to add it.

    `read` returns the cell of a row. `sort` returns its value for --sort-by, under `sort_name` or the title in small
    letters; its order is from A to Z and from 0 up, or `largest_first`. `colour` returns the colour of the cell.
    `name`: the cells are names, which may be shortened. `shortened_last`: after other names. `wide`: only with -o wide.
    `drop_rank`: on a narrow terminal, the column with the largest rank is left out first, one with 0 never. Rows sorted
    by a column have it, on any terminal.
    `sentence`: the last column, its text continues below the row on a narrow terminal. `spans`: its text runs over
    empty cells to its right, and is cut off before the next text.
    """

    title: str
    read: Callable[[R_contra], str]
    sort: Callable[[R_contra], SortValue] | None = None
    largest_first: bool = False
    sort_name: str = ""
    colour: Callable[[R_contra], str] | None = None
    name: bool = False
    shortened_last: bool = False
    wide: bool = False
    drop_rank: int = 0
    sentence: bool = False
    spans: bool = False

    @property
    def key(self) -> str:
        """Its word of --sort-by."""
        return self.sort_name or self.title.lower()


def amount(
    title: str,
    text: Callable[[V | None], str],
    value: Callable[[R], V | None],
    *,
    wide: bool = False,
    drop_rank: int = 0,
) -> Column[R]:
    """Return a column of numbers, sorted by number, the largest first."""
    return Column(title, lambda row: text(value(row)), value, largest_first=True, wide=wide, drop_rank=drop_rank)


def name(title: str, value: Callable[[R], str | None], *, drop_rank: int = 0) -> Column[R]:
    """Return a column of names, sorted by name. Those of pods are shortened last: a user types them."""
    return Column(
        title, lambda row: value(row) or UNKNOWN, value, name=True, shortened_last=title == "POD", drop_rank=drop_rank
    )


NODE: Column[Any] = Column("NODE", lambda row: row.node, lambda row: row.node, name=True)


def add_node_column(columns: Sequence[Column[R]], *, fleet: bool) -> Sequence[Column[R]]:
    """Return the columns of a table; that of a fleet begins with the node."""
    return (NODE, *columns) if fleet else columns


def make_container_droppable(columns: Sequence[Column[R]], containers: Iterable[ContainerName]) -> Sequence[Column[R]]:
    """Return the columns. CONTAINER may be left out on a narrow terminal if no pod has two of them."""
    names = set(containers)
    if len({name.pod_name for name in names}) < len(names):
        return columns
    return [column._replace(drop_rank=2) if column.title == "CONTAINER" else column for column in columns]


class SortKey(NamedTuple, Generic[R_contra]):
    """A key of --sort-by."""

    value: Callable[[R_contra], SortValue]
    largest_first: bool


def sort_keys(columns: Iterable[Column[R]]) -> dict[str, SortKey[R]]:
    """Return the keys of --sort-by of these columns, by name."""
    return {column.key: SortKey(column.sort, column.largest_first) for column in columns if column.sort is not None}


def sort_rows(rows: Iterable[R], key: SortKey[R], *, reverse: bool) -> list[R]:
    """Sort rows; equal rows keep their order. Rows without a value are last, also in reverse."""
    known: list[tuple[str | float, R]] = []
    unknown: list[R] = []
    for row in rows:
        value = key.value(row)
        if value is None or value == "":
            unknown.append(row)
        else:
            known.append((value, row))
    known.sort(key=lambda pair: pair[0], reverse=key.largest_first != reverse)
    return [row for _, row in known] + unknown


# --- lines of text ----------------------------------------------------------------------------------------------------


_TABLE_MAX = 256 << 20
"""Characters. A cluster of 100 000 rows has a tenth of it."""


def refuse_huge(characters: int) -> None:
    """Raise FatalError for a table that no reader could use: an answer may be made to fill the memory."""
    if characters > _TABLE_MAX:
        raise FatalError(f"the table would have more than {_TABLE_MAX >> 20} MiB; use -o json")


class _TextColumn(NamedTuple):
    """A column whose cells are read: texts and colours by row. `width`: cells of the widest text."""

    column: Column[Any]
    texts: Sequence[str]
    colours: Sequence[str]
    width: int


class _Widths(NamedTuple):
    """Widths of the columns that stay beside each other, the gap between them, and where sentences begin."""

    columns: Sequence[int]
    gap: int
    indent: int


def table(
    columns: Sequence[Column[R]], rows: Sequence[R], shape: Shape, row_colour: Callable[[R], str] | None = None
) -> str:
    """Return the table as text without an end of line. `row_colour` is the colour of a whole line.

    Works column by column, because a cluster has 100 000 rows.
    """
    columns = [
        column._replace(wide=False, drop_rank=0) if column.sort and column.key == shape.order else column
        for column in columns
    ]
    text_columns = _drop_columns(
        [_read(column, rows, shape) for column in columns if shape.wide or not column.wide], shape
    )
    widths = _stretched(text_columns, _widths(text_columns, shape), shape)
    below: list[list[str]] = []
    if text_columns[-1].column.sentence and shape.screen.columns is not None:
        below = [list(wrapped(text, shape.screen.columns - widths.indent)) for text in text_columns[-1].texts]
        if len(widths.columns) == len(text_columns):
            text_columns[-1] = text_columns[-1]._replace(texts=[lines.pop(0) if lines else "" for lines in below])
    lines = _aligned(text_columns, widths, shape)
    head, body = lines[: len(lines) - len(rows)], lines[len(lines) - len(rows) :]
    if row_colour is not None:
        body = [shape.screen.paint(line, row_colour(row)) for line, row in zip(body, rows, strict=True)]
    if any(below):
        indent = " " * widths.indent
        body = [
            "\n".join([line, *(indent + text for text in texts_below)])
            for line, texts_below in zip(body, below, strict=True)
        ]
    return "\n".join([*head, *body])


def _read(column: Column[R], rows: Sequence[R], shape: Shape) -> _TextColumn:
    read = [column.read(row) for row in rows]
    refuse_huge(max(map(len, read), default=0) * len(read))
    texts = all_contained(read)
    colours = [column.colour(row) for row in rows] if column.colour is not None and shape.screen.colours else []
    return _TextColumn(column, texts, colours, widest(texts))


def _drop_columns(text_columns: list[_TextColumn], shape: Shape) -> list[_TextColumn]:
    """Leave out columns while the terminal is too narrow for different names to stay different.

    Leave out other columns, the last first, while it is too narrow for all titles.
    """
    columns = shape.screen.columns
    if columns is None or shape.wide:
        return _spanned(text_columns)
    while not _is_roomy(spanned := _spanned(text_columns), columns):
        place = max(range(len(text_columns)), key=lambda place: text_columns[place].column.drop_rank)
        if not text_columns[place].column.drop_rank:
            break
        del text_columns[place]
    columns_of_rows = [text_column for text_column in spanned if not text_column.column.sentence]
    spare = [text_column for text_column in columns_of_rows[1:] if text_column.column.key != shape.order]
    while spare and _narrowest(columns_of_rows) > columns:
        columns_of_rows.remove(spare[-1])
        spanned.remove(spare.pop())
    return spanned


def _narrowest(text_columns: Sequence[_TextColumn]) -> int:
    """Return the cells of a line in which all names are as short as they can be."""
    return (
        sum(
            max(_SHORTEST if text_column.column.name else text_column.width, len(text_column.column.title))
            for text_column in text_columns
        )
        + len(text_columns)
        - 1
    )


def _is_roomy(text_columns: Sequence[_TextColumn], columns: int) -> bool:
    gap, _ = _SQUEEZES[_ROOMY - 1]
    return (
        sum(0 if text_column.column.sentence else _least(text_column) for text_column in text_columns)
        + gap * (len(text_columns) - 1)
        <= columns
    )


def _spanned(text_columns: list[_TextColumn]) -> list[_TextColumn]:
    """Return the columns. A text that runs over the empty cell beside it needs no width of its own."""
    return [
        text_column._replace(
            width=widest([text for text, right in zip(text_column.texts, beside.texts, strict=True) if right])
        )
        if text_column.column.spans
        else text_column
        for text_column, beside in zip(text_columns, [*text_columns[1:], text_columns[-1]], strict=True)
    ]


def _least(text_column: _TextColumn) -> int:
    """Return the least width of a column that is easy to read."""
    _, shortest = _SQUEEZES[_ROOMY - 1]
    if not text_column.column.name:
        return max(text_column.width, len(text_column.column.title))
    return max(
        min(_floor(text_column, shortest), text_column.width), _distinct(text_column), len(text_column.column.title)
    )


def _floor(text_column: _TextColumn, shortest: int) -> int:
    """Return the number of cells that are left of a long name."""
    return shortest * 2 if text_column.column.shortened_last else shortest


def _distinct(text_column: _TextColumn) -> int:
    """Return the least width of a column of names in which no two become the same."""
    names = set(text_column.texts)
    if len(names) > _COMPARED_MAX:
        return 0
    widths = range(text_column.width)
    return next(
        (width for width in widths if len({shortened(name, width) for name in names}) == len(names)), text_column.width
    )


def _widths(text_columns: Sequence[_TextColumn], shape: Shape) -> _Widths:
    """Return the widths; without that of the last column if its sentences are below their rows."""
    columns = shape.screen.columns
    widths = [
        max(text_column.width, len(text_column.column.title) if shape.headers else 0) for text_column in text_columns
    ]
    if columns is None:
        return _Widths(widths, _SQUEEZES[0][0], 0)
    names = (
        {}
        if shape.wide
        else {
            place: (text_column, _distinct(text_column))
            for place, text_column in enumerate(text_columns)
            if text_column.column.name
        }
    )
    if not text_columns[-1].column.sentence:
        return _Widths(*_fitting(widths, names, columns, shape.squeezes), 0)
    sentence_width = widths[-1]
    beside, gap = _fitting([*widths[:-1], min(sentence_width, _SENTENCE)], names, columns, _SQUEEZES[:_ROOMY])
    indent = sum(beside[:-1]) + gap * (len(beside) - 1)
    if indent + beside[-1] <= columns:
        return _Widths([*beside[:-1], min(sentence_width, columns - indent)], gap, indent)
    return _Widths(*_fitting(widths[:-1], names, columns, _SQUEEZES), _INDENT)


def _fitting(
    widths: list[int], names: Mapping[int, tuple[_TextColumn, int]], columns: int, squeezes: Sequence[tuple[int, int]]
) -> tuple[list[int], int]:
    """Shorten the longest names first, `shortened_last` columns last, and only as much as necessary.

    `names` are the columns that may be shortened, each with the width in which its names stay different.
    """
    widths, gap = list(widths), 0
    for gap, shortest in squeezes:
        least_widths = {
            place: max(
                *((_floor(text_column, shortest), distinct) if shortest else (_SHORTEST,)),
                len(text_column.column.title),
            )
            for place, (text_column, distinct) in names.items()
        }
        while sum(widths) + gap * (len(widths) - 1) > columns:
            longest = max(
                (place for place in names if widths[place] > least_widths[place]),
                key=lambda place: (not names[place][0].column.shortened_last, widths[place]),
                default=-1,
            )
            if longest < 0:
                break
            widths[longest] -= 1
        else:
            break
    return widths, gap


def _stretched(text_columns: Sequence[_TextColumn], widths: _Widths, shape: Shape) -> _Widths:
    """Return the widths with room for the longest text that runs over empty cells."""
    place = next((place for place, text_column in enumerate(text_columns) if text_column.column.spans), None)
    if place is None:
        return widths
    columns, texts = list(widths.columns), text_columns[place].texts
    rows = [row for row, text in enumerate(texts) if text]
    ends = (end for end in range(place + 1, len(columns)) if any(text_columns[end].texts[row] for row in rows))
    end = next(ends, len(columns))
    room = sum(columns[place:end]) + widths.gap * (end - place - 1)
    spare = math.inf if shape.wide else (shape.screen.columns or 0) - sum(columns) - widths.gap * (len(columns) - 1)
    columns[end - 1] += int(max(min(widest([texts[row] for row in rows]) - room, spare), 0))
    return widths._replace(columns=columns)


def _aligned(text_columns: Sequence[_TextColumn], widths: _Widths, shape: Shape) -> list[str]:
    """Return the line of titles and those of the rows."""
    refuse_huge((sum(widths.columns) + widths.gap) * len(text_columns[0].texts))
    filled = []
    for text_column, width in zip(
        text_columns, widths.columns, strict=False
    ):  # sentences below their rows have no width
        texts = (
            [text.ljust(width) for text in text_column.texts]
            if text_column.column.spans
            else _filled(text_column.texts, width)
        )
        if text_column.colours:
            texts = texts if text_column is not text_columns[-1] else [text.rstrip(" ") for text in texts]
            texts = list(map(shape.screen.paint, texts, text_column.colours))
        filled.append([*_filled([text_column.column.title], width), *texts] if shape.headers else texts)
    between = " " * widths.gap
    if not any(
        text_column.width < widest(text_column.texts) for text_column in text_columns if text_column.column.spans
    ):
        return [between.join(parts).rstrip(" ") for parts in zip(*filled, strict=True)]
    starts = [sum(widths.columns[:place]) + widths.gap * place for place in range(len(filled))]
    return [_run_over(parts, starts, widths.gap) for parts in zip(*filled, strict=True)]


def _run_over(parts: Sequence[str], starts: Sequence[int], gap: int) -> str:
    """Return a line in which a text may take the place of the empty cells to its right."""
    line = ""
    for text, start in zip(parts, starts, strict=True):
        if text.strip(" "):
            line = cropped(line, start - gap)
            line += " " * (start - painted_cells(line)) + text.rstrip(" ")
    return line


def _filled(texts: Sequence[str], width: int) -> list[str]:
    """Return a column's texts, each in `width` cells."""
    if "".join(texts).isascii() and widest(texts) <= width:
        return [text.ljust(width) for text in texts]
    return [text + " " * (width - cells(text)) for text in (shortened(text, width) for text in texts)]


# --- blocks below tables ----------------------------------------------------------------------------------------------


def notes(texts: Iterable[str], screen: Screen, colour: str = "") -> str:
    """Return sentences, a line each; on a terminal broken between words."""
    lines: list[str] = []
    for text in map(printable, texts):
        lines += [text] if screen.columns is None else wrapped(text, screen.columns)
    return "\n".join(screen.paint(line, colour) for line in lines)


def join_blocks(blocks: Iterable[str]) -> str:
    """Return blocks of lines with an empty line between, and an end of line."""
    return "\n\n".join(block for block in blocks if block) + "\n"
