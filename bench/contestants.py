"""The processes that are measured: gpumap, nvitop-exporter, and the two small servers of this package as limits."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import usage
from bench.load import Target
from bench.node import BenchNode
from tests import standin

ROOT = Path(__file__).parent.parent
GPUMAP = Path(sys.executable).with_name("gpumap")
NVITOP = ROOT / ".tools" / "bench-venv" / "bin" / "nvitop-exporter"
START_SECONDS = 60.0
END_SECONDS = 10.0


@dataclass(frozen=True)
class Contestant:
    """A running server. `pids` are all of its processes."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    node: BenchNode
    seconds_to_first_page: float
    cpu_to_first_page: float

    @property
    def pids(self) -> list[int]:
        return usage.tree(self.process.pid)

    def page(self) -> str:
        """/metrics now; empty where it is not served yet."""
        return _page(self.port)

    @property
    def calls(self) -> Counter[str]:
        """Of the driver until now, by function."""
        return standin.read_calls(self.node.calls, self.pids)

    def collections(self) -> float:
        """How many it has made, whatever began them, as the driver counts: parts of one too.

        gpumap asks once in each how many GPUs there are, nvitop-exporter each GPU for its power.
        """
        calls = self.calls
        once = calls["nvmlDeviceGetCount_v2"]
        return once if self.name == "gpumap" else calls["nvmlDeviceGetPowerUsage"] / self.node.shape.gpus


def has_nvitop() -> bool:
    return NVITOP.exists()


@contextlib.contextmanager
def gpumap(node: BenchNode, interval: str, *flags: str, sign: str = "gpumap_device_info{") -> Iterator[Contestant]:
    """gpumap as it is run: the service and its NVML worker. It serves when `sign` is on its page."""
    port = _free_port()
    command = [str(GPUMAP), "serve", "--listen", f"127.0.0.1:{port}", "--interval", interval, *node.flags, *flags]
    with _running("gpumap", command, port, node, sign) as contestant:
        yield contestant


@contextlib.contextmanager
def nvitop(node: BenchNode, interval_seconds: float) -> Iterator[Contestant]:
    """nvitop-exporter on the same stand-in driver. By default it collects at least once each 1 s."""
    port = _free_port()
    command = [str(NVITOP), "--port", str(port), "--interval", str(interval_seconds), "--hostname", "bench"]
    with _running("nvitop-exporter", command, port, node, f'index="{node.shape.gpus - 1}"') as contestant:
        yield contestant


@contextlib.contextmanager
def static_handler(node: BenchNode, page: str) -> Iterator[Contestant]:
    """An aiohttp handler that serves these bytes: what any page of aiohttp costs."""
    with tempfile.NamedTemporaryFile("w", prefix="gpumap-bench-page-") as file:
        file.write(page)
        file.flush()
        port = _free_port()
        command = [sys.executable, "-m", "bench.static_server", str(port), file.name]
        with _running("static", command, port, node, "#") as contestant:
            yield contestant


@contextlib.contextmanager
def sweeper(node: BenchNode, interval_seconds: float) -> Iterator[Contestant]:
    """A server that asks NVML, through pynvml, on its event loop."""
    port = _free_port()
    command = [sys.executable, "-m", "bench.loop_sweeper", str(port), str(interval_seconds)]
    with _running("sweep on the loop", command, port, node, "gpu_") as contestant:
        yield contestant


def scrape(*targets: Target, rounds: int, connections: int = 1, pace_seconds: float = 0.0) -> list[list[float]]:
    """Let the load generator, a process of its own, visit the targets in turn (see `bench.load`)."""
    order = {
        "targets": [asdict(target) for target in targets],
        "rounds": rounds,
        "connections": connections,
        "pace": pace_seconds,
    }
    command = [sys.executable, "-m", "bench.load"]
    done = subprocess.run(command, input=json.dumps(order).encode(), stdout=subprocess.PIPE, cwd=ROOT, check=True)
    found: list[list[float]] = json.loads(done.stdout)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _page(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text
    except (OSError, urllib.error.HTTPError):
        return ""


@contextlib.contextmanager
def _running(name: str, command: Sequence[str], port: int, node: BenchNode, sign: str) -> Iterator[Contestant]:
    """Start it, and wait for the first page that contains `sign`. It ends with the block."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GPUMAP_", "NODE_"))}
    with tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=inherited | node.environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
        try:
            while sign not in _page(port):
                if process.poll() is not None or time.perf_counter() - started > START_SECONDS:
                    said.seek(0)
                    raise RuntimeError(f"{name} does not serve: {said.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.01)  # each look costs the contestant CPU time
            wall, cpu = time.perf_counter() - started, usage.cpu_seconds(usage.tree(process.pid))
            yield Contestant(name, port, process, node, wall, cpu)
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
