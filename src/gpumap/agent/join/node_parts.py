"""Make the parts of the node out of one joined collection: GPUs, devices, containers, processes, pods, health."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from msgspec import structs

from gpumap.agent.join.accounting import Key
from gpumap.agent.join.allocation import Allocation
from gpumap.agent.join.attribution import Accused, Attributed, Attribution, PendingOwner
from gpumap.agent.join.collection import Joined
from gpumap.agent.join.history import (
    History,
    LeafMemory,
    PodMemory,
    remember_leaf,
    remember_peak,
    remember_pod,
    unwatched,
    watch_of,
    worthless_rows,
)
from gpumap.agent.join.inventory import Inventory, KnownGpu, KnownLeaf
from gpumap.agent.join.memory import Memory
from gpumap.agent.join.placement import DEVICE_DOWN, NOT_IN_NVML
from gpumap.agent.join.unavailable import UnofferedGpus
from gpumap.agent.join.usage import UNKNOWN_TIMES, LeafUse, Sign, Times, certainly_idle, owner_uses
from gpumap.model import remedies
from gpumap.model.grouping import grouped
from gpumap.model.node import (
    ContainerOnDevice,
    Device,
    Gpu,
    GpuXids,
    Pod,
    Process,
    ReportedDeviceHealth,
    UnmatchedSlots,
    Use,
    Watch,
)
from gpumap.model.observations import Failed, Observed, PodIdentity
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.readings import GpuReading, MigInstance, Uuid
from gpumap.model.terms import BUSY_WITHOUT_PROCESS, ContainerName, Owner, PodName, PodUid

# --- GPUs and devices -------------------------------------------------------------------------------------------------


def gpus(node_gpus: Iterable[Gpu], xids: Iterable[GpuXids]) -> tuple[Gpu, ...]:
    """Return the GPUs with what to do about their problems."""
    with_errors = {gpu_xids.uuid for gpu_xids in xids if gpu_xids.counts}
    return tuple(structs.replace(gpu, remedies=_remedies(gpu, gpu.uuid in with_errors)) for gpu in node_gpus)


def _remedies(gpu: Gpu, has_xids: bool) -> dict[str, str]:
    reading = gpu.reading
    problems = {
        "fault": gpu.fault,
        "recovery_action": gpu.recovery_action and f"recovery_{gpu.recovery_action}",
        "ecc_uncorrected": reading and any(reading.ecc_errors.get("uncorrected", {}).values()) and "ecc_uncorrected",
        "row_remap_pending": reading and reading.row_remap_pending and "row_remap_pending",
        "row_remap_failure": reading and reading.row_remap_failure and "row_remap_failure",
        "xid_errors": has_xids and "xid_errors",
    }
    texts = {name: remedies.finding_remedy("fault", reason, gpu.index) for name, reason in problems.items() if reason}
    return {name: remedy for name, remedy in texts.items() if remedy}


def ever_offered(
    previous: frozenset[tuple[Uuid, str]], allocation: Allocation, inventory: Inventory
) -> frozenset[tuple[Uuid, str]]:
    """Add what the kubelet offers now to what it ever offered, while the device is present."""
    offered = {(uuid, resource) for uuid, slots in allocation.offer.slots.items() for resource in slots}
    everything = previous | offered
    if not inventory.up or everything == previous:
        return previous if everything == previous else frozenset(everything)
    return frozenset(pair for pair in everything if pair[0] in inventory.leaves or pair[0] in inventory.parents)


def devices(
    joined: Joined, after: Memory, containers: Iterable[ContainerOnDevice], missing: UnofferedGpus | None
) -> tuple[Device, ...]:
    """Return every leaf of the node, and the devices that only the kubelet names."""
    inventory, allocation, attribution = joined.inventory, joined.allocation, joined.attribution
    zero_owners = [Owner.UNKNOWN]  # they are 0 if they have no process
    if joined.procs.pid_visibility:
        has_pod_names = joined.served_list.current and joined.identity is not None
        zero_owners += [Owner.HOST, *([Owner.ASSIGNED] if has_pod_names else [])]
        zero_owners += [Owner.UNASSIGNED, Owner.GONE] if attribution.evidence.can_report_unassigned else []
    on_device = grouped((row.uuid, row) for row in containers)
    rows: dict[Uuid, Device] = {}
    may_be_on_any = _doubtful(allocation.unmatched, allocation)
    # A slot of a GPU that has not reported its uuid or its minor is on no GPU that reports both.
    may_be_on_answering = _doubtful(
        [slots for slots in allocation.unmatched if slots.reason != DEVICE_DOWN], allocation
    )
    some_gpu_is_unnamed = any(slots.reason == DEVICE_DOWN for slots in allocation.unmatched)
    known_by_uuid = {known.uuid: known for known in inventory.known}
    offered_now = allocation.offer.slots
    for gpu in inventory.gpus:
        known = known_by_uuid[gpu.uuid]
        zeros = (missing or {}).get(gpu.uuid, {})  # resources of which no container can be assigned a slot
        for leaf in known.leaves:
            if inventory.gpu_of_leaf[leaf.uuid] is not known or leaf.uuid in rows:
                continue  # the driver gives two devices one uuid: only one series can have it
            measured = inventory.measured.get(leaf.uuid)
            memory = measured.memory if measured else None
            processes = attribution.by_leaf.get(leaf.uuid)
            siblings = _siblings(known, leaf, attribution) if joined.procs.pid_visibility else ()
            may_be_on = may_be_on_any if gpu.reading is None else may_be_on_answering
            rows[leaf.uuid] = Device(
                uuid=leaf.uuid,
                gpu_uuid=gpu.uuid,
                index=gpu.index,
                mig=_mig_instance(gpu, leaf, measured),
                memory=memory,
                activity=measured.activity if measured else None,
                holders=_holder_count(joined, leaf.uuid),
                may_have_more=may_be_on(leaf.uuid)
                or (some_gpu_is_unnamed and gpu.minor is None)
                or _may_be_held(allocation, leaf.uuid),
                allocatable=offered_now.get(leaf.uuid) or dict.fromkeys(sorted(zeros.get(leaf.uuid, ())), 0),
                owners=owner_uses(memory, processes, siblings, zero_owners),
                readable_ratio=after.history.leaves[leaf.uuid].readable_ratio(joined.settings),
                unexplained=watch.unexplained(joined.settings)
                if (watch := joined.unexplained_uses.get(leaf.uuid))
                else None,
                containers=tuple(on_device.get(leaf.uuid, ())),
                host=use.host_uses(after.workloads) if (use := joined.leaf_uses.get(leaf.uuid)) else (),
            )
    gpus_by_uuid = {gpu.uuid: gpu for gpu in inventory.gpus}
    for uuid in {*allocation.holders, *offered_now} - rows.keys():
        holders = _holder_count(joined, uuid)
        partitioned = gpus_by_uuid.get(uuid)
        rows[uuid] = Device(
            uuid=uuid,
            gpu_uuid=uuid if partitioned else None,
            index=partitioned.index if partitioned else None,
            partitioned=partitioned is not None,
            allocatable=offered_now.get(uuid, {}),
            holders=holders,
            # A partitioned GPU is no leaf. Of a GPU that NVML does not report, this series connects holders and node.
            may_have_more=not holders and may_be_on_any(uuid),
            containers=tuple(on_device.get(uuid, ())),
        )
    # By GPU; those that are on none, or on all of it, come last.
    places = ((math.inf if row.index is None or row.partitioned else row.index, uuid) for uuid, row in rows.items())
    return tuple(rows[uuid] for _, uuid in sorted(places))


def _holder_count(joined: Joined, uuid: Uuid) -> int | None:
    """Return how many containers certainly hold a leaf, or its partitioned GPU.

    `None` if no List shows it. 0 needs a List with pods of the API server. A claim that is not listed and a row of the
    checkpoint alone leave it open.
    """
    if not joined.served_list.current:
        return None
    if holders := set(_holders_of(joined, uuid)):
        return len(holders)
    # Unmatched slots say already that it is not known of every device who holds it.
    is_doubtful = _may_be_held(joined.allocation, uuid) and not joined.allocation.unmatched
    lacks_pods = joined.pod_table.lacks_pods(restarted=joined.served_list.back_at is not None)
    return None if lacks_pods or is_doubtful else 0


def _may_be_held(allocation: Allocation, uuid: Uuid) -> bool:
    """Whether a device without holders may be assigned: by an unlisted claim, or by a List that leaves devices out (the
    checkpoint may have them). Or by a scheduler, if its files cannot be read or do not name the container."""
    if allocation.holders.get(uuid):
        return False
    is_shared = allocation.may_be_shared or any(device == uuid for _, device in allocation.sharers)
    return is_shared or allocation.lacks_devices or uuid in allocation.may_be_claimed or uuid in allocation.held_by_rows


def _doubtful(unmatched: Iterable[UnmatchedSlots], allocation: Allocation) -> Callable[[Uuid], bool]:
    """Return whether one of the unmatched slots may be on a device: on one that offers their resource, or on any device
    if none offers it."""
    offers = allocation.offer.slots
    resources = {slots.resource for slots in unmatched if slots.reason != NOT_IN_NVML}
    offering = {name: {leaf for leaf, slots in offers.items() if name in slots} for name in resources}
    anywhere = not all(offering.values())
    return lambda uuid: anywhere or any(uuid in leaves for leaves in offering.values())


def _mig_instance(gpu: Gpu, leaf: KnownLeaf, measured: GpuReading | MigInstance | None) -> MigInstance | None:
    """Return the leaf's MIG instance. One of a lost GPU keeps only its identity."""
    if not gpu.partitioned:
        return None
    if isinstance(measured, MigInstance):
        return measured
    return MigInstance(
        leaf.uuid, leaf.gpu_instance_id or 0, leaf.compute_instance_id or 0, leaf.profile, None, None, None
    )


def _siblings(gpu: KnownGpu, leaf: KnownLeaf, attribution: Attribution) -> tuple[Attributed, ...]:
    """Processes of the other compute instances in the same GPU instance: they share its memory."""
    if leaf.gpu_instance_id is None:
        return ()
    return tuple(
        item
        for sibling in gpu.leaves
        if sibling.gpu_instance_id == leaf.gpu_instance_id and sibling.uuid != leaf.uuid
        if (processes := attribution.by_leaf.get(sibling.uuid))
        for item in processes.attributed
    )


# --- containers, processes, pods --------------------------------------------------------------------------------------


class Containers(NamedTuple):
    """One row per (container, device), and what the next collection and accounting need of them."""

    rows: tuple[ContainerOnDevice, ...]
    history: History
    sm_ratios: dict[Key, float]
    """SM time of all processes as a ratio of the interval. It may exceed 1."""
    sm_activities: dict[Key, float]
    """SM activity as a share of the GPU's SMs."""


def containers(joined: Joined) -> Containers:
    """Combine grants and uses."""
    sm_ratios: dict[Key, float] = {}
    sm_activities: dict[Key, float] = {}
    uses: dict[Key, tuple[Owner, Use]] = {}
    watches: dict[tuple[PodName, Uuid], Watch] = {}
    history = _HistoryUpdate(joined)
    for leaf, use in history.readable_uses():
        known = joined.inventory.leaves[leaf]
        idle = tuple(_idle(joined, leaf, use))
        reservations = joined.allocation.reservations
        is_shared = sum(holder.pod_name not in reservations for holder in _holders_of(joined, leaf)) > 1
        watches |= history.watch_pods(leaf, use, idle)
        for name, owner, sm_ratio, measured in use.container_uses(idle, joined.uids):
            key = name, leaf
            peak_bytes = history.peak_bytes(key, measured, known.profile)
            uses[key] = owner, structs.replace(measured, memory_peak_bytes=peak_bytes)
            if sm_ratio is not None:
                sm_ratios[key] = sm_ratio
            activity = measured.sm_activity_ratio
            # Where several containers hold a device, its activity is often unknown. A counter would hide that.
            if activity is not None and known.share is not None and not is_shared:
                sm_activities[key] = activity * known.share
    rows = []
    for key in sorted({**joined.allocation.grants, **uses}):  # both are nearly sorted
        name, uuid = key
        owner, used_now = uses.get(key, (Owner.ASSIGNED, None))
        grant = joined.allocation.grants.get(key)
        gpu = joined.inventory.gpu_of_leaf.get(uuid)
        held_grant = grant or (joined.allocation.grants.get((name, gpu.uuid)) if gpu else None)
        if held_grant is not None:
            owner = Owner.ASSIGNED if held_grant.slots else Owner.SCHEDULED
        rows.append(ContainerOnDevice(*name, uuid, owner, grant, used_now, watches.get((name.pod_name, uuid))))
    return Containers(tuple(rows), history.finish(), sm_ratios, sm_activities)


class _HistoryUpdate:
    """The next `History`, made leaf by leaf."""

    def __init__(self, joined: Joined) -> None:
        self._joined = joined
        self._moment = joined.observations.finished
        self._before = joined.memory.history
        timestamp = self._moment.monotonic
        self._peaks = {key: peak for key, peak in self._before.peaks.items() if peak.kept_until > timestamp}
        self._pods = {key: pod for key, pod in self._before.pods.items() if pod.kept_until > timestamp}
        self._at_rest: dict[tuple[PodName, Uuid], PodMemory] = {}
        self._leaves: dict[Uuid, LeafMemory] = {}
        self._updated: set[tuple[PodName, Uuid]] = set()

    def readable_uses(self) -> Iterator[tuple[Uuid, LeafUse]]:
        """Yield the leaves with known processes, and note which leaves gpumap can read."""
        joined, settings = self._joined, self._joined.settings
        uses = joined.leaf_uses if joined.procs.pid_visibility else {}
        for leaf in joined.inventory.leaves:
            use = uses.get(leaf)
            self._leaves[leaf] = remember_leaf(
                self._before.leaves.get(leaf), use if joined.served_list.current else None, self._moment, settings
            )
            if use is not None:
                yield leaf, use

    def watch_pods(
        self, leaf: Uuid, use: LeafUse, idle: Collection[ContainerName]
    ) -> Iterator[tuple[tuple[PodName, Uuid], Watch]]:
        """Yield what gpumap has seen of each pod with holders or processes on a leaf."""
        joined, memory = self._joined, self._leaves[leaf]
        by_container = use.processes.by_container
        holders = _holders_of(joined, leaf)
        uncertain = {name.pod_name for name in holders if name not in idle and name not in by_container}
        pods = dict.fromkeys(name.pod_name for name in (*holders, *by_container))
        rows = worthless_rows(memory, joined.settings)
        watch = joined.unexplained_uses[leaf]
        has_lasted = watch.has_lasted(BUSY_WITHOUT_PROCESS, joined.settings)
        is_busy = watch.seconds(BUSY_WITHOUT_PROCESS) is not None and not has_lasted
        for pod in pods:
            key, uid = (pod, leaf), joined.uids.get(pod)
            work = use.pod_work(pod, uid, rows, is_uncertain=pod in uncertain)
            at_rest = use.drop_load().pod_work(pod, uid, rows, is_uncertain=pod in uncertain) if is_busy else None
            if not memory.is_readable and work.sign not in (Sign.CERTAIN, Sign.ROWS):
                continue
            self._updated.add(key)
            previous = self._pods.get(key)
            previous_at_rest = self._before.pods_at_rest.get(key, previous)
            remember = partial(
                remember_pod,
                uid=uid,
                profile=joined.inventory.leaves[leaf].profile,
                leaf_before=self._before.leaves.get(leaf),
                moment=self._moment,
                settings=joined.settings,
            )
            if at_rest is not None:
                self._at_rest[key] = remember(previous_at_rest, at_rest)
            self._pods[key] = remember(previous_at_rest if has_lasted else previous, work)
            yield key, watch_of(self._pods[key], work, is_certain=_is_certain(joined, pod, uid))

    def peak_bytes(self, key: Key, use: Use, profile: str) -> int | None:
        """Return the largest memory of a container; `None` if it is unknown, or may be that of an earlier pod."""
        peak = self._peaks.get(key)
        if peak is not None and peak.pod_uid and not use.pod_uid:
            return None
        peak = self._peaks[key] = remember_peak(peak, use.memory_bytes, use.pod_uid, profile, self._moment)
        return peak.peak_bytes if use.memory_bytes is not None else None

    def finish(self) -> History:
        """Return the history, also of pods that this collection did not measure."""
        listed = self._joined.pod_table.listed  # also during an outage of the kubelet
        for key, memory in self._pods.items():
            if key not in self._updated:
                self._pods[key] = unwatched(memory, self._moment, keep=key[0] in listed)
        return History(self._peaks, self._pods, self._leaves, self._at_rest)


def _is_certain(joined: Joined, pod: PodName, uid: PodUid | None, *, may_ask: bool = True) -> bool:
    """Return whether a pod's UID is known, and its pod exists.

    A log tree may be that of an earlier pod of the same name. It counts if a process has its UID in its cgroup: one
    that uses a GPU, or one that gpumap has asked for (`may_ask`).
    """
    if uid is None:
        return False
    table = joined.pod_table
    return (
        pod in table.confirmed_by_files
        or uid in table.reported_names
        or (may_ask and uid in joined.procs.living_pods)
        or _uses_gpu(joined, uid)
    )


def _uses_gpu(joined: Joined, uid: PodUid) -> bool:
    return any(uid in processes.by_pod for processes in joined.attribution.by_leaf.values())


def pod_exists(joined: Joined, pod: PodName) -> bool:
    """Return whether a process of the pod exists: one that uses a GPU, or one that gpumap has asked for."""
    uid = joined.pod_table.uid_of.get(pod)
    return uid is not None and (uid in joined.procs.living_pods or _uses_gpu(joined, uid))


def pods_to_verify(joined: Joined, containers: Iterable[ContainerOnDevice], timestamp: float) -> frozenset[PodUid]:
    """Return the pods of which gpumap must find a process.

    A holder would be idle, but only a log tree shows its pod. Or two pods hold one id.
    """
    rest_until = timestamp - joined.settings.idle_after_seconds
    resting = {
        uid
        for row in containers
        if (watch := row.watch) and watch.last_active is not None and watch.last_active <= rest_until
        if (uid := joined.uids.get(row.pod_name)) and not _is_certain(joined, row.pod_name, uid, may_ask=False)
    }
    sharing = {name.pod_name for shared in joined.allocation.shared_ids for name in shared.containers}
    return frozenset(resting | {uid for pod in sharing if (uid := joined.pod_table.uid_of.get(pod))})


def has_short_process(joined: Joined) -> bool:
    """Return whether a process that no list had worked on a leaf that a container holds."""
    return any(use.has_short_process and _holders_of(joined, leaf) for leaf, use in joined.leaf_uses.items())


def _holders_of(joined: Joined, leaf: Uuid) -> tuple[ContainerName, ...]:
    """Return the holders of a leaf, and those of its partitioned GPU."""
    holders = joined.allocation.holders
    parent = joined.inventory.gpu_of_leaf.get(leaf)
    return (*holders.get(leaf, ()), *(holders.get(parent.uuid, ()) if parent and parent.uuid != leaf else ()))


def _idle(joined: Joined, leaf: Uuid, use: LeafUse) -> Iterable[ContainerName]:
    """Return the holders of a leaf, or of its partitioned GPU, that certainly have no process."""
    holders = [holder for holder in _holders_of(joined, leaf) if holder not in use.processes.by_container]
    if not holders:
        return ()
    pod_table = joined.pod_table
    # Older files lack a pod that was re-created since, and a log directory may be the predecessor's.
    is_read_now = isinstance(joined.observations.pod_identity, Observed)
    evidence = joined.attribution.evidence
    # An answer of the Pods API that is older than an unnamed process does not show that another pod is its owner.
    strangers = {item.pod_uid for item in use.processes.attributed if item.pod_uid} - pod_table.reported_names.keys()
    pods_current = strangers <= evidence.older_than_pods
    certain = pod_table.confirmed(pods_current=pods_current) if is_read_now else frozenset[PodName]()
    # No List has the pods that the grace period keeps: they may have ended.
    listed = (holder for holder in holders if holder.pod_name not in pod_table.kept_uids)
    return certainly_idle(listed, use.processes.attributed, pod_table.uid_of, certain)


def processes(leaf_uses: Mapping[Uuid, LeafUse], accused: Mapping[PendingOwner, Accused]) -> Iterator[Process]:
    by_time = sorted(accused.items(), key=lambda pair: pair[1].since)  # of several containers, the latest counts
    since = {(owner.pod_uid, owner.leaf, owner.owner): known.since.wall for owner, known in by_time}
    for leaf, use in sorted(leaf_uses.items()):
        for item in use.processes.attributed:
            process = item.process
            time = use.times[process.pid] if item.start is not None else None
            times = Times(*time) if time else UNKNOWN_TIMES
            name = item.name
            yield Process(
                pid=process.pid,
                uuid=leaf,
                type=process.types,
                comm=item.comm,
                owner=item.owner,
                namespace=name.namespace if name else None,
                pod=name.pod if name else None,
                container=(name.container or None) if name else None,
                pod_uid=item.pod_uid,
                memory_bytes=process.used_memory_bytes,
                sm_ratio=times.sm_ratio,
                memory_controller_busy_ratio=times.memory_controller_busy_ratio,
                encoder_ratio=times.encoder_ratio,
                decoder_ratio=times.decoder_ratio,
                work=item.workload,
                owner_since=since.get((item.pod_uid, leaf, item.owner)) if item.pod_uid is not None else None,
            )


def pods(joined: Joined, containers: Iterable[ContainerOnDevice]) -> tuple[Pod, ...]:
    """Return every pod that holds or uses a device, with its UID if it is known."""
    names = {row.pod_name for row in containers}
    names |= {row.pod_name for row in joined.allocation.unmatched}
    names |= joined.attribution.measured_uids.keys()
    return tuple(Pod(*name, joined.uids.get(name, "")) for name in sorted(names))


# --- device health ----------------------------------------------------------------------------------------------------


def device_health(
    identity: Observed[PodIdentity] | Failed | None, is_gpu_resource: Callable[[str], bool]
) -> tuple[ReportedDeviceHealth, ...] | None:
    """Return what device plugins report of the GPUs that they gave to containers, as the Pods API passes it on.

    `None` if the Pods API did not answer in this collection.
    """
    pods = identity.value.pods if isinstance(identity, Observed) else None
    if pods is None:
        return None
    reports = {
        ReportedDeviceHealth(pod.namespace, pod.pod, container.name, *health)
        for pod in pods
        for container in pod.containers
        for health in container.health
        # A claim's device has the name `<driver>/<pool>/<device>`, or that of CDI, which has the driver's in it
        # (kubernetes/kubernetes, pkg/kubelet/cm/dra/manager.go, UpdateAllocatedResourcesStatus).
        if is_gpu_resource(health.resource) or (health.resource.startswith("claim:") and DRA_DRIVER in health.device_id)
    }
    return tuple(sorted(reports))
