"""From the increases of counters to the lines of a bill, and what the bill leaves out. Pure.

A value that is not known is `None`, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.cli.bill.promql import (
    ENERGY,
    HELD,
    MEMORY,
    NOT_MEASURED,
    PRESENT,
    SM_KNOWN,
    UNATTRIBUTED,
    USED,
    USED_OF_MIG,
    WORK_MEMORY,
    WORK_SM,
    Growth,
    Key,
)
from gpumap.cli.table import SortKey, sort_rows
from gpumap.model.formatting import listed
from gpumap.model.grouping import grouped

Pod = tuple[str, str]
"""Namespace and name."""
Group = tuple[str | None, ...]
"""The cells that name a line. `None`: pods without the label."""
BY_NAME = "name"
ORDERS = ("held", "cost", "used", "idle", "kwh", "memory", BY_NAME)
"""The keys of --sort-by. The first one is the default."""
NAMESPACE, POD, LABEL, WORKLOAD, JOB, USER = "namespace", "pod", "label", "workload", "job", "user"
KINDS = {JOB: "slurm_job|pbs_job|htcondor_slot", USER: "user"}
"""Kinds of work outside pods, as a regular expression, by what groups them."""
_COLUMNS = {POD: (NAMESPACE, POD), WORKLOAD: (NAMESPACE, WORKLOAD), JOB: ("kind", JOB)}
_GAPS_SHOWN = 5


class Gap(NamedTuple):
    """A time without samples of one gpumap, or (empty) of any. RFC 3339."""

    start: str
    end: str
    instance: str = ""


class Increases(NamedTuple):
    """How far each counter went. `uncharged_seconds` are GPU-seconds that gpumap had counted before the server scraped
    it. `gaps` is None if no counter of a GPU matches. `resumed`: the increase of these containers contains time before
    the window, because the server did not scrape them when it began."""

    growth: Growth
    uncharged_seconds: float
    gaps: tuple[Gap, ...] | None
    resumed: frozenset[Key] = frozenset()


class Request(NamedTuple):
    """The bill that a user wants. `match` is matchers as in PromQL, `label_match` are those for kube-state-metrics;
    `label` is a pod's as Kubernetes writes it; `price` is for a GPU-hour held; `start` and `end` are RFC 3339."""

    grouping: str
    match: str
    label: str | None
    label_match: str
    price: float | None
    start: str
    end: str
    step_seconds: int
    order: str = ORDERS[0]
    """A key of --sort-by."""
    reverse: bool = False


class Amounts(NamedTuple):
    """GPU-seconds, joules and byte-seconds. `held_seconds` is of work outside pods the time with a process on a GPU.

    `held_measured` is the part of `held_seconds` on devices that report SM time. `used_of_it` is the used part of that,
    for each container on each device: a container that uses more than its share does not reduce the idle part of
    others.
    `used_without_share` is the use of containers that hold no share, or an unknown one.
    """

    held_seconds: float | None = None
    used: float | None = None
    energy: float | None = None
    memory: float | None = None
    held_measured: float | None = None
    used_of_it: float | None = None
    used_without_share: float | None = None

    def idle(self) -> float | None:
        """The part of what was held that was not used, of devices that report both."""
        if not self.held_measured or self.used_of_it is None:
            return None
        return 1 - self.used_of_it / self.held_measured

    def held_use_unknown(self) -> float | None:
        """What was held of devices that do not report SM time."""
        return None if self.held_seconds is None else self.held_seconds - (self.held_measured or 0.0)


class Line(NamedTuple):
    group: Group
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class Bill:
    """A window's bill. `uncharged_seconds` are GPU-seconds; `warnings` say what may be missing."""

    server: str
    request: Request
    lines: tuple[Line, ...]
    total: Amounts
    unattributed_energy: float | None
    not_measured_seconds: float | None
    uncharged_seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def is_of_work(self) -> bool:
        """It is of work outside pods, not of containers."""
        return self.request.grouping in KINDS

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a group's cells."""
        way = self.request.grouping
        return (self.request.label or "",) if way == LABEL else _COLUMNS.get(way, (way,))

    def cost(self, amounts: Amounts) -> float | None:
        price = self.request.price
        return None if price is None or amounts.held_seconds is None else price * amounts.held_seconds / 3600


def bill_of(server: str, request: Request, increases: Increases, label_of: Mapping[Pod, str]) -> Bill:
    """Make the bill. `label_of` has the pods' label or workload for `--by label` and `--by workload`."""

    def group(key: Key) -> Group:
        match request.grouping:
            case "pod" | "job":
                return key[:2]
            case "user":
                return key[1:2]
            case "label":
                return (label_of.get((key[0], key[1])),)
            case "workload":
                return key[0], label_of.get((key[0], key[1]), f"Pod/{key[1]}")
        return key[:1]

    charged = dict(_works(increases.growth) if request.grouping in KINDS else _containers(increases.growth))
    warnings = [*_warnings(request, increases)]
    if request.grouping == WORKLOAD and (pods := {key[:2] for key in charged} - label_of.keys()):
        names = listed(sorted("/".join(pod) for pod in pods))
        warnings.append(f"kube-state-metrics does not list {names}. Each has a row of its own.")
    return Bill(
        server=server,
        request=request,
        lines=_sort_lines(_lines(charged, group), request),
        total=_total(charged.values()),
        unattributed_energy=_sum(increases.growth.get(UNATTRIBUTED, {}).values()),
        not_measured_seconds=_sum(increases.growth.get(NOT_MEASURED, {}).values()),
        uncharged_seconds=increases.uncharged_seconds,
        warnings=tuple(warnings),
    )


def pods_of(growth: Growth) -> set[Pod]:
    """The pods that the bill charges."""
    return {(key[0], key[1]) for key, _ in _containers(growth)}


def _containers(growth: Growth) -> Iterator[tuple[Key, Amounts]]:
    """What each container on a device is charged. One that ended before the window has counters that do not grow."""
    counters = [growth[HELD], {**growth[USED], **growth[USED_OF_MIG]}, growth[ENERGY], growth[MEMORY]]
    for key in dict.fromkeys(key for counter in counters for key in counter):
        held_seconds, used, energy, memory = (counter.get(key) for counter in counters)
        if any((held_seconds, used, energy, memory)):
            measured, of_it = (
                (held_seconds, min(held_seconds, used))
                if held_seconds is not None and used is not None
                else (None, None)
            )
            yield (
                key,
                Amounts(held_seconds, used, energy, memory, measured, of_it, used if held_seconds is None else None),
            )


def _works(growth: Growth) -> Iterator[tuple[Key, Amounts]]:
    """What each work outside pods had of a device."""
    for key, present in growth[PRESENT].items():
        known, used, memory = (growth[gauge].get(key) for gauge in (SM_KNOWN, WORK_SM, WORK_MEMORY))
        of_it = min(known, used) if known is not None and used is not None else None
        yield key, Amounts(held_seconds=present, used=used, memory=memory, held_measured=known, used_of_it=of_it)


def _lines(charged: Mapping[Key, Amounts], group: Callable[[Key], Group]) -> tuple[Line, ...]:
    """The groups by name; pods without the label are last."""
    groups = grouped((group(key), amounts) for key, amounts in charged.items())
    order = sorted(groups, key=lambda name: tuple((label is None, label or "") for label in name))
    return tuple(Line(name, _total(groups[name])) for name in order)


_SORTED_BY: Mapping[str, Callable[[Amounts], float | None]] = {
    "held": lambda amounts: amounts.held_seconds,
    "cost": lambda amounts: amounts.held_seconds,  # a bill has one price
    "used": lambda amounts: amounts.used,
    "idle": Amounts.idle,
    "kwh": lambda amounts: amounts.energy,
    "memory": lambda amounts: amounts.memory,
}


def _sort_lines(lines: tuple[Line, ...], request: Request) -> tuple[Line, ...]:
    if request.order == BY_NAME:
        return lines[::-1] if request.reverse else lines
    value = _SORTED_BY[request.order]
    key = SortKey[Line](lambda line: value(line.amounts), largest_first=True)
    return tuple(sort_rows(lines, key, reverse=request.reverse))


def _total(parts: Iterable[Amounts]) -> Amounts:
    """The sum of each amount, over the parts that know it."""
    return Amounts(*(_sum(column) for column in zip(*parts, strict=True)))


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None


def _warnings(request: Request, increases: Increases) -> Iterator[str]:
    """The parts of the window that the server does not have, and what is charged of the time before."""
    gaps = increases.gaps
    if gaps is None:
        matching = f" that match {request.match}" if request.match else ""
        yield f"There are no counters of GPUs{matching}, so gpumap cannot check the window for gaps."
    is_charged = "is not" if request.grouping in KINDS else "may not be"  # a counter that goes on contains it
    for gap in (gaps or ())[:_GAPS_SHOWN]:
        instance = f" of {gap.instance}" if gap.instance else ""
        yield (
            f"The server has no gpumap samples{instance} from {gap.start} to {gap.end}. "
            f"Use within this gap {is_charged} charged."
        )
    if increases.resumed:
        pods = listed(sorted({"/".join(key[:2]) for key in increases.resumed}))
        yield (
            f"The server did not scrape these pods just before {request.start}: {pods}. Their rows may contain use "
            "from before this time, since its last scrape."
        )
    if (unlisted_gaps := len(gaps or ()) - _GAPS_SHOWN) > 0:
        yield f"Gaps that are not listed: {unlisted_gaps}."
