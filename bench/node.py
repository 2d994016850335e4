"""The node that contestants measure: the stand-in driver, the fake kubelet on a real socket, identity files, processes.

Processes are real ones in cgroups of their own where this machine lets us make them, else files. The kubelet answers
from a thread of this process, which does nothing else while contestants are measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

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
from tests.processes import NoCgroupsError, PlainProcesses, Processes, RealProcesses

RESOURCE, MIG_RESOURCE = "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"
LOOK_MILLISECONDS = 50
"""How often the driver looks for another state. Its calls answer from memory in a microsecond: the callers' own time
is measured."""
GIB = 1 << 30
AGGREGATE, DRAM, SRAM, ALL_LINKS = 1, 2, 7, 0xFFFF_FFFF
"""nvml.h: counts of memory errors that outlive the driver, two of their places, and NVLink's links together."""


class Shape(NamedTuple):
    """How large a node is. Its GPUs are offered as slots; each GPU pod holds one, and shares out the processes.

    With `instances_per_gpu` the GPUs are partitioned, and each pod holds a MIG device instead.
    """

    gpus: int
    processes_per_gpu: int
    pods_per_gpu: int = 4
    other_pods: int = 16
    """Pods without a GPU, which the kubelet lists all the same."""
    slots_per_gpu: int = 0
    """Those that are offered, if more than the pods of a GPU."""
    instances_per_gpu: int = 0

    def __str__(self) -> str:
        return f"{self.gpus}×{self.instances_per_gpu or self.processes_per_gpu}"


SMALL = Shape(8, 16)
LARGE = Shape(16, 64, other_pods=46)
"""With 110 pods: as many as a kubelet takes."""
MIG = Shape(16, 16, pods_per_gpu=7, instances_per_gpu=7)


@dataclass
class _Pod:
    gpu: int | None
    slot: int
    generation: int = 0
    mig: bool = False
    uid: PodUid = field(default_factory=lambda: PodUid(str(uuid.uuid4())))
    container_id: str = field(default_factory=lambda: uuid.uuid4().hex * 2)
    pids: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        kind = "web" if self.gpu is None else f"train-gpu{self.gpu}"
        return f"{kind}-{self.slot}-{self.generation}"

    @property
    def ids(self) -> tuple[DeviceId, ...]:
        return () if self.gpu is None else (_device_id(self.gpu, self.slot, self.mig),)

    @property
    def listed(self) -> ListedPod:
        devices = (ResourceDevices(MIG_RESOURCE if self.mig else RESOURCE, self.ids),) if self.ids else ()
        return ListedPod("ml", self.name, (ListedContainer("main", devices), ListedContainer("sidecar")))

    @property
    def tree(self) -> str:
        return texts.tree_name(LogTree(self.uid, "ml", self.name, ()))

    @property
    def link(self) -> ContainerLink:
        return ContainerLink(self.container_id, self.uid, ContainerName("ml", self.name, "main"))


def _gpu_uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def _device_id(gpu: int, slot: int, mig: bool) -> DeviceId:
    """A MIG device, or a slot of a whole GPU."""
    return DeviceId(_mig_uuid(gpu, slot) if mig else f"{_gpu_uuid(gpu)}::{slot}")


def _mig_uuid(gpu: int, slot: int) -> str:
    return f"MIG-00000000-0000-0000-{gpu:04d}-{slot:012d}"


def _instance(gpu: int, slot: int) -> standin.MigInstance:
    return standin.MigInstance(
        _mig_uuid(gpu, slot),
        gi=7 + slot,
        name="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        placement=standin.Placement(start=slot, size=1),
        gpm=standin.Gpm(71.5, 40.25, 55.0, 33.0),
    )


def _card(index: int, instances: int) -> standin.Gpu:
    """A reading with all values of an H100 in a server: no fans, ECC in its SRAM and DRAM, remapped rows."""
    lasted = dict.fromkeys((*range(74, 80), *range(269, 272)), 10**12)
    narrow = {142: 1, 143: 0, 144: 0, 145: 0, 230: 0}
    bytes_ = {197: 10**12, 198: 10**12, (138, ALL_LINKS): 10**9, (139, ALL_LINKS): 10**9}
    return standin.Gpu(
        _gpu_uuid(index),
        name="NVIDIA H100 80GB HBM3",
        clocks_megahertz={"graphics": 1980, "sm": 1980, "memory": 2619, "video": 1545},
        clock_events=0x4,
        clock_events_supported=0xFF,
        performance_state=0,
        ecc={(type_, AGGREGATE, location): 0 for type_ in (0, 1) for location in (DRAM, SRAM)},
        fields={
            **{id_: ("uint", value) for id_, value in narrow.items()},
            **{id_: ("ulonglong", value) for id_, value in (lasted | bytes_).items()},
        },
        gpm=standin.Gpm(71.5, 40.25, 55.0, 33.0),
        instances=[_instance(index, slot) for slot in range(instances)],
    )


class BenchNode:
    """A node of one shape below `directory`."""

    def __init__(self, shape: Shape, directory: Path, library: Path, processes: Processes) -> None:
        self.shape = shape
        self.library = library
        self.processes = processes
        self.state, self.calls = directory / "driver-state", directory / "driver-calls"
        self._directory = directory
        # A kubelet of this machine removes the cgroups of pods that it does not know, below its own root.
        self._cgroups = f"/{directory.name}"
        self.driver = standin.Driver(gpus=[_card(index, shape.instances_per_gpu) for index in range(shape.gpus)])
        mig = bool(shape.instances_per_gpu)
        self._pods = [_Pod(gpu, slot, mig=mig) for gpu in range(shape.gpus) for slot in range(shape.pods_per_gpu)]
        self._pods += [_Pod(None, slot) for slot in range(shape.other_pods)]
        self.kubelet = FakeKubelet(directory / "kubelet" / "pod-resources" / "kubelet.sock")
        for folder in ("kubelet/device-plugins", "log/pods", "log/containers"):
            (directory / folder).mkdir(parents=True)
        for pod in self._pods:
            self._start(pod)
        self._tell()

    @property
    def real_processes(self) -> bool:
        return isinstance(self.processes, RealProcesses)

    @property
    def flags(self) -> list[str]:
        """What points `gpumap serve` at this node."""
        return [
            *("--kubelet-root", str(self._directory / "kubelet")),
            *("--pod-log-root", str(self._directory / "log")),
            *("--proc", str(self.processes.root)),
            *("--nvml-library", str(self.library)),
        ]

    @property
    def environment(self) -> dict[str, str]:
        return standin.environment(self.library, self.state, self.calls, LOOK_MILLISECONDS)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The kubelet answers meanwhile."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="kubelet", daemon=True)
        thread.start()
        asyncio.run_coroutine_threadsafe(self.kubelet.start(), loop).result()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self.kubelet.stop(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def write_driver(self) -> None:
        self.driver.write(self.state)

    def churn(self, pods: int) -> None:
        """So many GPU pods end, the oldest first, and others with processes of their own take their slots."""
        oldest = sorted((pod for pod in self._pods if pod.gpu is not None), key=lambda pod: pod.generation)[:pods]
        for pod in oldest:
            self._end(pod)
            successor = _Pod(pod.gpu, pod.slot, pod.generation + 1, pod.mig)
            self._pods[self._pods.index(pod)] = successor
            self._start(successor)
        self._tell()

    def withdraw(self) -> _Pod:
        """The oldest GPU pod ends. Its successor is not assigned yet."""
        oldest = min((pod for pod in self._pods if pod.gpu is not None), key=lambda pod: pod.generation)
        self._end(oldest)
        self._pods.remove(oldest)
        self._tell()
        return _Pod(oldest.gpu, oldest.slot, oldest.generation + 1, oldest.mig)

    def assign(self, pod: _Pod) -> None:
        """The kubelet gives a pod its slot, and at last renames its checkpoint. Nothing of the pod runs yet."""
        self._pods.append(pod)
        self._tell()

    def start(self, pod: _Pod) -> None:
        """Make the log directories and processes of an assigned pod."""
        self._start(pod)
        self._tell()

    def _start(self, pod: _Pod) -> None:
        for container in ("main", "sidecar"):
            (self._directory / "log" / "pods" / pod.tree / container).mkdir(parents=True)
        link = self._directory / "log" / "containers" / texts.link_name(pod.link)
        link.symlink_to(texts.link_target(pod.link))
        if pod.gpu is None:
            return
        cgroup = self._cgroups + texts.pod_cgroup("v1-cgroupfs", "besteffort", pod.uid, pod.container_id)
        shares = [*range(self.shape.processes_per_gpu)][pod.slot :: self.shape.pods_per_gpu]
        pod.pids = [self.processes.start(cgroup) for _ in shares]

    def _end(self, pod: _Pod) -> None:
        for pid in pod.pids:
            self.processes.end(pid)
        shutil.rmtree(self._directory / "log" / "pods" / pod.tree)
        (self._directory / "log" / "containers" / texts.link_name(pod.link)).unlink()

    def _tell(self) -> None:
        """Write the files of the driver, the kubelet and its checkpoint."""
        for index, gpu in enumerate(self.driver.gpus):
            pids = [pid for pod in self._pods if pod.gpu == index for pid in pod.pids]
            gpu.memory_used_bytes = len(pids) * (GIB + GIB // 8)
            for slot, instance in enumerate(gpu.instances):
                assert instance is not None
                own = [pid for pod in self._pods if (pod.gpu, pod.slot) == (index, slot) for pid in pod.pids]
                instance.processes = [standin.Process(pid, GIB + 4096 * number) for number, pid in enumerate(own)]
                instance.memory_used_bytes = len(own) * (GIB + GIB // 8)
            if gpu.instances:
                continue
            gpu.processes = [standin.Process(pid, GIB + 4096 * number) for number, pid in enumerate(pids)]
            gpu.samples = [standin.Sample(pid, sm=1 + number % 3, mem=1) for number, pid in enumerate(pids)]
        self.write_driver()
        shape, mig = self.shape, bool(self.shape.instances_per_gpu)
        resource, slots = MIG_RESOURCE if mig else RESOURCE, max(shape.slots_per_gpu, shape.pods_per_gpu)
        ids = tuple(_device_id(gpu, slot, mig) for gpu in range(shape.gpus) for slot in range(slots))
        offered = (ResourceDevices(resource, ids),)
        self.kubelet.set_pods([pod.listed for pod in self._pods])  # a tuple of frozen values: taken at once
        self.kubelet.set_allocatable(offered)
        rows = [CheckpointEntry(pod.uid, "main", resource, frozenset(pod.ids)) for pod in self._pods if pod.ids]
        checkpoint = self._directory / "kubelet" / "device-plugins" / "kubelet_internal_checkpoint"
        temporary = checkpoint.with_suffix(".tmp")
        temporary.write_text(texts.checkpoint_text(rows, offered, {}))
        temporary.rename(checkpoint)


@contextlib.contextmanager
def node(shape: Shape, *, plain: bool = False) -> Iterator[BenchNode]:
    """A node with its kubelet running. `plain`: its processes are files, which no other contestant can read."""
    with tempfile.TemporaryDirectory(prefix="gpumap-bench-") as folder:
        directory = Path(folder)
        library = standin.build(Path(tempfile.gettempdir()) / "gpumap-bench-standin")
        processes: Processes
        try:
            processes = PlainProcesses(directory / "proc") if plain else RealProcesses()
        except NoCgroupsError:
            processes = PlainProcesses(directory / "proc")
        try:
            made = BenchNode(shape, directory, library, processes)
            with made.running():
                yield made
        finally:
            processes.close()
