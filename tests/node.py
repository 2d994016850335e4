"""A GPU node for tests of the service as it runs: a fake kubelet, the stand-in driver, identity files and processes.

Each method changes the machine as a kubelet, a runtime or a container would; `tests.agent` runs gpumap over it.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpumap.lab.demo import texts
from gpumap.lab.demo.kubelet import FakeKubelet
from gpumap.model.observations import (
    CheckpointEntry,
    ContainerLink,
    ContainerName,
    DeviceId,
    ListedContainer,
    ListedPod,
    LogTree,
    PodUid,
    ResourceDevices,
)
from tests import standin
from tests.processes import Processes

MIB = 1 << 20
GIB = 1 << 30
WHOLE, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"


def gpu_uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


@dataclass(frozen=True)
class Pod:
    """A pod of a node. `containers` has the container ids by name, `devices` the kubelet's device ids."""

    namespace: str
    name: str
    uid: PodUid
    containers: Mapping[str, str]
    devices: Mapping[str, tuple[DeviceId, ...]]

    def cgroup(self, container: str) -> str:
        return texts.pod_cgroup("v1-cgroupfs", "besteffort", self.uid, self.containers[container])

    def listed(self) -> ListedPod:
        containers = (
            ListedContainer(name, tuple(_by_resource(self.devices.get(name, ())))) for name in self.containers
        )
        return ListedPod(self.namespace, self.name, tuple(containers))


def _by_resource(ids: Sequence[DeviceId]) -> Iterator[ResourceDevices]:
    shared = tuple(sorted(id_ for id_ in ids if "::" in id_))
    whole = tuple(sorted(set(ids) - set(shared)))
    return (ResourceDevices(name, found) for name, found in ((WHOLE, whole), (SHARED, shared)) if found)


@dataclass
class Node:
    """A machine below `directory`. Each change is there for the next collection; the driver's state is `driver`.

    GPU 0 is offered as four time-slicing replicas, the others are given whole.
    """

    directory: Path
    library: Path
    processes: Processes
    gpus: int = 3
    pods: list[Pod] = field(default_factory=list)
    driver: standin.Driver = field(init=False)
    kubelet: FakeKubelet = field(init=False)

    def __post_init__(self) -> None:
        self.driver = standin.Driver(
            gpus=[standin.Gpu(gpu_uuid(index), memory_used_bytes=64 * MIB) for index in range(self.gpus)]
        )
        self.kubelet = FakeKubelet(self.kubelet_root / "pod-resources" / "kubelet.sock")
        for folder in ("kubelet/device-plugins", "log/pods", "log/containers"):
            (self.directory / folder).mkdir(parents=True)
        self.tell_driver()
        self.tell_kubelet()

    @property
    def kubelet_root(self) -> Path:
        return self.directory / "kubelet"

    @property
    def state(self) -> Path:
        return self.directory / "driver-state"

    @property
    def checkpoint(self) -> Path:
        return self.kubelet_root / "device-plugins" / "kubelet_internal_checkpoint"

    @property
    def flags(self) -> list[str]:
        """What points gpumap at this node, but for the driver."""
        return [
            *("--kubelet-root", str(self.kubelet_root)),
            *("--device-checkpoint", str(self.checkpoint)),  # else that of a kubelet of this machine may be taken too
            *("--pod-log-root", str(self.directory / "log")),
            *("--proc", str(self.processes.root)),
        ]

    @property
    def offered(self) -> tuple[ResourceDevices, ...]:
        replicas = tuple(DeviceId(f"{gpu_uuid(0)}::{number}") for number in range(4))
        whole = tuple(DeviceId(gpu_uuid(index)) for index in range(1, self.gpus))
        return ResourceDevices(WHOLE, whole), ResourceDevices(SHARED, replicas)

    # --- pods ---

    def admit(self, name: str, namespace: str = "ml", **containers: Sequence[str]) -> Pod:
        """A new pod, with the device ids of each of its containers; no process of it runs yet."""
        pod = Pod(
            namespace,
            name,
            PodUid(str(uuid.uuid4())),
            {container: secrets.token_hex(32) for container in containers},
            {container: tuple(map(DeviceId, ids)) for container, ids in containers.items()},
        )
        self.pods.append(pod)
        self.tell_kubelet()
        for container, container_id in pod.containers.items():
            tree = texts.tree_name(LogTree(pod.uid, namespace, name, ()))
            (self.directory / "log" / "pods" / tree / container).mkdir(parents=True)
            link = ContainerLink(container_id, pod.uid, ContainerName(namespace, name, container))
            (self.directory / "log" / "containers" / texts.link_name(link)).symlink_to(texts.link_target(link))
        return pod

    def delete(self, pod: Pod) -> None:
        """The kubelet forgets a pod and removes its logs. Processes of it that still run are left over."""
        self.pods.remove(pod)
        self.tell_kubelet()
        shutil.rmtree(self.directory / "log" / "pods" / f"{pod.namespace}_{pod.name}_{pod.uid}")
        for container_id in pod.containers.values():
            for link in (self.directory / "log" / "containers").glob(f"*-{container_id}.log"):
                link.unlink()

    def tell_kubelet(self, *, listed: Sequence[Pod] | None = None, registered: bool = True) -> None:
        """What it answers from now on: all pods, or only those `listed`; its plugins' offer, once they `registered`."""
        self.kubelet.set_pods([pod.listed() for pod in (self.pods if listed is None else listed)])
        self.kubelet.set_allocatable(self.offered if registered else ())
        rows = [
            CheckpointEntry(pod.uid, name, devices.resource, frozenset(devices.ids))
            for pod in self.pods
            for name, ids in pod.devices.items()
            for devices in _by_resource(ids)
        ]
        temporary = self.checkpoint.with_suffix(".tmp")
        temporary.write_text(texts.checkpoint_text(rows, self.offered, {}))
        temporary.rename(self.checkpoint)

    # --- processes ---

    def run(self, cgroup: str, gpu: int, memory_bytes: int, sm_percent: int = 0) -> int:
        """Start a process that uses a GPU. `cgroup` is a pod's (`Pod.cgroup`) or of the host."""
        pid = self.processes.start(cgroup)
        self.use(pid, gpu, memory_bytes, sm_percent)
        return pid

    def use(self, pid: int, gpu: int, memory_bytes: int, sm_percent: int = 0) -> None:
        device = self.driver.gpus[gpu]
        assert device.processes is not None
        assert device.samples is not None
        assert device.memory_used_bytes is not None
        device.processes.append(standin.Process(pid, memory_bytes))
        device.samples.append(standin.Sample(pid, sm=sm_percent))
        device.memory_used_bytes += memory_bytes
        self.tell_driver()

    def release(self, pid: int) -> None:
        """A process ends, and what it used is free."""
        for device in self.driver.gpus:
            for process in list(device.processes or ()):
                if process.pid == pid:
                    device.processes = [other for other in device.processes or () if other.pid != pid]
                    device.samples = [other for other in device.samples or () if other.pid != pid]
                    device.memory_used_bytes = (device.memory_used_bytes or 0) - (process.memory_bytes or 0)
        self.tell_driver()
        self.processes.end(pid)

    def tell_driver(self) -> None:
        """Write what the stand-in answers from now on."""
        self.driver.write(self.state)


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A temporary folder whose name leaves room for a Unix socket's path."""
    with tempfile.TemporaryDirectory(prefix="gpumap-") as folder:
        yield Path(folder)
