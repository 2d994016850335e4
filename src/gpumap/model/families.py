"""A family of metrics: one table row with its name, help text, labels and computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

from gpumap.model.snapshot import Snapshot

Kind = Literal["gauge", "counter", "summary"]
_Row = TypeVar("_Row")


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
class Rows(Generic[_Row]):
    """The rows of a snapshot that several families read, each with its label values. `None` instead of a value: the
    family has no sample of this row."""

    labels: tuple[str, ...]
    read: Callable[[Snapshot], Iterable[tuple[tuple[str, ...], _Row]]]

    def gauge(self, name: str, help: str, value: Callable[[_Row], float | None]) -> Family:
        return self._family(name, "gauge", help, value)

    def counter(self, name: str, help: str, value: Callable[[_Row], float | None]) -> Family:
        return self._family(name, "counter", help, value)

    def _family(self, name: str, kind: Kind, help: str, value: Callable[[_Row], float | None]) -> Family:
        def read(snapshot: Snapshot) -> Iterator[Series]:
            for labels, row in self.read(snapshot):
                if (number := value(row)) is not None:
                    yield Series(labels, number)

        return Family(name, kind, help, self.labels, read)

    def by(
        self, label: str, name: str, help: str, values: Callable[[_Row], Mapping[str, float]], kind: Kind = "gauge"
    ) -> Family:
        """Return a family with a value for each word of one more label."""

        def read(snapshot: Snapshot) -> Iterator[Series]:
            for labels, row in self.read(snapshot):
                for word, value in values(row).items():
                    yield Series((*labels, word), value)

        return Family(name, kind, help, (*self.labels, label), read)

    def info(
        self, more_labels: tuple[str, ...], name: str, help: str, value: Callable[[_Row], tuple[str, ...] | None]
    ) -> Family:
        """Return a family with the value 1 and more labels; a row without them has no sample."""

        def read(snapshot: Snapshot) -> Iterator[Series]:
            for labels, row in self.read(snapshot):
                if (labels_found := value(row)) is not None:
                    yield Series((*labels, *labels_found), 1)

        return Family(name, "gauge", help, (*self.labels, *more_labels), read)


@dataclass(frozen=True, slots=True)
class NumberedFamilies:
    """Families with names that depend on the snapshot. `name` has `<n>` for the part that differs."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    families: Callable[[Snapshot], Iterable[Family]]
