"""Choose the List of the kubelet that counts: the newest one that gpumap may serve.

A kubelet that restarts first lists only static pods, or none, until it has its pods from the API server. For a grace
period, a missing pod keeps its devices. Two conditions apply: its log directory or one of its processes still exists,
and the kubelet did not assign one of its device ids to another pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpumap.agent.join.memory import Memory
from gpumap.agent.join.settings import JoinSettings
from gpumap.model.observations import (
    DeviceId,
    Failed,
    KubeletAnswer,
    ListedPod,
    Moment,
    Observations,
    Observed,
    PodIdentity,
    ProcTable,
    ResourceDevices,
)
from gpumap.model.terms import KUBELET_AWAY_REASONS, PodName, PodUid

RELIST_SECONDS = 60.0
"""The grace period: how long a restarted kubelet may take to list all of its pods."""


@dataclass(frozen=True, slots=True)
class ServedList:
    """`read_now`: the List is of this collection. `current`: it is young enough to serve."""

    pods: tuple[ListedPod, ...]
    allocatable: tuple[ResourceDevices, ...] | None
    read_now: bool
    current: bool
    answer: Observed[KubeletAnswer] | None
    back_at: float | None
    away: bool
    awaited: tuple[ListedPod, ...]
    """Pods from before a restart that the kubelet has not listed again."""
    kept_uids: Mapping[PodName, PodUid]
    """Those of `pods` that the grace period keeps, with the UIDs from before the restart."""


def choose_list(
    memory: Memory, observations: Observations, identity: PodIdentity | None, procs: ProcTable, settings: JoinSettings
) -> ServedList:
    """Choose between the new List and the remembered one, and apply the grace period after a restart."""
    moment = observations.finished
    answer = observations.kubelet
    if not isinstance(answer, Observed):
        return _remembered_listing(memory, answer, moment, settings)
    back_at, awaited = _awaited_pods(memory, answer, moment.monotonic)
    kept_uids = _still_present(memory, awaited, identity, procs) if awaited else {}
    pods = answer.value.pods
    return ServedList(
        pods=tuple(sorted((*pods, *(pod for pod in awaited if pod.pod_name in kept_uids)))) if kept_uids else pods,
        allocatable=answer.value.allocatable,
        read_now=True,
        current=True,
        answer=answer,
        back_at=back_at,
        away=False,
        awaited=awaited,
        kept_uids=kept_uids,
    )


def _remembered_listing(memory: Memory, failed: Failed | None, moment: Moment, settings: JoinSettings) -> ServedList:
    previous = memory.kubelet
    young = settings.if_young(previous, moment)
    return ServedList(
        pods=memory.pods,
        allocatable=young.value.allocatable if young else None,
        read_now=False,
        current=young is not None,
        answer=previous,
        back_at=memory.kubelet_back_at,
        awaited=memory.awaited,
        kept_uids=memory.pod_table.kept_uids if memory.pod_table else {},
        away=memory.kubelet_away or (failed is not None and failed.complaints[-1].reason in KUBELET_AWAY_REASONS),
    )


def _awaited_pods(
    memory: Memory, answer: Observed[KubeletAnswer], timestamp: float
) -> tuple[float | None, tuple[ListedPod, ...]]:
    """Return when the kubelet came back, and the pods that it has not listed since. After the grace period none."""
    back_at, awaited = memory.kubelet_back_at, memory.awaited
    if memory.kubelet is not None and (memory.kubelet_away or memory.kubelet.value.socket != answer.value.socket):
        back_at, awaited = answer.at.monotonic, memory.pods
    if back_at is None or timestamp - back_at >= RELIST_SECONDS:
        return back_at, ()
    listed = {pod.pod_name for pod in answer.value.pods}
    assigned = _device_ids(answer.value.pods)
    return back_at, tuple(
        pod for pod in awaited if pod.pod_name not in listed and assigned.isdisjoint(_device_ids([pod]))
    )


def _device_ids(pods: Iterable[ListedPod]) -> set[tuple[str, DeviceId]]:
    """Return the (resource, id) pairs of the pods. The kubelet assigns each to one pod only; claims may be shared."""
    return {
        (devices.resource, device_id)
        for pod in pods
        for container in pod.containers
        for devices in container.devices
        for device_id in devices.ids
    }


def _still_present(
    memory: Memory, awaited: tuple[ListedPod, ...], identity: PodIdentity | None, procs: ProcTable
) -> dict[PodName, PodUid]:
    """Return the pods that still have a process or a log directory, with their UIDs."""
    present = {pod.pod_uid for entry in procs.entries for pod in entry.cgroup.pods}
    if identity is not None and identity.logs is not None:
        present |= {tree.pod_uid for tree in identity.logs.trees}
    uids = {pod.pod_name: memory.pod_uids[pod.pod_name] for pod in awaited if pod.pod_name in memory.pod_uids}
    return {name: uid for name, uid in uids.items() if uid in present}
