"""`gpumap demo`: the service as it is, over a simulated node in a temporary folder."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from gpumap.agent import service
from gpumap.agent.settings import Settings
from gpumap.agent.signals import stop_by_signal
from gpumap.lab.demo.node import DemoNode
from gpumap.lab.demo.scenario_model import Scenario

TEMPORARY_BYTES_MAX = 48
"""A longer name of the temporary folder leaves no room for the path of the kubelet's socket (107 bytes)."""


async def serve_demo(settings: Settings, scenario: Scenario) -> None:
    """Serve a scenario until a signal comes. The simulated sources replace those of `settings`."""
    stop = stop_by_signal()  # before there is anything that would be left behind
    with service.bind(settings.listen) as listener, _temporary_folder() as folder:
        async with DemoNode(scenario, Path(folder)) as node:
            announce(listener)
            # Ids that a scenario spells out are on no device of its driver, and no restart brings one.
            await service.serve(simulated(settings, node), node.driver_command, listener, stop, math.inf)


def announce(listener: socket.socket) -> None:
    """Print the page's address, on a terminal: a log is for programs."""
    if sys.stdout is not None and sys.stdout.isatty():
        host, port = listener.getsockname()[:2]
        shown = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
        print(
            f"Open http://{f'[{shown}]' if ':' in shown else shown}:{port}/ in a browser. Ctrl-C ends it.", flush=True
        )


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    short = len(os.fsencode(tempfile.gettempdir())) <= TEMPORARY_BYTES_MAX
    return tempfile.TemporaryDirectory(prefix="gpumap-demo-", dir=None if short else "/tmp")  # noqa: S108


def simulated(settings: Settings, node: DemoNode) -> Settings:
    """Point every source at a simulated node."""
    return replace(
        settings,
        has_kubelet=True,
        kubelet_socket=node.kubelet_root / "pod-resources" / "kubelet.sock",
        checkpoint_candidates=(node.kubelet_root / "device-plugins" / "kubelet_internal_checkpoint",),
        dra_state=node.kubelet_root / "dra_manager_state",
        dra_driver_checkpoint=node.kubelet_root / "plugins" / "gpu.nvidia.com" / "checkpoint.json",
        pods_api_socket=None,
        pod_resources_socket=None,
        gpu_fractioning_map=None,
        pod_log_root=node.log_root,
        proc=node.proc_root,
    )
