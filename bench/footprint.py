"""P10 and P11: memory of both processes, its growth under churn, and the time from start to the first page."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from bench import usage
from bench.contestants import Contestant, gpumap, has_nvitop, nvitop
from bench.figures import Figure, median, missing
from bench.node import SMALL, BenchNode, node
from bench.usage import MIB

IDLE = "import aiohttp, grpc.aio, sys; print(flush=True); sys.stdin.read()"
CHURN_INTERVAL = "50ms"
WARM_UP_CYCLES = 200
HORIZON_CYCLES = 7000
"""Peaks of containers that are gone are kept for five minutes, curves up to a number: long runs begin after that."""


def memory(_: frozenset[str]) -> Iterator[Figure]:
    """P10's first half. Both processes together, what they share counted once."""
    idle = _idle_bytes()
    with node(SMALL) as made, gpumap(made, "1s") as ours:
        time.sleep(8.0)
        ours.page()
        pids = ours.pids
        seen, service = usage.memory_bytes(pids), usage.memory_bytes(pids[:1])
        parts = f"{service / MIB:.1f} + {(seen - service) / MIB:.1f}"
        absolute = f"{parts} : {idle / MIB:.1f} MiB ({usage.threads(pids)} threads)"
    yield Figure("P10", f"memory, both processes : idle aiohttp + grpc.aio, {SMALL}", seen / idle, 1.5, absolute)


def _idle_bytes() -> int:
    with subprocess.Popen([sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as idle:
        assert idle.stdout is not None
        idle.stdout.readline()
        time.sleep(1.0)
        found = usage.memory_bytes([idle.pid])
        idle.communicate()
    return found


def growth(cycles: int) -> Iterator[Figure]:
    """P10's second half: so many cycles, with pods that come and go all the time."""
    with node(SMALL, plain=True) as made, gpumap(made, CHURN_INTERVAL) as ours:
        _churn(made, ours, HORIZON_CYCLES if cycles > HORIZON_CYCLES else WARM_UP_CYCLES)
        early = usage.memory_bytes(ours.pids)
        ran = _churn(made, ours, cycles)
        late = usage.memory_bytes(ours.pids)
    absolute = f"{late / MIB:.1f} : {early / MIB:.1f} MiB after {ran} cycles with churn"
    yield Figure("P10", f"memory after churn : before, {SMALL}", late / early, 1.02, absolute)


def _churn(made: BenchNode, ours: Contestant, cycles: int) -> int:
    """A pod goes and another one comes, every few cycles."""
    started = ours.collections()
    while (ran := ours.collections() - started) < cycles:
        made.churn(1)
        time.sleep(0.2)
    return ran


def start(_: frozenset[str]) -> Iterator[Figure]:
    """P11, one after the other in turn."""
    what, limit = f"start to first page : nvitop-exporter, {SMALL}", 0.8
    if not has_nvitop():
        yield missing("P11", what, limit)
        return
    ours, theirs = [], []
    with node(SMALL) as made:
        for _round in range(9):
            with gpumap(made, "5s") as one:
                ours.append(one.seconds_to_first_page)
            with nvitop(made, 5.0) as other:
                theirs.append(other.seconds_to_first_page)
    seen, best = median(ours), median(theirs)
    yield Figure("P11", what, seen / best, limit, f"{seen * 1e3:.0f} : {best * 1e3:.0f} ms")
