"""A machine of files and sockets: one for tests of the service as it runs, for soak and bench. `Node` is one with GPUs.

Each method of a `Node` changes it as a kubelet, a runtime or a container would; `tests.agent` runs gpumap over it.
`tests.nodes` has nodes without files, for tests of what gpumap makes of its sources' answers.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpumap.lab.demo import texts
from gpumap.model.observations import (
    CheckpointEntry,
    ContainerLink,
    DeviceId,
    ListedContainer,
    ListedPod,
    LogTree,
    PluginAnswer,
    ResourceDevices,
)
from gpumap.model.terms import ContainerName, PodUid
from tests import standin
from tests.kubelet import FakeKubelet
from tests.processes import Processes

MIB = 1 << 20
GIB = 1 << 30
WHOLE, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"


def new_uid() -> PodUid:
    return PodUid(str(uuid.uuid4()))


def new_container_id() -> str:
    return secrets.token_hex(32)


@dataclass(frozen=True)
class Pod:
    """A pod of a machine. `containers` has the container ids by name, `devices` the kubelet's device ids."""

    namespace: str
    name: str
    uid: PodUid
    containers: Mapping[str, str]
    devices: Mapping[str, tuple[ResourceDevices, ...]]
    answers: Mapping[str, PluginAnswer] = field(default_factory=dict)
    """What its plugin answered, by container."""

    @property
    def full(self) -> tuple[str, str]:
        return self.namespace, self.name

    def cgroup(self, container: str, style: str = "v1-cgroupfs") -> str:
        return texts.pod_cgroup(style, "besteffort", self.uid, self.containers[container])

    def listed(self) -> ListedPod:
        containers = (ListedContainer(name, tuple(self.devices.get(name, ()))) for name in self.containers)
        return ListedPod(self.namespace, self.name, tuple(containers))

    def entries(self) -> Iterable[CheckpointEntry]:
        for name, devices in self.devices.items():
            for one in devices:
                yield CheckpointEntry(self.uid, name, one.resource, frozenset(one.ids), self.answers.get(name))

    @property
    def tree(self) -> str:
        return texts.tree_name(LogTree(self.uid, self.namespace, self.name, ()))

    def link(self, container: str) -> ContainerLink:
        name = ContainerName(self.namespace, self.name, container)
        return ContainerLink(self.containers[container], self.uid, name)


class Machine:
    """Its kubelet, and the files of kubelet and pods."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kubelet_root = directory / "kubelet"
        self.logs = directory / "log"
        self.sys = directory / "sys"
        self.checkpoint = self.kubelet_root / "device-plugins" / "kubelet_internal_checkpoint"
        self.kubelet = FakeKubelet(self.kubelet_root / "pod-resources" / "kubelet.sock")
        for folder in (self.checkpoint.parent, self.logs / "pods", self.logs / "containers"):
            folder.mkdir(parents=True)

    def flags_for(self, proc: Path) -> list[str]:
        """What points gpumap at this machine, but for the driver."""
        return [
            *("--kubelet-root", str(self.kubelet_root)),
            *("--device-checkpoint", str(self.checkpoint)),  # else that of a kubelet of this machine may be taken too
            *("--pod-log-root", str(self.logs)),
            *("--proc", str(proc)),
            *("--sys", str(self.sys)),
        ]

    def write_kubelet(self, pods: Iterable[Pod], offered: Sequence[ResourceDevices]) -> None:
        """Let the kubelet list these pods and offer these devices."""
        self.kubelet.set_pods([pod.listed() for pod in pods])
        self.kubelet.set_allocatable(offered)

    def write_checkpoint(self, pods: Iterable[Pod], offered: Sequence[ResourceDevices]) -> None:
        rows = [entry for pod in pods for entry in pod.entries()]
        temporary = self.checkpoint.with_suffix(".tmp")
        temporary.write_text(texts.checkpoint_text(rows, offered, {}))
        temporary.rename(self.checkpoint)

    # --- logs ---

    @property
    def pod_logs(self) -> Path:
        """Where the trees are: a test may have moved them."""
        moved = self.logs / "pods.away"
        return moved if moved.exists() else self.logs / "pods"

    def write_logs(self, pod: Pod) -> None:
        for container in pod.containers:
            (self.pod_logs / pod.tree / container).mkdir(parents=True)
            self.write_link(pod, container)

    def remove_logs(self, pod: Pod) -> None:
        shutil.rmtree(self.pod_logs / pod.tree)
        for container in pod.containers:
            self.remove_link(pod, container)

    def write_link(self, pod: Pod, container: str) -> None:
        self._link(pod, container).symlink_to(texts.link_target(pod.link(container)))

    def remove_link(self, pod: Pod, container: str) -> None:
        self._link(pod, container).unlink(missing_ok=True)

    def _link(self, pod: Pod, container: str) -> Path:
        return self.logs / "containers" / texts.link_name(pod.link(container))


# --- a node with GPUs -------------------------------------------------------------------------------------------------


def gpu_uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def by_resource(ids: Sequence[str]) -> tuple[ResourceDevices, ...]:
    found = {SHARED: sorted(one for one in ids if "::" in one), WHOLE: sorted(one for one in ids if "::" not in one)}
    return tuple(ResourceDevices(name, tuple(map(DeviceId, found[name]))) for name in (WHOLE, SHARED) if found[name])


class Node(Machine):
    """A machine with GPUs. Each change is there for the next collection; the driver's state is `driver`.

    GPU 0 is offered as four time-slicing replicas, the others are given whole.
    """

    def __init__(self, directory: Path, library: Path, processes: Processes, gpus: int = 3) -> None:
        super().__init__(directory)
        self.library, self.processes, self.gpus = library, processes, gpus
        self.pods: list[Pod] = []
        cards = [standin.Gpu(gpu_uuid(index), memory_used_bytes=64 * MIB) for index in range(gpus)]
        self.driver = standin.Driver(gpus=cards)
        self.state = directory / "driver-state"
        self.update_driver()
        self.update_kubelet()

    @property
    def flags(self) -> list[str]:
        """What points gpumap at this node, but for the driver."""
        return self.flags_for(self.processes.root)

    @property
    def offered(self) -> tuple[ResourceDevices, ...]:
        replicas = tuple(DeviceId(f"{gpu_uuid(0)}::{number}") for number in range(4))
        whole = tuple(DeviceId(gpu_uuid(index)) for index in range(1, self.gpus))
        return ResourceDevices(WHOLE, whole), ResourceDevices(SHARED, replicas)

    # --- pods ---

    def admit(self, name: str, namespace: str = "ml", **containers: Sequence[str]) -> Pod:
        """A new pod, with the device ids of each of its containers; no process of it runs yet."""
        ids = {container: new_container_id() for container in containers}
        devices = {container: by_resource(found) for container, found in containers.items()}
        pod = Pod(namespace, name, new_uid(), ids, devices)
        self.pods.append(pod)
        self.update_kubelet()
        self.write_logs(pod)
        return pod

    def delete(self, pod: Pod) -> None:
        """The kubelet forgets a pod and removes its logs. Processes of it that still run are left over."""
        self.pods.remove(pod)
        self.update_kubelet()
        self.remove_logs(pod)

    def update_kubelet(self, *, listed: Sequence[Pod] | None = None, registered: bool = True) -> None:
        """What it answers from now on: all pods, or only those `listed`; its plugins' offer, once they `registered`."""
        self.write_kubelet(self.pods if listed is None else listed, self.offered if registered else ())
        self.write_checkpoint(self.pods, self.offered)

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
        self.update_driver()

    def release(self, pid: int) -> None:
        """A process ends, and what it used is free."""
        for device in self.driver.gpus:
            for process in list(device.processes or ()):
                if process.pid == pid:
                    device.processes = [other for other in device.processes or () if other.pid != pid]
                    device.samples = [other for other in device.samples or () if other.pid != pid]
                    device.memory_used_bytes = (device.memory_used_bytes or 0) - (process.memory_bytes or 0)
        self.update_driver()
        self.processes.end(pid)

    def update_driver(self) -> None:
        """Write what the stand-in answers from now on."""
        self.driver.write(self.state)


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A temporary folder with a name that leaves room for a Unix socket's path."""
    with tempfile.TemporaryDirectory(prefix="gpumap-") as folder:
        yield Path(folder)
