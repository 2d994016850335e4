"""Which List counts: the newest that may still be served, with the pods that a restarted kubelet has yet to name.

A kubelet that comes back first lists static pods only, or nothing, until it has heard from the API server. For a while
a pod that is missing, but whose log directory or processes still stand, keeps what it held.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpumap.agent.join.memory import Memory
from gpumap.model.observations import (
    Failed,
    KubeletAnswer,
    ListedPod,
    Observations,
    Observed,
    PodIdentity,
    ProcTable,
    ResourceDevices,
)

GRACE_SECONDS = 60.0
REASONS_OF_RESTART = frozenset({"socket_missing", "connection_refused", "unavailable"})
"""A kubelet that failed so was away; one that was slow or busy was not."""


@dataclass(frozen=True, slots=True)
class Listing:
    """`read_now`: of this collection. `current`: young enough to be served."""

    pods: tuple[ListedPod, ...]
    allocatable: tuple[ResourceDevices, ...] | None
    read_now: bool
    current: bool
    answer: Observed[KubeletAnswer] | None
    back_at: float | None
    away: bool
    awaited: tuple[ListedPod, ...]
    """Pods from before a restart that the kubelet has not listed since."""


def take_list(
    memory: Memory,
    observations: Observations,
    identity: PodIdentity | None,
    procs: ProcTable,
    stale_after_seconds: float,
) -> Listing:
    """Choose between the List just read and the one remembered, and apply the grace after a restart."""
    now = observations.finished.monotonic
    answer = observations.kubelet
    if isinstance(answer, Failed):
        before = memory.kubelet
        current = before is not None and now - before.at.monotonic < stale_after_seconds
        return Listing(
            pods=memory.pods,
            allocatable=before.value.allocatable if before and current else None,
            read_now=False,
            current=current,
            answer=before,
            back_at=memory.kubelet_back_at,
            awaited=memory.awaited,
            away=memory.kubelet_away or answer.complaints[-1].reason in REASONS_OF_RESTART,
        )
    back_at, awaited = memory.kubelet_back_at, memory.awaited
    if memory.kubelet is not None and (memory.kubelet_away or memory.kubelet.value.socket != answer.value.socket):
        back_at, awaited = answer.at.monotonic, memory.pods
    in_grace = back_at is not None and now - back_at < GRACE_SECONDS
    pods = answer.value.pods
    listed = {pod.pod_name for pod in pods}
    awaited = tuple(pod for pod in awaited if in_grace and pod.pod_name not in listed)
    kept = _still_standing(memory, awaited, identity, procs) if awaited else []
    return Listing(
        pods=tuple(sorted((*pods, *kept))) if kept else pods,
        allocatable=answer.value.allocatable,
        read_now=True,
        current=True,
        answer=answer,
        back_at=back_at,
        away=False,
        awaited=awaited,
    )


def _still_standing(
    memory: Memory, awaited: tuple[ListedPod, ...], identity: PodIdentity | None, procs: ProcTable
) -> list[ListedPod]:
    """Those of whom a process, or the log directory, is still there."""
    standing = {pod.pod_uid for entry in procs.entries for pod in entry.cgroup.pods}
    if identity is not None and identity.logs is not None:
        standing |= {tree.pod_uid for tree in identity.logs.trees}
    return [pod for pod in awaited if memory.pod_uids.get(pod.pod_name) in standing]
