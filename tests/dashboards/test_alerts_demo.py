"""The alerts in a real Prometheus that scrapes the demo, with their hours made seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.command import run_command
from tests.dashboards.test_alerts import ALERTS, FILE, page_of
from tests.demo_process import demo
from tests.pages import Page, serving_pages
from tests.prometheus import Prometheus, chart_job, each_second, eventually, prometheus, settled

DEMO = Path(__file__).resolve().parents[2] / "src" / "gpumap" / "lab" / "demo" / "default.yaml"
SOONER = {
    "{at: 40s, code: 31}": "{at: 20s, code: 31}",
    "{at: 1m20s, code: 13, instance: 2}": "{at: 22s, code: 13, instance: 2}",
    "{at: 2m, code: 79}": "{at: 25s, code: 79}",
    "{kind: lost, from: 2m, until: 2m30s}": "{kind: lost, from: 25s, until: 45s}",
    "{kind: reset_required, from: 2m30s, until: 2m40s, recovery: gpu_reset}": (
        "{kind: reset_required, from: 45s, until: 4m, recovery: gpu_reset}"
    ),
    "to: 71GiB, over: 60s": "to: 78GiB, over: 10s",
    "      row_remap_pending: true": "      row_remap_pending: true\n      clock_events: {hw_thermal_slowdown: true}",
}
"""What happens in the demo's play, so that it happens soon; a full GPU and a hot one."""
EXPECTED = {
    "GpumapGpuIdle": {"research/notebook-idle", "serving/mig-idle"},
    "GpumapGpuOverGrant": {"recsys/ranker"},
    "GpumapGpuUnassignedUse": {"research/squatter"},
    "GpumapSlotsNotInNvml": {"vms/virt-launcher"},
    "GpumapGpuDownUnderPod": {"serving/embedder-demo-node"},
    "GpumapContainerXid": {
        *("research/greedy", "research/notebook-idle", "research/notebook-pair"),
        *("serving/mig-large", "serving/embedder-demo-node"),
    },
    "GpumapGpuLeftover": {"batch/nightly-eval"},
    "GpumapGpuDown": {"/"},
    "GpumapGpuXid": {"/"},
    "GpumapGpuRowRemapPending": {"/"},
    "GpumapGpuNeedsRecovery": {"/"},
    "GpumapGpuMemoryNearlyFull": {"/"},
    "GpumapGpuThermalSlowdown": {"/"},
}
"""The alerts of the demo's node, with their pods; alerts of a GPU have no pod in the labels."""
FIRST_STEPS = {
    "GpumapGpuIdle": r"idle +research +notebook-idle .* \d+[sm] ",
    "GpumapGpuLeftover": r"left PID \d+ eval-worker",
    "GpumapGpuMemoryNearlyFull": r"^NAMESPACE.*\nml-team +trainer ",
    "GpumapGpuOverGrant": "'pod': 'ranker'",
    "GpumapGpuThermalSlowdown": "'reason': 'hw_thermal_slowdown'",
}
"""What the first step of a runbook shows while its alert fires."""
OTHER_FIRST_STEPS = {
    "a cluster": "ContainerXid Down Gone GpuDown GpuDownUnderPod GpuHeldIdle GpuNotOffered GpuRowRemapFailure "
    "GpuRowRemapPending GpuStalled GpuUnassignedUse MissingOnNode MostlyDown PidVisibilityMissing PodLabelsHidden "
    "Restarting",
    "a GPU": "DriverDownUnderPod GpuTemperatureHigh GpuUnexplained GpuXid NvmlUnstable SourceDown SourceSlow",
    "reading: the step names texts, or there is nothing to do": "AccountingGap GpuBusy GpuNeedsRecovery SlotsNotInNvml "
    "SourceErrors UnmatchedSlots",
    "a demo in which the alert fires": "AllocationUnhealthy CapabilityLost DataStale GpuEccUncorrected GpuMaybeIdle "
    "GpuMissing",
}
"""What the first step of the other runbooks needs."""
TEAM = 'kube_pod_labels{namespace="research",pod="notebook-idle",label_team="vision"} 1\n'
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SCALE = 180.0
FIRED = 'count by (alertname, namespace, pod) (count_over_time(ALERTS{alertstate="firing"}[5m]))'


def shorter(duration: str) -> str:
    milliseconds = float(duration[:-1]) * UNITS[duration[-1]] / SCALE * 1000
    return f"{max(round(milliseconds), 1)}ms"


def hurried() -> str:
    """The rules with windows and waits a fraction of what they are.

    Those on gpumap itself stay as they are: a machine that tests make busy is late by seconds. So does the one on load,
    since the play's peaks would be hours.
    """
    rules = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for group in rules["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            if group["name"] != "gpumap-itself" and rule.get("alert") != "GpumapGpuBusy":
                rule["expr"] = re.sub(r"(?<=\[)\d+\w(?=\])|(?<=offset )\d+\w", lambda m: shorter(m[0]), rule["expr"])
                rule["expr"] = re.sub(r"(?<=> )(3600|7200)", lambda m: str(int(m[1]) / SCALE), rule["expr"])
                rule |= {"for": shorter(rule["for"])} if "for" in rule else {}
    return yaml.safe_dump(rules)


@pytest.fixture(name="watching", scope="module")
def run_watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("alerts")
    play = DEMO.read_text(encoding="utf-8")
    for then, sooner in SOONER.items():
        assert play.count(then) == 1, then
        play = play.replace(then, sooner)
    (folder / "play.yaml").write_text(play, encoding="utf-8")
    (folder / "alerts.yaml").write_text(hurried(), encoding="utf-8")
    for name in ("node", "prometheus"):
        (folder / name).mkdir()
    with (
        serving_pages(lambda _: Page(TEAM.encode())) as states,
        demo(
            folder / "node", "--scenario", str(folder / "play.yaml"), "--interval", "500ms", "--idle-after", "5s"
        ) as url,
    ):
        kube = {"job_name": "kube-state-metrics", "honor_labels": True, "static_configs": [{"targets": [states]}]}
        config = each_second(chart_job({"demo-node": url}), kube, rule_files=[str(folder / "alerts.yaml")])
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        with prometheus(folder / "prometheus", config=config) as found:
            yield found


def fired(watching: Prometheus) -> dict[str, set[str]]:
    """Which alerts have fired so far, and of which pods."""
    found: dict[str, set[str]] = {}
    for labels, _ in watching.ask(FIRED):
        of = f"{labels.get('namespace', '')}/{labels.get('pod', '')}"
        found.setdefault(labels["alertname"], set()).add(of)
    return found


def test_what_is_wrong_in_the_demo_is_told_and_nothing_else(watching: Prometheus) -> None:
    """Each finding of the play is an alert of the right pods, and no other alert fires."""
    assert settled(lambda: fired(watching), EXPECTED, seconds=150) == EXPECTED
    assert EXPECTED.keys() <= ALERTS.keys()


def test_texts_name_what_a_person_looks_for(watching: Prometheus) -> None:
    """The pod, its team, the GPU by its index, the node, in a text of a real Prometheus."""

    def descriptions() -> set[str]:
        return {alert["annotations"]["description"] for alert in watching.api("alerts")["alerts"]}

    idle = (
        r"research/notebook-idle \(team vision\) has not used GPU 2 of node demo-node for .* has no process there\. .*"
    )
    eventually(lambda: any(re.fullmatch(idle, one) for one in descriptions()), 60, about=descriptions)
    leftover = (
        r"A process of a deleted pod \(batch/nightly-eval\) uses 18\S*GiB of memory on GPU 4 of node demo-node\. .*"
    )
    eventually(lambda: any(re.fullmatch(leftover, one) for one in descriptions()), 60, about=descriptions)


@pytest.mark.parametrize("alert", FIRST_STEPS)
def test_the_first_step_of_a_runbook_shows_what_it_says(watching: Prometheus, alert: str) -> None:
    """It is a command or a query."""
    (step,) = re.findall(r"^1\. .*?`(gpumap[ _][^`]+)`", page_of(alert), re.MULTILINE)
    agent = watching.api("targets")["activeTargets"][0]["scrapeUrl"].removesuffix("/metrics")
    words = step.replace(" --url http://127.0.0.1:9401", "").split()[1:]

    def answer() -> str:
        return run_command(*words, "--url", agent).stdout if words else str(watching.ask(step))

    eventually(lambda: alert in fired(watching) and bool(re.search(FIRST_STEPS[alert], answer())), 60, about=answer)


def test_every_first_step_is_run_or_has_a_reason() -> None:
    others = [f"Gpumap{name}" for names in OTHER_FIRST_STEPS.values() for name in names.split()]
    assert sorted([*FIRST_STEPS, *others]) == sorted(ALERTS)


def test_rules_evaluate(watching: Prometheus) -> None:
    """No rule has failed, nor a query in a text."""
    eventually(lambda: all(rule["health"] == "ok" for rule in rules(watching)), about=lambda: rules(watching))
    for alert in watching.api("alerts")["alerts"]:
        assert "<error" not in str(alert["annotations"]), alert
    failures = watching.ask("prometheus_rule_evaluation_failures_total > 0")
    assert failures == []


def rules(watching: Prometheus) -> list[dict[str, str]]:
    return [
        {"name": rule["name"], "health": rule["health"], "error": rule.get("lastError", "")}
        for group in watching.api("rules")["groups"]
        for rule in group["rules"]
    ]


TWO_MIG_DEVICES = """
node: mig-node
gpus:
  - model: NVIDIA H100 80GB HBM3
    memory: 81559MiB
    mig: [1g.10gb, 1g.10gb, 3g.40gb]
pods:
  - namespace: ml
    name: two
    containers:
      - {name: c, mig: [{gpu: 0, instance: 0}, {gpu: 0, instance: 1}], processes: [{memory: 3GiB}]}
"""


def test_rules_evaluate_on_a_pod_with_two_devices_of_one_card_by_two_jobs(tmp_path: Path) -> None:
    """No rule fails, and the pod is listed with both devices and with their GPU."""
    (tmp_path / "play.yaml").write_text(TWO_MIG_DEVICES, encoding="utf-8")
    (tmp_path / "alerts.yaml").write_text(hurried(), encoding="utf-8")
    for name in ("node", "prometheus"):
        (tmp_path / name).mkdir()
    with demo(tmp_path / "node", "--scenario", str(tmp_path / "play.yaml"), "--interval", "500ms") as url:
        jobs = [chart_job({"mig-node": url}, name=name) for name in ("gpumap", "gpumap-2")]
        config = each_second(*jobs, rule_files=[str(tmp_path / "alerts.yaml")])
        with prometheus(tmp_path / "prometheus", config=config) as found:
            eventually(
                lambda: len(found.ask('gpumap:gpu_holders:info{pod="two"}')) == 3, 60, about=lambda: rules(found)
            )
            eventually(lambda: all(rule["health"] == "ok" for rule in rules(found)), about=lambda: rules(found))
            assert found.ask("prometheus_rule_evaluation_failures_total > 0") == []
