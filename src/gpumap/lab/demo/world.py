"""The simulated node at one moment: `world(scenario, seconds)` is all that a kubelet, /proc and NVML would report then.

A pure function: no files, no randomness. Two processes that play one scenario see the same world. `frame` gives it the
form of a capture, and `play` makes frames by the clock. An XID event is in the first frame after its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass

from gpumap.lab.capture import contents
from gpumap.lab.capture.checkpoints import dra_checkpoint_text
from gpumap.lab.capture.contents import LogEntry
from gpumap.lab.capture.format import Frame
from gpumap.lab.demo.allocation import SILENT_FAULTS, answer_to, numa_nodes, offered
from gpumap.lab.demo.kubelet import allocatable_answer, list_answer
from gpumap.lab.demo.readings import CUDA_VERSION, DRIVER_VERSION, NVML_VERSION, gpu_readings
from gpumap.lab.demo.scenario_model import HostProcess, Scenario, nth_bus_id
from gpumap.lab.demo.schedule import PROC_LEAD, PodLife, ProcessLife, play_of, pod_lives, process_lives, xid_errors
from gpumap.lab.demo.texts import (
    cgroup_text,
    checkpoint_text,
    link_name,
    link_target,
    pod_cgroup,
    stat_text,
    tree_name,
)
from gpumap.model.device_ids import pci_address
from gpumap.model.observations import (
    CheckpointEntry,
    ContainerLink,
    DeviceId,
    ListedContainer,
    ListedPod,
    LogTree,
    NvmlReading,
    PciFunction,
    ResourceDevices,
)
from gpumap.model.readings import GpuReading, Listening
from gpumap.model.terms import ContainerName

TREE_DELAY = 0.5
"""From a pod's admission to its log directory."""
LINK_DELAY = 1.0
"""From a pod's admission to its containers."""
TREE_LINGERS = 3.0
"""A pod's log directory outlives it."""


@dataclass(frozen=True, slots=True)
class World:
    """`pods` and `allocatable` are the kubelet's answers while it is up. `numa` is where its devices are.

    `notes` are the DRA driver's; empty where it writes none. `procs` are PIDs with `stat` and `cgroup`.
    """

    kubelet_up: bool
    pods: tuple[ListedPod, ...]
    allocatable: tuple[ResourceDevices, ...]
    numa: Mapping[DeviceId, tuple[int, ...]]
    checkpoint: str
    notes: bytes
    logs: tuple[LogEntry, ...]
    procs: tuple[tuple[int, str, str], ...]
    gpus: tuple[GpuReading, ...]


def world(scenario: Scenario, seconds: float) -> World:
    """The node `seconds` after the demo's epoch."""
    _, moment = play_of(scenario, seconds)
    pods = pod_lives(scenario, seconds)
    processes = tuple(process_lives(scenario, seconds))
    complete = not any(away.end <= moment < away.complete for away in scenario.kubelet.away)
    return World(
        kubelet_up=not any(away.start <= moment < away.end for away in scenario.kubelet.away),
        pods=tuple(
            sorted(_listed(scenario, pod) for pod in pods if seconds in pod.window and (complete or pod.spec.static))
        ),
        allocatable=offered(scenario, moment) if complete else (),
        numa=numa_nodes(scenario),
        checkpoint=_checkpoint(scenario, seconds),
        notes=_notes(scenario, pods, seconds),
        logs=tuple(_logs(pods, seconds)),
        procs=_procs(scenario, processes, seconds),
        gpus=gpu_readings(scenario, processes, seconds),
    )


def _listed(scenario: Scenario, pod: PodLife) -> ListedPod:
    """Plain init containers are never in a kubelet's List (kubernetes/kubernetes#126765)."""
    namespace = pod.spec.namespace
    containers = (
        ListedContainer(
            container.name,
            container.devices,
            tuple(sorted({claim.listed(scenario.node, namespace) for claim in container.claims})),
        )
        for container in pod.spec.containers
        if not container.init
    )
    return ListedPod(namespace, pod.spec.name, tuple(sorted(containers)))


def _checkpoint(scenario: Scenario, seconds: float) -> str:
    """As of the kubelet's last write: rows of pods that ended since then still exist."""
    written = _last_write(scenario, seconds)
    rows = [
        CheckpointEntry(
            pod.uid,
            container.name,
            devices.resource,
            frozenset(devices.ids),
            answer_to(scenario, container, devices),
        )
        for pod in pod_lives(scenario, written)
        if written in pod.window
        for container in pod.spec.containers
        for devices in container.devices
    ]
    _, moment = play_of(scenario, written)
    return checkpoint_text(rows, offered(scenario, moment), numa_nodes(scenario))


def _notes(scenario: Scenario, pods: Iterable[PodLife], seconds: float) -> bytes:
    """Of the pods that exist: a driver unprepares what no pod has any more."""
    if not any(claim.notes for pod in scenario.pods for container in pod.containers for claim in container.claims):
        return b""
    devices = {
        claim.prepared(pod.spec.namespace, claim.notes)
        for pod in pods
        if seconds in pod.window
        for container in pod.spec.containers
        for claim in container.claims
        if claim.notes is not None
    }
    return dra_checkpoint_text(sorted(devices, key=lambda device: astuple(device)[:4]))


def _last_write(scenario: Scenario, seconds: float) -> float:
    """Kubelets write when a pod is admitted, and when a plugin registers or reports a change of health."""
    moments: list[float] = [pod.start for pod in scenario.pods if pod.start is not None]
    moments += [away.complete for away in scenario.kubelet.away]
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


def _logs(pods: Iterable[PodLife], seconds: float) -> Iterator[LogEntry]:
    for folder in ("pods", "containers"):
        yield LogEntry("d", "755", f"var/log/{folder}")
    for pod in pods:
        if seconds not in pod.window.shifted(TREE_DELAY, TREE_LINGERS):
            continue
        name = pod.spec.namespace, pod.spec.name
        folder = f"var/log/pods/{tree_name(LogTree(pod.uid, *name, ()))}"
        yield LogEntry("d", "755", folder)
        for container in pod.spec.containers if seconds >= pod.window.start + LINK_DELAY else ():
            link = ContainerLink(pod.container_id(container), pod.uid, ContainerName(*name, container.name))
            yield LogEntry("d", "755", f"{folder}/{container.name}")
            yield LogEntry("f", "644", f"{folder}/{container.name}/0.log")
            yield LogEntry("l", "777", f"var/log/containers/{link_name(link)}", link_target(link))


def _procs(scenario: Scenario, processes: Iterable[ProcessLife], seconds: float) -> tuple[tuple[int, str, str], ...]:
    procs = [
        (1, stat_text(1, "systemd", 1), cgroup_text(scenario.cgroups, "/init.scope")),
        (2, stat_text(2, "kthreadd", 1), cgroup_text(scenario.cgroups, "/")),
    ]
    for life in processes:
        if seconds in life.window.shifted(-PROC_LEAD, PROC_LEAD):
            path = life.spec.cgroup or "/" if isinstance(life.spec, HostProcess) else "/"
            if life.pod is not None and life.container is not None:
                container_id = life.pod.container_id(life.container)
                path = pod_cgroup(scenario.cgroups, life.pod.spec.qos, life.pod.uid, container_id)
            stat = stat_text(life.pid, life.comm, life.start_ticks)
            procs.append((life.pid, stat, cgroup_text(scenario.cgroups, path)))
    return tuple(sorted(procs))


# --- frames -----------------------------------------------------------------------------------------------------------

TICK_SECONDS = 0.25
OWN_CGROUP = "/system.slice/gpumap.service"


def play(
    scenario: Scenario, clock: Callable[[], float] = time.time, epoch: float | None = None
) -> Iterator[tuple[float, Frame]]:
    """A frame for each tick, with its time on the monotonic clock. A tick that is late is left out.

    `clock` gives Unix seconds. `epoch` is when the play began, by default now.
    """
    epoch = clock() if epoch is None else epoch
    due, last_seconds = time.monotonic(), clock() - epoch
    while True:
        seconds = clock() - epoch + max(due - time.monotonic(), 0.0)
        yield due, frame(scenario, last_seconds, seconds)
        last_seconds = seconds
        due = max(due + TICK_SECONDS, time.monotonic())


def frame(scenario: Scenario, last_seconds: float, seconds: float) -> Frame:
    """The node `seconds` after the epoch, with the XID events since `last_seconds`."""
    node = world(scenario, seconds)
    listening = (Listening(gpu.uuid, max(seconds, 0.0), 0.0) for gpu in scenario.gpus)
    versions = DRIVER_VERSION, CUDA_VERSION, NVML_VERSION
    reading = NvmlReading(*versions, node.gpus, tuple(xid_errors(scenario, last_seconds, seconds)), tuple(listening))
    files = {
        contents.CHECKPOINT: node.checkpoint.encode(),
        contents.LOG_TREE: contents.log_text(node.logs),
        contents.OWN_CGROUP: cgroup_text(scenario.cgroups, OWN_CGROUP).encode(),
        contents.NVML: contents.reading_text(reading),
        contents.PCI: contents.pci_text(  # also GPUs that NVML does not list
            PciFunction(pci_address(nth_bus_id(index)), "0x2330", "0x0302", "nvidia")
            for index in range(len(scenario.gpus) + scenario.missing_gpus)
        ),
    }
    if node.notes:
        files[contents.DRA_CHECKPOINT] = node.notes
    for pid, stat, cgroup in node.procs:
        files |= {f"proc/{pid}/stat": stat.encode(), f"proc/{pid}/cgroup": cgroup.encode()}
    return Frame(seconds, files | _kubelet(node))


def _kubelet(node: World) -> dict[str, bytes]:
    if not node.kubelet_up:
        return {contents.DOWN: contents.down_text({"kubelet": contents.Down("connection_refused")})}
    return {
        f"{contents.LIST}.pb": list_answer(node.pods, node.numa),
        f"{contents.ALLOCATABLE}.pb": allocatable_answer(node.allocatable, node.numa),
    }
