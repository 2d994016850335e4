"""Devices that kubelets 1.20 to 1.22 leave out of the List: those without NUMA topology (kubernetes/kubernetes#103289).

The device checkpoint has them. Its rows of an ended pod stay, so a row is taken only with a running process of the pod.
"""

from __future__ import annotations

from dataclasses import replace

from gpumap.agent.join.pods import PodTable
from gpumap.model.grouping import grouped
from gpumap.model.observations import CheckpointEntry, ListedPod, ProcTable, ResourceDevices
from gpumap.model.terms import PodUid


def add_left_out(pods: tuple[ListedPod, ...], pod_table: PodTable, procs: ProcTable) -> tuple[ListedPod, ...]:
    """Return the List with the rows of pods that have a process on a GPU.

    A container that is listed with a device of a resource has all of that resource in the List. `procs` are the
    processes on GPUs.
    """
    running = {pod.pod_uid for entry in procs.entries for pod in entry.cgroup.pods}
    entries = pod_table.checkpoint.entries if pod_table.checkpoint else ()
    rows = grouped(((row.pod_uid, row.container), row) for row in entries if row.pod_uid in running)
    return tuple(_completed(pod, pod_table, rows) for pod in pods)


def _completed(pod: ListedPod, pod_table: PodTable, rows: dict[tuple[PodUid, str], list[CheckpointEntry]]) -> ListedPod:
    uid = pod_table.uid_of.get(pod.pod_name)
    if uid is None:
        return pod
    containers = []
    for container in pod.containers:
        listed = {devices.resource for devices in container.devices if devices.ids}
        more = [
            ResourceDevices(row.resource, tuple(sorted(row.ids)))
            for row in rows.get((uid, container.name), ())
            if row.resource not in listed
        ]
        containers.append(replace(container, devices=tuple(sorted((*container.devices, *more)))))
    return replace(pod, containers=tuple(containers))
