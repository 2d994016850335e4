"""Counts, thresholds and waits in the documents' sentences are those of the rules, flags and folders."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import yaml

from gpumap.agent.flags import FLAGS
from gpumap.agent.judgement.holders import STALLED_SECONDS
from gpumap.agent.judgement.judge import ENDING_SECONDS, RECENT_SECONDS
from tests.dashboards.test_alerts import ALERTS, ROOT
from tests.docs.test_links import DOCUMENTS

NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "ten": 10, "twenty": 20}
UNITS = {"%": 0.01, "s": 1, "m": 60, "h": 3600, "second": 1, "minute": 60, "hour": 3600, "MiB": 2**20, "time": 1}


def value(text: str) -> float:
    """Read "95 %", "2m", "two hours" or "ten" (the sentence has its unit before)."""
    number, unit = re.fullmatch(r"(\d+|[a-zA-Z]+?) ?(%|MiB|[smh]|seconds?|minutes?|hours?|times?)?", text).groups()  # type: ignore[union-attr]
    count = float(number) if number.isdigit() else NUMBERS[number.lower()]
    return count * (UNITS[unit if unit in UNITS else unit.removesuffix("s")] if unit else 1)


def wait(alert: str) -> float:
    return value(ALERTS[alert]["for"])


def threshold(alert: str, before: str = "> ") -> float:
    """The number after the first `before` in the alert's expression."""
    match = re.search(rf"{re.escape(before)}(\d[\d.]*)(m|h)?", ALERTS[alert]["expr"])
    assert match, alert
    return float(match[1]) * UNITS[match[2] or "s"]


RULE_GROUPS = [
    group for file in (ROOT / "rules").glob("*.yaml") for group in yaml.safe_load(file.read_text())["groups"]
]
BOARDS = len([*(ROOT / "dashboards").glob("*.json")])
SCENARIOS = len([*(ROOT / "src/gpumap/lab/demo").glob("*.yaml")])
IDLE_SECONDS = threshold("GpumapGpuIdle") + wait("GpumapGpuIdle")
SENTENCES: Mapping[str, Mapping[str, float]] = {
    "CHANGELOG.md": {r"(\d+) alerts with runbooks": len(ALERTS), r"(\w+) Grafana boards": BOARDS},
    "docs/how-to/boards.md": {r"(\w+) boards for Grafana": BOARDS},
    "docs/dev/scenario.md": {r"(\w+) scenarios come with": SCENARIOS},
    "docs/explanation/cost.md": {
        r"at most (\d+) rules in each": max(len(group["rules"]) for group in RULE_GROUPS),
    },
    "docs/how-to/reclaim-notebooks.md": {r"`GpumapGpuIdle` fires after (\w+ hours)": IDLE_SECONDS},
    "docs/reference/alerts.md": {
        r"`GpumapGpuIdle` after (\w+ hours)": IDLE_SECONDS,
        r"`GpumapGpuMaybeIdle` after (\w+ hours)": threshold("GpumapGpuMaybeIdle"),
        r"`GpumapGpuOverGrant`, from (\d+ MiB)": threshold("GpumapGpuOverGrant", ">= ") * 2**20,
    },
    "docs/reference/findings.md": {
        r"busy without work for (\d+ minutes)": STALLED_SECONDS,
        r"in each collection of (\w+ minutes)": STALLED_SECONDS,
        r"not existed for (\d+ s)": ENDING_SECONDS,
    },
    "GpumapAccountingGap": {r"(?:more than|Below) (\d+ %)": threshold("GpumapAccountingGap")},
    "GpumapCapabilityLost": {r"(?:last|after) (\w+ hours)": value("6h")},
    "GpumapContainerXid": {r"(\d+ minutes) after the last": threshold("GpumapContainerXid", "[")},
    "GpumapDataStale": {
        r"for (\w+ minutes):": threshold("GpumapDataStale", "[") + wait("GpumapDataStale"),
        r"rule looks at (\w+)": threshold("GpumapDataStale", "[") / 60,
        r"alert waits for (\w+)": wait("GpumapDataStale") / 60,
    },
    "GpumapGpuBusy": {r"(?:more than|Below) (\d+ %)": threshold("GpumapGpuBusy")},
    "GpumapGpuEccUncorrected": {r"(\w+ hour) after the last": RECENT_SECONDS},
    "GpumapGpuHeldIdle": {r"for (\w+ hours)": threshold("GpumapGpuHeldIdle") + wait("GpumapGpuHeldIdle")},
    "GpumapGpuIdle": {r"(\w+ hours)": IDLE_SECONDS},
    "GpumapGpuMaybeIdle": {r"(\w+ hours)": threshold("GpumapGpuMaybeIdle")},
    "GpumapGpuMemoryNearlyFull": {r"(?:more than|Below) (\d+ %)": threshold("GpumapGpuMemoryNearlyFull")},
    "GpumapGpuOverGrant": {r"(\d+ MiB)": threshold("GpumapGpuOverGrant", ">= ") * 2**20},
    "GpumapGpuStalled": {
        r"For (\w+ minutes)": STALLED_SECONDS + wait("GpumapGpuStalled"),
        r"agent waits for (\w+)": STALLED_SECONDS / 60,
    },
    "GpumapGpuTemperatureHigh": {
        r"above (\d+) °C, or": threshold("GpumapGpuTemperatureHigh"),
        r"memory is above (\d+) °C": threshold("GpumapGpuTemperatureHigh", '"memory"}[5m])) > '),
    },
    "GpumapGpuThermalSlowdown": {
        r"(?:more than|Below) (\d+ %)": threshold("GpumapGpuThermalSlowdown"),
        r"last (\w+ minutes)": threshold("GpumapGpuThermalSlowdown", "["),
    },
    "GpumapGpuXid": {r"(\w+ hour) after the last": RECENT_SECONDS},
    "GpumapNvmlUnstable": {r"(?:than|At) (\w+)(?= times| failures)": threshold("GpumapNvmlUnstable")},
    "GpumapRestarting": {r"(?:than|At) (\w+)(?= times| starts)": threshold("GpumapRestarting")},
    "GpumapSourceDown": {r"failed for (\w+ minutes)": wait("GpumapSourceDown")},
    "GpumapSourceErrors": {r"(?:least|Below) (\d+ %)": threshold("GpumapSourceErrors")},
    "GpumapSourceSlow": {r"(?:than|Below) (\w+ seconds)": threshold("GpumapSourceSlow", "\n) > ")},
}
"""Each page, a runbook by its alert's name, with its sentences and what the number in them must be."""


@pytest.mark.parametrize("page", SENTENCES)
def test_a_sentence_has_the_number_of_the_program(page: str) -> None:
    path = ROOT / (page if page.endswith(".md") else f"docs/runbooks/{page}.md")
    text = " ".join(path.read_text(encoding="utf-8").split())
    for sentence, expected in SENTENCES[page].items():
        numbers = re.findall(sentence, text)
        assert numbers, sentence
        assert {round(value(number), 9) for number in numbers} == {expected}, sentence


def test_a_flags_default_is_that_of_the_program() -> None:
    """A value in brackets after a flag is its default."""
    defaults = {flag.name: flag.default for flag in FLAGS}
    texts = [" ".join(page.read_text(encoding="utf-8").split()) for page in DOCUMENTS]
    named = {pair for text in texts for pair in re.findall(r"`(--[a-z-]+)` \((\d+[a-z]+)\)", text)}
    assert len(named) > 1
    assert {(name, value) for name, value in named if defaults[name] != value} == set()


def test_questions_and_tasks_are_counted() -> None:
    """The headings of docs/README.md and README.md count what is below them."""
    for page, heading, item in (
        ("docs/README.md", "questions", r"^\| [A-Z].*\?"),
        ("README.md", "tasks", r"^\*\*|^- \*\*"),
    ):
        text = (ROOT / page).read_text(encoding="utf-8")
        ((count, items),) = re.findall(rf"^## (\w+) {heading}\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
        assert NUMBERS[count.lower()] == len(re.findall(item, items, re.MULTILINE)), page
