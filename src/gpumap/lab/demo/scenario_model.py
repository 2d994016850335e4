"""The nouns of a scenario: what stands on the simulated node and when, frozen and already checked.

All times are seconds since the play began, all sizes are bytes. Nothing here reads YAML or knows what time it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpumap.model.observations import ClaimDevice, DeviceId, PluginAnswer, PreparedDevice, ResourceDevices
from gpumap.model.readings import Uuid

MIB = 1 << 20
GIB = 1 << 30

UNTOLD_BYTES = GIB
"""What a process with `memory: unknown` takes of its device, though NVML does not say so."""


class LeafPlace(NamedTuple):
    """A device by its place: a GPU's index and, on a MIG GPU, the number of the MIG device (as in `nvidia-smi -L`)."""

    gpu: int
    instance: int | None = None


@dataclass(frozen=True, slots=True)
class Ramp:
    """Memory that grows from `first` to `last` bytes; a constant has both equal."""

    first: int
    last: int
    over_seconds: float = 0.0

    def at(self, seconds: float) -> int:
        if seconds >= self.over_seconds:
            return self.last
        return self.first + int((self.last - self.first) * max(seconds, 0.0) / self.over_seconds)


@dataclass(frozen=True, slots=True)
class Wave:
    """A ratio that swings between `low` and `high`, starting low; a constant has both equal."""

    low: float
    high: float
    period_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` is the word that NVML's worker has for it. A GPU that is `hung` answers nothing at all.

    `recovery` is the action that the driver asks for, where it still tells it.
    """

    kind: str
    start: float
    end: float
    recovery: str | None


@dataclass(frozen=True, slots=True)
class Xid:
    """An XID event: of the whole GPU, or of its MIG device of this number."""

    at: float
    code: int
    instance: int | None


@dataclass(frozen=True, slots=True)
class MemoryErrors:
    """A card's memory errors. `corrected` grows by one every so many seconds; `remapped` rows are those of
    correctable, and of uncorrectable errors.
    """

    corrected: int = 0
    corrected_every_seconds: float | None = None
    uncorrected: int = 0
    remapped: tuple[int, int] = (0, 0)
    remap_pending: bool = False
    remap_failure: bool = False


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A compute instance; those with one `gpu_instance_id` share `memory_bytes`."""

    uuid: Uuid
    profile: str
    resource: str
    gpu_instance_id: int
    compute_instance_id: int
    compute_slices: int
    memory_bytes: int
    profile_id: int | None
    placement_start: int
    placement_size: int


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """`replicas` is 0 where the GPU is given away whole, `resource` empty where no plugin of the node offers it."""

    index: int
    uuid: Uuid
    minor: int
    pci_bus_id: str
    model: str
    memory_bytes: int
    reserved_bytes: int
    power_limit_watts: float
    numa: int
    resource: str
    replicas: int
    mig: tuple[MigDevice, ...]
    faults: tuple[Fault, ...]
    xids: tuple[Xid, ...]
    wear: MemoryErrors


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process on one or more devices. `start` and `end` are both `None` where it is always there.

    `memory` is `None` where NVML does not tell it.
    """

    comm: str
    types: str
    leaves: tuple[LeafPlace, ...]
    memory: Ramp | None
    sm: Wave
    memory_controller: Wave
    encoder: Wave
    decoder: Wave
    start: float | None
    end: float | None

    @property
    def peak_bytes(self) -> int:
        return UNTOLD_BYTES if self.memory is None else max(self.memory.first, self.memory.last)


@dataclass(frozen=True, slots=True)
class Claim:
    """A device that a container asks for: `count` slots of a shared GPU, else the whole device."""

    place: str
    leaf: LeafPlace
    count: int


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """`devices` are the kubelet's ids: those of `claims` once they are given, and those that the scenario spells out.

    `answers` are, by resource, what the plugins put into the container, as the checkpoint keeps it. `dra` is what it
    has by DRA claims, and `notes` what the DRA driver wrote down of it.
    """

    name: str
    init: bool
    claims: tuple[Claim, ...]
    devices: tuple[ResourceDevices, ...]
    answers: tuple[tuple[str, PluginAnswer], ...]
    dra: tuple[ClaimDevice, ...]
    notes: tuple[PreparedDevice, ...]
    processes: tuple[ProcessSpec, ...]


@dataclass(frozen=True, slots=True)
class PodSpec:
    """`start` and `end` are both `None` where the pod is always there. `uid` is `None` where it is derived."""

    place: str
    namespace: str
    name: str
    uid: str | None
    static: bool
    qos: str
    start: float | None
    end: float | None
    leaks: bool
    containers: tuple[ContainerSpec, ...]


@dataclass(frozen=True, slots=True)
class HostProcess:
    cgroup: str
    process: ProcessSpec


@dataclass(frozen=True, slots=True)
class KubeletOutage:
    """A kubelet's restart: it is down, then up without its API server's pods until `complete`."""

    start: float
    end: float
    complete: float


@dataclass(frozen=True, eq=False)
class Scenario:
    """A whole play. `text` is the YAML that it was read from, which another process can read again.

    `offers` are the ids of plugins of other makers, besides those that are held.
    """

    node: str
    repeat_seconds: float
    cgroups: str
    gpus: tuple[GpuSpec, ...]
    away: tuple[KubeletOutage, ...]
    offers: tuple[ResourceDevices, ...]
    pods: tuple[PodSpec, ...]
    host_processes: tuple[HostProcess, ...]
    text: str


def leaf_ids(gpu: GpuSpec, instance: int | None) -> tuple[str, tuple[DeviceId, ...]]:
    """The resource of a device, and the ids under which a kubelet gives it away."""
    if not gpu.resource:
        return "", ()
    if instance is not None:
        device = gpu.mig[instance]
        return device.resource, (DeviceId(device.uuid),)
    if gpu.replicas:
        return gpu.resource, tuple(DeviceId(f"{gpu.uuid}::{n}") for n in range(gpu.replicas))
    return gpu.resource, (DeviceId(gpu.uuid),)


def overhead_bytes(processes: int) -> int:
    """What a driver uses of a device besides what it tells per process."""
    return 4 * MIB + 12 * MIB * processes
