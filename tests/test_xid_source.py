"""What the NVML source receives of XID events from workers that die, hang or fail. The workers are small scripts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gpumap.agent.sources.nvml import NvmlSource
from gpumap.model.observations import NvmlReading, SourceError
from gpumap.model.readings import Uuid

A = Uuid("GPU-a")
PATIENCE_SECONDS = 60.0

CHILD = """
import json, os, sys, time

def say(**said):
    os.write(1, json.dumps(said).encode() + b"\\n")

def answer(read):
    say(kind="driver", read=read, driver_version="", cuda_version="", nvml_version="", gpus=1)
    say(kind="gpu", read=read, gpu={"index": 0, "uuid": "GPU-a"})

def hear(code):
    now = time.monotonic()
    say(kind="xid", uuid="GPU-a", code=code, gpu_instance_id=None, compute_instance_id=None, at=now)
    say(kind="listening", periods=[["GPU-a", STARTED, now]])

STARTED = time.monotonic()
reads = (json.loads(line)["read"] for line in sys.stdin)
again = os.path.exists(sys.argv[1])  # the second worker
open(sys.argv[1], "a").close()
"""

Start = Callable[..., NvmlSource]


@pytest.fixture
async def start(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Start]:
    """Makes sources with a child that runs the given lines, and closes them."""
    sources: list[NvmlSource] = []

    def make(program: str, **options: Any) -> NvmlSource:
        flag = tmp_path_factory.mktemp("child") / "started"
        sources.append(NvmlSource([sys.executable, "-S", "-c", CHILD + program, str(flag)], ("health",), **options))
        return sources[-1]

    yield make
    for source in sources:
        await source.close()


async def read(source: NvmlSource, timeout_seconds: float = PATIENCE_SECONDS) -> NvmlReading:
    return (await source.read(1.0, timeout_seconds)).value


async def heard(source: NvmlSource, code: int) -> NvmlReading:
    """The reading with this event, which is one of the next."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                reading = await read(source, 0.3)
            except SourceError:
                continue
            if [one.code for one in reading.xids] == [code]:
                return reading
            assert reading.xids == ()


async def test_events_between_two_reads_are_reported_by_the_second(start: Start) -> None:
    """With its age and the stretch in which somebody listened; the third has nothing of it."""
    source = start("for read in reads:\n    answer(read)\n    if read == 1: hear(31)")
    assert (await read(source)).xids == ()
    reading = await heard(source, 31)
    assert reading.xids[0][:4] == (A, 31, None, None)
    assert [one.uuid for one in reading.listening] == [A]
    assert 0.0 < reading.listening[0].until_seconds <= reading.xids[0].age_seconds + 1e-9
    assert reading.listening[0].since_seconds > reading.listening[0].until_seconds
    later = await read(source)
    assert later.xids == ()
    assert later.listening == ()


async def test_the_last_events_of_a_worker_that_died_are_received(start: Start) -> None:
    """It died between two reads, of which the second has another worker."""
    source = start("for read in reads:\n    answer(read)\n    if not again: hear(79); sys.exit(1)")
    await read(source)
    assert [one.uuid for one in (await heard(source, 79)).listening] == [A]


async def test_the_last_events_of_a_killed_worker_are_received(start: Start) -> None:
    """It hung in a call after it had reported an event, and was replaced."""
    program = "for read in reads:\n    if not again:\n        hear(119)\n        time.sleep(600)\n    answer(read)"
    source = start(program, replace_after_seconds=0.2)
    await heard(source, 119)


async def test_events_before_a_failure_are_reported_after_it(start: Start) -> None:
    """NVML had to be initialised again, and could not at first."""
    failure = 'hear(13); say(kind="error", read=read, code=999, reason="unknown", detail="")'
    source = start(f"for read in reads:\n    if read == 1: {failure}\n    else: answer(read)")
    with pytest.raises(SourceError):
        await read(source)
    await heard(source, 13)


async def test_nonsense_takes_no_event_away(start: Start) -> None:
    """After a worker that is ended for what it said, the next one's reading has its events."""
    source = start("for read in reads:\n    if not again: hear(45); say(nonsense=1); time.sleep(600)\n    answer(read)")
    with pytest.raises(SourceError, match="protocol"):
        await read(source)
    await heard(source, 45)


@pytest.mark.parametrize("times", [0, -1, 1.5])
async def test_a_count_that_is_none_is_nonsense(start: Start, times: float) -> None:
    """A counter can never go back, whatever a worker says."""
    source = start(f'for read in reads:\n    say(xid=["GPU-a", 31, None, None, 0.0, {times}])\n    answer(read)')
    with pytest.raises(SourceError, match="protocol"):
        await read(source)
