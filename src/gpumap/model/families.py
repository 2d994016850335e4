"""A family of metrics: one table row with its name, help text, labels and computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from gpumap.model.snapshot import Snapshot

Kind = Literal["gauge", "counter", "summary"]


class Series(msgspec.Struct, frozen=True, gc=False):
    """One sample: its label values in the family's order. `suffix` is `_sum` or `_count` in a summary."""

    labels: tuple[str, ...]
    value: float
    suffix: str = ""


def whether(value: bool | None) -> int | None:
    """Return a sample's value: 1 if true, 0 if false, none if unknown."""
    return None if value is None else int(value)


@dataclass(frozen=True, slots=True)
class Family:
    """`name` is as on the text page; a counter's ends in `_total`. `read` returns the samples in a fixed order."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Callable[[Snapshot], Iterable[Series]]
    optional_labels: frozenset[str] = frozenset()
    """Labels that a line does not have if they are empty. PromQL treats both alike."""


@dataclass(frozen=True, slots=True)
class NumberedFamilies:
    """Families with names that depend on the snapshot. `name` has `<n>` for the part that differs."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    families: Callable[[Snapshot], Iterable[Family]]
