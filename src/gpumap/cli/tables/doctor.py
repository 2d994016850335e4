"""`gpumap doctor` as lines: check, state, and what was seen, why, and what to do, wrapped on a terminal alone."""

from __future__ import annotations

from collections.abc import Sequence

from gpumap.cli.doctor.checks import Check
from gpumap.cli.tables.layout import Shape
from gpumap.cli.terminal import cells, contained, wrapped

_COLOURS = {"ok": "green", "degraded": "yellow", "missing": "yellow", "failed": "red", "warning": "yellow"}
_NARROWEST = 20


def doctor_table(checks: Sequence[Check], shape: Shape) -> str:
    """A line each, and a last one: whether what is required works."""
    head = ("CHECK", "STATE", "WHAT IS SEEN")
    first = max(cells(contained(text)) for text in (head[0], *(one.check for one in checks)))
    second = max(len(text) for text in (head[1], *(one.state for one in checks)))
    lines = [f"{head[0]:{first}}   {head[1]:{second}}   {head[2]}"] if shape.headers else []
    indent = first + second + 6
    for one in checks:
        name = contained(one.check)
        state = shape.screen.paint(one.state, _colour(one)) + " " * (second - len(one.state))
        texts = _texts(one, indent, shape)
        lines.append(f"{name}{' ' * (first - cells(name))}   {state}   {texts[0]}".rstrip())
        lines += [" " * indent + text for text in texts[1:]]
    return "\n".join([*lines, "", shape.screen.paint(_verdict(checks), "bold")]) + "\n"


def _texts(one: Check, indent: int, shape: Shape) -> list[str]:
    """What is said of a check: one line in a pipe, several on a terminal."""
    said = [contained(text) for text in (one.seen, one.why) if text]
    text = " – ".join(said)
    remedy = f"→ {contained(one.remedy)}" if one.remedy else ""
    if shape.screen.columns is None:
        return [f"{text} {remedy}".strip()]
    room = max(shape.screen.columns - indent, _NARROWEST)
    return [*wrapped(text, room), *wrapped(remedy, room)] or [""]


def _colour(one: Check) -> str:
    return "red" if one.required and one.state == "missing" else _COLOURS.get(one.state, "")


def _verdict(checks: Sequence[Check]) -> str:
    broken = [one.check for one in checks if one.required and one.state not in ("ok", "degraded")]
    worse = [one.check for one in checks if one.state not in ("ok", "not needed") and one.check not in broken]
    if broken:
        return f"{' and '.join(broken)} {'does' if len(broken) == 1 else 'do'} not work, and {_is(broken)} required."
    return "All that is required works" + (f"; worth a look: {', '.join(map(contained, worse))}." if worse else ".")


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
