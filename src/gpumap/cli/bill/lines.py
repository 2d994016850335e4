"""What a bill says: who held how many GPU-hours, used them, and took how much energy; and what nobody is charged. Pure.

Sums are exact. What is not known is `None`, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from gpumap.cli.bill.counter_increase import Gain
from gpumap.cli.bill.counting import ENERGY, GAP, HELD, MEMORY, UNATTRIBUTED, USED, Counter, Key

Group = tuple[str | None, ...]
"""What a line is for, by the bill's columns; `None` is a pod without the label."""
Gains = Mapping[Counter, Mapping[Key, Gain]]
NAMESPACE, POD, LABEL = "namespace", "pod", "label"


class Amounts(NamedTuple):
    """GPU-seconds, joules and byte-seconds; `None` where nothing of it is known.

    `held_measured` is the part of `held` on devices that tell SM time, and `used_of_it` what of it was used, holding by
    holding: who takes more than its share makes no other one less idle.
    `used_without_share` is used by those whose share is not known: they held none, or their plugin grants none.
    """

    held: Fraction | None = None
    used: Fraction | None = None
    energy: Fraction | None = None
    memory: Fraction | None = None
    held_measured: Fraction | None = None
    used_of_it: Fraction | None = None
    used_without_share: Fraction | None = None

    def idle(self) -> Fraction | None:
        """The share of what was held that was not used, where both are known."""
        if not self.held_measured or self.used_of_it is None:
            return None
        return 1 - self.used_of_it / self.held_measured

    def held_blindly(self) -> Fraction:
        """What was held of devices whose use is not known."""
        return (self.held or Fraction(0)) - (self.held_measured or Fraction(0))


class Line(NamedTuple):
    group: Group
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class Bill:
    """A window's bill. `start` and `end` are RFC 3339; `match` is matchers as in PromQL; `price` is for a GPU-hour
    held. `warnings` say what may be missing."""

    server: str
    start: str
    end: str
    step_seconds: int
    by: str
    label: str | None
    price: Fraction | None
    lines: tuple[Line, ...]
    total: Amounts
    unattributed_energy: Fraction | None
    gap_seconds: Fraction | None
    doubted_seconds: Fraction
    match: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """What the parts of a line's group are."""
        match self.by:
            case "pod":
                return NAMESPACE, POD
            case "label":
                return (self.label or "",)
        return (NAMESPACE,)

    def cost(self, amounts: Amounts) -> Fraction | None:
        if self.price is None or amounts.held is None:
            return None
        return self.price * amounts.held / 3600


def lines_of(gains: Gains, group: Callable[[Key], Group]) -> tuple[Line, ...]:
    """A line for each group that held, used or took anything, in their order; pods without the label stand last."""
    found: dict[Group, list[Amounts]] = {}
    for key, amounts in _containers(gains):
        found.setdefault(group(key), []).append(amounts)
    order = sorted(found, key=lambda one: tuple((part is None, part or "") for part in one))
    return tuple(Line(one, total_of(found[one])) for one in order)


def total_of(parts: Iterable[Amounts]) -> Amounts:
    """The sum of each amount over those that know it."""
    columns = zip(*parts, strict=True)
    return Amounts(*(_sum(column) for column in columns))


def pods_of(gains: Gains) -> set[tuple[str, str]]:
    """Namespace and name of the pods that are charged something."""
    return {(key[0], key[1]) for key, _ in _containers(gains)}


def energy_of_nobody(gains: Gains) -> Fraction | None:
    return _sum(gain.amount for gain in gains[UNATTRIBUTED].values())


def gap_seconds(gains: Gains) -> Fraction | None:
    return _sum(gain.amount for gain in gains[GAP].values())


def doubted_seconds(gains: Gains) -> Fraction:
    """GPU-seconds held that were counted before they were first seen, at a time that nobody knows."""
    return sum((gain.doubted for gain in gains[HELD].values()), Fraction(0))


def _containers(gains: Gains) -> Iterable[tuple[Key, Amounts]]:
    """What each container on a device is charged, if it is anything: counters stand for a while after a pod is gone."""
    keys = dict.fromkeys(key for counter in (HELD, USED, ENERGY, MEMORY) for key in gains[counter])
    for key in keys:
        told = (gains[counter].get(key) for counter in (HELD, USED, ENERGY, MEMORY))
        held, used, energy, memory = (gain.amount if gain else None for gain in told)
        if any((held, used, energy, memory)):
            measured, of_it = (held, min(held, used)) if held is not None and used is not None else (None, None)
            yield key, Amounts(held, used, energy, memory, measured, of_it, _shareless(held, used))


def _shareless(held: Fraction | None, used: Fraction | None) -> Fraction | None:
    return used if held is None else None


def _sum(values: Iterable[Fraction | None]) -> Fraction | None:
    known = [value for value in values if value is not None]
    return sum(known, Fraction(0)) if known else None
