"""The node of a soak and its truth: a live fake kubelet, two stand-in drivers, files of pods and processes.

Each change is made in the order in which a node makes it. `Truth` is what was true from a moment on; a change takes
time, and meanwhile both the truth before and the truth after are right.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from gpumap.lab.demo import texts
from gpumap.model.observations import DeviceId, PluginAnswer, ResourceDevices
from gpumap.model.terms import ContainerName, PodUid
from tests import machine, standin
from tests.machine import GIB, MIB, gpu_uuid
from tests.soak.clock import SPEED, now

AGENTS = ("steady", "restarted")
"""The first runs from the beginning to the end, the other one is restarted again and again."""
PIDS = range(4_000_001, 4_000_601)
"""A freed PID is used again after all others."""
PAUSE_SECONDS = 1.0
"""Real ones. The agents wait 5 s for a source."""
BASE_BYTES = 64 * MIB
CARD_BYTES, MIG_BYTES = 80 * GIB, 9728 * MIB
"""gpumap shows no use of a device that would be larger than the device."""
PROXY = "00000000-1111-2222-3333-444444444444"
"""A pod without a GPU: with its process in /proc, gpumap knows that it sees those of other pods."""
SHELL = "/system.slice/sshd.service"


@dataclass(frozen=True)
class Sharing:
    """A way to hand out a card. `ids` are made from the leaf's UUID and the slot; `env` is the plugin's answer."""

    resource: str
    slots: int
    form: str
    env: Callable[[str, int], Mapping[str, str]] = lambda uuid, index: {}
    by_answer: bool = False
    """Only the answer names the device, so that without the checkpoint nothing does."""


WHOLE = Sharing("nvidia.com/gpu", 1, "{uuid}")
REPLICAS = Sharing("nvidia.com/gpu.shared", 4, "{uuid}::{slot}")
MIG = Sharing("nvidia.com/mig-1g.10gb", 1, "{uuid}")
GPUSHARE = Sharing(
    "aliyun.com/gpu-mem",
    80,
    "{uuid}-_-{slot}",
    lambda uuid, index: {"NVIDIA_VISIBLE_DEVICES": str(index), "ALIYUN_COM_GPU_MEM_IDX": str(index)},
    by_answer=True,
)
VGPU = Sharing(
    "volcano.sh/vgpu-number",
    10,
    "{uuid}-{slot}",
    lambda uuid, index: {
        "NVIDIA_VISIBLE_DEVICES": uuid,
        "CUDA_DEVICE_SM_LIMIT": "10",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
    },
    by_answer=True,
)
MPS = Sharing(
    "nvidia.com/gpu.shared",
    4,
    "{uuid}::{slot}",
    lambda uuid, index: {"NVIDIA_VISIBLE_DEVICES": uuid, "CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe"},
)
CARDS = (REPLICAS, WHOLE, WHOLE, MIG, GPUSHARE, VGPU, MPS)
"""How each GPU of the node is handed out, by its index."""
PARTITIONED = CARDS.index(MIG)
GPUS = tuple(gpu_uuid(index) for index in range(len(CARDS)))


@dataclass(frozen=True)
class Grant:
    """Slots of one leaf."""

    sharing: Sharing
    leaf: str
    slots: tuple[int, ...]
    index: int

    @property
    def devices(self) -> ResourceDevices:
        ids = tuple(DeviceId(self.sharing.form.format(uuid=self.leaf, slot=slot)) for slot in self.slots)
        return ResourceDevices(self.sharing.resource, ids)

    @property
    def answer(self) -> PluginAnswer:
        return PluginAnswer(envs=tuple(self.sharing.env(self.leaf, self.index).items()))


@dataclass(frozen=True)
class Pod(machine.Pod):
    """A pod, and what each of its containers was granted."""

    grants: Mapping[str, Grant] = field(default_factory=dict)

    @staticmethod
    def granted(
        namespace: str, name: str, uid: PodUid, containers: Mapping[str, str], grants: Mapping[str, Grant]
    ) -> Pod:
        devices = {container: (grant.devices,) for container, grant in grants.items()}
        answers = {container: grant.answer for container, grant in grants.items()}
        return Pod(namespace, name, uid, containers, devices, answers, grants)


@dataclass(frozen=True)
class Process:
    """A process on a leaf, of a container or of the host."""

    pid: int
    leaf: str
    memory_bytes: int
    sm_percent: int
    pod: Pod | None
    container: str

    @property
    def identity(self) -> tuple[object, ...]:
        """What of it is a truth: not the ids of its pod's containers, which a restart changes."""
        return self.pid, self.leaf, self.memory_bytes, self.pod and self.pod.uid, self.container


@dataclass(frozen=True, eq=False)
class Truth:
    """What is true since the change that began at `began` and ended at `ended` (wall clock of the soak).

    `faults` has what is broken, `recovering` what was mended and need not be right yet, each as (agent, part).
    """

    began: float = 0.0
    ended: float = 0.0
    pods: Mapping[PodUid, Pod] = field(default_factory=dict)
    processes: Mapping[int, Process] = field(default_factory=dict)
    instances: tuple[str, ...] = ()
    faults: frozenset[tuple[str, str]] = frozenset()
    recovering: frozenset[tuple[str, str]] = frozenset()

    @property
    def leaves(self) -> dict[str, str]:
        """The GPU of each leaf."""
        whole = {uuid: uuid for uuid in GPUS if uuid != GPUS[PARTITIONED]}
        return whole | dict.fromkeys(self.instances, GPUS[PARTITIONED])

    def used_bytes(self, leaf: str) -> int:
        return BASE_BYTES + sum(one.memory_bytes for one in self.processes.values() if one.leaf == leaf)

    def broken(self, agent: str, *, or_recovering: bool) -> frozenset[str]:
        """The parts of the node that do not work for an agent."""
        found = self.faults | self.recovering if or_recovering else self.faults
        return frozenset(part for who, part in found if who == agent)


class SoakNode(machine.Machine):
    """The machine and its truth."""

    def __init__(self, directory: Path, library: Path, random: Random) -> None:
        super().__init__(directory)
        self.library = library
        self.random = random
        self.drivers = {agent: standin.Driver() for agent in AGENTS}
        self.xids: list[standin.Xid] = []
        self.energy = dict.fromkeys(GPUS, 1_000_000)
        self.history: deque[Truth] = deque([Truth(instances=_instance_uuids(0, 4))], maxlen=4000)
        self.counts = dict.fromkeys(("pods", "processes", "repartitions", "pids used again"), 0)
        self.pauses: deque[tuple[float, float]] = deque(maxlen=1000)
        self.earlier: set[tuple[ContainerName, str]] = set()
        """Containers, and the devices that they ever held or used, and their GPUs: XID errors may be of a GPU."""
        self._next_pid = 0
        self._start_ticks = 1000
        self._partitions = 0
        self.proc = directory / "proc"
        self.proc.mkdir()
        self._write_process(1, SHELL, "sshd")
        self._write_process(2, texts.pod_cgroup("v2-systemd", "besteffort", PROXY, "f" * 64), "kube-proxy")
        with self.change():
            pass

    @property
    def truth(self) -> Truth:
        return self.history[-1]

    def state(self, agent: str) -> Path:
        return self.directory / f"driver-{agent}"

    @contextlib.contextmanager
    def change(self, **fields: object) -> Iterator[None]:
        """Make a change: the block may change files of its own, then all sources have the new truth."""
        began = now().wall
        truth = replace(self.truth, began=began, ended=float("inf"), **fields)  # type: ignore[arg-type]
        self.history.append(truth)
        yield
        self._write_kubelet()
        self._write_drivers()
        self.history[-1] = replace(truth, ended=now().wall)

    def during(self, since: float, until: float) -> list[Truth]:
        """Every truth that a reader may have found between these moments, oldest first."""
        found: list[Truth] = []
        over = float("inf")  # when the truth was quite gone
        for truth in reversed(self.history):
            if truth.began <= until and over >= since:
                found.append(truth)
            if over < since:
                break
            over = truth.ended
        return found[::-1]

    async def notice_pauses(self) -> None:
        """Note when the machine is too busy to run this process: then a source of the node may miss its deadline."""
        while True:
            begun = now().wall
            await asyncio.sleep(PAUSE_SECONDS / 4)
            if (ended := now().wall) - begun > PAUSE_SECONDS * SPEED:
                self.pauses.append((begun, ended))

    def paused(self, since: float, until: float) -> bool:
        """Whether the node paused between these moments."""
        return any(begun <= until and ended >= since for begun, ended in self.pauses)

    # --- pods ---

    def start_pod(self, *, idle: bool = False) -> Pod:
        """Admit a pod of one or two containers, most of them with a GPU; then its processes start."""
        grants: dict[str, Grant] = {}
        containers = {f"c{number}": self._container_id() for number in range(self.random.choice((1, 1, 2)))}
        for container in containers:
            if (grant := self._free(grants)) is not None and self.random.random() < 0.9:
                grants[container] = grant
        taken = {pod.full for pod in self.truth.pods.values()}
        free = [(space, f"job-{n}") for space in ("ml", "batch") for n in range(20) if (space, f"job-{n}") not in taken]
        namespace, name = self.random.choice(free)
        uid = PodUid(f"{self.random.getrandbits(128):032x}")
        uid = PodUid("-".join((uid[:8], uid[8:12], uid[12:16], uid[16:20], uid[20:])))
        pod = Pod.granted(namespace, name, uid, containers, grants)
        for one, grant in grants.items():
            self._remember(ContainerName(namespace, name, one), grant.leaf)
        self.counts["pods"] += 1
        with self.change(pods={**self.truth.pods, uid: pod}):
            self._write_kubelet()
            self.write_logs(pod)
        for container in () if idle else containers:
            for _ in range(self.random.choice((0, 1, 1, 2))):
                self.start_process(pod, container)
        return pod

    def stop_pod(self, pod: Pod, *, left_over: bool = False) -> None:
        """End a pod's processes, unless they are left over, and delete it."""
        for one in list(self.truth.processes.values()):
            if one.pod is not None and one.pod.uid == pod.uid and not left_over:
                self.end_process(one.pid)
        with self.change(pods={uid: one for uid, one in self.truth.pods.items() if uid != pod.uid}):
            self._write_kubelet()
            self.remove_logs(pod)

    def restart_container(self, pod: Pod) -> None:
        """A container crashes: its processes end, and it gets another id and another process."""
        container = self.random.choice(sorted(pod.containers))
        for one in list(self.truth.processes.values()):
            if one.pod is not None and one.pod.uid == pod.uid and one.container == container:
                self.end_process(one.pid)
        after = replace(pod, containers={**pod.containers, container: self._container_id()})
        processes = {
            pid: replace(one, pod=after) if one.pod is not None and one.pod.uid == pod.uid else one
            for pid, one in self.truth.processes.items()
        }
        with self.change(pods={**self.truth.pods, pod.uid: after}, processes=processes):
            self.remove_link(pod, container)
            self.write_link(after, container)
        self.start_process(after, container)

    def _container_id(self) -> str:
        return f"{self.random.getrandbits(256):064x}"

    def _free(self, taken: Mapping[str, Grant]) -> Grant | None:
        """Free slots of a random leaf."""
        leaves = sorted(self.truth.leaves)
        leaf = self.random.choice(leaves)
        index = GPUS.index(self.truth.leaves[leaf])
        sharing = CARDS[index]
        held = [grant for pod in self.truth.pods.values() for grant in pod.grants.values()] + list(taken.values())
        used = {slot for grant in held if grant.leaf == leaf for slot in grant.slots}
        free = [slot for slot in range(sharing.slots) if slot not in used]
        count = self.random.choice((1, 1, 2)) * (8 if sharing is GPUSHARE else 1)
        return Grant(sharing, leaf, tuple(free[:count]), index) if free else None

    def _remember(self, name: ContainerName, leaf: str) -> None:
        self.earlier |= {(name, leaf), (name, self.truth.leaves[leaf])}

    # --- processes ---

    def start_process(self, pod: Pod | None, container: str = "", leaf: str | None = None) -> None:
        """Start a process of a container on the device that it holds, or on another one; without a pod, of the host."""
        grant = pod.grants.get(container) if pod is not None else None
        leaf = leaf or (grant.leaf if grant is not None else None) or self.random.choice(sorted(self.truth.leaves))
        pid = self._free_pid()
        one = Process(pid, leaf, self._amount(leaf), self.random.randrange(8), pod, container)
        if pod is not None:
            self._remember(ContainerName(*pod.full, container), leaf)
        self.counts["processes"] += 1
        with self.change(processes={**self.truth.processes, pid: one}):
            self._write_process(pid, SHELL if pod is None else pod.cgroup(container, "v2-systemd"), "python3")

    def end_process(self, pid: int) -> None:
        with self.change(processes={number: one for number, one in self.truth.processes.items() if number != pid}):
            self._write_drivers()
            shutil.rmtree(self.proc / str(pid), ignore_errors=True)

    def use_memory(self, pid: int) -> None:
        """A process allocates another amount."""
        before = self.truth.processes[pid]
        one = replace(before, memory_bytes=self._amount(before.leaf))
        with self.change(processes={**self.truth.processes, pid: one}):
            pass

    def _amount(self, leaf: str) -> int:
        """Return an amount of memory in bytes that the device has: at most half of what is free."""
        has = MIG_BYTES if leaf in self.truth.instances else CARD_BYTES
        free = (has - self.truth.used_bytes(leaf)) // MIB
        return self.random.randrange(1, max(2, min(2048, free // 2))) * MIB

    def _free_pid(self) -> int:
        while True:
            pid = PIDS[self._next_pid % len(PIDS)]
            self._next_pid += 1
            if pid not in self.truth.processes:
                self.counts["pids used again"] += self._next_pid > len(PIDS)
                return pid

    def repartition(self) -> None:
        """Drain the partitioned GPU and give it other MIG devices."""
        held = [pod for pod in self.truth.pods.values() if any(g.sharing is MIG for g in pod.grants.values())]
        for pod in held:
            self.stop_pod(pod)
        for one in list(self.truth.processes.values()):
            if one.leaf in self.truth.instances:
                self.end_process(one.pid)
        self._partitions += 1
        self.counts["repartitions"] += 1
        with self.change(instances=_instance_uuids(self._partitions, self.random.randint(1, 7))):
            self._write_drivers()

    # --- faults ---

    def breaks(self, agents: Iterable[str], parts: Iterable[str]) -> contextlib.AbstractContextManager[None]:
        """The block breaks these parts for these agents."""
        return self.change(faults=self.truth.faults | {(agent, part) for agent in agents for part in parts})

    def mends(self, agents: Iterable[str], parts: Iterable[str]) -> contextlib.AbstractContextManager[None]:
        """The block mends them. Until `recovered`, the pages need not show it."""
        gone = {(agent, part) for agent in agents for part in parts}
        return self.change(faults=self.truth.faults - gone, recovering=self.truth.recovering | gone)

    def recovered(self) -> None:
        """From now on the pages must show everything that is not broken."""
        if self.truth.recovering:
            with self.change(recovering=frozenset()):
                pass

    # --- what the sources read ---

    def _write_kubelet(self) -> None:
        pods, offered = self.truth.pods.values(), self._offered()
        self.write_kubelet(pods, offered)
        if not any(part == "checkpoint" for _, part in self.truth.faults):  # else it is away or damaged
            self.write_checkpoint(pods, offered)

    def _offered(self) -> tuple[ResourceDevices, ...]:
        ids: dict[str, list[DeviceId]] = {}
        for leaf, gpu in self.truth.leaves.items():
            index = GPUS.index(gpu)
            every = Grant(CARDS[index], leaf, tuple(range(CARDS[index].slots)), index).devices
            ids.setdefault(every.resource, []).extend(every.ids)
        return tuple(ResourceDevices(resource, tuple(found)) for resource, found in ids.items())

    def _write_process(self, pid: int, cgroup: str, comm: str) -> None:
        self._start_ticks += 1
        folder = self.proc / f"new-{pid}"
        folder.mkdir()
        (folder / "cgroup").write_text(texts.cgroup_text("v2-systemd", cgroup))
        (folder / "stat").write_text(texts.stat_text(pid, comm, self._start_ticks))
        (folder / "comm").write_text(f"{comm}\n")
        folder.rename(self.proc / str(pid))

    def _write_drivers(self) -> None:
        truth = self.truth
        gpus = []
        for index, uuid in enumerate(GPUS):
            self.energy[uuid] += 500
            gpu = standin.Gpu(
                uuid, memory_total_bytes=CARD_BYTES, memory_used_bytes=BASE_BYTES, energy_millijoules=self.energy[uuid]
            )
            if index == PARTITIONED:
                gpu.samples = None
                gpu.mig_mode = True
                gpu.instances = [
                    standin.MigInstance(
                        leaf,
                        gi=number + 1,
                        memory_total_bytes=MIG_BYTES,
                        memory_used_bytes=truth.used_bytes(leaf),
                        processes=_rows(truth, leaf, "compute"),
                        generation=self._partitions,
                    )
                    for number, leaf in enumerate(truth.instances)
                ]
            else:
                kind = "mps" if CARDS[index] is MPS else "compute"
                gpu.memory_used_bytes = truth.used_bytes(uuid)
                gpu.processes = _rows(truth, uuid, kind)
                own = [one for one in truth.processes.values() if one.leaf == uuid]
                gpu.samples = [standin.Sample(one.pid, sm=one.sm_percent) for one in own]
            gpus.append(gpu)
        for agent, driver in self.drivers.items():
            driver.gpus, driver.xids = gpus, self.xids
            driver.write(self.state(agent))


def _rows(truth: Truth, leaf: str, kind: str) -> list[standin.Process]:
    return [
        standin.Process(one.pid, one.memory_bytes, "compute" if one.pod is None else kind)  # type: ignore[arg-type]
        for one in truth.processes.values()
        if one.leaf == leaf
    ]


def _instance_uuids(generation: int, count: int) -> tuple[str, ...]:
    return tuple(f"MIG-0000{number:04d}-0000-0000-0000-{generation:012d}" for number in range(count))


__all__ = ["AGENTS", "GIB", "GPUS", "Grant", "Pod", "Process", "SoakNode", "Truth"]
