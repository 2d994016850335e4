"""`gpumap demo`: the service as it is, over a simulated node in a temporary folder."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from gpumap import service
from gpumap.demo.node import DemoNode
from gpumap.demo.play import Scenario
from gpumap.settings import Settings


async def serve_demo(settings: Settings, scenario: Scenario) -> None:
    """Serve a scenario until a signal comes. What `settings` says of sources is overruled by the simulated ones."""
    with service.bind(settings.listen) as listener, tempfile.TemporaryDirectory(prefix="gpumap-demo-") as folder:
        async with DemoNode(scenario, Path(folder)) as node:
            await service.serve(simulated(settings, node), node.driver_command, listener)


def simulated(settings: Settings, node: DemoNode) -> Settings:
    """Point every source at a simulated node."""
    return replace(
        settings,
        kubelet_socket=node.kubelet_root / "pod-resources" / "kubelet.sock",
        checkpoint_candidates=(node.kubelet_root / "device-plugins" / "kubelet_internal_checkpoint",),
        pod_log_root=node.log_root,
        proc=node.proc_root,
    )
