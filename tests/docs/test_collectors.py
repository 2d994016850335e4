"""docs/how-to/opentelemetry.md and send-elsewhere.md: each snippet names what the chart and gpumap have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumap.agent.flags import GROUPS
from gpumap.agent.metrics import native
from gpumap.model.families import Family
from tests.deploy.chart import CHART, Manifest, container_of, helm, render, settings
from tests.fences import read_blocks
from tests.promtool import accepted

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "how-to"
COLLECTOR_FILE = ROOT / "deploy" / "opentelemetry" / "collector.yaml"
FOLDER = ROOT / "deploy" / "collectors"
COLLECTOR = COLLECTOR_FILE.read_text(encoding="utf-8")
FAMILIES = {one.name: one for one in native(GROUPS, process_metrics=True) if isinstance(one, Family)}
CONVENTIONS = {
    "hw.gpu.utilization": ("gauge", "1"),
    "hw.gpu.memory.usage": ("gauge", "By"),
    "hw.gpu.memory.limit": ("gauge", "By"),
    "hw.energy": ("counter", "J"),
    "hw.power": ("gauge", "W"),
    "hw.temperature": ("gauge", "Cel"),
    "hw.errors": ("counter", "{error}"),
}
"""OpenTelemetry's hardware conventions 1.44: the kind of gpumap's family, and the unit."""


def snippet(page: str, word: str) -> str:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    (found,) = (block.body for block in read_blocks(text, "yaml") if block.words == {word})
    return found


def rendered(values: str, folder: Path) -> dict[str, Manifest]:
    """What the chart makes with these values."""
    (file := folder / "values.yaml").write_text(values, encoding="utf-8")
    done = helm("template", "gpumap", CHART, "--values", file, *settings(()))
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one for one in yaml.safe_load_all(done.stdout) if one}


def selects_the_agents(spec: Manifest, port: str) -> None:
    """Its selector fits the chart's pods, and its port is theirs."""
    manifests = render()
    pods = manifests["DaemonSet"]["spec"]["template"]
    assert spec["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert port in [one["name"] for one in container_of(manifests)["ports"]]


# --- OpenTelemetry ----------------------------------------------------------------------------------------------------


def test_the_collector_scrapes_as_prometheus_does(tmp_path: Path) -> None:
    """Its scrape configuration is valid, with the relabelings of scrape.md. Its pipeline names what it declares."""
    collector = yaml.safe_load(COLLECTOR)
    scraping = collector["receivers"]["prometheus"]["config"]
    (job,) = scraping["scrape_configs"]
    (discovery,) = job.pop("kubernetes_sd_configs")  # Debian's Prometheus is built without it
    assert discovery == {
        "role": "pod",
        "selectors": [{"role": "pod", "field": "spec.nodeName=${env:K8S_NODE_NAME}"}],
    }
    text = (DOCS / "scrape.md").read_text(encoding="utf-8")
    (known,) = (block.body for block in read_blocks(text, "yaml") if "kubernetes_sd_configs" in block.body)
    (expected,) = yaml.safe_load(known)["scrape_configs"]
    assert {**job, "scrape_interval": None} == {
        **{name: value for name, value in expected.items() if name != "kubernetes_sd_configs"},
        "scrape_interval": None,
    }
    (file := tmp_path / "prometheus.json").write_text(json.dumps(scraping))
    accepted("check", "config", file)
    (pipeline,) = collector["service"]["pipelines"].values()
    for kind, names in pipeline.items():
        assert set(names) == set(collector[kind])
    lines = [line for line in COLLECTOR.splitlines() if not line.startswith("#")]
    assert re.findall(r"\$+[^$]{4}", "\n".join(lines)) == ["${env"], "the Collector replaces every other $"


def test_the_page_shows_a_processor_of_the_file() -> None:
    """docs/how-to/opentelemetry.md has the processor of the pods as the file has it."""
    assert (
        yaml.safe_load(snippet("opentelemetry", "processors")).items()
        <= yaml.safe_load(COLLECTOR)["processors"].items()
    )


def statements() -> list[tuple[str, str]]:
    """(context, statement) of both processors, in order."""
    processors = yaml.safe_load(COLLECTOR)["processors"].values()
    groups = [group for one in processors for group in one.get("metric_statements", ())]
    return [(group["context"], line) for group in groups for line in group["statements"]]


def test_the_hardware_names() -> None:
    """Each is made of a family of its kind and unit, as the conventions have it, and is on the page."""
    copies = {}
    for context, line in statements():
        if match := re.fullmatch(r'copy_metric\(name="(.+?)", unit="(.+?)"\) where name == "(\w+)"', line):
            assert context == "metric"
            copies[match[1]] = (FAMILIES[match[3]].kind, match[2])
            assert f"`{match[3]}`" in (DOCS / "opentelemetry.md").read_text(encoding="utf-8")
            assert f"`{match[1]}" in (DOCS / "opentelemetry.md").read_text(encoding="utf-8")
    assert copies == CONVENTIONS


def test_the_labels_of_the_statements() -> None:
    """A statement reads only labels that the families have, and removes none before it was read."""
    source = {match[1]: match[2] for _, line in statements() if (match := _COPY.fullmatch(line))}
    removed: set[tuple[str, str]] = set()
    for context, line in statements():
        if context != "datapoint":
            assert _COPY.fullmatch(line) or line.startswith('convert_gauge_to_sum("cumulative", false) where name == ')
            continue
        match = _SET.fullmatch(line) or _DELETE.fullmatch(line)
        assert match is not None, line
        found = match.groupdict()
        label, named = found.get("label"), found.get("metric")
        metrics = [named] if named else list(source) if "IsMatch" in line else []
        for metric in metrics:
            if label:
                assert label in FAMILIES[source[metric]].labels
                assert (metric, label) not in removed
                if line.startswith("delete_key"):
                    removed.add((metric, label))
        if not metrics:
            assert label in {"node", "namespace", "pod", "container"}


_COPY = re.compile(r'copy_metric\(name="(.+?)", unit=".+?"\) where name == "(\w+)"')
_WHERE = (
    r' where (?:IsMatch\(metric\.name, "\^hw\\\\\."\)|metric\.name == "(?P<metric>[\w.]+)"|attributes\["\w+"\] != nil)'
)
_SET = re.compile(r'set\(attributes\["[\w.]+"\], (?:attributes\["(?P<label>\w+)"\]|"\w+")\)' + _WHERE)
_DELETE = re.compile(r'delete_key\(attributes, "(?P<label>\w+)"\)' + _WHERE)


# --- others -----------------------------------------------------------------------------------------------------------


def test_new_relics_annotations(tmp_path: Path) -> None:
    manifests = rendered(snippet("send-elsewhere", "newrelic"), tmp_path)
    annotations = manifests["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["newrelic.io/scrape"] == "true"
    assert annotations["prometheus.io/port"] == str(container_of(manifests)["ports"][0]["containerPort"])
    assert annotations["prometheus.io/path"] == "/metrics"


def test_googles_monitoring() -> None:
    """It selects gpumap's pods in all namespaces, and stamps no pod on the series but the node."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / "google.yaml").read_text(encoding="utf-8"))
    assert (found["apiVersion"], found["kind"]) == ("monitoring.googleapis.com/v1", "ClusterPodMonitoring")
    assert re.search("gpumap", found["metadata"]["name"]), "it becomes the job, by which the rules find the series"
    spec = found["spec"]
    (endpoint,) = spec["endpoints"]
    assert set(spec) == {"selector", "targetLabels", "endpoints"}
    assert spec["targetLabels"] == {"metadata": ["node"]}
    assert set(endpoint) <= {"port", "scheme", "path", "interval", "timeout", "metricRelabeling", "basicAuth", "tls"}
    assert endpoint["interval"]
    selects_the_agents(spec, endpoint["port"])


def test_googles_rules() -> None:
    for file in sorted((ROOT / "rules").glob("*.yaml")):
        assert set(yaml.safe_load(file.read_text(encoding="utf-8"))) == {"groups"}, file.name


def test_azures_monitor(tmp_path: Path) -> None:
    """The chart's PodMonitor in Azure's API group; another group is a mistake."""
    monitor = rendered(snippet("send-elsewhere", "azure"), tmp_path)["PodMonitor"]
    assert monitor["apiVersion"] == "azmonitoring.coreos.com/v1"
    usual = render("podMonitor.enabled=true")["PodMonitor"]
    assert usual["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"] == usual["spec"]
    done = helm("template", "gpumap", CHART, *settings(("podMonitor.enabled=true", "podMonitor.apiVersion=v1")))
    assert done.returncode != 0


def test_victorias_scrape() -> None:
    """Its relabelings give a target the labels that the chart's PodMonitor gives it."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / "victoriametrics.yaml").read_text(encoding="utf-8"))
    assert (found["apiVersion"], found["kind"]) == ("operator.victoriametrics.com/v1beta1", "VMPodScrape")
    (endpoint,) = found["spec"]["podMetricsEndpoints"]
    selects_the_agents(found["spec"], endpoint["port"])
    (chart,) = render("podMonitor.enabled=true")["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is chart["honorLabels"] is True
    replaced = {one["targetLabel"]: one for one in chart["relabelings"] if "targetLabel" in one}
    for one in endpoint["relabelConfigs"]:
        if "targetLabel" in one:
            assert one.items() <= replaced[one["targetLabel"]].items()
    (dropped,) = (one["regex"] for one in endpoint["relabelConfigs"] if one.get("action") == "labeldrop")
    assert set(dropped.split("|")) == {"namespace", "pod", "container"}


@pytest.mark.parametrize("name", ["selector", "clustering"])
def test_alloys_component(name: str) -> None:
    """It selects the chart's PodMonitor, and its blocks are closed."""
    text = (DOCS / "send-elsewhere.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"```alloy\n(.*?)```", text, re.DOTALL)
    assert re.search(rf"^  {name} \{{$", body, re.MULTILINE)
    assert body.count("{") == body.count("}")
    (key, value) = re.findall(r'"([^"]+)" = "([^"]+)"', body)[0]
    assert render("podMonitor.enabled=true")["PodMonitor"]["metadata"]["labels"][key] == value
