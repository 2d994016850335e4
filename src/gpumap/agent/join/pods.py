"""Which UID, name and containers each pod has: the List, joined with the kubelet's local files.

The List has names but no UIDs. A cgroup path has a UID but no name. The device checkpoint, the DRA state, the log
directories and the kubelet's Pods API connect them. If more than one UID is possible, gpumap assigns none: a wrong name
is worse than none.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpumap.model.grouping import grouped
from gpumap.model.observations import (
    Checkpoint,
    CheckpointEntry,
    ClaimPods,
    ContainerLink,
    DeviceId,
    ListedPod,
    LogTree,
    PodIdentity,
    ResourceDevices,
)
from gpumap.model.terms import ContainerName, PodName, PodUid

_CONTAINER_ID_DIGITS = 64


class PodUidState(enum.Enum):
    """Whether the pod of a UID still exists, as far as a List shows it."""

    LIVE = "live"
    GONE = "gone"
    UNKNOWN = "unknown"


RowsById = Mapping[tuple[str, str, DeviceId], Sequence[CheckpointEntry]]
"""The rows of the device checkpoint by container, resource and device id. They have UIDs, which the List lacks."""


def matching_rows(rows: RowsById, container: str, devices: ResourceDevices) -> list[CheckpointEntry]:
    """Return the rows that have all devices of a listed container. `devices` has at least one id.

    A row may have more: kubelets 1.20 to 1.22 leave some devices out of the List (kubernetes/kubernetes#103289).
    """
    with_first = rows.get((container, devices.resource, devices.ids[0]), ())
    return [row for row in with_first if row.ids.issuperset(devices.ids)]


@dataclass(frozen=True, slots=True, eq=False)
class PodTable:
    """The join of one List with one identity reading. The first four fields are its inputs. While they are the same,
    it stays the same object, which is all that is compared."""

    pods: tuple[ListedPod, ...]
    kept_uids: Mapping[PodName, PodUid]
    """Those of `pods` that the kubelet has not listed since its restart, with their UIDs."""
    read_together: bool
    """List and identity reading are of one collection."""
    files: PodIdentity
    """The identity files and the Pods API, if it is current."""
    rows: RowsById
    listed: frozenset[PodName]
    containers: frozenset[ContainerName]
    """Containers on the List."""
    claimants: frozenset[PodName]
    """Pods with a claim. Their init containers may use it too; the List does not contain init containers."""
    uid_of: Mapping[PodName, PodUid]
    """Listed pods with exactly one possible UID."""
    listed_now: frozenset[PodName]
    """Those of `uid_of` that the List of now has: not the pods that the grace period keeps."""
    confirmed_by_files: frozenset[PodName]
    """Those of `listed_now` with a UID from the checkpoint or a claim."""
    name_of: Mapping[PodUid, PodName]
    """Inverse of `uid_of`."""
    last_names: Mapping[PodUid, PodName]
    """Names that pods with processes had before, from any source. A name never changes."""
    fixed_names: Mapping[PodUid, PodName]
    """Every name that `name_of` ever had, while a row, claim or directory of the UID exists."""
    unlisted: Mapping[tuple[PodUid, str], Sequence[CheckpointEntry]]
    """Rows of containers that the List does not contain, by pod and container: init containers of live pods."""
    trees: Mapping[PodUid, LogTree]
    """For a pod without a log tree, a scheduler's file gives one without containers."""
    uids_of_ended_pods: frozenset[PodUid]
    """UIDs with a log tree whose pod has ended, or was re-created under its name."""
    links: Mapping[str, ContainerLink]
    reported_names: Mapping[PodUid, PodName]
    """Names that the Pods API reports."""
    reports_all: bool
    """The Pods API reports the name of every listed pod. If not, its answer is older than the List: kubelets drop
    events. A re-created pod keeps its name, so the answer may still lack a UID that is newer."""
    cut_links: tuple[ContainerLink, ...]
    """Links with a container id that is cut because the name is long."""
    known_uids: frozenset[PodUid]
    """UIDs in the checkpoint, the claims, the log directories or the Pods API."""
    may_be_incomplete: bool
    """The List has only static pods: the kubelet may not have its other pods from the API server yet."""
    only_static: bool
    """Every listed pod has the name of a static pod, or there is none."""

    def lacks_pods(self, *, restarted: bool) -> bool:
        """Whether the List has no pod of the API server, and there may be some: a file has one, or the kubelet has
        `restarted`."""
        has_some = any("-" in uid for uid in self.known_uids) or (restarted and self.only_static)
        return self.may_be_incomplete and has_some

    def is_made_from(self, files: PodIdentity) -> bool:
        """Whether this reading made the table. A source returns the same object while nothing changed."""
        return (
            self.files.checkpoint is files.checkpoint
            and self.files.logs is files.logs
            and self.files.dra.claims is files.dra.claims
            and self.files.pods is files.pods
            and self.files.sharing.links == files.sharing.links
        )

    def name(self, uid: PodUid) -> PodName | None:
        """Return the name of a pod by the List; otherwise by the Pods API or its log directory; else the last one."""
        tree = self.trees.get(uid)
        name = self.name_of.get(uid) or self.reported_names.get(uid)
        return name or (tree.pod_name if tree else self.last_names.get(uid))

    def is_only(self, uid: PodUid) -> bool:
        """Whether no other UID is possible for the name of this UID."""
        if uid in self.name_of:
            return True
        name = self.name(uid)
        reported = {
            reported_uid for reported_uid, reported_name in self.reported_names.items() if reported_name == name
        }
        trees = {tree_uid for tree_uid, tree in self.trees.items() if tree.pod_name == name}
        # If both have UIDs and none in common, one of them is out of date.
        possible = reported & trees if reported and trees else reported | trees
        return name not in self.uid_of and len(reported) <= 1 and possible == {uid}

    def container(self, uid: PodUid, container_id: str, *, read_now: bool) -> str:
        """Return the name of a container; empty if unknown. `read_now`: the log directories are of this collection."""
        link = self._link(container_id)
        if link is not None and link.pod_uid == uid and link.name.container:
            return link.name.container
        tree, name = self.trees.get(uid), self.name(uid)
        if not (read_now and container_id and tree and name and len(tree.containers) == 1):
            return ""
        # The kubelet makes the directory before the container starts. With one directory, no other container has run,
        # unless a disk cleaner removed its directory: so the List must have no other container either.
        listed = {container_name.container for container_name in self.containers if container_name.pod_name == name}
        return tree.containers[0] if listed == set(tree.containers) else ""

    def pod_of(self, container_id: str) -> PodUid | None:
        """Return the pod of a container that is in no pod's cgroup."""
        link = self._link(container_id)
        return link.pod_uid if link is not None else None

    def _link(self, container_id: str) -> ContainerLink | None:
        if not container_id:
            return None
        known = self.links.get(container_id)
        if known is not None and known.name.container:
            return known
        return next((link for link in self.cut_links if container_id.startswith(link.container_id)), known)

    def confirmed(self, *, pods_current: bool) -> frozenset[PodName]:
        """Return the listed pods with a certain UID. A log tree is weaker evidence than the other sources.

        `pods_current`: the answer of the Pods API is new enough for the process in question.
        """
        return self.listed_now if pods_current and self.reports_all else self.confirmed_by_files

    def state(self, uid: PodUid, *, pods_current: bool) -> PodUidState:
        """Return whether the kubelet still has the pod of a running process (owner `gone`, attribution.md).

        `pods_current`: gpumap knew the process before it asked the Pods API, so the answer has the UID if the pod
        exists. No trace that is only missing makes a pod gone: a disk cleaner may remove log directories of live pods.
        """
        if uid in self.name_of:
            return PodUidState.LIVE
        if pods_current and self.reports_all and uid not in self.known_uids:
            return PodUidState.GONE  # the Pods API has every pod, and no file has this one
        name = self.name(uid)
        if name is None:
            return PodUidState.UNKNOWN
        if name not in self.listed:
            return PodUidState.UNKNOWN if self.may_be_incomplete else PodUidState.GONE
        # The name is listed. Either it has another UID, or none is certain: it has two log directories, or none.
        return PodUidState.GONE if name in self.confirmed(pods_current=pods_current) else PodUidState.UNKNOWN


NOTHING_READ = PodIdentity(checkpoint=None, logs=None)
_NONE_KEPT: Mapping[PodName, PodUid] = {}
_NO_NAMES: Mapping[PodUid, PodName] = {}


def tabulate(
    pods: tuple[ListedPod, ...],
    files: PodIdentity,
    previous: PodTable | None,
    *,
    kept_uids: Mapping[PodName, PodUid] = _NONE_KEPT,
    read_together: bool = True,
    node_name: str = "",
    last_names: Mapping[PodUid, PodName] = _NO_NAMES,
) -> PodTable:
    """Join a List with the identity files. A UID that ever had another name does not get a listed name.

    If they are of different collections (not `read_together`), no UID is assigned that the last table did not have.
    Returns `previous` itself while neither the List nor the files change.
    """
    is_same = previous and previous.pods is pods and previous.kept_uids == kept_uids and previous.is_made_from(files)
    if previous and is_same and (previous.read_together or not read_together):
        return previous
    entries = files.checkpoint.entries if files.checkpoint else ()
    rows = grouped(((entry.container, entry.resource, id_), entry) for entry in entries for id_ in entry.ids)
    fixed_before = previous.fixed_names if previous else {}
    names_before = {**last_names, **fixed_before}
    trees = _trees(files, names_before)
    reported_names = {pod.pod_uid: pod.pod_name for pod in files.pods or ()}
    uids_of_ended_pods = _superseded(pods, trees if files.logs else None, previous) if previous else frozenset()
    index = UidIndex(
        rows if files.checkpoint else None, files.dra.claims, trees, reported_names, names_before, uids_of_ended_pods
    )
    uid_of = _fix_uids(pods, index)
    if not read_together:
        uid_of = _still_valid(uid_of, pods, previous)
    uid_of |= {name: uid for name, uid in kept_uids.items() if uid not in uid_of.values()}
    name_of = {uid: name for name, uid in uid_of.items()}
    listed_now = frozenset(uid_of.keys() - kept_uids.keys())
    known_uids = _known_uids(files)
    listed = frozenset(pod.pod_name for pod in pods)
    containers = frozenset(ContainerName(*pod.pod_name, container.name) for pod in pods for container in pod.containers)
    reports_all = files.pods is not None and listed <= frozenset(reported_names.values())
    links = _links(files)
    return PodTable(
        pods=pods,
        kept_uids=kept_uids,
        read_together=read_together,
        files=files,
        rows=rows,
        listed=listed,
        containers=containers,
        claimants=frozenset(pod.pod_name for pod in pods if any(container.claims for container in pod.containers))
        | {name_of[uid] for claim in files.dra.claims or () for uid in claim.pod_uids if uid in name_of},
        uid_of=uid_of,
        listed_now=listed_now,
        confirmed_by_files=frozenset(
            pod.pod_name for pod in pods if pod.pod_name in listed_now and index.uids_with_devices(pod) is not None
        ),
        name_of=name_of,
        last_names=last_names,
        fixed_names={uid: name for uid, name in {**fixed_before, **name_of}.items() if uid in known_uids},
        unlisted=_unlisted(containers, files.checkpoint, name_of),
        trees=trees,
        uids_of_ended_pods=uids_of_ended_pods,
        links={link.container_id: link for link in links if len(link.container_id) == _CONTAINER_ID_DIGITS},
        reported_names=reported_names,
        reports_all=reports_all,
        cut_links=tuple(link for link in links if len(link.container_id) < _CONTAINER_ID_DIGITS),
        known_uids=known_uids,
        may_be_incomplete=not _has_pod_of_api_server(uid_of, trees, listed - kept_uids.keys(), node_name),
        only_static=all(_may_be_static(name, node_name) for name in listed - kept_uids.keys()),
    )


def _trees(files: PodIdentity, fixed_names: Mapping[PodUid, PodName]) -> dict[PodUid, LogTree]:
    """Return the log trees, and a tree without containers for a pod that only a scheduler's file names.

    Such a file may remain after its container, and a log tree is newer: it counts alone for its name. A UID has one
    name. If it has trees of several names, one of them lies: only the tree of its fixed name counts.
    """
    log_trees = files.logs.trees if files.logs else ()
    names = grouped((tree.pod_uid, tree.pod_name) for tree in log_trees)
    trees = {
        tree.pod_uid: tree
        for tree in log_trees
        if len(set(names[tree.pod_uid])) == 1 or fixed_names.get(tree.pod_uid) == tree.pod_name
    }
    with_tree = {tree.pod_name for tree in trees.values()}
    noted = (LogTree(link.pod_uid, link.name.namespace, link.name.pod, ()) for link in files.sharing.links)
    return {**trees, **{tree.pod_uid: tree for tree in noted if tree.pod_name not in with_tree}}


def _known_uids(files: PodIdentity) -> frozenset[PodUid]:
    """Return the UIDs in the checkpoint, the claims, the log directories and the Pods API."""
    return frozenset(
        (
            *(entry.pod_uid for entry in (files.checkpoint.entries if files.checkpoint else ())),
            *(uid for claim in files.dra.claims or () for uid in claim.pod_uids),
            *(tree.pod_uid for tree in (files.logs.trees if files.logs else ())),
            *(pod.pod_uid for pod in files.pods or ()),
            *(link.pod_uid for link in files.sharing.links),
        )
    )


def _links(files: PodIdentity) -> tuple[ContainerLink, ...]:
    """Return the links of a scheduler's files, which have no names, of the log directory, and those that follow from
    the container ids of the Pods API."""
    reported = (
        ContainerLink(container.container_id, pod.pod_uid, ContainerName(pod.namespace, pod.pod, container.name))
        for pod in files.pods or ()
        for container in pod.containers
        if len(container.container_id) == _CONTAINER_ID_DIGITS
    )
    return (*files.sharing.links, *(files.logs.links if files.logs else ()), *reported)


def _superseded(
    pods: Iterable[ListedPod], trees: Mapping[PodUid, LogTree] | None, previous: PodTable
) -> frozenset[PodUid]:
    """Return the UIDs whose log tree is that of an ended pod.

    One of these holds: the List no longer had its name, its name is listed with other devices, or its name got another
    tree later. The devices of a pod never change. The kubelet makes the tree of a pod when it starts the pod, and
    keeps that of a predecessor for up to 35 s. `trees` is `None` if the log directories are unreadable.
    """
    if trees is None:
        return previous.uids_of_ended_pods
    listed, listed_before = _group_by_name(pods), _group_by_name(previous.pods)
    changed = {name for name in listed.keys() & listed_before.keys() if listed[name] != listed_before[name]}
    if previous.files.logs:
        changed |= {tree.pod_name for uid, tree in trees.items() if uid not in previous.trees}
    ended = {
        uid
        for uid, name in previous.fixed_names.items()
        if (name in changed and uid in previous.trees) or not (name in previous.listed or previous.may_be_incomplete)
    }
    return frozenset((ended | previous.uids_of_ended_pods) & trees.keys())


def _group_by_name(pods: Iterable[ListedPod]) -> dict[PodName, list[ListedPod]]:
    """Kubelets before 1.34 may list an ended pod together with its successor of the same name."""
    return grouped((pod.pod_name, pod) for pod in pods)


def _still_valid(
    uid_of: Mapping[PodName, PodUid], pods: Iterable[ListedPod], previous: PodTable | None
) -> dict[PodName, PodUid]:
    """Return the UIDs that a List and files of different collections can still give: those that the last table had.

    A pod of the newer one that is new or changed may have been re-created, or have the devices of an ended pod.
    """
    if previous is None:
        return {}
    unchanged = {pod.pod_name for pod in set(pods).intersection(previous.pods)}
    return {name: uid for name, uid in uid_of.items() if name in unchanged and previous.uid_of.get(name) == uid}


def _has_pod_of_api_server(
    uid_of: Mapping[PodName, PodUid], trees: Mapping[PodUid, LogTree], listed: Iterable[PodName], node_name: str
) -> bool:
    """Whether a listed pod is not static. The UID of a static pod is a hash without dashes, or what its manifest says.

    A static pod may have the name of an ended pod that still has its log tree.
    """
    static = {tree.pod_name for uid, tree in trees.items() if "-" not in uid}
    names = {name for name in listed if not _may_be_static(name, node_name)}
    listed_uids = (
        *(uid for name, uid in uid_of.items() if name in names),
        *(uid for uid, tree in trees.items() if tree.pod_name in names - static),
    )
    return any("-" in uid for uid in listed_uids)


def _may_be_static(name: PodName, node_name: str) -> bool:
    """The kubelet adds the name of its node to the name of a static pod (pkg/kubelet/config/common.go)."""
    return name.pod.endswith(f"-{node_name.lower()}")


def _unlisted(
    listed: Container[ContainerName], checkpoint: Checkpoint | None, name_of: Mapping[PodUid, PodName]
) -> dict[tuple[PodUid, str], list[CheckpointEntry]]:
    rows = checkpoint.entries if checkpoint else ()
    with_name = ((row, name) for row in rows if (name := name_of.get(row.pod_uid)) is not None)
    return grouped(
        ((row.pod_uid, row.container), row)
        for row, name in with_name
        if ContainerName(*name, row.container) not in listed
    )


def _fix_uids(pods: tuple[ListedPod, ...], index: UidIndex) -> dict[PodName, PodUid]:
    """Assign a UID to each listed pod that has exactly one possible UID."""
    candidates = {name: index.candidates(name, namesakes) for name, namesakes in _group_by_name(pods).items()}
    single_uids = {name: next(iter(uids)) for name, uids in candidates.items() if len(uids) == 1}
    uses = Counter(single_uids.values())
    return {name: uid for name, uid in single_uids.items() if uses[uid] == 1}


class UidIndex:
    """The UIDs in files and in the Pods API, by the names of pods."""

    def __init__(
        self,
        rows: RowsById | None,
        claims: tuple[ClaimPods, ...] | None,
        trees: Mapping[PodUid, LogTree],
        reported: Mapping[PodUid, PodName],
        known: Mapping[PodUid, PodName],
        uids_of_ended_pods: frozenset[PodUid],
    ) -> None:
        self._rows = rows
        self._claims = (
            None if claims is None else {(claim.namespace, claim.claim): set(claim.pod_uids) for claim in claims}
        )
        self._trees = trees
        self._superseded = uids_of_ended_pods
        self._in_logs = grouped((tree.pod_name, tree.pod_uid) for tree in trees.values())
        self._reported = grouped((name, uid) for uid, name in reported.items())
        self._known = {**known, **reported}

    def candidates(self, name: PodName, namesakes: Iterable[ListedPod]) -> set[PodUid]:
        """Return the possible UIDs of a listed name.

        The Pods API may be late and report a predecessor. If files have UIDs, it only chooses among them.
        """
        reported, in_files = set(self._reported.get(name, ())), self._uids_in_files(name, namesakes)
        if not reported or in_files is None:
            return in_files or reported
        return in_files & reported

    def _uids_in_files(self, name: PodName, namesakes: Iterable[ListedPod]) -> set[PodUid] | None:
        """Return the possible UIDs by the files; `None` if the files have none for this name."""
        in_logs = set(self._in_logs.get(name, ()))
        current = in_logs - self._superseded
        of_namesakes = [uids for uids in map(self.uids_with_devices, namesakes) if uids is not None]
        if not of_namesakes:
            return current or None
        # Assigned devices are always in a file: a directory without a row belongs to a predecessor. A row of an ended
        # pod stays until the next write, and its device may have another owner by then. A shared claim is prepared
        # for other pods too.
        fitting = {
            uid
            for uid in set[PodUid]().union(*of_namesakes)
            if (uid not in self._trees or uid in in_logs) and self._known.get(uid, name) == name
        }
        # If they have no UID in common, the pod has just started, or the file is an old copy.
        return (fitting & in_logs) or (fitting | current if fitting else fitting)

    def uids_with_devices(self, pod: ListedPod) -> set[PodUid] | None:
        """Return the UIDs with all of this pod's devices and claims in files; `None` if no file would have them.

        Log trees only choose among these UIDs.
        """
        candidates = [uids for uids in (self._uids_of_rows(pod), self._uids_of_claims(pod)) if uids is not None]
        return set.intersection(*candidates) if candidates else None

    def _uids_of_rows(self, pod: ListedPod) -> set[PodUid] | None:
        """Return the UIDs with rows that have all listed devices of this pod."""
        listed = [
            (container.name, devices) for container in pod.containers for devices in container.devices if devices.ids
        ]
        if self._rows is None or not listed:
            return None
        return set.intersection(*({row.pod_uid for row in matching_rows(self._rows, *row_key)} for row_key in listed))

    def _uids_of_claims(self, pod: ListedPod) -> set[PodUid] | None:
        """A claim is in the file from before the first container starts until the last one has ended."""
        claims = {(claim.claim_namespace, claim.claim) for container in pod.containers for claim in container.claims}
        named = [claim for claim in claims if claim[1]]
        if self._claims is None or not named:
            return None
        return set.intersection(*(self._claims.get(claim, set()) for claim in named))
