"""gpumap as the chart runs it, as static pods: the image of the project's Dockerfile, the DaemonSet's pod template."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests import standin
from tests.cluster import layout
from tests.cluster.node import NODE_NAME
from tests.deploy.chart import OLDEST, render
from tests.deploy.image import IMAGE, Builder, copy_source
from tests.deploy.image_bases import BUILD, RUNTIME

KEPT = Path(__file__).with_name("__pycache__")
TAG = f"{IMAGE}:cluster"
NAMESPACE = "monitoring"
STATE = "state/driver"
"""What the stand-in answers, in the folder of the driver."""
DEFAULT_INTERVAL_SECONDS = 5.0


@dataclass(frozen=True)
class AgentPod:
    """One gpumap: `values` are the chart's, as in `helm install --set`."""

    name: str
    values: Sequence[str] = ()
    lacks: frozenset[str] = frozenset()
    """The parts of the node that it may not see. It knows less then, and is never wrong."""
    interval_seconds: float = DEFAULT_INTERVAL_SECONDS
    more_arguments: Sequence[str] = ()
    node_name: str = ""
    """Another node name than the kubelet's. Pods of a file have the kubelet's as a suffix, and then they do not look
    static: with UUIDs they look as pods of an API server do."""

    def manifest(self, driver: Path) -> dict[str, Any]:
        """The chart's pod, with what an API server and a controller add. `driver` is a folder of the node."""
        values = [
            f"image.repository={IMAGE}",
            "image.tag=cluster",
            "image.pullPolicy=Never",
            "nvml.library=/nvml/libnvidia-ml.so.1",
            f"nvml.hostPath={driver}",
            f"extraEnv[0].name={layout.AGENT},extraEnv[0].value={self.name}",
            f"extraEnv[1].name=STANDIN_STATE,extraEnv[1].value=/nvml/{STATE}",
            *(f"extraArgs[{index}]={word}" for index, word in enumerate(self.more_arguments)),
        ]
        if self.node_name:
            values.append(f"extraEnv[2].name=NODE_NAME,extraEnv[2].value={self.node_name}")
        if self.interval_seconds != DEFAULT_INTERVAL_SECONDS:
            values.append(f"interval={self.interval_seconds * 1000:.0f}ms")
        made = render(*values, *self.values, release=self.name, version=OLDEST)
        template = made["DaemonSet"]["spec"]["template"]
        spec = template["spec"]
        # A static pod belongs to its node, and has no service account: without an API server there is none.
        del spec["serviceAccountName"]
        spec.pop("nodeSelector", None)
        spec.pop("affinity", None)
        spec["nodeName"] = NODE_NAME
        metadata = template["metadata"] | {"name": self.name, "namespace": NAMESPACE}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


AGENTS = (
    AgentPod("gpumap"),
    AgentPod("gpumap-fast", (), frozenset(), 0.5, ["--stale-after=15s"], "worker"),
    AgentPod("no-host-pid", ["privileges.hostPID=false"], frozenset({"proc"}), 1.0, (), "worker"),
    AgentPod("no-checkpoint", ["privileges.checkpoint=false"], frozenset({"checkpoint"}), 1.0, (), "worker"),
    AgentPod("no-pod-logs", ["privileges.podLogs=false"], frozenset({"logs"}), 1.0, (), "worker"),
)


def make_driver(folder: Path) -> Path:
    """A folder with the stand-in library and room for its state, as a node has the driver's. Gives the state's file."""
    library = standin.build(standin.LIBRARIES)
    folder.mkdir(parents=True)
    (folder / library.name).write_bytes(library.read_bytes())
    (folder / library.name).chmod(0o755)
    state = folder / STATE
    state.parent.mkdir()
    return state


def image(temporary: pytest.TempPathFactory) -> Path:
    """The project's image, built as `make image` does, in an archive that containerd takes.

    It is kept for the next run, until its source or its bases change. `make clean` removes it.
    """
    source = copy_source(temporary.mktemp("source"))
    inputs = sha256(repr((BUILD, RUNTIME)).encode())
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        inputs.update(f"{file.relative_to(source)}\0".encode() + file.read_bytes())
    archive = KEPT / f"gpumap-{inputs.hexdigest()[:16]}.tar"
    if not archive.exists():
        KEPT.mkdir(exist_ok=True)
        builder = Builder(temporary.mktemp("buildah"))
        build = builder.make_base("build", BUILD, with_dependencies=True)
        runtime = builder.make_base("runtime", RUNTIME, with_dependencies=False)
        builder.build(source, TAG, build, runtime)
        unfinished = builder.folder / "gpumap.tar"
        builder.buildah("push", "--quiet", *builder.policy, TAG, f"docker-archive:{unfinished}:{TAG}")
        for old in KEPT.glob("gpumap-*.tar"):
            old.unlink()
        shutil.move(unfinished, archive)
        shutil.rmtree(builder.folder)
    return archive
