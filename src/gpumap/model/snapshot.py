"""The snapshot: the map of one node at one moment. `join.step` makes it; metrics, dialects and pages read it.

Frozen values. An unknown value is `None`, never 0. What several readers compute from a snapshot is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast, overload

from msgspec import Struct

from gpumap.model.observations import ContainerName, DeviceHealth, Moment, NvmlReading, PodUid, Source
from gpumap.model.readings import Activity, DeviceMemory, GpuReading, MigInstance, Uuid
from gpumap.model.terms import Owner as Owner
from gpumap.model.workloads import Workload

_Row = TypeVar("_Row")
_View = TypeVar("_View")


class OwnerUse(Struct, frozen=True):
    """`memory_bytes` is `None` if it is unknown for all processes; `processes` is `None` for the unaccounted rest."""

    owner: Owner
    memory_bytes: int | None
    processes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A physical GPU. `reading` is `None` while it is lost or hung; `fault` is then the reason."""

    uuid: Uuid
    index: int
    minor: int | None
    pci_bus_id: str
    model: str
    partitioned: bool
    fault: str | None
    stuck_seconds: float
    last_success: float | None
    reading: GpuReading | None
    recovery_action: str | None = None
    """The action that the driver requests. A GPU that needs a reset has it too."""
    ecc_uncorrected_at: float | None = None
    """When a count of uncorrected ECC errors last grew, in Unix seconds. `None` if none did since gpumap's start."""


@dataclass(frozen=True, slots=True)
class NamelessGpu:
    """A GPU that NVML counts, and that has not reported its uuid since gpumap's start. It has no series."""

    index: int
    fault: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """What the kubelet can assign: a GPU that is not partitioned, or a MIG device.

    Also a uuid that only the kubelet lists while NVML is down: then `gpu` is `None` and nothing is measured.
    """

    uuid: Uuid
    gpu: Gpu | None
    instance: MigInstance | None = None
    memory: DeviceMemory | None = None
    holders: int | None = None
    """Containers that certainly hold it; `None` without a current List."""
    allocatable: tuple[tuple[str, int], ...] = ()
    owners: tuple[OwnerUse, ...] = ()
    host: tuple[HostUse, ...] = ()
    may_have_more: bool = False
    """A slot that gpumap could not place may be on it: `holders` is the least."""

    @property
    def activity(self) -> Activity | None:
        """GPM's measurements of the MIG device, or of the GPU that is not partitioned."""
        if self.instance is not None:
            return self.instance.activity
        reading = self.gpu.reading if self.gpu is not None else None
        return reading.activity if reading is not None and not reading.partitioned else None


class HostUse(NamedTuple):
    """Measurements of one work outside pods on a leaf. They split the owner `host`. An unknown value is `None`."""

    workload: Workload
    memory_bytes: int | None
    processes: int
    sm_ratio: float | None


class ContainerUse(Struct, frozen=True):
    """Measurements of a container on a leaf. An unknown value is `None`."""

    memory_bytes: int | None
    memory_peak_bytes: int | None
    processes: int
    sm_ratio: float | None
    memory_controller_ratio: float | None
    encoder_ratio: float | None
    decoder_ratio: float | None
    unassigned: bool
    last_active: float | None
    """Unix seconds. `None` if it is unknown whether it worked since the collection before."""
    pod_uid: PodUid | None = None
    """The pod that was measured: one of the same name may also have processes here."""
    seen_seconds: float | None = None
    """For how long every collection has measured the container here. `None` if its pod's UID is unknown."""
    no_process_seconds: float | None = None
    """For how long no collection has found a process of it. It counts only time in which gpumap measured it."""
    sm_activity_ratio: float | None = None
    """SM activity of a MIG device that no other container uses."""

    @property
    def busy_ratio(self) -> float | None:
        """Return its SM time, or its SM activity on a MIG device."""
        return self.sm_activity_ratio if self.sm_ratio is None else self.sm_ratio

    scheduled: bool = False
    """A scheduler beside the kubelet lets it use the device."""


class ContainerOnDevice(Struct, frozen=True):
    """One container and one device: what it holds of it (`slots`, by resource) and what it uses (`use`)."""

    name: ContainerName
    uuid: Uuid
    slots: tuple[tuple[str, int], ...] = ()
    allocated_gpus: float | None = None
    allocated_memory_bytes: int | None = None
    use: ContainerUse | None = None
    admin_access: bool | None = False
    """It holds the device by DRA claims with admin access only. `None` if unknown."""
    reservation: bool = False
    """It holds the device for a scheduler that shares it among other pods. Nothing is granted to it."""
    scheduled: bool = False
    """A scheduler granted it a share of the device, and the kubelet no slot."""

    @property
    def holds(self) -> bool:
        return bool(self.slots) or self.scheduled


class ContainerAccount(Struct, frozen=True):
    """Counters of a container on a device since it was first present. They exist for a while after it is gone.

    A counter is `None` until its value was known once.
    """

    name: ContainerName
    uuid: Uuid
    allocated_gpu_seconds: float | None
    sm_seconds: float | None
    memory_byte_seconds: float | None
    energy_joules: float | None
    sm_activity_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GpuAccount:
    """Energy and time of a GPU that no container was charged for. It exists also while the GPU does not answer.

    `energy_unattributed_joules` is `None` if the GPU does not count energy.
    """

    uuid: Uuid
    energy_unattributed_joules: float | None
    gap_seconds: float


@dataclass(frozen=True, slots=True)
class GpuXids:
    """XID errors of a GPU by code, and how long there was no listener for them."""

    uuid: Uuid
    counts: tuple[tuple[int, int], ...]
    blind_seconds: float
    last_code: int | None = None
    """Code of the last error; `None` if there was none."""
    last_at: tuple[tuple[int, float], ...] = ()
    """(code, time of its last error in Unix seconds), if the time is known."""


class ContainerXids(NamedTuple):
    """XID errors of one code on a device while this container held or used it."""

    name: ContainerName
    uuid: Uuid
    code: int
    errors: int


class ProcessUse(NamedTuple):
    """A process on a leaf. `name` is `None` if its pod is unknown."""

    pid: int
    uuid: Uuid
    types: str
    comm: str
    owner: Owner
    name: ContainerName | None
    pod_uid: PodUid | None
    memory_bytes: int | None
    sm_ratio: float | None
    memory_controller_ratio: float | None = None
    encoder_ratio: float | None = None
    decoder_ratio: float | None = None
    workload: Workload | None = None
    """What a process outside pods belongs to; of one in a pod the Slurm job, if there is one."""
    owner_since: float | None = None
    """Unix seconds of the first snapshot with evidence for an owner that needs confirmation."""


@dataclass(frozen=True, slots=True)
class UnmatchedSlots:
    """Slots of a container that are on no device that NVML knows, and why."""

    name: ContainerName
    resource: str
    reason: str
    slots: int


class ReportedDeviceHealth(NamedTuple):
    """The health of a container's device, as its plugin reports it."""

    name: ContainerName
    health: DeviceHealth


class HiddenDevice(NamedTuple):
    """A MIG device that was made after gpumap's start. gpumap's container does not have its device nodes."""

    uuid: Uuid
    since: float
    """Unix seconds."""


class PodInfo(Struct, frozen=True):
    """A pod that holds or uses a GPU. `uid` is empty if unknown."""

    namespace: str
    pod: str
    uid: str


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """A source's record since the start. `up` is whether its last attempt succeeded."""

    source: Source
    up: bool = False
    reason: str = ""
    detail: str = ""
    last_success: Moment | None = None
    attempts: int = 0
    seconds: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)
    """Complaints by reason, also of attempts that succeeded."""
    failures: int = 0
    last_seconds: float | None = None
    """How long the last attempt took."""


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    internal_ip: str


class LazyRows(Sequence[_Row]):
    """Rows that are made when a reader first needs them. It equals a tuple of the same rows.

    Two threads that need them at the same time may both make them: the rows are equal.
    """

    __slots__ = ("_make", "_rows")

    def __init__(self, make: Callable[[], Iterable[_Row]]) -> None:
        self._make: Callable[[], Iterable[_Row]] | None = make

    def _made(self) -> tuple[_Row, ...]:
        if (make := self._make) is not None:
            self._rows = tuple(make())
            self._make = None  # it has the data that the rows are made of
        return self._rows

    def __len__(self) -> int:
        return len(self._made())

    def __iter__(self) -> Iterator[_Row]:
        return iter(self._made())

    @overload
    def __getitem__(self, at: int) -> _Row: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[_Row, ...]: ...
    def __getitem__(self, at: int | slice) -> _Row | tuple[_Row, ...]:
        return self._made()[at]

    def __eq__(self, other: object) -> bool:
        return self._made() == (other._made() if isinstance(other, LazyRows) else other)

    def __hash__(self) -> int:
        return hash(self._made())

    def __repr__(self) -> str:
        return repr(self._made())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One node's map at `at`. Everything in it is sorted, so that equal nodes give equal pages."""

    at: Moment
    node: Node
    sources: tuple[SourceHealth, ...]
    capabilities: tuple[tuple[str, bool], ...]
    collections: tuple[tuple[str, int], ...]
    visibility_reason: str = ""
    """Why the capability pid_visibility is present or absent."""
    expires: float | None = None
    """Monotonic time at which data of an earlier collection becomes too old to serve."""
    driver: NvmlReading | None = None
    gpus: tuple[Gpu, ...] = ()
    nameless_gpus: tuple[NamelessGpu, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    containers: tuple[ContainerOnDevice, ...] = ()
    processes: Sequence[ProcessUse] = ()
    """`LazyRows`: many nodes have no reader of them."""
    unmatched: tuple[UnmatchedSlots, ...] = ()
    pods: tuple[PodInfo, ...] = ()
    device_health: tuple[ReportedDeviceHealth, ...] | None = None
    """`None` if the Pods API is not enabled or does not answer."""
    accounts: tuple[ContainerAccount, ...] = ()
    gpu_accounts: tuple[GpuAccount, ...] = ()
    xids: tuple[GpuXids, ...] = ()
    container_xids: tuple[ContainerXids, ...] = ()
    has_short_process: bool = False
    """A process that began and ended between two collections worked on a leaf that a container holds."""
    hidden: tuple[HiddenDevice, ...] = ()
    """Only a new container solves it: the service exits to get one."""
    lost_driver: str = ""
    """Why NVML will not answer this container again: the service exits to get a new one."""
    views: dict[Callable[..., object], object] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What readers computed from it with `once_per_snapshot`. They are freed with it."""


def once_per_snapshot(read: Callable[[Snapshot], _View]) -> Callable[[Snapshot], _View]:
    """Compute a view of a snapshot once, for all families that need it. They must not change it.

    Two threads that need it at the same time may both compute it: the results are equal.
    """

    def view(snapshot: Snapshot) -> _View:
        if read not in snapshot.views:
            snapshot.views[read] = read(snapshot)
        return cast(_View, snapshot.views[read])

    return view
