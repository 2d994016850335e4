"""Writes the maps of nodes to a terminal or a pipe: as a table, as JSON or YAML, once or in place."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import msgspec

from gpumap.cli.main import print_notices
from gpumap.cli.rows import NodeMaps
from gpumap.cli.table import Shape
from gpumap.cli.terminal import PIPE, Screen, escape_terminal_controls, is_printable, repainted, wrapped
from gpumap.cli.unknowns import blind, few
from gpumap.model.errors import FatalError
from gpumap.model.formatting import age, one_line, printable

_OLD_SECONDS = 60.0
"""Older data gets a warning, unless it is younger than two collections."""


class Window(Protocol):
    """What a terminal shows while keys are read from it."""

    def take(self, event: NodeMaps | FatalError | str) -> bool:
        """Take an answer, a failure or a key. Return whether the program goes on."""
        ...

    def paint(self) -> None: ...


class Report(NamedTuple):
    """The output of a command. `values` are Structs or builtins. `names` are the pods of the report: namespace and
    name. `window`: the command has a screen of its own for keys."""

    table: Callable[[NodeMaps, Shape], str]
    values: Callable[[NodeMaps, Shape], object]
    names: Callable[[NodeMaps, Shape], Sequence[tuple[str, str]]] = lambda maps, shape: ()
    window: Callable[[View], Window] | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A report as its reader wants it. `head` is the line above a watch: the command."""

    report: Report
    form: str
    shape: Shape
    head: str
    watch: bool
    interval_seconds: float
    live: bool = False
    """Whether keys change what is shown."""


def screen_of_stdout() -> Screen:
    """Return a terminal's width, and colours unless NO_COLOR or TERM=dumb refuse them; in a pipe neither."""
    if not sys.stdout.isatty():
        return PIPE
    plain = bool(os.environ.get("NO_COLOR")) or _is_dumb()
    return Screen(columns=max(shutil.get_terminal_size().columns, 1), colours=not plain)


def take_any_text() -> None:
    """Replace characters that the terminal cannot write: names come from outside. Raises FatalError without stdout."""
    if sys.stdout is None:
        raise FatalError("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class Painter:
    """Shows one answer after the other: over the last one on a terminal, else below it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.in_place = sys.stdout.isatty() and not _is_dumb() and view.form in ("table", "wide")
        self._last = ""
        self._failed = ""
        self._old = ""
        self._notices: list[str] = []
        self._begun = False
        self.offset, self.page = 0, 1
        """The first line that is shown of the report, below its titles; and how many there is room for."""

    def paint(self, answer: NodeMaps | FatalError) -> None:
        """Show an answer. After a failure print its reason once, and keep what was shown last."""
        screen = screen_of_stdout()
        try:
            if isinstance(answer, FatalError):
                raise answer
            text, notices = text_of(answer, self._view, screen), notices_of(answer, self._view)
        except FatalError as error:
            self._show_failure(one_line(error), screen)
            return
        self._failed = ""
        self._last = text
        was_old, self._old = self._old, collected_long_ago(answer, time.time())
        before, self._notices = self._notices, notices
        if not self.in_place:
            print_notices(notice for notice in self._notices if notice not in before)
        if self._old and not was_old and not self.in_place:
            warn_if_stale(answer)
        if self.in_place:
            self.repaint(screen)
        else:
            separator = {"yaml": "---\n", "json": ""}.get(self._view.form, "\n")
            print(end=(separator if self._begun else "") + text, flush=True)
        self._begun = True

    def leave(self) -> None:
        """Let the shell's prompt begin on a line of its own."""
        if self.in_place:
            print(flush=True)

    def _show_failure(self, failure: str, screen: Screen) -> None:
        if self.in_place:
            self._failed = failure
            self.repaint(screen)
        elif failure != self._failed:
            print_notices([f"{failure}; trying again"])
            self._failed = failure

    def repaint(self, screen: Screen) -> None:
        """Paint what was last answered."""
        head = f"{self._view.head}   every {self._view.interval_seconds:g}s   {time.strftime('%H:%M:%S')}"
        size = shutil.get_terminal_size()
        columns = max(size.columns, 1)
        lines = [screen.paint(printable(head), "bold")]
        lines += lines_above([*self._notices, self._old], self._failed, screen, columns, answered=bool(self._last))
        report = self._last.splitlines()
        if is_interactive() and len(lines) + 1 + len(report) > size.lines:
            report = self._scrolled(report, size.lines - len(lines) - 2)
        print(end=repainted([*lines, "", *report], columns, size.lines), flush=True)

    def _scrolled(self, report: list[str], room: int) -> list[str]:
        """Return the lines of a report that have room, and one on the others. The titles stay."""
        titles = 1 if self._view.shape.headers else 0
        self.page, rows = max(room - titles, 1), report[titles:]
        self.offset = min(self.offset, max(len(rows) - self.page, 0))
        end = self.offset + self.page
        foot = f"{self.offset + 1}-{min(end, len(rows))} of {len(rows)} lines   ↑↓ PgUp PgDn scroll  q quit"
        return [*report[:titles], *rows[self.offset : end], foot]


def lines_above(notices: Iterable[str], failed: str, screen: Screen, columns: int, *, answered: bool) -> list[str]:
    """Return the lines between the head of a frame and what was last `answered`. `failed`: why there is no new one."""
    failure = f"{failed}; asking on." + (" Below: the last answer." if answered else "") if failed else ""
    sentences = (sentence for sentence in (*notices, failure) if sentence)
    return [screen.paint(line, "red") for sentence in sentences for line in wrapped(sentence, columns)]


def collected_long_ago(answer: NodeMaps, unix_seconds: float) -> str:
    """Return a sentence on the age of the oldest map, by this machine's clock; empty if none is old."""
    ages = ((node, unix_seconds - node.timestamp) for node in answer.maps)
    old = [seconds for node, seconds in ages if seconds > max(_OLD_SECONDS, 2 * (node.interval_seconds or 0))]
    return f"this data was collected {age(max(old))} ago" if old else ""


def warn_if_stale(answer: NodeMaps) -> None:
    """Print a warning if the data is old."""
    if old := collected_long_ago(answer, time.time()):
        print_notices([old])


def is_interactive() -> bool:
    """Whether a reader can press keys, and a frame can be painted in place."""
    return bool(sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()) and not _is_dumb()


def _is_dumb() -> bool:
    return os.environ.get("TERM", "") in ("", "dumb")


def notices_of(answer: NodeMaps, view: View) -> list[str]:
    """Return what is printed beside the report: what the form has no room for."""
    notices = list(few(answer.notices, fleet=True))
    if view.form not in ("table", "wide"):
        notices += [f"missing: {sentence}" for sentence in few(answer.missing, fleet=True)]
    return [printable(notice) for notice in (*notices, *blind(answer))]


def yaml_text(values: object, *, allow_unicode: bool = True) -> str:
    """Return values as YAML. libyaml takes a fifth of the time. PyYAML may lack it, and it refuses a lone surrogate."""
    import yaml

    dump = functools.partial(yaml.dump, values, sort_keys=False, allow_unicode=allow_unicode)
    try:
        return str(dump(Dumper=yaml.CSafeDumper))
    except (AttributeError, UnicodeEncodeError):
        return str(dump(Dumper=yaml.SafeDumper))


def text_of(answer: NodeMaps, view: View, screen: Screen) -> str:
    report, shape = view.report, replace(view.shape, screen=screen)
    if view.form == "json":
        values = msgspec.to_builtins(report.values(answer, shape))
        return escape_terminal_controls(json.dumps(values, indent=2, ensure_ascii=False)) + "\n"
    if view.form == "yaml":
        values = msgspec.to_builtins(report.values(answer, shape))
        text = yaml_text(values)
        # YAML's own escapes exist for all characters beyond ASCII, or for none.
        return text if is_printable(text) else yaml_text(values, allow_unicode=False)
    if view.form == "name":
        # The arguments by which kubectl finds a pod, for `xargs -L1 kubectl describe`. Of one namespace only the name.
        form = "pod/{1}\n" if shape.namespace else "-n {0} pod/{1}\n"
        return "".join(form.format(*map(printable, pod)) for pod in report.names(answer, shape))
    return report.table(answer, shape)
