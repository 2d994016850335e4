"""The nouns of a checked scenario: what is on the simulated node and when.

All times are seconds since the play began, all sizes are bytes. Nouns that are in the YAML file as they are here
(`Fault`, `Xid`, `KubeletOutage`, `Ramp`, `Wave`, …) are declared in `scenario_file`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpumap.lab.demo.scenario_file import (
    GIB,
    MIB,
    EccErrors,
    Fault,
    KubeletOutage,
    Qos,
    Ramp,
    RemappedRows,
    Wave,
    Xid,
)
from gpumap.model.observations import ClaimDevice, DeviceId, PluginAnswer, PreparedDevice, ResourceDevices
from gpumap.model.readings import Uuid

UNREPORTED_BYTES = GIB
"""What a process with `memory: unknown` uses of its device, though NVML does not report it."""


class LeafPlace(NamedTuple):
    """A device by its place: a GPU's index and, on a MIG GPU, the number of the MIG device (as in `nvidia-smi -L`)."""

    gpu: int
    instance: int | None = None


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
    """`replicas` is 0 if the GPU is assigned whole. `resource` is empty if no plugin of the node offers the GPU."""

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
    ecc: EccErrors
    remapped_rows: RemappedRows


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process on one or more devices. `start` and `end` are both `None` if it always runs.

    `types` is NVML's word. `memory` is `None` if NVML does not report it.
    """

    comm: str
    types: str
    leaves: tuple[LeafPlace, ...]
    memory: Ramp | None
    sm: Wave
    memory_controller: Wave
    encoder: Wave
    decoder: Wave
    jpeg: Wave
    ofa: Wave
    start: float | None
    end: float | None

    @property
    def peak_bytes(self) -> int:
        return UNREPORTED_BYTES if self.memory is None else max(self.memory.first, self.memory.last)

    def runs_at(self, moment: float) -> bool:
        return self.start is None or self.end is None or self.start <= moment < self.end


@dataclass(frozen=True, slots=True)
class Claim:
    """A device that a container asks for: `count` slots of a shared GPU, else the whole device."""

    place: str
    leaf: LeafPlace
    count: int


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """`devices` are the kubelet's ids: those that `claims` get, and those that the scenario spells out.

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
    """`start` and `end` are both `None` if the pod always exists. `uid` is `None` if it is derived."""

    place: str
    namespace: str
    name: str
    uid: str | None
    static: bool
    qos: Qos
    start: float | None
    end: float | None
    leaks: bool
    containers: tuple[ContainerSpec, ...]

    def overlaps(self, other: PodSpec) -> bool:
        """Whether both pods exist at some time of the play."""
        if self.start is None or self.end is None or other.start is None or other.end is None:
            return True
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process in no pod."""

    cgroup: str
    process: ProcessSpec


@dataclass(frozen=True, eq=False)
class Scenario:
    """A whole play. `text` is the YAML that it was read from, which another process can read again.

    `offers` are the ids of plugins of other makers, in addition to those that pods hold.
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
    """The resource of a device, and the ids under which a kubelet assigns it."""
    if not gpu.resource:
        return "", ()
    if instance is not None:
        device = gpu.mig[instance]
        return device.resource, (DeviceId(device.uuid),)
    if gpu.replicas:
        return gpu.resource, tuple(DeviceId(f"{gpu.uuid}::{n}") for n in range(gpu.replicas))
    return gpu.resource, (DeviceId(gpu.uuid),)


def overhead_bytes(processes: int) -> int:
    """What a driver uses of a device in addition to what it reports for each process."""
    return 4 * MIB + 12 * MIB * processes
