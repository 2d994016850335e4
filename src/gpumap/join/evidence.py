"""What owners of processes are judged by: one value, so that it can be told whether all of it is the same again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.join.allocation import Allocation
from gpumap.join.inventory import Inventory
from gpumap.join.pods import PodTable
from gpumap.model import PodName, PodUid, ProcTable, Uuid
from gpumap.snapshot import Owner


class Suspicion(NamedTuple):
    """A verdict of one snapshot (`unassigned`, `gone`), said aloud when the next one agrees."""

    pod_uid: PodUid
    container_id: str
    leaf: Uuid
    verdict: Owner


@dataclass(frozen=True, slots=True)
class Evidence:
    """What owners are judged by. `current`: it may be served, though it may be of an earlier collection.

    `may_accuse`: List and identity are both of this collection. A pod that has just come has neither in older ones.
    """

    table: PodTable
    allocation: Allocation
    inventory: Inventory
    procs: ProcTable
    identity_current: bool
    identity_read_now: bool
    list_current: bool
    may_accuse: bool
    last_names: Mapping[PodUid, PodName]
    suspected: frozenset[Suspicion]
    missing_before: frozenset[tuple[Uuid, int]]
    """(leaf, PID) pairs that /proc did not have in the last collection either."""

    def same_as(self, other: Evidence) -> bool:
        """Whether it leads to the same verdicts. Table and allocation stay the same objects while nothing changes."""
        if self.table is not other.table or self.allocation is not other.allocation:  # which has devices in its basis
            return False
        return self._rest == other._rest

    @property
    def _rest(self) -> tuple[object, ...]:
        return (
            self.procs.entries,
            self.procs.unreadable,
            self.identity_current,
            self.identity_read_now,
            self.list_current,
            self.may_accuse,
            self.last_names,
            self.suspected,
            self.missing_before,
        )
