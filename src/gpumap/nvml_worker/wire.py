"""The words that go over the worker's pipe: JSON, one object a line. The simulator and recordings speak them too.

    parent → worker  {"read": n, "interval": seconds, "last": [index, …], "skip": [index, …]}
    worker → parent  {"read": n, "driver": {"driver_version", "cuda_version", "nvml_version", "count", "busy"}}
                     {"read": n, "gpu": {a GpuReading; fields that have their default are left out}}
                     {"read": n, "error": {"code": NVML's, "reason": word, "detail": sentence}}

A read is answered by one error, or by the driver and then each GPU as soon as it is ready, except those in `skip` and
those still `busy` with an earlier read. GPUs in `last` are read after the others, one by one. Unknown keys are ignored.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumap.nvml_worker import fields
from gpumap.nvml_worker.fields import Fields
from gpumap.readings import DeviceMemory, GpuProcess, GpuReading, MigInstance, ProcessSample, Uuid

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_GPUS = 1024


class Request(NamedTuple):
    read: int
    interval_seconds: float
    last: tuple[int, ...] = ()
    skip: tuple[int, ...] = ()


class DriverSaid(NamedTuple):
    """The driver counts GPUs. Those that are `busy` with an earlier read are not asked."""

    read: int
    driver_version: str
    cuda_version: str
    nvml_version: str
    gpus: int
    busy: tuple[int, ...] = ()


class GpuSaid(NamedTuple):
    read: int
    gpu: GpuReading


class ErrorSaid(NamedTuple):
    """The library cannot be loaded or initialised. `code` is NVML's; 0 where NVML was not reached."""

    read: int
    code: int
    reason: str
    detail: str


Answer = DriverSaid | GpuSaid | ErrorSaid


# --- out --------------------------------------------------------------------------------------------------------------


def request(read: int, interval_seconds: float, last: Sequence[int] = (), skip: Sequence[int] = ()) -> bytes:
    return _line({"read": read, "interval": interval_seconds, "last": list(last), "skip": list(skip)})


def encode_driver(said: DriverSaid) -> bytes:
    driver = {
        "driver_version": said.driver_version,
        "cuda_version": said.cuda_version,
        "nvml_version": said.nvml_version,
        "count": said.gpus,
        "busy": said.busy,
    }
    return _line({"read": said.read, "driver": driver})


def encode_gpu(read: int, gpu: GpuReading) -> bytes:
    return _line({"read": read, "gpu": gpu_object(gpu)})


class GpuEncoder:
    """`encode_gpu` for the readings of one GPU: the text of its processes is made once a change."""

    def __init__(self) -> None:
        self._processes: tuple[GpuProcess, ...] = ()
        self._text = "[]"

    def __call__(self, read: int, gpu: GpuReading) -> bytes:
        if not gpu.processes:
            return encode_gpu(read, gpu)
        if gpu.processes is not self._processes:
            self._processes = gpu.processes
            self._text = _JSON.encode([_process_row(process) for process in gpu.processes])
        rest = _JSON.encode(_gpu_but_processes(gpu))  # an object that is never empty: its index is in it
        return f'{{"read":{read},"gpu":{rest[:-1]},"processes":{self._text}}}}}\n'.encode()


def encode_error(said: ErrorSaid) -> bytes:
    return _line({"read": said.read, "error": {"code": said.code, "reason": said.reason, "detail": said.detail}})


def gpu_object(gpu: GpuReading) -> dict[str, object]:
    """A reading as a JSON object. Processes and samples are rows, in the order of their classes' fields."""
    plain = _gpu_but_processes(gpu)
    if gpu.processes is not None:
        plain["processes"] = [_process_row(process) for process in gpu.processes]
    return plain


def _gpu_but_processes(gpu: GpuReading) -> dict[str, object]:
    plain: dict[str, object] = {name: value for name, blank in _BLANK_VALUES if (value := getattr(gpu, name)) != blank}
    if gpu.memory:
        plain["memory"] = _memory_row(gpu.memory)
    if gpu.instances:
        plain["instances"] = [_instance_object(instance) for instance in gpu.instances]
    if gpu.samples is not None:
        plain["samples"] = gpu.samples  # each a tuple, and so a row
    return plain


_BLANK = GpuReading(index=-1)
_BLANK_VALUES = tuple(
    (name, getattr(_BLANK, name)) for name in GpuReading._fields if name not in ("processes", "samples")
)


def _instance_object(instance: MigInstance) -> dict[str, object]:
    return {
        "uuid": instance.uuid,
        "gpu_instance_id": instance.gpu_instance_id,
        "compute_instance_id": instance.compute_instance_id,
        "profile": instance.profile,
        "compute_slices": instance.compute_slices,
        "memory": _memory_row(instance.memory) if instance.memory else None,
        "processes": None if instance.processes is None else [_process_row(process) for process in instance.processes],
        **{name: value for name, blank in _BLANK_OF_INSTANCE if (value := getattr(instance, name)) != blank},
    }


_BLANK_OF_INSTANCE = tuple(MigInstance._field_defaults.items())
"""Left out where they have their default, as readings from before they were there have it."""


def _memory_row(memory: DeviceMemory) -> tuple[int | None, ...]:
    return memory.total_bytes, memory.used_bytes, memory.free_bytes, memory.reserved_bytes


def _process_row(process: GpuProcess) -> tuple[object, ...]:
    return process.pid, process.used_memory_bytes, process.types


def _line(value: Mapping[str, object]) -> bytes:
    return _JSON.encode(value).encode() + b"\n"


_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


# --- in ---------------------------------------------------------------------------------------------------------------


def decode_request(line: bytes) -> Request:
    """Raises `ValueError` where the line is not a request."""
    said = Fields(_parsed(line))
    return Request(said.integer("read"), said.number("interval"), said.integers("last"), said.integers("skip"))


def decode(line: bytes) -> Answer:
    """A worker's line. Raises `ValueError` where it is not one of its three."""
    return Decoder().decode(line)


class Decoder:
    """`decode` for one line after the other: rows that were in a GPU's line before give the very same tuple."""

    def __init__(self) -> None:
        self._known: dict[int, _KnownRows] = {}

    def decode(self, line: bytes) -> Answer:
        """A worker's line. Raises `ValueError` where it is not one of its three."""
        said = Fields(_parsed(line))
        read = said.integer("read")
        if said.has("gpu"):
            gpu = Fields(said.value("gpu"))
            return GpuSaid(read, _gpu(gpu, self._known.setdefault(gpu.integer("index"), _KnownRows())))
        if said.has("driver"):
            return _driver(read, Fields(said.value("driver")))
        error = Fields(said.value("error"))
        return ErrorSaid(read, error.integer("code"), error.text("reason"), error.text("detail"))


class _KnownRows:
    """The last rows of a GPU's line as JSON gave them, and what they were made into."""

    def __init__(self) -> None:
        self._processes: tuple[object, tuple[GpuProcess, ...]] = ([], ())
        self._samples: tuple[object, tuple[ProcessSample, ...]] = ([], ())

    def processes(self, rows: object) -> tuple[GpuProcess, ...]:
        if rows != self._processes[0]:
            self._processes = rows, fields.each(_process)(rows)
        return self._processes[1]

    def samples(self, rows: object) -> tuple[ProcessSample, ...]:
        if rows != self._samples[0]:
            self._samples = rows, fields.each(_sample)(rows)
        return self._samples[1]


def _parsed(line: bytes) -> object:
    try:
        value: object = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _driver(read: int, driver: Fields) -> DriverSaid:
    count = driver.integer("count")
    if not 0 <= count <= MAX_GPUS:
        raise ValueError(f"{count} GPUs")
    return DriverSaid(
        read,
        driver.text("driver_version"),
        driver.text("cuda_version"),
        driver.text("nvml_version"),
        gpus=count,
        busy=driver.integers("busy"),
    )


def gpu_from_object(value: object) -> GpuReading:
    """The inverse of `gpu_object`. Raises `ValueError`."""
    return _gpu(Fields(value), _KnownRows())


def _gpu(gpu: Fields, known: _KnownRows) -> GpuReading:
    uuid = gpu.optional("uuid", fields.text)
    return GpuReading(
        index=gpu.integer("index"),
        fault=gpu.optional("fault", fields.text),
        stuck_seconds=gpu.optional("stuck_seconds", fields.number) or 0.0,
        uuid=None if uuid is None else Uuid(uuid),
        minor=gpu.optional("minor", fields.integer),
        pci_bus_id=gpu.optional("pci_bus_id", fields.text) or "",
        model=gpu.optional("model", fields.text) or "",
        memory=gpu.optional("memory", _memory),
        partitioned=gpu.optional("partitioned", fields.flag) or False,
        max_mig_devices=gpu.optional("max_mig_devices", fields.integer),
        instances=gpu.optional("instances", fields.each(_instance)) or (),
        processes=gpu.optional("processes", known.processes),
        samples=gpu.optional("samples", known.samples),
        utilization_ratio=gpu.optional("utilization_ratio", fields.number),
        memory_controller_ratio=gpu.optional("memory_controller_ratio", fields.number),
        encoder_ratio=gpu.optional("encoder_ratio", fields.number),
        decoder_ratio=gpu.optional("decoder_ratio", fields.number),
        temperatures_celsius=gpu.optional("temperatures_celsius", fields.each(_temperature)) or (),
        power_watts=gpu.optional("power_watts", fields.number),
        power_limit_watts=gpu.optional("power_limit_watts", fields.number),
        energy_joules=gpu.optional("energy_joules", fields.number),
        refusals=gpu.optional("refusals", fields.each(_refusal)) or (),
    )


def _memory(value: object) -> DeviceMemory:
    total, used, free, reserved = fields.row(value, 4)[:4]
    return DeviceMemory(
        fields.integer(total), fields.integer(used), fields.integer(free), fields.optional_integer(reserved)
    )


def _process(value: object) -> GpuProcess:
    pid, used, types = fields.row(value, 3)[:3]
    return GpuProcess(fields.integer(pid), fields.optional_integer(used), fields.text(types))


def _sample(value: object) -> ProcessSample:
    pid, sm, controller, encoder, decoder = fields.row(value, 5)[:5]
    # How the worker writes each of a thousand of them; whatever else it may be costs more to find out.
    if (
        type(pid) is int
        and type(sm) is type(controller) is type(encoder) is type(decoder) is float
        and (0.0 <= sm <= 1.0 and 0.0 <= controller <= 1.0)
        and (0.0 <= encoder <= 1.0 and 0.0 <= decoder <= 1.0)
    ):
        return ProcessSample(pid, sm, controller, encoder, decoder)
    return ProcessSample(
        fields.integer(pid),
        fields.number(sm),
        fields.number(controller),
        fields.number(encoder),
        fields.number(decoder),
    )


def _temperature(value: object) -> tuple[str, float]:
    sensor, celsius = fields.row(value, 2)[:2]
    return fields.text(sensor), fields.number(celsius)


def _refusal(value: object) -> tuple[str, int]:
    call, code = fields.row(value, 2)[:2]
    return fields.text(call), fields.integer(code)


def _instance(value: object) -> MigInstance:
    instance = Fields(value)
    return MigInstance(
        uuid=Uuid(instance.text("uuid")),
        gpu_instance_id=instance.integer("gpu_instance_id"),
        compute_instance_id=instance.integer("compute_instance_id"),
        profile=instance.text("profile"),
        compute_slices=instance.optional("compute_slices", fields.integer),
        memory=instance.optional("memory", _memory),
        processes=instance.optional("processes", fields.each(_process)),
        profile_id=instance.optional("profile_id", fields.integer),
        placement_start=instance.optional("placement_start", fields.integer),
        placement_size=instance.optional("placement_size", fields.integer),
        denied=instance.optional("denied", fields.flag) or False,
    )
