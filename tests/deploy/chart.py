"""The chart as a real helm renders it, and what is in a rendered pod."""

import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.tools import tool

CHART = Path(__file__).resolve().parents[2] / "charts" / "gpumap"

Manifest = dict[str, Any]


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs helm without the settings and plugins of whoever runs the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
    return subprocess.run(
        [tool("helm"), *arguments],
        env=environment | {"HELM_PLUGINS": os.devnull, "KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


OLDEST, NEWEST = "1.27", "1.37"
"""The versions of Kubernetes that the chart is for."""
IMAGE = "image.repository=gpumap"
"""The one value that has no default."""


def settings(values: tuple[str, ...]) -> Iterator[str]:
    """`--set …` for each value, and for the image."""
    for value in (IMAGE, *values):
        yield from ("--set", value)


@cache
def _rendered(values: tuple[str, ...], release: str, namespace: str, chart: Path, version: str) -> str:
    cluster = ("--namespace", namespace, "--kube-version", version)
    done = helm("template", release, chart, *cluster, *settings(values))
    assert done.returncode == 0, done.stderr
    return done.stdout


def render_text(
    *values: str,
    release: str = "gpumap",
    namespace: str = "monitoring",
    chart: Path = CHART,
    version: str = NEWEST,
) -> str:
    """What `helm template` prints."""
    return _rendered(values, release, namespace, chart, version)


def render_all(
    *values: str,
    release: str = "gpumap",
    namespace: str = "monitoring",
    chart: Path = CHART,
    version: str = NEWEST,
) -> tuple[Manifest, ...]:
    """Each object that the chart makes with `--set …`, for a version of Kubernetes; the pod of `helm test` too."""
    text = render_text(*values, release=release, namespace=namespace, chart=chart, version=version)
    return tuple(document for document in yaml.load_all(text, yaml.CSafeLoader) if document)


def refusal(*values: str, release: str = "gpumap") -> str:
    """What helm says of values that it does not take."""
    done = helm("template", release, CHART, *settings(values))
    assert done.returncode != 0, done.stdout
    return done.stderr


def render(*values: str, release: str = "gpumap", version: str = NEWEST) -> dict[str, Manifest]:
    """What `helm install --set …` would send, by kind."""
    manifests = [one for one in render_all(*values, release=release, version=version) if not is_hook(one)]
    by_kind = {manifest["kind"]: manifest for manifest in manifests}
    assert len(by_kind) == len(manifests), "one object of each kind"
    return by_kind


def is_hook(manifest: Manifest) -> bool:
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})


def pod_of(manifests: dict[str, Manifest]) -> Manifest:
    pod: Manifest = manifests["DaemonSet"]["spec"]["template"]["spec"]
    return pod


def container_of(manifests: dict[str, Manifest]) -> Manifest:
    """Return the chart's own container; extraContainers come after it."""
    container: Manifest = pod_of(manifests)["containers"][0]
    assert container["name"] == "gpumap"
    return container


def host_paths(manifests: dict[str, Manifest]) -> dict[str, str]:
    """Where each of the node's folders is mounted: path on the node → path in the container."""
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(manifests)["volumeMounts"]}
    volumes = pod_of(manifests)["volumes"]
    return {volume["hostPath"]["path"]: mounts[volume["name"]] for volume in volumes if "hostPath" in volume}
