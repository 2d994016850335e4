"""`gpumap doctor` as lines: check, state, and what was seen, why, and what to do; wrapped only on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from gpumap.cli.doctor.gpu_checks import Result
from gpumap.cli.table import Shape, joined, notes
from gpumap.cli.terminal import cells, contained, wrapped

_COLOURS = {"ok": "green", "degraded": "yellow", "missing": "yellow", "failed": "red", "warning": "yellow"}
_FINE, _WORSE = ("ok", "not needed"), ("missing", "warning", "degraded", "failed")
_GUIDE = "More: docs/how-to/troubleshoot.md"
_NARROWEST, _INDENT = 30, 4
"""The least number of cells of a text beside its check, more for a long word; the indent of a text below its check."""


def doctor_table(results: Sequence[Result], shape: Shape) -> str:
    """Return a line for each result, and a last one: whether everything works that is required.

    On a terminal, which shows the end, the worst comes last.
    """
    if shape.screen.columns is not None:
        results = sorted(results, key=lambda one: _WORSE.index(one.state) if one.state in _WORSE else -1)
    head = ("CHECK", "STATE", "DETAILS")
    first = max(cells(contained(text)) for text in (head[0], *(one.check for one in results)))
    second = max(len(text) for text in (head[1], *(one.state for one in results)))
    lines = [f"{head[0]:{first}}   {head[1]:{second}}   {head[2]}"] if shape.headers else []
    indent = first + second + 6
    for one in results:
        narrow = shape.screen.columns is not None and shape.screen.columns - indent < _room_needed(one)
        name = contained(one.check)
        colour = "red" if one.required and one.state == "missing" else _COLOURS.get(one.state, "")
        state = shape.screen.paint(one.state, colour) + " " * (second - len(one.state))
        texts = _texts(one, _INDENT if narrow else indent, shape)
        beside = "" if narrow else texts.pop(0)
        lines.append(f"{name}{' ' * (first - cells(name))}   {state}   {beside}".rstrip())
        lines += [" " * (_INDENT if narrow else indent) + text for text in texts]
    return joined(["\n".join(lines), notes([_summary(results)], shape.screen, "bold")])


def _texts(one: Result, indent: int, shape: Shape) -> list[str]:
    """Return the text of a result: one line in a pipe, several on a terminal."""
    text = " – ".join(contained(part) for part in (one.seen, one.why) if part)
    remedy = f"→ {contained(one.remedy)}" if one.remedy else ""
    if shape.screen.columns is None:
        return [f"{text} {remedy}".strip()]
    room = max(shape.screen.columns - indent, 1)
    return [*wrapped(text, room), *wrapped(remedy, room)] or [""]


def _room_needed(one: Result) -> int:
    """Return the cells that its text needs beside the check: a UUID or a command is copied, and must not be broken."""
    words = f"{one.seen} {one.why} {one.remedy}".split(" ")
    return max(_NARROWEST, *map(cells, words))


def _summary(results: Sequence[Result]) -> str:
    """Return the GPUs that fail, whether everything works that is required, and the page that has more.

    A GPU that fails is no exit code.
    """
    gpus = [one for one in results if one.state == "failed" and one.check.startswith("gpu/")]
    broken = [one.check for one in results if one.required and one.state not in ("ok", "degraded")]
    named = {*broken, *(one.check for one in gpus)}
    worse = [contained(one.check) for one in results if one.state not in _FINE and one.check not in named]
    said = [f"GPU {contained(one.check.split('/')[1])} fails: {contained(one.why or 'unknown')}." for one in gpus]
    if broken:
        do, are = ("does", "is") if len(broken) == 1 else ("do", "are")
        said.append(f"{' and '.join(broken)} {do} not work, but {are} required.")
    else:
        said.append("gpumap has all that it requires." + (f" Check also: {', '.join(worse)}." if worse else ""))
    if gpus or broken or worse:
        said.append(_GUIDE)
    return " ".join(said)
