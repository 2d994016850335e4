"""Rows of cells as aligned lines, as kubectl aligns them; on a narrow terminal long names are shortened to fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumap.cli.terminal import PIPE, Screen, all_contained, cells, shortened, widest, wrapped
from gpumap.model.text import printable

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
    """The table as text without an end of line. What can be is done by column: a cluster has 100 000 rows."""
    rows, screen = list(rows), shape.screen
    chosen = [number for number, column in enumerate(columns) if shape.wide or not column.wide]
    texts = {number: all_contained([row.cells[number] for row in rows]) for number in chosen}
    taken = {number: widest(texts[number]) for number in chosen}
    if screen.columns is not None and not shape.wide and _least(columns, taken) > screen.columns:
        chosen = [number for number in chosen if not columns[number].spare]
    lines = [[columns[number].title, *texts[number]] if shape.headers else texts[number] for number in chosen]
    sentences = columns[chosen[-1]].sentence
    widths = [max(taken[number], len(columns[number].title) if shape.headers else 0) for number in chosen]
    names = [place for place, number in enumerate(chosen) if columns[number].name]
    widths, gap, indent = _laid_out(widths, names, screen, sentences=sentences)
    below: list[list[str]] = []
    if sentences and screen.columns is not None:
        below = [list(wrapped(text, screen.columns - indent)) for text in texts[chosen[-1]]]
        if len(widths) == len(chosen):
            lines[-1] = [*lines[-1][: len(lines[-1]) - len(rows)], *(said.pop(0) if said else "" for said in below)]
    filled = [_filled(column, width) for column, width in zip(lines, widths, strict=False)]
    shown = _joined(filled, gap)
    if screen.colours:
        cells_of = list(zip(*filled, strict=True))[len(shown) - len(rows) :]
        places = {number: place for place, number in enumerate(chosen)}
        shown[len(shown) - len(rows) :] = [
            _painted(parts, gap, screen, row.colour, None if row.coloured is None else places.get(row.coloured))
            for row, parts in zip(rows, cells_of, strict=True)
        ]
    if not any(below):
        return "\n".join(shown)
    below = [[]] * (len(shown) - len(rows)) + below
    return "\n".join(
        "\n".join([line, *(" " * indent + more for more in said)]) for line, said in zip(shown, below, strict=True)
    )


def notes(texts: Iterable[str], screen: Screen, colour: str = "") -> str:
    """Sentences, a line each; on a terminal broken between words."""
    lines: list[str] = []
    for text in map(printable, texts):
        lines += [text] if screen.columns is None else wrapped(text, screen.columns)
    return "\n".join(screen.paint(line, colour) for line in lines)


def joined(blocks: Iterable[str]) -> str:
    """Blocks of lines with an empty line between, and an end of line."""
    return "\n\n".join(block for block in blocks if block) + "\n"


def _least(columns: Sequence[Column], taken: Mapping[int, int]) -> int:
    """Cells that a table takes whose names are short, but can still be told apart. `taken` is by column."""
    gap, shortest = _SQUEEZES[_ROOMY - 1]
    widest_of = {
        number: max(len(columns[number].title), width)
        for number, width in taken.items()
        if not columns[number].sentence
    }
    least = [min(width, shortest) if columns[number].name else width for number, width in widest_of.items()]
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


def _filled(texts: Sequence[str], width: int) -> list[str]:
    """A column's texts, each in as many cells."""
    if "".join(texts).isascii() and widest(texts) <= width:
        return [text.ljust(width) for text in texts]
    return [one + " " * (width - cells(one)) for one in (shortened(text, width) for text in texts)]


def _joined(columns: Sequence[Sequence[str]], gap: int) -> list[str]:
    """The lines of columns."""
    between = " " * gap
    return [between.join(parts).rstrip(" ") for parts in zip(*columns, strict=True)]


def _painted(parts: Sequence[str], gap: int, screen: Screen, colour: str, place: int | None) -> str:
    """A line whose cell at `place` has a colour, or that has it as a whole."""
    cells_of = [*parts[:-1], parts[-1].rstrip(" ")]
    if place is not None:
        cells_of[place] = screen.paint(cells_of[place], colour)
    text = (" " * gap).join(cells_of)
    if place is None:
        text = screen.paint(text, colour)
    return text.rstrip(" ")
