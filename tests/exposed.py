"""A metrics page, read by the grammar of the format: L8 of the contract, and the samples for every other law.

promtool and prometheus_client read pages by the same grammar; `tests.fuzz.test_short` and `tests.test_dialects_law`
compare the two.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict

Labels = frozenset[tuple[str, str]]

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
_LABELS = rf"\{{(?:{_LABEL}(?:,{_LABEL})*)?\}}"
_NUMBER = r"[+-]?(?:Inf|[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)|NaN"
_SAMPLE = re.compile(rf"({_NAME})({_LABELS})? ({_NUMBER})")
_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_HEAD = re.compile(rf"# (HELP|TYPE) ({_NAME}) (.*)")
_TYPES = frozenset({"counter", "gauge", "unknown", "info", "untyped", "summary"})
_SUFFIXES = {"counter": ("", "_total"), "summary": ("", "_sum", "_count")}


class Page:
    """A page that Prometheus accepts: anything else raises AssertionError. `counters` are the names of its counters."""

    def __init__(self, text: str, *, openmetrics: bool = False) -> None:
        self.text = text
        self.samples: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        self.counters: set[str] = set()
        self._read(openmetrics)

    def _read(self, openmetrics: bool) -> None:
        assert self.text == "" or self.text.endswith("\n"), "the last line has no end"
        lines = self.text.split("\n")[:-1]
        if openmetrics:
            assert lines.pop() == "# EOF", "OpenMetrics ends with # EOF"
        heads: Counter[tuple[str, str]] = Counter()
        families: list[str] = []
        names: tuple[str, ...] = ()
        for line in lines:
            if not line.startswith("#"):
                self._add(line, names)
                continue
            head = _HEAD.fullmatch(line)
            assert head is not None, f"a bad head: {line[:300]!r}"
            what, family, text = head.groups()
            heads[what, family] += 1
            if family not in families[-1:]:
                families.append(family)
                names = (family,)
            if what == "TYPE":
                assert text in _TYPES, line
                names = tuple(family + suffix for suffix in _SUFFIXES.get(text, ("",)))
                self.counters.update(names if text in _SUFFIXES else ())
        assert len(set(families)) == len(families), "a family is there twice"
        assert all(number == 1 for number in heads.values()), "two heads of one family"

    def _add(self, line: str, names: tuple[str, ...]) -> None:
        sample = _SAMPLE.fullmatch(line)
        assert sample is not None, f"a bad sample: {line[:300]!r}"
        name, value = sample[1], float(sample[3])
        assert name in names, f"{name} under {names}"
        labels = frozenset((key, _ESCAPED.sub(_unescaped, text)) for key, text in _PAIR.findall(sample[2] or ""))
        assert labels not in self.samples[name], f"twice: {line[:300]}"
        assert not math.isnan(value), f"not a number: {line[:300]}"
        assert not name.startswith("gpumap_") or math.isfinite(value), f"not finite: {line[:300]}"
        self.samples[name][labels] = value

    def __str__(self) -> str:
        return self.text

    def rows(self, name: str) -> list[tuple[dict[str, str], float]]:
        """The samples of a family, with their labels."""
        return [(dict(labels), value) for labels, value in self.samples.get(name, {}).items()]

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The samples of a family that have `labels`, by another label."""
        wanted = labels.items()
        return {row[label]: value for row, value in self.rows(name) if row.items() >= wanted}

    def value(self, name: str, **labels: str) -> float | None:
        """The one sample with these labels among its own. None: there is none."""
        wanted = labels.items()
        found = [value for row, value in self.samples.get(name, {}).items() if row >= wanted]
        assert len(found) < 2, f"{name} {labels} is there {len(found)} times"
        return found[0] if found else None

    def up(self, source: str) -> bool:
        return self.value("gpumap_source_up", source=source) == 1

    def capable(self, capability: str) -> bool:
        return self.value("gpumap_capability", capability=capability) == 1

    @property
    def collections(self) -> float:
        return sum(self.samples.get("gpumap_collections_total", {}).values())

    def container_series(self) -> set[tuple[str, Labels]]:
        """Every series on containers: its name and labels; without the counters, which outlive them."""
        prefixes = ("gpumap_container_", "gpumap_allocation_")
        names = [name for name in self.samples if name.startswith(prefixes) and not name.endswith("_total")]
        return {(name, row) for name in names for row in self.samples[name]}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
