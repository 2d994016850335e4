"""Render families and a snapshot: Prometheus text format 0.0.4 and OpenMetrics 1.0.

The lines of a family are kept from page to page, with a place for each number. A new page then costs little more than
its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from gpumap.model.families import Family, NumberedFamilies, Series
from gpumap.model.snapshot import Snapshot

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_NOT_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
_PLACE = b"%b\n"
"""The place of a number in a template, at the end of each line."""


class _Lines(NamedTuple):
    """The lines of a family: the labels and suffix of each series, and the bytes with `_PLACE` for each number."""

    labels: Sequence[tuple[str, ...]]
    suffixes: Sequence[str]
    template: bytes


_NO_LINES = _Lines((), (), b"")


class Exposition:
    """Renders a fixed list of families, numbered ones last. Not safe for concurrent use by several threads."""

    def __init__(self, families: Iterable[Family | NumberedFamilies], *, openmetrics: bool = False) -> None:
        self._openmetrics = openmetrics
        families = tuple(families)
        fixed = [family for family in families if isinstance(family, Family)]
        self._families = [(family, self._head(family)) for family in fixed]
        self._last_lines = [_NO_LINES for _ in self._families]
        self._numbered = [family for family in families if isinstance(family, NumberedFamilies)]

    def render(self, snapshot: Snapshot) -> bytes:
        """Return the whole page. A family without a sample is not on it."""
        parts: list[bytes] = []
        for number, (family, head) in enumerate(self._families):
            series = list(family.read(snapshot))
            lines = self._last_lines[number] = _lines(family, series, self._last_lines[number])
            parts += (head, lines.template % _numbers(series)) if series else ()
        for numbered in self._numbered:
            for family in numbered.families(snapshot):
                if series := list(family.read(snapshot)):
                    parts += (self._head(family), _lines(family, series, _NO_LINES).template % _numbers(series))
        if self._openmetrics:
            parts.append(b"# EOF\n")
        return b"".join(parts)

    def _head(self, family: Family) -> bytes:
        name, kind = family.name, str(family.kind)
        help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        if self._openmetrics:
            if kind == "counter" and not name.endswith("_total"):
                kind = "unknown"  # a dialect's: OpenMetrics has no counter of such a name
            name = name.removesuffix("_total") if kind == "counter" else name
            help_text = help_text.replace('"', '\\"')
        return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n".encode()


def _lines(family: Family, series: Iterable[Series], last_lines: _Lines) -> _Lines:
    """Return `last_lines`; if series were added or removed, new lines for those."""
    labels, suffixes = [sample.labels for sample in series], [sample.suffix for sample in series]
    if labels == last_lines.labels and suffixes == last_lines.suffixes:
        return last_lines
    keys = zip(last_lines.labels, last_lines.suffixes, strict=True)
    known = dict(zip(keys, last_lines.template.split(_PLACE), strict=False))
    lines = (known.get(key) or _line(family, *key) for key in zip(labels, suffixes, strict=True))
    return _Lines(labels, suffixes, b"".join(line + _PLACE for line in lines))


def _numbers(series: Iterable[Series]) -> tuple[bytes, ...]:
    """Return the text of each value. msgspec writes the same text as `_value`, up to seven times as fast, except for
    exponents, numbers below 0.0001, and what JSON does not have."""
    values = [sample.value for sample in series]
    text = msgspec.json.encode(values)
    if text.translate(None, b"0123456789.,-") == b"[]" and b"0.0000" not in text:
        return tuple(text[1:-1].split(b","))
    return tuple(_value(value).encode() for value in values)


def _value(value: float) -> str:
    """Write every digit: an int as it is, however large, a float as the shortest text that reads back the same."""
    if isinstance(value, int):
        return f"{value:d}"
    text = repr(value)
    return _NOT_FINITE.get(text, text)


def _line(family: Family, labels: tuple[str, ...], suffix: str) -> bytes:
    """Return a line up to its number, as a part of a template."""
    pairs = "{" + ",".join(_pairs(family, labels)) + "}" if family.labels else ""
    return f"{family.name}{suffix}{pairs} ".encode().replace(b"%", b"%%")


def _pairs(family: Family, labels: tuple[str, ...]) -> Iterator[str]:
    for name, value in zip(family.labels, labels, strict=True):
        if not value and name in family.optional_labels:
            continue
        # What UTF-8 cannot carry, bytes of a file name that were no UTF-8, is spelled out: two names stay two.
        encodable = value.encode("utf-8", "backslashreplace").decode()
        escaped = encodable.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        yield f'{name}="{escaped}"'
