"""Families and a snapshot to bytes: Prometheus text format 0.0.4 and OpenMetrics 1.0.

The label part of a line is kept with its series from page to page, so that a page costs little more than its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpumap.families import Family, Series
from gpumap.snapshot import Snapshot

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_NOT_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


class Exposition:
    """Renders a fixed list of families. Not safe for use from several threads at once."""

    def __init__(self, families: Iterable[Family], *, openmetrics: bool = False) -> None:
        self._openmetrics = openmetrics
        self._families = [(family, self._head(family)) for family in families]
        self._prefixes: list[dict[tuple[tuple[str, ...], str], str]] = [{} for _ in self._families]

    def render(self, snapshot: Snapshot) -> bytes:
        """Give the whole page. A family without a sample leaves no trace on it."""
        parts: list[str] = []
        for number, (family, head) in enumerate(self._families):
            known = self._prefixes[number]
            current: dict[tuple[tuple[str, ...], str], str] = {}
            lines = [self._line(family, series, known, current) for series in family.read(snapshot)]
            self._prefixes[number] = current
            if lines:
                parts.append(head)
                parts.extend(lines)
        if self._openmetrics:
            parts.append("# EOF\n")
        return "".join(parts).encode()

    def _line(
        self,
        family: Family,
        series: Series,
        known: dict[tuple[tuple[str, ...], str], str],
        current: dict[tuple[tuple[str, ...], str], str],
    ) -> str:
        key = (series.labels, series.suffix)
        prefix = known.get(key)
        if prefix is None:
            prefix = _prefix(family, series)
        current[key] = prefix
        return f"{prefix}{_number(series.value)}\n"

    def _head(self, family: Family) -> str:
        name = family.name
        help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        if self._openmetrics:
            name = name.removesuffix("_total") if family.kind == "counter" else name
            help_text = help_text.replace('"', '\\"')
        return f"# HELP {name} {help_text}\n# TYPE {name} {family.kind}\n"


def _number(value: float) -> str:
    """Write every digit: an int as it is, however large, a float as the shortest text that reads back the same."""
    if isinstance(value, int):
        return f"{value:d}"
    text = repr(value)
    return _NOT_FINITE.get(text, text)


def _prefix(family: Family, series: Series) -> str:
    return f"{family.name}{series.suffix}{_label_part(family, series)} "


def _label_part(family: Family, series: Series) -> str:
    if not family.labels:
        return ""
    return "{" + ",".join(_pairs(family, series)) + "}"


def _pairs(family: Family, series: Series) -> Iterator[str]:
    for name, value in zip(family.labels, series.labels, strict=True):
        escaped = _encodable(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        yield f'{name}="{escaped}"'


def _encodable(value: str) -> str:
    r"""Spell out what UTF-8 cannot carry, bytes of a file name that were no UTF-8, as `\udcff`: two names stay two."""
    return value.encode("utf-8", "backslashreplace").decode()
