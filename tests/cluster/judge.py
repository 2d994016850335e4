"""Judges every answer of a gpumap that was recorded, against the truth of its own window of time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests import laws
from tests.cluster.recorder import Answer, Recorder
from tests.cluster.truth import RELEASE_SECONDS, Truth
from tests.exposed import Page
from tests.laws import Span, Window

LONGEST_READ_SECONDS = 5.0
"""From a collection's first read to its end: a source's deadline."""
AFTER_SECONDS = 0.5
"""A process that dies leaves /proc before the driver's list. So a page may know of an end that much earlier."""
GRACE_SECONDS = 60.0
"""After a kubelet's return."""
RECOVERY_SECONDS = 12.0
"""After a disturbance, until the page must be complete again."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A time in which the test took something away. `lists_old`: the kubelet's list may be older than that."""

    what: str
    span: Span
    lists_old: bool = False


@dataclass
class Verdict:
    """What was judged of one gpumap, and what was wrong."""

    name: str
    polls: int = 0
    pages: int = 0
    maps: int = 0
    complete: int = 0
    found: list[tuple[float, str]] = field(default_factory=list)

    @property
    def by_rule(self) -> Counter[str]:
        return Counter(_law(finding) for _, finding in self.found)

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.polls} polls, {self.pages} different pages and {self.maps} maps, "
            f"{self.complete} of them complete; wrong: {dict(self.by_rule)}"
        ]
        seen: Counter[str] = Counter()
        for at, finding in self.found:
            seen[_law(finding)] += 1
            if seen[_law(finding)] <= 5:
                lines.append(f"  {at:.3f} {finding}")
        return "\n".join(lines)


def _law(finding: str) -> str:
    return finding.partition(":")[0]


@dataclass(frozen=True)
class Judge:
    """`interval_seconds` is the gpumap's own; `lacks` has the parts of the node that it may not see."""

    truth: Truth
    disturbances: list[Disturbance]
    interval_seconds: float
    lacks: frozenset[str]

    def judge(self, recorder: Recorder) -> Verdict:
        verdict = Verdict(recorder.name, polls=recorder.polls)
        times: dict[int, float] = {}
        for answer in recorder.answers:
            if answer.path == "/metrics":
                at = self._judge_page(verdict, times.get(answer.pid, 0.0), answer)
                times[answer.pid] = max(at, times.get(answer.pid, 0.0))
        previous = 0.0
        for answer in recorder.answers:
            if answer.path != "/metrics":
                document = json.loads(answer.text)
                if document["stale"] is None:
                    window = self.window(_before(document["timestamp"], previous), document["timestamp"])
                    verdict.found += [(answer.first_at, one) for one in laws.wrong_map(document, window)]
                    verdict.maps += 1
                    previous = document["timestamp"]
        verdict.found += [(at, f"unanswered: {why}") for at, why in self._unanswered(recorder)]
        return verdict

    def _judge_page(self, verdict: Verdict, previous: float, answer: Answer) -> float:
        """Judge a page, and give its snapshot's time. `previous` is that of the snapshot before it."""
        page = Page(answer.text)
        at = page.value("gpumap_snapshot_timestamp_seconds")
        if at is None:
            return previous
        window = self.window(_before(at, previous), at)
        verdict.pages += 1
        verdict.found += [(answer.first_at, one) for one in laws.wrong(page, window)]
        settled = Span(window.span.start - 2 * self.interval_seconds - 2.0, window.span.end)
        recent = Span(settled.start - RECOVERY_SECONDS, settled.end)
        started = page.value("process_start_time_seconds") or at
        if started > recent.start or any(one.span.meets(recent) for one in self.disturbances):
            return at
        verdict.complete += 1
        steady = self.truth.window(settled, self.lacks)
        verdict.found += [(answer.first_at, one) for one in laws.missing(page, steady)]
        return at

    def window(self, previous: float, at: float) -> Window:
        span = Span(max(previous, at - LONGEST_READ_SECONDS), at + AFTER_SECONDS)
        listed = span.start
        for one in self.disturbances:
            if one.lists_old and Span(one.span.start, one.span.end + GRACE_SECONDS + RELEASE_SECONDS).meets(span):
                listed = min(listed, one.span.start)
        return self.truth.window(span, self.lacks, listed)

    def _unanswered(self, recorder: Recorder) -> Iterator[tuple[float, str]]:
        """Requests that a gpumap missed which had answered before, and did so later."""
        served: dict[int, list[float]] = {}
        for answer in recorder.answers:
            served.setdefault(answer.pid, []).extend((answer.first_at, answer.last_at))
        for missed in recorder.missed:
            times = served.get(missed.pid, [0.0])
            if min(times) < missed.at < max(times):
                yield missed.at, f"{missed.path}: {missed.why}"


def _before(at: float, earlier: float) -> float:
    """An earlier snapshot's time, or 0 for the same snapshot: that does not show when it was collected."""
    return earlier if earlier < at else 0.0
