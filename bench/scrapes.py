"""P1–P4 and P13: what a scrape costs, against a static handler, nvitop-exporter, and a sweep on the event loop."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.contestants import Contestant, gpumap, has_nvitop, nvitop, scrape, static_handler, sweeper
from bench.figures import Figure, median, microseconds, missing, percentile
from bench.load import Target
from bench.node import LARGE, SMALL, BenchNode, Shape, node

CALL_SECONDS = 0.005


def static(wanted: frozenset[str]) -> Iterator[Figure]:
    """P1, P3 and P13, on both shapes."""
    for shape in (SMALL, LARGE):
        with node(shape) as made, gpumap(made, "5s") as ours, static_handler(made, ours.page()) as limit:
            if "P1" in wanted:
                yield _latency(shape, ours, limit)
            if "P3" in wanted:
                yield _throughput(shape, ours, limit)
            if "P13" in wanted:
                yield _gzipped(shape, ours)


def _latency(shape: Shape, ours: Contestant, limit: Contestant) -> Figure:
    seen, best = map(median, scrape(Target(ours.port), Target(limit.port), rounds=30))
    first = _first_of_a_snapshot(ours)
    size = len(ours.page())
    absolute = f"{microseconds(seen)} : {microseconds(best)}, {size / 1000:.0f} kB; first of a snapshot {first}"
    return Figure("P1", f"scrape p50 : static handler, {shape}", seen / best, 1.5, absolute)


def _first_of_a_snapshot(ours: Contestant) -> str:
    """The scrape that makes the page: not part of the goal, but what a Prometheus sees at each of its scrapes."""
    found = []
    for _ in range(2):
        before = ours.collections()
        while ours.collections() == before:
            time.sleep(0.05)
        # The page of this collection has just been made by asking; the next one's first is due an interval later.
        time.sleep(5.3)
        found += scrape_once(ours)
    return microseconds(median(found))


def scrape_once(ours: Contestant) -> list[float]:
    started = time.perf_counter()
    ours.page()
    return [time.perf_counter() - started]


def _throughput(shape: Shape, ours: Contestant, limit: Contestant) -> Figure:
    targets = Target(ours.port, requests=2000), Target(limit.port, requests=2000)
    seen, best = map(median, scrape(*targets, rounds=12, connections=8))
    return Figure("P3", f"scrapes/s : static handler, {shape}", seen / best, 0.8, f"{seen:.0f} : {best:.0f}/s", True)


def _gzipped(shape: Shape, ours: Contestant) -> Figure:
    gzipped = Target(ours.port, headers="Accept-Encoding: gzip\r\n")
    seen, plain = map(median, scrape(gzipped, Target(ours.port), rounds=20))
    absolute = f"{microseconds(seen)} : {microseconds(plain)}"
    return Figure("P13", f"gzipped scrape p50 : plain, {shape}", seen / plain, 1.5, absolute)


def against_nvitop(_: frozenset[str]) -> Iterator[Figure]:
    """P2."""
    what, limit = f"scrape p50 : nvitop-exporter, {SMALL}", 0.01
    if not has_nvitop():
        yield missing("P2", what, limit)
        return
    with node(SMALL) as made, gpumap(made, "5s") as ours, nvitop(made, 5.0) as other:
        seen, theirs = map(median, scrape(Target(ours.port), Target(other.port, requests=10), rounds=12))
    yield Figure("P2", what, seen / theirs, limit, f"{microseconds(seen)} : {microseconds(theirs)}")


def slow_driver(_: frozenset[str]) -> Iterator[Figure]:
    """P4: scrapes come at a steady pace, and one that has to wait is late from when it was due."""
    with node(SMALL) as made:
        _slow_down(made)
        with gpumap(made, "1s") as ours, sweeper(made, 1.0) as other:
            targets = Target(ours.port, requests=400), Target(other.port, requests=400)
            seen, theirs = (percentile(each, 99) for each in scrape(*targets, rounds=2, pace_seconds=0.01))
    absolute = f"{microseconds(seen)} : {microseconds(theirs)}"
    what = f"scrape p99, NVML calls of 5 ms : sweep on the loop, {SMALL}"
    yield Figure("P4", what, seen / theirs, 0.25, absolute)


def _slow_down(made: BenchNode) -> None:
    made.driver.delay = {("*", "*"): CALL_SECONDS}
    made.write_driver()
