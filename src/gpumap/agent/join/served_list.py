"""Choose the List of the kubelet that counts: the newest one that gpumap may serve.

A kubelet that restarts first lists only static pods, or none, until it has its pods from the API server. For a grace
period, a missing pod keeps its devices. Two conditions apply: its log directory or one of its processes still exists,
and the kubelet did not assign one of its device ids to another pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpumap.agent.join.settings import JoinSettings
from gpumap.model.observations import (
    DeviceId,
    KubeletAnswer,
    ListedPod,
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
    """`ServedList()` is the state at gpumap's start."""

    pods: tuple[ListedPod, ...] = ()
    """Of the last List, with the pods that the grace period keeps."""
    allocatable: tuple[ResourceDevices, ...] | None = None
    read_now: bool = False
    """The List is of this collection."""
    current: bool = False
    """It is young enough to serve."""
    answer: Observed[KubeletAnswer] | None = None
    back_at: float | None = None
    """Monotonic time of the first List after a restart of the kubelet that gpumap noticed."""
    away: bool = False
    """The last attempts found no kubelet at the socket."""
    awaited: tuple[ListedPod, ...] = ()
    """Pods from before a restart that the kubelet has not listed again."""
    kept_uids: Mapping[PodName, PodUid] = field(default_factory=dict)
    """Those of `pods` that the grace period keeps, with the UIDs from before the restart."""

    @property
    def may_have_claims(self) -> bool:
        return self.answer is None or self.answer.value.may_have_claims

    @property
    def may_leave_out_devices(self) -> bool:
        return self.answer is not None and self.answer.value.may_leave_out_devices


def choose_list(
    previous: ServedList,
    uids: Mapping[PodName, PodUid],
    observations: Observations,
    files: PodIdentity,
    procs: ProcTable,
    settings: JoinSettings,
) -> ServedList:
    """Choose between the new List and the previous one, and apply the grace period after a restart. `uids` are the last
    ones of the previous pods."""
    moment = observations.finished
    answer = observations.kubelet
    if not isinstance(answer, Observed):
        young = settings.if_young(previous.answer, moment)
        is_away = answer is not None and answer.complaints[-1].reason in KUBELET_AWAY_REASONS
        return replace(
            previous,
            allocatable=young.value.allocatable if young else None,
            read_now=False,
            current=young is not None,
            away=previous.away or is_away,
        )
    back_at, awaited = _awaited_pods(previous, answer, moment.monotonic)
    kept_uids = _still_present(awaited, uids, files, procs) if awaited else {}
    pods = answer.value.pods
    return ServedList(
        pods=tuple(sorted((*pods, *(pod for pod in awaited if pod.pod_name in kept_uids)))) if kept_uids else pods,
        allocatable=answer.value.allocatable,
        read_now=True,
        current=True,
        answer=answer,
        back_at=back_at,
        awaited=awaited,
        kept_uids=kept_uids,
    )


def _awaited_pods(
    previous: ServedList, answer: Observed[KubeletAnswer], timestamp: float
) -> tuple[float | None, tuple[ListedPod, ...]]:
    """Return when the kubelet came back, and the pods that it has not listed since. After the grace period none."""
    back_at, awaited = previous.back_at, previous.awaited
    if previous.answer is not None and (previous.away or previous.answer.value.socket != answer.value.socket):
        back_at, awaited = answer.at.monotonic, previous.pods
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
    awaited: tuple[ListedPod, ...], uids: Mapping[PodName, PodUid], files: PodIdentity, procs: ProcTable
) -> dict[PodName, PodUid]:
    """Return the pods that still have a process or a log directory, with their UIDs."""
    present = {pod.pod_uid for entry in procs.entries for pod in entry.cgroup.pods}
    present |= {tree.pod_uid for tree in files.logs.trees} if files.logs else set()
    return {pod.pod_name: uid for pod in awaited if (uid := uids.get(pod.pod_name)) in present and uid is not None}
