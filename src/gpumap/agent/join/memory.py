"""All that gpumap remembers about a node from one collection to the next, as one immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumap.agent.join.allocation import Allocation, Told
from gpumap.agent.join.attribution import Attribution
from gpumap.agent.join.evidence import PendingOwner
from gpumap.agent.join.health import untried
from gpumap.agent.join.hidden import HiddenMemory
from gpumap.agent.join.inventory import KnownGpu
from gpumap.agent.join.ledger import Key, Ledger
from gpumap.agent.join.lost_driver import LostDriverMemory
from gpumap.agent.join.pods import PodTable
from gpumap.agent.join.recent_processes import Seen
from gpumap.agent.join.xids import XidMemory
from gpumap.model.observations import KubeletAnswer, ListedPod, Observed, PodIdentity, PodName, PodUid
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import SourceHealth


class UseMemory(NamedTuple):
    """Of a container on a leaf: the most memory, and when it was last active (until then: first seen, Unix seconds)."""

    pod_uid: PodUid | None
    profile: str
    """Of a MIG device, as far as it is known: its uuid is made of its GPU and its ids, and may come again."""
    peak_bytes: int | None
    last_active: float
    kept_until: float
    """Monotonic: forgotten then, if not seen again."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What `step` takes and returns. A fresh one is gpumap's own start."""

    health: tuple[SourceHealth, ...] = field(default_factory=untried)
    collections: Mapping[str, int] = field(default_factory=dict)
    kubelet: Observed[KubeletAnswer] | None = None
    kubelet_back_at: float | None = None
    """Monotonic time of the first List after a restart that gpumap saw."""
    kubelet_away: bool = False
    """Its last attempts found nobody at the socket."""
    pods: tuple[ListedPod, ...] = ()
    """The last List, with the pods that the grace after a restart keeps."""
    awaited: tuple[ListedPod, ...] = ()
    """Pods from before the kubelet's restart that it has not listed since, while its grace lasts."""
    pod_uids: Mapping[PodName, PodUid] = field(default_factory=dict)
    pod_identity: Observed[PodIdentity] | None = None
    names: Mapping[PodUid, PodName] = field(default_factory=dict)
    """Last names of pods, as long as processes of theirs are on a GPU."""
    gpus: tuple[KnownGpu, ...] = ()
    gpu_count: int = 0
    offered: frozenset[tuple[Uuid, str]] = frozenset()
    """(leaf, resource) pairs that the kubelet has offered: one that is missing later is unhealthy."""
    suspicions: Mapping[PendingOwner, float] = field(default_factory=dict)
    """Of the last snapshot, with the monotonic time since when they have stood."""
    uses: Mapping[Key, UseMemory] = field(default_factory=dict)
    seen: Mapping[Uuid, Seen] = field(default_factory=dict)
    """The processes of each leaf, when it was last read."""
    missing: frozenset[tuple[Uuid, int]] = frozenset()
    """(leaf, PID) pairs that NVML listed and /proc did not have."""
    indices: Mapping[Told, Mapping[int, Uuid]] = field(default_factory=dict)
    """What NVML's indices in plugins' answers meant when they were first seen."""
    hidden: HiddenMemory = field(default_factory=HiddenMemory)
    lost_driver: LostDriverMemory = field(default_factory=LostDriverMemory)
    ledger: Ledger = field(default_factory=Ledger)
    """What has been charged so far."""
    xids: XidMemory = field(default_factory=XidMemory)
    table: PodTable | None = None
    allocation: Allocation | None = None
    attribution: Attribution | None = None
