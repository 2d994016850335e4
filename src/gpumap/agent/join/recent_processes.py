"""The processes of a leaf that ended recently: the driver's samples may still contain their time."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from gpumap.agent.join.attribution import LastProcess, LeafProcesses, User
from gpumap.model.readings import Uuid

SAMPLED_SECONDS = 90.0
"""Longer than any sample is kept: a driver has the last 72, of at most a second each (open-gpu-kernel-modules,
NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL; nvml.h, nvmlUtilization_t)."""


class EndedProcess(NamedTuple):
    """A process that ended. It used no SM time after `by` (monotonic clock)."""

    pid: int
    process: LastProcess
    by: float


class RecentProcesses(NamedTuple):
    """The processes of a leaf's last reading, by PID, and those that ended recently: samples may contain them."""

    last: Mapping[int, LastProcess]
    users: frozenset[User | None]
    """Of the last reading."""
    ended: tuple[EndedProcess, ...] = ()


def update_recent(
    before: Mapping[Uuid, RecentProcesses], by_leaf: Mapping[Uuid, LeafProcesses], known: Container[Uuid], at: float
) -> dict[Uuid, RecentProcesses]:
    """Find the processes that ended since the last collection. A leaf that does not answer keeps its processes."""
    recent = {leaf: one for leaf, one in before.items() if leaf in known}
    recent.update((leaf, _update_leaf(recent.get(leaf), processes, at)) for leaf, processes in by_leaf.items())
    return recent


def _update_leaf(before: RecentProcesses | None, processes: LeafProcesses, at: float) -> RecentProcesses:
    present = processes.last
    if before is None:
        return RecentProcesses(present, processes.users)
    if present is before.last and not before.ended:
        return before
    # NVML lists it and /proc does not have it: it may be one of the ended ones, and still compute.
    unseen = {process.pid for process in processes.listed} - present.keys()
    ended = [one._replace(by=at) if one.pid in unseen else one for one in before.ended]
    ended += [EndedProcess(pid, process, at) for pid, process in before.last.items()]
    return RecentProcesses(
        present,
        processes.users,
        tuple(one for one in ended if at - one.by < SAMPLED_SECONDS and not _is_present(one, present)),
    )


def _is_present(one: EndedProcess, present: Mapping[int, LastProcess]) -> bool:
    now = present.get(one.pid)
    return now is not None and now.start == one.process.start
