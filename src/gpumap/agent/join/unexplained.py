"""Memory and load on a leaf that no living process explains: evidence for the finding `unexplained`.

A collection that does not show it ends the time, and so does one in which it is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from functools import cache
from typing import NamedTuple

from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.settings import JoinSettings
from gpumap.model.node import Unexplained
from gpumap.model.observations import Moment, ProcTable
from gpumap.model.readings import DeviceMemory, GpuProcess, GpuReading, MigInstance, Uuid
from gpumap.model.terms import BUSY_WITHOUT_PROCESS, MEMORY_WITHOUT_PROCESS

UNEXPLAINED_BYTES = 512 << 20
BUSY_RATIO = 0.5
WAIT = 2.0
"""A condition must hold for so many times `--idle-after`."""
COHERENT_DRIVER = 580
"""On Grace, earlier drivers always make the GPU's memory a NUMA node. Some of them lack nvmlDeviceGetNumaNodeId."""
_GRACE = re.compile(r"\bG[HB][23]00\b")


class Span(NamedTuple):
    """Since when a condition has held, or has not."""

    is_true: bool | None
    """`None`: not known."""
    since: Moment
    has_begun: bool
    """gpumap saw it begin. Otherwise it may have held before gpumap watched."""


class UnexplainedUse(NamedTuple):
    """What gpumap remembers of a leaf. A reason that can never be judged there has no span."""

    moment: Moment
    spans: Mapping[str, Span]
    memory_bytes: int
    """Memory in use beyond what living processes explain."""
    pids: tuple[int, ...]
    """PIDs that NVML lists and /proc lacks."""

    def seconds(self, reason: str) -> float | None:
        """Return for how long a condition has held; `None` if it does not hold."""
        span = self.spans.get(reason)
        return self.moment.since(span.since) if span and span.is_true else None

    def has_lasted(self, reason: str, settings: JoinSettings) -> bool:
        seconds = self.seconds(reason)
        return seconds is not None and seconds >= WAIT * settings.idle_after_seconds

    def unexplained(self, settings: JoinSettings) -> Unexplained:
        """Return what the node shows of it."""
        reasons = [reason for reason in self.spans if self.has_lasted(reason, settings)]
        since = {reason: self.moment.wall - (self.seconds(reason) or 0.0) for reason in reasons}
        if MEMORY_WITHOUT_PROCESS in since:
            return Unexplained(since, self.memory_bytes, self.pids)
        return Unexplained(since, unjudged=None if since else self._why_unjudged())

    def _why_unjudged(self) -> str | None:
        spans = self.spans.values()
        if any(span.is_true is False or (span.is_true and span.has_begun) for span in spans):
            return None
        if not spans:
            return "not_supported"
        return "use_not_measured" if any(span.is_true is None for span in spans) else "just_started"


def watch_unexplained_use(
    previous: Mapping[Uuid, UnexplainedUse],
    inventory: Inventory,
    processes: Mapping[Uuid, tuple[GpuProcess, ...]],
    procs: ProcTable,
    driver_version: str,
    moment: Moment,
    settings: JoinSettings,
) -> dict[Uuid, UnexplainedUse]:
    """Return what to remember of each leaf of a GPU that answers. `processes` has the leaves with a list."""
    living = frozenset((*(entry.pid for entry in procs.entries), *procs.unreadable))
    watches = {}
    for gpu in inventory.gpus:
        reading = gpu.reading
        if reading is None:
            continue
        is_host = (reading.virtualization or "").startswith("host_")
        for leaf in reading.instances if gpu.partitioned else (reading,):
            uuid, siblings = gpu.uuid, [gpu.uuid]
            if isinstance(leaf, MigInstance):
                uuid = leaf.uuid
                siblings = [
                    sibling.uuid for sibling in reading.instances if sibling.gpu_instance_id == leaf.gpu_instance_id
                ]
            last_watch = previous.get(uuid)
            spans = last_watch.spans if last_watch and not settings.is_gap(last_watch.moment, moment) else {}
            listed = processes.get(uuid) if procs.pid_visibility else None
            pids = {process.pid for process in listed or ()}
            memory_bytes = _unexplained_bytes(leaf.memory, [processes.get(sibling) for sibling in siblings], living)
            conditions: dict[str, bool | None] = {}
            if procs.is_machine and not is_host and leaf.memory and leaf.memory.reserved_bytes is not None:
                if reading.numa_node is None and not _is_numa_model(reading.model, driver_version):
                    has_memory = None if memory_bytes is None else memory_bytes >= UNEXPLAINED_BYTES
                    conditions[MEMORY_WITHOUT_PROCESS] = has_memory if pids.isdisjoint(living) else False
                if isinstance(leaf, GpuReading) and leaf.utilization_ratio is not None and leaf.samples is not None:
                    is_used = bool(pids or leaf.samples or leaf.unsampled)
                    conditions[BUSY_WITHOUT_PROCESS] = leaf.utilization_ratio >= BUSY_RATIO and not is_used
            watches[uuid] = UnexplainedUse(
                moment,
                {
                    reason: _span(spans.get(reason), None if listed is None else is_true, moment)
                    for reason, is_true in conditions.items()
                },
                memory_bytes or 0,
                tuple(sorted(pids - living)),
            )
    return watches


def _span(previous: Span | None, is_true: bool | None, moment: Moment) -> Span:
    if previous is not None and previous.is_true is is_true:
        return previous
    return Span(is_true, moment, has_begun=previous is not None and previous.is_true is False)


@cache
def _is_numa_model(model: str, driver_version: str) -> bool:
    """Return whether the memory of this model is a NUMA node of the machine: then the page cache may use it."""
    major = driver_version.partition(".")[0]
    return _GRACE.search(model) is not None and not (major.isdigit() and int(major) >= COHERENT_DRIVER)


def _unexplained_bytes(
    memory: DeviceMemory | None, lists: Sequence[Sequence[GpuProcess] | None], living: Set[int]
) -> int | None:
    """Return the used memory that no living process in the lists of a leaf and its siblings explains, if it is
    known."""
    sizes = [process.used_memory_bytes for listed in lists for process in listed or () if process.pid in living]
    if memory is None or None in lists or None in sizes:
        return None
    return memory.used_bytes - sum(size for size in sizes if size is not None)
