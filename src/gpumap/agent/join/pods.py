"""Which UID, which name and which containers a pod has: the List joined with what the kubelet writes down locally.

The List has names but no UIDs, a cgroup path has a UID but no name. The device checkpoint, DRA's state and the log
directories tie them, or the kubelet's Pods API does, which knows; where a doubt is left, nothing is tied: a wrong name
is worse than none.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from gpumap.agent.join.rows import Rows
from gpumap.model.observations import (
    Checkpoint,
    CheckpointEntry,
    ClaimPods,
    ContainerLink,
    ContainerName,
    ListedPod,
    LogTree,
    PodIdentity,
    PodLogs,
    PodName,
    PodUid,
    ReportedPod,
)

_CONTAINER_ID_DIGITS = 64


class PodUidState(enum.Enum):
    """What can be said of a pod UID against a List."""

    LIVE = "live"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PodTable:
    """The join of one List with one identity reading; the first five fields are what it was made of."""

    pods: tuple[ListedPod, ...]
    checkpoint: Checkpoint | None
    logs: PodLogs | None
    claims: tuple[ClaimPods, ...] | None
    reported: tuple[ReportedPod, ...] | None
    """Of the Pods API, while it is current."""
    rows: Rows
    """The checkpoint's."""
    listed: frozenset[PodName]
    containers: frozenset[ContainerName]
    """Those on the List."""
    claimants: frozenset[PodName]
    """Pods that a claim is told of: init containers may have it too, which the List leaves out."""
    uid_of: Mapping[PodName, PodUid]
    """Listed pods whose UID is fixed."""
    name_of: Mapping[PodUid, PodName]
    """Its inverse."""
    named: Mapping[PodUid, PodName]
    """By which name a UID was ever fixed, as long as a row, claim or directory of it stands: it can have no other."""
    unlisted: Mapping[tuple[PodUid, str], tuple[CheckpointEntry, ...]]
    """The checkpoint's rows of live pods' containers that the List leaves out: plain init containers."""
    trees: Mapping[PodUid, LogTree]
    links: Mapping[str, ContainerLink]
    reported_names: Mapping[PodUid, PodName]
    """The Pods API's word on it."""
    cut_links: tuple[ContainerLink, ...]
    """Links whose container id lost its tail to a long name."""
    standing_uids: frozenset[PodUid]
    """UIDs that a row of the checkpoint, a claim, a log directory or the Pods API still stands for."""
    may_be_short: bool
    """Whether the List may be a kubelet's that has not heard from its API server yet: only static pods are on it."""
    logs_tell: bool
    """Whether a missing log tree says that its pod is gone: not if the logs are kept elsewhere."""

    def is_of(self, identity: PodIdentity | None) -> bool:
        """Whether it was made of this reading: sources give the very same object while nothing changed."""
        return (
            self.checkpoint is (identity.checkpoint if identity else None)
            and self.logs is (identity.logs if identity else None)
            and self.claims is (identity.dra.claims if identity else None)
            and self.reported is (identity.pods if identity else None)
        )

    def name(self, uid: PodUid) -> PodName | None:
        """Name a pod: as the List has it, else as the Pods API or its log directory has it."""
        tree = self.trees.get(uid)
        name = self.name_of.get(uid) or self.reported_names.get(uid)
        return name or (PodName(tree.namespace, tree.pod) if tree else None)

    def is_only(self, uid: PodUid) -> bool:
        """Whether a UID is the only one that its name can mean: the fixed one, or the only one that the Pods API or
        the log trees have for it."""
        if uid in self.name_of:
            return True
        name = self.name(uid)
        reported = {other for other, of in self.reported_names.items() if of == name}
        trees = {other for other, tree in self.trees.items() if (tree.namespace, tree.pod) == name}
        # Where both name UIDs and agree on none, one of them is late.
        meant = reported & trees if reported and trees else reported | trees
        return name not in self.uid_of and len(reported) <= 1 and meant == {uid}

    def container(self, uid: PodUid, container_id: str, *, read_now: bool) -> str:
        """Name a container by its id; empty where nothing ties them. `read_now`: the trees are of this collection."""
        link = self.links.get(container_id)
        if link is None and container_id:
            link = next((cut for cut in self.cut_links if container_id.startswith(cut.container_id)), None)
        if link is not None and link.pod_uid == uid:
            return link.name.container
        tree = self.trees.get(uid)
        # The directory is made before its container starts: where there is one, no other container has run.
        is_sole = read_now and tree is not None and len(tree.containers) == 1 and container_id
        return tree.containers[0] if tree and is_sole else ""

    def standing(self, uid: PodUid, last_name: PodName | None) -> PodUidState:
        """Say whether the pod of a running process is still the kubelet's (contract §9, "gone").

        `last_name` is the name it was last known by, for pods whose directories are gone.
        """
        if self.logs_tell and uid not in self.trees and uid not in self.reported_names:
            return PodUidState.GONE  # the directory is made before the first process, and removed after the pod
        if uid in self.name_of:
            return PodUidState.LIVE
        name = self.name(uid) or last_name
        if name is None:
            return PodUidState.UNKNOWN
        if name not in self.listed:
            return PodUidState.UNKNOWN if self.may_be_short and uid in self.standing_uids else PodUidState.GONE
        # Listed under this name with another UID; without a fixed UID there are two trees of that name, or none.
        return PodUidState.GONE if name in self.uid_of else PodUidState.UNKNOWN


def tabulate(pods: tuple[ListedPod, ...], identity: PodIdentity | None, before: PodTable | None) -> PodTable:
    """Join a List with what the identity files say. A UID that ever had another name is not of this one."""
    checkpoint = identity.checkpoint if identity else None
    logs = identity.logs if identity else None
    claims = identity.dra.claims if identity else None
    reported = identity.pods if identity else None
    reported_names = {pod.pod_uid: PodName(pod.namespace, pod.pod) for pod in reported or ()}
    trees = {tree.pod_uid: tree for tree in logs.trees} if logs else {}
    listed = frozenset(pod.pod_name for pod in pods)
    containers = frozenset(
        ContainerName(pod.namespace, pod.name, container.name) for pod in pods for container in pod.containers
    )
    named = before.named if before else {}
    rows = Rows(checkpoint)
    uid_of = _fix_uids(pods, UidIndex(rows if checkpoint else None, claims, trees, reported_names, named))
    name_of = {uid: name for name, uid in uid_of.items()}
    standing = {entry.pod_uid for entry in checkpoint.entries} if checkpoint else set()
    standing |= trees.keys() | reported_names.keys()
    standing |= {uid for claim in claims or () for uid in claim.pod_uids}
    listed_trees = {uid for uid, tree in trees.items() if PodName(tree.namespace, tree.pod) in listed}
    tree_names = {PodName(tree.namespace, tree.pod) for tree in trees.values()}
    links = (*(logs.links if logs else ()), *_reported_links(reported or ()))
    return PodTable(
        pods=pods,
        checkpoint=checkpoint,
        logs=logs,
        claims=claims,
        reported=reported,
        rows=rows,
        listed=listed,
        containers=containers,
        claimants=_claimants(pods, claims or (), name_of),
        uid_of=uid_of,
        name_of=name_of,
        named={uid: name for uid, name in {**named, **name_of}.items() if uid in standing},
        unlisted=_unlisted(containers, checkpoint, name_of),
        trees=trees,
        links={link.container_id: link for link in links if len(link.container_id) == _CONTAINER_ID_DIGITS},
        reported_names=reported_names,
        cut_links=tuple(link for link in links if len(link.container_id) < _CONTAINER_ID_DIGITS),
        standing_uids=frozenset(standing),
        may_be_short=not any(_is_of_api(uid) for uid in (*name_of, *listed_trees)),
        logs_tell=logs is not None and (not listed or not listed.isdisjoint(tree_names)),
    )


def _reported_links(pods: Iterable[ReportedPod]) -> Iterable[ContainerLink]:
    """What container ids the Pods API ties to names, as links do."""
    return (
        ContainerLink(container.container_id, pod.pod_uid, ContainerName(pod.namespace, pod.pod, container.name))
        for pod in pods
        for container in pod.containers
        if len(container.container_id) == _CONTAINER_ID_DIGITS
    )


def _is_of_api(uid: PodUid) -> bool:
    """Static pods have a hash without dashes."""
    return "-" in uid


def _claimants(
    pods: Iterable[ListedPod], claims: Iterable[ClaimPods], name_of: Mapping[PodUid, PodName]
) -> frozenset[PodName]:
    listed = {pod.pod_name for pod in pods if any(container.claims for container in pod.containers)}
    return frozenset(listed | {name_of[uid] for claim in claims for uid in claim.pod_uids if uid in name_of})


def _unlisted(
    listed: Container[ContainerName], checkpoint: Checkpoint | None, name_of: Mapping[PodUid, PodName]
) -> dict[tuple[PodUid, str], tuple[CheckpointEntry, ...]]:
    rows: dict[tuple[PodUid, str], tuple[CheckpointEntry, ...]] = {}
    for entry in checkpoint.entries if checkpoint else ():
        name = name_of.get(entry.pod_uid)
        if name is not None and ContainerName(*name, entry.container) not in listed:
            key = (entry.pod_uid, entry.container)
            rows[key] = (*rows.get(key, ()), entry)
    return rows


def _fix_uids(pods: tuple[ListedPod, ...], clues: UidIndex) -> dict[PodName, PodUid]:
    """Tie each listed pod to its UID, where one and only one fits."""
    # Kubelets before 1.34 may list an ended pod beside its successor of the same name.
    listed: dict[PodName, list[ListedPod]] = {}
    for pod in pods:
        listed.setdefault(pod.pod_name, []).append(pod)
    candidates = {name: clues.candidates(name, namesakes) for name, namesakes in listed.items()}
    found = {name: next(iter(uids)) for name, uids in candidates.items() if len(uids) == 1}
    taken = Counter(found.values())
    return {name: uid for name, uid in found.items() if taken[uid] == 1}


class UidIndex:
    """What is written down of the pods' UIDs, laid out to be looked up in."""

    def __init__(
        self,
        rows: Rows | None,
        claims: tuple[ClaimPods, ...] | None,
        trees: Mapping[PodUid, LogTree],
        reported: Mapping[PodUid, PodName],
        known: Mapping[PodUid, PodName],
    ) -> None:
        self._rows = rows
        self._claims = None if claims is None else {(one.namespace, one.claim): set(one.pod_uids) for one in claims}
        self._trees = trees
        self._in_logs: dict[PodName, set[PodUid]] = {}
        for tree in trees.values():
            self._in_logs.setdefault(PodName(tree.namespace, tree.pod), set()).add(tree.pod_uid)
        self._reported: dict[PodName, set[PodUid]] = {}
        for uid, name in reported.items():
            self._reported.setdefault(name, set()).add(uid)
        self._known = {**known, **reported}

    def candidates(self, name: PodName, namesakes: Iterable[ListedPod]) -> set[PodUid]:
        """The UIDs that a listed name may have. The kubelet's own word counts, but it may be late, and then of a
        predecessor: where files name UIDs, it only chooses among them."""
        reported, in_files = self._reported.get(name), self._in_files(name, namesakes)
        if reported is None or in_files is None:
            return in_files or reported or set()
        return in_files & reported

    def _in_files(self, name: PodName, namesakes: Iterable[ListedPod]) -> set[PodUid] | None:
        """Those that the files tell of; `None` where they are silent."""
        in_logs = self._in_logs.get(name, set())
        written = [uids for uids in map(self._written, namesakes) if uids is not None]
        if not written:
            return in_logs or None
        # What was given is written down: without a row, a directory of this name is a predecessor's. A row of an
        # ended pod stays until the next write, and its card may have been handed on meanwhile; a claim that is shared
        # is prepared for other pods too.
        fitting = {
            uid
            for uid in set[PodUid]().union(*written)
            if (uid not in self._trees or uid in in_logs) and self._known.get(uid, name) == name
        }
        return (fitting & in_logs) or fitting

    def _written(self, pod: ListedPod) -> set[PodUid] | None:
        """The UIDs that all that this pod was given is written down for; `None` where none of it would be."""
        clues = [clue for clue in (self._by_rows(pod), self._by_claims(pod)) if clue is not None]
        return set.intersection(*clues) if clues else None

    def _by_rows(self, pod: ListedPod) -> set[PodUid] | None:
        return _uids_by_rows(pod, self._rows) if self._rows is not None and _has_devices(pod) else None

    def _by_claims(self, pod: ListedPod) -> set[PodUid] | None:
        """A claim is written down before the pod's first container starts, and until its last has ended."""
        claims = {(one.claim_namespace, one.claim) for container in pod.containers for one in container.claims}
        named = [claim for claim in claims if claim[1]]
        if self._claims is None or not named:
            return None
        return set.intersection(*(self._claims.get(claim, set()) for claim in named))


def _has_devices(pod: ListedPod) -> bool:
    return any(devices.ids for container in pod.containers for devices in container.devices)


def _uids_by_rows(pod: ListedPod, rows: Rows) -> set[PodUid]:
    """UIDs whose rows hold all that this pod is listed with."""
    found = [
        {row.pod_uid for row in rows.of(container.name, devices)}
        for container in pod.containers
        for devices in container.devices
        if devices.ids
    ]
    return set.intersection(*found) if found else set()
