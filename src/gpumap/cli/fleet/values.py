"""The rows of a server's answer as values by their labels; what is no value of gpumap's is not known. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from gpumap.cli.fleet.families import DEVICELESS, Family, Selection
from gpumap.cli.fleet.target_matching import by_targets

Value = int | float
_EXACT_MAX = 1 << 53
"""Whole numbers up to here are exact in a server's floats; none of gpumap's is larger."""


class Told(NamedTuple):
    """Values by a family's own labels and, where it has them, by those of the target. `odd` are rows that have none."""

    values: dict[tuple[str, ...], Value]
    odd: tuple[str, ...] = ()


NOTHING = Told({})


def read(family: Family, rows: Iterable[tuple[Mapping[str, str], tuple[float, str]]], selection: Selection) -> Told:
    """Read an answer. Rows of one thing, as two agents of a node tell it for a while, are one: the larger value."""
    rows = list(rows)
    odd = []
    if _needs_targets(family, selection):
        placed = list(by_targets(family, [labels for labels, _ in rows], selection))
        odd = [
            _row(family, labels) + " is of a target that it does not tell"
            for (labels, _), key in zip(rows, placed, strict=True)
            if key is None
        ]
        rows = [row for row, key in zip(rows, placed, strict=True) if key is not None]
        keys = [key for key in placed if key is not None]
    else:
        keys = _keys(family, [labels for labels, _ in rows], selection)
    numbers = _all_numbers([text for _, (_, text) in rows], family)
    has_uuid = "uuid" in family.by and family.name != DEVICELESS.name
    named = not has_uuid or "" not in {key[family.by.index("uuid")] for key in keys}
    if numbers is not None and named and not odd:
        plain = dict(zip(keys, numbers, strict=True))
        if len(plain) == len(keys):
            return Told(plain)
    values: dict[tuple[str, ...], Value] = {}
    for key, (labels, (_, text)) in zip(keys, rows, strict=True):
        value = _number(text, family)
        if value is None or (has_uuid and not labels.get("uuid")):
            odd.append(f"{_row(family, labels)} is {text}")
        elif key not in values or values[key] < value:
            values[key] = value
    return Told(values, tuple(odd))


def _row(family: Family, labels: Mapping[str, str]) -> str:
    return f"{family.name}{{{', '.join(f'{name}={value}' for name, value in sorted(labels.items()))}}}"


def _needs_targets(family: Family, selection: Selection) -> bool:
    """Whether rows do not tell their labels, or their target, without what is known of targets."""
    return selection.by_target or (family.of_target and not {*family.by}.isdisjoint(selection.key))


def _keys(family: Family, rows: Sequence[Mapping[str, str]], selection: Selection) -> list[tuple[str, ...]]:
    """The labels of each row that make it one."""
    names = (*family.by, *(selection.key if family.of_target else ()))
    moved = {f"exported_{name}" for name in family.by if name in selection.labels}
    if moved.isdisjoint(chain.from_iterable(rows)):
        return list(zip(*(_column(name, rows) for name in names), strict=True))
    own = [f"exported_{name}" if f"exported_{name}" in moved else name for name in family.by]
    instead = (*own, *names[len(own) :])
    # Where Prometheus has moved one of them, an own label that is not moved is one that was empty.
    chosen = ((labels, names if moved.isdisjoint(labels) else instead) for labels in rows)
    return [tuple([labels.get(name, "") for name in of_row]) for labels, of_row in chosen]


def _column(name: str, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A label of all rows. A server leaves out those that are empty."""
    try:
        return list(map(itemgetter(name), rows))
    except KeyError:
        return [labels.get(name, "") for labels in rows]


def _limits(family: Family) -> tuple[int, int, bool]:
    """Least and most, and whether values are whole: bytes and counts are, ratios go up to 1, and nothing but a
    difference is below 0."""
    whole = family.name.endswith(("_bytes", "_processes", "_slots", "_slots_allocatable", "_up"))
    least = -_EXACT_MAX if "owner" in family.by else 0
    return least, 1 if family.name.endswith("_ratio") else _EXACT_MAX, whole


def _all_numbers(texts: Sequence[str], family: Family) -> Sequence[Value] | None:
    """The values of a whole answer; `None` where one of them is none."""
    least, most, whole = _limits(family)
    try:
        values = list(map(float, texts))
    except ValueError:
        return None
    if not values or any(map(math.isnan, values)) or min(values) < least or max(values) > most:
        return None
    if not whole:
        return values
    return list(map(int, values)) if all(map(float.is_integer, values)) else None


def _number(text: str, family: Family) -> Value | None:
    found = _all_numbers([text], family)
    return found[0] if found else None
