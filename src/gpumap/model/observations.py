"""The answers of sources as frozen values: of the kubelet, NVML, /proc, the checkpoint and the log directories.

A value that the source did not report is `None`; "there are none" is an empty tuple; a failure is `Failed`. No logic.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Generic, NamedTuple, NewType, TypeVar

from msgspec import Meta

from gpumap.model.node import Workload
from gpumap.model.readings import GpuReading, Listening, Uuid, XidError
from gpumap.model.terms import ContainerName, PodName, PodUid

DeviceId = NewType("DeviceId", str)
"""The kubelet's string for one slot of a device."""

T_co = TypeVar("T_co", covariant=True)


class Moment(NamedTuple):
    """One instant on both clocks: monotonic for ages, wall (Unix seconds) for people.

    `asleep` is how long the machine has been suspended since it booted: the monotonic clock does not count that time.
    """

    monotonic: float
    wall: float
    asleep: float = 0.0

    def since(self, before: Moment) -> float:
        """Return the seconds since an earlier moment, also those of a suspended machine."""
        return self.monotonic + self.asleep - (before.monotonic + before.asleep)


# --- observations: one answer of one source ---------------------------------------------------------------------------


class Complaint(NamedTuple):
    """A problem in a source. `reason` is a short word for a label, `detail` a sentence for the log."""

    reason: str
    detail: str


class SourceAnswer(NamedTuple, Generic[T_co]):
    """What a source returns: its answer, and problems that did not prevent the answer."""

    value: T_co
    complaints: tuple[Complaint, ...] = ()


class SourceError(Exception):
    """A source cannot answer. The collection goes on without it."""

    def __init__(self, reason: str, detail: str, earlier: tuple[Complaint, ...] = ()) -> None:
        super().__init__(f"{reason}: {detail}")
        self.complaints = (*earlier, Complaint(reason, detail))


@dataclass(frozen=True, slots=True)
class Observed(Generic[T_co]):
    """A source's answer. `complaints` did not prevent it (a retried rate limit, one unreadable file)."""

    value: T_co
    at: Moment
    seconds: float
    complaints: tuple[Complaint, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A source did not answer. `complaints` has at least one entry; the last one is why."""

    at: Moment
    seconds: float
    complaints: tuple[Complaint, ...]


# --- the kubelet ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class ResourceDevices:
    """The ids of one resource, sorted, each once."""

    resource: str
    ids: tuple[DeviceId, ...]


@dataclass(frozen=True, slots=True, order=True)
class ClaimDevice:
    """A device of a DRA claim. Its resource is its driver's name.

    A claim that several pods share is listed for each. With consumable capacity each share has an id.
    """

    driver: str
    pool: str
    device: str
    share_id: str = ""
    claim_namespace: str = ""
    claim: str = ""


@dataclass(frozen=True, slots=True, order=True)
class ListedContainer:
    name: str
    devices: tuple[ResourceDevices, ...] = ()
    claims: tuple[ClaimDevice, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class ListedPod:
    """A pod of the kubelet's List, its containers sorted by name."""

    namespace: str
    name: str
    containers: tuple[ListedContainer, ...] = ()

    @property
    def pod_name(self) -> PodName:
        return PodName(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class KubeletAnswer:
    """List and GetAllocatableResources of one kubelet.

    `allocatable` is `None` if the kubelet does not support it, and empty while no plugin is registered. `socket`
    changes when the kubelet restarts and makes a new socket.
    """

    pods: tuple[ListedPod, ...]
    allocatable: tuple[ResourceDevices, ...] | None
    socket: str
    may_leave_out_devices: bool = False
    """The kubelet has the List of version 1 but not GetAllocatableResources: it is older than 1.23. Kubelets 1.20 to
    1.22 do not list devices without NUMA topology (kubernetes/kubernetes#103289)."""
    may_have_claims: bool = True
    """The kubelet is not older than 1.23: it may have DRA claims, which kubelets before 1.34 do not list."""


# --- pod identity: local files that connect UIDs, names and container ids ---------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class PluginAnswer:
    """What a device plugin adds to a container (ContainerAllocateResponse): the parts about GPUs and shares."""

    envs: tuple[tuple[str, str], ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    device_paths: tuple[str, ...] = ()
    """On the host: `/dev/nvidia<minor>`."""
    mount_paths: tuple[str, ...] = ()
    """In the container."""
    cdi_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One row of the kubelet's device checkpoint. Rows of ended pods stay until the kubelet writes it again.

    `answer` is `None` if the row has none, or an unreadable one.
    """

    pod_uid: PodUid
    container: str
    resource: str
    ids: frozenset[DeviceId]
    answer: PluginAnswer | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    entries: tuple[CheckpointEntry, ...]
    registered: tuple[ResourceDevices, ...]


@dataclass(frozen=True, slots=True, order=True)
class LogTree:
    """A directory `<namespace>_<pod>_<uid>` of the pod log root with the containers in it."""

    pod_uid: PodUid
    namespace: str
    pod: str
    containers: tuple[str, ...]

    @property
    def pod_name(self) -> PodName:
        return PodName(self.namespace, self.pod)


@dataclass(frozen=True, slots=True, order=True)
class ContainerLink:
    """A link of `/var/log/containers`, or a note of a scheduler. `container_id` is cut if the names are long.

    The container is empty in a note that has only the pod.
    """

    container_id: str
    pod_uid: PodUid
    name: ContainerName


@dataclass(frozen=True, slots=True)
class PodLogs:
    trees: tuple[LogTree, ...]
    links: tuple[ContainerLink, ...]


@dataclass(frozen=True, slots=True, order=True)
class ClaimPods:
    """A DRA claim in the kubelet's state, with the pods that it is prepared for."""

    namespace: str
    claim: str
    pod_uids: tuple[PodUid, ...]


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """A claim's device that NVIDIA's DRA driver prepared. `claim` is empty if its checkpoint has only UIDs."""

    claim_namespace: str
    claim: str
    device: str
    share_id: str
    uuid: Uuid
    admin_access: bool
    memory_bytes: int | None
    """Memory that a share consumes, if the device's capacity is consumable."""


@dataclass(frozen=True, slots=True)
class DraState:
    """DRA claims in local files. A file that is not readable is `None`."""

    claims: tuple[ClaimPods, ...] | None = None
    prepared: tuple[PreparedDevice, ...] | None = None


class DeviceHealth(NamedTuple):
    """A plugin's report on the health of a container's device. A claim's resource is `claim:<name>/…`."""

    resource: str
    device_id: str
    health: str
    """Healthy, Unhealthy or Unknown."""


@dataclass(frozen=True, slots=True, order=True)
class ReportedContainer:
    """A container in a pod's status. `container_id` is empty until it has started."""

    name: str
    container_id: str
    health: tuple[DeviceHealth, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledShare:
    """A container's share of a GPU that a scheduler granted beside the kubelet, so that the List does not have it.

    The container is known by its name, or by its id if the name is empty. The GPU is known by its uuid, by its minor,
    or by the group of the reservation that holds it. `gpus` is a ratio of the device, 0-1. An amount that the
    scheduler did not grant is `None`.
    """

    pod_uid: PodUid
    container: str = ""
    container_id: str = ""
    group: str = ""
    uuid: Uuid | None = None
    minor: int | None = None
    gpus: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ReportedPod:
    """A pod of the kubelet's Pods API.

    `gpu_groups` are the groups of shared GPUs that the pod belongs to: as their reservation, or with `shares`.
    `may_share`: a scheduler that shares GPUs may know the pod. Only a pod without any of its signs does not.
    """

    pod_uid: PodUid
    namespace: str
    pod: str
    containers: tuple[ReportedContainer, ...] = ()
    gpu_groups: tuple[str, ...] = ()
    shares: tuple[ScheduledShare, ...] = ()
    may_share: bool = True

    @property
    def pod_name(self) -> PodName:
        return PodName(self.namespace, self.pod)


@dataclass(frozen=True, slots=True)
class SharingContainers:
    """What a scheduler noted in files about the containers that share GPUs: their pods, and their shares."""

    links: tuple[ContainerLink, ...] = ()
    """They have no names of containers."""
    shares: tuple[ScheduledShare, ...] = ()
    """The Pods API may report others."""
    complete: bool = True
    """Every file was readable."""


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """The identity sources. `None` is not readable; at least one of checkpoint, logs and Pods API is readable."""

    checkpoint: Checkpoint | None
    logs: PodLogs | None
    dra: DraState = DraState()
    pods: tuple[ReportedPod, ...] | None = None
    """Pods of the Pods API, if it is enabled and current."""
    sharing: SharingContainers = SharingContainers()
    pods_at: float = 0.0
    """Monotonic time at which gpumap asked for `pods`. The kubelet may have had other pods since."""


# --- processes in /proc -----------------------------------------------------------------------------------------------


class CgroupKind(enum.Enum):
    POD = "pod"  # in a pod of this node, or of a kubelet nested in one
    HOST = "host"  # in no pod
    UNKNOWN = "unknown"  # the path does not show it


class PodCgroup(NamedTuple):
    """A pod UID in a cgroup path, with the container id after it (empty if there is none)."""

    pod_uid: PodUid
    container_id: str


@dataclass(frozen=True, slots=True)
class CgroupMembership:
    """A process's cgroup. `pods` has the outermost first: with a kubelet inside a pod there are two.

    `container_id` is that of a container in no pod's directory, as with the kubelet's `cgroupsPerQOS: false`.
    """

    kind: CgroupKind
    pods: tuple[PodCgroup, ...] = ()
    container_id: str = ""


@dataclass(frozen=True, slots=True)
class ProcEntry:
    """A process, identified by (pid, start): `start` is field 22 of its stat, in clock ticks since boot."""

    pid: int
    start: int
    comm: str
    cgroup: CgroupMembership
    workload: Workload | None = None
    """The work of a process outside pods, or the Slurm job of one in a pod, if something names it."""


@dataclass(frozen=True, slots=True)
class ProcTable:
    """The /proc entries of the requested PIDs.

    A PID in neither list has ended. `unreadable` PIDs exist, but gpumap could not read their entry, or their process
    started while the driver was read: it may have a re-used PID. Without
    `pid_visibility` the entries may be of other processes; `visibility_reason` is the reason.
    """

    entries: tuple[ProcEntry, ...]
    unreadable: tuple[int, ...]
    pid_visibility: bool
    visibility_reason: str
    living_pods: frozenset[PodUid] = frozenset()
    """Those of the UIDs asked for that a process has in its cgroup path."""
    is_machine: bool = False
    """The tree is of the machine's own PID namespace: it has the processes of all others."""


# --- NVML -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """One read of the driver: every GPU that it counts, with its values or its fault."""

    driver_version: str
    cuda_version: str
    nvml_version: str
    gpus: tuple[GpuReading, ...]
    xids: tuple[XidError, ...] = ()
    """Errors since the previous reading."""
    listening: tuple[Listening, ...] = ()


# --- PCI --------------------------------------------------------------------------------------------------------------


class PciFunction(NamedTuple):
    """A GPU of NVIDIA's on PCI. Its driver is not known while NVML lists it."""

    address: Annotated[str, Meta(pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")]
    """As the kernel writes it."""
    device_id: Annotated[str, Meta(pattern=r"^0x[0-9a-f]{4}\Z")]
    """What kind of GPU it is, as 0x2330."""
    class_code: Annotated[str, Meta(pattern=r"^0x030[02]\Z")]
    """0x0300 (display) or 0x0302 (3D)."""
    driver: Annotated[str, Meta(pattern=r"^[\w-]{0,64}\Z")] = ""
    """The kernel's driver. Empty if none is bound."""
    driver_override: Annotated[str, Meta(pattern=r"^[\w-]{0,64}\Z")] = ""
    """The only driver that may be bound. Empty for any."""


@dataclass(frozen=True, slots=True)
class Observations:
    """The answers of one collection. `finished` is when the last one arrived.

    `pod_identity` and `kubelet` are `None` on a machine without a kubelet (--no-kubelet): they are no sources there.
    """

    nvml: Observed[NvmlReading] | Failed
    procfs: Observed[ProcTable] | Failed
    pod_identity: Observed[PodIdentity] | Failed | None
    kubelet: Observed[KubeletAnswer] | Failed | None
    finished: Moment
    trigger: str = "interval"
    push: bool = False
    """Whether an allocation starts a collection at once."""
    pci: Observed[tuple[PciFunction, ...]] | Failed | None = None
    """`None` if gpumap did not ask, such as while NVML does not answer."""
