"""What a run on the live node showed, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.cluster.judge import Verdict


@dataclass
class Report:
    """Seconds that each case took, why it failed, delays by what they are of, and a verdict for each gpumap."""

    proves: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    delays: dict[str, list[float]] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    recorded_seconds: float = 0.0

    def text(self) -> str:
        """The tables, as the end of a run prints them."""
        parts = [
            table(("case", "what the page must show", "seconds"), self._cases()),
            table(("delay", "median", "shortest", "longest", "times"), self._delays()),
            table(
                (
                    "gpumap",
                    "requests",
                    "a second",
                    "pages judged",
                    "maps judged",
                    "pages judged to be complete",
                    "false",
                ),
                self._verdicts(),
            ),
        ]
        return "\n\n".join(["", *parts, ""])

    def _cases(self) -> Iterable[Sequence[str]]:
        for name, proves in self.proves.items():
            yield name, proves, f"{self.seconds[name]:.0f}" if name in self.seconds else "failed"

    def _delays(self) -> Iterable[Sequence[str]]:
        for what, values in self.delays.items():
            times = (f"{value:.2f} s" for value in (statistics.median(values), min(values), max(values)))
            yield (what, *times, str(len(values)))

    def _verdicts(self) -> Iterable[Sequence[str]]:
        for one in self.verdicts:
            numbers = (one.pages, one.maps, one.complete, len(one.found))
            yield (f"`{one.name}`", str(one.polls), f"{one.polls / self.recorded_seconds:.0f}", *map(str, numbers))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
