"""deploy/ is the chart without Helm: what kubectl's kustomize makes of it is what helm renders."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from scripts.generate_deploy import COMPONENTS, NAMESPACE, ROOT, manifests
from tests.deploy.chart import OLDEST, Manifest, is_hook, render_all
from tests.fences import read_blocks
from tests.tools import tool

DEPLOY = ROOT / "deploy"
BY_HAND = {"kustomization.yaml", "namespace.yaml"}
HELMS_OWN = {"helm.sh/chart", "app.kubernetes.io/managed-by"}
EVERY_COMPONENT = {*COMPONENTS, "dashboards"}


def kustomize(folder: Path) -> list[Manifest]:
    """What `kubectl apply -k` would send."""
    done = subprocess.run(
        (tool("kubectl"), "kustomize", folder),
        env=os.environ | {"KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))


def key_of(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def overlay(folder: Path, *components: str, **more: object) -> Path:
    """A kustomization of a user's own, over the base and components."""
    relative = os.path.relpath(DEPLOY, folder)
    kustomization = {
        "namespace": NAMESPACE,
        "resources": [f"{relative}/base"],
        "components": [f"{relative}/components/{name}" for name in components],
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    return folder


def rendered(*values: str) -> dict[tuple[str, str], Manifest]:
    """The chart's objects in deploy's namespace, without Helm's own labels and without the pod of `helm test`."""
    objects = {}
    for manifest in render_all(*values, namespace=NAMESPACE, version=OLDEST):
        if not is_hook(manifest):
            for one in (manifest, manifest.get("spec", {}).get("template")):
                for name in HELMS_OWN if one else ():
                    one["metadata"]["labels"].pop(name, None)
            objects[key_of(manifest)] = manifest
    return objects


@pytest.fixture(name="generated", scope="module")
def generate() -> dict[Path, str]:
    return manifests()


def test_the_manifests_are_up_to_date(generated: dict[Path, str]) -> None:
    """Each file is, byte for byte, what helm renders now; if not, run `make manifests`."""
    old = [str(path) for path, text in generated.items() if (ROOT / path).read_text(encoding="utf-8") != text]
    assert not old, "run `make manifests`"


def test_no_file_is_left_over(generated: dict[Path, str]) -> None:
    """Below base and components lie generated files and those that are written by hand, and no others."""
    files = {one for part in ("base", "components") for one in (DEPLOY / part).rglob("*") if one.is_file()}
    assert {one.name for one in files - {ROOT / path for path in generated}} == BY_HAND
    assert {one.name for one in (DEPLOY / "components").iterdir()} == EVERY_COMPONENT


def test_the_base_is_the_charts_default() -> None:
    """`kubectl kustomize deploy/base` is helm's objects, none more than the namespace that lets them in."""
    made = {key_of(one): one for one in kustomize(DEPLOY / "base")}
    namespace = made.pop(("Namespace", NAMESPACE))
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "privileged"}
    assert made == rendered()


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_kubernetes_accepts_the_base(version: str) -> None:
    """The first and the last version take each of its objects, unknown fields refused."""
    for manifest in kustomize(DEPLOY / "base"):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_components_are_the_charts_options(tmp_path: Path) -> None:
    """Base and components are what the chart makes with their values; the boards are the chart's, to the byte."""
    made = {key_of(one): one for one in kustomize(overlay(tmp_path, *EVERY_COMPONENT - {"pod-monitor"}))}
    del made["Namespace", NAMESPACE]
    values = [value for name, (_, value) in COMPONENTS.items() if name != "pod-monitor"]
    expected = rendered(*values, "dashboards.enabled=true")
    assert made.keys() == expected.keys()
    for key, manifest in expected.items():
        if manifest["kind"] == "ConfigMap":
            assert made[key]["data"] == manifest["data"]
            assert made[key]["metadata"]["labels"].items() <= manifest["metadata"]["labels"].items()
        else:
            assert made[key] == manifest


def test_kubectl_can_apply_each_object(tmp_path: Path) -> None:
    """`kubectl apply` keeps an object in an annotation of itself, and all annotations together have 256 KiB."""
    for manifest in kustomize(overlay(tmp_path, *EVERY_COMPONENT)):
        assert len(json.dumps(manifest)) < 200 << 10, key_of(manifest)


def test_pods_are_monitored_instead(tmp_path: Path) -> None:
    made = {key_of(one): one for one in kustomize(overlay(tmp_path, "pod-monitor"))}
    expected = rendered(COMPONENTS["pod-monitor"][1])
    assert made["PodMonitor", "gpumap"] == expected["PodMonitor", "gpumap"]


def test_another_namespace_moves_everything(tmp_path: Path) -> None:
    """No object stays behind where the namespace of a kustomization is another one, and the Namespace has its name."""
    made = kustomize(overlay(tmp_path, *EVERY_COMPONENT, namespace="elsewhere"))
    (namespace,) = [one for one in made if one["kind"] == "Namespace"]
    assert namespace["metadata"]["name"] == "elsewhere"
    assert {one["metadata"]["namespace"] for one in made if one is not namespace} == {"elsewhere"}


def test_the_readmes_kustomization_works(tmp_path: Path) -> None:
    """What the README shows is read by kubectl, and does what it says."""
    (block,) = read_blocks((DEPLOY / "README.md").read_text(encoding="utf-8"), "yaml")
    (tmp_path / "deploy").symlink_to(DEPLOY)
    folder = tmp_path / "my-gpumap"
    folder.mkdir()
    relative = os.path.relpath(DEPLOY, folder)
    (folder / "kustomization.yaml").write_text(block.body.replace("../deploy", relative), encoding="utf-8")
    made = {key_of(one): one for one in kustomize(folder)}
    pod = made["DaemonSet", "gpumap"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example.com/gpumap:0.1.0"
    assert pod["runtimeClassName"] == "nvidia"
    for key in (("ServiceMonitor", "gpumap"), ("PrometheusRule", "gpumap")):
        assert made[key]["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert "release" not in made["Service", "gpumap"]["metadata"]["labels"]


def test_the_readme_names_every_component() -> None:
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    table = page.partition("| component |")[2].partition("\n\n")[0]
    rows = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(rows) == EVERY_COMPONENT
