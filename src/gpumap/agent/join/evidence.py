"""What owners of processes are judged by: one value, so that it can be told whether all of it is the same again."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.agent.join.allocation import Allocation
from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.pods import PodTable
from gpumap.model.observations import Moment, Observations, PodName, PodUid, ProcTable
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Owner

SETTLED_SECONDS = 0.4
"""How long a suspicion must stand where no interval has passed: when the kubelet has news, two snapshots may be a
quarter of a second apart, and what a process that ends leaves behind in the driver is no leftover."""


class PendingOwner(NamedTuple):
    """A verdict of one snapshot (`unassigned`, `gone`), said aloud when the next ones agree."""

    pod_uid: PodUid
    container_id: str
    leaf: Uuid
    verdict: Owner


@dataclass(frozen=True, slots=True)
class Evidence:
    """What owners are judged by. `current`: it may be served, though it may be of an earlier collection.

    `can_report_unassigned`: List and identity are both of this collection. A pod that has just come has neither in older ones.
    """

    table: PodTable
    allocation: Allocation
    inventory: Inventory
    procs: ProcTable
    identity_current: bool
    identity_read_now: bool
    list_current: bool
    can_report_unassigned: bool
    last_names: Mapping[PodUid, PodName]
    suspected: frozenset[PendingOwner]
    """In the last snapshot."""
    settled: frozenset[PendingOwner]
    """Those of them that have stood for a while, to be said aloud."""
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
            self.can_report_unassigned,
            self.last_names,
            self.suspected,
            self.settled,
            self.missing_before,
        )


def settled(suspicions: Mapping[PendingOwner, float], observations: Observations) -> frozenset[PendingOwner]:
    """Those that may be said aloud; each has the monotonic time since when it stands. An interval is long enough."""
    now = observations.finished.monotonic
    hurried = observations.trigger == "push"
    return frozenset(one for one, since in suspicions.items() if not hurried or now - since >= SETTLED_SECONDS)


def aged(
    found: Iterable[PendingOwner], before: Mapping[PendingOwner, float], said: Container[PendingOwner], now: Moment
) -> dict[PendingOwner, float]:
    """Those just found, with the time since when they stand: what was said aloud has always stood."""
    return {one: -math.inf if one in said else before.get(one, now.monotonic) for one in found}
