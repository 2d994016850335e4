"""F1: a cluster of 5 000 nodes with 8 GPUs each, scraped by a real Prometheus, and what it takes to look at all of it.

The nodes are pages that one process serves, the snapshot's time apart always the same; Prometheus scrapes each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.contestants import ROOT
from bench.figures import Figure
from tests.prometheus import Prometheus, eventually, prometheus
from tests.tools import BIN

NODES, GPUS = 5_000, 8
SCRAPE_SECONDS, PATIENCE_SECONDS = 60, 600.0
COMMANDS = (("inspect",), ("top",), ("waste",), ("map",), ("top", "-n", "team-7"))
_CARD_BYTES = 85_520_809_984
_SOURCES = ("kubelet", "nvml", "procfs", "pod_identity")
_CAPABILITIES = ("pid_visibility", "device_checkpoint", "pod_logs", "push", "process_utilization", "gpm", "xid_events")
_OWNERS = ("assigned", "unassigned", "gone", "host", "unknown")


def fleet(wanted: frozenset[str]) -> Iterator[Figure]:
    """Fill a Prometheus, then run each command once."""
    if not (BIN / "prometheus").exists():
        yield Figure("F1", "a look at 5 000 nodes", None, None, "prometheus is missing: run `make tools`")
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        _nodes() as port,
        _filled(Path(folder), port) as server,
    ):
        count = server.value("count({__name__=~'gpumap_.+'})")
        for command in COMMANDS:
            yield _look(server.url, command, int(count))


def _look(url: str, command: tuple[str, ...], series: int) -> Figure:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    arguments = (sys.executable, "-m", "gpumap", *command, "--prometheus", url)
    done = subprocess.run(arguments, capture_output=True, check=False)
    took = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = done.stdout.count(b"\n")
    said = f"{took:.1f} s ({spent:.1f} s of CPU here), {lines} lines, of {series} series"
    what = f"{' '.join(command)} : {NODES} nodes × {GPUS} GPUs"
    return Figure("F1", what, None, None, said if done.returncode == 0 else f"failed: {done.stderr.decode().strip()}")


@contextlib.contextmanager
def _nodes() -> Iterator[int]:
    """Serve the pages in a process of its own. Gives its port."""
    with subprocess.Popen(
        (sys.executable, "-m", "bench.fleet"), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def _filled(folder: Path, port: int) -> Iterator[Prometheus]:
    """A Prometheus that has scraped every node."""
    targets = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {
                "__metrics_path__": f"/{number}",
                "instance": f"10.0.{number >> 8}.{number & 255}:9401",
                "node": _name(number),
                "namespace": "gpumap",
                "pod": f"gpumap-{number * 7919:x}",
                "container": "gpumap",
                "endpoint": "metrics",
                "service": "gpumap",
            },
        }
        for number in range(NODES)
    ]
    job = {"job_name": "gpumap", "honor_labels": True, "static_configs": targets}
    times = {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"}
    with prometheus(folder, config={"global": times, "scrape_configs": [job]}) as running:
        server = replace(running, timeout_seconds=60.0)

        def all_scraped() -> bool:
            with contextlib.suppress(OSError):  # it is busy
                return bool(server.ask(f"count(gpumap_snapshot_timestamp_seconds) >= {NODES}"))
            return False

        eventually(all_scraped, PATIENCE_SECONDS, about=lambda: (folder / "prometheus.log").read_text()[-2000:])
        yield server


# --- the nodes --------------------------------------------------------------------------------------------------------


def _name(number: int) -> str:
    return f"gpu-{number:04}"


def _page(number: int, now: float) -> Iterator[str]:
    """A node's page, as far as looks need it: two pods on every other GPU, some of them idle."""
    draw = random.Random(number)
    yield f"gpumap_snapshot_timestamp_seconds {now}"
    yield f'gpumap_node_info{{node="{_name(number)}",internal_ip="10.9.{number >> 8}.{number & 255}"}} 1'
    yield from (f'gpumap_source_up{{source="{one}"}} 1' for one in _SOURCES)
    yield from (f'gpumap_source_last_success_timestamp_seconds{{source="{one}"}} {now}' for one in _SOURCES)
    yield 'gpumap_driver_info{driver_version="580.95.05",cuda_version="13.0",nvml_version="13.580.95.05"} 1'
    yield from (f'gpumap_capability{{capability="{one}"}} 1' for one in _CAPABILITIES)
    for index in range(GPUS):
        card = f"GPU-{uuid.UUID(int=draw.getrandbits(128))}"
        yield from _device(card, index, number, now, draw)


def _device(card: str, index: int, number: int, now: float, draw: random.Random) -> Iterator[str]:
    of_card = f'uuid="{card}"'
    count = 1 + index % 2
    yield (
        f'gpumap_device_info{{{of_card},gpu_uuid="{card}",index="{index}",minor="{index}",pci_bus_id="0000:{index:02}",'
        'model="NVIDIA H100 80GB HBM3",mig_profile="",gpu_instance_id="",compute_instance_id=""} 1'
    )
    yield f"gpumap_gpu_up{{{of_card}}} 1"
    yield f"gpumap_gpu_utilization_ratio{{{of_card}}} 0.5"
    yield f'gpumap_device_slots_allocatable{{{of_card},resource="nvidia.com/gpu"}} {count}'
    yield f"gpumap_device_holders{{{of_card}}} {count}"
    used = 0
    for slot in range(count):
        memory = 0 if draw.random() < 0.1 else draw.randrange(1 << 30, 30 << 30)
        used += memory
        name = f'namespace="team-{number % 50}",pod="job-{number}-{index}-{slot}",container="main",{of_card}'
        yield f'gpumap_allocation_slots{{{name},resource="nvidia.com/gpu"}} 1'
        yield f"gpumap_container_allocated_gpus{{{name}}} {1 / count}"
        yield f"gpumap_container_allocated_gpu_memory_bytes{{{name}}} {_CARD_BYTES // count}"
        yield f"gpumap_container_gpu_memory_used_bytes{{{name}}} {memory}"
        yield f"gpumap_container_gpu_memory_peak_bytes{{{name}}} {memory}"
        yield f"gpumap_container_gpu_processes{{{name}}} {int(memory > 0)}"
        yield f"gpumap_container_sm_utilization_ratio{{{name}}} {0.4 if memory else 0}"
        yield f"gpumap_container_last_active_timestamp_seconds{{{name}}} {now - (0 if memory else 4000)}"
    kept, rest = 400 << 20, 500 << 20
    yield f"gpumap_device_memory_total_bytes{{{of_card}}} {_CARD_BYTES}"
    yield f"gpumap_device_memory_used_bytes{{{of_card}}} {used + rest}"
    yield f"gpumap_device_memory_reserved_bytes{{{of_card}}} {kept}"
    yield f"gpumap_device_memory_free_bytes{{{of_card}}} {_CARD_BYTES - used - rest - kept}"
    for owner in _OWNERS:
        assigned = owner == "assigned"
        yield f'gpumap_device_memory_used_by_owner_bytes{{{of_card},owner="{owner}"}} {used if assigned else 0}'
        yield f'gpumap_device_processes{{{of_card},owner="{owner}"}} {count if assigned else 0}'
    yield f'gpumap_device_memory_used_by_owner_bytes{{{of_card},owner="unaccounted"}} {rest}'


async def _serve() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                number = int(head.split(b" ", 2)[1][1:])
                body = ("\n".join(_page(number, time.time())) + "\n").encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    os.nice(5)
    asyncio.run(_serve())
