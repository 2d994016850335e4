"""The manifests of autoscaling/: valid, and every name in them is one that the others know."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.dashboards.autoscaled import ADAPTER, AUTOSCALING, DOCS, RULES, SCALED_OBJECT

VERSIONS = [f"1.{minor}" for minor in range(25, 38)]
HPAS: list[dict[str, Any]] = list(yaml.safe_load_all((AUTOSCALING / "hpa.yaml").read_text()))
GROUP = yaml.safe_load(RULES.read_text())["groups"][0]
SERVED = {kind: {rule["name"]["as"] for rule in ADAPTER[kind]} for kind in ("custom", "external")}

INTEGER = {"type": "integer", "minimum": 0}


def exactly(required: tuple[str, ...], **properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TRIGGER = exactly(
    ("type", "metadata"),
    type={"const": "prometheus"},
    name={"type": "string"},
    metricType={"enum": ["AverageValue", "Value"]},
    useCachedMetrics={"type": "boolean"},
    authenticationRef=exactly(("name",), name={"type": "string"}, kind={"type": "string"}),
    metadata=exactly(
        ("serverAddress", "query", "threshold"),
        serverAddress={"type": "string", "pattern": "^https?://[^/]+(/.*)?$"},
        query={"type": "string"},
        threshold={"type": "string", "pattern": r"^[0-9.]+$"},
        activationThreshold={"type": "string", "pattern": r"^[0-9.]+$"},
        ignoreNullValues={"enum": ["true", "false"]},
        unsafeSsl={"enum": ["true", "false"]},
        **{
            name: {"type": "string"}
            for name in ("namespace", "customHeaders", "authModes", "queryParameters", "timeout")
        },
    ),
)
"""A trigger of KEDA, as its CRD (config/crd/bases/keda.sh_scaledobjects.yaml) and its scaler's own table of metadata
(pkg/scalers/prometheus_scaler.go, prometheusMetadata) have it in 2.16. All metadata are strings."""
SCHEMA = exactly(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "ScaledObject"},
    metadata=exactly(("name", "namespace"), name={"type": "string"}, namespace={"type": "string"}),
    spec=exactly(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=exactly(
            ("name",),
            **{name: {"type": "string"} for name in ("apiVersion", "kind", "name", "envSourceContainerName")},
        ),
        fallback=exactly(("failureThreshold", "replicas"), failureThreshold=INTEGER, replicas=INTEGER),
        advanced=exactly(
            (),
            restoreToOriginalReplicaCount={"type": "boolean"},
            # What behavior may be is Kubernetes' own schema: see below.
            horizontalPodAutoscalerConfig=exactly((), name={"type": "string"}, behavior={"type": "object"}),
        ),
        triggers={"type": "array", "items": TRIGGER, "minItems": 1},
        **dict.fromkeys(("minReplicaCount", "maxReplicaCount", "idleReplicaCount"), INTEGER),
        **dict.fromkeys(("pollingInterval", "cooldownPeriod", "initialCooldownPeriod"), INTEGER),
    ),
)


def made_by_keda() -> dict[str, Any]:
    """The HorizontalPodAutoscaler that KEDA makes of the ScaledObject."""
    spec = SCALED_OBJECT["spec"]
    (trigger,) = spec["triggers"]
    milli = f"{round(float(trigger['metadata']['threshold']) * 1000)}m"
    field = {"Value": "value", "AverageValue": "averageValue"}[trigger["metricType"]]
    metric = {
        "metric": {
            "name": "s0-prometheus",
            "selector": {"matchLabels": {"scaledobject.keda.sh/name": SCALED_OBJECT["metadata"]["name"]}},
        },
        "target": {"type": trigger["metricType"], field: milli},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "keda-hpa-llm", "namespace": SCALED_OBJECT["metadata"]["namespace"]},
        "spec": {
            "scaleTargetRef": spec["scaleTargetRef"],
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            "metrics": [{"type": "External", "external": metric}],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        },
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_the_autoscalers(version: str) -> None:
    """Each HorizontalPodAutoscaler, KEDA's too, fits the API's schema, unknown fields refused."""
    for manifest in (*HPAS, made_by_keda()):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_no_metric_dangles() -> None:
    """What an autoscaler asks is served by the adapter, and what the adapter looks for is recorded by a rule."""
    asked: dict[str, set[str]] = {"custom": set(), "external": set()}
    for metric in (metric for manifest in HPAS for metric in manifest["spec"]["metrics"]):
        kind = {"Pods": "custom", "External": "external"}[metric["type"]]
        asked[kind].add(metric[metric["type"].lower()]["metric"]["name"])
    assert asked["custom"] == {"pod_gpu_utilization", "container_gpu_usage"}
    assert asked["external"] == {"workload_gpu_utilization"}
    assert all(asked[kind] <= SERVED[kind] for kind in asked)
    recorded = {rule["record"] for rule in GROUP["rules"]}
    for rule in (*ADAPTER["custom"], *ADAPTER["external"]):
        assert rule["seriesQuery"].split("{")[0] in recorded


def test_targets_are_of_the_metrics_kind() -> None:
    """A mean is compared as it is, a pod's value by the mean of the pods; a workload has one autoscaler."""
    for metric in (metric for manifest in HPAS for metric in manifest["spec"]["metrics"]):
        target = metric[metric["type"].lower()]["target"]
        expected = {"Pods": "AverageValue", "External": "Value"}[metric["type"]]
        assert target["type"] == expected
        assert set(target) == {"type", expected[0].lower() + expected[1:]}
    scaled = [(manifest["metadata"]["namespace"], manifest["spec"]["scaleTargetRef"]["name"]) for manifest in HPAS]
    assert len(set(scaled)) == len(scaled)


def test_replicas_stay_until_the_window_has_passed() -> None:
    """Scaling down looks back over more than the window of rate(), in which values may be too low."""
    expressions = [rule["expr"] for rule in GROUP["rules"]]
    expressions += [trigger["metadata"]["query"] for trigger in SCALED_OBJECT["spec"]["triggers"]]
    windows = {window for text in expressions for window in re.findall(r"\[(\d+\w)\]", text)}
    assert windows == {"2m"}
    for manifest in (*HPAS, made_by_keda()):
        behavior = manifest["spec"].get("behavior", {}).get("scaleDown", {})
        assert behavior.get("stabilizationWindowSeconds", 300) > 2 * 120


def test_keda_would_take_the_scaled_object() -> None:
    """Its fields are KEDA's; no answer is an error, never 0; and nothing goes to 0, where nothing could wake it."""
    jsonschema.validate(SCALED_OBJECT, SCHEMA)
    spec = SCALED_OBJECT["spec"]
    assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in spec["triggers"])
    assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    assert "fallback" not in spec


def test_the_docs_name_what_is_served() -> None:
    """Each metric that autoscale.md asks by `kubectl get --raw`, and each in its table, is the adapter's."""
    text = DOCS.read_text()
    raw = re.findall(r"\$(CUSTOM|EXTERNAL)/namespaces/\w+(?:/pods/\*)?/(\w+)", text)
    assert {kind for kind, _ in raw} == {"CUSTOM", "EXTERNAL"}
    assert all(name in SERVED[kind.lower()] for kind, name in raw)
    table = text[text.index("## Which metric") : text.index("## With prometheus-adapter")]
    assert set(re.findall(r"`((?:pod|workload|container)_gpu_\w+)`", table)) <= SERVED["custom"]
