"""What a run on the live node showed, as tables: printed, and written into docs/dev/cluster.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.judge import Verdict

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dev" / "cluster.md"
_PART = re.compile(r"(?<=<!-- written by make e2e-cluster -->\n).*?(?=<!-- end of what it writes -->)", re.DOTALL)


@dataclass
class Report:
    """Seconds that each case took, why it failed, delays by what they are of, and a verdict for each gpumap."""

    proves: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    delays: dict[str, list[float]] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    recorded_seconds: float = 0.0

    @property
    def succeeded(self) -> bool:
        return not self.failures and not any(verdict.found for verdict in self.verdicts)

    def text(self) -> str:
        """The tables of the page."""
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

    def write(self) -> None:
        """Bring the page in line."""
        page, count = _PART.subn(lambda _: self.text(), PAGE.read_text())
        assert count == 1, f"{PAGE} has not one place for it"
        PAGE.write_text(page)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def written_cases() -> Mapping[str, str]:
    """The cases of the page, and what they prove."""
    found = _PART.search(PAGE.read_text())
    assert found is not None
    rows = [line.split(" | ") for line in found[0].strip().split("\n\n")[0].splitlines()[2:]]
    return {name.removeprefix("| "): proves for name, proves, _ in rows}
