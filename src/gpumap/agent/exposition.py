"""Render families and a snapshot: Prometheus text format 0.0.4 and OpenMetrics 1.0.

The label part of each line is kept from page to page. A new page then costs little more than its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpumap.model.families import Family, Numbered, Series
from gpumap.model.snapshot import Snapshot

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_NOT_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


_Prefix = tuple[tuple[str, ...], str, str]
"""The labels and suffix of a series, and the text of its line before the value."""


class Exposition:
    """Renders a fixed list of families, numbered ones last. Not safe for concurrent use by several threads."""

    def __init__(self, families: Iterable[Family | Numbered], *, openmetrics: bool = False) -> None:
        self._openmetrics = openmetrics
        families = tuple(families)
        fixed = [family for family in families if isinstance(family, Family)]
        self._families = [(family, self._head(family)) for family in fixed]
        self._prefixes: list[list[_Prefix]] = [[] for _ in self._families]
        self._numbered = [family for family in families if isinstance(family, Numbered)]

    def render(self, snapshot: Snapshot) -> bytes:
        """Return the whole page. A family without a sample is not on it."""
        parts: list[str] = []
        for number, (family, head) in enumerate(self._families):
            series = list(family.read(snapshot))
            if series:
                prefixes = self._prefixes_of(number, family, series)
                parts.append(head)
                parts += [
                    f"{prefix}{one.value}\n" if type(one.value) is int else f"{prefix}{_number(one.value)}\n"
                    for (_, _, prefix), one in zip(prefixes, series, strict=True)
                ]
            else:
                self._prefixes[number] = []
        for numbered in self._numbered:
            for family in numbered.families(snapshot):
                lines = [f"{_prefix(family, one)}{_number(one.value)}\n" for one in family.read(snapshot)]
                parts += [self._head(family), *lines] if lines else []
        if self._openmetrics:
            parts.append("# EOF\n")
        return "".join(parts).encode()

    def _prefixes_of(self, number: int, family: Family, series: list[Series]) -> list[_Prefix]:
        """Return the text before each value: kept by position, or by labels if series were added or removed."""
        kept = self._prefixes[number]
        if len(kept) == len(series) and all(
            labels == one.labels and suffix == one.suffix for (labels, suffix, _), one in zip(kept, series, strict=True)
        ):
            return kept
        known = {(labels, suffix): prefix for labels, suffix, prefix in kept}
        self._prefixes[number] = [
            (one.labels, one.suffix, known.get((one.labels, one.suffix)) or _prefix(family, one)) for one in series
        ]
        return self._prefixes[number]

    def _head(self, family: Family) -> str:
        name, kind = family.name, str(family.kind)
        help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        if self._openmetrics:
            if kind == "counter" and not name.endswith("_total"):
                kind = "unknown"  # a dialect's: OpenMetrics has no counter of such a name
            name = name.removesuffix("_total") if kind == "counter" else name
            help_text = help_text.replace('"', '\\"')
        return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


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
        if not value and name in family.optional_labels:
            continue
        escaped = encodable(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        yield f'{name}="{escaped}"'


def encodable(value: str) -> str:
    r"""Spell out what UTF-8 cannot carry, bytes of a file name that were no UTF-8, as `\udcff`: two names stay two."""
    return value.encode("utf-8", "backslashreplace").decode()
