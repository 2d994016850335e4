"""Nodes as tests describe them: what truly is, and what each source would say of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar, cast

from msgspec import structs

from gpumap.agent.join import JoinSettings, Memory, step
from gpumap.model.node import ContainerOnDevice, Use, Workload
from gpumap.model.observations import (
    CgroupKind,
    CgroupMembership,
    Checkpoint,
    CheckpointEntry,
    ClaimDevice,
    Complaint,
    ContainerLink,
    DeviceId,
    DraState,
    Failed,
    KubeletAnswer,
    ListedContainer,
    ListedPod,
    LogTree,
    Moment,
    NvmlReading,
    Observations,
    Observed,
    PciFunction,
    PluginAnswer,
    PodCgroup,
    PodIdentity,
    PodLogs,
    PreparedDevice,
    ProcEntry,
    ProcTable,
    ReportedContainer,
    ReportedPod,
    ResourceDevices,
    ScheduledShare,
    SharingContainers,
)
from gpumap.model.readings import (
    SAMPLES_OLD,
    Activity,
    DeviceMemory,
    GpuProcess,
    GpuReading,
    MigInstance,
    ProcessSample,
    Uuid,
    XidError,
)
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import DEFAULT_RESERVATION_NAMESPACES, DEFAULT_RESOURCE_PATTERN, ContainerName, PodUid

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

GIB = 1 << 30
RULES = JoinSettings(
    is_trusted=lambda _: False,
    idle_after_seconds=300.0,
    grace_seconds=120.0,
    node_name="node-a",
    internal_ip="10.0.0.1",
    is_gpu_resource=lambda name: re.fullmatch(DEFAULT_RESOURCE_PATTERN, name) is not None,
    stale_after_seconds=60.0,
    is_reserving=lambda namespace: re.fullmatch(DEFAULT_RESERVATION_NAMESPACES, namespace) is not None,
)


def hex_of(*words: object, digits: int = 64) -> str:
    return hashlib.sha256("/".join(map(str, words)).encode()).hexdigest()[:digits]


@cache
def uuid_of(*words: object) -> str:
    text = hex_of(*words, digits=32)
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def gpu_uuid(index: int) -> Uuid:
    return Uuid(f"GPU-{uuid_of('gpu', index)}")


def mig_uuid(index: int, gi: int, ci: int) -> Uuid:
    return Uuid(f"MIG-{uuid_of('mig', index, gi, ci)}")


@dataclass
class Process:
    """`pod` is `None` for a process of the host."""

    pid: int
    leaf: Uuid
    pod: Pod | None
    container: str = "main"
    memory: int | None = GIB
    sm: float = 0.0
    types: str = "C"
    start: int = 1000
    comm: str = "python3"
    readable: bool = True
    left: bool = False
    cgroup: CgroupMembership | None = None
    """What its cgroup file says, if it is not its pod's container."""
    work: Workload | None = None
    """What its paths name, or its user."""


@dataclass
class Pod:
    """A pod: `ids` by container and resource, DRA's devices by container. `init` containers are only in the
    checkpoint and the log tree."""

    namespace: str
    name: str
    ids: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    init: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    claims: dict[str, list[ClaimDevice]] = field(default_factory=dict)
    answers: dict[tuple[str, str], PluginAnswer] = field(default_factory=dict)
    """What plugins put into its containers, by container and resource."""
    truth: dict[str, frozenset[Uuid]] = field(default_factory=dict)
    """The devices that each container truly holds, where a test knows."""
    by_answer: set[str] = field(default_factory=set)
    """Containers with devices that only the plugins' answers name."""
    generation: int = 0
    listed: bool = True
    in_checkpoint: bool = True
    has_tree: bool = True
    has_links: bool = True
    groups: tuple[str, ...] = ()
    """Of GPUs that a scheduler shares."""
    shares: tuple[ScheduledShare, ...] = ()
    """What a scheduler noted at the pod; its UID is put in."""
    may_share: bool = True
    """It has a sign of a scheduler that shares GPUs, by the Pods API."""

    @property
    def uid(self) -> PodUid:
        return PodUid(uuid_of(self.namespace, self.name, self.generation))

    def container_id(self, container: str) -> str:
        return hex_of(self.uid, container)

    def full(self, container: str = "main") -> ContainerName:
        return ContainerName(self.namespace, self.name, container)

    def row(self, snapshot: Snapshot, leaf: Uuid, container: str = "main") -> ContainerOnDevice:
        """Its row on a device, which must exist."""
        found = row(snapshot, self.full(container), leaf)
        assert found is not None, f"{self.name} has no row on {leaf}"
        return found

    def use(self, snapshot: Snapshot, leaf: Uuid, container: str = "main") -> Use:
        """What was measured of it on a device, which must be known."""
        found = self.row(snapshot, leaf, container).use
        assert found is not None, f"the use of {self.name} on {leaf} is unknown"
        return found

    def as_listed(self, left_out: Collection[str] = ()) -> ListedPod:
        ids = {
            name: {resource: found for resource, found in of_container.items() if resource not in left_out}
            for name, of_container in self.ids.items()
        }
        containers = tuple(
            ListedContainer(name, tuple(resources(ids.get(name, {}))), tuple(sorted(self.claims.get(name, ()))))
            for name in sorted({*self.ids, *self.claims})
        )
        return ListedPod(self.namespace, self.name, containers)


def holder(name: str, *ids: str, resource: str = "", namespace: str = "ml") -> Pod:
    """A pod with a container `main` that holds devices, or slots of a shared one."""
    default = "nvidia.com/gpu.shared" if any("::" in id_ for id_ in ids) else "nvidia.com/gpu"
    return Pod(namespace, name, {"main": {resource or default: list(map(str, ids))}})


def resources(ids: dict[str, list[str]]) -> Iterable[ResourceDevices]:
    return (ResourceDevices(name, tuple(sorted(map(DeviceId, set(found))))) for name, found in sorted(ids.items()))


WHOLE = (-1, -1)


@dataclass
class Gpu:
    """`mig` lists (gpu instance, compute instance, slices); `None` is a GPU that is not partitioned."""

    index: int
    mig: list[tuple[int, int, int]] | None = None
    fault: str | None = None
    total: int = 80 * GIB
    overhead: int = 100 << 20
    has_samples: bool = True
    samples_from: str = SAMPLES_OLD
    sampled_seconds: float | None = None
    utilization: float | None = None
    late_samples: tuple[ProcessSample, ...] = ()
    """Of processes that have left within the interval."""
    minor: int | None = None
    """The index, if not reported."""
    has_minor: bool = True
    """Whether the driver answers for the minor."""
    has_placements: bool = True
    """Whether the driver reports the placement of MIG devices."""
    millijoules: int | None = None
    """What it counted of energy since its driver was loaded; `None`: it counts none."""
    activities: dict[tuple[int, int], float] = field(default_factory=dict)
    """SM activity of MIG devices, by their (gpu instance, compute instance); of a GPU without partitions, of WHOLE."""
    pcie: tuple[str, int, int] | None = None
    """Who counts bytes over PCIe, and the bytes sent and received."""
    watts_max: float | None = None
    """Its enforced power limit."""
    watts_limits: dict[str, float] = field(default_factory=dict)
    """Its other power limits, by kind."""
    values: dict[str, Any] = field(default_factory=dict)
    """More values of its reading, instead of those above."""

    @property
    def uuid(self) -> Uuid:
        return gpu_uuid(self.index)

    @property
    def device_minor(self) -> int:
        return self.index if self.minor is None else self.minor

    @property
    def leaves(self) -> list[Uuid]:
        return [self.uuid] if self.mig is None else [mig_uuid(self.index, gi, ci) for gi, ci, _ in self.mig]


class Renumbered(Gpu):
    """A card at another index than the one that its uuid was made of."""

    def __init__(self, gpu: Gpu, index: int) -> None:
        super().__init__(index, minor=gpu.device_minor)
        self._uuid = gpu.uuid

    @property
    def uuid(self) -> Uuid:
        return self._uuid


@dataclass
class TestNode:
    """The truth, and which sources are down. `observe` asks; `collect` steps on."""

    __test__ = False

    gpus: list[Gpu] = field(default_factory=list)
    pods: list[Pod] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    allocatable: dict[str, list[str]] | None = None
    registered: dict[str, list[str]] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    has_kubelet: bool = True
    kubelet_reason: str = "socket_missing"
    nvml_reason: str = "no driver"
    socket: str = "first"
    visible: bool = True
    is_machine: bool = True
    """/proc is of the machine's own PID namespace."""
    checkpoint_readable: bool = True
    logs_readable: bool = True
    clock: float = 1000.0
    asleep: float = 0.0
    """How long the machine has been suspended, which `clock` does not count."""
    wall_step: float = 0.0
    """By how much the wall clock was set."""
    memory: Memory = field(default_factory=Memory, repr=False)
    prepared: tuple[PreparedDevice, ...] | None = None
    reports_pods: bool = False
    """The kubelet has the Pods API."""
    kept_pods: tuple[ReportedPod, ...] | None = None
    """What gpumap keeps of the Pods API since `pods_at`, while the kubelet drops its events."""
    pods_at: float = 0.0
    shares: tuple[ScheduledShare, ...] = ()
    """What a scheduler wrote into files."""
    noted: tuple[ContainerLink, ...] = ()
    """Containers in a scheduler's files, without their names."""
    scheduler_files_complete: bool = True
    ended: set[str] = field(default_factory=set)
    """Names of pods without a process in /proc."""
    rules: JoinSettings = RULES
    trigger: str = "interval"
    left_out: set[str] = field(default_factory=set)
    """Resources with devices that an old kubelet does not list."""
    xids: tuple[XidError, ...] = ()
    """For the next reading."""
    pci: list[PciFunction] | None = None
    """Its GPUs on PCI; `None`: not read."""
    given: dict[Hashable, Hashable] = field(default_factory=dict, repr=False)
    reading: NvmlReading | None = None
    """What a real worker answered, instead of what `gpus` and `processes` say of NVML."""

    def collect(self, seconds: float = 5.0) -> Snapshot:
        """Let time pass and collect once."""
        self.clock += seconds
        self.memory, snapshot = step(self.memory, self.observe(), self.rules)
        return snapshot

    def watch(self, seconds: float = 330.0) -> Snapshot:
        """Collect for longer than a holder must rest to be idle."""
        for _ in range(int(seconds / 30.0)):
            snapshot = self.collect(30.0)
        return snapshot

    @property
    def now(self) -> Moment:
        return Moment(self.clock, 1.7e9 + self.clock + self.asleep + self.wall_step, self.asleep)

    def later(self, seconds: float) -> Moment:
        """The moment so many seconds after now."""
        return Moment(self.clock + seconds, self.now.wall + seconds, self.asleep)

    def observe(self) -> Observations:
        return Observations(
            nvml=self._failed(self.nvml_reason) if "nvml" in self.down else self._seen(self._nvml()),
            procfs=self._failed("unreadable") if "procfs" in self.down else self._seen(self._proc()),
            pod_identity=self.observe_identity() if self.has_kubelet else None,
            kubelet=self.observe_kubelet() if self.has_kubelet else None,
            finished=self.now,
            trigger=self.trigger,
            pci=None
            if self.pci is None
            else self._failed("unreadable")
            if "pci" in self.down
            else self._seen(tuple(self.pci)),
        )

    def observe_identity(self) -> Observed[PodIdentity] | Failed:
        return self._failed("missing") if self.has_no_identity else self._seen(self._identity())

    def observe_kubelet(self) -> Observed[KubeletAnswer] | Failed:
        return self._failed(self.kubelet_reason) if "kubelet" in self.down else self._seen(self._kubelet())

    @property
    def has_no_identity(self) -> bool:
        can_read = self.checkpoint_readable or self.logs_readable or self.reports_pods
        return "pod_identity" in self.down or not can_read

    def _same(self, value: H) -> H:
        """As the sources do it: for an equal value the very same object, by which the step knows what is unchanged."""
        return cast(H, self.given.setdefault(value, value))

    def _seen(self, value: T) -> Observed[T]:
        return Observed(value, self.now, 0.001)

    def _failed(self, reason: str) -> Failed:
        return Failed(self.now, 0.001, (Complaint(reason, f"{reason} of the test"),))

    def _kubelet(self) -> KubeletAnswer:
        pods = tuple(sorted({pod.as_listed(self.left_out) for pod in self.pods if pod.listed}))
        allocatable = None if self.allocatable is None else tuple(resources(self.allocatable))
        is_old = bool(self.left_out)
        return KubeletAnswer(self._same(pods), self._same(allocatable), self.socket, is_old, not is_old)

    def _identity(self) -> PodIdentity:
        checkpoint = None
        if self.checkpoint_readable:
            rows = tuple(
                CheckpointEntry(
                    pod.uid, container, resource, frozenset(map(DeviceId, ids)), pod.answers.get((container, resource))
                )
                for pod in self.pods
                if pod.in_checkpoint
                for container, of_container in {**pod.ids, **pod.init}.items()
                for resource, ids in of_container.items()
            )
            checkpoint = Checkpoint(rows, tuple(resources(self.registered)))
        logs = None
        if self.logs_readable:
            with_tree = [pod for pod in self.pods if pod.has_tree]
            trees = tuple(
                sorted(
                    LogTree(pod.uid, pod.namespace, pod.name, tuple(sorted({*pod.ids, *pod.init, *pod.claims})))
                    for pod in with_tree
                )
            )
            links = tuple(
                ContainerLink(pod.container_id(container), pod.uid, pod.full(container))
                for pod in self.pods
                if pod.has_links
                for container in {*pod.ids, *pod.init, *pod.claims}
            )
            logs = PodLogs(trees, links)
        dra = self._same(DraState(None, self.prepared))
        return PodIdentity(
            self._same(checkpoint),
            self._same(logs),
            dra,
            self._reported(),
            SharingContainers(self.noted, self.shares, self.scheduler_files_complete),
            self.pods_at if self.kept_pods is not None else self.clock,
        )

    def drop_pod_events(self) -> None:
        """Let the kubelet drop the events of its Pods API from now on."""
        self.kept_pods, self.pods_at = self._reported(), self.clock

    def list_pods_again(self) -> None:
        """Let gpumap list the pods again, as it does every 60 s."""
        self.kept_pods = None

    def _reported(self) -> tuple[ReportedPod, ...] | None:
        if not self.reports_pods or self.kept_pods is not None:
            return self.kept_pods
        return self._same(
            tuple(
                ReportedPod(
                    pod.uid,
                    pod.namespace,
                    pod.name,
                    tuple(ReportedContainer(name, pod.container_id(name)) for name in sorted({*pod.ids, *pod.init})),
                    pod.groups,
                    tuple(replace(share, pod_uid=pod.uid) for share in pod.shares),
                    pod.may_share,
                )
                for pod in self.pods
                if pod.listed
            )
        )

    def _proc(self) -> ProcTable:
        here = {process.pid: process for process in self.processes if not process.left}
        entries = tuple(_entry(process) for pid, process in sorted(here.items()) if process.readable)
        unreadable = tuple(pid for pid, process in sorted(here.items()) if not process.readable)
        if not self.visible:
            return ProcTable((), (), pid_visibility=False, visibility_reason="not in this test")
        living = frozenset(pod.uid for pod in self.pods if pod.listed and pod.name not in self.ended)
        return ProcTable(
            entries,
            unreadable,
            pid_visibility=True,
            visibility_reason="in this test",
            living_pods=living,
            is_machine=self.is_machine,
        )

    def _nvml(self) -> NvmlReading:
        if self.reading is not None:
            return self.reading
        gpus = (structs.replace(self._gpu(gpu), **gpu.values) for gpu in self.gpus)
        xids, self.xids = self.xids, ()
        return NvmlReading("550.54", "12.4", "12.550", tuple(gpus), xids)

    def _gpu(self, gpu: Gpu) -> GpuReading:
        if gpu.fault is not None:
            return GpuReading(gpu.index, fault=gpu.fault)
        base = GpuReading(
            gpu.index,
            uuid=gpu.uuid,
            minor=gpu.device_minor if gpu.has_minor else None,
            pci_bus_id=f"00000000:0{gpu.index}:00.0",
            model="NVIDIA Test",
            energy_joules=None if gpu.millijoules is None else gpu.millijoules / 1000,
            power_limit_watts=gpu.watts_max,
            power_limits_watts=gpu.watts_limits,
        )
        if gpu.pcie is not None:
            source, sent, received = gpu.pcie
            base = structs.replace(base, pcie_source=source, pcie_transmit_bytes=sent, pcie_receive_bytes=received)
        if gpu.mig is None:
            processes = self._on(gpu.uuid)
            samples = tuple(
                ProcessSample(process.pid, process.sm, process.sm / 2, 0.0, 0.0)
                for process in self.processes
                if process.leaf == gpu.uuid and process.sm
            )
            return structs.replace(
                base,
                memory=self._memory(gpu, processes),
                processes=processes,
                samples=(*samples, *gpu.late_samples) if gpu.has_samples else None,
                activity=_activity(gpu, WHOLE),
                samples_from=gpu.samples_from,
                sampled_seconds=gpu.sampled_seconds,
                utilization_ratio=gpu.utilization,
            )
        instances = tuple(self._instance(gpu, gi, ci, slices) for gi, ci, slices in gpu.mig)
        everything = tuple(process for leaf in gpu.leaves for process in self._on(leaf))
        return structs.replace(
            base, partitioned=True, max_mig_devices=7, instances=instances, memory=self._memory(gpu, everything)
        )

    def _instance(self, gpu: Gpu, gi: int, ci: int, slices: int) -> MigInstance:
        in_gpu_instance = [mig_uuid(gpu.index, gi, other) for one, other, _ in gpu.mig or [] if one == gi]
        shared = tuple(process for leaf in in_gpu_instance for process in self._on(leaf))
        leaf = mig_uuid(gpu.index, gi, ci)
        memory = self._memory(replace(gpu, total=gpu.total // 8), shared)
        place = (
            19 if gpu.has_placements else None,
            gi if gpu.has_placements else None,
            1 if gpu.has_placements else None,
        )
        return MigInstance(
            *(leaf, gi, ci, f"{slices}g.10gb", slices, memory, self._on(leaf), *place),
            denied=False,
            activity=_activity(gpu, (gi, ci)),
        )

    def _on(self, leaf: Uuid) -> tuple[GpuProcess, ...]:
        return tuple(
            GpuProcess(process.pid, process.memory, process.types) for process in self.processes if process.leaf == leaf
        )

    def _memory(self, gpu: Gpu, processes: tuple[GpuProcess, ...]) -> DeviceMemory:
        used = gpu.overhead + sum(process.used_memory_bytes or 0 for process in processes)
        return DeviceMemory(gpu.total, used, max(0, gpu.total - used), 0)


def _activity(gpu: Gpu, of: tuple[int, int]) -> Activity | None:
    sm_ratio = gpu.activities.get(of)
    return None if sm_ratio is None else Activity(sm_ratio, None, None, None)


def _entry(process: Process) -> ProcEntry:
    if process.cgroup is not None:
        membership = process.cgroup
    elif process.pod is None:
        membership = CgroupMembership(CgroupKind.HOST)
    else:
        cgroup = PodCgroup(process.pod.uid, process.pod.container_id(process.container))
        membership = CgroupMembership(CgroupKind.POD, (cgroup,))
    return ProcEntry(process.pid, process.start, process.comm, membership, process.work)


def owners(snapshot: Snapshot, leaf: Uuid) -> dict[str, int | None]:
    """Bytes of a leaf by owner."""
    uses = (use for found in snapshot.node.devices if found.uuid == leaf for use in found.owners)
    return {use.owner.value: use.memory_bytes for use in uses}


def processes_by_owner(snapshot: Snapshot, leaf: Uuid) -> dict[str, int | None]:
    """Processes of a leaf by owner."""
    uses = (use for found in snapshot.node.devices if found.uuid == leaf for use in found.owners)
    return {use.owner.value: use.processes for use in uses}


def row(snapshot: Snapshot, name: ContainerName, uuid: Uuid) -> ContainerOnDevice | None:
    """The row of a container and a device."""
    return next((found for found in snapshot.containers if (found.name, found.uuid) == (name, uuid)), None)


def use(snapshot: Snapshot, name: ContainerName, uuid: Uuid) -> Use | None:
    """What was measured of a container on a device."""
    found = row(snapshot, name, uuid)
    return found.use if found else None
