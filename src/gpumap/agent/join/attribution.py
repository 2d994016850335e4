"""Whose each process on each leaf is: NVML's PIDs, through their cgroups, to pods, containers and owners.

Where no source can tell, the owner is `unknown`. `unassigned` and `gone` accuse somebody, so they are said only when
two snapshots running agree.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.agent.join.allocation import Allocation, InitContainerAllocation
from gpumap.agent.join.evidence import Evidence, PendingOwner
from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.pods import PodUidState
from gpumap.model.observations import CgroupKind, ContainerName, PodCgroup, PodName, PodUid, ProcEntry
from gpumap.model.readings import GpuProcess, Uuid
from gpumap.model.snapshot import Owner

MPS_SERVER_COMM = "nvidia-cuda-mps-server"[:15]
"""The kernel keeps 15 characters of a name."""


class Attributed(NamedTuple):
    """One process on one leaf. `measures` says whether its container's measured series stand."""

    process: GpuProcess
    start: int | None
    comm: str
    owner: Owner
    pod_uid: PodUid | None
    name: ContainerName | None
    measures: bool
    unresolved: bool
    """Whose it is could not be settled, so that a holder it may belong to is not certainly idle."""


class LastProcess(NamedTuple):
    """A process of the last snapshot: its start tells a re-used PID, its container gets what it used till it left."""

    start: int
    container: ContainerName | None
    pod_uid: PodUid | None


@dataclass(frozen=True, slots=True)
class OnLeaf:
    """The processes of one leaf, as NVML told them and as they were judged, by PID; and what follows from that alone.

    The very same object while NVML tells the same and the evidence is the same.
    """

    told: tuple[GpuProcess, ...]
    attributed: tuple[Attributed, ...]
    suspicions: frozenset[PendingOwner]
    names: Mapping[PodUid, PodName]
    missing: frozenset[tuple[Uuid, int]]
    by_container: Mapping[ContainerName, tuple[Attributed, ...]]
    """Those that are measured."""
    by_owner: Mapping[Owner, tuple[Attributed, ...]]
    last: Mapping[int, LastProcess]
    """What is remembered of each, by PID."""


@dataclass(frozen=True, slots=True)
class Attribution:
    evidence: Evidence
    by_leaf: Mapping[Uuid, OnLeaf]
    suspicions: frozenset[PendingOwner]
    names: Mapping[PodUid, PodName]
    missing: frozenset[tuple[Uuid, int]]
    measured_uids: Mapping[PodName, PodUid]
    """Of pods whose processes are measured."""


class OwnerDecision(NamedTuple):
    owner: Owner
    name: ContainerName | None = None
    measures: bool = False
    unresolved: bool = False


def attribute(
    processes_by_leaf: Mapping[Uuid, tuple[GpuProcess, ...]], evidence: Evidence, before: Attribution | None
) -> Attribution:
    """Find the owner of every process. What was judged `before` by the same evidence is not judged again."""
    if before is not None and not evidence.same_as(before.evidence):
        before = None
    known = before.by_leaf if before is not None else {}
    judge = OwnerClassifier(evidence)
    by_leaf = {
        leaf: on_leaf if (on_leaf := known.get(leaf)) and on_leaf.told == told else judge.on_leaf(leaf, told)
        for leaf, told in processes_by_leaf.items()
    }
    if before is not None and list(map(id, by_leaf.values())) == list(map(id, known.values())):
        return before
    measured = (item for on_leaf in by_leaf.values() for of in on_leaf.by_container.values() for item in of)
    return Attribution(
        evidence,
        by_leaf,
        suspicions=frozenset().union(*(one.suspicions for one in by_leaf.values())),
        names={uid: name for one in by_leaf.values() for uid, name in one.names.items()},
        missing=frozenset().union(*(one.missing for one in by_leaf.values())),
        measured_uids={item.name.pod_name: item.pod_uid for item in measured if item.name and item.pod_uid},
    )


class OwnerClassifier:
    """One snapshot's judgements: the evidence, and what is found on the way on one leaf."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._suspicions: set[PendingOwner] = set()
        self._names: dict[PodUid, PodName] = {}
        self._missing: set[tuple[Uuid, int]] = set()

    @functools.cached_property
    def _entries(self) -> Mapping[int, ProcEntry]:
        return {entry.pid: entry for entry in self._evidence.procs.entries}

    @functools.cached_property
    def _held(self) -> Mapping[Uuid, set[ContainerName]]:
        return _held_devices(self._evidence.allocation, self._evidence.inventory)

    def on_leaf(self, leaf: Uuid, told: tuple[GpuProcess, ...]) -> OnLeaf:
        self._suspicions, self._names, self._missing = set(), {}, set()
        attributed = tuple(self._attributed(process, leaf) for process in sorted(told, key=lambda one: one.pid))
        by_container: dict[ContainerName, list[Attributed]] = {}
        by_owner: dict[Owner, list[Attributed]] = {}
        for item in attributed:
            by_owner.setdefault(item.owner, []).append(item)
            if item.measures and item.name is not None:
                by_container.setdefault(item.name, []).append(item)
        return OnLeaf(
            told,
            attributed,
            frozenset(self._suspicions),
            self._names,
            frozenset(self._missing),
            {name: tuple(items) for name, items in by_container.items()},
            {owner: tuple(items) for owner, items in by_owner.items()},
            last={
                item.process.pid: LastProcess(item.start, item.name if item.measures else None, item.pod_uid)
                for item in attributed
                if item.start is not None
            },
        )

    def _attributed(self, process: GpuProcess, leaf: Uuid) -> Attributed:
        entry = self._entries.get(process.pid)
        if entry is None:
            self._missing.add((leaf, process.pid))
            # One that has just left holds nothing any more. One that is missing again is hidden from us.
            unresolved = (
                process.pid in self._evidence.procs.unreadable or (leaf, process.pid) in self._evidence.missing_before
            )
            return Attributed(process, None, "", Owner.UNKNOWN, None, None, measures=False, unresolved=unresolved)
        if entry.cgroup.kind is CgroupKind.POD:
            pod = self._known_pod(entry)
            verdict = self._judge_pod(pod, leaf)
            uid: PodUid | None = pod.pod_uid
        else:
            is_host = entry.cgroup.kind is CgroupKind.HOST
            verdict = OwnerDecision(Owner.HOST) if is_host else OwnerDecision(Owner.UNKNOWN, unresolved=True)
            uid = None
        if entry.comm == MPS_SERVER_COMM and "M" not in process.types:
            # It holds memory for its clients: charged to no container, whichever pod it runs in. A process may give
            # itself any name, but NVML lists no server as a client.
            # If its own pod holds the device, that is not idle.
            verdict = OwnerDecision(Owner.MPS_SERVER, verdict.name, unresolved=verdict.name is not None)
        return Attributed(
            process, entry.start, entry.comm, verdict.owner, uid, verdict.name, verdict.measures, verdict.unresolved
        )

    def _known_pod(self, entry: ProcEntry) -> PodCgroup:
        """Of nested pods the deepest that this node's files know; a kubelet inside a pod has pods of its own."""
        return next((pod for pod in entry.cgroup.pods if self._name(pod.pod_uid)), entry.cgroup.pods[0])

    def _name(self, uid: PodUid) -> PodName | None:
        return self._evidence.table.name(uid) or self._evidence.last_names.get(uid)

    def _judge_pod(self, pod: PodCgroup, leaf: Uuid) -> OwnerDecision:
        evidence = self._evidence
        if not evidence.identity_current:
            return OwnerDecision(Owner.UNKNOWN, unresolved=True)
        pod_name = self._name(pod.pod_uid)
        if pod_name is not None:
            self._names[pod.pod_uid] = pod_name
        container = evidence.table.container(*pod, read_now=evidence.identity_read_now)
        name = ContainerName(*pod_name, container) if pod_name else None
        if not evidence.list_current:
            is_gone = self._still_suspected(pod, leaf, Owner.GONE)
            self._still_suspected(pod, leaf, Owner.UNASSIGNED)
            measures = not is_gone and evidence.table.is_only(pod.pod_uid)
            return OwnerDecision(Owner.UNKNOWN, name, measures=measures, unresolved=not measures)
        standing = evidence.table.standing(pod.pod_uid, evidence.last_names.get(pod.pod_uid))
        if standing is PodUidState.GONE:
            # Judged by older files it may be a pod that has just come, and one of the holders.
            return OwnerDecision(
                self._accuse(pod, leaf, Owner.GONE), name, unresolved=not evidence.can_report_unassigned
            )
        if standing is PodUidState.UNKNOWN or name is None:
            return OwnerDecision(Owner.UNKNOWN, name, unresolved=True)
        if self._holds(pod.pod_uid, name, leaf):
            owner = Owner.ASSIGNED
        elif self._unsettled(pod.pod_uid, name) or self._untold(name):
            owner = Owner.UNKNOWN
        else:
            owner = self._accuse(pod, leaf, Owner.UNASSIGNED)
        return OwnerDecision(owner, name, measures=True)

    def _accuse(self, pod: PodCgroup, leaf: Uuid, verdict: Owner) -> Owner:
        if not self._evidence.can_report_unassigned:
            self._still_suspected(pod, leaf, verdict)
            return Owner.UNKNOWN
        suspicion = PendingOwner(*pod, leaf, verdict)
        self._suspicions.add(suspicion)
        return verdict if suspicion in self._evidence.settled else Owner.UNKNOWN

    def _still_suspected(self, pod: PodCgroup, leaf: Uuid, verdict: Owner) -> bool:
        """Keep a suspicion as it was while its process is still there and nothing could be looked at anew."""
        suspicion = PendingOwner(*pod, leaf, verdict)
        suspected = suspicion in self._evidence.suspected
        if suspected:
            self._suspicions.add(suspicion)
        return suspected

    def _holds(self, uid: PodUid, name: ContainerName, leaf: Uuid) -> bool:
        """Holders hold; a container that only the checkpoint knows does too; one not known has what its pod has."""
        pod = name.pod_name
        held = self._held.get(leaf, set())
        stand_ins = self._evidence.allocation.stand_ins
        if name.container:
            return name in held or self._stands_in(stand_ins.get((uid, name.container)), leaf)
        if any(holder.pod_name == pod for holder in held):
            return True
        return any(self._stands_in(one, leaf) for (other, _), one in stand_ins.items() if other == uid)

    def _stands_in(self, one: InitContainerAllocation | None, leaf: Uuid) -> bool:
        leaves_of = self._evidence.inventory.leaves_of
        return one is not None and any(leaf in leaves_of(device) for device in one.devices)

    def _unsettled(self, uid: PodUid, name: ContainerName) -> bool:
        """Whether the container, or one of the pod's if it is not known, has slots that are on no device."""
        allocation = self._evidence.allocation
        if name.container:
            stand_in = allocation.stand_ins.get((uid, name.container))
            return name in allocation.unsettled or (stand_in is not None and not stand_in.settled)
        if any(other == uid and not one.settled for (other, _), one in allocation.stand_ins.items()):
            return True
        return any(other.pod_name == name.pod_name for other in allocation.unsettled)

    def _untold(self, name: ContainerName) -> bool:
        """Whether it may be an init container of which nobody tells what it was given.

        The List leaves those out, and ephemeral ones, which are given nothing. What plugins gave is in the checkpoint;
        whose a claim is stands nowhere, but seldom is it an init container's alone.
        """
        table = self._evidence.table
        if not name.container or name in table.containers:
            return False
        return table.checkpoint is None or name.pod_name in table.claimants


def _held_devices(allocation: Allocation, inventory: Inventory) -> dict[Uuid, set[ContainerName]]:
    """Holders by leaf. Whoever holds a partitioned GPU holds all of its leaves."""
    held: dict[Uuid, set[ContainerName]] = {}
    for uuid, names in allocation.holders.items():
        for leaf in inventory.leaves_of(uuid):
            held.setdefault(leaf, set()).update(names)
    return held
