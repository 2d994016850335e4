"""What gpumap remembers about a node from one collection to the next, as one immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import structs

from gpumap.agent.join.accounting import Ledger
from gpumap.agent.join.allocation import Allocation
from gpumap.agent.join.attribution import Accused, Attribution, PendingOwner
from gpumap.agent.join.history import History
from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.needs_restart import HiddenMemory, LostDriverMemory
from gpumap.agent.join.pcie import PcieCount
from gpumap.agent.join.pods import PodTable
from gpumap.agent.join.served_list import ServedList
from gpumap.agent.join.stalled import StallMemory
from gpumap.agent.join.unexplained import UnexplainedUse
from gpumap.agent.join.usage import RecentProcesses
from gpumap.agent.join.xids import XidMemory
from gpumap.agent.judgement.judge import AssignedTwice
from gpumap.model import remedies
from gpumap.model.node import Finding, SourceHealth, Workload
from gpumap.model.observations import Complaint, Failed, Moment, Observations, Observed, PodIdentity
from gpumap.model.readings import Uuid
from gpumap.model.terms import PodName, PodUid, Source

# --- the record of each source ----------------------------------------------------------------------------------------


_REASONS = {
    Source.KUBELET: ("connection_refused", "deadline_exceeded", "permission_denied", "rate_limited", "socket_missing"),
    Source.NVML: ("deadline_exceeded", "driver_not_loaded", "hung", "library_not_found", "lost", "worker_crashed"),
    Source.PROCFS: ("unreadable",),
    Source.POD_IDENTITY: ("checkpoint_corrupt", "checkpoint_unreadable", "pod_logs_unreadable"),
}
"""Reasons that are counted from 0: increase() then shows their first error. Other reasons are added when they occur."""


def untried() -> tuple[SourceHealth, ...]:
    """Return the record of sources before their first attempt."""
    return tuple(SourceHealth(source.value, errors=dict.fromkeys(_REASONS[source], 0)) for source in Source)


def answers(observations: Observations) -> dict[str, Observed[object] | Failed]:
    """Return the answers and failures of one collection, by source."""
    by_source: dict[str, Observed[object] | Failed | None] = {
        Source.KUBELET: observations.kubelet,
        Source.NVML: observations.nvml,
        Source.PROCFS: observations.procfs,
        Source.POD_IDENTITY: observations.pod_identity,
    }
    return {source: answer for source, answer in by_source.items() if answer is not None}


def record_health(health: tuple[SourceHealth, ...], observations: Observations) -> tuple[SourceHealth, ...]:
    """Add the answers and failures of one collection. A source that this machine does not have has no record."""
    by_source = answers(observations)
    return tuple(_record(previous, by_source[previous.source]) for previous in health if previous.source in by_source)


def _record(previous: SourceHealth, answer: Observed[object] | Failed) -> SourceHealth:
    errors = dict(previous.errors)
    for complaint in answer.complaints:
        errors[complaint.reason] = errors.get(complaint.reason, 0) + 1
    last_complaint = answer.complaints[-1] if answer.complaints else Complaint("", "")
    return structs.replace(
        previous,
        up=isinstance(answer, Observed),
        reason=last_complaint.reason,
        detail=last_complaint.detail,
        remedy=remedies.SOURCES[Source(previous.source)].get(last_complaint.reason),
        last_success=answer.at.wall if isinstance(answer, Observed) else previous.last_success,
        attempts=previous.attempts + 1,
        seconds=previous.seconds + answer.seconds,
        errors=errors,
        failures=previous.failures + isinstance(answer, Failed),
        last_seconds=answer.seconds,
    )


@dataclass(frozen=True, slots=True)
class UnlistedGpuMemory:
    """What gpumap remembers of GPUs that are on PCI and that NVML does not list."""

    listed_ids: frozenset[str] = frozenset()
    """PCI device ids of the GPUs that NVML listed."""
    since: Mapping[str, Moment] = field(default_factory=dict)
    """By address: since when NVML does not list a function."""
    levels: tuple[Moment, ...] = ()
    """Since when at least one GPU is missing, at least two, and so on."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What `step` takes and returns. `Memory()` is the state at gpumap's start."""

    health: tuple[SourceHealth, ...] = field(default_factory=untried)
    answered: Mapping[str, float] = field(default_factory=dict)
    """When each source last answered, on the monotonic clock."""
    collections: Mapping[str, int] = field(default_factory=dict)
    finished: Moment | None = None
    """When the last collection was over."""
    served_list: ServedList = field(default_factory=ServedList)
    pod_uids: Mapping[PodName, PodUid] = field(default_factory=dict)
    pod_identity: Observed[PodIdentity] | None = None
    names: Mapping[PodUid, PodName] = field(default_factory=dict)
    """Last names of pods that have processes on a GPU."""
    first_seen: Mapping[PodUid, float] = field(default_factory=dict)
    """When gpumap first saw a process of each pod on a GPU, on the monotonic clock."""
    inventory: Inventory = field(default_factory=Inventory)
    offered: frozenset[tuple[Uuid, str]] = frozenset()
    """(device, resource) pairs that the kubelet has offered."""
    not_offered_since: Mapping[Uuid, Moment] = field(default_factory=dict)
    """Since when no container can be assigned each of these GPUs."""
    claimed: bool = False
    """gpumap has seen a DRA claim of GPUs."""
    pending_owners: Mapping[PendingOwner, Moment] = field(default_factory=dict)
    """Owners of the last snapshot that need confirmation, with the time of the first snapshot that had them."""
    accused: Mapping[PendingOwner, Accused] = field(default_factory=dict)
    """The same owners, also those that an outage hides."""
    workloads: tuple[Workload, ...] = ()
    """Work outside pods that has a name of its own, oldest first, at most `NAMES_MAX`."""
    history: History = field(default_factory=History)
    pcie: Mapping[Uuid, PcieCount] = field(default_factory=dict)
    recent_processes: Mapping[Uuid, RecentProcesses] = field(default_factory=dict)
    """The processes of each leaf at its last reading."""
    hidden: HiddenMemory = field(default_factory=HiddenMemory)
    missing_gpus: UnlistedGpuMemory = field(default_factory=UnlistedGpuMemory)
    lost_driver: LostDriverMemory = field(default_factory=LostDriverMemory)
    ledger: Ledger = field(default_factory=Ledger)
    """The counters of accounting."""
    xids: XidMemory = field(default_factory=XidMemory)
    stalls: Mapping[Uuid, StallMemory] = field(default_factory=dict)
    unexplained_uses: Mapping[Uuid, UnexplainedUse] = field(default_factory=dict)
    """Memory and load without a process."""
    assigned_twice: tuple[AssignedTwice, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Those of the last snapshot: they have the time since when they hold."""
    pod_table: PodTable | None = None
    allocation: Allocation | None = None
    attribution: Attribution | None = None
