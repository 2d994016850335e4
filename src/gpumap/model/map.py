"""The map of one node: what /api/v1/map answers and the commands read, each field declared once.

Encoder, decoder, validation and the JSON schema (`map.schema.json`, by `make docs`) come from these declarations. The
text below a field is its description in the schema. `None` (null) is "not known", never 0. Within a version a field may
be added, with a default; none is removed or changes its meaning.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpumap.model.terms import Owner, Source

VERSION = 1
"""Of this format. A map of another version is refused."""

Count = Annotated[int, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
OwnerWord = Annotated[
    str,
    Meta(
        extra_json_schema={"enum": [owner.value for owner in Owner]},
        description="Owner of a process or of memory. assigned: a container that holds the device. unassigned: a "
        "container of a live pod that does not hold it. gone: a pod that no longer exists. scheduled: a pod that a "
        "scheduler lets use the device beside the kubelet. host: no pod. mps_server: the MPS server. sibling: "
        "processes of another compute instance of the same GPU instance. unknown: no source can name it. unaccounted: "
        "memory that no process explains (negative if processes share memory).",
    ),
]
"""A word of `snapshot.Owner`. A later agent may report another one."""
SourceWord = Annotated[str, Meta(extra_json_schema={"enum": [source.value for source in Source]})]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the map. Two entries with equal fields are equal."""


# --- the GPUs ---------------------------------------------------------------------------------------------------------


class MemoryEntry(Entry, frozen=True, kw_only=True):
    """Memory in bytes, as NVML reports it."""

    total_bytes: Bytes
    """All memory of the device."""
    used_bytes: Bytes | None
    """Used memory. Excludes reserved memory if the driver reports that. An agent never reports null."""
    free_bytes: Bytes | None
    """Free memory. An agent never reports null."""
    reserved_bytes: Bytes | None
    """Memory reserved by driver and firmware. Null if the driver does not report it."""


class RecoveryEntry(Entry, frozen=True, kw_only=True):
    """Recovery action that the driver requests."""

    action: str
    """none, gpu_reset, node_reboot, drain_p2p, drain_and_reset, recover_imex_domain, bus_reset, system_reboot or \
code_N."""
    remedy: str | None
    """What to do. Null if the driver requests nothing."""


class EccErrorsEntry(Entry, frozen=True, kw_only=True):
    """A count of ECC errors."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["corrected", "uncorrected"]})]
    """corrected or uncorrected."""
    location: str
    """Memory location, such as dram or sram."""
    errors: Count
    """Number of errors, as the driver counts them."""


class LinkEntry(Entry, frozen=True, kw_only=True):
    """Bytes over a link, as the driver counts them."""

    transmit_bytes: Bytes | None
    """Bytes that the GPU sent."""
    receive_bytes: Bytes | None
    """Bytes that the GPU received."""


NO_TRAFFIC = LinkEntry(transmit_bytes=None, receive_bytes=None)


class XidCountEntry(Entry, frozen=True, kw_only=True):
    """XID errors of one code."""

    xid: int
    """NVIDIA's code of the error."""
    errors: Count
    """Number of errors."""
    last: float | None = None
    """When gpumap received the last one, in Unix seconds. Null if unknown."""


class GpuXidsEntry(Entry, frozen=True, kw_only=True):
    """XID errors that gpumap received."""

    counts: tuple[XidCountEntry, ...]
    """Errors by code. Empty if there were none."""
    blind_seconds: Seconds
    """Time without a registered XID event listener."""


class GpuAccountEntry(Entry, frozen=True, kw_only=True):
    """What gpumap charged to no container."""

    energy_unattributed_joules: float | None
    """Energy that gpumap charged to no container. Null if the GPU does not report energy."""
    gap_seconds: Seconds
    """Time that gpumap did not charge because it could not measure."""


class GpuEntry(Entry, frozen=True, kw_only=True):
    """A physical GPU."""

    uuid: str
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
    """The GPU is in MIG mode: its leaves are MIG devices."""
    up: bool
    """The GPU answers."""
    fault: str | None
    """Why it does not answer: lost, reset_required, insufficient_power, irq_issue, no_permission, hung, \
worker_crashed or unknown."""
    remedy: str | None = None
    """What to do about the fault."""
    recovery_action: RecoveryEntry | None = None
    """Recovery action that the driver requests. Null if the driver does not report it."""
    remedies: dict[str, str] = {}
    """What to do about other problems: ecc_uncorrected, row_remap_pending, row_remap_failure, xid_errors."""
    stuck_seconds: Seconds = 0.0
    """How long a driver call on the GPU has been running."""
    last_success: float | None = None
    """When the GPU last answered, in Unix seconds."""
    memory: MemoryEntry | None = None
    """Memory of the whole GPU."""
    samples_from: str | None = None
    """The driver's call that gives SM time of processes: nvmlDeviceGetProcessUtilization or \
nvmlDeviceGetProcessesUtilizationInfo. Null if it is not available."""
    utilization_ratio: Ratio | None = None
    """Share of time in which a kernel ran."""
    memory_controller_busy_ratio: Ratio | None = None
    """Share of time in which memory was read or written."""
    temperatures_celsius: dict[str, float] = {}
    """Temperatures by sensor."""
    power_watts: float | None = None
    """Power draw."""
    power_limit_watts: float | None = None
    """Enforced power limit."""
    energy_joules: float | None = None
    """Energy since the driver was loaded."""
    clocks_hertz: dict[str, float] = {}
    """Current clocks by domain: graphics, sm, memory, video. Only those that the driver reports."""
    clock_events: dict[str, bool] = {}
    """Whether clocks are reduced now, by reason, such as sw_power_cap. Only the reasons that the GPU knows."""
    clock_event_seconds: dict[str, Seconds] = {}
    """How long clocks were reduced, by reason, as the driver counts."""
    performance_state: Annotated[int, Meta(ge=0, le=15)] | None = None
    """Performance state from 0 (fastest) to 15."""
    fan_speed_ratios: dict[str, Share] = {}
    """Fan speeds by fan number, as a ratio of the maximum speed. Can exceed 1."""
    ecc_errors: tuple[EccErrorsEntry, ...] = ()
    """Memory errors over the GPU's life. Empty if the driver reports none."""
    ecc_uncorrected_at: float | None = None
    """When gpumap last saw the number of uncorrected errors grow, in Unix seconds. Null if it did not grow since \
gpumap's start."""
    remapped_rows: dict[str, Count] = {}
    """Replaced memory rows, by the kind of errors: correctable, uncorrectable."""
    row_remap_pending: bool | None = None
    """Rows wait for the next reset to be replaced."""
    row_remap_failure: bool | None = None
    """A row could not be replaced."""
    retired_pages: dict[str, Count] = {}
    """Retired memory pages by cause: single_bit_ecc, double_bit_ecc."""
    pcie: LinkEntry = NO_TRAFFIC
    """Traffic over PCIe."""
    nvlink: LinkEntry = NO_TRAFFIC
    """Traffic over all NVLinks."""
    xids: GpuXidsEntry | None = None
    """XID errors that gpumap received. Null if no listener was ever registered."""
    account: GpuAccountEntry | None = None
    """What gpumap charged to no container. Null without accounting."""


class NamelessGpuEntry(Entry, frozen=True, kw_only=True):
    """A GPU that NVML counts and that has not reported its UUID since gpumap's start."""

    index: Count
    """NVML's index."""
    fault: str
    """Why it does not answer, as in gpus."""
    remedy: str | None
    """What to do about it."""


# --- the devices: leaves, with holders and users ----------------------------------------------------------------------


class ActivityEntry(Entry, frozen=True, kw_only=True):
    """What GPM measured: means over the interval."""

    sm_ratio: Share | None
    """Share of the SMs that were busy."""
    sm_occupancy_ratio: Share | None
    """Warps on the SMs, as a ratio of the maximum."""
    tensor_ratio: Share | None
    """Share of time in which the tensor cores were busy."""
    dram_ratio: Share | None
    """Used memory bandwidth, as a ratio of the maximum."""
    graphics_ratio: Share | None = None
    """Share of time in which any graphics or compute engine was busy."""
    fp64_ratio: Share | None = None
    """Share of time in which the FP64 pipes were busy."""
    fp32_ratio: Share | None = None
    """Share of time in which the FP32 pipes were busy."""
    fp16_ratio: Share | None = None
    """Share of time in which the FP16 pipes were busy."""
    video_ratio: Share | None = None
    """Share of time in which the busiest video engine was busy: decoder, encoder, JPEG or OFA."""


class SlotsEntry(Entry, frozen=True, kw_only=True):
    """Slots of one resource."""

    resource: str
    """Extended resource, or the name of a DRA driver."""
    slots: Count
    """Number of device ids."""


class OwnerEntry(Entry, frozen=True, kw_only=True):
    """Memory and processes of one owner."""

    owner: OwnerWord
    memory_bytes: int | None
    """Null if the driver reports none of it. Negative for unaccounted if processes share memory."""
    processes: Count | None
    """Number of processes. Null for unaccounted."""


class ContainerEntry(Entry, frozen=True, kw_only=True):
    """What all entries about a container begin with."""

    namespace: str
    """Namespace of the pod."""
    pod: str
    """Name of the pod."""
    container: str
    """Name of the container. Empty if only the pod is known."""


class HolderEntry(ContainerEntry, frozen=True, kw_only=True):
    """A container to which the kubelet assigned slots of the device, or a scheduler beside it a share."""

    slots: tuple[SlotsEntry, ...]
    """Slots that it holds of this device. Empty if a scheduler granted its share."""
    allocated_gpus: Share | None
    """Share of a physical GPU. Null where it cannot be known."""
    allocated_memory_bytes: Bytes | None
    """Granted memory. Null if the kind of sharing grants none."""
    admin_access: bool | None = False
    """It holds the device by DRA claims with admin access, which do not reserve it. Null if unknown: only the
    checkpoint of the DRA driver shows it."""
    reservation: bool = False
    """It keeps the device for a scheduler that shares it among other pods. Nothing is granted to it."""


class UserEntry(ContainerEntry, frozen=True, kw_only=True):
    """Measurements of a container on the device."""

    owner: OwnerWord
    memory_bytes: Bytes | None
    """Memory of its processes. Null if the driver does not report that of one."""
    memory_peak_bytes: Bytes | None
    """Maximum since the container was first seen."""
    processes: Count
    """Number of processes on the device. 0 for a holder that is certainly idle."""
    sm_ratio: Ratio | None
    """SM time, mean over the interval. Null if the driver does not report it, or if it is 0 and an unknown process
    used SMs of the GPU."""
    memory_controller_busy_ratio: Ratio | None
    """Time of memory traffic, mean over the interval."""
    unassigned: bool
    """The container uses a device that it does not hold. Two consecutive collections agree."""
    last_active: float | None
    """When it last worked on any engine, or may have, in Unix seconds. Until then, when gpumap first saw it. Null if it
    is unknown whether it works now."""
    pod_uid: str | None = None
    """UID of the pod whose processes were measured. Null if unknown. Another pod of the same name may have processes
    on the device, too."""
    seen_seconds: Seconds | None = None
    """For how long gpumap has watched the container on the device without a gap. Null if its pod is not certain."""
    no_process_seconds: Seconds | None = None
    """For how long gpumap has seen no process of it on the device."""
    sm_activity_ratio: Share | None = None
    """Share of the MIG device's SMs that were busy, mean over the interval. Null on other devices, and if several \
containers or unknown processes use the MIG device."""

    @property
    def busy_ratio(self) -> float | None:
        """Return its SM time, or its SM activity on a MIG device; `None` if unknown."""
        return self.sm_activity_ratio if self.sm_ratio is None else self.sm_ratio


class WorkEntry(Entry, frozen=True, kw_only=True):
    """Work outside pods."""

    kind: str
    """docker, podman, containerd, lxc, slurm_job, pbs_job, htcondor_slot, systemd_unit, user or other."""
    name: str
    """Short container id, job id, slot, unit or user, by kind."""


class HostEntry(WorkEntry, frozen=True, kw_only=True):
    """Measurements of work outside pods on the device."""

    memory_used_bytes: Bytes | None
    """Memory of its processes. Null if the driver does not report that of one."""
    sm_utilization_ratio: Ratio | None
    """SM time, mean over the interval. Null if unknown, as for containers."""
    processes: Count
    """Number of processes on the device."""


class ProcessEntry(Entry, frozen=True, kw_only=True):
    """A process on the device."""

    pid: Count
    """PID in the node's PID namespace."""
    type: str
    """C, G, M, C+G, … as in nvidia-smi."""
    name: str | None
    """Command name from /proc/PID/stat."""
    owner: OwnerWord
    namespace: str | None
    """Namespace of its pod. Null if no pod could be named."""
    pod: str | None
    """Name of its pod. For a deleted pod the last name, while it is known."""
    container: str | None
    """Name of its container."""
    pod_uid: str | None
    """UID of its pod, also if its name is unknown."""
    memory_bytes: Bytes | None
    """Memory on the device. Null if the driver does not report it."""
    sm_ratio: Ratio | None
    """SM time, mean over the interval."""
    work: WorkEntry | None = None
    """Work that a process outside pods belongs to; of a process in a pod the Slurm job. Null if there is none."""
    owner_since: float | None = None
    """Unix time of the first snapshot with evidence for the owner `gone` or `unassigned`. Null for other owners."""


class DeviceEntry(Entry, frozen=True, kw_only=True):
    """What a container can be assigned: a GPU that is not partitioned, or a MIG device. Also a UUID that only the \
kubelet names while NVML does not answer, and a partitioned GPU that was assigned as a whole."""

    uuid: str
    """NVML's UUID: GPU-… or MIG-…."""
    gpu_uuid: str | None
    """The physical GPU of the device. Null while NVML does not answer."""
    index: Count | None
    """NVML's index of that GPU."""
    model: str | None
    """NVML's product name of that GPU."""
    mig_profile: str | None
    """MIG profile such as 1g.10gb. Null for a GPU that is not partitioned."""
    gpu_instance_id: int | None
    """GPU instance of a MIG device."""
    compute_instance_id: int | None
    """Compute instance of a MIG device."""
    memory: MemoryEntry | None
    """Null if it cannot be read."""
    activity: ActivityEntry | None = None
    """What GPM measured. Null on GPUs before Hopper."""
    allocatable: tuple[SlotsEntry, ...]
    """Slots that the kubelet offers. Empty while unknown."""
    owners: tuple[OwnerEntry, ...]
    """Memory and processes by owner. The bytes add up to memory.used_bytes exactly."""
    holders: tuple[HolderEntry, ...]
    """Containers that hold the device."""
    holders_known: bool
    """Whether the holders are known. If not, an empty list of holders means nothing."""
    users: tuple[UserEntry, ...]
    """Containers that were measured on the device. Idle holders have 0."""
    host: tuple[HostEntry, ...] = ()
    """Work outside pods: it splits the owner host. Empty if there is none, or if owners are unknown."""
    processes: tuple[ProcessEntry, ...]
    """Processes on the device."""


# --- the node ---------------------------------------------------------------------------------------------------------


class NodeEntry(Entry, frozen=True, kw_only=True):
    """The node."""

    name: str
    """Name of the node in the cluster."""
    internal_ip: str | None
    """Internal IP. Null if unknown."""


class DriverEntry(Entry, frozen=True, kw_only=True):
    """Versions of the driver."""

    driver_version: str
    """Driver version such as 580.65.06."""
    cuda_version: str
    """Newest CUDA version that the driver supports."""
    nvml_version: str
    """Version of the NVML library."""


class UnmatchedEntry(ContainerEntry, frozen=True, kw_only=True):
    """Slots of a container that match no NVML device."""

    resource: str
    """Extended resource, or the name of a DRA driver."""
    reason: str
    """unparsed, not_in_nvml, untrusted_id, nvml_down or device_down."""
    slots: Annotated[int, Meta(ge=1)]
    """Number of slots."""
    remedy: str | None
    """What to do about it."""


class FindingEntry(ContainerEntry, frozen=True, kw_only=True):
    """Something that is wasted. Of a container that is not known the names are empty."""

    finding: str
    """squatter, leftover, over, idle, unused or unmatched, as in `gpumap waste`."""
    uuid: str | None
    """UUID of the device. Null for slots on no device."""
    gpus: Share | None
    """Share of a physical GPU that the container holds. Null if it holds none, or if the share is unknown."""
    granted_bytes: Bytes | None
    """Granted memory. Null if none is granted."""
    used_bytes: Bytes | None
    """Used memory. Null if unknown."""
    waste_bytes: Bytes | None
    """Memory that is granted but not used, or used but not granted. Null if unknown."""
    idle_seconds: Seconds | None
    """How long the container has certainly done no work. Null if it is not idle."""
    why: str
    """The evidence, as a phrase. Can be empty."""
    pids: tuple[int, ...]
    """Processes of a squatter or leftover, in the node's PID namespace."""
    remedy: str | None
    """What to do about it."""


class PodEntry(Entry, frozen=True, kw_only=True):
    """A pod that holds or uses a device."""

    namespace: str
    """Namespace of the pod."""
    pod: str
    """Name of the pod."""
    uid: str | None
    """UID of the pod. Null if unknown."""


class AccountEntry(ContainerEntry, frozen=True, kw_only=True):
    """What gpumap charged to a container on a device. Exists some minutes longer than the container."""

    uuid: str
    """UUID of the device."""
    allocated_gpu_seconds: Seconds | None
    """Time held, multiplied by the share of a GPU."""
    sm_seconds: Seconds | None
    """Time in which its kernels kept the SMs busy."""
    sm_activity_seconds: Seconds | None
    """Its SM activity, multiplied by the device's share of the GPU and by the time."""
    memory_byte_seconds: Share | None
    """Used memory, multiplied by the time."""
    energy_joules: Share | None
    """Estimated part of the GPU's energy."""


class ContainerXidsEntry(ContainerEntry, frozen=True, kw_only=True):
    """XID errors of one code on a device while the container held or used it."""

    uuid: str
    """UUID of the device."""
    xid: int
    """NVIDIA's code of the error."""
    errors: Count
    """Number of errors."""


class DeviceHealthEntry(ContainerEntry, frozen=True, kw_only=True):
    """Health of a device that a container holds, as its device plugin reports it."""

    resource: str
    """Extended resource; for a claim claim:<claim>/<request>."""
    device_id: str
    """The kubelet's name of the device."""
    health: str
    """Healthy, Unhealthy or Unknown, as the kubelet reports it."""


class SourceEntry(Entry, frozen=True, kw_only=True):
    """Health of one source."""

    source: SourceWord
    """Name of the source."""
    up: bool
    """The last attempt succeeded."""
    reason: str | None
    """What went wrong in the last attempt, as one word. Can be set although the attempt succeeded."""
    detail: str | None
    """The same as a sentence."""
    remedy: str | None
    """What to do about it."""
    last_success: float | None
    """When the source last answered, in Unix seconds."""
    errors: dict[str, Count]
    """Number of errors by reason."""


class NodeMap(Entry, frozen=True, kw_only=True):
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
    node: NodeEntry
    """The node."""
    driver: DriverEntry | None
    """Versions of the driver. Null while NVML does not answer."""
    gpus: tuple[GpuEntry, ...]
    """Physical GPUs, by index."""
    nameless_gpus: tuple[NamelessGpuEntry, ...] = ()
    """GPUs that NVML counts and that have not reported their UUID since gpumap's start."""
    devices: tuple[DeviceEntry, ...]
    """What containers can be assigned, with holders, users and owners."""
    unmatched: tuple[UnmatchedEntry, ...]
    """Slots that match no NVML device."""
    pods: tuple[PodEntry, ...]
    """Pods that hold or use a device."""
    accounts: tuple[AccountEntry, ...] = ()
    """What gpumap charged to each container on a device."""
    container_xids: tuple[ContainerXidsEntry, ...] = ()
    """XID errors while a container held or used the device."""
    device_health: tuple[DeviceHealthEntry, ...] | None = None
    """Health of assigned devices, from the kubelet's Pods API (--pods-api-socket). Null if gpumap does not ask it, or \
it does not answer."""
    sources: tuple[SourceEntry, ...]
    """Health of the sources."""
    capabilities: dict[str, bool]
    """What gpumap can do on this node: pid_visibility, device_checkpoint, pod_logs, push, process_utilization, gpm, \
xid_events."""
    pid_visibility_reason: str | None = None
    """Evidence for pid_visibility, or for its absence."""
    remedies: dict[str, str]
    """What to do about missing capabilities, by capability."""
    findings: tuple[FindingEntry, ...] | None = None
    """What is wasted, worst first, judged as `gpumap waste` does with its defaults. Null if it was not judged: the \
map is stale, or a command made it of series."""
    finding_sums: dict[str, float | None] = {}
    """Sums of what is wasted: idle_gpus, idle_holders, unused_bytes, over_bytes, squatter_bytes, leftover_bytes, \
unmatched_slots. Null for each that cannot be judged. Empty if findings is null, and in the map of one namespace."""
    unjudged: tuple[str, ...] = ()
    """What could not be judged, and why, as sentences. Empty in the map of one namespace."""


_DECODER = msgspec.json.Decoder(NodeMap)


def decode(text: bytes) -> NodeMap:
    """Read a map from JSON. Fields that this version does not know are ignored.

    Raises msgspec.ValidationError (JSON, but no map of this version) or another ValueError (no JSON).
    """
    try:
        return _DECODER.decode(text)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # msgspec refuses the escapes of lone surrogates, which `json_bytes` writes for names that are no UTF-8.
        return msgspec.convert(json.loads(text, parse_constant=_refuse), NodeMap)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def encode(node_map: NodeMap) -> bytes:
    """Write a map as compact JSON."""
    return json_bytes(node_map)


def json_bytes(document: msgspec.Struct) -> bytes:
    """Write compact JSON in UTF-8. Names that are no UTF-8 (lone surrogates, from file names) are escaped."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(document), ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="backslashreplace")
