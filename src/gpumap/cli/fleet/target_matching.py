"""Which target a row is of, and which of its labels are gpumap's own, where rows alone do not tell it. Pure.

With `honorLabels` a series' own `pod` stands in the place of its target's; without, it is `exported_pod`, but only
where the target has a `pod`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpumap.cli.fleet.families import FAMILIES, Family, Selection

Labels = tuple[str, ...]
OWN = frozenset(name for family in FAMILIES for name in family.by) - {"node"}
"""Labels of gpumap's own, which with `honorLabels` stand in the place of those of the target."""


def differ_in_own(targets: Iterable[Mapping[str, str]]) -> bool:
    """Whether some targets have a label that series of gpumap have too, and others have not."""
    found = {OWN.intersection(labels) for labels in targets}
    return len(found) > 1


def by_targets(family: Family, rows: Iterable[Mapping[str, str]], selection: Selection) -> Iterator[Labels | None]:
    """Own labels of each row, and those of its target; `None` where targets of several nodes may have it."""
    honoured = _index(selection, {*family.by})
    moved = _index(selection, frozenset())
    exported = [(name, f"exported_{name}") for name in family.by]
    has_target = family.of_target or selection.by_target
    for labels in rows:
        is_moved = any(name in labels for _, name in exported)
        target = (moved if is_moved else honoured).of(labels)
        if target is None:
            yield None
            continue
        known = selection.targets.get(target)
        taken = known.labels if is_moved and known else frozenset()
        own = [labels.get(other if name in taken else name, "") for name, other in exported]
        yield (*own, *target) if has_target else tuple(own)


class _Index(NamedTuple):
    """Targets by those of the key's labels that rows have of them."""

    names: tuple[str, ...]
    targets: Mapping[Labels, Labels | None]
    key: tuple[str, ...]

    def of(self, labels: Mapping[str, str]) -> Labels | None:
        part = tuple([labels.get(name, "") for name in self.names])
        # Of a target that is not known any more nothing is shown: its own labels are as good as any.
        return self.targets.get(part, tuple([labels.get(name, "") for name in self.key]))


def _index(selection: Selection, hidden: Iterable[str]) -> _Index:
    """By the labels that are not `hidden`. Several targets of one node that do not differ in these are the newest."""
    hidden = frozenset(hidden)
    places = [number for number, name in enumerate(selection.key) if name not in hidden]
    found: dict[Labels, Labels | None] = {}
    for key, target in selection.targets.items():
        part = tuple([key[place] for place in places])
        first = found.setdefault(part, key)
        if first is not None and selection.targets[first].node != target.node:
            found[part] = None
    return _Index(tuple(selection.key[place] for place in places), found, selection.key)
