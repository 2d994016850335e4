"""The simulated node at one moment: `world(scenario, seconds)` is all that a kubelet, /proc and NVML would say then.

A pure function: no clock, no files, no randomness. Two processes that play one scenario see the same world.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpumap.demo.assign import by_resource
from gpumap.demo.cast import PROC_LEAD, PodLife, ProcessLife, play_of, pod_lives, process_lives
from gpumap.demo.play import ContainerSpec, GpuSpec, Scenario, leaf_ids
from gpumap.demo.readings import gpu_readings
from gpumap.demo.texts import AllocatedEntry, cgroup_text, checkpoint_text, pod_cgroup, stat_text
from gpumap.model import (
    CheckpointEntry,
    ContainerLink,
    ContainerName,
    DeviceId,
    GpuReading,
    ListedContainer,
    ListedPod,
    LogTree,
    PodLogs,
    ResourceDevices,
)

TREE_DELAY = 0.5
"""From a pod's admission to its log directory."""
LINK_DELAY = 1.0
"""From a pod's admission to its containers."""
TREE_LINGERS = 3.0
"""A pod's log directory outlives it."""
SILENT_FAULTS = ("hung",)
"""Faults that a device plugin does not notice; with others it calls the GPU unhealthy."""


@dataclass(frozen=True, slots=True)
class Proc:
    """The files of /proc/PID."""

    pid: int
    comm: str
    stat: str
    cgroup: str


@dataclass(frozen=True, slots=True)
class World:
    """`pods` and `allocatable` are the kubelet's answers while it is up. `numa` is where its devices are."""

    kubelet_up: bool
    pods: tuple[ListedPod, ...]
    allocatable: tuple[ResourceDevices, ...]
    numa: Mapping[DeviceId, tuple[int, ...]]
    checkpoint: str
    logs: PodLogs
    procs: tuple[Proc, ...]
    gpus: tuple[GpuReading, ...]


def world(scenario: Scenario, seconds: float) -> World:
    """The node `seconds` after the demo's epoch."""
    _, moment = play_of(scenario, seconds)
    pods = pod_lives(scenario, seconds)
    processes = tuple(process_lives(scenario, seconds))
    complete = not any(away.end <= moment < away.complete for away in scenario.away)
    return World(
        kubelet_up=not any(away.start <= moment < away.end for away in scenario.away),
        pods=tuple(sorted(_listed(pod) for pod in pods if seconds in pod.window and (complete or pod.spec.static))),
        allocatable=_healthy(scenario, moment) if complete else (),
        numa=_numa(scenario),
        checkpoint=_checkpoint(scenario, seconds),
        logs=_logs(pods, seconds),
        procs=_procs(scenario, processes, seconds),
        gpus=gpu_readings(scenario, processes, seconds),
    )


def _listed(pod: PodLife) -> ListedPod:
    """Plain init containers are never in a kubelet's List (kubernetes/kubernetes#126765)."""
    containers = (ListedContainer(one.name, one.devices) for one in pod.spec.containers if not one.init)
    return ListedPod(pod.spec.namespace, pod.spec.name, tuple(sorted(containers)))


def _healthy(scenario: Scenario, moment: float) -> tuple[ResourceDevices, ...]:
    """The ids that the plugins offer: those of GPUs without a fault that they notice, and foreign plugins' ids."""
    pairs = [
        (resource, id_)
        for gpu in scenario.gpus
        if not any(fault.kind not in SILENT_FAULTS and fault.start <= moment < fault.end for fault in gpu.faults)
        for resource, ids in _gpu_ids(gpu)
        for id_ in ids
    ]
    pairs += [
        (devices.resource, id_)
        for pod in scenario.pods
        for container in pod.containers
        for devices in container.devices
        if not _is_own(scenario, devices)
        for id_ in devices.ids
    ]
    return by_resource(pairs)


def _gpu_ids(gpu: GpuSpec) -> Iterator[tuple[str, tuple[DeviceId, ...]]]:
    if not gpu.mig:
        yield leaf_ids(gpu, None)
    for number in range(len(gpu.mig)):
        yield leaf_ids(gpu, number)


def _is_own(scenario: Scenario, devices: ResourceDevices) -> bool:
    """Whether these ids are of the plugin that offers the scenario's GPUs, rather than a foreign one's."""
    offered = (
        id_ for gpu in scenario.gpus for resource, ids in _gpu_ids(gpu) if resource == devices.resource for id_ in ids
    )
    return any(id_ in devices.ids for id_ in offered)


def _numa(scenario: Scenario) -> dict[DeviceId, tuple[int, ...]]:
    """Whole GPUs and their slots have a NUMA node; MIG devices have none, as in the captures."""
    return {id_: (gpu.numa,) for gpu in scenario.gpus if not gpu.mig for _, ids in _gpu_ids(gpu) for id_ in ids}


def _checkpoint(scenario: Scenario, seconds: float) -> str:
    """As of the kubelet's last write: rows of pods that ended since are still there."""
    written = _last_write(scenario, seconds)
    rows = [
        AllocatedEntry(
            CheckpointEntry(pod.uid, container.name, devices.resource, frozenset(devices.ids)),
            _alloc_env(scenario, container, devices),
        )
        for pod in pod_lives(scenario, written)
        if written in pod.window
        for container in pod.spec.containers
        for devices in container.devices
    ]
    _, moment = play_of(scenario, written)
    return checkpoint_text(rows, _healthy(scenario, moment), _numa(scenario))


def _last_write(scenario: Scenario, seconds: float) -> float:
    """Kubelets write when a pod is admitted, and when a plugin registers or reports a change of health."""
    moments = [pod.start for pod in scenario.pods if pod.start is not None]
    moments += [away.complete for away in scenario.away]
    for gpu in scenario.gpus:
        for fault in gpu.faults:
            moments += [] if fault.kind in SILENT_FAULTS else [fault.start, fault.end]
    play, _ = play_of(scenario, seconds)
    past = [
        begin + moment
        for begin in (number * scenario.repeat_seconds for number in (play - 1, play) if number >= 0)
        for moment in moments
        if begin + moment <= seconds
    ]
    return max(past, default=0.0)


def _alloc_env(scenario: Scenario, container: ContainerSpec, devices: ResourceDevices) -> tuple[tuple[str, str], ...]:
    if not _is_own(scenario, devices):
        return container.alloc_env
    uuids = dict.fromkeys(id_.partition("::")[0] for id_ in devices.ids)
    return (("NVIDIA_VISIBLE_DEVICES", ",".join(uuids)), *container.alloc_env)


def _logs(pods: Iterable[PodLife], seconds: float) -> PodLogs:
    trees, links = [], []
    for pod in pods:
        if seconds not in pod.window.shifted(TREE_DELAY, TREE_LINGERS):
            continue
        started = seconds >= pod.window.start + LINK_DELAY
        containers = sorted(container.name for container in pod.spec.containers) if started else []
        trees.append(LogTree(pod.uid, pod.spec.namespace, pod.spec.name, tuple(containers)))
        for container in pod.spec.containers if started else ():
            name = ContainerName(pod.spec.namespace, pod.spec.name, container.name)
            links.append(ContainerLink(pod.container_id(container), pod.uid, name))
    return PodLogs(tuple(sorted(trees)), tuple(sorted(links)))


def _procs(scenario: Scenario, processes: Iterable[ProcessLife], seconds: float) -> tuple[Proc, ...]:
    init = Proc(1, "systemd", stat_text(1, "systemd", 1), cgroup_text(scenario.cgroups, "/init.scope"))
    alive = (life for life in processes if seconds in life.window.shifted(-PROC_LEAD, PROC_LEAD))
    return (init, *sorted((_proc(scenario, life) for life in alive), key=lambda proc: proc.pid))


def _proc(scenario: Scenario, life: ProcessLife) -> Proc:
    path = life.host.cgroup if life.host else "/"
    if life.pod is not None and life.container is not None:
        container_id = life.pod.container_id(life.container)
        path = pod_cgroup(scenario.cgroups, life.pod.spec.qos, life.pod.uid, container_id)
    return Proc(
        pid=life.pid,
        comm=life.comm,
        stat=stat_text(life.pid, life.comm, life.start_ticks),
        cgroup=cgroup_text(scenario.cgroups, path),
    )
