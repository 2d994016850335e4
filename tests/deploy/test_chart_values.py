"""The chart's values: each one changes what is installed, and the schema knows them all."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import pytest
import yaml

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.metrics import GROUPS
from tests.deploy.chart import CHART, refusal, render_all
from tests.deploy.chart_variations import EVERYTHING, PASSWORD_SENT, of

HASH = "$2y$10$" + 53 * "a"
TLS = ("tls.secretName=certificate",)
OWN_CONFIG = ("webConfig.secretName=own",)
RULES = ("prometheusRule.enabled=true",)
BOARDS = ("dashboards.enabled=true",)
POLICY = ("networkPolicy.enabled=true",)
MONITORS = ("serviceMonitor", "podMonitor")
PROBE = ("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold")


class Tried(NamedTuple):
    """A value other than the default; what must be switched on for it to matter; what it cannot be without."""

    value: str
    beside: tuple[str, ...] = ()
    with_it: tuple[str, ...] = ()


REACHES: dict[str, Tried] = {
    "nameOverride": Tried("my-gpumap"),
    "fullnameOverride": Tried("my-gpumap"),
    "namespaceOverride": Tried("gpu"),
    "commonLabels.team": Tried("ml"),
    "commonAnnotations.note": Tried("hello"),
    "job": Tried("gpu-agents", ("serviceMonitor.enabled=true",)),
    "global.imageRegistry": Tried("mirror.example.com"),
    "global.imagePullSecrets[0]": Tried("registry"),
    "image.registry": Tried("registry.example.com:5000"),
    "image.repository": Tried("registry.example.com:5000/ml/gpumap"),
    "image.tag": Tried("v9"),
    "image.digest": Tried("sha256:" + 64 * "a"),
    "image.pullPolicy": Tried("Always"),
    "imagePullSecrets[0].name": Tried("registry"),
    "serviceAccount.create": Tried("false"),
    "serviceAccount.name": Tried("agent"),
    "serviceAccount.annotations.note": Tried("hello"),
    "gpuNodesOnly": Tried("false"),
    "gpuOperator.followClient": Tried("false"),
    "gpuOperator.followDcgmExporter": Tried("true"),
    "nodeSelector.pool": Tried("gpu"),
    "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey": Tried("zone"),
    "tolerations[0].operator": Tried("Exists"),
    "runtimeClassName": Tried("nvidia"),
    "resourceClaims[0].name": Tried("gpus", with_it=("resourceClaims[0].resourceClaimName=all",)),
    "podSecurityContext.runAsGroup": Tried("0"),
    "securityContext.procMount": Tried("Default"),
    "openshift.securityContextConstraints": Tried("true"),
    "priorityClassName": Tried("system-node-critical"),
    "resources.requests.cpu": Tried("50m"),
    "resources.requests.memory": Tried("128Mi"),
    "resources.limits.memory": Tried("1Gi"),
    "updateStrategy.type": Tried("OnDelete"),
    "updateStrategy.rollingUpdate.maxUnavailable": Tried("3"),
    "updateStrategy.rollingUpdate.maxSurge": Tried("0%"),
    "minReadySeconds": Tried("30"),
    "terminationGracePeriodSeconds": Tried("30"),
    "revisionHistoryLimit": Tried("2"),
    **{
        f"{probe}.{name}": Tried("7")
        for probe, names in {"livenessProbe": PROBE, "readinessProbe": (*PROBE, "successThreshold")}.items()
        for name in names
    },
    "interval": Tried("10s"),
    "dialects[0]": Tried("dcgm"),
    "native": Tried("false", ("dialects={dcgm}",)),
    "collect[0]": Tried("use"),
    "extraArgs[0]": Tried("--process-metrics"),
    "extraEnv[0].name": Tried("GPUMAP_LOG_FORMAT", with_it=("extraEnv[0].value=json",)),
    "extraVolumes[0].name": Tried("more"),
    "extraVolumeMounts[0].name": Tried("more", with_it=("extraVolumeMounts[0].mountPath=/more",)),
    "initContainers[0].name": Tried("before", with_it=("initContainers[0].image=busybox",)),
    "extraContainers[0].name": Tried("beside", with_it=("extraContainers[0].image=busybox",)),
    "dnsConfig.nameservers[0]": Tried("10.0.0.10"),
    "dnsConfig.searches[0]": Tried("cluster.local"),
    "dnsConfig.options[0].name": Tried("edns0"),
    "extraObjects[0].kind": Tried(
        "ConfigMap", with_it=("extraObjects[0].apiVersion=v1", "extraObjects[0].metadata.name=more")
    ),
    "extraManifests[0]": Tried("kind: ConfigMap"),
    "podLabels.tier": Tried("node"),
    "podAnnotations.note": Tried("hello"),
    "port": Tried("9500"),
    "hostPort": Tried("9500"),
    "hostNetwork": Tried("true"),
    "service.enabled": Tried("false"),
    "service.type": Tried("NodePort"),
    "service.port": Tried("9500"),
    "service.nodePort": Tried("30401", ("service.type=NodePort",)),
    "service.clusterIP": Tried("None"),
    "service.internalTrafficPolicy": Tried("Local"),
    "service.annotations.note": Tried("hello"),
    "service.labels.team": Tried("ml"),
    **{
        f"{monitor}.{name}": tried._replace(beside=(*tried.beside, f"{monitor}.enabled=true"))
        for monitor in MONITORS
        for name, tried in {
            "namespace": Tried("observability"),
            "interval": Tried("1m"),
            "scrapeTimeout": Tried("9s"),
            "labels.release": Tried("prometheus"),
            "additionalLabels.release": Tried("prometheus"),
            "podTargetLabels[0]": Tried("team"),
            "attachMetadata.node": Tried("true"),
            "sampleLimit": Tried("50000"),
            "labelLimit": Tried("40"),
            "proxyUrl": Tried("http://proxy.example.com:3128"),
            "relabelings[0].targetLabel": Tried("region"),
            "metricRelabelings[0].action": Tried("drop"),
            "tlsConfig.insecureSkipVerify": Tried("true", TLS),
            "basicAuth.username.name": Tried("prometheus", with_it=of(monitor, PASSWORD_SENT[1:])),
        }.items()
    },
    **{f"{monitor}.enabled": Tried("true") for monitor in MONITORS},
    "serviceMonitor.serviceDiscoveryRole": Tried("EndpointSlice", ("serviceMonitor.enabled=true",)),
    "prometheusRule.enabled": Tried("true"),
    "prometheusRule.namespace": Tried("observability", RULES),
    "prometheusRule.labels.release": Tried("prometheus", RULES),
    "prometheusRule.additionalLabels.release": Tried("prometheus", RULES),
    "prometheusRule.for.GpumapGpuIdle": Tried("4h", RULES),
    **{
        f"prometheusRule.thresholds.{name}": Tried("1", RULES)
        for name in (
            *("idleSeconds", "maybeIdleSeconds", "busyRatio", "memoryRatio"),
            *("temperatureCelsius", "memoryTemperatureCelsius"),
        )
    },
    "prometheusRule.ignoredXids[0]": Tried("13", RULES),
    "prometheusRule.alerts": Tried("false", RULES),
    "prometheusRule.disabledAlerts[0]": Tried("", RULES),
    "prometheusRule.alertLabels.team": Tried("platform", RULES),
    "prometheusRule.runbookUrl": Tried("https://git.example.com/runbooks", RULES),
    "prometheusRule.recording": Tried("false", RULES),
    "prometheusRule.autoscaling": Tried("true", RULES),
    "prometheusRule.opencost": Tried("true", RULES),
    "dashboards.enabled": Tried("true"),
    "dashboards.namespace": Tried("grafana", BOARDS),
    "dashboards.labels.grafana_dashboard": Tried("yes", BOARDS),
    "dashboards.annotations.grafana_folder": Tried("GPU", BOARDS),
    "networkPolicy.enabled": Tried("true"),
    "networkPolicy.from[0].ipBlock.cidr": Tried("10.0.0.0/8", POLICY),
    "podMonitor.apiVersion": Tried("azmonitoring.coreos.com/v1", ("podMonitor.enabled=true",)),
    "tls.secretName": Tried("certificate"),
    "tls.clientCaSecretName": Tried("clients", TLS),
    "tls.minVersion": Tried("TLS13", TLS),
    "basicAuth.users.prometheus": Tried(HASH),
    "webConfig.secretName": Tried("own"),
    "webConfig.tls": Tried("true", OWN_CONFIG),
    "kubelet.rootDir": Tried("/var/lib/k0s/kubelet"),
    "nvml.library": Tried("/opt/lib/libnvidia-ml.so.1"),
    "nvml.hostPath": Tried("/opt/lib"),
    **{f"privileges.{step}": Tried("false") for step in ("checkpoint", "podLogs", "hostPID")},
    **{f"privileges.{step}": Tried("true") for step in ("dra", "podsApi", "gpuFractioning")},
    "tests.enabled": Tried("false"),
}
"""Each value, as it is set, with another than the default."""


def alerts() -> list[str]:
    groups = yaml.safe_load((CHART / "rules" / "alerts.yaml").read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize("name", REACHES)
def test_every_value_changes_what_is_installed(name: str) -> None:
    tried = REACHES[name]
    setting = f"{name}={tried.value or alerts()[0]}"
    assert render_all(*tried.beside, *tried.with_it, setting) != render_all(*tried.beside)


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_value_is_tried() -> None:
    values = set(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
    assert {name for name in values if not any(tried.startswith(name) for tried in REACHES)} == set()


def test_a_parent_chart_may_have_its_own() -> None:
    """What other charts read of `global`, and `enabled` for a parent's condition, are let in and change nothing."""
    assert render_all("global.storageClass=a", "enabled=true") == render_all()


def test_the_schema_knows_exactly_the_documented_values() -> None:
    """values.yaml and values.schema.json name the same values, and the defaults fit."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(values)
    assert values.keys() == schema["properties"].keys() - {"enabled"}
    definitions = schema["definitions"]
    for name, part in schema["properties"].items():
        part = definitions[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        if "properties" in part and values[name]:
            assert values[name].keys() == part["properties"].keys(), name


def test_what_is_emptied_is_refused_by_name_or_does_no_harm() -> None:
    """A key without a value, such as only `tls:`, takes the default away: no template fails on it."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def optional(values: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name in values.keys() - set(schema.get("required", ())):
            yield f"{prefix}{name}"
        for name in schema.get("required", ()):
            if isinstance(values[name], dict):
                yield from optional(values[name], schema["properties"][name], f"{prefix}{name}.")

    emptied = list(optional(values, schema))
    assert {"affinity", "resources", "serviceMonitor.labels", "prometheusRule.disabledAlerts"} <= set(emptied)
    assert render_all(*EVERYTHING, *TLS, *(f"{name}=null" for name in emptied if name != "tls.secretName"))
    assert "missing property 'tls'" in refusal("tls=null")


def test_no_object_lets_unknown_names_in() -> None:
    """Each object of the schema says which names it has, but for `global` and those that are Kubernetes' own."""

    def closed(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            if "properties" in part and "required" not in part.get("if", {}):
                assert part.get("additionalProperties") is False or part["properties"].keys() == {"name"}, part
            for one in part.values():
                yield from closed(one)

    schema = json.loads((CHART / "values.schema.json").read_text())
    del schema["properties"]["global"]
    assert list(closed(schema)) == []


def test_the_schema_names_gpumaps_dialects_and_groups() -> None:
    """Those that the code has, so that a new one can be asked for by a value."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert schema["dialects"]["items"]["enum"] == ["native", *DIALECTS, "all", "none"]
    assert schema["collect"]["items"]["enum"] == [*GROUPS, "all"]
