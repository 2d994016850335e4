"""Lines of cells aligned as Go's text/tabwriter does with padding 2 and nothing else (AliyunContainerService/
gpushare-device-plugin, cmd/inspect/display.go: `NewWriter(os.Stdout, 0, 0, 2, ' ', 0)`). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

PADDING = 2


def tabulated(lines: Sequence[str]) -> str:
    """Lines with tabs in them, aligned, each with its end of line.

    A tab ends a cell. Cells above each other, with no line between that lacks one there, are a column: as wide as the
    widest, counted in characters whatever they take on a terminal, and two blanks. What follows a line's last tab is in
    no column; what stands before one is filled up even where nothing follows: such lines end in blanks.
    """
    cells = [line.split("\t") for line in lines]
    padded: list[list[str]] = [[] for _ in cells]
    for column in range(max(map(len, cells), default=1) - 1):
        for is_there, run in groupby(range(len(cells)), key=lambda number: len(cells[number]) - 1 > column):
            if is_there:
                numbers = list(run)
                width = max(len(cells[number][column]) for number in numbers) + PADDING
                for number in numbers:
                    padded[number].append(cells[number][column].ljust(width))
    return "".join("".join([*head, line[-1]]) + "\n" for head, line in zip(padded, cells, strict=True))
