"""Writes the maps of nodes to a terminal or a pipe: as a table, as JSON or YAML, once or in place."""

from __future__ import annotations

import codecs
import functools
import io
import json
import locale
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
from gpumap.cli.terminal import PIPE, Screen, escape_terminal_controls, is_printable, wrapped
from gpumap.cli.unknowns import blind, few
from gpumap.model.errors import FatalError
from gpumap.model.formatting import age, printable

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
    plain = bool(os.environ.get("NO_COLOR")) or is_dumb()
    return Screen(columns=max(shutil.get_terminal_size().columns, 1), colours=not plain)


_PLAIN = dict(zip("→–…°↑↓▁▂▃▄▅▆▇█", ">-~ ^v_.-~=+*#", strict=True))
"""ASCII characters of the same width in the place of gpumap's own others."""


def _replace_by_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return what to write for the characters that the encoding does not have."""
    assert isinstance(error, UnicodeEncodeError)  # noqa: S101 -- it is for writing only
    return "".join(_PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


def take_any_text() -> None:
    """Replace characters that the terminal cannot write: names come from outside. Raises FatalError without stdout."""
    if sys.stdout is None:
        raise FatalError("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("gpumap", _replace_by_ascii)
        # In the C locale, Python writes UTF-8, which a terminal of this locale may not show.
        encoding = locale.getencoding() if sys.stdout.isatty() else None
        sys.stdout.reconfigure(encoding=encoding, errors="gpumap")


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
    return bool(sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()) and not is_dumb()


def is_dumb() -> bool:
    """Whether the terminal cannot move its cursor."""
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
