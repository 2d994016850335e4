"""Text as a terminal shows it: made safe, measured in cells, shortened, colored.

Text from outside must not control the terminal, begin a new line, or move the text next to it. Pure.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumap.model.formatting import ELLIPSIS, printable

_LEFT_TO_RIGHT_MARK = "\u200e"
_RESET = "\x1b[0m"
_CODES = {
    "red": "\x1b[31m",
    "yellow": "\x1b[33m",
    "green": "\x1b[32m",
    "cyan": "\x1b[36m",
    "bold": "\x1b[1m",
    "reverse": "\x1b[7m",
}


@dataclass(frozen=True, slots=True)
class Screen:
    """Where text is shown. `columns` is `None` where it goes into a file or a pipe: then nothing is shortened."""

    columns: int | None = None
    colours: bool = False

    def paint(self, text: str, colour: str) -> str:
        """Colour a text, which must be printable already. Colour never says what the words do not."""
        return f"{_CODES[colour]}{text}{_RESET}" if self.colours and colour and text else text


PIPE = Screen()


def is_printable(document: str) -> bool:
    """Whether nothing but the ends of its lines steers a terminal."""
    return all(line.isprintable() for line in document.split("\n"))


def escape_terminal_controls(document: str) -> str:
    """Give a JSON document with what would steer a terminal written as JSON's own escapes: it means the same."""
    if is_printable(document):
        return document
    return "".join(
        character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1]
        for character in document
    )


def contained(text: str) -> str:
    """Give a printable text for a cell of a table; one written from right to left ends before the next cell begins.

    Without the mark, a terminal that reorders such text takes the numbers after it along.
    """
    text = printable(text)
    if text.isascii() or not any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in text):
        return text
    return text + _LEFT_TO_RIGHT_MARK


def all_contained(texts: Sequence[str]) -> list[str]:
    """The same of many texts: most are plain, which is seen of all of them at once."""
    together = "".join(texts)
    return list(texts) if together.isascii() and together.isprintable() else list(map(contained, texts))


def widest(texts: Sequence[str]) -> int:
    """How many cells the widest of many texts takes; 0 where there is none."""
    return max(map(len if "".join(texts).isascii() else cells, texts), default=0)


def cells(text: str) -> int:
    """How many cells of a terminal a text takes: 2 for East Asian wide characters, 0 for what is set over others."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def shortened(text: str, room: int) -> str:
    """Give the text with its middle left out where it takes more than `room` cells."""
    if cells(text) <= room:
        return text
    if room <= 1:
        return ELLIPSIS[:room]
    tail_room = (room - 1) // 2
    head = "".join(_start(text, room - 1 - tail_room))
    tail = "".join(reversed([*_start(text[::-1], tail_room)]))
    return head + ELLIPSIS + tail.lstrip("".join(character for character in tail if _cells(character) == 0))


def cropped(text: str, room: int) -> str:
    """Return the text with its end left out if it takes more than `room` cells."""
    return text if painted_cells(text) <= room else "".join(_start(text, room - 1)) + ELLIPSIS[: max(room, 0)]


def painted_cells(text: str) -> int:
    """Return how many cells a text with colours takes."""
    return cells(_PAINT.sub("", text))


def wrapped(text: str, room: int) -> Iterator[str]:
    """Give the text in lines of at most `room` cells, broken at blanks; a word that is longer is cut."""
    line = ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if cells(joined) <= room:
            line = joined
            continue
        if line:
            yield line
        while cells(word) > room and (head := "".join(_start(word, room))):
            yield head
            word = word[len(head) :]
        line = word
    if line:
        yield line


_HOME, _TO_LINE_END, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
_PAINT = re.compile(r"(\x1b\[\d*m)")


def repainted(lines: Sequence[str], columns: int, height: int) -> str:
    """Return what paints lines over the last frame. A taller frame would scroll, and the next begin in its middle."""
    if len(lines) > height:
        lines = [*lines[: height - 1], f"… and {len(lines) - height + 1} more lines"]
    cut_lines = [_cut(line, columns) for line in lines]
    # A line that fills its row needs no clearing: the cursor is still on its last character.
    fills = (painted_cells(line) == columns for line in cut_lines)
    return (
        _HOME
        + "\n".join(line + ("" if full else _TO_LINE_END) for line, full in zip(cut_lines, fills, strict=True))
        + _TO_END
    )


def _cut(line: str, columns: int) -> str:
    """Return the part of a line that fits a row, with all of its colours: a wrapped line would move all below it."""
    parts, cells_left = [], columns
    for piece in _PAINT.split(line):
        if _PAINT.fullmatch(piece):
            parts.append(piece)
            continue
        for character in piece:
            cells_left -= cells(character)
            if cells_left < 0:
                break
            parts.append(character)
    return "".join(parts)


def _start(text: str, room: int) -> Iterator[str]:
    """The characters from the start that fit."""
    for character in text:
        room -= _cells(character)
        if room < 0:
            return
        yield character


def _cells(character: str) -> int:
    # As wcwidth has it: marks over other characters, and the vowels and finals of conjoining Hangul.
    if unicodedata.category(character) in ("Mn", "Me", "Cf") or "\u1160" <= character <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
