"""Groups values by a key, and adds up values of which some may be unknown. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in the order of the pairs."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def all_known(values: Iterable[V | None]) -> list[V] | None:
    """Return the values, or `None` if one of them is unknown: then their sum is unknown too."""
    known: list[V] = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return known


def sum_all(values: Iterable[int | None]) -> int | None:
    """Return the sum; `None` if a value is unknown."""
    known = all_known(values)
    return None if known is None else sum(known)
