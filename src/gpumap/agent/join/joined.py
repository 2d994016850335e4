"""Puts one collection in order: what was observed, what is remembered, and what follows of both for all that comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpumap.agent.join.allocation import Allocation, allocate
from gpumap.agent.join.attribution import Attribution, attribute
from gpumap.agent.join.devices import processes_by_leaf
from gpumap.agent.join.evidence import Evidence, settled
from gpumap.agent.join.hidden import RESTART_AFTER_SECONDS
from gpumap.agent.join.inventory import Inventory, take
from gpumap.agent.join.memory import Memory
from gpumap.agent.join.offers import Offer
from gpumap.agent.join.pods import PodTable, tabulate
from gpumap.agent.join.recent_processes import Seen, look_again
from gpumap.agent.join.restart import Listing, take_list
from gpumap.agent.join.usage import LeafUse, leaf_use
from gpumap.model.observations import Failed, Observations, Observed, PodIdentity, PodName, PodUid, ProcTable
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Node

NO_PROCESSES = ProcTable((), (), pid_visibility=False, visibility_reason="/proc was not read")


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user decided: who the node is, which resources are GPUs, how old data may be served."""

    node: Node
    is_gpu_resource: Callable[[str], bool]
    stale_after_seconds: float
    restart_after_seconds: float = RESTART_AFTER_SECONDS
    """How long what only a new container helps must last until that is said."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One collection, put in order: what every part of the snapshot is computed from."""

    observations: Observations
    memory: Memory
    inventory: Inventory
    listing: Listing
    identity: Observed[PodIdentity] | None
    table: PodTable
    allocation: Allocation
    procs: ProcTable
    attribution: Attribution
    seen: Mapping[Uuid, Seen]
    leaf_uses: Mapping[Uuid, LeafUse]
    uids: Mapping[PodName, PodUid]
    """Of pods whose UID is fixed, or whose processes are measured."""


def join_sources(memory: Memory, observations: Observations, rules: Rules) -> Joined:
    """Ask each part of the reducer in turn; the later ones need the earlier."""
    nvml = observations.nvml.value if isinstance(observations.nvml, Observed) else None
    procs = observations.procfs.value if isinstance(observations.procfs, Observed) else NO_PROCESSES
    identity = _identity(memory, observations, rules.stale_after_seconds)
    found = identity.value if identity else None
    inventory = take(nvml, observations.finished.wall, memory.gpus, memory.gpu_count)
    listing = take_list(memory, observations, found, procs, rules.stale_after_seconds)
    table = _table(listing, found, memory.table)
    allocation = allocate(
        listing.pods if listing.current else (),
        table,
        (found.dra.prepared or ()) if found else (),
        Offer(listing.allocatable, table.checkpoint.registered if table.checkpoint else ()),
        inventory,
        rules.is_gpu_resource,
        memory.indices,
        memory.allocation,
    )
    evidence = Evidence(
        table=table,
        allocation=allocation,
        inventory=inventory,
        procs=procs,
        identity_current=identity is not None,
        identity_read_now=isinstance(observations.pod_identity, Observed),
        list_current=listing.current,
        can_report_unassigned=can_report_unassigned(listing, observations),
        last_names=memory.names,
        suspected=frozenset(memory.suspicions),
        settled=settled(memory.suspicions, observations),
        missing_before=memory.missing,
    )
    attribution = attribute(processes_by_leaf(inventory), evidence, memory.attribution)
    seen = look_again(memory.seen, attribution.by_leaf, inventory.leaves, observations.finished.monotonic)
    samples = {gpu.uuid: gpu.reading.samples for gpu in inventory.gpus if gpu.reading and not gpu.partitioned}
    leaf_uses = {
        leaf: leaf_use(on_leaf, samples.get(leaf), seen[leaf].ended) for leaf, on_leaf in attribution.by_leaf.items()
    }
    uids = {**attribution.measured_uids, **table.uid_of}
    return Joined(
        observations, memory, inventory, listing, identity, table, allocation, procs, attribution, seen, leaf_uses, uids
    )


def _identity(memory: Memory, observations: Observations, stale_after_seconds: float) -> Observed[PodIdentity] | None:
    """The newest identity reading that may still be served."""
    newest = observations.pod_identity
    if isinstance(newest, Failed):
        before = memory.pod_identity
        young = before and observations.finished.monotonic - before.at.monotonic < stale_after_seconds
        return before if young else None
    return newest


def can_report_unassigned(listing: Listing, observations: Observations) -> bool:
    return listing.read_now and isinstance(observations.pod_identity, Observed)


def _table(listing: Listing, identity: PodIdentity | None, before: PodTable | None) -> PodTable:
    """Join names and UIDs anew, unless nothing of what they are joined from has changed."""
    if before and before.pods is listing.pods and before.is_of(identity):
        return before
    return tabulate(listing.pods, identity, before)
