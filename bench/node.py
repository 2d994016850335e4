"""The node that contestants measure: the stand-in driver, the fake kubelet on a real socket, identity files, processes.

Processes are real ones in cgroups of their own where this machine lets us make them, else files. The kubelet answers
from a thread of this process, which does nothing else while contestants are measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gpumap.model.observations import DeviceId, ResourceDevices
from tests import standin
from tests.machine import Machine, Pod, new_container_id, new_uid
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
class _Place:
    """A pod, and its slot of a GPU. `gpu` is None for a pod without one."""

    pod: Pod
    gpu: int | None
    slot: int
    generation: int
    pids: list[int] = field(default_factory=list)


def _gpu_uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


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


class BenchNode(Machine):
    """A node of one shape below `directory`."""

    def __init__(self, shape: Shape, directory: Path, library: Path, processes: Processes) -> None:
        super().__init__(directory)
        self.shape = shape
        self.library = library
        self.processes = processes
        self.state, self.calls = directory / "driver-state", directory / "driver-calls"
        # A kubelet of this machine removes the cgroups of pods that it does not know, below its own root.
        self._cgroups = f"/{directory.name}"
        self.driver = standin.Driver(gpus=[_card(index, shape.instances_per_gpu) for index in range(shape.gpus)])
        self._resource = MIG_RESOURCE if shape.instances_per_gpu else RESOURCE
        self._places = [self._place(gpu, slot) for gpu in range(shape.gpus) for slot in range(shape.pods_per_gpu)]
        self._places += [self._place(None, slot) for slot in range(shape.other_pods)]
        for place in self._places:
            self._start(place)
        self._tell()

    def _place(self, gpu: int | None, slot: int, generation: int = 0) -> _Place:
        kind = "web" if gpu is None else f"train-gpu{gpu}"
        devices = {} if gpu is None else {"main": (ResourceDevices(self._resource, (self._device_id(gpu, slot),)),)}
        containers = {"main": new_container_id(), "sidecar": new_container_id()}
        pod = Pod("ml", f"{kind}-{slot}-{generation}", new_uid(), containers, devices)
        return _Place(pod, gpu, slot, generation)

    def _device_id(self, gpu: int, slot: int) -> DeviceId:
        """A MIG device, or a slot of a whole GPU."""
        return DeviceId(_mig_uuid(gpu, slot) if self.shape.instances_per_gpu else f"{_gpu_uuid(gpu)}::{slot}")

    @property
    def real_processes(self) -> bool:
        return isinstance(self.processes, RealProcesses)

    @property
    def flags(self) -> list[str]:
        """What points `gpumap serve` at this node."""
        return [*self.flags_for(self.processes.root), "--nvml-library", str(self.library)]

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

    def run_job(self, seconds: float) -> None:
        """Let a pod's new process work on the first GPU for so long. The driver has a sample of it after its end."""
        place, gpu = next(place for place in self._places if place.gpu == 0), self.driver.gpus[0]
        processes = gpu.processes or []
        samples = [sample for sample in gpu.samples or () if sample.timestamp_us is None]
        pid = self.processes.start(self._cgroups + place.pod.cgroup("main"))
        gpu.processes, gpu.samples = [*processes, standin.Process(pid, GIB)], [*samples, standin.Sample(pid, sm=20)]
        self.write_driver()
        time.sleep(seconds)
        self.processes.end(pid)
        last_sample = standin.Sample(pid, sm=20, timestamp_us=time.time_ns() // 1000)
        gpu.processes, gpu.samples = processes, [*samples, last_sample]
        self.write_driver()

    def churn(self, pods: int) -> None:
        """So many GPU pods end, the oldest first, and others with processes of their own take their slots."""
        for _ in range(pods):
            place = self._end_oldest()
            self._places.append(place)
            self._start(place)
        self._tell()

    def withdraw(self) -> _Place:
        """The oldest GPU pod ends. Its successor is not assigned yet."""
        place = self._end_oldest()
        self._tell()
        return place

    def assign(self, place: _Place) -> None:
        """The kubelet gives a pod its slot, and at last renames its checkpoint. Nothing of the pod runs yet."""
        self._places.append(place)
        self._tell()

    def start(self, place: _Place) -> None:
        """Make the log directories and processes of an assigned pod."""
        self._start(place)
        self._tell()

    def _start(self, place: _Place) -> None:
        self.write_logs(place.pod)
        if place.gpu is not None:
            cgroup = self._cgroups + place.pod.cgroup("main")
            shares = [*range(self.shape.processes_per_gpu)][place.slot :: self.shape.pods_per_gpu]
            place.pids = [self.processes.start(cgroup) for _ in shares]

    def _end_oldest(self) -> _Place:
        """End the oldest GPU pod, and give its successor."""
        oldest = min((one for one in self._places if one.gpu is not None), key=lambda one: one.generation)
        for pid in oldest.pids:
            self.processes.end(pid)
        self.remove_logs(oldest.pod)
        self._places.remove(oldest)
        return self._place(oldest.gpu, oldest.slot, oldest.generation + 1)

    def _tell(self) -> None:
        """Write the files of the driver, the kubelet and its checkpoint."""
        for index, gpu in enumerate(self.driver.gpus):
            pids = [pid for one in self._places if one.gpu == index for pid in one.pids]
            gpu.memory_used_bytes = len(pids) * (GIB + GIB // 8)
            for slot, instance in enumerate(gpu.instances):
                assert instance is not None
                own = [pid for one in self._places if (one.gpu, one.slot) == (index, slot) for pid in one.pids]
                instance.processes = [standin.Process(pid, GIB + 4096 * number) for number, pid in enumerate(own)]
                instance.memory_used_bytes = len(own) * (GIB + GIB // 8)
            if gpu.instances:
                continue
            gpu.processes = [standin.Process(pid, GIB + 4096 * number) for number, pid in enumerate(pids)]
            gpu.samples = [standin.Sample(pid, sm=1 + number % 3, mem=1) for number, pid in enumerate(pids)]
        self.write_driver()
        shape, pods = self.shape, [one.pod for one in self._places]
        slots = max(shape.slots_per_gpu, shape.pods_per_gpu)
        ids = tuple(self._device_id(gpu, slot) for gpu in range(shape.gpus) for slot in range(slots))
        offered = (ResourceDevices(self._resource, ids),)
        self.write_kubelet(pods, offered)  # a tuple of frozen values: taken at once
        self.write_checkpoint(pods, offered)


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
