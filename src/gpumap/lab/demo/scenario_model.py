"""The nouns of a scenario, each declared once: the keys of the YAML file are the fields of the model.

`decoding` finds mistakes in the form, and each noun checks itself. `scenario` and `scenario_pods` check what a name or
a number refers to (a GPU, a MIG device, the length of the play), and fill in what is not written.
docs/dev/scenario.md explains the format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from msgspec import Meta, Struct, field, structs

from gpumap.lab.decoding import convert, matching
from gpumap.lab.demo.texts import derived_uuid
from gpumap.lab.demo.yaml_reading import ScenarioError
from gpumap.model.formatting import parse_duration
from gpumap.model.observations import ClaimDevice, DeviceId, PreparedDevice, ResourceDevices
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.readings import DeviceMemory, GpuReading, MigInstance, RecoveryAction, Uuid

T = TypeVar("T")

MIB = 1 << 20
GIB = 1 << 30
UNREPORTED_BYTES = GIB
"""What a process with `memory: unknown` uses of its device, though NVML does not report it."""


# --- units and names --------------------------------------------------------------------------------------------------


class Instant(float):
    """Seconds since the play began, written as a duration or as 0."""

    @classmethod
    def read(cls, value: object) -> Instant:
        if value in (0, "0", "0s") and not isinstance(value, bool):
            return cls(0)
        try:
            return cls(parse_duration(value if isinstance(value, str) else ""))
        except ValueError as error:
            raise ValueError("expected a time such as 90s or 1m30s") from error


class Duration(Instant):
    """Seconds, more than 0. Also an instant that cannot be the beginning of the play."""

    @classmethod
    def read(cls, value: object) -> Duration:
        seconds = cls(Instant.read(value))
        if seconds <= 0:
            raise ValueError("expected a time longer than 0s")
        return seconds


class Size(int):
    """Bytes, written as `20GiB`."""

    PATTERN: ClassVar[str] = r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]i)?B"
    UNITS: ClassVar[dict[str | None, int]] = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

    @classmethod
    def read(cls, value: object) -> Size:
        match = re.fullmatch(cls.PATTERN, value) if isinstance(value, str) else None
        if match is None:
            raise ValueError("expected a size such as 20GiB or 512MiB")
        return cls(float(match[1]) * cls.UNITS[match[2]])


class Watts(float):
    """Written as `700W`."""

    @classmethod
    def read(cls, value: object) -> Watts:
        if isinstance(value, str) and re.fullmatch(r"\d{1,5}W", value, re.ASCII) and int(value[:-1]):
            return cls(value[:-1])
        raise ValueError("expected a power such as 700W")


_UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_PROFILE = r"[1-7]g\.[0-9]{1,4}gb(?:\+[a-z.]+)?"
NOT_OFFERED = "none"
GPUS_MAX = 64
"""More than any node has."""
MAX_SLICES = 7
PROFILE_IDS = {1: 19, 2: 14, 3: 9, 4: 5, 7: 0}
"""By slices, as `nvidia-smi mig -lgip` has them of an A100 and an H100; of the plain profiles."""
MEMORY_SLICES = {1: 1, 2: 2, 3: 4, 4: 4}
"""By slices, of 8; the larger ones have all."""

Text = Annotated[str, Meta(min_length=1)]
"""In `ids`, `offers`, `answer` and `claims` it may name devices: `{0}`, `{2.1}`."""
Name = Annotated[
    # "_" cannot be in a name of Kubernetes, which log directories rely on.
    str, matching(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", "a Kubernetes name of a-z, 0-9, - and .")
]
GpuUuid = Annotated[str, matching(f"GPU-{_UUID}", "a GPU uuid such as GPU-b1028956-cfa2-4990-bf4a-5da9abb51763")]
MigUuid = Annotated[str, matching(f"MIG-{_UUID}", "a MIG uuid such as MIG-7b2f9c84-0e5d-5a1b-b3c4-d5e6f7a8b9c0")]
PodUidText = Annotated[
    str, matching(rf"{_UUID}|[0-9a-f]{{32}}", "a UUID, or 32 hex digits for a static pod, in quotes")
]
ResourceName = Annotated[
    str, matching(r"[a-z0-9.-]+/[A-Za-z0-9._-]+|none", "none, or a resource name such as nvidia.com/gpu")
]
Ratio = (
    Annotated[float, Meta(ge=0, le=1)]
    | Annotated[str, matching(r"(?:100|[0-9]{1,2}(?:\.[0-9]+)?)%", "a ratio from 0 to 1, or a percentage such as 40%")]
)
MigProfile = Annotated[str, matching(_PROFILE, "a MIG profile such as 1g.10gb")]
ComputeProfile = Annotated[
    str, matching(rf"(?:[1-7]c\.)?{_PROFILE}", "the profile of a compute instance such as 1c.3g.40gb")
]
HostPath = Annotated[str, matching(r"/[!-~]{1,254}", "a path that begins with /")]
CgroupPath = Annotated[str, matching(r"/[!-~]*", "a cgroup path that begins with /")]
Comm = Annotated[
    str,
    matching(r"[^\x00-\x1f/()]{1,15}", "a command name of 1 to 15 characters, without /, parentheses and controls"),
]

Cgroups = Literal["v2-systemd", "v2-cgroupfs", "v1-cgroupfs"]
FaultKind = Literal["lost", "hung", "reset_required", "insufficient_power", "irq_issue", "no_permission", "unknown"]
"""The words that NVML's worker has for them. A GPU that is `hung` answers nothing at all."""
GrowingValue = Literal[
    "pcie_transmit_bytes", "pcie_receive_bytes", "nvlink_transmit_bytes", "nvlink_receive_bytes", "pcie_replays"
]
WRITTEN_VALUES = frozenset(GpuReading.__struct_fields__) - {"index", "fault", "uuid", "minor", "pci_bus_id", "model"}
Qos = Literal["guaranteed", "burstable", "besteffort"]
ProcessType = Literal["compute", "graphics", "compute+graphics", "mps"]


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping in the file. All times are seconds since the play began, all sizes are bytes."""


# --- GPUs -------------------------------------------------------------------------------------------------------------


class Fault(Entry, frozen=True, kw_only=True):
    """`recovery` is the action that the driver asks for, if it still reports one."""

    kind: FaultKind
    start: Instant = field(name="from", default=Instant(0))
    end: Duration = field(name="until")
    recovery: RecoveryAction | None = None

    def __post_init__(self) -> None:
        _check_order(self.start, self.end)


class Xid(Entry, frozen=True):
    """An XID event: of the whole GPU, or of its MIG device of this number."""

    moment: Instant = field(name="at")
    code: Annotated[int, Meta(ge=1, le=999)]
    instance: Annotated[int, Meta(ge=0)] | None = None


class ComputeInstance(Entry, frozen=True):
    profile: ComputeProfile
    uuid: MigUuid | None = None

    @property
    def slices(self) -> int:
        return int(self.profile[0])


class GpuInstance(Entry, frozen=True):
    """A GPU instance with one compute instance, or with those of `compute`."""

    profile: MigProfile
    uuid: MigUuid | None = None
    gpu_instance_id: Annotated[int, Meta(ge=0, le=15)] | None = None
    memory: Size | None = None
    compute: tuple[ComputeProfile | ComputeInstance, ...] = ()

    def __post_init__(self) -> None:
        if self.compute and self.uuid:
            raise ValueError('.uuid: with "compute" each compute instance has its own uuid')
        for number, instance in enumerate(self.parts):
            if instance.profile != self.profile and not instance.profile.endswith(f"c.{self.profile}"):
                expectation = f"a compute instance of {self.profile}, such as 1c.{self.profile}"
                raise ValueError(f".compute[{number}]: expected {expectation}")
        if sum(instance.slices for instance in self.parts) > self.slices:
            raise ValueError(f".compute: takes more than the {self.slices} slices of {self.profile}")

    @property
    def slices(self) -> int:
        return int(self.profile[0])

    @property
    def memory_slices(self) -> int:
        return MEMORY_SLICES.get(self.slices, 8)

    @property
    def memory_bytes(self) -> int:
        """By default 97 % of what the profile says, in whole MiB."""
        gigabytes = int(self.profile.partition(".")[2].partition("gb")[0])
        return gigabytes * GIB * 97 // 100 // MIB * MIB if self.memory is None else int(self.memory)

    @property
    def parts(self) -> tuple[ComputeInstance, ...]:
        parts = self.compute or (ComputeInstance(self.profile, self.uuid),)
        return tuple(ComputeInstance(entry) if isinstance(entry, str) else entry for entry in parts)


class GpuEntry(Entry, frozen=True, kw_only=True):
    """A GPU as it is written. `Gpu` is the same with what is not written."""

    model: Text
    memory_bytes: Size = field(name="memory")
    uuid: GpuUuid | None = None
    minor: Annotated[int, Meta(ge=0, le=255)] | None = None
    reserved_bytes: Size = field(name="reserved", default=Size(512 * MIB))
    leaked_bytes: Size = field(name="leaked", default=Size(0))
    power_limit_watts: Watts = field(name="power_limit", default=Watts(700))
    numa: Annotated[int, Meta(ge=0, le=63)] | None = None
    resource: ResourceName | None = None
    replicas: Annotated[int, Meta(ge=2, le=1000)] | None = None
    mig: tuple[MigProfile | GpuInstance, ...] = ()
    faults: tuple[Fault, ...] = ()
    xids: tuple[Xid, ...] = ()
    values: dict[str, Any] = {}
    """What NVML reports of it in addition, by the names of a capture's nvml.json."""
    growth: dict[GrowingValue, Annotated[float, Meta(ge=0, le=1e15)]] = {}
    """By how much counters among `values` grow in a second."""

    def __post_init__(self) -> None:
        if self.mig and self.replicas:
            raise ValueError('.replicas: a GPU with "mig" cannot have replicas')
        if self.mig and self.leaked_bytes:
            raise ValueError('.leaked: a GPU with "mig" cannot have leaked memory')
        instances = self.gpu_instances
        ids = [instance.gpu_instance_id for instance in instances]
        for number, id_ in enumerate(ids):
            if id_ in ids[:number]:
                raise ValueError(f".mig[{number}]: GPU instance id {id_} is also that of mig[{ids.index(id_)}]")
        slices = sum(instance.slices for instance in instances)
        if slices > MAX_SLICES:
            raise ValueError(f".mig: the profiles take {slices} of {MAX_SLICES} slices")
        taken_bytes = self.reserved_bytes + self.leaked_bytes + sum(instance.memory_bytes for instance in instances)
        if taken_bytes >= self.memory_bytes:
            taker = "reserved memory and MIG devices take" if self.mig else "the reserved and leaked memory takes"
            raise ValueError(f"{taker} {taken_bytes / GIB:.1f} GiB of {self.memory_bytes / GIB:.1f} GiB")
        self._check_xids(sum(len(instance.parts) for instance in instances))
        if unknown_names := sorted(self.values.keys() - WRITTEN_VALUES):
            raise ValueError(f'.values: unknown key "{unknown_names[0]}"')
        convert({"index": 0, **self.values}, GpuReading, ".values")

    @property
    def gpu_instances(self) -> tuple[GpuInstance, ...]:
        """The entries of `mig`, each with an id."""
        instances = (GpuInstance(entry) if isinstance(entry, str) else entry for entry in self.mig)
        return tuple(
            structs.replace(instance, gpu_instance_id=number) if instance.gpu_instance_id is None else instance
            for number, instance in enumerate(instances, 1)
        )

    def _check_xids(self, devices: int) -> None:
        for number, xid in enumerate(self.xids):
            place = f".xids[{number}].instance"
            if xid.instance is not None and not devices:
                raise ValueError(f"{place}: the GPU has no MIG devices")
            if xid.instance is not None and xid.instance >= devices:
                raise ValueError(f'{place}: expected a whole number from 0 to {devices - 1}, found "{xid.instance}"')


def nth_bus_id(index: int) -> str:
    return f"00000000:{0x18 + 0x11 * index & 0xFF:02X}:00.0"


class Gpu(GpuEntry, frozen=True, kw_only=True, dict=True):
    """A GPU of the node, at its NVML index."""

    index: int
    uuid: Uuid
    minor: int
    numa: int

    @property
    def pci_bus_id(self) -> str:
        return nth_bus_id(self.index)

    @cached_property
    def devices(self) -> tuple[MigInstance, ...]:
        """The MIG devices while nothing uses them, in the order of `nvidia-smi -L`."""
        devices: list[MigInstance] = []
        start = 0
        for instance in self.gpu_instances:
            span = instance.memory_slices
            start = -(-start // span) * span  # an instance begins at a multiple of its size
            devices += self._devices_of(instance, start)
            start += span
        return tuple(devices)

    def written_values(self, seconds: float) -> dict[str, Any]:
        """Return the values of the scenario, after their growth since the first play began."""
        reading = convert({"index": 0, **self.values}, GpuReading)
        values = {name: getattr(reading, name) for name in self.values}
        growth = {name: int(rate * max(seconds, 0.0)) for name, rate in self.growth.items()}
        return values | {name: (values.get(name) or 0) + grown for name, grown in growth.items()}

    def _devices_of(self, instance: GpuInstance, start: int) -> Iterator[MigInstance]:
        memory = DeviceMemory(instance.memory_bytes, 0, instance.memory_bytes, 0)
        for number, instance_part in enumerate(instance.parts):
            yield MigInstance(
                uuid=Uuid(instance_part.uuid or f"MIG-{derived_uuid(self.uuid, instance.gpu_instance_id, number)}"),
                profile=instance_part.profile,
                gpu_instance_id=instance.gpu_instance_id or 0,
                compute_instance_id=number,
                compute_slices=instance_part.slices,
                memory=memory,
                profile_id=PROFILE_IDS.get(instance.slices),
                placement_start=start,
                placement_size=instance.memory_slices,
            )

    def ids(self, device: int | None) -> tuple[str, tuple[DeviceId, ...]]:
        """The resource of the GPU, or of one of its MIG devices, and the ids under which a kubelet assigns it."""
        if self.resource == NOT_OFFERED:
            return "", ()
        if device is not None:
            mig = self.devices[device]
            return self.resource or f"nvidia.com/mig-{mig.profile.replace('+', '.')}", (DeviceId(mig.uuid),)
        if self.replicas:
            slots = tuple(DeviceId(f"{self.uuid}::{number}") for number in range(self.replicas))
            return self.resource or "nvidia.com/gpu.shared", slots
        return self.resource or "nvidia.com/gpu", (DeviceId(self.uuid),)


def overhead_bytes(processes: int) -> int:
    """What a driver uses of a device in addition to what it reports for each process."""
    return 4 * MIB + 12 * MIB * processes


# --- the kubelet and pods ---------------------------------------------------------------------------------------------


class KubeletOutage(Entry, frozen=True):
    """A kubelet's restart: it is down, then up without its API server's pods until `complete`."""

    start: Instant = field(name="from")
    end: Duration = field(name="until")
    static_pods_for: Instant = Instant(5)

    def __post_init__(self) -> None:
        _check_order(self.start, self.end)

    @property
    def complete(self) -> float:
        return self.end + self.static_pods_for


Ids = dict[Text, tuple[Text, ...]]
"""In the file `[0-3]` in an id means four ids; in a `Scenario` each id is spelled out."""


class Kubelet(Entry, frozen=True):
    """`offers` are the ids of plugins of other makers, in addition to those that pods hold."""

    away: tuple[KubeletOutage, ...] = ()
    offers: Ids = {}


class Ramp(Entry, frozen=True):
    """Memory that grows from `first` to `target` bytes."""

    first: Size = field(name="from")
    target: Size = field(name="to")
    over_seconds: Duration = field(name="over")


class Wave(Entry, frozen=True):
    """A ratio that swings between `low` and `high`, starting low."""

    low: Ratio = field(name="from")
    high: Ratio = field(name="to")
    period_seconds: Duration = field(name="period", default=Duration(60))


Memory = Annotated[str, matching(f"{Size.PATTERN}|unknown", "a size such as 20GiB or 512MiB")] | Ramp
Load = Ratio | Wave


def ratio_at(load: Load, moment: float) -> float:
    """A load at a time of the play."""
    if isinstance(load, Wave):
        swing = (1 - math.cos(2 * math.pi * moment / load.period_seconds)) / 2
        low, high = ratio_at(load.low, moment), ratio_at(load.high, moment)
        return low + (high - low) * swing
    return float(load[:-1]) / 100 if isinstance(load, str) else load


def peak_bytes(memory: Memory) -> int:
    if isinstance(memory, Ramp):
        return max(memory.first, memory.target)
    return UNREPORTED_BYTES if memory == "unknown" else Size.read(memory)


def bytes_at(memory: Memory, seconds: float) -> int | None:
    """The memory of a process that runs for so long; `None` if NVML does not report it."""
    if not isinstance(memory, Ramp):
        return None if memory == "unknown" else int(Size.read(memory))
    if seconds >= memory.over_seconds:
        return int(memory.target)
    return memory.first + int((memory.target - memory.first) * max(seconds, 0.0) / memory.over_seconds)


class Leaf(NamedTuple):
    """A device by its place: a GPU's index and, on a MIG GPU, the number of the MIG device (as in `nvidia-smi -L`)."""

    gpu: int
    instance: int | None = None


class Slots(Entry, frozen=True):
    gpu: int
    count: Annotated[int, Meta(ge=1, le=1000)] = 1


class MigPlace(Entry, frozen=True):
    """A MIG device by its number on its GPU, as in `nvidia-smi -L`."""

    gpu: int
    instance: Annotated[int, Meta(ge=0, le=63)]


class Process(Entry, frozen=True, kw_only=True, dict=True):
    """A process. In the file one without `gpu` and `mig` uses what its container claims.

    In a `Scenario` `start` and `end` are both `None` if it always runs.
    """

    gpu: int | tuple[int, ...] = ()
    mig: MigPlace | tuple[MigPlace, ...] = ()
    type: ProcessType = "compute"
    memory: Memory
    sm: Load = 0.0
    encoder: Load = 0.0
    decoder: Load = 0.0
    jpeg: Load = 0.0
    ofa: Load = 0.0
    start: Instant | None = field(name="from", default=None)
    end: Duration | None = field(name="until", default=None)
    hangs: bool = False
    """Its kernels only wait: the GPU is busy, and does next to nothing."""
    comm: Comm = "python3"

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The devices that it uses."""
        gpus = [Leaf(index) for index, _ in each(self.gpu)]
        return tuple(dict.fromkeys([*gpus, *(Leaf(mig.gpu, mig.instance) for mig, _ in each(self.mig))]))

    def memory_controller_at(self, moment: float) -> float:
        return 0.0 if self.hangs else ratio_at(self.sm, moment) / 2

    def runs_at(self, moment: float) -> bool:
        return self.start is None or self.end is None or self.start <= moment < self.end


class HostProcess(Process, frozen=True, kw_only=True, dict=True):
    """A process in no pod."""

    cgroup: CgroupPath | None = None


class Answer(Entry, frozen=True):
    """What a device plugin answers to an allocation."""

    envs: dict[Text, Text] = {}
    annotations: dict[Text, Text] = {}
    devices: tuple[HostPath, ...] = ()
    mounts: tuple[HostPath, ...] = ()
    cdi: tuple[Text, ...] = ()


class Notes(Entry, frozen=True):
    """What NVIDIA's DRA driver writes down of a claim's device."""

    uuid: Text
    memory: Size | None = None
    admin_access: bool = False


class DraClaim(Entry, frozen=True):
    """A device of a claim. Pods of one namespace share a claim by its name."""

    claim: Name
    device: Text
    driver: Name = DRA_DRIVER
    share_id: Text = ""
    notes: Notes | None = None

    def __post_init__(self) -> None:
        if self.notes is not None and self.driver != DRA_DRIVER:
            raise ValueError(f".notes: only {DRA_DRIVER} writes such, and this is {self.driver}'s")

    def listed(self, node: str, namespace: str) -> ClaimDevice:
        """As the kubelet's List has it."""
        return ClaimDevice(self.driver, node, self.device, self.share_id, namespace, self.claim)

    def prepared(self, namespace: str, notes: Notes) -> PreparedDevice:
        """As the DRA driver writes it down."""
        uuid = Uuid(notes.uuid)
        return PreparedDevice(namespace, self.claim, self.device, self.share_id, uuid, notes.admin_access, notes.memory)


class Container(Entry, frozen=True):
    """`ids` are the kubelet's ids by resource; in a `Scenario` also those that `gpus`, `slots` and `mig` get.

    `answer` is in the file one answer, or one for each resource. In a `Scenario` it has a `PluginAnswer` for each.
    """

    name: Name
    init: bool = False
    gpus: tuple[int, ...] = ()
    slots: Slots | tuple[Slots, ...] = ()
    mig: MigPlace | tuple[MigPlace, ...] = ()
    ids: Ids = {}
    answer: dict[Text, Any] = {}
    claims: tuple[DraClaim, ...] = ()
    processes: tuple[Process, ...] = ()

    @property
    def devices(self) -> tuple[ResourceDevices, ...]:
        ids = {resource: tuple(map(DeviceId, texts)) for resource, texts in self.ids.items()}
        return tuple(ResourceDevices(resource, ids[resource]) for resource in sorted(ids))


class Pod(Entry, frozen=True, kw_only=True):
    """In a `Scenario` `start` and `end` are both `None` if it always exists."""

    namespace: Name = "default"
    name: Name
    uid: PodUidText | None = None
    static: bool = False
    qos: Qos = "burstable"
    start: Instant | None = field(name="from", default=None)
    end: Duration | None = field(name="until", default=None)
    leaks: bool = False
    containers: tuple[Container, ...]

    def __post_init__(self) -> None:
        if self.leaks and self.end is None:
            raise ValueError('"leaks" needs an "until", which its processes outlive')
        if all(container.init for container in self.containers):
            raise ValueError('needs a container that is not "init"')
        names = [container.name for container in self.containers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'has two containers named "{name}"')

    def overlaps(self, other_pod: Pod) -> bool:
        """Whether both pods exist at some time of the play."""
        if self.start is None or self.end is None or other_pod.start is None or other_pod.end is None:
            return True
        return self.start < other_pod.end and other_pod.start < self.end


class ScenarioFile(Entry, frozen=True, kw_only=True):
    """A whole play as it is written. `Scenario` is the same with what is not written."""

    node: Name = "demo-node"
    repeat_seconds: Duration = field(name="repeat", default=Duration(300))
    cgroups: Cgroups = "v2-systemd"
    gpus: Annotated[tuple[GpuEntry, ...], Meta(max_length=GPUS_MAX)]
    missing_gpus: Annotated[int, Meta(ge=0, le=GPUS_MAX)] = 0
    kubelet: Kubelet = Kubelet()
    pods: tuple[Pod, ...] = ()
    host_processes: tuple[HostProcess, ...] = ()


class Scenario(ScenarioFile, frozen=True, kw_only=True, eq=False):
    """A whole play. `text` is the YAML that it was read from, which another process can read again."""

    gpus: tuple[Gpu, ...]
    text: str


def each(entries: T | tuple[T, ...], place: str = "") -> Iterator[tuple[T, str]]:
    """One entry, or those of a list, with their places."""
    if isinstance(entries, tuple):
        yield from ((entry, f"{place}[{number}]") for number, entry in enumerate(entries))
    else:
        yield entries, place


def _check_order(start: float, end: float) -> None:
    if end <= start:
        raise ValueError("ends before it begins")


# --- reading ----------------------------------------------------------------------------------------------------------


def decode(value: object, kind: type[T], place: str = "") -> T:
    """Convert a decoded YAML value at `place`. Raises `ScenarioError`."""
    try:
        return convert(value, kind, place, lambda unit, text: unit.read(text))
    except ValueError as error:
        message = str(error)
        raise ScenarioError(f"scenario{message}" if message.startswith(":") else message.removeprefix(".")) from error
