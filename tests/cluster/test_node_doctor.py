"""`gpumap doctor` on a live node, before and after its first device plugin registers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import standin
from tests.cluster.device_plugin import Allocations, DevicePlugin, by_id
from tests.cluster.node import DEVICE_PLUGINS, LiveNode, busybox_pod
from tests.demo_process import GPUMAP
from tests.machine import WHOLE, gpu_uuid
from tests.prometheus import eventually

pytestmark = pytest.mark.cluster


def examine(node: LiveNode, library: Path) -> dict[str, tuple[str, str, str | None]]:
    """State, what works, and remedy of each check."""
    state = node.folder / "driver"
    standin.Driver(gpus=[standin.Gpu(gpu_uuid(0))]).write(state)
    variables = (f"GPUMAP_NVML_LIBRARY={library}", f"STANDIN_STATE={state}")
    words = node.command("env", *variables, GPUMAP, "doctor", "--output", "json")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(done.stdout)["checks"]
    return {one["check"]: (one["state"], one["seen"], one["remedy"]) for one in checks}


def test_doctor_on_a_live_node(live_node: LiveNode, library: Path) -> None:
    """It finds the kubelet, its pods, logs and processes; the checkpoint once a device plugin has registered."""
    found = examine(live_node, library)
    state, _, remedy = found["device_checkpoint"]
    assert (state, remedy is not None and "first device plugin registers" in remedy) == ("missing", True)
    with DevicePlugin(live_node.path(DEVICE_PLUGINS), by_id(WHOLE, [gpu_uuid(0)]), Allocations()):
        # Before that, this kubelet would start the pod without a device.
        checkpoint = live_node.path(DEVICE_PLUGINS / "kubelet_internal_checkpoint")
        eventually(lambda: checkpoint.exists() and gpu_uuid(0) in checkpoint.read_text())
        live_node.apply(busybox_pod("holder", {"name": "main", "resources": {"limits": {WHOLE: "1"}}}))
        live_node.wait_running("holder")
        found = examine(live_node, library)
    assert "1 pod with GPUs" in found["kubelet"][1]
    for check in ("kubelet", "nvml", "procfs", "device_checkpoint", "pod_logs", "push", "pid_visibility"):
        assert found[check][0] == "ok", found
