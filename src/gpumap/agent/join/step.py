"""One collection reduced: what is remembered and what was just observed become a snapshot and a new memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gpumap.agent.join.accounting import Sight, account
from gpumap.agent.join.device_health import told_health
from gpumap.agent.join.devices import ever_offered, leaves
from gpumap.agent.join.evidence import aged
from gpumap.agent.join.health import record
from gpumap.agent.join.hidden import HiddenMemory, find_hidden, look_for_mig
from gpumap.agent.join.joined import Joined, Rules, can_report_unassigned, join_sources
from gpumap.agent.join.ledger import Key, Ledger, container_accounts, gpu_accounts
from gpumap.agent.join.lost_driver import find_lost_driver
from gpumap.agent.join.memory import Memory, UseMemory
from gpumap.agent.join.usage import OwnerInputs, certainly_idle, remember
from gpumap.agent.join.xids import count_xids
from gpumap.model.observations import ContainerName, Failed, Observations, Observed
from gpumap.model.readings import GpuReading, Uuid
from gpumap.model.snapshot import ContainerOnDevice, ContainerUse, HiddenDevice, PodInfo, ProcessUse, Snapshot


def step(memory: Memory, observations: Observations, rules: Rules) -> tuple[Memory, Snapshot]:
    """Reduce one collection."""
    scene = join_sources(memory, observations, rules)
    containers, uses, sm = _containers(scene)
    ledger = _account(scene, containers, sm, rules)
    xid_memory, xids, container_xids = count_xids(
        memory.xids,
        observations.nvml,
        scene.inventory,
        containers,
        list_current=scene.listing.current,
        finished=observations.finished.monotonic,
    )
    collections = _count_collection(memory.collections, observations)
    offered = ever_offered(memory.offered, scene.allocation, scene.inventory)
    health = record(memory.health, observations)
    hidden_memory, hidden = _find_hidden(scene, rules)
    lost_memory, lost_driver = find_lost_driver(
        memory.lost_driver, observations.nvml, observations.finished, rules.restart_after_seconds
    )
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
            OwnerInputs(
                visible=scene.procs.pid_visibility,
                list_served=scene.listing.current,
                pods_named=scene.listing.current and scene.identity is not None,
                can_report_unassigned=can_report_unassigned(scene.listing, observations),
            ),
        ),
        containers=containers,
        processes=tuple(_processes(scene)),
        unmatched=scene.allocation.unmatched,
        pods=_pods(scene, containers),
        device_health=told_health(observations.pod_identity, rules.is_gpu_resource),
        hidden=hidden,
        lost_driver=lost_driver,
        accounts=tuple(container_accounts(ledger)),
        gpu_accounts=tuple(gpu_accounts(ledger)),
        xids=xids,
        container_xids=container_xids,
    )
    remembered = replace(
        _remember(scene),
        health=health,
        collections=collections,
        offered=offered,
        uses=uses,
        hidden=hidden_memory,
        lost_driver=lost_memory,
        ledger=ledger,
        xids=xid_memory,
    )
    return remembered, snapshot


def _count_collection(before: Mapping[str, int], observations: Observations) -> dict[str, int]:
    """Collections by what started them."""
    counts = dict(before)
    if observations.push:
        counts.setdefault("push", 0)  # a counter begins at 0, else the first of them is in no increase
    counts[observations.trigger] = counts.get(observations.trigger, 0) + 1
    return counts


def _expiry(scene: Joined, stale_after_seconds: float) -> float | None:
    """The moment when the first of what is served from an earlier collection has to go."""
    observations, answer = scene.observations, scene.listing.answer
    served = []
    if isinstance(observations.kubelet, Failed) and scene.listing.current and answer is not None:
        served.append(answer.at.monotonic)
    if isinstance(observations.pod_identity, Failed) and scene.identity is not None:
        served.append(scene.identity.at.monotonic)
    return min(served) + stale_after_seconds if served else None


def _containers(
    scene: Joined,
) -> tuple[tuple[ContainerOnDevice, ...], dict[Key, UseMemory], dict[Key, float]]:
    """Lay grants and uses side by side: one row per (container, device). With SM time as accounting needs it."""
    at = scene.observations.finished
    sm: dict[Key, float] = {}
    found: dict[Key, ContainerUse] = {}
    kept = {key: before for key, before in scene.memory.uses.items() if before.kept_until > at.monotonic}
    for leaf, use in scene.leaf_uses.items() if scene.procs.pid_visibility else ():
        profile = scene.inventory.leaves[leaf].profile
        for name, measured in use.by_container(_idle(scene, leaf), scene.table.uid_of).items():
            uid = scene.uids.get(name.pod_name)
            found[name, leaf], kept[name, leaf] = remember(measured, kept.get((name, leaf)), uid, profile, at)
            if measured.times is not None:
                sm[name, leaf] = measured.times.sm_sum
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
    return tuple(rows), kept, sm


def _account(scene: Joined, containers: tuple[ContainerOnDevice, ...], sm: Mapping[Key, float], rules: Rules) -> Ledger:
    sight = Sight(scene.observations.nvml.at, scene.inventory, containers, sm, scene.listing.current)
    return account(scene.memory.ledger, sight, rules.stale_after_seconds)


def _idle(scene: Joined, leaf: Uuid) -> Iterator[ContainerName]:
    """The holders of a leaf, or of its partitioned GPU, whose zero is certain."""
    holders = scene.allocation.holders.get(leaf, ())
    parent = scene.inventory.gpu_of_leaf[leaf].uuid
    if parent != leaf:
        holders = (*holders, *scene.allocation.holders.get(parent, ()))
    return certainly_idle(holders, scene.attribution.by_leaf[leaf].attributed, scene.table.uid_of)


def _processes(scene: Joined) -> Iterator[ProcessUse]:
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
                sample.memory_controller_ratio if sample is not None else None,
                sample.encoder_ratio if sample is not None else None,
                sample.decoder_ratio if sample is not None else None,
            )


def _pods(scene: Joined, containers: tuple[ContainerOnDevice, ...]) -> tuple[PodInfo, ...]:
    """Every pod that holds or uses a device, with its UID where one is known."""
    pods = {row.name.pod_name for row in containers}
    pods |= {row.name.pod_name for row in scene.allocation.unmatched}
    pods |= scene.attribution.measured_uids.keys()
    return tuple(PodInfo(name.namespace, name.pod, scene.uids.get(name, "")) for name in sorted(pods))


def _find_hidden(scene: Joined, rules: Rules) -> tuple[HiddenMemory, tuple[HiddenDevice, ...]]:
    listing = scene.listing
    sight = None
    if listing.read_now:
        sight = look_for_mig(scene.inventory, listing.pods, listing.allocatable, rules.is_gpu_resource)
    return find_hidden(scene.memory.hidden, sight, scene.observations.finished, rules.restart_after_seconds)


def _tells_activity(reading: GpuReading) -> bool:
    return reading.activity is not None or any(mig.activity is not None for mig in reading.instances)


def _capabilities(scene: Joined) -> tuple[tuple[str, bool], ...]:
    identity = scene.identity.value if scene.identity else None
    readings = [gpu.reading for gpu in scene.inventory.gpus if gpu.reading]
    nvml = scene.observations.nvml
    return (
        ("device_checkpoint", identity is not None and identity.checkpoint is not None),
        ("gpm", any(map(_tells_activity, readings))),
        ("pid_visibility", scene.procs.pid_visibility),
        ("pod_logs", identity is not None and identity.logs is not None),
        ("process_utilization", any(reading.samples is not None for reading in readings)),
        ("push", scene.observations.push),
        ("xid_events", isinstance(nvml, Observed) and any(one.since_seconds for one in nvml.value.listening)),
    )


def _remember(scene: Joined) -> Memory:
    """What the next collection takes from this one's scene."""
    identity = scene.observations.pod_identity
    uids = {**scene.memory.pod_uids, **scene.table.uid_of}
    awaited = [pod.pod_name for pod in scene.listing.awaited]
    return Memory(
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
        suspicions=aged(
            scene.attribution.suspicions,
            scene.memory.suspicions,
            scene.attribution.evidence.settled,
            scene.observations.finished,
        ),
        seen=scene.seen,
        missing=scene.attribution.missing,
        indices=scene.allocation.indices,
        table=scene.table,
        allocation=scene.allocation,
        attribution=scene.attribution,
    )
