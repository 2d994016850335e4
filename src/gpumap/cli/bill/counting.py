"""What a server is asked for a bill: counters at the ends of a window, and where they did not just go on. Pure.

A counter that goes on without a break needs two values, at its ends. So a server is asked on a grid of steps for the
ends, and for the steps in which a series came, went, or began anew: however long the window is, no value between is
estimated, and none is lost with the last sample of a pod that left. docs/bill.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from fractions import Fraction
from typing import NamedTuple

ABSENT_SECONDS = 300
"""A counter that is first seen is believed to have been born so long before its step at most; see reckoning.py. As long
as gpumap keeps the counters of what is gone, and as an agent and its successor are believed to have counted at once."""
POD_KEYS = ("namespace", "pod", "container", "uuid")
Key = tuple[str, ...]


class Counter(NamedTuple):
    """A counter of gpumap's. More than `most_per_second` is no truth. A clock counts seconds that have passed."""

    name: str
    keys: tuple[str, ...]
    most_per_second: int
    clock: bool = False


HELD = Counter("gpumap_container_allocated_gpu_seconds_total", POD_KEYS, 1, clock=True)
USED = Counter("gpumap_container_sm_seconds_total", POD_KEYS, 1, clock=True)
ENERGY = Counter("gpumap_container_energy_joules_total", POD_KEYS, 3000)  # watts: no GPU of today draws half of it
MEMORY = Counter("gpumap_container_gpu_memory_byte_seconds_total", POD_KEYS, 1 << 40)
UNATTRIBUTED = Counter("gpumap_gpu_energy_unattributed_joules_total", ("uuid",), 3000)
GAP = Counter("gpumap_accounting_gap_seconds_total", ("uuid",), 1)
OF_CONTAINERS = (HELD, USED, ENERGY, MEMORY)
OF_GPUS = (UNATTRIBUTED, GAP)


class Kind(IntEnum):
    """What changed in a step, in the order in which it is reckoned.

    WENT: not seen in it, but in the one before; the value is its last. PEAK: it began anew in it, after this value.
    CAME: seen in it, but not in the one before. FELL: it began anew between the last sample of the step before, with
    this value, and the first one of this step; in a long step: it fell below that value somewhere in it. LEAST: its
    smallest value in a step in which it came. UNSURE: more may have happened in a long step.
    """

    WENT = 0
    PEAK = 1
    LEAST = 2
    CAME = 3
    FELL = 4
    UNSURE = 5


class Event(NamedTuple):
    """`step`: its number; the window's first is 1, and 0 is the one that ends where the window begins. A long one has
    the number of its last step, and is `steps` long."""

    step: int
    kind: Kind
    value: Fraction
    steps: int = 1


class Asked(NamedTuple):
    """How to ask. `match` is matchers as in PromQL. `exported`: gpumap's labels are `exported_pod` and so on, because
    it was scraped without honorLabels."""

    match: str
    step_seconds: int
    exported: bool = False


def selector(name: str, *matchers: str) -> str:
    """A metric's series that fit all matchers; empty ones fit all series."""
    return f"{name}{{{','.join(one for one in matchers if one)}}}"


def level(
    counter: Counter, asked: Asked, *, function: str = "last_over_time", steps_ago: int = 0, of_all: str = "max"
) -> str:
    """The counter in a step, by key. A UUID is one device's alone: series that differ in what the scrape adds are one.

    All samples of the step count, whatever the server's lookback is, and also those of a target that was then lost.
    """
    ago = f" offset {steps_ago * asked.step_seconds}s" if steps_ago else ""
    series = f"{function}({selector(counter.name, asked.match)}[{asked.step_seconds}s]{ago})"
    if asked.exported:
        for key in (key for key in counter.keys if key != "uuid"):
            series = f'label_replace({series}, "{key}", "$1", "exported_{key}", "(.+)")'
    return f"{of_all} by ({', '.join(counter.keys)}) ({series})"


def went(counter: Counter, asked: Asked) -> str:
    """The last value of what is seen in the step before and not in this."""
    return f"{level(counter, asked, steps_ago=1)} unless {level(counter, asked)}"


def changes(counter: Counter, asked: Asked) -> str:
    """All events of a step. A counter that began anew in a step cannot have gone further than the step is long; it can
    where its predecessor was still seen, and then it fell by more than a state file that is old can explain."""
    last, before = level(counter, asked), level(counter, asked, steps_ago=1)
    most = level(counter, asked, function="max_over_time")
    least = level(counter, asked, function="min_over_time", of_all="min")
    bound = counter.most_per_second * (asked.step_seconds + 1)
    young = 2 * bound + counter.most_per_second * ABSENT_SECONDS
    return _named(
        {
            Kind.WENT: went(counter, asked),
            Kind.PEAK: f"({most} > ({last} <= {bound})) or ({most} > ({last} <= {young}) + {bound})",
            Kind.LEAST: f"{least} unless {before}",
            Kind.CAME: f"{last} unless {before}",
            Kind.FELL: f"({before} > ({most} <= {2 * bound})) or ({before} > ({most} <= {young}) + {bound})",
        }
    )


def screen(counter: Counter, asked: Asked, short_seconds: int) -> str:
    """The events of a long step, and whether its short ones must be looked at: where a counter did not just go on."""
    last, before = level(counter, asked), level(counter, asked, steps_ago=1)
    least = level(counter, asked, function="min_over_time", of_all="min")
    resets, sources = level(counter, asked, function="resets"), level(counter, asked, of_all="count")
    earlier = level(counter, asked, of_all="count", steps_ago=1)
    late = counter.most_per_second * (short_seconds + ABSENT_SECONDS)
    return _named(
        {
            Kind.WENT: went(counter, asked),
            Kind.CAME: f"{last} unless {before}",
            Kind.FELL: f"{before} > {least}",
            Kind.UNSURE: f"({resets} > 0) or ({sources} > {earlier}) or "
            f"((({sources} > 1) or ({least} > {late})) unless {before})",
        }
    )


def _named(parts: Mapping[Kind, str]) -> str:
    named = (f'label_replace({part}, "event", "{kind.name}", "uuid", ".*")' for kind, part in parts.items())
    return " or ".join(named)
