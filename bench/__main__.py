"""`python -m bench [P1 G1 …] [--long]`: measures, and prints one table. A missed goal is a ✘, never a failure."""

from __future__ import annotations

import argparse
import compileall
import datetime
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from bench import cycles, fleet, footprint, parts, push, rules, scrapes, sizing, usage
from bench.contestants import ROOT
from bench.figures import Figure, table

Section = Callable[[frozenset[str]], Iterator[Figure]]
GROWTH_CYCLES = 400
LONG_GROWTH_CYCLES = 10_000
SLOW = "P16", "F1", "S1", "S2", "S3"
"""They take minutes each: only by name."""
SOURCE = ROOT / "src" / "gpumap"


def sections(growth_cycles: int) -> Mapping[tuple[str, ...], Section]:
    """What is measured together, by the goals that it is for. Without a goal: G, what a group of families costs, F, a
    look at a cluster, and S, what a fleet takes to keep."""

    def memory(wanted: frozenset[str]) -> Iterator[Figure]:
        yield from footprint.memory(wanted)
        yield from footprint.growth(growth_cycles)

    return {
        ("P1", "P3", "P13"): scrapes.static,
        ("P2",): scrapes.against_nvitop,
        ("P4",): scrapes.slow_driver,
        ("P5",): parts.rendering,
        ("P6",): cycles.cycle,
        ("P8",): parts.unchanged_list,
        ("P9",): cycles.steady,
        ("P10",): memory,
        ("P11",): footprint.start,
        ("P12",): cycles.growth,
        ("P14",): push.push,
        ("P15",): scrapes.every_dialect,
        ("G1",): cycles.groups,
        ("P16", "F1"): fleet.fleet,
        ("S1",): sizing.fleet,
        ("S2",): sizing.memory,
        ("S3",): rules.rules,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("goals", nargs="*", metavar="GOAL", help=f"P1, G1, …; without any, all but {', '.join(SLOW)}")
    parser.add_argument("--long", action="store_true", help="10 000 cycles with churn instead of a few hundred")
    given = parser.parse_args()
    measured = sections(LONG_GROWTH_CYCLES if given.long else GROWTH_CYCLES)
    known = {goal for goals in measured for goal in goals}
    wanted = frozenset(given.goals) or frozenset(known).difference(SLOW)
    if not wanted <= known:
        parser.error(f"{', '.join(sorted(wanted - known))}: not measured here; there are {', '.join(sorted(known))}")
    for folder in (SOURCE, sysconfig.get_path("purelib")):
        compileall.compile_dir(folder, quiet=2)  # as pip does: else each start compiles, and keeps 12 MiB of it
    figures = []
    for goals, section in measured.items():
        if wanted.intersection(goals):
            figures += _measured(section(wanted))
    figures.sort(key=lambda figure: figure.place)
    print(
        f"\n{datetime.date.today()}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}\n"
    )
    print(table(figures))
    return 0


def _measured(section: Iterator[Figure]) -> list[Figure]:
    """Print each when it is known. In the end note what other programs took of this machine: whether it was quiet."""
    started, all_, own = time.monotonic(), usage.machine_cpu_seconds(), usage.own_cpu_seconds()
    figures = []
    for figure in section:
        figures.append(figure)
        print(f"{time.strftime('%H:%M:%S')} {' '.join(figure.row)}", file=sys.stderr, flush=True)
    of_others = usage.machine_cpu_seconds() - all_ - (usage.own_cpu_seconds() - own)
    share = max(0.0, of_others) / (time.monotonic() - started) / (os.cpu_count() or 1)
    return [replace(figure, others=share) for figure in figures]


if __name__ == "__main__":
    sys.exit(main())
