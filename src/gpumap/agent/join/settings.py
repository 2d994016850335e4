"""Decisions that hold for every part of the join: those of the user, and how long gpumap waits and remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from gpumap.model.observations import Moment, Observed

_Answer = TypeVar("_Answer")
_Key = TypeVar("_Key")

KEPT_SECONDS = 300.0
"""How long gpumap keeps the peak, accounts and XIDs of a container after it was last present (accounting.md)."""
UNSEEN_SECONDS = 3600.0
"""How long gpumap keeps its counters while an outage of the kubelet or of NVML hides whether it is gone."""
GPUS_AWAY_MAX = 64
"""How many GPUs gpumap remembers that are no longer on the node. They may come back."""
RESTART_AFTER_SECONDS = 30.0
"""How long a fault that only a new container solves must last before gpumap reports it."""
LATE_SECONDS = 5.0
"""How late a reading may arrive (collect.DEADLINE_SECONDS_MAX). If --interval is as long as --stale-after, each reading
would be too late without it."""
CLOCKS_APART_SECONDS = 1.0
"""Two clocks are read a moment apart. A larger difference is a suspended machine, or a clock that was set."""


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """Decisions of the user: the node's name and address, which resources are GPUs, for how long gpumap serves old
    data, and the namespaces of reservations and of trusted pods."""

    node_name: str
    internal_ip: str
    is_gpu_resource: Callable[[str], bool]
    stale_after_seconds: float
    is_reserving: Callable[[str], bool]
    is_trusted: Callable[[str], bool]
    idle_after_seconds: float
    grace_seconds: float
    """How long gpumap watches a holder before it is idle, and before it is unused."""
    restart_after_seconds: float = RESTART_AFTER_SECONDS
    why_not_on_pci: str = ""
    """Why GPUs on PCI that NVML does not list show nothing here; empty if they do."""

    def if_young(self, answer: Observed[_Answer] | None, moment: Moment) -> Observed[_Answer] | None:
        """Return an answer that is young enough to serve."""
        return answer if answer and moment.monotonic - answer.at.monotonic < self.stale_after_seconds else None

    def is_gap(self, previous: Moment, moment: Moment) -> bool:
        """Whether two collections are so far apart that gpumap did not watch the time between them."""
        return moment.since(previous) > self.stale_after_seconds + LATE_SECONDS


def remember_since(
    since: Mapping[_Key, Moment], keys: Iterable[_Key], moment: Moment, *, is_gap: bool = False
) -> dict[_Key, Moment]:
    """Return since when each key holds without a break. A gap between two collections is a break."""
    return {key: moment if is_gap else since.get(key, moment) for key in keys}
