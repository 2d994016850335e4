"""What the bench says: one row for each goal of each node shape, a ratio of one run beside its goal and its noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NVITOP_MISSING = "nvitop-exporter cannot be had here (`make bench` installs it from PyPI)"


@dataclass(frozen=True)
class Figure:
    """`ratio` is `None` where it cannot be measured; then `absolute` says why. `at_least`: larger is better.

    Without a `limit` there is no goal: the figure is there to be known. `noise` is the ratio of two copies of gpumap in
    this row. `unit` is another one where the goal is not a ratio. `others` is the share of this machine's CPU time that
    other programs took meanwhile.
    """

    goal: str
    what: str
    ratio: float | None
    limit: float | None
    absolute: str
    at_least: bool = False
    noise: float | None = None
    unit: str = "×"
    others: float | None = None

    @property
    def reached(self) -> bool:
        if self.ratio is None or self.limit is None:
            return False
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit

    @property
    def row(self) -> tuple[str, ...]:
        sign = "≥" if self.at_least else "≤"
        mark = "–" if self.ratio is None or self.limit is None else "✔" if self.reached else "✘"
        ratio = "–" if self.ratio is None else f"{_short(self.ratio)}{self.unit}"
        goal = "–" if self.limit is None else f"{sign} {_short(self.limit)}{self.unit}"
        noise = "–" if self.noise is None else f"{_short(self.noise)}×"
        others = "–" if self.others is None else f"{self.others:.0%}"
        return self.goal, self.what, ratio, noise, goal, mark, self.absolute, others

    @property
    def place(self) -> tuple[bool, int]:
        """Its place in the table: the goals by their numbers, then what has none."""
        return self.goal[0] != "P", int(self.goal[1:])


def missing(goal: str, what: str, limit: float) -> Figure:
    return Figure(goal, what, None, limit, NVITOP_MISSING)


def mean(copies: Sequence[float]) -> float:
    """Of two identical copies of gpumap."""
    return statistics.fmean(copies)


def noise(copies: Sequence[float]) -> float:
    """The larger of two identical copies of gpumap, against the smaller: 1 where nothing else disturbed them."""
    return max(copies) / min(copies)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def table(figures: Sequence[Figure]) -> str:
    head = ("", "figure", "ratio", "noise", "goal", "", "absolute, this machine", "others")
    return table_of(head, [figure.row for figure in figures])


def table_of(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rows = [head, *body]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _short(ratio: float) -> str:
    return f"{ratio:.3g}"
