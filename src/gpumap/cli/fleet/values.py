"""The rows of a server's answers as values by their labels and by their target. Pure.

A row that is no value of gpumap's, such as a negative number of bytes, is left out and named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from gpumap.cli.fleet.queries import DEVICELESS, FINDING_SINCE, AskedFamily, Selection
from gpumap.cli.fleet.targets import Labels, by_targets
from gpumap.model.formatting import cut_off

Value = int | float
Answer = tuple[Mapping[str, str], tuple[float, str]]
"""A row: its labels, and its moment and value as the server wrote it."""
_EXACT_MAX = 1 << 53
"""Whole numbers up to here are exact in a server's floats; none of gpumap's is larger."""
_IN_NUMBERS = "0123456789+-.eE"
"""Python also reads "1_0", "inf" and digits of other scripts as numbers."""
_TEXT_CHARACTERS = 40


class Limits(NamedTuple):
    """The least and the largest possible value, and whether values are whole."""

    least: int = 0
    most: int = _EXACT_MAX
    whole: bool = False


ANY = Limits()
"""Limits of a number that is not negative."""


class FamilyValues(NamedTuple):
    """Values by a family's own labels and those of the target; by the own labels only if the target is not known.

    `odd` are rows without a value.
    """

    values: dict[Labels, Value]
    odd: tuple[str, ...] = ()


# --- reading an answer ------------------------------------------------------------------------------------------------


def read(family: AskedFamily, rows: Sequence[Answer], selection: Selection) -> FamilyValues:
    """Read an answer. Of rows with equal labels, as two servers give them, the larger value counts."""
    keys = _keys(family, [labels for labels, _ in rows], selection)
    label = uuid_label(family)
    if label is None or "" not in {key[family.by.index(label)] for key in keys}:
        numbers = _all_numbers([text for _, (_, text) in rows], _limits(family))
        values = dict(zip(keys, numbers, strict=True)) if numbers is not None else {}
        if len(values) == len(keys):
            return FamilyValues(values)
    return _one_by_one(family, rows, keys)


def _one_by_one(family: AskedFamily, rows: Sequence[Answer], keys: Sequence[Labels]) -> FamilyValues:
    values: dict[Labels, Value] = {}
    odd: list[str] = []
    limits, label = _limits(family), uuid_label(family)
    for key, (labels, (_, text)) in zip(keys, rows, strict=True):
        value = number(text, limits)
        if value is None or (label and not labels.get(label)):
            odd.append(odd_row(family.name, labels, text))
        elif key not in values or values[key] < value:
            values[key] = value
    return FamilyValues(values, tuple(odd))


def odd_row(name: str, labels: Mapping[str, str], text: str) -> str:
    """Return a row without a value, in words."""
    named = ", ".join(f"{label}={value}" for label, value in sorted(labels.items()))
    return f"{name}{{{named}}} is {cut_off(text, _TEXT_CHARACTERS)}"


def uuid_label(family: AskedFamily) -> str | None:
    """Return the label with the uuid that each row must have."""
    labels = () if family.by in (DEVICELESS.by, FINDING_SINCE.by) else family.by
    return next((label for label in ("uuid", "gpu_uuid") if label in labels), None)


def _keys(family: AskedFamily, rows: Sequence[Mapping[str, str]], selection: Selection) -> list[Labels]:
    """Return the own labels of each row and those of its target."""
    if selection.mixed or not {*family.by}.isdisjoint(selection.key):
        return list(by_targets(family, rows, selection))
    names = (*family.by, *selection.key)
    moved = {f"exported_{name}" for name in family.by if name in selection.labels}
    if moved.isdisjoint(chain.from_iterable(rows)):
        return list(zip(*(_column(name, rows) for name in names), strict=True))
    own = [f"exported_{name}" if f"exported_{name}" in moved else name for name in family.by]
    instead = (*own, *selection.key)
    # If Prometheus has moved one of them, an own label that is not moved is one that was empty.
    names_of_rows = ((labels, names if moved.isdisjoint(labels) else instead) for labels in rows)
    return [tuple([labels.get(name, "") for name in of_row]) for labels, of_row in names_of_rows]


def _column(name: str, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a label of all rows. A server leaves out those that are empty."""
    try:
        return list(map(itemgetter(name), rows))
    except KeyError:
        return [labels.get(name, "") for labels in rows]


def _limits(family: AskedFamily) -> Limits:
    """Bytes and counts are whole, ratios go up to 1, and only a difference can be below 0."""
    whole = family.name.endswith(("_bytes", "_processes", "_slots", "_slots_allocatable", "_up"))
    least = -_EXACT_MAX if "owner" in family.by else 0
    return Limits(least, 1 if family.name.endswith("_ratio") else _EXACT_MAX, whole)


def _all_numbers(texts: Sequence[str], limits: Limits) -> Sequence[Value] | None:
    """Return the values of a whole answer; `None` if one of them is outside the limits."""
    if "".join(texts).strip(_IN_NUMBERS):
        return None
    try:
        values = list(map(float, texts))
    except ValueError:
        return None
    if not values or min(values) < limits.least or max(values) > limits.most:
        return None
    if not limits.whole:
        return values
    return list(map(int, values)) if all(map(float.is_integer, values)) else None


def number(text: str, limits: Limits = ANY) -> Value | None:
    """Return a value; `None` if it is outside the limits or no number."""
    numbers = _all_numbers([text], limits)
    return numbers[0] if numbers else None
