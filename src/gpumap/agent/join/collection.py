"""Join one collection: compute each part of the picture in the order in which the parts need each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpumap.agent.join.allocation import Allocation, add_left_out, allocate
from gpumap.agent.join.attribution import Attribution, Evidence, attribute, confirmed_owners
from gpumap.agent.join.inventory import Inventory, take_inventory
from gpumap.agent.join.memory import Memory
from gpumap.agent.join.pods import NOTHING_READ, PodTable, tabulate
from gpumap.agent.join.served_list import ServedList, choose_list
from gpumap.agent.join.settings import JoinSettings
from gpumap.agent.join.unexplained import UnexplainedUse, watch_unexplained_use
from gpumap.agent.join.usage import LeafUse, RecentProcesses, leaf_activity, measure_leaf, update_recent
from gpumap.model.observations import Failed, Observations, Observed, PodIdentity, ProcTable
from gpumap.model.readings import GpuReading, Uuid
from gpumap.model.terms import BUSY_WITHOUT_PROCESS, MEMORY_WITHOUT_PROCESS, PodName, PodUid

NO_PROCESSES = ProcTable((), (), pid_visibility=False, visibility_reason="/proc was not read")


@dataclass(frozen=True, slots=True)
class Joined:
    """One joined collection: all parts of the snapshot are computed from it."""

    observations: Observations
    memory: Memory
    inventory: Inventory
    served_list: ServedList
    identity: Observed[PodIdentity] | None
    pod_table: PodTable
    allocation: Allocation
    procs: ProcTable
    attribution: Attribution
    recent_processes: Mapping[Uuid, RecentProcesses]
    leaf_uses: Mapping[Uuid, LeafUse]
    unexplained_uses: Mapping[Uuid, UnexplainedUse]
    settings: JoinSettings
    is_gap: bool
    """gpumap did not watch the time between the last collection and this one."""
    uids: Mapping[PodName, PodUid]
    """UIDs of pods that have exactly one possible UID, or have measured processes."""


def join_sources(memory: Memory, observations: Observations, settings: JoinSettings) -> Joined:
    """Join the observations with the memory."""
    nvml = observations.nvml.value if isinstance(observations.nvml, Observed) else None
    procs = observations.procfs.value if isinstance(observations.procfs, Observed) else NO_PROCESSES
    identity = observations.pod_identity
    if isinstance(identity, Failed):
        identity = settings.if_young(memory.pod_identity, observations.finished)
    files = identity.value if identity else NOTHING_READ
    inventory = take_inventory(nvml, observations.finished.wall, memory.inventory.known, memory.inventory.count)
    served_list = choose_list(memory.served_list, memory.pod_uids, observations, files, procs, settings)
    identity_read_now = isinstance(observations.pod_identity, Observed)
    can_report_unassigned = served_list.read_now and identity_read_now
    pod_table = tabulate(
        served_list.pods,
        files,
        memory.pod_table,
        kept_uids=served_list.kept_uids,
        read_together=can_report_unassigned,
        node_name=settings.node_name,
        last_names=memory.names,
    )
    pods = served_list.pods if served_list.current else ()
    if can_report_unassigned and served_list.may_leave_out_devices:
        pods = add_left_out(pods, pod_table, procs)
    allocation = allocate(pods, pod_table, files, served_list, inventory, settings, memory.allocation)
    processes = {uuid: leaf.processes for uuid, leaf in inventory.measured.items() if leaf.processes is not None}
    driver_version = nvml.driver_version if nvml else ""
    watches = watch_unexplained_use(
        memory.unexplained_uses, inventory, processes, procs, driver_version, observations.finished, settings
    )
    evidence = Evidence(
        pod_table=pod_table,
        allocation=allocation,
        inventory=inventory,
        procs=procs,
        identity_current=identity is not None,
        identity_read_now=identity_read_now,
        list_current=served_list.current,
        can_report_unassigned=can_report_unassigned,
        is_trusted=settings.is_trusted,
        older_than_pods=frozenset(uid for uid, seen_at in memory.first_seen.items() if seen_at <= files.pods_at),
        pending_before=frozenset(memory.pending_owners),
        confirmed=confirmed_owners(memory.pending_owners, memory.attribution, observations),
        missing_pids_before=memory.attribution.missing if memory.attribution else frozenset(),
        leaking=frozenset(
            leaf for leaf, watch in watches.items() if watch.has_lasted(MEMORY_WITHOUT_PROCESS, settings)
        ),
    )
    attribution = attribute(processes, evidence, memory.attribution)
    recent = update_recent(
        memory.recent_processes, attribution.by_leaf, inventory.leaves, observations.finished.monotonic
    )
    leaf_uses = _leaf_uses(inventory, attribution, memory.recent_processes, recent)
    return Joined(
        observations=observations,
        memory=memory,
        inventory=inventory,
        served_list=served_list,
        identity=identity,
        pod_table=pod_table,
        allocation=allocation,
        procs=procs,
        attribution=attribution,
        recent_processes=recent,
        leaf_uses=leaf_uses
        | {
            leaf: leaf_uses[leaf].drop_load()
            for leaf, watch in watches.items()
            if watch.has_lasted(BUSY_WITHOUT_PROCESS, settings)
        },
        unexplained_uses=watches,
        settings=settings,
        is_gap=memory.finished is not None and settings.is_gap(memory.finished, observations.finished),
        uids={**attribution.measured_uids, **pod_table.uid_of},
    )


def _leaf_uses(
    inventory: Inventory,
    attribution: Attribution,
    previous: Mapping[Uuid, RecentProcesses],
    recent: Mapping[Uuid, RecentProcesses],
) -> dict[Uuid, LeafUse]:
    uses = {}
    for uuid, processes in attribution.by_leaf.items():
        leaf, earlier = inventory.measured[uuid], previous.get(uuid)
        reading = leaf if isinstance(leaf, GpuReading) else None
        activity = leaf_activity(leaf.activity, earlier.users | recent[uuid].users) if earlier else None
        uses[uuid] = measure_leaf(processes, reading, recent[uuid].ended, activity)
    return uses
