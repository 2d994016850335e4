"""The node at one moment: what gpumap knows, each noun declared once. `join.step` makes it; everything reads it.

Metrics, dialects, findings and tables read these types, and /api/v1/map is their JSON: encoder, decoder, validation and
schema (`map.schema.json`, by `make docs`) come from the declarations. The text below a field is its description there.
`None` (null) is "not known", never 0. Within a version a field may be added, with a default; none is removed or changes
its meaning.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gpumap.model.readings import Activity, DeviceMemory, GpuReading, MigInstance, Uuid
from gpumap.model.terms import MEMORY_WITHOUT_PROCESS, ContainerName, Owner, PodName, PodUid, Source

VERSION = 1
"""Of the JSON. A document of another version is refused."""

Count = Annotated[int, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
SourceWord = Annotated[str, Meta(extra_json_schema={"enum": [source.value for source in Source]})]
"""A `Source`. A later agent may report another one."""


class PodFields(Struct, frozen=True):
    """Something of a pod."""

    namespace: str
    """Namespace of the pod."""
    pod: str
    """Name of the pod."""

    @property
    def pod_name(self) -> PodName:
        return PodName(self.namespace, self.pod)


class ContainerFields(PodFields, frozen=True):
    """Something of a container."""

    container: str
    """Name of the container. Empty if only the pod is known."""

    @property
    def name(self) -> ContainerName:
        return ContainerName(self.namespace, self.pod, self.container)


# --- GPUs -------------------------------------------------------------------------------------------------------------


class Gpu(Struct, frozen=True):
    """A physical GPU. While it does not answer, `reading` is null; its identity is that of its last answer."""

    uuid: Uuid
    """NVML's UUID. A lost GPU keeps its UUID."""
    index: Count
    """NVML's index."""
    minor: Count | None
    """Minor number of /dev/nvidiaN."""
    pci_bus_id: str
    """PCI bus id. Empty if unknown."""
    model: str
    """NVML's product name. Empty if unknown."""
    partitioned: bool
    """The GPU is in MIG mode: its MIG devices are devices of their own."""
    fault: str | None
    """Why it does not answer: lost, reset_required, insufficient_power, irq_issue, no_permission, hung, \
worker_crashed or unknown. Null if it answers."""
    stuck_seconds: Seconds = 0.0
    """How long a driver call on the GPU has been running."""
    last_success: float | None = None
    """When the GPU last answered, in Unix seconds."""
    reading: GpuReading | None = None
    """What NVML reports of it. Null if it does not answer."""
    samples_from: str | None = None
    """The driver's call that gives SM time of processes: nvmlDeviceGetProcessUtilization or \
nvmlDeviceGetProcessesUtilizationInfo. Null if it is not available."""
    recovery_action: str | None = None
    """The action that the driver requests: none, gpu_reset, node_reboot, drain_p2p, drain_and_reset, \
recover_imex_domain, bus_reset, system_reboot or code_N. A GPU that needs a reset has it too. Null if not reported."""
    ecc_uncorrected_at: float | None = None
    """When gpumap last saw the number of uncorrected ECC errors grow, in Unix seconds. Null if it did not grow since \
gpumap's start."""
    idle_power_watts: float | None = None
    """The lowest power that gpumap saw while no process was on the GPU. Null if it saw none."""
    busy_without_work_seconds: Seconds | None = None
    """For how long the GPU has been busy with the processes of one container, although it does next to nothing. 0 if \
it works or is not busy. Null if that is not known."""
    not_offered_seconds: Seconds | None = None
    """For how long no container could be assigned it, although something shows that containers should get it. 0 if \
one can be, or if nothing shows it. Null if that is not known."""
    remedies: dict[str, str] = {}
    """What to do about its problems: fault, recovery_action, ecc_uncorrected, row_remap_pending, row_remap_failure, \
xid_errors."""

    @property
    def up(self) -> bool:
        return self.fault is None


class NamelessGpu(Struct, frozen=True):
    """A GPU that NVML counts and that has not reported its UUID since gpumap's start. It has no series."""

    index: Count
    """NVML's index."""
    fault: str
    """Why it does not answer, as in gpus."""
    pci_bus_id: str = ""
    """PCI bus id. Empty if unknown."""
    recovery_action: str | None = None
    """The action that the driver requests, as in gpus."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons of its faults, worst first."""
        action = self.recovery_action
        return (self.fault,) if action in (None, "none") else (self.fault, f"recovery_{action}")


class MissingGpus(Struct, frozen=True):
    """GPUs that are on PCI, and that NVML has not listed for --grace."""

    count: Count = 0
    """Their number."""
    pci_bus_ids: tuple[str, ...] = ()
    """Their addresses. More than count if NVML lists GPUs without an address: some of these are theirs."""
    since: float | None = None
    """Since when the first of them is missing, in Unix seconds. Null if there is none."""


class GpuXids(Struct, frozen=True):
    """XID errors of a GPU that gpumap received, and how long there was no listener for them."""

    uuid: Uuid
    """UUID of the GPU."""
    counts: dict[int, Count]
    """Errors by NVIDIA's code. Empty if there were none."""
    blind_seconds: Seconds
    """Time without a registered XID event listener."""
    last_code: int | None = None
    """Code of the last error. Null if there was none."""
    last_at: dict[int, float] = {}
    """Time of the last error of each code, in Unix seconds, if it is known."""
    meanings: dict[int, str] = {}
    """What the codes of counts mean. Without codes that gpumap does not know."""
    before_reset: tuple[int, ...] = ()
    """Codes without an error since the last reset of the GPU or reload of the driver: they are no fault any more."""


class GpuAccount(Struct, frozen=True):
    """Energy and time of a GPU that gpumap charged to no container. Exists also while the GPU does not answer."""

    uuid: Uuid
    """UUID of the GPU."""
    energy_unattributed_joules: float | None
    """Energy that gpumap charged to no container. Null if the GPU does not report energy."""
    gap_seconds: Seconds
    """Time that gpumap did not charge because it could not measure."""


# --- devices, with their containers and processes ---------------------------------------------------------------------


class Grant(Struct, frozen=True):
    """What a container holds of a device: slots that the kubelet assigned, or a share that a scheduler beside it \
granted."""

    slots: dict[str, Count]
    """Device ids by extended resource, or by DRA driver. Empty if a scheduler beside the kubelet granted its share."""
    gpus: NonNegative | None = None
    """Share of a physical GPU. Null where it cannot be known."""
    memory_bytes: Bytes | None = None
    """Granted memory. Null if the kind of sharing grants none."""
    admin_access: bool | None = False
    """True if every slot is a DRA claim with admin access, which does not reserve the device. Null if unknown: only \
the checkpoint of the DRA driver shows it."""
    reservation: bool = False
    """It keeps the device for a scheduler that shares it among other pods. Nothing is granted to it."""


class Use(Struct, frozen=True):
    """Measurements of a container on a device."""

    memory_bytes: Bytes | None
    """Memory of its processes. Null if the driver does not report that of one."""
    memory_peak_bytes: Bytes | None
    """Maximum since the container was first seen."""
    processes: Count
    """Number of processes on the device. 0 for a holder that is certainly idle."""
    sm_ratio: Ratio | None
    """SM time, mean over the interval. Null if the driver does not report it, or if it is 0 and an unknown process \
used SMs of the GPU."""
    memory_controller_busy_ratio: Ratio | None
    """Time of memory traffic, mean over the interval."""
    encoder_ratio: Ratio | None
    """Time of the video encoders, mean over the interval."""
    decoder_ratio: Ratio | None
    """Time of the video decoders, mean over the interval."""
    pod_uid: PodUid | None = None
    """UID of the pod with the measured processes. Null if unknown. Another pod of the same name may have processes \
on the device, too."""
    sm_activity_ratio: NonNegative | None = None
    """Share of the device's SMs that were busy, mean over the interval. Null if several containers or unknown \
processes used the device, and before Hopper."""

    @property
    def busy_ratio(self) -> float | None:
        """Return its SM time, or its SM activity on a MIG device; `None` if unknown."""
        return self.sm_activity_ratio if self.sm_ratio is None else self.sm_ratio


class Watch(Struct, frozen=True):
    """What gpumap has seen of the container's pod on the device. The work of a sidecar or an init container counts, \
also after it has ended."""

    last_active: float | None
    """When the pod last worked on any engine, or may have, in Unix seconds. Until then, when gpumap first saw it. \
Null if it is unknown whether it works now."""
    seen_seconds: Seconds
    """For how long gpumap has measured the pod on the device without a gap."""
    known_seconds: Seconds
    """How long ago gpumap first saw the pod on the device. More than `seen_seconds` after a gap."""
    worked_seconds_ago: Seconds
    """How long ago gpumap last saw a sign of the pod's own work. Until then, as `known_seconds`."""
    no_process_seconds: Seconds
    """For how long gpumap has seen no process of the pod on the device."""
    unknown_seconds: Seconds = 0.0
    """Within `worked_seconds_ago`: for how long it is not known whether the pod worked."""
    appeared: bool = False
    """gpumap already watched the device when the pod came."""
    measured: bool = True
    """The driver can measure the pod's processes."""
    certain_pod: bool = True
    """The pod's UID is known, and the pod exists. If not, it may be another pod of the same name."""


class ContainerOnDevice(ContainerFields, frozen=True):
    """A container that holds or uses a device."""

    uuid: Uuid
    """UUID of the device."""
    owner: Owner = Owner.ASSIGNED
    """assigned if it holds the device. Otherwise the owner of its processes: unassigned, scheduled or unknown."""
    grant: Grant | None = None
    """What it holds. Null if it holds nothing of the device."""
    use: Use | None = None
    """What it uses. Null if unknown."""
    watch: Watch | None = None
    """What gpumap has seen of its pod on the device. Null if unknown."""

    @property
    def holds(self) -> bool:
        return self.grant is not None

    @property
    def slots(self) -> dict[str, int]:
        return self.grant.slots if self.grant else {}

    @property
    def allocated_gpus(self) -> float | None:
        return self.grant.gpus if self.grant else None

    @property
    def allocated_memory_bytes(self) -> int | None:
        return self.grant.memory_bytes if self.grant else None

    @property
    def reservation(self) -> bool:
        return self.grant is not None and self.grant.reservation

    @property
    def last_active(self) -> float | None:
        """Return when its pod last worked on the device, if its use is known."""
        return self.watch.last_active if self.watch and self.use else None


class Workload(Struct, frozen=True, order=True):
    """Work outside pods."""

    kind: str
    """docker, podman, containerd, lxc, slurm_job, pbs_job, htcondor_slot, systemd_unit, user or other."""
    name: str
    """Short container id, job id, slot, unit or user, by kind."""


OTHER = Workload("other", "other")
"""Work that nothing names, and all work after the first `workloads.NAMES_MAX` names of a node."""


class OwnerUse(Struct, frozen=True):
    """Memory and processes of one owner."""

    owner: Owner
    """The owner."""
    memory_bytes: int | None
    """Null if the driver reports none of it. Negative for unaccounted if processes share memory."""
    processes: Count | None
    """Number of processes. Null for unaccounted."""


class HostUse(Struct, frozen=True):
    """Measurements of work outside pods on the device."""

    work: Workload
    """The work."""
    memory_bytes: Bytes | None
    """Memory of its processes. Null if the driver does not report that of one."""
    processes: Count
    """Number of processes on the device."""
    sm_ratio: Ratio | None
    """SM time, mean over the interval. Null if unknown, as for containers."""


class Process(Struct, frozen=True):
    """A process on a device."""

    pid: Count
    """PID in the node's PID namespace."""
    uuid: Uuid
    """UUID of the device."""
    type: str
    """C, G, M, C+G, … as in nvidia-smi."""
    comm: str
    """Command name from /proc/PID/stat. Empty if unknown."""
    owner: Owner
    """Its owner."""
    namespace: str | None = None
    """Namespace of its pod. Null if no pod could be named."""
    pod: str | None = None
    """Name of its pod. For a deleted pod the last name, while it is known."""
    container: str | None = None
    """Name of its container."""
    pod_uid: PodUid | None = None
    """UID of its pod, also if its name is unknown."""
    memory_bytes: Bytes | None = None
    """Memory on the device. Null if the driver does not report it."""
    sm_ratio: Ratio | None = None
    """SM time, mean over the interval."""
    memory_controller_busy_ratio: Ratio | None = None
    """Time of memory traffic, mean over the interval."""
    encoder_ratio: Ratio | None = None
    """Time of the video encoders, mean over the interval."""
    decoder_ratio: Ratio | None = None
    """Time of the video decoders, mean over the interval."""
    work: Workload | None = None
    """Work that a process outside pods belongs to; of a process in a pod the Slurm job. Null if there is none."""
    owner_since: float | None = None
    """Unix time of the first snapshot with evidence for the owner `gone` or `unassigned`. Null for other owners."""

    @property
    def name(self) -> ContainerName | None:
        """Return its container; `None` if its pod is unknown."""
        if self.namespace is None or self.pod is None:
            return None
        return ContainerName(self.namespace, self.pod, self.container or "")


class OtherUse(ContainerFields, frozen=True):
    """Use of a device without a row of a container: by processes, or by no process (unaccounted). Names that are not \
known are empty."""

    owner: Owner
    """The owner."""
    memory_bytes: int | None
    """Null if the driver reports none of it. Negative for unaccounted if processes share memory."""
    sm_ratio: Ratio | None = None
    """SM time, mean over the interval. Null if it is not known of each process."""
    processes: Count | None = None
    """Number of processes on the device. Null for unaccounted."""
    pids: tuple[int, ...] = ()
    """Its processes, in the node's PID namespace. Empty if they are not known."""
    pod_uid: PodUid | None = None
    """UID of the pod. Null if it is unknown, or not the same for all processes."""
    work: Workload | None = None
    """Work outside pods. Null for other owners."""


class Unexplained(Struct, frozen=True):
    """Memory and load of a device that no living process explains."""

    since: dict[str, float] = {}
    """Since when memory_without_process and busy_without_process hold, in Unix seconds."""
    memory_bytes: Bytes | None = None
    """The memory. Null if memory_without_process does not hold."""
    pids: tuple[int, ...] = ()
    """Processes of this memory that NVML still lists, although they no longer exist."""
    unjudged: str | None = None
    """Why it cannot be judged, as one word. Null if it can."""


class Device(Struct, frozen=True):
    """What a container can be assigned: a GPU that is not partitioned, or a MIG device. Also a UUID that only the \
kubelet names while NVML does not answer, and a partitioned GPU that was assigned as a whole."""

    uuid: Uuid
    """NVML's UUID: GPU-… or MIG-…."""
    gpu_uuid: Uuid | None = None
    """The physical GPU of the device. Null while NVML does not answer."""
    index: Count | None = None
    """NVML's index of that GPU."""
    partitioned: bool = False
    """It is a partitioned GPU that was assigned as a whole. Its MIG devices are devices of their own."""
    mig: MigInstance | None = None
    """Of a MIG device. Null for a GPU."""
    memory: DeviceMemory | None = None
    """Null if it cannot be read."""
    activity: Activity | None = None
    """What GPM measured: means over the interval. Null on GPUs before Hopper."""
    allocatable: dict[str, Count] = {}
    """Slots that the kubelet offers, by resource. Empty while unknown."""
    holders: Count | None = None
    """How many containers certainly hold the device. Null if that is not known: then containers without a grant mean \
nothing."""
    may_have_more: bool = False
    """More containers than `holders` may hold the device: gpumap does not know the device of some slots."""
    free_ratio: Ratio | None = None
    """The part that a new pod could be given: 1, 0, or the free part of the slots of a shared device. Null if \
unknown, or if it is a partitioned GPU."""
    not_free_reason: str = ""
    """Why it is not free, apart from its holders: fault, not_offered, squatter, leftover or unexplained. Without such \
a finding, the owner that uses most of its memory. Empty if nothing prevents it."""
    readable_ratio: Ratio | None = None
    """For which part of the last period of twice --idle-after gpumap could read the device. Null if it cannot read it \
now."""
    unexplained: Unexplained | None = None
    """Memory and load without a process. Null if the GPU does not answer."""
    owners: tuple[OwnerUse, ...] = ()
    """Memory and processes by owner. The bytes add up to memory.used_bytes exactly."""
    containers: tuple[ContainerOnDevice, ...] = ()
    """Containers that hold or use the device, by name."""
    host: tuple[HostUse, ...] = ()
    """Work outside pods: it splits the owner host. Empty if there is none, or if owners are unknown."""
    processes: tuple[Process, ...] = ()
    """Processes on the device."""
    others: tuple[OtherUse, ...] = ()
    """Use that no container's row counts, by owner."""

    @property
    def is_leaf(self) -> bool:
        """NVML lists it, and the kubelet can assign it."""
        return self.gpu_uuid is not None and not self.partitioned

    @property
    def has_unowned(self) -> bool:
        """Whether the owner of a living process on it is unknown."""
        if self.unexplained and MEMORY_WITHOUT_PROCESS in self.unexplained.since:
            return False
        return any(owner.owner is Owner.UNKNOWN and owner.processes for owner in self.owners)


# --- the node ---------------------------------------------------------------------------------------------------------


class Driver(Struct, frozen=True):
    """Versions of the driver."""

    driver_version: str
    """Driver version such as 580.65.06."""
    cuda_version: str
    """Newest CUDA version that the driver supports."""
    nvml_version: str
    """Version of the NVML library."""


class UnmatchedSlots(ContainerFields, frozen=True):
    """Slots of a container that match no NVML device."""

    resource: str
    """Extended resource, or the name of a DRA driver."""
    reason: str
    """unparsed, not_in_nvml, untrusted_id, nvml_down or device_down."""
    slots: Annotated[int, Meta(ge=1)]
    """Number of slots."""
    remedy: str | None = None
    """What to do about it."""


class Pod(PodFields, frozen=True):
    """A pod that holds or uses a device."""

    uid: str
    """UID of the pod. Empty if unknown."""


class ContainerAccount(ContainerFields, frozen=True):
    """What gpumap charged to a container on a device. Exists some minutes longer than the container.

    A counter is null until its value was known once."""

    uuid: Uuid
    """UUID of the device."""
    allocated_gpu_seconds: Seconds | None
    """Time held, multiplied by the share of a GPU."""
    sm_seconds: Seconds | None
    """Time in which its kernels kept the SMs busy."""
    memory_byte_seconds: NonNegative | None
    """Used memory, multiplied by the time."""
    energy_joules: NonNegative | None
    """Estimated part of the GPU's energy."""
    sm_activity_seconds: Seconds | None = None
    """Its SM activity, multiplied by the device's share of the GPU and by the time."""


class ContainerXids(ContainerFields, frozen=True):
    """XID errors of one code on a device while the container held or used it."""

    uuid: Uuid
    """UUID of the device."""
    code: int
    """NVIDIA's code of the error."""
    errors: Count
    """Number of errors."""


class ReportedDeviceHealth(ContainerFields, frozen=True, order=True):
    """Health of a device that a container holds, as its device plugin reports it."""

    resource: str
    """Extended resource; for a claim claim:<claim>/<request>."""
    device_id: str
    """The kubelet's name of the device."""
    health: str
    """Healthy, Unhealthy or Unknown, as the kubelet reports it."""

    @property
    def is_unhealthy(self) -> bool:
        """Whether a plugin reports it as unhealthy or unknown. Of a claim, the kubelet reports Unknown also if its
        driver does not report health (kubernetes/kubernetes, pkg/kubelet/cm/dra/manager.go)."""
        well = ("Healthy", "Unknown", "") if self.resource.startswith("claim:") else ("Healthy", "")
        return self.health not in well


class SourceHealth(Struct, frozen=True):
    """A source's record since gpumap's start."""

    source: SourceWord
    """Name of the source."""
    up: bool = False
    """The last attempt succeeded."""
    reason: str = ""
    """What went wrong in the last attempt, as one word. Can be set although the attempt succeeded."""
    detail: str = ""
    """The same as a sentence."""
    remedy: str | None = None
    """What to do about it."""
    last_success: float | None = None
    """When the source last answered, in Unix seconds."""
    attempts: Count = 0
    """Number of attempts."""
    failures: Count = 0
    """Number of attempts that failed."""
    errors: dict[str, Count] = {}
    """Number of errors by reason, also of attempts that succeeded."""
    seconds: Seconds = 0.0
    """Time of all attempts."""
    last_seconds: Seconds | None = None
    """Time of the last attempt."""


class Finding(ContainerFields, frozen=True, kw_only=True):
    """Something that is wrong. Of a container that is not known, and of a GPU, the names are empty."""

    finding: str
    """fault, not_offered, squatter, leftover, unexplained, over, stalled, idle, maybe_idle, unused or unmatched."""
    reason: str
    """Why, as one word: docs/reference/findings.md lists them."""
    uuid: Uuid | None
    """UUID of the device; of fault and not_offered, that of the GPU. Null for slots on no device, and for GPUs \
without a known UUID."""
    since: float
    """Since when it holds, as far as gpumap has seen it, in Unix seconds."""
    gpus: NonNegative | None = None
    """How many physical GPUs it concerns. Of an idle, unused or stalled holder: its share. Of a GPU: 1, also if it is \
not offered, but 0 for all of its faults except the worst. Of GPUs without a known UUID: their number. Null for other \
findings, and if it is unknown."""
    granted_bytes: Bytes | None = None
    """Granted memory. Null if none is granted."""
    used_bytes: Bytes | None = None
    """Used memory. Null if unknown."""
    memory_bytes: Bytes | None = None
    """Memory that is granted but not used, used above the grant, or used without a grant. Of unused memory that \
several share it is a part, so that the findings add up. Null if unknown."""
    why: str = ""
    """The evidence, as a phrase. For the worst fault of a GPU it names the other reasons."""
    pids: tuple[int, ...] = ()
    """Processes of a squatter, leftover or stalled holder, in the node's PID namespace; of unexplained memory \
those that NVML still lists."""
    remedy: str | None = None
    """What to do about it."""


class Unjudged(ContainerFields, frozen=True, kw_only=True):
    """A GPU, device or holder that cannot be judged now: findings of these kinds may be missing. All names are empty \
while the number of them is not known."""

    reason: str
    """Why, as one word: docs/reference/findings.md lists them."""
    findings: tuple[str, ...]
    """Kinds of findings."""
    uuid: Uuid | None = None
    """UUID of the device, or of the GPU for fault and not_offered."""


class Node(Struct, frozen=True, kw_only=True):
    """What /api/v1/map answers. null is "not known", never 0. Fields may be added within a version; none is removed \
or changes its meaning."""

    version: Literal[1] = 1
    """Version of this format."""
    timestamp: float
    """When the data was collected, in Unix seconds."""
    interval_seconds: Annotated[float, Meta(gt=0)] | None = None
    """Configured time between collections. Null if a command collected once."""
    collect: tuple[str, ...] | None = None
    """Groups of metrics that gpumap collects, as in --collect. Values of other groups are unknown. Null if unknown."""
    stale: str | None = None
    """Why there is no current data, as a sentence. Then the map has no devices, pods and accounts; sources and \
capabilities are those of the last collection."""
    name: str
    """Name of the node in the cluster."""
    internal_ip: str = ""
    """Internal IP. Empty if unknown."""
    driver: Driver | None = None
    """Versions of the driver. Null while NVML does not answer."""
    gpus: tuple[Gpu, ...] = ()
    """Physical GPUs, by index."""
    nameless_gpus: tuple[NamelessGpu, ...] = ()
    """GPUs that NVML counts and that have not reported their UUID since gpumap's start."""
    missing_gpus: MissingGpus | None = None
    """GPUs that NVML does not list. Null if that cannot be judged."""
    missing_gpus_reason: str = ""
    """Why missing_gpus cannot be judged."""
    devices: tuple[Device, ...] = ()
    """What containers can be assigned, with holders, users and owners."""
    unmatched: tuple[UnmatchedSlots, ...] = ()
    """Slots that match no NVML device."""
    pods: tuple[Pod, ...] = ()
    """Pods that hold or use a device."""
    accounts: tuple[ContainerAccount, ...] = ()
    """What gpumap charged to each container on a device."""
    gpu_accounts: tuple[GpuAccount, ...] = ()
    """What gpumap charged to no container, by GPU. Empty without accounting."""
    xids: tuple[GpuXids, ...] = ()
    """XID errors of the GPUs. A GPU for which no listener was ever registered is absent."""
    container_xids: tuple[ContainerXids, ...] = ()
    """XID errors while a container held or used the device."""
    device_health: tuple[ReportedDeviceHealth, ...] | None = None
    """Health of assigned devices, from the kubelet's Pods API (--pods-api-socket). Null if gpumap does not ask it, or \
it does not answer."""
    sources: tuple[SourceHealth, ...] = ()
    """Health of the sources."""
    capabilities: dict[str, bool] = {}
    """What gpumap can do on this node: pid_visibility, device_checkpoint, pod_logs, push, process_utilization, gpm, \
xid_events."""
    pid_visibility_reason: str = ""
    """Evidence for pid_visibility, or for its absence."""
    remedies: dict[str, str] = {}
    """What to do about missing capabilities, by capability."""
    idle_after_seconds: Annotated[float, Meta(gt=0)] = 300.0
    """A holder is idle if it certainly did not work for so long."""
    grace_seconds: Annotated[float, Meta(gt=0)] = 120.0
    """A holder is unused only if gpumap has watched it for so long: it may still start."""
    findings: tuple[Finding, ...] | None = None
    """What is wrong, worst first. Null if it was not judged: the map is stale."""
    judged: dict[str, Count] = {}
    """By kind of finding: how many GPUs, devices, containers or holders can be judged now. Empty if findings is \
null."""
    unjudged: tuple[Unjudged, ...] = ()
    """What cannot be judged now, by reason."""
    finding_sums: dict[str, float | None] = {}
    """Sums of the findings: faults (GPUs with one), not_offered_gpus, squatter_bytes, leftover_bytes, \
unexplained_bytes, unexplained_gpus, over_bytes, stalled_gpus, idle_gpus, maybe_idle_gpus, idle_holders, unused_bytes \
(idle and unused), unmatched. Null for 0 of which not all could be judged, or an amount is unknown. Empty if findings \
is null."""
    unjudged_sentences: tuple[str, ...] = ()
    """What cannot be judged, and why, for people. Empty in the map of one namespace."""


_DECODER = msgspec.json.Decoder(Node)


def decode(text: bytes) -> Node:
    """Read a node from JSON. Fields that this version does not know are ignored.

    Raises msgspec.ValidationError (JSON, but no map of this version) or another ValueError (no JSON).
    """
    try:
        return _DECODER.decode(text)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # msgspec refuses the escapes of lone surrogates, which `json_bytes` writes for names that are no UTF-8.
        return msgspec.convert(json.loads(text, parse_constant=_refuse), Node, str_keys=True)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def encode(node: Node) -> bytes:
    """Write a node as compact JSON."""
    return json_bytes(node)


def json_bytes(document: Struct) -> bytes:
    """Write compact JSON in UTF-8. Names that are no UTF-8 (lone surrogates, from file names) are escaped."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(document), ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="backslashreplace")
