"""`gpumap demo`: the service as it is, over a node that is played in a temporary folder."""

from __future__ import annotations

import ipaddress
import math
import socket
import sys
from pathlib import Path

from gpumap.agent import service
from gpumap.agent.own_process import stop_by_signal
from gpumap.agent.settings import Settings
from gpumap.lab.capture.format import About, Capture
from gpumap.lab.demo import frames
from gpumap.lab.demo.scenario_model import Scenario
from gpumap.lab.node import Play, PlayedNode
from gpumap.lab.node_files import temporary_folder


async def serve_demo(settings: Settings, scenario: Scenario) -> None:
    """Serve a scenario until a signal comes."""
    about = About(settings.node_name, resource=settings.resource.pattern)
    play = frames.play(scenario)
    _, first = next(play)
    await serve_node(settings, Capture(about, (first,)), play, hangs=True)


async def serve_node(settings: Settings, capture: Capture, play: Play | None = None, *, hangs: bool = False) -> None:
    """Serve a node that is played until a signal comes. Its sources replace those of `settings`."""
    stop = stop_by_signal()  # before anything exists that would remain
    with service.bind(settings.listen) as listener, temporary_folder() as folder:
        node = PlayedNode(capture, Path(folder), hangs=hangs)
        async with node.playing(play):
            _announce(listener)
            # Ids without a device, and what was hidden from a recorded gpumap, stay so: a restart would bring nothing.
            await service.serve(node.settings(settings), node.driver_command, listener, stop, math.inf)


def _announce(listener: socket.socket) -> None:
    """Print the page's address, on a terminal: a log is for programs."""
    if sys.stdout is not None and sys.stdout.isatty():
        host, port = listener.getsockname()[:2]
        shown_host = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
        shown_host = f"[{shown_host}]" if ":" in shown_host else shown_host
        print(f"Open http://{shown_host}:{port}/ in a browser. Ctrl-C ends it.", flush=True)
