"""Write the objects of deploy/ as helm renders them from the chart: `make manifests`.

The kustomizations there, namespace.yaml and README.md are written by hand. The boards are not copied: a kustomization
beside them makes ConfigMaps of them, and is written here too.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.deploy.chart import CHART, IMAGE, OLDEST, helm

ROOT = CHART.parent.parent
NAMESPACE = "gpumap"
COMPONENTS = {
    "service-monitor": ("ServiceMonitor", "serviceMonitor.enabled=true"),
    "pod-monitor": ("PodMonitor", "podMonitor.enabled=true"),
    "rules": ("PrometheusRule", "prometheusRule.enabled=true"),
    "network-policy": ("NetworkPolicy", "networkPolicy.enabled=true"),
}
"""What is off in the chart until it is asked for: the folder's name, the kind, and the value that adds it."""

_HEAD = (
    "# Written by `make manifests` from charts/gpumap. What you need otherwise, patch in a kustomization of your own.\n"
)
_HELMS_OWN = re.compile(r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n", re.MULTILINE)
_SOURCE = re.compile(r"\A# Source: .*\n")


def manifests() -> dict[Path, str]:
    """Every file that is written, by its path below the root of the repository."""
    base, components = Path("deploy", "base"), Path("deploy", "components")
    files = {base / f"{kind.lower()}.yaml": text for kind, text in _rendered()}
    for folder, (kind, value) in COMPONENTS.items():
        files[components / folder / f"{kind.lower()}.yaml"] = dict(_rendered(value))[kind]
    files[Path("charts", "gpumap", "dashboards", "kustomization.yaml")] = _boards()
    return files


def _rendered(*values: str) -> Iterator[tuple[str, str]]:
    """Each object's kind and text, without the labels by which Helm knows its own, and without hooks."""
    settings = (word for value in (IMAGE, *values) for word in ("--set", value))
    done = helm(
        "template", "gpumap", CHART, "--namespace", NAMESPACE, "--skip-tests", "--kube-version", OLDEST, *settings
    )
    if done.returncode:
        raise RuntimeError(f"helm template {' '.join(values)}: {done.stderr}")
    for part in re.split(r"^---\n", done.stdout, flags=re.MULTILINE):
        text = _HELMS_OWN.sub("", _SOURCE.sub("", part)).strip()
        if manifest := yaml.safe_load(text):
            yield manifest["kind"], f"{_HEAD}{text}\n"


def _boards() -> str:
    """The kustomization that makes a ConfigMap of each board, named and labelled as the chart does it."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    generators = [
        {"name": f"gpumap-dashboard-{board.stem}", "files": [board.name]}
        for board in sorted((CHART / "dashboards").glob("*.json"))
    ]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "generatorOptions": {"disableNameSuffixHash": True, "labels": values["dashboards"]["labels"]},
        "configMapGenerator": generators,
    }
    return _HEAD + yaml.safe_dump(kustomization, sort_keys=False)


if __name__ == "__main__":
    for path, text in manifests().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
