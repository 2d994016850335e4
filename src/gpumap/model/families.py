"""What a family of metrics is: one table row with its name, help, labels and computation together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpumap.model.snapshot import Snapshot

Kind = Literal["gauge", "counter", "summary"]


class Series(NamedTuple):
    """One sample: its label values in the family's order. `suffix` is `_sum` or `_count` in a summary."""

    labels: tuple[str, ...]
    value: float
    suffix: str = ""


def whether(value: bool | None) -> int | None:
    """A sample's value: 1 where it is so, and 0 where it is known that it is not."""
    return None if value is None else int(value)


@dataclass(frozen=True, slots=True)
class Family:
    """`name` as it stands on the text page, a counter's with `_total`. `read` gives the samples in a fixed order."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Callable[[Snapshot], Iterable[Series]]
    optional_labels: frozenset[str] = frozenset()
    """Those that are left out of a line where they have no value. To PromQL that is the same."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """Families whose very names hang on the snapshot. `name` has `<n>` where they differ; the rest is all of theirs."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    families: Callable[[Snapshot], Iterable[Family]]
