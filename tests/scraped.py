"""Samples that a real Prometheus is filled with: what it would have scraped from gpumap, to the last digit known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from tests.promtool import accepted

Labels = tuple[tuple[str, str], ...]
Value = Callable[[int], Decimal | None]
"""A counter's value at a moment; `None` where it is not scraped."""


def labels(**given: str) -> Labels:
    return tuple(sorted(given.items()))


def kept(of: Mapping[str, str], target: Mapping[str, str], *, honored: bool) -> dict[str, str]:
    """The labels as Prometheus keeps them: where both have one, it is the exporter's if its labels are honored."""
    if honored:
        return {**target, **of}
    return {**{f"exported_{name}" if name in target else name: value for name, value in of.items()}, **target}


class Samples:
    """Series by name and labels, each a list of (Unix seconds, value)."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, Labels], list[tuple[int, Decimal]]] = {}

    def scrape(self, name: str, of: Labels, times: Iterable[int], value: Value, late: int = 0) -> None:
        """At these times, by a clock that is so late."""
        answer = self.series.setdefault((name, of), [])
        answer += [(time - late, found) for time in times if (found := value(time)) is not None]

    def increase(self, name: str, start: int, end: int, **of: str) -> Fraction:
        """What the samples say that a counter went, reckoned from all of them; one that is first seen began at 0."""
        merged: dict[int, Decimal] = {}
        for (series, having), answer in self.series.items():
            if series == name and of.items() <= dict(having).items():
                merged.update(answer)
        times = sorted(time for time in merged if time <= end)
        before = [time for time in times if time <= start]
        last = Fraction(merged[before[-1]]) if before else Fraction(0)
        amount = Fraction(0)
        for time in times[len(before) :]:
            value = Fraction(merged[time])
            amount += value - last if value >= last else value
            last = value
        return amount

    def text(self) -> str:
        """As OpenMetrics, for promtool."""
        lines = []
        for name in sorted({name for name, _ in self.series}):
            lines.append(f"# TYPE {name.removesuffix('_total')} {'counter' if name.endswith('_total') else 'gauge'}")
            for (series, of), answer in self.series.items():
                if series == name:
                    shown = ",".join(f'{key}="{value}"' for key, value in of)
                    lines += [f"{name}{{{shown}}} {value} {time}" for time, value in answer]
        return "\n".join([*lines, "# EOF", ""])


def store(samples: Samples, folder: Path) -> Path:
    """Make Prometheus's blocks of the samples."""
    page, data = folder / "samples.txt", folder / "data"
    page.write_text(samples.text())
    accepted("tsdb", "create-blocks-from", "openmetrics", "--quiet", page, data)
    return data
