"""P10 and P11: memory of both processes, its growth under churn, and the time from start to the first page."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from bench import usage
from bench.contestants import Contestant, gpumap, has_nvitop, nvitop
from bench.figures import Figure, mean, median, missing, noise
from bench.node import SMALL, BenchNode, node
from bench.usage import MIB

IDLE = "import aiohttp, grpc.aio, prometheus_client, pynvml, sys; print(flush=True); sys.stdin.read()"
CHURN_INTERVAL = "50ms"
WARM_UP_CYCLES = 200
HORIZON_CYCLES = 7000
"""Peaks of containers that are gone are kept for five minutes, curves up to a number: long runs begin after that."""


def memory(_: frozenset[str]) -> Iterator[Figure]:
    """P10's first half. Both processes together, what they share counted once."""
    idle = _idle_bytes()
    with node(SMALL) as made, gpumap(made, "1s") as one, gpumap(made, "1s") as another:
        time.sleep(8.0)
        copies = [_settled_bytes(ours) for ours in (one, another)]
        service = usage.memory_bytes(one.pids[:1])
        threads = usage.threads(one.pids)
    parts = f"{service / MIB:.1f} + {(copies[0] - service) / MIB:.1f}"
    absolute = f"{parts} : {idle / MIB:.1f} MiB ({threads} threads)"
    what = f"memory, both processes : idle with their libraries, {SMALL}"
    yield Figure("P10", what, mean(copies) / idle, 1.5, absolute, noise=noise(copies))


def _settled_bytes(ours: Contestant) -> float:
    ours.page()
    return usage.memory_bytes(ours.pids)


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
    with (
        node(SMALL, plain=True) as made,
        gpumap(made, CHURN_INTERVAL) as one,
        gpumap(made, CHURN_INTERVAL) as another,
    ):
        _churn(made, one, HORIZON_CYCLES if cycles > HORIZON_CYCLES else WARM_UP_CYCLES)
        early = [usage.memory_bytes(ours.pids) for ours in (one, another)]
        ran = _churn(made, one, cycles)
        late = [usage.memory_bytes(ours.pids) for ours in (one, another)]
    absolute = f"{mean(late) / MIB:.1f} : {mean(early) / MIB:.1f} MiB after {ran:.0f} cycles with churn"
    each = [after / before for after, before in zip(late, early, strict=True)]
    yield Figure("P10", f"memory after churn : before, {SMALL}", mean(each), 1.02, absolute, noise=noise(each))


def _churn(made: BenchNode, ours: Contestant, cycles: int) -> float:
    """A pod goes and another one comes, every few cycles."""
    started = ours.collections()
    while (ran := ours.collections() - started) < cycles:
        made.churn(1)
        time.sleep(0.2)
    return ran


def start(_: frozenset[str]) -> Iterator[Figure]:
    """P11, one after the other in turn: CPU time and wall time."""
    what, limit = f"CPU from start to first page : nvitop-exporter, {SMALL}", 1.3
    if not has_nvitop():
        yield missing("P11", what, limit)
        return
    cpu: list[list[float]] = [[], [], []]
    wall: list[list[float]] = [[], [], []]
    with node(SMALL) as made:
        for _round in range(9):
            for number, begun in enumerate((gpumap(made, "5s"), nvitop(made, 5.0), gpumap(made, "5s"))):
                with begun as one:
                    cpu[number].append(one.cpu_to_first_page)
                    wall[number].append(one.seconds_to_first_page)
    for name, each, its_limit in ((what, cpu, limit), (what.removeprefix("CPU from "), wall, None)):
        one_copy, theirs, another = map(median, each)
        seen, apart = mean((one_copy, another)), noise((one_copy, another))
        yield Figure("P11", name, seen / theirs, its_limit, f"{seen * 1e3:.0f} : {theirs * 1e3:.0f} ms", noise=apart)
