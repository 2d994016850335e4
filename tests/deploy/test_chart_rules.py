"""What the chart makes beside the agent when asked: rules, boards, a network policy, OpenShift's constraints."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, Manifest, container_of, pod_of, render, render_all
from tests.promtool import assert_answers

RULES = CHART / "rules"
RUNBOOKS = CHART.parent.parent / "docs" / "runbooks"
BOARDS = sorted((CHART / "dashboards").glob("*.json"))
ON = "prometheusRule.enabled=true"
GROUP_RULES_MAX = 20

Rule = dict[str, Any]


def groups_of(file: str) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load((RULES / file).read_text())["groups"]
    return groups


def rendered_groups(*values: str) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = render(ON, *values)["PrometheusRule"]["spec"]["groups"]
    return groups


def alerts(groups: list[dict[str, Any]]) -> dict[str, Rule]:
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_the_rules_are_those_of_the_files() -> None:
    """Word for word: nothing in them is a template of Helm's, and each file is behind its switch. Only the address of
    the runbook, which is no URL, is left out."""
    own = ("alerts", "autoscaling", "opencost")
    others = [path.name for path in sorted(RULES.glob("*.yaml")) if path.stem not in own]
    recorded = [group for name in others for group in groups_of(name)]
    switched = {f"{name}=true": groups_of(f"{name}.yaml") for name in own} | {"recording=true": recorded}
    for rule in alerts(switched["alerts=true"]).values():
        del rule["annotations"]["runbook_url"]
    for switch, expected in switched.items():
        off = (f"prometheusRule.{name}=false" for name in (*own, "recording"))
        assert rendered_groups(*off, f"prometheusRule.{switch}") == expected, switch
    assert rendered_groups() == [*switched["alerts=true"], *switched["recording=true"]]


@pytest.mark.parametrize("file", sorted(path.name for path in RULES.glob("*.yaml")))
def test_a_group_is_such_as_every_ruler_takes(file: str) -> None:
    """At most 20 rules, Mimir's default limit (`-ruler.max-rules-per-rule-group`), and no field that only some know."""
    for group in groups_of(file):
        assert len(group["rules"]) <= GROUP_RULES_MAX, group["name"]
        assert group.keys() == {"name", "interval", "rules"}
        for rule in group["rules"]:
            assert rule.keys() <= {"record", "alert", "expr", "for", "labels", "annotations"}


def test_a_record_of_a_fleet_is_read_after_it_is_made() -> None:
    """In the same group: groups are evaluated independently, so a record of another one may be an interval old."""
    groups = groups_of("fleet.yaml")
    records = {rule["record"] for group in groups for rule in group["rules"]}
    assert {group["interval"] for group in groups} == {"1m"}
    for group in groups:
        made: set[str] = set()
        for rule in group["rules"]:
            assert {*re.findall(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+", rule["expr"])} & records <= made, rule["record"]
            made.add(rule["record"])


def test_an_alert_can_be_left_out_by_its_name() -> None:
    """Only this one goes; the others, and the records that they need, stay."""
    known = alerts(groups_of("alerts.yaml"))
    first, second, *_ = known
    found = rendered_groups(f"prometheusRule.disabledAlerts={{{first},{second}}}")
    assert alerts(found).keys() == known.keys() - {first, second}
    records = [rule["record"] for group in rendered_groups() for rule in group["rules"] if "record" in rule]
    assert [rule["record"] for group in found for rule in group["rules"] if "record" in rule] == records


def test_alerts_can_have_more_labels() -> None:
    """Every alert has them, in the place of its own where they have one name; no record has."""
    found = rendered_groups("prometheusRule.alertLabels.team=platform", "prometheusRule.alertLabels.severity=page")
    assert {(rule["labels"]["team"], rule["labels"]["severity"]) for rule in alerts(found).values()} == {
        ("platform", "page")
    }
    given = [rule.get("labels") for group in rendered_groups() for rule in group["rules"] if "record" in rule]
    assert [rule.get("labels") for group in found for rule in group["rules"] if "record" in rule] == given


def test_an_alert_can_wait_longer() -> None:
    given = alerts(rendered_groups())
    assert given["GpumapGpuIdle"]["for"] == "1h"
    found = alerts(rendered_groups("prometheusRule.for.GpumapGpuIdle=4h"))
    assert found == given | {"GpumapGpuIdle": given["GpumapGpuIdle"] | {"for": "4h"}}


GPU, CONTAINER = 'node="n",gpu_uuid="GPU-a"', 'node="n",namespace="ml",pod="p",container="c",uuid="GPU-a"'
FINDING = f"gpumap_finding_since_timestamp_seconds{{{CONTAINER},finding="
PLAYED = {
    f'{FINDING}"idle",reason="no_activity"}}': "60x300",
    f'{FINDING}"fault",reason="xid_48"}}': "60x300",
    f"gpumap_pod_info{{{CONTAINER}}}": "1x300",
    f"gpumap_gpu_utilization_ratio{{{GPU}}}": "0.9x300",
    f'gpumap_gpu_temperature_celsius{{{GPU},sensor="gpu"}}': "80x300",
    f'gpumap_gpu_temperature_celsius{{{GPU},sensor="memory"}}': "90x300",
    'gpumap_device_memory_used_bytes{node="n",uuid="GPU-a"}': "92x300",
    'gpumap_device_memory_total_bytes{node="n",uuid="GPU-a"}': "100x300",
    f'gpumap_container_xid_errors_total{{{CONTAINER},xid="48"}}': "0x230 1x70",
}
"""promtool's notation, a sample each minute: a GPU that is rather busy, warm and full, idle for hours, and an error."""
SENSITIVE = ("busyRatio=0.85", "memoryRatio=0.9", "temperatureCelsius=75")
CHANGES: tuple[tuple[tuple[str, ...], set[str]], ...] = (
    ((), {"GpumapGpuIdle", "GpumapGpuXid", "GpumapContainerXid"}),
    (("thresholds.idleSeconds=86400", "thresholds.maybeIdleSeconds=86400", "ignoredXids={48}"), set()),
    (
        tuple(f"thresholds.{one}" for one in (*SENSITIVE, "idleSeconds=86400")),
        {
            "GpumapGpuBusy",
            "GpumapGpuMaybeIdle",
            "GpumapGpuMemoryNearlyFull",
            "GpumapGpuTemperatureHigh",
            "GpumapGpuXid",
            "GpumapContainerXid",
        },
    ),
    (
        ("thresholds.memoryTemperatureCelsius=85", "ignoredXids={13}", "for.GpumapGpuIdle=4h"),
        {"GpumapGpuMaybeIdle", "GpumapGpuTemperatureHigh", "GpumapGpuXid", "GpumapContainerXid"},
    ),
)
WATCHED = {name for _, names in CHANGES for name in names}


@pytest.mark.parametrize(("values", "firing"), CHANGES)
def test_thresholds_decide_what_fires(values: tuple[str, ...], firing: set[str], tmp_path: Path) -> None:
    """promtool plays four hours of one GPU: which alerts fire depends on thresholds, ignoredXids and `for`."""
    groups = rendered_groups(*(f"prometheusRule.{one}" for one in values))
    (rules := tmp_path / "rules.json").write_text(json.dumps({"groups": groups}))
    series = {name.replace("{", '{job="gpumap",', 1): values for name, values in PLAYED.items()}
    query = f'group by (alertname) (ALERTS{{alertstate="firing",alertname=~"{"|".join(sorted(WATCHED))}"}})'
    expected = {f'{{alertname="{name}"}}': 1 for name in firing}
    assert_answers(tmp_path, series, (query, "4h", expected), rules=[rules])


@pytest.mark.parametrize("base", ["https://git.example.com/runbooks", "https://git.example.com/runbooks/"])
def test_every_alert_links_to_its_page(base: str) -> None:
    pages = {f"https://git.example.com/runbooks/{page.name}" for page in RUNBOOKS.glob("*.md")}
    links = {
        name: rule["annotations"]["runbook_url"]
        for name, rule in alerts(rendered_groups(f"prometheusRule.runbookUrl={base}")).items()
    }
    assert {name for name, link in links.items() if link not in pages} == set()
    assert len(links) == len(alerts(groups_of("alerts.yaml")))


def config_maps(*values: str) -> dict[str, Manifest]:
    made = [one for one in render_all("dashboards.enabled=true", *values) if one["kind"] == "ConfigMap"]
    found = {one["metadata"]["name"]: one for one in made}
    assert len(found) == len(made)
    return found


def test_each_board_has_a_config_map() -> None:
    """With the file as it is, under its name, and the label that Grafana's sidecar looks for."""
    found = config_maps("dashboards.annotations.grafana_folder=GPU")
    boards = {name: text for one in found.values() for name, text in one["data"].items()}
    assert {name: json.loads(text) for name, text in boards.items()} == {
        board.name: json.loads(board.read_text()) for board in BOARDS
    }
    assert len(found) == len(BOARDS) > 0
    for one in found.values():
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "GPU"}


SCC = "openshift.securityContextConstraints=true"


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("privileges.hostPID=false",),
        ("tls.secretName=certificate",),
        ("hostNetwork=true",),
        ("hostPort=9401",),
    ],
)
def test_openshifts_constraints_allow_what_the_pod_has_and_no_more(values: tuple[str, ...]) -> None:
    """Only for the release's ServiceAccount: folders of the node, its processes where asked for, no capability."""
    manifests = render(SCC, *values, release="prod")
    constraints, pod = manifests["SecurityContextConstraints"], pod_of(manifests)
    assert constraints["users"] == [f"system:serviceaccount:monitoring:{pod['serviceAccountName']}"]
    assert constraints["allowHostPID"] is pod["hostPID"]
    assert constraints["readOnlyRootFilesystem"] is True
    assert constraints["runAsUser"] == {"type": "MustRunAs", "uid": pod["securityContext"]["runAsUser"]}
    assert constraints["requiredDropCapabilities"] == ["ALL"]
    assert constraints["seccompProfiles"] == ["runtime/default"]
    assert {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]} <= set(constraints["volumes"])
    allowed = {name for name, value in constraints.items() if name.startswith("allow") and value}
    asked = {
        "allowHostDirVolumePlugin": True,
        "allowHostPID": pod["hostPID"],
        "allowHostNetwork": pod.get("hostNetwork"),
        "allowHostPorts": pod.get("hostNetwork") or "hostPort" in container_of(manifests)["ports"][0],
    }
    assert allowed == {name for name, one in asked.items() if one}
