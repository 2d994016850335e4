"""A GPU node for tests of the service as it runs: a fake kubelet, the stand-in driver, identity files and processes.

Each method changes the machine as a kubelet, a runtime or a container would; `tests.agent` runs gpumap over it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpumap.model.observations import DeviceId, ResourceDevices
from tests import standin
from tests.machine import Machine, Pod, new_container_id, new_uid
from tests.processes import Processes

MIB = 1 << 20
GIB = 1 << 30
WHOLE, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"


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
