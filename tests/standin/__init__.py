"""A compiled stand-in for libnvidia-ml.so.1: `build` compiles it, `Driver.write` says what it answers.

The library reads the state file again whenever it was replaced, so a test changes the GPUs of a running process by
changing a `Driver` and writing it again. None as a value always means that the driver does not support that call.
How the state file is laid out, and what the rules match, is at the top of nvml.c.
"""

import hashlib
import os
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Literal

__all__ = [
    "FUNCTIONS",
    "LIBRARIES",
    "Attributes",
    "Code",
    "Driver",
    "FieldValue",
    "Gpm",
    "Gpu",
    "MigInstance",
    "Placement",
    "Process",
    "Sample",
    "Target",
    "Xid",
    "build",
    "environment",
    "read_calls",
    "take_calls",
]

SOURCE = Path(__file__).with_name("nvml.c")
FUNCTIONS = frozenset(re.findall(r"^#ifndef WITHOUT_(\w+)$", SOURCE.read_text(), re.MULTILINE))
"""Every function that the stand-in exports."""

COUNTER = "56sQ"
"""nvml.c: a function's name, and its calls."""
LIBRARIES = SOURCE.with_name("__pycache__")
"""Where compiled stand-ins stay for later runs. `make clean` removes them."""

MIB = 1 << 20
GIB = 1 << 30

Target = int | str
"""The device of a rule: a GPU's index, "*", "0.gpu" (not its MIG instances), "0.mig" (only those), "0.3" (one slot)."""

FieldValue = tuple[Literal["double", "uint", "ulong", "ulonglong", "slonglong", "sint", "ushort", "error"], float]
"""The type and value of a field; "error" makes the value an nvmlReturn_t."""


class Code(IntEnum):
    """The nvmlReturn_t values that tests have use for."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    NO_DATA = 21
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


def build(directory: Path, without: Sequence[str] = ()) -> Path:
    """Compile the stand-in, leaving out the functions in `without`, and return the path of its libnvidia-ml.so.1.

    The same source and options are compiled once per `directory`, also by test runs side by side.
    """
    unknown = set(without) - FUNCTIONS
    if unknown:
        raise ValueError(f"the stand-in has no {', '.join(sorted(unknown))}")
    command = [os.environ.get("CC", "gcc"), "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    command += ["-shared", "-fPIC", "-pthread", "-Wl,-soname,libnvidia-ml.so.1"]
    command += [f"-DWITHOUT_{name}" for name in sorted(set(without))]
    if without:
        command.append("-Wno-unused-function")  # what only the left-out functions called
    variant = hashlib.sha256(SOURCE.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    library = directory / variant / "libnvidia-ml.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            compiled = Path(scratch) / library.name
            subprocess.run([*command, str(SOURCE), "-o", str(compiled)], check=True)
            compiled.replace(library)
    return library


def environment(library: Path, state: Path, calls: Path | None = None, look_milliseconds: int = 0) -> dict[str, str]:
    """The variables of a process that shall find `library` by its soname and `state`, and count its calls.

    With `look_milliseconds` a call looks for another state only after that time, and else answers from memory: at once.
    """
    variables = {"LD_LIBRARY_PATH": str(library.parent), "STANDIN_STATE": str(state)}
    if look_milliseconds:
        variables["STANDIN_LOOK_MILLISECONDS"] = str(look_milliseconds)
    return variables if calls is None else variables | {"STANDIN_CALLS": str(calls)}


def read_calls(path: Path, pids: Iterable[int] | None = None) -> Counter[str]:
    """How often each function was called until now, by all processes that count at `path`, or by some."""
    calls: Counter[str] = Counter()
    for file in path.parent.glob(f"{path.name}.*") if pids is None else [Path(f"{path}.{pid}") for pid in pids]:
        if file.exists():
            for function, count in struct.iter_unpack(COUNTER, file.read_bytes()):
                calls[function.rstrip(b"\0").decode()] += count
    return +calls


def take_calls(path: Path) -> Counter[str]:
    """How often each was called since the last time, while none is made."""
    calls = read_calls(path)
    for file in path.parent.glob(f"{path.name}.*"):
        with file.open("r+b") as kept:
            names = [name for name, _ in struct.iter_unpack(COUNTER, kept.read())]
            kept.seek(0)
            kept.write(b"".join(struct.pack(COUNTER, name, 0) for name in names))
    return calls


@dataclass(slots=True)
class Process:
    """A row of a process list. Without `gi` and `ci` it has its MIG instance's, or none on a whole GPU."""

    pid: int
    memory_bytes: int | None = GIB
    kind: Literal["compute", "graphics", "mps"] = "compute"
    gi: int | None = None
    ci: int | None = None
    cc_protected_bytes: int | None = 0


@dataclass(slots=True)
class Sample:
    """A row of process utilization, in percent. Without `timestamp_us` it is as new as each call. `jpeg` and `ofa` are
    only in nvmlDeviceGetProcessesUtilizationInfo."""

    pid: int
    sm: int = 0
    mem: int = 0
    enc: int = 0
    dec: int = 0
    jpeg: int = 0
    ofa: int = 0
    timestamp_us: int | None = None


@dataclass(slots=True)
class Attributes:
    """nvmlDeviceAttributes_t, which only MIG instances have; by default those of a 1g.10gb."""

    multiprocessor_count: int = 14
    shared_copy_engine_count: int = 1
    shared_decoder_count: int = 0
    shared_encoder_count: int = 0
    shared_jpeg_count: int = 0
    shared_ofa_count: int = 0
    gpu_instance_slice_count: int = 1
    compute_instance_slice_count: int = 1
    memory_size_mib: int = 9728


@dataclass(slots=True)
class Placement:
    """Of a GPU instance, as nvmlGpuInstanceInfo_t has it; by default that of an A100's first 1g."""

    profile_id: int = 19
    start: int = 0
    size: int = 1


@dataclass(slots=True)
class Gpm:
    """What GPM measures, in percent; a `Code` is that metric's nvmlReturn_t."""

    sm: float | Code | None = 0.0
    occupancy: float | Code | None = 0.0
    tensor: float | Code | None = 0.0
    dram: float | Code | None = 0.0
    graphics: float | Code | None = None
    fp64: float | Code | None = None
    fp32: float | Code | None = None
    fp16: float | Code | None = None
    more: dict[int, float | Code] = field(default_factory=dict)
    """Other metrics, by nvml.h's number, in its unit."""
    strict: bool = False
    """Whether a call with a metric that is not measured is refused as a whole."""


@dataclass(slots=True)
class MigInstance:
    """A MIG device. Another uuid or `generation` makes the handles that were given out stale.

    Devices that follow each other under one `handle` have the same handle, as a driver that recycles them.
    """

    uuid: str | None
    gi: int = 1
    ci: int = 0
    name: str | None = "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    memory_total_bytes: int | None = 9728 * MIB
    memory_used_bytes: int | None = 0
    memory_reserved_bytes: int | None = 0
    attributes: Attributes | None = field(default_factory=Attributes)
    processes: list[Process] | None = field(default_factory=list)
    generation: int = 0
    handle: int | None = None
    placement: Placement | None = None
    gpm: Gpm | None = None


@dataclass(slots=True)
class Gpu:
    """A GPU; `minor` and `pci` follow its index unless given.

    `instances` are its MIG devices by slot, None for a hole; they exist only while `mig_mode` is True, which it is by
    default for a GPU that was made with instances. `fields` adds to the field values that the other values imply
    (82, 83, 185, 186), or takes their place; its keys are field ids, or (field id, scope id). `ecc` has counts by
    (error type, counter type, location). With `garbage_rows` it reports samples of any time, and counts so
    many rows more than it writes, as the drivers of nvtop's issue 110. GPM is supported where `gpm` is given, be it for
    only its MIG devices. Its handle is made of its uuid, or of `handle`.
    """

    uuid: str | None
    name: str | None = "NVIDIA A100-SXM4-80GB"
    minor: int | Literal["by index"] | None = "by index"
    pci: str | None = "by index"
    virtualization_mode: int | None = None
    numa_node: int | None = None
    memory_total_bytes: int | None = 80 * GIB
    memory_used_bytes: int | None = 0
    memory_reserved_bytes: int | None = 512 * MIB
    utilization_gpu: int | None = 0
    utilization_memory: int | None = 0
    encoder_utilization: int | None = 0
    decoder_utilization: int | None = 0
    temperature_celsius: int | None = 40
    memory_temperature_celsius: int | None = 45
    power_milliwatts: int | None = 60_000
    power_limit_milliwatts: int | None = 400_000
    enforced_power_limit_milliwatts: int | None = 400_000
    energy_millijoules: int | None = 1_000_000
    cc_protected_kib: int | None = None
    cc_unprotected_kib: int | None = None
    processes: list[Process] | None = field(default_factory=list)
    samples: list[Sample] | None = field(default_factory=list)
    garbage_rows: int | None = None
    fields: dict[int | tuple[int, int], FieldValue | None] = field(default_factory=dict)
    clocks_megahertz: dict[Literal["graphics", "sm", "memory", "video"], int] = field(default_factory=dict)
    clock_events: int | None = None
    clock_events_supported: int | None = None
    performance_state: int | None = None
    fabric: tuple[int, int] | None = None
    fan_percents: list[int | None] | None = None
    ecc: dict[tuple[int, int, int], int] = field(default_factory=dict)
    vbios: str | None = None
    compute_capability: tuple[int, int] | None = None
    compute_mode: int | None = None
    max_clocks_megahertz: dict[Literal["graphics", "sm", "memory", "video"], int] = field(default_factory=dict)
    default_power_limit_milliwatts: int | None = None
    power_limits_milliwatts: tuple[int, int] | None = None
    gpm: Gpm | None = None
    event_types: int | None = 8
    mig_mode: bool | None = None
    mig_pending: bool | None = None
    mig_max_count: int = 7
    instances: list[MigInstance | None] = field(default_factory=list)
    handle: int | None = None

    def __post_init__(self) -> None:
        if self.instances and self.mig_mode is None:
            self.mig_mode = True


@dataclass(slots=True)
class Xid:
    """An event of the GPU at that index."""

    gpu: int
    code: int
    gi: int | None = None
    ci: int | None = None


@dataclass(slots=True)
class Driver:
    """All that the stand-in answers.

    `xids` are reported in their order. Those that exist when a GPU is registered for events are not reported for it.
    The keys of `fail`, `delay` and `crash` are (function or "*", target); where several match, the first one counts.
    `fail` gives nvmlReturn_t values, `delay` seconds (float("inf") hangs until the rule is gone). `then` is another
    driver, which takes this one's place as soon as a call that its key matches is answered. `holds` is open while NVML
    is initialised, `leaks` also after that. With `one_queue` each of the `xids` is reported once, to the first event
    set that waits. `count`: NVML's count of GPUs, if it is wrong.
    `gpm_apart_milliseconds`: how far apart two samples of GPM must be; 100 if it is `None`.
    """

    version: str | None = "550.54.15"
    cuda: int | None = 12040
    nvml: str | None = "12.550.54.15"
    gpus: list[Gpu] = field(default_factory=list)
    xids: list[Xid] = field(default_factory=list)
    fail: dict[tuple[str, Target], int] = field(default_factory=dict)
    delay: dict[tuple[str, Target], float] = field(default_factory=dict)
    crash: set[tuple[str, Target]] = field(default_factory=set)
    then: "tuple[tuple[str, Target], Driver] | None" = None
    init_code: int = 0
    count: int | None = None
    holds: Path | None = None
    leaks: Path | None = None
    abi535: bool = False
    one_queue: bool = False
    gpm_apart_milliseconds: int | None = None

    def write(self, path: Path) -> None:
        """Replace the state file at `path`, so that the library sees either the old or the new one."""
        if self.then is not None:
            self.then[1].write(path.with_name(f"{path.name}.next"))
        text = "".join(f"{line}\n" for line in _driver_lines(self))
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", errors="surrogateescape") as file:
            file.write(text)
        os.replace(name, path)


def _line(key: str, *words: object) -> str:
    line = " ".join([key, *("-" if word is None else str(word) for word in words)])
    if "\n" in line:
        raise ValueError(f"a line of the state file cannot contain a line break: {line!r}")
    return line


def _given(values: dict[str, str | int | None]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None:
            yield _line(key, int(value) if isinstance(value, bool) else value)


def _driver_lines(driver: Driver) -> Iterator[str]:
    yield from _given(
        {
            "driver": driver.version,
            "nvml": driver.nvml,
            "cuda": driver.cuda,
            "count": len(driver.gpus) if driver.count is None else driver.count,
            "init": driver.init_code,
            "holds": None if driver.holds is None else str(driver.holds),
            "leaks": None if driver.leaks is None else str(driver.leaks),
            "abi535": driver.abi535,
            "one_queue": driver.one_queue,
            "gpm_apart_ms": driver.gpm_apart_milliseconds,
        }
    )
    for serial, xid in enumerate(driver.xids, start=1):
        yield _line("xid", serial, xid.gpu, xid.code, xid.gi, xid.ci)
    for (function, target), code in driver.fail.items():
        yield _rule("fail", function, target, int(code))
    for (function, target), seconds in driver.delay.items():
        yield _rule("delay", function, target, seconds)
    for function, target in sorted(driver.crash, key=str):
        yield _rule("crash", function, target)
    if driver.then is not None:
        yield _rule("then", *driver.then[0])
    for index, gpu in enumerate(driver.gpus):
        yield from _gpu_lines(f"gpu.{index}", index, gpu)


def _rule(kind: str, function: str, target: Target, *argument: object) -> str:
    if function != "*" and function not in FUNCTIONS:
        raise ValueError(f"the stand-in has no {function}")
    if not re.fullmatch(r"\*|\d+(\.(gpu|mig|\d+))?", str(target)):
        raise ValueError(f"{target!r} is not a target")
    return _line(kind, function, target, *argument)


def _gpu_lines(key: str, index: int, gpu: Gpu) -> Iterator[str]:
    yield from _given(
        {
            f"{key}.uuid": gpu.uuid,
            f"{key}.handle": gpu.handle,
            f"{key}.name": gpu.name,
            f"{key}.minor": index if gpu.minor == "by index" else gpu.minor,
            f"{key}.pci": f"00000000:{0x3B + index:02X}:00.0" if gpu.pci == "by index" else gpu.pci,
            f"{key}.utilization.gpu": gpu.utilization_gpu,
            f"{key}.utilization.memory": gpu.utilization_memory,
            f"{key}.encoder": gpu.encoder_utilization,
            f"{key}.decoder": gpu.decoder_utilization,
            f"{key}.temperature": gpu.temperature_celsius,
            f"{key}.power": gpu.power_milliwatts,
            f"{key}.power.limit": gpu.power_limit_milliwatts,
            f"{key}.power.enforced_limit": gpu.enforced_power_limit_milliwatts,
            f"{key}.energy": gpu.energy_millijoules,
            f"{key}.cc.protected_kib": gpu.cc_protected_kib,
            f"{key}.cc.unprotected_kib": gpu.cc_unprotected_kib,
            f"{key}.events": gpu.event_types,
            f"{key}.garbage": gpu.garbage_rows,
            f"{key}.mig.mode": gpu.mig_mode,
            f"{key}.mig.pending": gpu.mig_mode if gpu.mig_pending is None else gpu.mig_pending,
            f"{key}.mig.max": gpu.mig_max_count,
        }
    )
    yield from _memory_lines(key, gpu)
    yield from _process_lines(key, gpu.processes)
    yield from _sample_lines(key, gpu.samples)
    yield from _field_lines(key, gpu)
    yield from _health_lines(key, gpu)
    yield from _gpm_lines(key, gpu.gpm)
    for slot, instance in enumerate(gpu.instances):
        if instance is not None:
            yield from _instance_lines(f"{key}.mig.{slot}", instance)


def _instance_lines(key: str, instance: MigInstance) -> Iterator[str]:
    yield from _given(
        {
            f"{key}.uuid": instance.uuid,
            f"{key}.generation": instance.generation,
            f"{key}.handle": instance.handle,
            f"{key}.gi": instance.gi,
            f"{key}.ci": instance.ci,
            f"{key}.name": instance.name,
        }
    )
    yield from _memory_lines(key, instance)
    yield from _process_lines(key, instance.processes, instance.gi, instance.ci)
    yield from _gpm_lines(key, instance.gpm)
    if instance.placement is not None:
        yield _line(
            f"{key}.placement", instance.placement.profile_id, instance.placement.start, instance.placement.size
        )
    if instance.attributes is not None:
        counts = instance.attributes
        yield _line(
            f"{key}.attributes",
            counts.multiprocessor_count,
            counts.shared_copy_engine_count,
            counts.shared_decoder_count,
            counts.shared_encoder_count,
            counts.shared_jpeg_count,
            counts.shared_ofa_count,
            counts.gpu_instance_slice_count,
            counts.compute_instance_slice_count,
            counts.memory_size_mib,
        )


def _memory_lines(key: str, device: Gpu | MigInstance) -> Iterator[str]:
    yield from _given(
        {
            f"{key}.memory.total": device.memory_total_bytes,
            f"{key}.memory.used": device.memory_used_bytes,
            f"{key}.memory.reserved": device.memory_reserved_bytes,
        }
    )


def _process_lines(
    key: str, processes: list[Process] | None, gi: int | None = None, ci: int | None = None
) -> Iterator[str]:
    if processes is None:
        return
    yield _line(f"{key}.processes", 1)
    for process in processes:
        yield _line(
            f"{key}.process",
            process.kind,
            process.pid,
            process.memory_bytes,
            gi if process.gi is None else process.gi,
            ci if process.ci is None else process.ci,
            process.cc_protected_bytes,
        )


def _sample_lines(key: str, samples: list[Sample] | None) -> Iterator[str]:
    if samples is None:
        return
    yield _line(f"{key}.samples", 1)
    for sample in samples:
        timestamp = "now" if sample.timestamp_us is None else sample.timestamp_us
        percents = sample.sm, sample.mem, sample.enc, sample.dec, sample.jpeg, sample.ofa
        yield _line(f"{key}.sample", sample.pid, timestamp, *percents)


def _field_lines(key: str, gpu: Gpu) -> Iterator[str]:
    implied: dict[int, FieldValue | None] = {
        82: None if gpu.memory_temperature_celsius is None else ("uint", gpu.memory_temperature_celsius),
        83: None if gpu.energy_millijoules is None else ("ulonglong", gpu.energy_millijoules),
        185: None if gpu.power_milliwatts is None else ("uint", gpu.power_milliwatts),
        186: None if gpu.power_milliwatts is None else ("uint", gpu.power_milliwatts),
    }
    for field_id, value in (implied | gpu.fields).items():
        if value is not None:
            number, scope = field_id if isinstance(field_id, tuple) else (field_id, 0)
            yield _line(f"{key}.field.{number}.{scope}", *value)


def _health_lines(key: str, gpu: Gpu) -> Iterator[str]:
    fans = gpu.fan_percents
    yield from _given(
        {
            **{f"{key}.clock.{domain}": megahertz for domain, megahertz in gpu.clocks_megahertz.items()},
            f"{key}.clock.events": gpu.clock_events,
            f"{key}.clock.supported_events": gpu.clock_events_supported,
            **{f"{key}.max_clock.{domain}": megahertz for domain, megahertz in gpu.max_clocks_megahertz.items()},
            f"{key}.performance_state": gpu.performance_state,
            f"{key}.vbios": gpu.vbios,
            f"{key}.compute_mode": gpu.compute_mode,
            f"{key}.virtualization_mode": gpu.virtualization_mode,
            f"{key}.numa_node": gpu.numa_node,
            f"{key}.power.default_limit": gpu.default_power_limit_milliwatts,
            f"{key}.fans": None if fans is None else len(fans),
            **{f"{key}.fan.{fan}": percent for fan, percent in enumerate(fans or ())},
        }
    )
    if gpu.compute_capability is not None:
        yield _line(f"{key}.compute_capability", *gpu.compute_capability)
    if gpu.fabric is not None:
        yield _line(f"{key}.fabric", *gpu.fabric)
    if gpu.power_limits_milliwatts is not None:
        yield _line(f"{key}.power.limits", *gpu.power_limits_milliwatts)
    for (kind, counter, location), count in gpu.ecc.items():
        yield _line(f"{key}.ecc.{kind}.{counter}.{location}", count)


def _gpm_lines(key: str, gpm: Gpm | None) -> Iterator[str]:
    if gpm is not None:
        metrics = {1: gpm.graphics, 2: gpm.sm, 3: gpm.occupancy, 5: gpm.tensor, 10: gpm.dram}
        metrics |= {11: gpm.fp64, 12: gpm.fp32, 13: gpm.fp16, **gpm.more}
        answer = {metric: value for metric, value in metrics.items() if value is not None}
        yield _line(
            f"{key}.gpm",
            *(f"{metric}={f'error:{int(one)}' if isinstance(one, Code) else one}" for metric, one in answer.items()),
            *(["strict"] if gpm.strict else []),
        )
