"""Since when a process has had the owner `unassigned` or `gone`, also after an outage of a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpumap.agent.join.attribution import Attribution, PendingOwner
from gpumap.model.observations import Moment
from gpumap.model.terms import Owner

_Process = tuple[int, int | None]
"""PID and start."""


@dataclass(frozen=True, slots=True)
class Accused:
    """Since when gpumap has found an owner, and the processes that have it."""

    since: Moment
    processes: frozenset[_Process]


def remember_accused(
    before: Mapping[PendingOwner, Accused], attribution: Attribution, moment: Moment, *, sees_processes: bool
) -> dict[PendingOwner, Accused]:
    """Return the owners of now with their times. After an outage, the time of the same process counts.

    `sees_processes`: NVML and /proc answered in this collection.
    """
    if not sees_processes:
        return dict(before)
    accused, evidence = {}, attribution.evidence
    for key in attribution.pending_owners:
        items = attribution.by_leaf[key.leaf].attributed
        processes = frozenset((item.process.pid, item.start) for item in items if item.pod_uid == key.pod_uid)
        known = before.get(key)
        is_same = known and (key in evidence.pending_before or known.processes & processes)
        accused[key] = Accused(known.since if known and is_same else moment, processes)
    known_leaves = evidence.inventory.leaves
    others = {key: known for key, known in before.items() if key not in accused and key.leaf in known_leaves}
    return accused | {key: known for key, known in others.items() if _may_remain(key, known, attribution)}


def _may_remain(key: PendingOwner, known: Accused, attribution: Attribution) -> bool:
    """Return whether one of the processes may still have its owner: its leaf or its /proc entry cannot be read, or
    nothing shows its owner."""
    leaf = attribution.by_leaf.get(key.leaf)
    if leaf is None:
        return True
    pids = {pid for pid, _ in known.processes}
    return any(
        item.process.pid in pids
        if item.start is None
        else item.owner is Owner.UNKNOWN and (item.process.pid, item.start) in known.processes
        for item in leaf.attributed
    )
