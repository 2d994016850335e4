"""Many nodes' pages, served by one process of its own, and a Prometheus that has scraped each of them.

A module that has pages calls `serve` when it is started as a program; `serving` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.contestants import ROOT
from tests.prometheus import Prometheus, chart_job, eventually, prometheus

PATIENCE_SECONDS = 600.0


@contextlib.contextmanager
def serving(module: str, *arguments: str | Path) -> Iterator[str]:
    """Run the module that has the pages. Gives its URL."""
    command = (sys.executable, "-m", module, *arguments)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def serve(page: Callable[[int], bytes]) -> None:
    """Answer /NUMBER with that node's page, until killed. Prints the port."""
    os.nice(5)
    asyncio.run(_serve(page))


async def _serve(page: Callable[[int], bytes]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = page(int(head.split(b" ", 2)[1][1:]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def name_node(number: int) -> str:
    return f"gpu-{number:04}"


def fleet_job(url: str, nodes: int) -> dict[str, Any]:
    """The job that scrapes so many nodes as the chart does."""
    return chart_job({name_node(number): f"{url}/{number}" for number in range(nodes)})


def all_scraped(server: Prometheus, nodes: int) -> Callable[[], bool]:
    """Whether the server has a page of each node."""

    def scraped() -> bool:
        with contextlib.suppress(OSError):  # it is busy
            return bool(server.ask(f"count(gpumap_snapshot_timestamp_seconds) >= {nodes}"))
        return False

    return scraped


@contextlib.contextmanager
def filled(folder: Path, url: str, nodes: int, every_seconds: int, *rules: Path) -> Iterator[Prometheus]:
    """A Prometheus that evaluates the rules, and has scraped every node as the chart does."""
    times = {"scrape_interval": f"{every_seconds}s", "scrape_timeout": f"{every_seconds}s"}
    scraping = {"scrape_configs": [fleet_job(url, nodes)], "rule_files": [str(file) for file in rules]}
    with prometheus(folder, config={"global": times, **scraping}) as running:
        server, log = replace(running, timeout_seconds=300.0), folder / "prometheus.log"
        eventually(all_scraped(server, nodes), PATIENCE_SECONDS, about=lambda: log.read_text()[-2000:])
        yield server
