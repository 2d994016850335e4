"""What a scenario's YAML file may hold. Each noun is declared once; docs/dev/scenario.md explains the format.

`decoding` finds mistakes in the form. What a name or a number refers to (a GPU, a MIG device, the length of the
play) is checked in `scenario` and `scenario_pods`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, TypeVar

from msgspec import Meta, Struct, field

from gpumap.lab import decoding
from gpumap.lab.demo.yaml_reading import ScenarioError, read_yaml
from gpumap.model.units import parse_duration

T = TypeVar("T")

MIB = 1 << 20
GIB = 1 << 30


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


class Ratio(float):
    """From 0 to 1, written so or as a percentage."""

    @classmethod
    def read(cls, value: object) -> Ratio:
        number = value
        if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value, re.ASCII):
            number = float(value[:-1]) / 100
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1:
            raise ValueError("expected a ratio from 0 to 1, or a percentage such as 40%")
        return cls(number)


class Watts(float):
    """Written as `700W`."""

    @classmethod
    def read(cls, value: object) -> Watts:
        if isinstance(value, str) and re.fullmatch(r"\d{1,5}W", value, re.ASCII) and int(value[:-1]):
            return cls(value[:-1])
        raise ValueError("expected a power such as 700W")


def _matching(pattern: str, what: str) -> Meta:
    """A text that is `what`. msgspec searches the pattern; `\\Z` is its end, before which no line ends."""
    return Meta(pattern=rf"^(?:{pattern})\Z", description=what)


_UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
PROFILE = re.compile(r"(?:(?P<compute>[1-7])c\.)?(?P<slices>[1-7])g\.(?P<memory>[0-9]{1,4})gb(\+[a-z.]+)?")
NOT_OFFERED = "none"

Text = Annotated[str, Meta(min_length=1, description="text (in quotes, if it looks like a number)")]
"""In `ids`, `offers`, `answer`, `alloc_env` and `claims` it may name devices: `{0}`, `{2.1}`."""
Name = Annotated[
    # "_" cannot be in a name of Kubernetes, which log directories rely on.
    str, _matching(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", "a Kubernetes name (a-z, 0-9, - and .)")
]
GpuIndex = Annotated[int, Meta(description="the number of a GPU")]
GpuUuid = Annotated[str, _matching(f"GPU-{_UUID}", "a GPU uuid such as GPU-b1028956-cfa2-4990-bf4a-5da9abb51763")]
MigUuid = Annotated[str, _matching(f"MIG-{_UUID}", "a MIG uuid such as MIG-7b2f9c84-0e5d-5a1b-b3c4-d5e6f7a8b9c0")]
PodUidText = Annotated[
    str,
    _matching(
        r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}",
        "a UUID, or 32 hex digits for a static pod, in quotes",
    ),
]
ResourceName = Annotated[
    str, _matching(r"[a-z0-9.-]+/[A-Za-z0-9._-]+|none", "none, or a resource name such as nvidia.com/gpu")
]
MigProfile = Annotated[str, _matching(PROFILE.pattern, "a MIG profile such as 1g.10gb or 1c.3g.40gb")]
HostPath = Annotated[str, _matching(r"/[!-~]{1,254}", "a path that begins with /")]
CgroupPath = Annotated[str, _matching(r"/[!-~]*", "a cgroup path that begins with /")]
Comm = Annotated[
    str,
    _matching(r"[^\x00-\x1f/()]{1,15}", "a command name of 1 to 15 characters, no control character, /, ( or )"),
]
Errors = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Rows = Annotated[int, Meta(ge=0, le=512)]
"""As many as a card can remap."""

Cgroups = Literal["v2-systemd", "v2-cgroupfs", "v1-cgroupfs"]
FaultKind = Literal["lost", "hung", "reset_required", "insufficient_power", "irq_issue", "no_permission", "unknown"]
"""The words that NVML's worker has for them. A GPU that is `hung` answers nothing at all."""
RecoveryAction = Literal[
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
]
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

    at: Instant
    code: Annotated[int, Meta(ge=1, le=999)]
    instance: Annotated[int, Meta(ge=0)] | None = None


class EccErrors(Entry, frozen=True):
    """`corrected` grows by one every so many seconds."""

    corrected: Errors = 0
    corrected_every: Duration | None = None
    uncorrected: Errors = 0


class RemappedRows(Entry, frozen=True):
    """Rows that were remapped after correctable, and after uncorrectable errors."""

    correctable: Rows = 0
    uncorrectable: Rows = 0
    pending: bool = False
    failure: bool = False


class ComputeInstanceEntry(Entry, frozen=True):
    profile: MigProfile
    uuid: MigUuid | None = None


class GpuInstanceEntry(Entry, frozen=True):
    """A GPU instance with one compute instance, or with those of `compute`."""

    profile: MigProfile
    uuid: MigUuid | None = None
    gpu_instance_id: Annotated[int, Meta(ge=0, le=15)] | None = None
    memory: Size | None = None
    compute: tuple[MigProfile | ComputeInstanceEntry, ...] = ()


class GpuEntry(Entry, frozen=True):
    """A GPU as it is written; what is `None` is derived."""

    model: Text
    memory: Size
    uuid: GpuUuid | None = None
    minor: Annotated[int, Meta(ge=0, le=255)] | None = None
    reserved: Size = Size(512 * MIB)
    power_limit: Watts = Watts(700)
    numa: Annotated[int, Meta(ge=0, le=63)] | None = None
    resource: ResourceName | None = None
    replicas: Annotated[int, Meta(ge=2, le=1000)] | None = None
    mig: tuple[MigProfile | GpuInstanceEntry, ...] = ()
    faults: tuple[Fault, ...] = ()
    xids: tuple[Xid, ...] = ()
    ecc: EccErrors = EccErrors()
    remapped_rows: RemappedRows = RemappedRows()


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


class KubeletEntry(Entry, frozen=True):
    away: tuple[KubeletOutage, ...] = ()
    offers: Annotated[dict[Text, tuple[Text, ...]], Meta(description="a mapping of resources to ids")] = {}


class Ramp(Entry, frozen=True):
    """Memory that grows from `first` to `last` bytes; a constant has both equal."""

    first: Size = field(name="from")
    last: Size = field(name="to")
    over_seconds: Duration = field(name="over")

    def at(self, seconds: float) -> int:
        if seconds >= self.over_seconds:
            return int(self.last)
        return self.first + int((self.last - self.first) * max(seconds, 0.0) / self.over_seconds)


class Wave(Entry, frozen=True):
    """A ratio that swings between `low` and `high`, starting low; a constant has both equal."""

    low: Ratio = field(name="from")
    high: Ratio = field(name="to")
    period_seconds: Duration = field(name="period", default=Duration(60))


Memory = Annotated[
    Annotated[str, Meta(pattern=rf"^(?:{Size.PATTERN}|unknown)\Z")] | Ramp,
    Meta(description="a size such as 20GiB or 512MiB"),
]
Load = Annotated[
    Annotated[float, Meta(ge=0, le=1)] | Annotated[str, Meta(pattern=r"^(?:100|[0-9]{1,2}(?:\.[0-9]+)?)%\Z")] | Wave,
    Meta(description="a ratio from 0 to 1, or a percentage such as 40%"),
]


class SlotsEntry(Entry, frozen=True):
    gpu: GpuIndex
    count: Annotated[int, Meta(ge=1, le=1000)] = 1


class MigDeviceEntry(Entry, frozen=True):
    """A MIG device by its number on its GPU, as in `nvidia-smi -L`."""

    gpu: GpuIndex
    instance: Annotated[int, Meta(ge=0, le=63)]


Slots = SlotsEntry | tuple[SlotsEntry, ...]
MigDevices = MigDeviceEntry | tuple[MigDeviceEntry, ...]


class ProcessEntry(Entry, frozen=True, kw_only=True):
    """A process; without `gpu` and `mig` it uses what its container claims."""

    gpu: GpuIndex | tuple[GpuIndex, ...] | None = None
    mig: MigDevices | None = None
    type: ProcessType = "compute"
    memory: Memory
    sm: Load = 0.0
    memory_controller: Load | None = None
    encoder: Load = 0.0
    decoder: Load = 0.0
    jpeg: Load = 0.0
    ofa: Load = 0.0
    start: Instant | None = field(name="from", default=None)
    end: Duration | None = field(name="until", default=None)
    comm: Comm = "python3"


class HostProcessEntry(ProcessEntry, frozen=True, kw_only=True):
    cgroup: CgroupPath | None = None


class AnswerEntry(Entry, frozen=True):
    """What a device plugin answers to an allocation."""

    envs: dict[Text, Text] = {}
    annotations: dict[Text, Text] = {}
    devices: tuple[HostPath, ...] = ()
    mounts: tuple[HostPath, ...] = ()
    cdi: tuple[Text, ...] = ()


class NotesEntry(Entry, frozen=True):
    """What NVIDIA's DRA driver writes down of a claim's device."""

    uuid: Text
    memory: Size | None = None
    admin_access: bool = False


class DraClaimEntry(Entry, frozen=True):
    """A device of a claim; `None` as the driver is NVIDIA's."""

    claim: Name
    device: Text
    driver: Name | None = None
    share_id: Text | None = None
    notes: NotesEntry | None = None


class ContainerEntry(Entry, frozen=True):
    """`answer` is one answer, or one for each resource; `scenario_pods` decodes it."""

    name: Name
    init: bool = False
    gpus: tuple[GpuIndex, ...] = ()
    slots: Slots = ()
    mig: MigDevices = ()
    ids: Annotated[dict[Text, tuple[Text, ...]], Meta(description="a mapping of resources to ids")] = {}
    answer: object = None
    alloc_env: dict[Text, Text] | None = None
    claims: tuple[DraClaimEntry, ...] = ()
    processes: tuple[ProcessEntry, ...] = ()


class PodEntry(Entry, frozen=True, kw_only=True):
    namespace: Name = "default"
    name: Name
    uid: PodUidText | None = None
    static: bool = False
    qos: Qos = "burstable"
    start: Instant | None = field(name="from", default=None)
    end: Duration | None = field(name="until", default=None)
    leaks: bool = False
    containers: tuple[ContainerEntry, ...]


class ScenarioFile(Entry, frozen=True, kw_only=True):
    node: Name = "demo-node"
    repeat: Duration = Duration(300)
    cgroups: Cgroups = "v2-systemd"
    gpus: tuple[GpuEntry, ...]
    kubelet: KubeletEntry = KubeletEntry()
    pods: tuple[PodEntry, ...] = ()
    host_processes: tuple[HostProcessEntry, ...] = ()


def _check_order(start: float, end: float) -> None:
    if end <= start:
        raise ValueError("ends before it begins")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_scenario_file(text: str) -> ScenarioFile:
    """The types that a YAML text describes. Raises `ScenarioError`."""
    return _decode(read_yaml(text), ScenarioFile, "")


def read_answer(value: object, place: str) -> AnswerEntry:
    """One answer, of `ContainerEntry.answer`, that is at `place`. Raises `ScenarioError`."""
    return _decode(value, AnswerEntry, place)


def _decode(value: object, kind: type[T], place: str) -> T:
    try:
        return decoding.convert(value, kind, place, "scenario", _read_unit)
    except ValueError as error:
        raise ScenarioError(str(error)) from error


def _read_unit(kind: type, value: object) -> object:
    """What msgspec asks for each type that it does not know."""
    units: dict[type, Callable[[object], object]] = {
        unit: unit.read for unit in (Instant, Duration, Size, Ratio, Watts)
    }
    return units[kind](value) if kind in units else value
