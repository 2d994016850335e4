"""The alerts of rules/alerts.yaml: promtool's unit tests, and laws that each of them keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumap.model import remedies
from gpumap.model.terms import FINDINGS
from tests.dashboards.promql_names import LABELS, assert_known, selectors
from tests.fences import read_blocks
from tests.promtool import accepted, assert_parses

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "charts" / "gpumap" / "rules" / "alerts.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"
UNIT_TESTS = sorted((ROOT / "tests" / "rules").glob("alerts-*.test.yaml"))
HEADINGS = ["What to do", "When it ends"]

GROUPS_OF_RULES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS_OF_RULES for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = {rule["record"] for rule in RULES if "record" in rule}

MADE = {"team", "gpu", "holder"}
"""Labels that the rules make."""


def queries(rule: dict[str, Any]) -> Iterator[str]:
    """Its expression, and what its texts ask."""
    yield rule["expr"]
    for text in rule.get("annotations", {}).values():
        for asked in re.findall(r'printf "((?:[^"\\]|\\.)*)"', text):
            yield asked.replace('\\"', '"').replace("%q", '""')


def page_of(alert: str) -> str:
    return (RUNBOOKS / f"{alert}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tests", UNIT_TESTS, ids=lambda path: path.name)
def test_each_alert_fires_when_it_should(tests: Path) -> None:
    """promtool: with these series each alert fires with its labels and texts, and beside the nearest innocent not."""
    accepted("test", "rules", tests)


def test_promtool_has_nothing_to_say() -> None:
    done = accepted("check", "rules", "--lint=all", "--lint-fatal", FILE)
    assert done.stderr == ""
    assert f"SUCCESS: {len(RULES)} rules found" in done.stdout


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_whole(alert: str) -> None:
    """It has a severity, a plain summary without templates, a description that ends with the first step, and the
    address of its page."""
    rule = ALERTS[alert]
    assert re.fullmatch(r"Gpumap[A-Z]\w+", alert)
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert not rule["annotations"]["summary"].endswith(".")
    assert "{{" not in rule["annotations"]["summary"]
    assert rule["annotations"]["description"].count(" First: ") == 1
    assert rule["annotations"]["description"].endswith(".")
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{alert}.md"


FAULTS = (
    *remedies.FAULTS,
    *(f"recovery_{action}" for action in remedies.RECOVERY),
    *("row_remap_pending", "row_remap_failure", "ecc_uncorrected"),
    *(f"xid_{code}" for code in remedies.FATAL_XIDS),
)
REPORTED_ELSEWHERE = {("unmatched", "nvml_down"), ("unmatched", "device_down"), ("unused", ""), ("maybe_idle", "")}
"""The alerts on the driver and on the GPU report the first two. Memory that is not used is no reason for an alert.
GpumapGpuMaybeIdle is for `idle` and `maybe_idle` together."""
OF_SEVERAL = {"GpumapGpuDownUnderPod", "GpumapGpuHeldIdle", "GpumapGpuMaybeIdle"}
"""They join findings with what is held, or with each other."""


def reported_by(finding: str, reason: str) -> list[str]:
    """The alerts with matchers that select such a finding."""
    found = []
    for alert in ALERTS.keys() - OF_SEVERAL:
        for series, matchers in selectors(ALERTS[alert]["expr"]):
            if "finding" in series and f'finding="{finding}"' in matchers:
                chosen = re.search(r'reason(=~|!~|=)"([^"]+)"', matchers)
                fits = not chosen or (re.fullmatch(chosen[2], reason) is None) == (chosen[1] == "!~")
                found += [alert] * fits
    return sorted(set(found))


def test_each_finding_is_reported_by_one_alert() -> None:
    reasons = {"fault": FAULTS, "unmatched": (*remedies.UNMATCHED,)}
    for finding in FINDINGS:
        for reason in reasons.get(finding, ("",)):
            expected = 0 if (finding, reason) in REPORTED_ELSEWHERE else 1
            assert len(reported_by(finding, reason)) == expected, (finding, reason)


def test_who_is_called_out_of_bed_is_few() -> None:
    """Critical is what stops somebody's work, and blindness of everything."""
    critical = {name for name, rule in ALERTS.items() if rule["labels"]["severity"] == "critical"}
    assert critical == {"GpumapGpuDownUnderPod", "GpumapDriverDownUnderPod", "GpumapMostlyDown"}


def test_names_are_unique() -> None:
    """The chart leaves alerts out by name, and a silence is by name."""
    assert len(ALERTS) + len(RECORDS) == len(RULES)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_page(alert: str) -> None:
    """Its runbook has the fixed headings in their order, names severity and `for`, and has text under each."""
    page = page_of(alert)
    first, *parts = re.split(r"^## (?=.)", page, flags=re.MULTILINE)
    wait = f", after {ALERTS[alert]['for']}" if "for" in ALERTS[alert] else ""
    assert first.startswith(f"# {alert}\n\nSeverity {ALERTS[alert]['labels']['severity']}{wait}. ")
    assert len(first.split("\n\n")[2]) > 20, "it says what the alert means"
    assert [part.splitlines()[0] for part in parts] == HEADINGS
    assert all(len(part.split("\n", 1)[1].strip()) > 10 for part in parts)


def test_there_is_no_page_without_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {*ALERTS, "README"}
    lists = re.findall(r"^- (\w+): (.+(?:\n  .+)*)", page_of("README"), re.MULTILINE)
    rows = [(*link, severity) for severity, links in lists for link in re.findall(r"\[(\w+)\]\((\w+)\.md\)", links)]
    assert sorted(rows) == sorted((name, name, rule["labels"]["severity"]) for name, rule in ALERTS.items())


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_tested_either_way(alert: str) -> None:
    """In promtool's tests there is a moment at which it fires, and a node on which it never does."""
    cases = [test for path in UNIT_TESTS for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]]
    fires, innocent = False, False
    for case in cases:
        asked = [check["exp_alerts"] for check in case.get("alert_rule_test", []) if check["alertname"] == alert]
        fires |= any(asked)
        innocent |= bool(asked) and not any(asked)
    assert (fires, innocent) == (True, True)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_series_and_labels_exist(rule: dict[str, Any]) -> None:
    """What the rule and its texts ask for is in docs/reference/metrics.md, or made by another rule here."""
    for query in queries(rule):
        assert_known(query, RECORDS, MADE)


BY_TARGET = {"GpumapSourceDown"}
"""Asks only whether a target has such series at all."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_gpumap_itself_is_blamed_for_nothing(rule: dict[str, Any]) -> None:
    """Without honorLabels `pod` is gpumap's own: every series that has a pod is asked for by its exported_pod, too."""
    for series, matchers in selectors(rule["expr"]):
        if "pod" in LABELS.get(series, ()) and rule.get("alert") not in BY_TARGET:
            assert "exported_pod" in matchers, series


NOT_BRIDGED = {"GpumapMissingOnNode"}
"""A gpumap that is there now is there: the version's series is asked beside a week's history."""


@pytest.mark.parametrize("alert", ALERTS)
def test_a_gap_begins_nothing_anew(alert: str) -> None:
    """An alert asks over a period, not only of one moment; what gpumap reports once is no alert yet."""
    rule = ALERTS[alert]
    bare = re.sub(r"gpumap_\w+(?:\{[^}]*\})?(?:\[\d+\w\]| offset 15m)|gpumap:[\w:]+", "", rule["expr"])
    bare = re.sub(r"gpumap_(?:gpu_xid_errors_by_code|container_xid_errors)_total(?:\{[^}]*\})?", "", bare)
    assert "gpumap_" not in bare or alert in NOT_BRIDGED
    bridged = "last_over_time(gpumap_" in rule["expr"] and not re.search(r"increase\(|\[1h\]", rule["expr"])
    assert not bridged or rule["for"].endswith("h") or int(rule["for"].removesuffix("m")) >= 10


def test_documents_name_alerts_that_exist() -> None:
    """docs/reference/alerts.md and the pages; and docs/reference/alerts.md lists which are critical."""
    for page in (ROOT / "docs" / "reference" / "alerts.md", *RUNBOOKS.glob("*.md")):
        assert set(re.findall(r"\bGpumap[A-Z]\w+", page.read_text(encoding="utf-8"))) <= ALERTS.keys(), page.name
    row = re.search(
        r"^\| `critical` .*$", (ROOT / "docs" / "reference" / "alerts.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    critical = {name for name, rule in ALERTS.items() if rule["labels"]["severity"] == "critical"}
    assert row
    assert set(re.findall(r"Gpumap\w+", row[0])) == critical


def test_an_alert_is_inhibited_by_labels_that_it_has() -> None:
    """Alertmanager takes a label that both alerts lack as equal: one GPU would then silence all of its node."""
    of_findings = next(rule["expr"] for rule in RULES if rule.get("record") == "gpumap:finding:age_seconds")
    text = (ROOT / "docs" / "reference" / "alerts.md").read_text(encoding="utf-8")
    (routing,) = (yaml.safe_load(block.body) for block in read_blocks(text, "yaml") if "inhibit_rules" in block.body)
    for rule in routing["inhibit_rules"]:
        matchers = " ".join((*rule["source_matchers"], *rule["target_matchers"]))
        for alert in re.findall(r"Gpumap\w+", matchers):
            expr = re.sub(r"gpumap:finding:\w+", lambda _: of_findings, ALERTS[alert]["expr"])
            assert all(re.search(rf"\b{label}\b", expr) for label in rule["equal"]), alert


def test_queries_parse(tmp_path: Path) -> None:
    """Those of texts and of runbooks, which ask for series that exist."""
    asked = [query for rule in RULES for query in queries(rule)]
    asked += [block.body for page in sorted(RUNBOOKS.glob("*.md")) for block in read_blocks(page.read_text(), "promql")]
    for query in asked:
        assert_known(query, RECORDS, MADE)
    assert_parses(asked, tmp_path)
