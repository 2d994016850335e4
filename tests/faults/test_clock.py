"""The clocks of the machine: the wall clock is set, and the machine sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpumap.agent.sources.nvml_state import RING_SECONDS
from tests.faults.matrix import Fault, is_up, suffer
from tests.faults.site import Inject, Site, Sites, Start, injects, running
from tests.faults.test_driver import ALL_AS_BEFORE, UP

pytestmark = pytest.mark.asyncio(loop_scope="module")
PART = "Clock"
HOUR = 3600
FOLDER = Path(tempfile.gettempdir()) / f"gpumap-faults-{os.getpid()}-clock"
OFFSETS, PRELOADED = FOLDER / "offsets", FOLDER / "clock.so"
PRELOADS = ("LD_PRELOAD", str(PRELOADED)), ("FAULTS_CLOCK", str(OFFSETS))
CLOCK = Start(variables=PRELOADS)
SM = "gpumap_container_sm_utilization_ratio"
COUNTERS = ("gpumap_container_allocated_gpu_seconds_total", "gpumap_container_sm_seconds_total")


@pytest.fixture(scope="module", autouse=True)
def _clock() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix=FOLDER.name) as folder:
        FOLDER.symlink_to(folder)
        move()
        source = Path(__file__).with_name("clock.c")
        options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["cc", *options, "-o", str(PRELOADED), str(source)], check=True, timeout=120)
        yield
        FOLDER.unlink()


def move(wall_seconds: int = 0, asleep_seconds: int = 0) -> None:
    """Set how far the clocks are ahead of the machine's."""
    offsets = struct.pack("qq", wall_seconds, asleep_seconds)
    with OFFSETS.open("r+b" if OFFSETS.exists() else "w+b") as file:
        file.write(offsets)


@contextlib.asynccontextmanager
async def counting_as_before(site: Site) -> AsyncIterator[None]:
    """No counter rises by more than the time that really passed, whatever a clock says; and it goes on."""
    await site.agent.until(
        lambda page: all(page.value(name, pod="whole") is not None for name in COUNTERS), "a counter is missing"
    )
    before, began = await site.agent.later(1), time.monotonic()
    yield
    page = await site.agent.later(2)
    passed = time.monotonic() - began
    for name in COUNTERS:
        was, now = (one.value(name, pod="whole") for one in (before, page))
        assert was is not None
        assert now is not None
        assert was < now <= was + passed + 2.0, f"{name} rose by {now - was} in {passed} s"


@injects
async def clocks(site: Site, wall_seconds: int, asleep_seconds: int = 0) -> AsyncIterator[None]:
    """The clocks are moved, and stay so."""
    async with counting_as_before(site):
        move(wall_seconds, asleep_seconds)
        yield


@injects
async def set_back(site: Site, wall_seconds: int) -> AsyncIterator[None]:
    """The wall clock is set back, and the driver still has samples of its future."""
    move(wall_seconds)
    yield
    await known_again(site)


async def known_again(site: Site) -> None:
    """The driver has no sample of the future any more."""
    await asyncio.sleep(RING_SECONDS)
    await site.agent.until(lambda page: page.value(SM, pod="whole") is not None, "SM use is not known again")
    async with counting_as_before(site):
        pass


@contextlib.asynccontextmanager
async def restless(site: Site) -> AsyncIterator[None]:
    """The wall clock is an hour ahead and right again, in turn."""

    async def set_again() -> None:
        while True:
            for seconds in (HOUR, 0):
                move(seconds)
                await asyncio.sleep(0.3)

    setting = asyncio.create_task(set_again())
    try:
        yield
    finally:
        setting.cancel()
    await known_again(site)


def ahead(what: str, inject: Inject) -> Fault:
    return Fault(
        PART,
        what,
        inject,
        page=(*ALL_AS_BEFORE, "gpumap_container_unassigned_use unchanged", f"{SM} unchanged"),
        self_metrics=(UP, is_up("kubelet"), is_up("procfs")),
        log=(),
        looks=3,
        start=CLOCK,
    )


def back(what: str, inject: Inject) -> Fault:
    return replace(
        ahead(what, inject),
        page=(*ALL_AS_BEFORE, "gpumap_container_unassigned_use unchanged", f"{SM} absent"),
        self_metrics=(UP, 'gpumap_capability{capability="process_utilization"} 0'),
        log=("capabilities device_checkpoint=1 pod_logs=1 process_utilization=0",),
    )


FAULTS = (
    ahead("the wall clock is set an hour ahead", clocks(HOUR)),
    ahead("the machine sleeps for an hour", clocks(2 * HOUR, HOUR)),
    ahead("the wall clock is set 20 years ahead", clocks(20 * 365 * 24 * HOUR, HOUR)),
)
LONG = (
    back("the wall clock is set an hour back: two minutes later SM use is known again", set_back(-HOUR)),
    back("the wall clock is set to 1970, as without a battery", set_back(-int(time.time()) + 60)),
    back("the wall clock is set ahead and back, again and again", restless),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_the_clock(fault: Fault, sites: Sites) -> None:
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)


@pytest.mark.e2e
@pytest.mark.parametrize("fault", LONG, ids=str)
async def test_the_clock_for_minutes(fault: Fault, library: Path) -> None:
    move()
    async with running(fault.start, library) as site:
        await suffer(fault, site)
