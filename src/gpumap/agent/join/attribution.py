"""Which pod owns each process on each leaf: from NVML's PIDs, through their cgroups, to pods, containers and owners.

If no source determines the owner, it is `unknown`. `unassigned` and `gone` report a fault of a pod. gpumap reports them
only after two consecutive snapshots agree; until then they are pending.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumap.agent.join.allocation import Allocation, CheckpointAllocation
from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.pods import PodTable, PodUidState
from gpumap.model.devices import NO_CONTAINER
from gpumap.model.grouping import grouped, sum_all
from gpumap.model.node import OTHER, Workload
from gpumap.model.observations import (
    CgroupKind,
    CgroupMembership,
    Moment,
    Observations,
    PodCgroup,
    ProcEntry,
    ProcTable,
)
from gpumap.model.readings import GpuProcess, Uuid
from gpumap.model.terms import ContainerName, Owner, PodName, PodUid

CONFIRM_SECONDS = 0.4
"""How long an owner is pending after a pushed collection, which can follow the last one after a quarter of a second.
A process that ends needs a moment to leave the driver's list; it is not a leftover."""
MPS_SERVER_COMM = "nvidia-cuda-mps-server"[:15]
"""The kernel keeps 15 characters of a name."""


class PendingOwner(NamedTuple):
    """An owner (`unassigned`, `gone`) that a snapshot found. gpumap reports it after the next ones agree."""

    pod_uid: PodUid
    container_id: str
    leaf: Uuid
    owner: Owner


@dataclass(frozen=True, slots=True)
class Evidence:
    """All inputs of the attribution: equal ones lead to the same owners. Pod table and allocation stay the same objects
    while nothing changes. `*_current`: young enough to serve, but possibly of an earlier collection.

    `can_report_unassigned`: List and identity are both of this collection. Older ones lack a pod that has just started.
    """

    pod_table: PodTable
    allocation: Allocation
    inventory: Inventory = field(compare=False)
    """The basis of `allocation` contains the devices."""
    procs: ProcTable
    identity_current: bool
    identity_read_now: bool
    list_current: bool
    can_report_unassigned: bool
    is_trusted: Callable[[str], bool] = field(compare=False)
    """Whether pods of a namespace may use devices that a scheduler granted in its own way."""
    older_than_pods: frozenset[PodUid]
    """UIDs with processes that gpumap knew before it asked the Pods API. The answer has their pods, if they exist."""
    pending_before: frozenset[PendingOwner]
    """Of the last snapshot."""
    confirmed: frozenset[PendingOwner]
    """Those of `pending_before` that are old enough to report."""
    missing_pids_before: frozenset[tuple[Uuid, int]]
    """(leaf, PID) pairs that /proc did not have in the last collection either."""
    leaking: frozenset[Uuid]
    """Leaves with memory that no process explains, for so long that the PIDs on them certainly do not exist."""


class Attributed(NamedTuple):
    """One process on one leaf, with its owner."""

    process: GpuProcess
    start: int | None
    comm: str
    owner: Owner
    pod_uid: PodUid | None
    name: ContainerName | None
    is_measured: bool
    """Its use counts for its container."""
    unresolved: bool
    """Its owner is uncertain. A holder that may own it is not certainly idle."""
    workload: Workload | None = None
    """What a process outside pods belongs to; of one in a pod the Slurm job, if there is one."""

    @property
    def container(self) -> ContainerName | None:
        """The container that its use counts for."""
        return self.name if self.is_measured else None


class ContainerProcesses(NamedTuple):
    """The measured processes of one container on a leaf. `memory_bytes` is `None` if that of one is unknown."""

    items: tuple[Attributed, ...]
    memory_bytes: int | None
    owner: Owner
    """Owner of the processes. If they have several, the first of `_OWNERS`."""


User = tuple[ContainerName, PodUid | None]
"""A container, and the UID of its pod."""


@dataclass(frozen=True, slots=True)
class LeafProcesses:
    """The processes of one leaf: as NVML lists them, with their owners, and what follows from both.

    It stays the same object while NVML's list and the evidence stay the same.
    """

    listed: tuple[GpuProcess, ...]
    attributed: tuple[Attributed, ...]
    """Sorted by PID."""
    pending_owners: frozenset[PendingOwner]
    by_container: Mapping[ContainerName, ContainerProcesses]
    by_owner: Mapping[Owner, tuple[Attributed, ...]]
    by_pid: Mapping[int, Attributed]
    """Those that /proc has."""
    users: frozenset[User | None]
    """Containers with processes that may compute. `None`: one that no container is known to own. Without MPS servers,
    because their clients are listed, too."""
    by_pod: Mapping[PodUid | None, Sequence[Attributed]]


@dataclass(frozen=True, slots=True)
class Attribution:
    evidence: Evidence
    by_leaf: Mapping[Uuid, LeafProcesses]
    pending_owners: frozenset[PendingOwner]
    missing: frozenset[tuple[Uuid, int]]
    """(leaf, PID) pairs that NVML listed and /proc did not have."""
    measured_uids: Mapping[PodName, PodUid]
    """UIDs of pods with measured processes."""

    def workloads(self) -> Iterator[Workload]:
        """Yield the work outside pods on all leaves."""
        for processes in self.by_leaf.values():
            yield from (item.workload for item in processes.by_owner.get(Owner.HOST, ()) if item.workload)


def confirmed_owners(
    pending: Mapping[PendingOwner, Moment], previous: Attribution | None, observations: Observations
) -> frozenset[PendingOwner]:
    """Return the pending owners that gpumap may report. The values are the times of the first snapshots with them.

    One interval is long enough; after a pushed collection it takes `CONFIRM_SECONDS`. What was confirmed `previous`
    stays so.
    """
    if observations.trigger != "push":
        return frozenset(pending)
    latest = observations.finished.monotonic - CONFIRM_SECONDS
    confirmed = previous.evidence.confirmed if previous is not None else frozenset[PendingOwner]()
    return frozenset(owner for owner, since in pending.items() if since.monotonic <= latest or owner in confirmed)


def attribute(
    processes_by_leaf: Mapping[Uuid, tuple[GpuProcess, ...]], evidence: Evidence, previous: Attribution | None
) -> Attribution:
    """Find the owner of every process. With the same evidence as `previous`, only changed leaves are classified."""
    if previous is not None and evidence != previous.evidence:
        previous = None
    by_leaf_before = previous.by_leaf if previous is not None else {}
    classifier = OwnerClassifier(evidence)
    by_leaf: dict[Uuid, LeafProcesses] = {}
    for leaf, listed in processes_by_leaf.items():
        known = by_leaf_before.get(leaf)
        by_leaf[leaf] = known if known and known.listed == listed else classifier.classify(leaf, listed)
    leaves = by_leaf.values()
    measured = [item for leaf in leaves for processes in leaf.by_container.values() for item in processes.items]
    return Attribution(
        evidence,
        by_leaf,
        pending_owners=frozenset().union(*(leaf.pending_owners for leaf in leaves)),
        missing=frozenset(
            (uuid, item.process.pid) for uuid, leaf in by_leaf.items() for item in leaf.attributed if item.start is None
        ),
        measured_uids={item.name.pod_name: item.pod_uid for item in measured if item.name and item.pod_uid},
    )


_OWNERS = (Owner.UNASSIGNED, Owner.UNKNOWN, Owner.SCHEDULED, Owner.ASSIGNED)
"""The owners of measured processes of a container."""


_OUTSIDE: User = NO_CONTAINER, None
"""Processes of the host, and of pods that no longer exist: they are certainly not a living pod's."""


def _user(item: Attributed) -> User | None:
    if item.owner in (Owner.HOST, Owner.GONE):
        return _OUTSIDE
    name = item.name
    return (name, item.pod_uid) if name is not None and name.container and item.is_measured else None


class OwnerDecision(NamedTuple):
    owner: Owner
    name: ContainerName | None = None
    is_measured: bool = False
    unresolved: bool = False


class OwnerClassifier:
    """Finds the owners of one snapshot's processes, leaf by leaf."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        # Of the leaf that is being classified:
        self._pending: set[PendingOwner] = set()
        self._has_mps_clients = False

    @functools.cached_property
    def _entries(self) -> Mapping[int, ProcEntry]:
        return {entry.pid: entry for entry in self._evidence.procs.entries}

    @functools.cached_property
    def _holders(self) -> Mapping[Uuid, set[ContainerName]]:
        """The containers with a slot of each leaf. Those of a partitioned GPU hold all of its leaves."""
        with_slots = (holder for holder, grant in self._evidence.allocation.grants.items() if grant.slots)
        leaves_of = self._evidence.inventory.leaves_of
        holders = grouped((leaf, name) for name, uuid in with_slots for leaf in leaves_of(uuid))
        return {leaf: set(names) for leaf, names in holders.items()}

    def classify(self, leaf: Uuid, listed: tuple[GpuProcess, ...]) -> LeafProcesses:
        """Find the owners of the processes on one leaf."""
        self._pending = set()
        self._has_mps_clients = any("M" in process.types for process in listed)
        decide = functools.cache(functools.partial(self._decide_pod, leaf=leaf))  # a container has many processes
        attributed = tuple(
            self._attributed(process, leaf, decide) for process in sorted(listed, key=lambda process: process.pid)
        )
        by_container = grouped((item.name, item) for item in attributed if item.is_measured and item.name is not None)
        by_owner = grouped((item.owner, item) for item in attributed)
        return LeafProcesses(
            listed,
            attributed,
            frozenset(self._pending),
            {
                name: ContainerProcesses(
                    tuple(items),
                    sum_all(item.process.used_memory_bytes for item in items),
                    min((item.owner for item in items), key=_OWNERS.index),
                )
                for name, items in by_container.items()
            },
            {owner: tuple(items) for owner, items in by_owner.items()},
            by_pid={item.process.pid: item for item in attributed if item.start is not None},
            users=frozenset(
                _user(item)
                for item in attributed
                if item.owner is not Owner.MPS_SERVER and leaf not in self._evidence.leaking
            ),
            by_pod=grouped((item.pod_uid, item) for item in attributed),
        )

    def _attributed(self, process: GpuProcess, leaf: Uuid, decide: Callable[[PodCgroup], OwnerDecision]) -> Attributed:
        entry = self._entries.get(process.pid)
        if entry is None:
            return self._not_in_proc(process, leaf)
        pod = self._pod(entry.cgroup)
        if pod is not None:
            decision = decide(pod)
        elif entry.cgroup.kind is CgroupKind.HOST:
            decision = OwnerDecision(Owner.HOST)
        else:
            decision = OwnerDecision(Owner.UNKNOWN, unresolved=True)
        if entry.comm == MPS_SERVER_COMM and "M" not in process.types:
            decision = self._decide_mps_server(decision)
        # A process without a pod in its path may be in a pod's container: then its work does not count.
        job_in_pod = entry.workload if entry.cgroup.kind is CgroupKind.POD else None
        return Attributed(
            process,
            entry.start,
            entry.comm,
            decision.owner,
            pod.pod_uid if pod else None,
            decision.name,
            decision.is_measured,
            decision.unresolved,
            (entry.workload or OTHER) if decision.owner is Owner.HOST else job_in_pod,
        )

    def _decide_mps_server(self, decision: OwnerDecision) -> OwnerDecision:
        """Decide about a process with the name of an MPS server. `decision` is the one for any other name.

        The server of a plugin's daemon has memory for its clients, so no container is charged for it. A container that
        holds the device runs its own server, and pays for it. Any process can have this name, but NVML never lists a
        server as a client. A server that waits for clients looks like any process: that is no reason to accuse it.
        """
        if decision.owner is Owner.ASSIGNED:
            return decision
        if self._has_mps_clients:
            return OwnerDecision(Owner.MPS_SERVER, decision.name, unresolved=decision.name is not None)
        return decision._replace(owner=Owner.UNKNOWN) if decision.owner is Owner.UNASSIGNED else decision

    def _not_in_proc(self, process: GpuProcess, leaf: Uuid) -> Attributed:
        """A process that has just ended holds nothing. One that is missing twice exists, but gpumap cannot see it."""
        evidence = self._evidence
        is_missing = (leaf, process.pid) in evidence.missing_pids_before and leaf not in evidence.leaking
        unresolved = process.pid in evidence.procs.unreadable or is_missing
        return Attributed(process, None, "", Owner.UNKNOWN, None, None, is_measured=False, unresolved=unresolved)

    def _pod(self, cgroup: CgroupMembership) -> PodCgroup | None:
        """Return the outermost of nested pods. A container may make directories below its own, with any pod's UID.

        With `cgroupsPerQOS: false` no pod is in the path, but the container's id is.
        """
        if cgroup.pods:
            return cgroup.pods[0]
        uid = self._evidence.pod_table.pod_of(cgroup.container_id)
        return PodCgroup(uid, cgroup.container_id) if uid is not None else None

    def _decide_pod(self, pod: PodCgroup, leaf: Uuid) -> OwnerDecision:
        evidence = self._evidence
        pod_name = evidence.pod_table.name(pod.pod_uid)
        if not evidence.identity_current:
            return OwnerDecision(Owner.UNKNOWN, unresolved=True)
        container = evidence.pod_table.container(*pod, read_now=evidence.identity_read_now)
        name = ContainerName(*pod_name, container) if pod_name else None
        if not evidence.list_current:
            return self._decide_without_list(pod, name, leaf)
        state = evidence.pod_table.state(pod.pod_uid, pods_current=pod.pod_uid in evidence.older_than_pods)
        if state is PodUidState.GONE:
            # With older files it may be a pod that has just started, and one of the holders.
            owner = self._report_if_confirmed(pod, leaf, Owner.GONE)
            return OwnerDecision(owner, name, unresolved=not evidence.can_report_unassigned)
        if state is PodUidState.UNKNOWN or name is None:
            return OwnerDecision(Owner.UNKNOWN, name, unresolved=True)
        holds = self._holds(pod.pod_uid, name, leaf)
        if holds:
            owner = Owner.ASSIGNED
        elif (name.pod_name, leaf) in self._sharers:
            owner = Owner.SCHEDULED
        elif holds is None or self._allocation_is_incomplete(pod.pod_uid, name, leaf):
            owner = Owner.UNKNOWN
        elif self._is_scheduled(pod.pod_uid, name.pod_name, leaf):
            owner = Owner.SCHEDULED
        elif evidence.allocation.may_be_shared or self._may_be_init_container(name):
            owner = Owner.UNKNOWN
        elif name.pod_name in evidence.pod_table.kept_uids:  # the List of this collection does not have it
            self._keep_pending(pod, leaf, Owner.UNASSIGNED)
            owner = Owner.UNKNOWN
        else:
            owner = self._report_if_confirmed(pod, leaf, Owner.UNASSIGNED)
        return OwnerDecision(owner, name, is_measured=True)

    def _decide_without_list(self, pod: PodCgroup, name: ContainerName | None, leaf: Uuid) -> OwnerDecision:
        is_gone = self._keep_pending(pod, leaf, Owner.GONE)
        self._keep_pending(pod, leaf, Owner.UNASSIGNED)
        is_measured = not is_gone and self._evidence.pod_table.is_only(pod.pod_uid)
        return OwnerDecision(Owner.UNKNOWN, name, is_measured=is_measured, unresolved=not is_measured)

    def _report_if_confirmed(self, pod: PodCgroup, leaf: Uuid, owner: Owner) -> Owner:
        if not self._evidence.can_report_unassigned:
            self._keep_pending(pod, leaf, owner)
            return Owner.UNKNOWN
        pending = PendingOwner(*pod, leaf, owner)
        self._pending.add(pending)
        return owner if pending in self._evidence.confirmed else Owner.UNKNOWN

    def _keep_pending(self, pod: PodCgroup, leaf: Uuid, owner: Owner) -> bool:
        """Keep a pending owner while its process exists and gpumap cannot check it. Returns whether there is one."""
        pending = PendingOwner(*pod, leaf, owner)
        is_pending = pending in self._evidence.pending_before
        if is_pending:
            self._pending.add(pending)
        return is_pending

    def _holds(self, uid: PodUid, name: ContainerName, leaf: Uuid) -> bool | None:
        """Whether the container holds the leaf.

        If its name is unknown: whether every container of its pod does; `None` if some do, and others do not.
        """
        holders = self._holders.get(leaf, set())
        init_containers = self._evidence.allocation.init_containers
        if name.container:
            return name in holders or self._row_holds(init_containers.get((uid, name.container)), leaf)
        listed = {container in holders for container in self._listed_containers.get(name.pod_name, ())}
        init = {self._row_holds(row, leaf) for (pod, _), row in init_containers.items() if pod == uid}
        return None if len(listed | init) > 1 else True in listed | init

    def _is_scheduled(self, uid: PodUid, pod: PodName, leaf: Uuid) -> bool:
        """Whether a scheduler beside the kubelet may have granted a leaf to the pod, as far as its reservation, the
        pod's namespace or the Pods API shows it."""
        reservations = self._evidence.allocation.reservations
        if pod in reservations:
            return False
        if self._evidence.is_trusted(pod.namespace):
            return True
        reserved_by = {name.pod_name for name in self._holders.get(leaf, ())} & reservations
        if not reserved_by or uid not in self._evidence.older_than_pods:
            return bool(reserved_by)
        # Only of a scheduler with groups, gpumap knows the signs that its pods have.
        reported = self._evidence.pod_table.files.pods or ()
        has_groups = reserved_by <= {pod.pod_name for pod in reported if pod.gpu_groups}
        return not (has_groups and any(pod.pod_uid == uid and not pod.may_share for pod in reported))

    @functools.cached_property
    def _sharers(self) -> frozenset[tuple[PodName, Uuid]]:
        leaves_of = self._evidence.inventory.leaves_of
        return frozenset((pod, leaf) for pod, uuid in self._evidence.allocation.sharers for leaf in leaves_of(uuid))

    @functools.cached_property
    def _listed_containers(self) -> Mapping[PodName, Iterable[ContainerName]]:
        return grouped((name.pod_name, name) for name in self._evidence.pod_table.containers)

    def _row_holds(self, row: CheckpointAllocation | None, leaf: Uuid) -> bool:
        leaves_of = self._evidence.inventory.leaves_of
        return row is not None and any(leaf in leaves_of(device) for device in row.devices)

    def _allocation_is_incomplete(self, uid: PodUid, name: ContainerName, leaf: Uuid) -> bool:
        """Whether gpumap does not know all devices of the container; if its name is unknown: of one of its pod.

        This includes a claim that the kubelet does not list, and a row for the leaf whose device it does not list.
        """
        allocation = self._evidence.allocation
        if leaf in allocation.may_be_claimed or allocation.lacks_devices:
            return True
        rows = [*allocation.init_containers.items(), *allocation.left_out.items()]
        own_rows = [row for key, row in rows if key[0] == uid and key[1] == (name.container or key[1])]
        if any(not row.complete or self._row_holds(row, leaf) for row in own_rows):
            return True
        return any(
            container.pod_name == name.pod_name and name.container in ("", container.container)
            for container in allocation.incomplete
        )

    def _may_be_init_container(self, name: ContainerName) -> bool:
        """Whether it may be an init container with devices that no file lists.

        The List contains neither init containers nor ephemeral ones, which have no devices. Devices of plugins are in
        the checkpoint. No file has the container of a claim, but few claims are only for an init container.
        """
        pod_table = self._evidence.pod_table
        if name in pod_table.containers:
            return False
        return pod_table.files.checkpoint is None or name.pod_name in pod_table.claimants


# --- since when an owner has been accused -----------------------------------------------------------------------------


_Process = tuple[int, int | None]
"""PID and start."""


@dataclass(frozen=True, slots=True)
class Accused:
    """Since when gpumap has found an owner, and the processes that have it."""

    since: Moment
    processes: frozenset[_Process]


def remember_accused(
    previous: Mapping[PendingOwner, Accused], attribution: Attribution, moment: Moment, *, sees_processes: bool
) -> dict[PendingOwner, Accused]:
    """Return the owners of now with their times. After an outage, the time of the same process counts.

    `sees_processes`: NVML and /proc answered in this collection.
    """
    if not sees_processes:
        return dict(previous)
    accused, evidence = {}, attribution.evidence
    for key in attribution.pending_owners:
        items = attribution.by_leaf[key.leaf].attributed
        processes = frozenset((item.process.pid, item.start) for item in items if item.pod_uid == key.pod_uid)
        known = previous.get(key)
        is_same = known and (key in evidence.pending_before or known.processes & processes)
        accused[key] = Accused(known.since if known and is_same else moment, processes)
    known_leaves = evidence.inventory.leaves
    hidden = {key: known for key, known in previous.items() if key not in accused and key.leaf in known_leaves}
    return accused | {key: known for key, known in hidden.items() if _may_remain(key, known, attribution)}


def _may_remain(key: PendingOwner, known: Accused, attribution: Attribution) -> bool:
    """Return whether one of the processes may still have its owner: its leaf or its /proc entry cannot be read, or
    nothing shows its owner."""
    leaf = attribution.by_leaf.get(key.leaf)
    if leaf is None:
        return True
    pids = {pid for pid, _ in known.processes}
    return any(
        item.process.pid in pids
        if item.start is None
        else item.owner is Owner.UNKNOWN and (item.process.pid, item.start) in known.processes
        for item in leaf.attributed
    )
