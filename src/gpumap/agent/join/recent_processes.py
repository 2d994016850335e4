"""Which processes a leaf has lately had: the driver's samples may still hold the time of those that have ended."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from gpumap.agent.join.attribution import LastProcess, OnLeaf
from gpumap.model.readings import Uuid

SAMPLED_SECONDS = 90.0
"""Longer than any sample is kept: a driver has the last 72, of at most a second each (open-gpu-kernel-modules,
NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL; nvml.h, nvmlUtilization_t)."""


class EndedProcess(NamedTuple):
    """A process that is no longer seen: since `by` (monotonic) at the latest it has computed no more."""

    pid: int
    process: LastProcess
    by: float


class Seen(NamedTuple):
    """The processes of a leaf's last snapshot, by PID, and those that ended so lately that samples may be theirs."""

    last: Mapping[int, LastProcess]
    ended: tuple[EndedProcess, ...] = ()


def look_again(
    before: Mapping[Uuid, Seen], by_leaf: Mapping[Uuid, OnLeaf], known: Container[Uuid], at: float
) -> dict[Uuid, Seen]:
    """Note who has ended since. Of a known leaf that does not answer what was seen stays."""
    seen = {leaf: one for leaf, one in before.items() if leaf in known}
    seen.update((leaf, _look_at(seen.get(leaf), on_leaf, at)) for leaf, on_leaf in by_leaf.items())
    return seen


def _look_at(before: Seen | None, on_leaf: OnLeaf, at: float) -> Seen:
    here = on_leaf.last
    if before is None:
        return Seen(here)
    if here is before.last and not before.ended:
        return before
    # Listed, and not seen in /proc: it may be one of those that are missing, and compute on.
    unseen = {process.pid for process in on_leaf.told} - here.keys()
    ended = [one._replace(by=at) if one.pid in unseen else one for one in before.ended]
    ended += [EndedProcess(pid, process, at) for pid, process in before.last.items()]
    return Seen(here, tuple(one for one in ended if at - one.by < SAMPLED_SECONDS and not _is_here(one, here)))


def _is_here(one: EndedProcess, here: Mapping[int, LastProcess]) -> bool:
    now = here.get(one.pid)
    return now is not None and now.start == one.process.start
