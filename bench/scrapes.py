"""P1–P4, P13 and P15: what a scrape costs, against a static handler, nvitop-exporter, and a sweep on the event loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from bench import usage
from bench.contestants import Contestant, gpumap, has_nvitop, nvitop, scrape, static_handler, sweeper
from bench.figures import Figure, mean, median, microseconds, missing, noise, percentile
from bench.load import Target
from bench.node import LARGE, MIG, SMALL, BenchNode, Shape, node

CALL_SECONDS = 0.005
P15_LIMITS = {MIG: 30.0, LARGE: 60.0}
P15_ROUNDS = 7
SETTLED_SECONDS = 1.0
"""After a collection has begun, until it is over also on a busy machine."""


@contextlib.contextmanager
def copies(made: BenchNode, interval: str, *flags: str) -> Iterator[list[Contestant]]:
    """Two of gpumap: their ratio is the noise."""
    with gpumap(made, interval, *flags) as one, gpumap(made, interval, *flags) as another:
        yield [one, another]


def static(wanted: frozenset[str]) -> Iterator[Figure]:
    """P1, P3 and P13, on both shapes."""
    for shape in (SMALL, LARGE):
        with node(shape) as made, copies(made, "5s") as ours, static_handler(made, ours[0].page()) as limit:
            if "P1" in wanted:
                yield _latency(shape, ours, limit)
            if "P3" in wanted:
                yield _throughput(shape, ours, limit)
            if "P13" in wanted:
                yield _gzipped(shape, ours)


def _latency(shape: Shape, ours: Sequence[Contestant], limit: Contestant) -> Figure:
    *seen, best = map(median, scrape(*[Target(one.port) for one in (*ours, limit)], rounds=30))
    absolute = f"{microseconds(mean(seen))} : {microseconds(best)}, {len(ours[0].page()) / 1000:.0f} kB"
    return Figure("P1", f"scrape p50 : static handler, {shape}", mean(seen) / best, 1.2, absolute, noise=noise(seen))


def _throughput(shape: Shape, ours: Sequence[Contestant], limit: Contestant) -> Figure:
    targets = [Target(one.port, requests=2000) for one in (*ours, limit)]
    *seen, best = map(median, scrape(*targets, rounds=12, connections=8))
    what, absolute = f"scrapes/s : static handler, {shape}", f"{mean(seen):.0f} : {best:.0f}/s"
    return Figure("P3", what, mean(seen) / best, 0.8, absolute, at_least=True, noise=noise(seen))


def _gzipped(shape: Shape, ours: Sequence[Contestant]) -> Figure:
    gzipped = [Target(one.port, headers="Accept-Encoding: gzip\r\n") for one in ours]
    *seen, plain = map(median, scrape(*gzipped, Target(ours[0].port), rounds=20))
    absolute = f"{microseconds(mean(seen))} : {microseconds(plain)}"
    return Figure("P13", f"gzipped scrape p50 : plain, {shape}", mean(seen) / plain, 1.5, absolute, noise=noise(seen))


def against_nvitop(_: frozenset[str]) -> Iterator[Figure]:
    """P2."""
    what, limit = f"scrape p50 : nvitop-exporter, {SMALL}", 0.01
    if not has_nvitop():
        yield missing("P2", what, limit)
        return
    with node(SMALL) as made, copies(made, "5s") as ours, nvitop(made, 5.0) as other:
        targets = [Target(one.port) for one in ours]
        *seen, theirs = map(median, scrape(*targets, Target(other.port, requests=10), rounds=12))
    absolute = f"{microseconds(mean(seen))} : {microseconds(theirs)}"
    yield Figure("P2", what, mean(seen) / theirs, limit, absolute, noise=noise(seen))


def slow_driver(_: frozenset[str]) -> Iterator[Figure]:
    """P4: scrapes come at a steady pace, and one that has to wait is late from when it was due."""
    with node(SMALL) as made:
        _slow_down(made)
        with copies(made, "1s") as ours, sweeper(made, 1.0) as other:
            targets = [Target(one.port, requests=400) for one in (*ours, other)]
            *seen, theirs = (percentile(each, 99) for each in scrape(*targets, rounds=2, pace_seconds=0.01))
    absolute = f"{microseconds(mean(seen))} : {microseconds(theirs)}"
    what = f"scrape p99, NVML calls of 5 ms : sweep on the loop, {SMALL}"
    yield Figure("P4", what, mean(seen) / theirs, 0.25, absolute, noise=noise(seen))


def _slow_down(made: BenchNode) -> None:
    made.driver.delay = {("*", "*"): CALL_SECONDS}
    made.write_driver()


def every_dialect(_: frozenset[str]) -> Iterator[Figure]:
    """P15: the first scrape of a snapshot, which makes the page."""
    for shape, limit in P15_LIMITS.items():
        with node(shape, plain=True) as made, copies(made, "3s", "--dialect", "all") as ours:
            spent: list[list[float]] = [[], []]
            for _round in range(P15_ROUNDS):
                for number, one in enumerate(ours):
                    spent[number].append(_page_milliseconds(one))
            kilobytes = len(ours[0].page()) / 1000
        seen = [median(each[1:]) for each in spent]
        name = f"{shape} MIG" if shape.instances_per_gpu else str(shape)
        what = f"CPU of a page with every dialect, {name}"
        absolute = f"{kilobytes:.0f} kB"
        yield Figure("P15", what, mean(seen), limit, absolute, noise=noise(seen), unit=" ms")


def _page_milliseconds(one: Contestant) -> float:
    made = one.collections()
    while one.collections() == made:
        time.sleep(0.01)
    time.sleep(SETTLED_SECONDS)
    before = usage.cpu_seconds(one.pids[:1])
    one.page()
    return (usage.cpu_seconds(one.pids[:1]) - before) * 1e3
