"""What the chart makes fits the schema of whoever takes it: Kubernetes 1.27 to 1.37, Prometheus' operator, OpenShift.

Fields that these do not know are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.chart import CHART, NEWEST, OLDEST, Manifest, render_all
from tests.deploy.chart_variations import EVERYTHING, POD_MONITOR, VARIATIONS

VERSIONS = tuple(f"1.{minor}" for minor in range(27, 38))
CHANGED = "1.30"
"""From this version on the chart makes other objects: the kubelet has a preStop action that sleeps."""
CUSTOM = json.loads((Path(__file__).parents[1] / "schemas" / "custom-resources.json").read_text(encoding="utf-8"))
CUSTOM_KINDS = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "SecurityContextConstraints"}

SINCE = {"claims": "1.31"}
"""Before 1.31 a pod's claim named its template in a field `source`, behind a gate that was off by default."""
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
LABEL_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
NAMES_MAX = {"Service": 63, "Pod": 63}
"""A Service's name is a label of DNS, and a pod's its host name, which is cut there."""


@cache
def validate(text: str, version: str) -> None:
    """Raises jsonschema.ValidationError, or for a kind that this version lacks SchemaNotFoundError."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


AZURE = "azmonitoring.coreos.com"
"""Azure's copy of the custom resources."""


def validate_custom(manifest: Manifest) -> None:
    schema = {"$ref": f"#/$defs/{manifest['kind']}", "$defs": CUSTOM["$defs"]}
    group = manifest["apiVersion"].replace(AZURE, "monitoring.coreos.com")
    jsonschema.Draft202012Validator(schema).validate(manifest | {"apiVersion": group})


@pytest.mark.parametrize("variation", VARIATIONS)
def test_every_version_accepts_every_variation(variation: str) -> None:
    """Each object fits each version of Kubernetes that the chart is for, or its owner's custom resource."""
    at = VERSIONS.index(CHANGED)
    for made_for, versions in ((OLDEST, VERSIONS[:at]), (NEWEST, VERSIONS[at:])):
        for manifest in render_all(*VARIATIONS[variation], version=made_for):
            if manifest["kind"] in CUSTOM_KINDS:
                validate_custom(manifest)
                continue
            text = json.dumps(manifest, sort_keys=True)
            for version in versions:
                if VERSIONS.index(version) >= VERSIONS.index(SINCE.get(variation, OLDEST)):
                    validate(text, version)


def labels_in(value: Any) -> Iterator[tuple[str, str]]:
    """Every label of an object and of what it holds or selects."""
    if isinstance(value, list):
        for one in value:
            yield from labels_in(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            if name in ("labels", "matchLabels") and "expr" not in value:
                yield from one.items()
            else:
                yield from labels_in(one)


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("release", ["gpumap", "r" * 53])
def test_names_and_labels_are_such_as_the_api_takes(variation: str, release: str) -> None:
    """What no schema says: how long they may be, and of which characters; with the longest release's name too."""
    for manifest in render_all(*VARIATIONS[variation], release=release):
        assert NAME.fullmatch(manifest["metadata"]["name"])
        assert len(manifest["metadata"]["name"]) <= NAMES_MAX.get(manifest["kind"], 253), manifest["kind"]
        for name, value in labels_in(manifest):
            assert LABEL_NAME.fullmatch(name), name
            assert LABEL.fullmatch(value), value


def test_the_oldest_version_is_the_charts() -> None:
    """Chart.yaml lets in the versions that are checked here, from the first on."""
    assert (VERSIONS[0], VERSIONS[-1]) == (OLDEST, NEWEST)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"


def test_every_object_is_checked() -> None:
    """Each kind that a template can make is made by some variation above."""
    templates = (CHART / "templates").rglob("*.yaml")
    kinds = {kind for one in templates for kind in re.findall(r"^kind: (\w+)$", one.read_text(encoding="utf-8"), re.M)}
    made = {one["kind"] for values in (EVERYTHING, POD_MONITOR, VARIATIONS["TLS"]) for one in render_all(*values)}
    assert made == kinds


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("ServiceMonitor", ("spec",)),
        ("ServiceMonitor", ("spec", "endpoints", 0)),
        ("ServiceMonitor", ("spec", "endpoints", 0, "relabelings", 0)),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0)),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0)),
        ("SecurityContextConstraints", ()),
    ],
)
def test_a_misspelt_field_is_noticed(kind: str, path: tuple[str | int, ...]) -> None:
    """The custom resources' schema refuses a field that the API would drop without a word."""
    values = POD_MONITOR if kind == "PodMonitor" else EVERYTHING
    (manifest,) = [one for one in render_all(*values) if one["kind"] == kind]
    place: Any = manifest
    for step in path:
        place = place[step]
    place["honourLabels"] = True
    with pytest.raises(jsonschema.ValidationError, match="honourLabels"):
        validate_custom(manifest)
