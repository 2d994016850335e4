"""Shows what was seen of nodes once or again and again: in a table's words, as JSON or YAML, in place on a terminal.

A watch outlives an agent's failures; a single look does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import yaml

from gpumap.cli.node_documents import Seen, Sights
from gpumap.cli.reports import Report
from gpumap.cli.signals import until_stopped
from gpumap.cli.tables import Shape
from gpumap.cli.tables.unknowns import blind, few, is_blind
from gpumap.cli.terminal import PIPE, Screen, cells, escape_terminal_controls, wrapped
from gpumap.cli.words import age
from gpumap.model.document import Document
from gpumap.model.errors import FatalError
from gpumap.model.text import printable

_HOME, _TO_LINE_END, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
_PAINT = re.compile(r"(\x1b\[\d*m)")
_OLD_SECONDS = 60.0
"""What is older is not shown without a word; nor what is older than two collections, where those are rare."""
_MALFORMED = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError, IndexError)


@dataclass(frozen=True, slots=True)
class View:
    """A report as its reader wants it. `head` says above a watch what was asked."""

    report: Report
    form: str
    shape: Shape
    head: str
    watch: bool
    interval_seconds: float


def run(sights: Sights, view: View) -> int:
    """Show it, until that is done or a signal comes. Gives the exit code."""
    return asyncio.run(until_stopped(_show(sights, view)))


async def _show(sights: Sights, view: View) -> int:
    """Print the first sight, or each. Gives 1 where a node is missing, or neither its kubelet nor NVML answers."""
    take_any_text()
    painter = _Painter(view) if view.watch else None
    try:
        async with contextlib.aclosing(sights):
            async for found in sights:
                if painter is not None:
                    painter.paint(found)
                    continue
                if isinstance(found, FatalError):
                    raise found
                found, text, beside = _read(found, view, screen_of_stdout())
                print(end=text, flush=True)
                _tell(beside)
                warn_if_stale(found)
                return 1 if found.missing or any(map(is_blind, found.documents)) else 0
    finally:
        if painter is not None:
            painter.leave()
    return 1


def screen_of_stdout() -> Screen:
    """A terminal's width, and colours unless NO_COLOR or TERM=dumb say no; in a pipe neither."""
    if not sys.stdout.isatty():
        return PIPE
    plain = bool(os.environ.get("NO_COLOR")) or _is_dumb()
    return Screen(columns=max(shutil.get_terminal_size().columns, 1), colours=not plain)


def take_any_text() -> None:
    """Names come from outside, and not every terminal can write them. Raises FatalError where none can be."""
    if sys.stdout is None:
        raise FatalError("standard output is closed: nothing can be shown")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class _Painter:
    """Shows one document after the other: over the last one on a terminal, else below it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._in_place = sys.stdout.isatty() and not _is_dumb() and view.form in ("table", "wide")
        self._last = ""
        self._failed = ""
        self._old = ""
        self._beside: list[str] = []
        self._begun = False

    def paint(self, found: Seen | FatalError) -> None:
        """Show it; where it failed, say so in a line, once, and keep what was shown last."""
        screen = screen_of_stdout()
        try:
            if isinstance(found, FatalError):
                raise found
            found, text, beside = _read(found, self._view, screen)
        except FatalError as error:
            self._say(printable(" ".join(str(error).split())), screen)
            return
        self._failed = ""
        self._last = text
        was_old, self._old = self._old, collected_long_ago(found, time.time())
        said_before, self._beside = self._beside, beside
        if not self._in_place:
            _tell(one for one in self._beside if one not in said_before)
        if self._old and not was_old and not self._in_place:
            warn_if_stale(found)
        if self._in_place:
            self._repaint(screen)
        else:
            separator = {"yaml": "---\n", "json": ""}.get(self._view.form, "\n")
            print(end=(separator if self._begun else "") + text, flush=True)
        self._begun = True

    def leave(self) -> None:
        """Let the shell's prompt begin on a line of its own."""
        if self._in_place:
            print(flush=True)

    def _say(self, failure: str, screen: Screen) -> None:
        if self._in_place:
            self._failed = failure
            self._repaint(screen)
        elif failure != self._failed:
            print(f"gpumap: {failure}; asking on", file=sys.stderr, flush=True)
            self._failed = failure

    def _repaint(self, screen: Screen) -> None:
        head = f"{self._view.head}   every {self._view.interval_seconds:g}s   {time.strftime('%H:%M:%S')}"
        size = shutil.get_terminal_size()
        columns = max(size.columns, 1)
        lines = [screen.paint(printable(head), "bold")]
        notices = [*self._beside, *([self._old] if self._old else [])]
        if self._failed:
            notices += [f"{self._failed}; asking on." + (" Below: what was last answered." if self._last else "")]
        lines += [screen.paint(line, "red") for notice in notices for line in wrapped(notice, columns)]
        lines += ["", *self._last.splitlines()]
        shown = list(_clipped(lines, columns, size.lines))
        # A line that fills its row needs no clearing, and the cursor still stands on its last character.
        fills = (cells(_PAINT.sub("", line)) == columns for line in shown)
        frame = "\n".join(line + ("" if full else _TO_LINE_END) for line, full in zip(shown, fills, strict=True))
        print(end=_HOME + frame + _TO_END, flush=True)


def _clipped(lines: list[str], columns: int, height: int) -> Iterator[str]:
    """What a screen has room for: a taller frame would scroll, and the next be painted in its middle."""
    if len(lines) > height:
        lines = [*lines[: height - 1], f"… and {len(lines) - height + 1} more lines"]
    return (_cut(line, columns) for line in lines)


def _cut(line: str, columns: int) -> str:
    """The line's part that fits a row, with all of its colours: what goes on in the next row moves all below."""
    parts, left = [], columns
    for part in _PAINT.split(line):
        if _PAINT.fullmatch(part):
            parts.append(part)
            continue
        for character in part:
            left -= cells(character)
            if left < 0:
                break
            parts.append(character)
    return "".join(parts)


def collected_long_ago(seen: Seen, now: float) -> str:
    """A sentence on how old the oldest document is, by this machine's clock; empty where none is old."""
    try:
        old = [seconds for found in seen.documents if (seconds := now - found["timestamp"]) > _often(found)]
        return f"what is shown was collected {age(max(old))} ago" if old else ""
    except _MALFORMED:
        return ""  # whatever it is, it is no time


def _often(found: Document) -> float:
    return float(max(_OLD_SECONDS, 2 * (found.get("interval_seconds") or 0)))


def _beside(seen: Seen, view: View) -> list[str]:
    """What is told beside the table."""
    told: list[str] = []
    if view.form not in ("table", "wide"):
        told += [f"missing: {one}" for one in few(seen.missing, fleet=True)]
    elif view.report.notes and view.form == "table":
        told += view.report.notes(seen)
    return [printable(one) for one in (*told, *blind(seen))]


def _tell(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        print(f"gpumap: {sentence}", file=sys.stderr, flush=True)


def warn_if_stale(seen: Seen) -> None:
    """Say beside what is shown that it is old, where it is."""
    if old := collected_long_ago(seen, time.time()):
        print(f"gpumap: {old}", file=sys.stderr, flush=True)


def _is_dumb() -> bool:
    return os.environ.get("TERM", "") in ("", "dumb")


def _read(seen: Seen, view: View, screen: Screen) -> tuple[Seen, str, list[str]]:
    """What can be shown of it, the text to show, and what is told beside it. Raises FatalError where nothing can."""
    shape = replace(view.shape, screen=screen)
    try:
        return seen, _text(seen, view, shape), _beside(seen, view)
    except _MALFORMED:
        seen = _without_nonsense(seen, view)
    with reading():
        return seen, _text(seen, view, shape), _beside(seen, view)


def _without_nonsense(seen: Seen, view: View) -> Seen:
    """A cluster's documents that can be shown; what an agent answered that is none is missing. One agent must not hide
    all others."""
    sound, missing = [], list(seen.missing)
    for document in seen.documents if seen.fleet else ():
        alone = Seen((document,), fleet=True)
        try:
            _text(alone, view, view.shape), _beside(alone, view)
            sound.append(document)
        except _MALFORMED:
            missing.append(f"node {_name_in(document)}: what its agent answered is no map of gpumap's")
    return Seen(tuple(sound), tuple(missing), fleet=True) if sound else seen


def _name_in(document: Document) -> str:
    try:
        return str(document["node"]["name"])
    except _MALFORMED:
        return "?"


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Raises FatalError where what is read in the block turns out to be no document."""
    try:
        yield
    except _MALFORMED as error:
        raise FatalError("what was answered is no map of gpumap's (it does not fit /api/v1/map's schema)") from error


def _text(seen: Seen, view: View, shape: Shape) -> str:
    report = view.report
    if view.form == "json":
        return escape_terminal_controls(json.dumps(report.values(seen, shape), indent=2, ensure_ascii=False)) + "\n"
    if view.form == "yaml":
        return yaml.safe_dump(report.values(seen, shape), sort_keys=False, allow_unicode=True)
    if view.form == "name":
        return "".join(f"pod/{printable(name)}\n" for _, name in (report.names(seen, shape) if report.names else ()))
    return report.table(seen, shape)
