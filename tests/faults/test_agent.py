"""The agent itself: stopped, ended, or its output blocked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from tests.agent import PATIENCE_SECONDS, until
from tests.exposed import Page
from tests.faults.ending import exits_with, refuse_start, stop
from tests.faults.matrix import Fault, fault_of, suffer
from tests.faults.site import Inject, Site, Sites, Start
from tests.faults.test_driver import ALL_AS_BEFORE, IDLE, UP, answers, hangs, hangs_at_start, lists
from tests.faults.test_worker import signalled
from tests.kubelet import Hang
from tests.machine import gpu_uuid
from tests.standin import Code

pytestmark = pytest.mark.asyncio(loop_scope="module")
PART = "Agent"
up_fault = partial(fault_of, PART, UP)
IMPATIENT = Start(deadline_seconds=1.0)
STALE_AFTER_SECONDS = 1.0
RELAY = """
import fcntl, os, signal, subprocess, sys
read, write = os.pipe()
fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
child = subprocess.Popen(sys.argv[1:], stderr=write)
os.close(write)
signal.signal(signal.SIGUSR1, lambda *_: os.close(read))
try:
    while chunk := os.read(read, 4096):
        os.write(2, chunk)
except OSError:
    pass
sys.exit(child.wait())
"""
"""Reads gpumap's standard error from a pipe of 4 KiB, until SIGUSR1."""
RELAYED = Start(parent=(sys.executable, "-c", RELAY))
FLAPS = 15
"""A GPU that is lost and back adds about 450 bytes to the log."""


@contextlib.asynccontextmanager
async def stopped_for_longer_than_stale_after(site: Site) -> AsyncIterator[None]:
    """A client asks while gpumap is stopped, and gets its answer before a new collection is complete."""
    agent = site.agent
    seen = (await agent.page()).collections
    os.kill(agent.pid, signal.SIGSTOP)
    request = asyncio.create_task(agent.get("/metrics"))
    await asyncio.sleep(1.5 * STALE_AFTER_SECONDS)
    os.kill(agent.pid, signal.SIGCONT)
    page = Page((await request).text)
    assert page.collections > seen + 1 or "gpumap_allocation_info" not in page.samples, "L6: a stale page"
    yield


async def flap(site: Site, times: int) -> None:
    """A GPU is lost and back, again and again: each time is logged."""
    for code in [Code.GPU_IS_LOST, None] * times:
        site.node.driver.fail = {} if code is None else {("*", 1): code}
        site.node.update_driver()
        up = float(code is None)
        await site.agent.until(
            lambda page, up=up: page.value("gpumap_gpu_up", gpu_uuid=gpu_uuid(1)) == up,  # type: ignore[misc]
            "it does not collect",
        )


@contextlib.asynccontextmanager
async def nobody_reads_the_log(site: Site) -> AsyncIterator[None]:
    """The pipe fills while GPUs come and go; then its reader goes on."""
    relay = site.agent.process.pid
    os.kill(relay, signal.SIGSTOP)
    try:
        await flap(site, FLAPS)
    finally:
        os.kill(relay, signal.SIGCONT)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "log lines are lost" not in site.agent.log:
            await flap(site, 1)
    yield


@contextlib.asynccontextmanager
async def the_reader_of_the_log_is_gone(site: Site) -> AsyncIterator[None]:
    os.kill(site.agent.process.pid, signal.SIGUSR1)
    await flap(site, 1)
    yield


@contextlib.asynccontextmanager
async def many_scrapes_of_a_big_page(site: Site) -> AsyncIterator[None]:
    """Eight clients ask for a page with 20,000 series of processes without a pause."""
    ended = asyncio.Event()

    async def scrape() -> None:
        while not ended.is_set():
            assert (await site.agent.get("/healthz")).status == 200
            await site.agent.get("/api/v1/map")

    async with lists(*range(1_000_000, 1_005_000))(site):
        clients = [asyncio.create_task(scrape()) for _ in range(4)]
        yield
        ended.set()
        await asyncio.gather(*clients)


@contextlib.asynccontextmanager
async def a_kubelet_that_hangs(site: Site) -> AsyncIterator[None]:
    site.node.kubelet.misbehave(Hang())
    await asyncio.sleep(0.3)
    yield
    site.node.kubelet.behave()


@contextlib.asynccontextmanager
async def a_log_that_nobody_reads(site: Site) -> AsyncIterator[None]:
    relay, agent = site.agent.process.pid, site.agent.pid
    os.kill(relay, signal.SIGSTOP)
    await flap(site, FLAPS)

    async def go_on() -> None:
        """The relay, which waits for gpumap's end, goes on after it."""

        async def state() -> str:
            return Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[0]  # noqa: ASYNC240 -- at once

        await until(state, lambda letter: letter == "Z", "it does not end")
        os.kill(relay, signal.SIGCONT)

    going_on = asyncio.create_task(go_on())
    yield
    await going_on


@contextlib.asynccontextmanager
async def nothing(site: Site) -> AsyncIterator[None]:
    """Any moment of a service that collects all the time."""
    yield


FAULTS = (
    up_fault(
        "gpumap is stopped (SIGSTOP) for longer than --stale-after",
        stopped_for_longer_than_stale_after,
        *ALL_AS_BEFORE,
        "/readyz 200",
        log=None,
        recovers=4,
        start=Start(flags=("--stale-after", f"{STALE_AFTER_SECONDS:g}s")),
    ),
    up_fault(
        "no process reads standard error, and its pipe is full",
        nobody_reads_the_log,
        *ALL_AS_BEFORE,
        "/healthz 200",
        log=("standard error was blocked: log lines are lost count=",),
        start=RELAYED,
    ),
    up_fault(
        "the reader of standard error is gone",
        the_reader_of_the_log_is_gone,
        *ALL_AS_BEFORE,
        "/healthz 200",
        start=RELAYED,
    ),
    up_fault(
        "clients ask for a map of 5,000 processes all the time",
        many_scrapes_of_a_big_page,
        f'gpumap_device_processes{{{IDLE},owner="unknown"}} 5000',
        'gpumap_container_gpu_memory_used_bytes{pod="whole"} unchanged',
        "/healthz 200",
        recovers=2,
    ),
)


def stops(
    moment: str, inject: Inject, start: Start = IMPATIENT, log: tuple[str, ...] | None = ("INFO stopped",)
) -> Fault:
    return Fault(PART, f"SIGTERM {moment}", inject, exits_with(0), (), log, start=start)


STOPS = (
    stops("during collections", nothing),
    stops("while the first call of NVML hangs", hangs_at_start),
    stops("while a call on one GPU hangs", hangs("nvmlDeviceGetMemoryInfo_v2", 1)),
    stops("while the shutdown of NVML hangs", hangs("nvmlShutdown", "*")),
    stops("while the worker is stopped (SIGSTOP)", signalled(signal.SIGSTOP)),
    stops("while the kubelet hangs", a_kubelet_that_hangs),
    stops("while no process reads standard error", a_log_that_nobody_reads, RELAYED, log=None),
    stops("while the driver crashes the worker", answers(lambda driver: driver.crash.add(("*", 1)))),
)

STARTS = (
    Fault(
        PART,
        "the port is in use at the start",
        nothing,
        exits_with(2),
        (),
        ("gpumap: --listen 127.0.0.1:…: Address already in use",),
        start=Start(flags=("--listen", "127.0.0.1:{port}")),
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_the_agent(fault: Fault, sites: Sites) -> None:
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)


@pytest.mark.parametrize("fault", STOPS, ids=str)
async def test_the_end_of_the_agent(fault: Fault, library: Path) -> None:
    """Each row of the table is true, and no process is left."""
    await stop(fault, library)


@pytest.mark.parametrize("fault", STARTS, ids=str)
async def test_the_start_of_the_agent(fault: Fault, library: Path) -> None:
    await refuse_start(fault, library)
