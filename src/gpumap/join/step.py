"""One collection reduced: what is remembered and what was just observed become a snapshot and a new memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from gpumap.join.allocation import Allocation, allocate
from gpumap.join.attribution import Attribution, attribute
from gpumap.join.devices import ever_offered, leaves, processes_by_leaf
from gpumap.join.evidence import Evidence, aged, settled
from gpumap.join.health import record
from gpumap.join.hidden import HIDDEN_AFTER_SECONDS, HiddenMemory, find_hidden, look_for_mig
from gpumap.join.inventory import Inventory, take
from gpumap.join.memory import Memory, UseMemory
from gpumap.join.offers import Offer
from gpumap.join.pods import PodTable, tabulate
from gpumap.join.restart import Listing, take_list
from gpumap.join.seen import Seen, look_again
from gpumap.join.told_health import told_health
from gpumap.join.usage import Grounds, LeafUse, certainly_idle, leaf_use, remember
from gpumap.model import ContainerName, Failed, Observations, Observed, PodIdentity, PodName, PodUid, ProcTable, Uuid
from gpumap.snapshot import (
    ContainerOnDevice,
    ContainerUse,
    HiddenDevice,
    Node,
    PodInfo,
    ProcessUse,
    Snapshot,
    SourceHealth,
)

NO_PROCESSES = ProcTable((), (), pid_visibility=False, visibility_reason="/proc was not read")


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user decided: who the node is, which resources are GPUs, how old data may be served."""

    node: Node
    is_gpu_resource: Callable[[str], bool]
    stale_after_seconds: float
    hidden_after_seconds: float = HIDDEN_AFTER_SECONDS
    """How long a MIG device must be hidden from us until that is said."""


@dataclass(frozen=True, slots=True)
class _Scene:
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


def step(memory: Memory, observations: Observations, rules: Rules) -> tuple[Memory, Snapshot]:
    """Reduce one collection."""
    scene = _set_scene(memory, observations, rules)
    containers, uses = _containers(scene)
    collections = dict(memory.collections)
    if observations.push:
        collections.setdefault("push", 0)  # a counter begins at 0, else the first of them is in no increase
    collections[observations.trigger] = collections.get(observations.trigger, 0) + 1
    offered = ever_offered(memory.offered, scene.allocation, scene.inventory)
    health = record(memory.health, observations)
    hidden_memory, hidden = _find_hidden(scene, rules)
    snapshot = Snapshot(
        at=observations.finished,
        node=rules.node,
        sources=health,
        capabilities=_capabilities(scene),
        collections=tuple(sorted(collections.items())),
        visibility_reason=scene.procs.visibility_reason,
        expires=_expiry(scene, rules.stale_after_seconds),
        driver=replace(observations.nvml.value, gpus=()) if isinstance(observations.nvml, Observed) else None,
        gpus=scene.inventory.gpus,
        nameless_gpus=scene.inventory.nameless,
        leaves=leaves(
            scene.inventory,
            scene.allocation,
            scene.attribution,
            offered,
            Grounds(
                visible=scene.procs.pid_visibility,
                list_served=scene.listing.current,
                pods_named=scene.listing.current and scene.identity is not None,
                may_accuse=_may_accuse(scene.listing, observations),
            ),
        ),
        containers=containers,
        processes=tuple(_processes(scene)),
        unmatched=scene.allocation.unmatched,
        pods=_pods(scene, containers),
        device_health=told_health(observations.pod_identity, rules.is_gpu_resource),
        hidden=hidden,
    )
    return _remember(scene, health, collections, offered, uses, hidden_memory), snapshot


def _set_scene(memory: Memory, observations: Observations, rules: Rules) -> _Scene:
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
        may_accuse=_may_accuse(listing, observations),
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
    return _Scene(
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


def _may_accuse(listing: Listing, observations: Observations) -> bool:
    return listing.read_now and isinstance(observations.pod_identity, Observed)


def _expiry(scene: _Scene, stale_after_seconds: float) -> float | None:
    """The moment when the first of what is served from an earlier collection has to go."""
    observations, answer = scene.observations, scene.listing.answer
    served = []
    if isinstance(observations.kubelet, Failed) and scene.listing.current and answer is not None:
        served.append(answer.at.monotonic)
    if isinstance(observations.pod_identity, Failed) and scene.identity is not None:
        served.append(scene.identity.at.monotonic)
    return min(served) + stale_after_seconds if served else None


def _table(listing: Listing, identity: PodIdentity | None, before: PodTable | None) -> PodTable:
    """Join names and UIDs anew, unless nothing of what they are joined from has changed."""
    if before and before.pods is listing.pods and before.is_of(identity):
        return before
    return tabulate(listing.pods, identity, before)


def _containers(
    scene: _Scene,
) -> tuple[tuple[ContainerOnDevice, ...], dict[tuple[ContainerName, Uuid], UseMemory]]:
    """Lay grants and uses side by side: one row per (container, device)."""
    at = scene.observations.finished
    found: dict[tuple[ContainerName, Uuid], ContainerUse] = {}
    kept = {key: before for key, before in scene.memory.uses.items() if before.kept_until > at.monotonic}
    for leaf, use in scene.leaf_uses.items() if scene.procs.pid_visibility else ():
        profile = scene.inventory.leaves[leaf].profile
        for name, measured in use.by_container(_idle(scene, leaf), scene.table.uid_of).items():
            uid = scene.uids.get(name.pod_name)
            found[name, leaf], kept[name, leaf] = remember(measured, kept.get((name, leaf)), uid, profile, at)
    rows = []
    for key in sorted({*found, *scene.allocation.grants}):
        grant = scene.allocation.grants.get(key)
        rows.append(
            ContainerOnDevice(
                name=key[0],
                uuid=key[1],
                slots=grant.slots if grant else (),
                allocated_gpus=grant.gpus if grant else None,
                allocated_memory_bytes=grant.memory_bytes if grant else None,
                use=found.get(key),
            )
        )
    return tuple(rows), kept


def _idle(scene: _Scene, leaf: Uuid) -> Iterator[ContainerName]:
    """The holders of a leaf, or of its partitioned GPU, whose zero is certain."""
    holders = scene.allocation.holders.get(leaf, ())
    parent = scene.inventory.gpu_of_leaf[leaf].uuid
    if parent != leaf:
        holders = (*holders, *scene.allocation.holders.get(parent, ()))
    return certainly_idle(holders, scene.attribution.by_leaf[leaf].attributed, scene.table.uid_of)


def _processes(scene: _Scene) -> Iterator[ProcessUse]:
    for leaf, use in sorted(scene.leaf_uses.items()):
        for item in use.on_leaf.attributed:
            process = item.process
            sample = use.times[process.pid] if item.start is not None else None
            yield ProcessUse(
                process.pid,
                leaf,
                process.types,
                item.comm,
                item.owner,
                item.name,
                item.pod_uid,
                process.used_memory_bytes,
                sample.sm_ratio if sample is not None else None,
            )


def _pods(scene: _Scene, containers: tuple[ContainerOnDevice, ...]) -> tuple[PodInfo, ...]:
    """Every pod that holds or uses a device, with its UID where one is known."""
    pods = {row.name.pod_name for row in containers}
    pods |= {row.name.pod_name for row in scene.allocation.unmatched}
    pods |= scene.attribution.measured_uids.keys()
    return tuple(PodInfo(name.namespace, name.pod, scene.uids.get(name, "")) for name in sorted(pods))


def _find_hidden(scene: _Scene, rules: Rules) -> tuple[HiddenMemory, tuple[HiddenDevice, ...]]:
    listing = scene.listing
    sight = None
    if listing.read_now:
        sight = look_for_mig(scene.inventory, listing.pods, listing.allocatable, rules.is_gpu_resource)
    return find_hidden(scene.memory.hidden, sight, scene.observations.finished, rules.hidden_after_seconds)


def _capabilities(scene: _Scene) -> tuple[tuple[str, bool], ...]:
    identity = scene.identity.value if scene.identity else None
    readings = [gpu.reading for gpu in scene.inventory.gpus if gpu.reading]
    return (
        ("device_checkpoint", identity is not None and identity.checkpoint is not None),
        ("gpm", False),
        ("pid_visibility", scene.procs.pid_visibility),
        ("pod_logs", identity is not None and identity.logs is not None),
        ("process_utilization", any(reading.samples is not None for reading in readings)),
        ("push", scene.observations.push),
        ("xid_events", False),
    )


def _remember(
    scene: _Scene,
    health: tuple[SourceHealth, ...],
    collections: Mapping[str, int],
    offered: frozenset[tuple[Uuid, str]],
    uses: Mapping[tuple[ContainerName, Uuid], UseMemory],
    hidden: HiddenMemory,
) -> Memory:
    identity = scene.observations.pod_identity
    uids = {**scene.memory.pod_uids, **scene.table.uid_of}
    awaited = [pod.pod_name for pod in scene.listing.awaited]
    return Memory(
        health=health,
        collections=collections,
        kubelet=scene.listing.answer,
        kubelet_back_at=scene.listing.back_at,
        kubelet_away=scene.listing.away,
        pods=scene.listing.pods,
        awaited=scene.listing.awaited,
        pod_uids={name: uids[name] for name in (*scene.table.listed, *awaited) if name in uids},
        pod_identity=identity if isinstance(identity, Observed) else scene.memory.pod_identity,
        names=scene.attribution.names if scene.inventory.up else scene.memory.names,
        gpus=scene.inventory.known,
        gpu_count=scene.inventory.count,
        offered=offered,
        suspicions=aged(
            scene.attribution.suspicions,
            scene.memory.suspicions,
            scene.attribution.evidence.settled,
            scene.observations.finished,
        ),
        uses=uses,
        seen=scene.seen,
        missing=scene.attribution.missing,
        hidden=hidden,
        indices=scene.allocation.indices,
        table=scene.table,
        allocation=scene.allocation,
        attribution=scene.attribution,
    )
