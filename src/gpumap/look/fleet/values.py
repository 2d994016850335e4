"""The rows of a server's answer as values by their labels; what is no value of gpumap's is not known. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from gpumap.look.fleet.families import Family, Selection

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
    labels_of = _reader(family, selection)
    number = _numbers(family)
    values: dict[tuple[str, ...], Value] = {}
    odd = []
    for labels, (_, text) in rows:
        value = number(text)
        if value is None or ("uuid" in family.by and not labels.get("uuid")):
            odd.append(f"{family.name}{{{', '.join(f'{k}={v}' for k, v in sorted(labels.items()))}}} is {text}")
            continue
        key = labels_of(labels)
        if key not in values or values[key] < value:
            values[key] = value
    return Told(values, tuple(odd))


def _reader(family: Family, selection: Selection) -> Callable[[Mapping[str, str]], tuple[str, ...]]:
    names = (*family.by, *(selection.key if family.of_target else ()))
    exported = {f"exported_{name}": name for name in family.by if name in selection.labels}
    moved = frozenset(exported)
    own = [f"exported_{name}" if f"exported_{name}" in moved else name for name in family.by]
    instead = (*own, *names[len(own) :])

    def labels_of(labels: Mapping[str, str]) -> tuple[str, ...]:
        # Where Prometheus has moved one of them, an own label that is not moved is one that was empty.
        chosen = names if moved.isdisjoint(labels) else instead
        return tuple([labels.get(name, "") for name in chosen])

    return labels_of


def _numbers(family: Family) -> Callable[[str], Value | None]:
    """How a value is read: bytes and counts are whole, ratios up to 1, and nothing but a difference is below 0."""
    whole = family.name.endswith(("_bytes", "_processes", "_slots", "_slots_allocatable", "_up"))
    least = -_EXACT_MAX if "owner" in family.by else 0
    most = 1 if family.name.endswith("_ratio") else _EXACT_MAX

    def number(text: str) -> Value | None:
        try:
            value = float(text)
        except ValueError:
            return None
        if not least <= value <= most or (whole and not value.is_integer()):
            return None  # NaN is not between them either
        return int(value) if whole else value

    return number
