"""Only series of gpumap's own jobs count: any pod that Prometheus scrapes can expose gpumap's names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.promql_names import selectors

ROOT = Path(__file__).resolve().parents[2]
RULES = sorted((ROOT / "charts" / "gpumap" / "rules").glob("*.yaml"))
BOARDS = sorted((ROOT / "charts" / "gpumap" / "dashboards").glob("*.json"))
OWN_JOBS = 'job=~".*gpumap.*"'
RECORDED_HERE = 'job=""'
RECORDED_ANYWHERE = 'job=~"|.*gpumap.*"'
"""A record has no job, but that of the federation which took it from another server."""
BOUND_BY_NAME = re.compile(r'\{job=~"\.\*gpumap\.\*",__name__=~"[^"]*"')


def texts(document: Any) -> Iterator[str]:
    """Every text in a document that has a query, as PromQL writes it."""
    if isinstance(document, str):
        if re.search("gpumap[_:]", document):
            yield BOUND_BY_NAME.sub("{", document.replace('\\"', '"').replace('printf "', "printf "))
    elif isinstance(document, dict):
        for name, value in document.items():
            if name not in ("record", "alert", "title", "description", "content", "runbook_url") or "{{" in str(value):
                yield from texts(value)
    elif isinstance(document, list):
        for value in document:
            yield from texts(value)


def unbound(document: Any, of_records: str = RECORDED_HERE) -> list[str]:
    """The selectors of gpumap's families and records that would take series of any job."""
    return [
        f"{name}{{{matchers}}}"
        for text in texts(document)
        for name, matchers in selectors(text)
        if (name.startswith("gpumap_") and OWN_JOBS not in matchers)
        or (":" in name and of_records not in matchers and OWN_JOBS not in matchers)
    ]


@pytest.mark.parametrize("file", RULES, ids=lambda path: path.stem)
def test_rules_read_only_gpumaps_jobs(file: Path) -> None:
    """Alerts, their texts, recording rules of a fleet and of autoscalers."""
    assert unbound(yaml.safe_load(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("file", BOARDS, ids=lambda path: path.stem)
def test_boards_read_only_gpumaps_jobs(file: Path) -> None:
    """Panels and variables."""
    assert unbound(json.loads(file.read_text(encoding="utf-8")), RECORDED_ANYWHERE) == []


def test_the_adapter_reads_only_what_rules_record() -> None:
    """It looks for records, and asks for them with the labels of pods only: both name the job."""
    file = ROOT / "autoscaling" / "prometheus-adapter.yaml"
    rules = [rule for kind in yaml.safe_load(file.read_text(encoding="utf-8"))["rules"].values() for rule in kind]
    assert [unbound(rule["seriesQuery"]) for rule in rules] == [[]] * len(rules)
    assert [rule["metricsQuery"] for rule in rules if "{" + RECORDED_HERE not in rule["metricsQuery"]] == []


def test_keda_reads_only_gpumaps_jobs() -> None:
    """Its query needs no recording rules."""
    file = ROOT / "autoscaling" / "keda-scaledobject.yaml"
    assert unbound(yaml.safe_load(file.read_text(encoding="utf-8"))) == []
