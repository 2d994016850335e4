"""Families and a snapshot to bytes: Prometheus text format 0.0.4 and OpenMetrics 1.0.

The label part of a line is kept with its series from page to page, so that a page costs little more than its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpumap.families import Family, Series
from gpumap.model import Snapshot

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


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
        return "".join(parts).encode("utf-8", "replace")

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
        value = series.value
        return f"{prefix}{value}\n" if isinstance(value, int) else f"{prefix}{value!r}\n"

    def _head(self, family: Family) -> str:
        name = family.name
        help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        if self._openmetrics:
            name = name.removesuffix("_total") if family.kind == "counter" else name
            help_text = help_text.replace('"', '\\"')
        return f"# HELP {name} {help_text}\n# TYPE {name} {family.kind}\n"


def _prefix(family: Family, series: Series) -> str:
    return f"{family.name}{series.suffix}{_label_part(family, series)} "


def _label_part(family: Family, series: Series) -> str:
    if not family.labels:
        return ""
    return "{" + ",".join(_pairs(family, series)) + "}"


def _pairs(family: Family, series: Series) -> Iterator[str]:
    for name, value in zip(family.labels, series.labels, strict=True):
        escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        yield f'{name}="{escaped}"'
