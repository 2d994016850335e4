"""The rows of a server's answers as values by their labels, and those of one node out of several targets'. Pure.

A row that is no value of gpumap's, such as a negative number of bytes, is left out and named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from gpumap.cli.fleet import families
from gpumap.cli.fleet.families import Family, Selection
from gpumap.cli.fleet.targets import Key, Labels, Node, by_targets
from gpumap.model.text import cut_off

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
    """Values by a family's own labels, followed by those of the target if the family has them. `odd` are rows without
    a value."""

    values: dict[Labels, Value]
    odd: tuple[str, ...] = ()


NO_VALUES = FamilyValues({})


# --- reading an answer ------------------------------------------------------------------------------------------------


def read(family: Family, rows: Iterable[Answer], selection: Selection) -> FamilyValues:
    """Read an answer. Of rows with equal labels, as two agents of a node give them, the larger value counts."""
    rows, keys, odd = _with_keys(family, list(rows), selection)
    if not odd and not _lacks_uuid(family, keys):
        numbers = _all_numbers([text for _, (_, text) in rows], _limits(family))
        values = dict(zip(keys, numbers, strict=True)) if numbers is not None else {}
        if len(values) == len(keys):
            return FamilyValues(values)
    return _one_by_one(family, rows, keys, odd)


def _with_keys(
    family: Family, rows: list[Answer], selection: Selection
) -> tuple[list[Answer], list[Labels], list[str]]:
    """Return the rows, the labels that identify each, and sentences on rows whose target is not known."""
    if not _needs_targets(family, selection):
        return rows, _keys(family, [labels for labels, _ in rows], selection), []
    placed = list(zip(rows, by_targets(family, [labels for labels, _ in rows], selection), strict=True))
    odd = [_row(family.name, labels) + " is of an unknown target" for (labels, _), key in placed if key is None]
    return [row for row, key in placed if key is not None], [key for _, key in placed if key is not None], odd


def _one_by_one(family: Family, rows: list[Answer], keys: list[Labels], odd: list[str]) -> FamilyValues:
    values: dict[Labels, Value] = {}
    limits = _limits(family)
    for key, (labels, (_, text)) in zip(keys, rows, strict=True):
        value = number(text, limits)
        if value is None or ((label := _uuid_label(family)) and not labels.get(label)):
            odd.append(odd_row(family.name, labels, text))
        elif key not in values or values[key] < value:
            values[key] = value
    return FamilyValues(values, tuple(odd))


def odd_row(name: str, labels: Mapping[str, str], text: str) -> str:
    """Return a row without a value, in words."""
    return f"{_row(name, labels)} is {cut_off(text, _TEXT_CHARACTERS)}"


def _row(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{', '.join(f'{label}={value}' for label, value in sorted(labels.items()))}}}"


def _uuid_label(family: Family) -> str | None:
    """Return the label with the uuid that each row must have."""
    labels = () if family is families.DEVICELESS else family.by
    return next((label for label in ("uuid", "gpu_uuid") if label in labels), None)


def _lacks_uuid(family: Family, keys: Sequence[Labels]) -> bool:
    label = _uuid_label(family)
    return label is not None and "" in {key[family.by.index(label)] for key in keys}


def _needs_targets(family: Family, selection: Selection) -> bool:
    """Whether the labels of a row, or its target, can only be found among the known targets."""
    return selection.by_target or (family.of_target and not {*family.by}.isdisjoint(selection.key))


def _keys(family: Family, rows: Sequence[Mapping[str, str]], selection: Selection) -> list[Labels]:
    """Return the labels that identify each row."""
    names = (*family.by, *(selection.key if family.of_target else ()))
    moved = {f"exported_{name}" for name in family.by if name in selection.labels}
    if moved.isdisjoint(chain.from_iterable(rows)):
        return list(zip(*(_column(name, rows) for name in names), strict=True))
    own = [f"exported_{name}" if f"exported_{name}" in moved else name for name in family.by]
    instead = (*own, *names[len(own) :])
    # If Prometheus has moved one of them, an own label that is not moved is one that was empty.
    names_of_rows = ((labels, names if moved.isdisjoint(labels) else instead) for labels in rows)
    return [tuple([labels.get(name, "") for name in of_row]) for labels, of_row in names_of_rows]


def _column(name: str, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a label of all rows. A server leaves out those that are empty."""
    try:
        return list(map(itemgetter(name), rows))
    except KeyError:
        return [labels.get(name, "") for labels in rows]


def _limits(family: Family) -> Limits:
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


# --- several targets of one node --------------------------------------------------------------------------------------
#
# For each device, the newest target that knows it counts. The values of two agents must not be mixed: what one assigns
# to a pod is unknown to the other, and both together are more than exists.

RowsOfTarget = Mapping[str, Sequence[tuple[Labels, Value]]]
"""By family."""
_HELD, _USED, _PRESENT = "held", "used", "present"
_KIND_OF_PART = {
    **dict.fromkeys((families.HOLDERS, families.SHARES, families.GRANTS, families.OFFERS), _HELD),
    **dict.fromkeys((families.USE, families.PEAKS, families.ACTIVITY, families.LAST_SEEN), _USED),
    **dict.fromkeys((families.OWNERS, families.WORK), _USED),
}
_SERIES_OF_KIND = (
    *((families.DEVICE_INFO, _PRESENT), (families.HOLDER_COUNT, _HELD)),
    *((families.OWNER_BYTES, _USED), (families.OWNER_PROCESSES, _USED)),
)
"""The series that exist for a device if a target knows anything of the kind about it."""


def rows_by_target(
    values: Mapping[str, FamilyValues], asked: Iterable[Family]
) -> dict[Key, dict[str, list[tuple[Labels, Value]]]]:
    """Group by target what was asked for by target."""
    rows: dict[Key, dict[str, list[tuple[Labels, Value]]]] = {}
    for family in asked:
        width = len(family.by)
        for row, value in values[family.name].values.items():
            rows.setdefault(row[width:], {}).setdefault(family.name, []).append((row[:width], value))
    return rows


def values_of_node(node: Node, rows: Mapping[Key, RowsOfTarget], asked: Sequence[Family]) -> dict[str, FamilyValues]:
    """Return the values of a node as if it had one target."""
    leaders: dict[tuple[str, str], Key] = {}
    for family, kind in _SERIES_OF_KIND:
        for key in node.keys:
            for labels, _ in rows.get(key, {}).get(family.name, ()):
                leaders.setdefault((kind, labels[0]), key)
                if family is families.DEVICE_INFO:
                    leaders.setdefault((kind, labels[1]), key)
    return {family.name: FamilyValues(_of_leaders(family, node, rows, leaders)) for family in asked}


def _of_leaders(
    family: Family, node: Node, rows: Mapping[Key, RowsOfTarget], leaders: dict[tuple[str, str], Key]
) -> dict[Labels, Value]:
    kind = _KIND_OF_PART.get(family.part, _PRESENT)
    place = family.by.index(label) if (label := _uuid_label(family)) else None
    values: dict[Labels, Value] = {}
    for key in node.keys:
        for labels, value in rows.get(key, {}).get(family.name, ()):
            if place is None or leaders.setdefault((kind, labels[place]), key) == key:
                values[(*labels, *key) if family.of_target else labels] = value
    return values
