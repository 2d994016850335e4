"""Reduce one collection: the memory and the new observations become a snapshot and the next memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs

from gpumap.agent.join import node_parts
from gpumap.agent.join.accounting import Measurements, account, container_accounts, gpu_accounts
from gpumap.agent.join.allocation import watch_shared_ids
from gpumap.agent.join.attribution import remember_accused
from gpumap.agent.join.collection import Joined, join_sources
from gpumap.agent.join.history import clock_step_seconds
from gpumap.agent.join.memory import Memory, answers, record_health
from gpumap.agent.join.needs_restart import HiddenMemory, find_hidden, find_lost_driver, visible_mig_devices
from gpumap.agent.join.pcie import count_pcie
from gpumap.agent.join.settings import JoinSettings, remember_since
from gpumap.agent.join.stalled import watch_for_stalls
from gpumap.agent.join.unavailable import (
    UnofferedGpus,
    find_unlisted_gpus,
    find_unoffered_gpus,
    has_seen_claim,
    watch_offers,
)
from gpumap.agent.join.xids import count_xids
from gpumap.agent.judgement.free import add_free
from gpumap.agent.judgement.judge import AssignedTwice, judge
from gpumap.model import remedies
from gpumap.model.devices import add_processes
from gpumap.model.node import ContainerOnDevice, ContainerXids, Driver, Finding, GpuXids, Node, Process
from gpumap.model.observations import Failed, Observations, Observed
from gpumap.model.snapshot import HiddenDevice, LazyRows, Snapshot
from gpumap.model.terms import Owner
from gpumap.model.workloads import remember_workloads

_ACCUSED = (Owner.UNASSIGNED, Owner.GONE)


def step(memory: Memory, observations: Observations, settings: JoinSettings) -> tuple[Memory, Snapshot]:
    """Reduce one collection."""
    pcie, observations = count_pcie(memory.pcie, observations)
    joined = join_sources(memory, observations, settings)
    containers, history, sm_ratios, sm_activities = node_parts.containers(joined)
    measurements = Measurements(
        observations.nvml.at, joined.inventory, containers, sm_ratios, sm_activities, joined.served_list.current
    )
    xid_memory, xids, container_xids = count_xids(
        memory.xids,
        observations.nvml,
        joined.inventory,
        containers,
        list_current=joined.served_list.current,
        finished=observations.finished.monotonic,
    )
    hidden_memory, hidden = _find_hidden(joined)
    lost_memory, lost_driver = find_lost_driver(
        memory.lost_driver, observations.nvml, observations.finished, settings.restart_after_seconds
    )
    missing_memory, missing, why_not_missing = find_unlisted_gpus(joined)
    after = replace(
        _remember(joined),
        health=record_health(memory.health, observations),
        answered={**memory.answered}
        | {key: answer.at.monotonic for key, answer in answers(observations).items() if isinstance(answer, Observed)},
        collections=_count_collection(memory.collections, observations),
        offered=node_parts.ever_offered(memory.offered, joined.allocation, joined.inventory),
        claimed=has_seen_claim(joined),
        history=history,
        pcie=pcie,
        hidden=hidden_memory,
        lost_driver=lost_memory,
        missing_gpus=missing_memory,
        ledger=account(memory.ledger, measurements, settings),
        xids=xid_memory,
        unexplained_uses=joined.unexplained_uses,
    )
    offers = find_unoffered_gpus(joined, after)
    node = _node(joined, after, containers, offers, xids, container_xids)
    node = structs.replace(node, missing_gpus=missing, missing_gpus_reason=why_not_missing)
    stalls, gpus = watch_for_stalls(memory.stalls, node.gpus, node.devices, observations.nvml.at, settings)
    not_offered_since, gpus = watch_offers(joined, gpus, offers)
    processes = LazyRows(partial(node_parts.processes, joined.leaf_uses, after.accused))
    clock_step = clock_step_seconds(memory.finished, observations.finished) if memory.finished else 0.0
    assigned_twice, lasting = _watch_shared_ids(joined)
    node = _add_findings(structs.replace(node, gpus=gpus), processes, memory.findings, clock_step, lasting)
    after = replace(
        after,
        stalls=stalls,
        not_offered_since=not_offered_since,
        assigned_twice=assigned_twice,
        findings=node.findings or (),
    )
    snapshot = Snapshot(
        at=observations.finished,
        node=node,
        containers=containers,
        processes=processes,
        answered=after.answered,
        collections=tuple(sorted(after.collections.items())),
        expires=_expiry(joined),
        has_short_process=node_parts.has_short_process(joined),
        pods_to_verify=node_parts.pods_to_verify(joined, containers, observations.finished.wall),
        complaints={
            (source, complaint.reason): complaint.detail
            for source, answer in answers(observations).items()
            for complaint in answer.complaints
        },
        hidden=hidden,
        lost_driver=lost_driver,
    )
    return after, snapshot


def _node(
    joined: Joined,
    after: Memory,
    containers: tuple[ContainerOnDevice, ...],
    missing: UnofferedGpus | None,
    xids: tuple[GpuXids, ...],
    container_xids: tuple[ContainerXids, ...],
) -> Node:
    observations, inventory, settings = joined.observations, joined.inventory, joined.settings
    capabilities = _capabilities(joined)
    return Node(
        timestamp=observations.finished.wall,
        name=settings.node_name,
        internal_ip=settings.internal_ip,
        driver=_driver(observations),
        gpus=node_parts.gpus(inventory.gpus, xids),
        nameless_gpus=inventory.nameless,
        devices=node_parts.devices(joined, after, containers, missing),
        unmatched=joined.allocation.unmatched,
        pods=node_parts.pods(joined, containers),
        accounts=tuple(container_accounts(after.ledger)),
        gpu_accounts=tuple(gpu_accounts(after.ledger)),
        xids=xids,
        container_xids=container_xids,
        device_health=node_parts.device_health(observations.pod_identity, settings.is_gpu_resource),
        sources=after.health,
        capabilities=capabilities,
        pid_visibility_reason=joined.procs.visibility_reason,
        remedies=remedies.capability_remedies(capabilities, gpu_answers=any(gpu.reading for gpu in inventory.gpus)),
        idle_after_seconds=settings.idle_after_seconds,
        grace_seconds=settings.grace_seconds,
    )


def _watch_shared_ids(joined: Joined) -> tuple[tuple[AssignedTwice, ...], tuple[AssignedTwice, ...]]:
    """Return the ids that two pods hold, and those that they have held for `--grace`.

    While a source is down it is not known whether both pods exist: then there is none of the second kind.
    """
    previous, moment = joined.memory.assigned_twice, joined.observations.finished
    if not joined.served_list.current or not joined.procs.pid_visibility:
        return previous, ()
    assigned_twice = watch_shared_ids(
        previous, joined.allocation.shared_ids, partial(node_parts.pod_exists, joined), moment
    )
    return assigned_twice, tuple(
        entry for entry in assigned_twice if moment.since(entry.since) >= joined.settings.grace_seconds
    )


def _add_findings(
    node: Node,
    processes: Sequence[Process],
    last_findings: tuple[Finding, ...],
    clock_step: float,
    assigned_twice: Sequence[AssignedTwice],
) -> Node:
    """Return the node with its findings. Their evidence are the processes of pods without a grant, or that may hang."""
    accused = any(use.owner in _ACCUSED and use.processes for device in node.devices for use in device.owners)
    accused = accused or any(gpu.busy_without_work_seconds for gpu in node.gpus)
    findings, judged, unjudged = judge(
        add_processes(node, processes) if accused else node, last_findings, clock_step, assigned_twice
    )
    return add_free(structs.replace(node, findings=findings, judged=judged, unjudged=unjudged))


def _driver(observations: Observations) -> Driver | None:
    if not isinstance(observations.nvml, Observed):
        return None
    nvml = observations.nvml.value
    return Driver(nvml.driver_version, nvml.cuda_version, nvml.nvml_version)


def _count_collection(previous: Mapping[str, int], observations: Observations) -> dict[str, int]:
    """Count collections by what started them."""
    counts = dict(previous)
    if observations.push:
        counts.setdefault("push", 0)  # a counter starts at 0; otherwise increase() misses the first collection
    counts[observations.trigger] = counts.get(observations.trigger, 0) + 1
    return counts


def _expiry(joined: Joined) -> float | None:
    """Return the first moment at which data of an earlier collection becomes too old to serve."""
    observations, answer = joined.observations, joined.served_list.answer
    served = []
    if isinstance(observations.kubelet, Failed) and joined.served_list.current and answer is not None:
        served.append(answer.at.monotonic)
    if isinstance(observations.pod_identity, Failed) and joined.identity is not None:
        served.append(joined.identity.at.monotonic)
    return min(served) + joined.settings.stale_after_seconds if served else None


def _find_hidden(joined: Joined) -> tuple[HiddenMemory, tuple[HiddenDevice, ...]]:
    served_list, settings = joined.served_list, joined.settings
    visible = None
    if served_list.read_now:
        visible = visible_mig_devices(
            joined.inventory, served_list.pods, served_list.allocatable, settings.is_gpu_resource
        )
    return find_hidden(joined.memory.hidden, visible, joined.observations.finished, settings.restart_after_seconds)


def _capabilities(joined: Joined) -> dict[str, bool]:
    """Return each capability, sorted. Those of the kubelet's files do not exist on a machine without a kubelet."""
    identity = joined.identity.value if joined.identity else None
    readings = [gpu.reading for gpu in joined.inventory.gpus if gpu.reading]
    nvml = joined.observations.nvml
    capabilities = {
        "gpm": any(reading.activity or any(mig.activity for mig in reading.instances) for reading in readings),
        "pid_visibility": joined.procs.pid_visibility,
        "process_utilization": any(reading.samples is not None for reading in readings),
        "xid_events": isinstance(nvml, Observed) and any(listener.since_seconds for listener in nvml.value.listening),
    }
    if joined.observations.kubelet is not None:
        capabilities |= {
            "device_checkpoint": identity is not None and identity.checkpoint is not None,
            "pod_logs": identity is not None and identity.logs is not None,
            "push": joined.observations.push,
        }
    return dict(sorted(capabilities.items()))


def _remember(joined: Joined) -> Memory:
    """Return what the next collection needs of this one. `step` adds the counters."""
    memory, served_list, moment = joined.memory, joined.served_list, joined.observations.finished
    identity = joined.observations.pod_identity
    sees_processes = joined.inventory.up and isinstance(joined.observations.procfs, Observed)
    uids = {**memory.pod_uids, **joined.pod_table.uid_of}
    awaited = [pod.pod_name for pod in served_list.awaited]
    attribution = joined.attribution
    uids_on_gpus = {uid for processes in attribution.by_leaf.values() for uid in processes.by_pod if uid is not None}
    names = {uid: name for uid in uids_on_gpus if (name := joined.pod_table.name(uid)) is not None}
    return Memory(
        served_list=served_list,
        pod_uids={name: uids[name] for name in (*joined.pod_table.listed, *awaited) if name in uids},
        pod_identity=identity if isinstance(identity, Observed) else memory.pod_identity,
        names=names if sees_processes else memory.names,
        first_seen={uid: memory.first_seen.get(uid, moment.monotonic) for uid in uids_on_gpus}
        if sees_processes
        else memory.first_seen,
        finished=moment,
        inventory=joined.inventory,
        pending_owners=remember_since(memory.pending_owners, attribution.pending_owners, moment),
        accused=remember_accused(
            memory.accused, attribution, moment, sees_processes=sees_processes and joined.procs.pid_visibility
        ),
        recent_processes=joined.recent_processes,
        workloads=remember_workloads(memory.workloads, attribution.workloads())
        if joined.inventory.up
        else memory.workloads,
        pod_table=joined.pod_table,
        allocation=joined.allocation,
        attribution=attribution,
    )
