"""Rows of cells as aligned lines, as kubectl aligns them; on a narrow terminal long names are shortened to fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumap.terminal import PIPE, Screen, cells, contained, printable, shortened, wrapped

_SQUEEZES = ((3, 1 << 30), (3, 12), (2, 12), (2, 9), (1, 9), (1, 6), (1, 4))
"""Cells between columns, and cells that are left of a long name: the first of these that fits the terminal."""
_ROOMY = 5
"""So many of them go before a sentence gets lines of its own."""
_SENTENCE, _INDENT = 24, 4
"""Cells that a sentence takes beside its row at least; and where it stands when it has none left."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a user wants a table. `order` is a column to sort by, empty for the table's own order.

    `namespace` is the one that alone is shown, empty for all.
    """

    wide: bool = False
    headers: bool = True
    order: str = ""
    reverse: bool = False
    processes: bool = False
    idle_after_seconds: float = 300.0
    namespace: str = ""
    screen: Screen = field(default=PIPE)


class Column(NamedTuple):
    """`name`: it holds names, which may be shortened. `wide`: it is shown with -o wide alone.

    `spare`: a narrow terminal goes without it. `sentence`: the last one, whose text goes on below where it is narrow.
    """

    title: str
    name: bool = False
    wide: bool = False
    spare: bool = False
    sentence: bool = False


class Row(NamedTuple):
    """Cells by column. A `colour` stands on the cell of column `coloured`, or on all of them."""

    cells: Sequence[str]
    colour: str = ""
    coloured: int | None = None


def aligned(columns: Sequence[Column], rows: Iterable[Row], shape: Shape) -> str:
    """The table as text without an end of line."""
    rows = list(rows)
    chosen = [number for number, column in enumerate(columns) if shape.wide or not column.wide]
    if shape.screen.columns is not None and not shape.wide and _least(columns, chosen, rows) > shape.screen.columns:
        chosen = [number for number in chosen if not columns[number].spare]
    lines = [[contained(row.cells[number]) for number in chosen] for row in rows]
    head = [[columns[number].title for number in chosen]] if shape.headers else []
    sentences = columns[chosen[-1]].sentence
    widths = [max(map(cells, column), default=0) for column in zip(*head, *lines, strict=True)]
    names = [place for place, number in enumerate(chosen) if columns[number].name]
    widths, gap, indent = _laid_out(widths, names, shape.screen, sentences=sentences)
    shown = [_line(titles[: len(widths)], widths, gap) for titles in head]
    for row, line in zip(rows, lines, strict=True):
        place = chosen.index(row.coloured) if row.coloured in chosen else None
        said = []
        if sentences and shape.screen.columns is not None:
            said = list(wrapped(line[-1], shape.screen.columns - indent))
        if said and len(widths) == len(line):
            line = [*line[:-1], said.pop(0)]
        shown.append(_line(line[: len(widths)], widths, gap, shape.screen, row.colour, place))
        shown += [" " * indent + more for more in said]
    return "\n".join(shown)


def notes(texts: Iterable[str], screen: Screen, colour: str = "") -> str:
    """Sentences, a line each; on a terminal broken between words."""
    lines: list[str] = []
    for text in map(printable, texts):
        lines += [text] if screen.columns is None else wrapped(text, screen.columns)
    return "\n".join(screen.paint(line, colour) for line in lines)


def joined(blocks: Iterable[str]) -> str:
    """Blocks of lines with an empty line between, and an end of line."""
    return "\n\n".join(block for block in blocks if block) + "\n"


def _least(columns: Sequence[Column], chosen: Sequence[int], rows: Sequence[Row]) -> int:
    """Cells that a table takes whose names are short, but can still be told apart."""
    gap, shortest = _SQUEEZES[_ROOMY - 1]
    widest = {
        number: max([len(columns[number].title), *(cells(contained(row.cells[number])) for row in rows)])
        for number in chosen
        if not columns[number].sentence
    }
    least = [min(width, shortest) if columns[number].name else width for number, width in widest.items()]
    return sum(least) + gap * (len(least) - 1)


def _laid_out(
    widths: list[int], names: Sequence[int], screen: Screen, *, sentences: bool
) -> tuple[list[int], int, int]:
    """Widths of columns, the gap between them, and where sentences stand: in the last column, or below their row."""
    if screen.columns is None or not sentences:
        return *_fitting(widths, names, screen, len(_SQUEEZES)), 0
    asked = widths[-1]
    beside, gap = _fitting([*widths[:-1], min(asked, _SENTENCE)], names, screen, _ROOMY)
    indent = sum(beside[:-1]) + gap * (len(beside) - 1)
    if indent + beside[-1] <= screen.columns:
        return [*beside[:-1], min(asked, screen.columns - indent)], gap, indent
    return *_fitting(widths[:-1], names, screen, len(_SQUEEZES)), _INDENT


def _fitting(widths: list[int], names: Sequence[int], screen: Screen, squeezes: int) -> tuple[list[int], int]:
    """The longest names give room first, and no more than it takes."""
    gap = _SQUEEZES[0][0]
    if screen.columns is None:
        return widths, gap
    widths = list(widths)
    for gap, shortest in _SQUEEZES[:squeezes]:
        while sum(widths) + gap * (len(widths) - 1) > screen.columns:
            longest = max(names, key=lambda place: widths[place], default=None)
            if longest is None or widths[longest] <= shortest:
                break
            widths[longest] -= 1
        else:
            break
    return widths, gap


def _line(
    line: Sequence[str],
    widths: Sequence[int],
    gap: int,
    screen: Screen = PIPE,
    colour: str = "",
    place: int | None = None,
) -> str:
    parts = list(_padded(line, widths))
    parts[-1] = parts[-1].rstrip(" ")
    if place is not None:
        parts[place] = screen.paint(parts[place], colour)
    text = (" " * gap).join(parts)
    if place is None:
        text = screen.paint(text, colour)
    return text.rstrip(" ")


def _padded(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for text, width in zip(line, widths, strict=True):
        taken = cells(text)
        if taken > width:
            text = shortened(text, width)
            taken = cells(text)
        yield text + " " * (width - taken)
