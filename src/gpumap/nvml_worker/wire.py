"""The words that go over the worker's pipe: JSON, one object a line. The simulator and recordings speak them too.

    parent → worker  {"read": n, "interval": seconds, "last": [index, …], "skip": [index, …]}
    worker → parent  {"read": n, "driver": {"driver_version", "cuda_version", "nvml_version", "count", "busy"}}
                     {"read": n, "gpu": {a GpuReading; fields that have their default are left out}}
                     {"read": n, "error": {"code": NVML's, "reason": word, "detail": sentence}}

A read is answered by one error, or by the driver and then each GPU as soon as it is ready, except those in `skip` and
those still `busy` with an earlier read. GPUs in `last` are read after the others, one by one. Unknown keys are ignored.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from gpumap.model import DeviceMemory, GpuProcess, GpuReading, MigInstance, ProcessSample, Uuid

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_GPUS = 1024

T = TypeVar("T")
Row = Sequence[object]


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


def encode_error(said: ErrorSaid) -> bytes:
    return _line({"read": said.read, "error": {"code": said.code, "reason": said.reason, "detail": said.detail}})


def gpu_object(gpu: GpuReading) -> dict[str, object]:
    """A reading as a JSON object. Processes and samples are rows, in the order of their classes' fields."""
    plain: dict[str, object] = {
        name: value for name in _GPU_FIELDS if (value := getattr(gpu, name)) != getattr(_BLANK, name)
    }
    if gpu.memory:
        plain["memory"] = _memory_row(gpu.memory)
    if gpu.instances:
        plain["instances"] = [_instance_object(instance) for instance in gpu.instances]
    if gpu.processes is not None:
        plain["processes"] = [_process_row(process) for process in gpu.processes]
    if gpu.samples is not None:
        plain["samples"] = [
            (sample.pid, sample.sm_ratio, sample.memory_controller_ratio, sample.encoder_ratio, sample.decoder_ratio)
            for sample in gpu.samples
        ]
    return plain


_BLANK = GpuReading(index=-1)
_GPU_FIELDS = tuple(GpuReading.__dataclass_fields__)


def _instance_object(instance: MigInstance) -> dict[str, object]:
    return {
        "uuid": instance.uuid,
        "gpu_instance_id": instance.gpu_instance_id,
        "compute_instance_id": instance.compute_instance_id,
        "profile": instance.profile,
        "compute_slices": instance.compute_slices,
        "memory": _memory_row(instance.memory) if instance.memory else None,
        "processes": None if instance.processes is None else [_process_row(process) for process in instance.processes],
    }


def _memory_row(memory: DeviceMemory) -> tuple[int | None, ...]:
    return memory.total_bytes, memory.used_bytes, memory.free_bytes, memory.reserved_bytes


def _process_row(process: GpuProcess) -> tuple[object, ...]:
    return process.pid, process.used_memory_bytes, process.types


def _line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


# --- in ---------------------------------------------------------------------------------------------------------------


def decode_request(line: bytes) -> Request:
    """Raises `ValueError` where the line is not a request."""
    said = _Object(_parsed(line))
    return Request(said.integer("read"), said.number("interval"), said.integers("last"), said.integers("skip"))


def decode(line: bytes) -> Answer:
    """A worker's line. Raises `ValueError` where it is not one of its three."""
    said = _Object(_parsed(line))
    read = said.integer("read")
    if said.has("gpu"):
        return GpuSaid(read, gpu_from_object(said.value("gpu")))
    if said.has("driver"):
        return _driver(read, _Object(said.value("driver")))
    error = _Object(said.value("error"))
    return ErrorSaid(read, error.integer("code"), error.text("reason"), error.text("detail"))


def _parsed(line: bytes) -> object:
    try:
        value: object = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _driver(read: int, driver: "_Object") -> DriverSaid:
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
    gpu = _Object(value)
    uuid = gpu.optional("uuid", _text)
    return GpuReading(
        index=gpu.integer("index"),
        fault=gpu.optional("fault", _text),
        stuck_seconds=gpu.optional("stuck_seconds", _number) or 0.0,
        uuid=None if uuid is None else Uuid(uuid),
        minor=gpu.optional("minor", _integer),
        pci_bus_id=gpu.optional("pci_bus_id", _text) or "",
        model=gpu.optional("model", _text) or "",
        memory=gpu.optional("memory", _memory),
        partitioned=gpu.optional("partitioned", _flag) or False,
        max_mig_devices=gpu.optional("max_mig_devices", _integer),
        instances=gpu.optional("instances", _each(_instance)) or (),
        processes=gpu.optional("processes", _each(_process)),
        samples=gpu.optional("samples", _each(_sample)),
        utilization_ratio=gpu.optional("utilization_ratio", _number),
        memory_controller_ratio=gpu.optional("memory_controller_ratio", _number),
        encoder_ratio=gpu.optional("encoder_ratio", _number),
        decoder_ratio=gpu.optional("decoder_ratio", _number),
        temperatures_celsius=gpu.optional("temperatures_celsius", _each(_temperature)) or (),
        power_watts=gpu.optional("power_watts", _number),
        power_limit_watts=gpu.optional("power_limit_watts", _number),
        energy_joules=gpu.optional("energy_joules", _number),
        refusals=gpu.optional("refusals", _each(_refusal)) or (),
    )


class _Object:
    """A JSON object's fields by type. A missing or null one is told only by `optional` and `integers`."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"not an object: {value!r:.80}")
        self._fields: Mapping[str, object] = value

    def has(self, name: str) -> bool:
        return name in self._fields

    def value(self, name: str) -> object:
        if name not in self._fields:
            raise ValueError(f"no {name}")
        return self._fields[name]

    def optional(self, name: str, parse: Callable[[object], T]) -> T | None:
        value = self._fields.get(name)
        return None if value is None else parse(value)

    def integer(self, name: str) -> int:
        return _integer(self.value(name))

    def number(self, name: str) -> float:
        return _number(self.value(name))

    def text(self, name: str) -> str:
        return _text(self.value(name))

    def integers(self, name: str) -> tuple[int, ...]:
        return self.optional(name, _each(_integer)) or ()


def _integer(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"not an integer: {value!r:.80}")
    return value


def _number(value: object) -> float:
    if type(value) is not int and type(value) is not float:
        raise ValueError(f"not a number: {value!r:.80}")
    if not abs(value) < 1e300:  # json.loads takes Infinity, NaN and integers that no float can hold
        raise ValueError("not a finite number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r:.80}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"not true or false: {value!r:.80}")
    return value


def _row(value: object, length: int) -> Row:
    if not isinstance(value, list) or len(value) < length:
        raise ValueError(f"not a row of {length}: {value!r:.80}")
    return value


def _each(parse: Callable[[object], T]) -> Callable[[object], tuple[T, ...]]:
    return lambda value: tuple(parse(one) for one in _row(value, 0))


def _optional_integer(value: object) -> int | None:
    return None if value is None else _integer(value)


def _memory(value: object) -> DeviceMemory:
    total, used, free, reserved = _row(value, 4)[:4]
    return DeviceMemory(_integer(total), _integer(used), _integer(free), _optional_integer(reserved))


def _process(value: object) -> GpuProcess:
    pid, used, types = _row(value, 3)[:3]
    return GpuProcess(_integer(pid), _optional_integer(used), _text(types))


def _sample(value: object) -> ProcessSample:
    pid, *ratios = _row(value, 5)[:5]
    return ProcessSample(_integer(pid), *(_number(ratio) for ratio in ratios))


def _temperature(value: object) -> tuple[str, float]:
    sensor, celsius = _row(value, 2)[:2]
    return _text(sensor), _number(celsius)


def _refusal(value: object) -> tuple[str, int]:
    call, code = _row(value, 2)[:2]
    return _text(call), _integer(code)


def _instance(value: object) -> MigInstance:
    instance = _Object(value)
    return MigInstance(
        uuid=Uuid(instance.text("uuid")),
        gpu_instance_id=instance.integer("gpu_instance_id"),
        compute_instance_id=instance.integer("compute_instance_id"),
        profile=instance.text("profile"),
        compute_slices=instance.optional("compute_slices", _integer),
        memory=instance.optional("memory", _memory),
        processes=instance.optional("processes", _each(_process)),
    )
