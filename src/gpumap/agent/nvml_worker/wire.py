"""The messages on the worker's pipe: JSON, one object a line. The simulator and captures use the same messages.

    parent → worker  {"read": n, "interval": seconds, "last": [index, …], "skip": [index, …], "groups": [word, …],
                      "release": whether to shut NVML down afterwards}
    worker → parent  {"read": n, "driver": {"driver_version", "cuda_version", "nvml_version", "count", "busy"}}
                     {"read": n, "gpu": {a GpuReading; fields that have their default are left out}}
                     {"read": n, "error": {"code": NVML's, "reason": word, "detail": sentence}}
                     {"xid": [uuid, code, GPU instance, compute instance, at, times]}
                     {"listening": [[uuid, since, until], …]}

The worker answers a read with one error, or with the driver and then each GPU as soon as it is ready. It leaves out the
GPUs in `skip` and those still `busy` with an earlier read. It reads the GPUs in `last` after the others, one by one.
`groups` are the groups of families for which it makes more than the basic calls, and `card`. Both ends ignore unknown
keys of an object.

The worker sends an XID event when it comes, and equal events of one moment together. It sends the listening periods
before each driver's line, and when it begins or ends to listen to a GPU. The events of these periods come before them.
Both messages belong to no read. Their times are of the monotonic clock, which all processes of a machine share.

The types below and in `gpumap.model.readings` are the only declaration of a message: encoder and decoder follow them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from gpumap.model.readings import GpuReading, MigInstance, Uuid

if TYPE_CHECKING:
    import msgspec

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_GPUS = 1024


class Request(NamedTuple):
    read: int
    interval_seconds: float
    last: tuple[int, ...] = ()
    skip: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    release: bool = False


class DriverMessage(NamedTuple):
    """The driver counts GPUs. GPUs that are `busy` with an earlier read are not read."""

    read: int
    driver_version: str
    cuda_version: str
    nvml_version: str
    gpus: int
    busy: tuple[int, ...] = ()


class GpuMessage(NamedTuple):
    read: int
    gpu: GpuReading


class ErrorMessage(NamedTuple):
    """The library cannot be loaded or initialized. `code` is NVML's; 0 if NVML was not reached."""

    read: int
    code: int
    reason: str
    detail: str


class XidMessage(NamedTuple):
    """One or several equal XID events, with the time of the last one (monotonic clock)."""

    uuid: Uuid
    code: int
    gpu_instance_id: int | None
    compute_instance_id: int | None
    at: float
    times: int = 1


class ListeningPeriod(NamedTuple):
    """Between these times of the monotonic clock, the worker has sent every XID event of a GPU."""

    uuid: Uuid
    since: float
    until: float


class ListeningMessage(NamedTuple):
    """At most one period for each GPU."""

    heard: tuple[ListeningPeriod, ...]


Answer = DriverMessage | GpuMessage | ErrorMessage | XidMessage | ListeningMessage


# --- out --------------------------------------------------------------------------------------------------------------


def encode_request(request: Request) -> bytes:
    return _line(_object(request))


def encode_driver(message: DriverMessage) -> bytes:
    driver = _object(message)
    return _line({"read": driver.pop("read"), "driver": driver})


def encode_gpu(read: int, gpu: GpuReading) -> bytes:
    return _line({"read": read, "gpu": gpu_object(gpu)})


def encode_error(message: ErrorMessage) -> bytes:
    error = _object(message)
    return _line({"read": error.pop("read"), "error": error})


def encode_xid(message: XidMessage) -> bytes:
    return _line({"xid": message})


def encode_listening(message: ListeningMessage) -> bytes:
    return _line({"listening": message.heard})


def gpu_object(gpu: GpuReading) -> dict[str, object]:
    """Return a reading as a JSON object without default values. Other tuples in it become rows, named or not."""
    plain = _but_defaults(gpu)
    if gpu.instances:
        plain["instances"] = [_but_defaults(instance) for instance in gpu.instances]
    return plain


def _but_defaults(reading: GpuReading | MigInstance) -> dict[str, object]:
    defaults = _DEFAULTS[type(reading)]
    return {name: value for (name, default), value in zip(defaults, reading, strict=True) if value != default}


_NO_DEFAULT = object()
_DEFAULTS: dict[type, list[tuple[str, object]]] = {
    declared: [(name, declared._field_defaults.get(name, _NO_DEFAULT)) for name in declared._fields]
    for declared in (GpuReading, MigInstance)
}


_NAMES = {"interval_seconds": "interval", "gpus": "count"}
"""Fields of messages with another name on the pipe."""


def _object(message: Request | DriverMessage | ErrorMessage) -> dict[str, object]:
    return {_NAMES.get(name, name): value for name, value in message._asdict().items()}


def _line(value: dict[str, object]) -> bytes:
    return _JSON.encode(value).encode() + b"\n"


_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


# --- in ---------------------------------------------------------------------------------------------------------------


def decode_request(line: bytes) -> Request:
    """Read a request. Raises `ValueError` if the line is not one. Trusts its values: they come from the service."""
    request = json.loads(line)
    if not isinstance(request, dict) or not {"read", "interval"} <= request.keys():
        raise ValueError(f"not a request: {line[:80]!r}")
    last, skip, groups = (tuple(request.get(name, ())) for name in ("last", "skip", "groups"))
    return Request(request["read"], request["interval"], last, skip, groups, bool(request.get("release")))


def decode(line: bytes) -> Answer:
    """Read a worker's line. Raises `ValueError` if it is not one."""
    try:
        message = _decoders().line.decode(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if message.xid is not None:
        xid: XidMessage = message.xid
        if xid.times < 1:
            raise ValueError(f"an event that came {xid.times} times")
        return xid
    if message.listening is not None:
        return ListeningMessage(message.listening)
    if message.read is None:
        raise ValueError("no read")
    if message.gpu is not None:
        return GpuMessage(message.read, _reading(message.gpu))
    if message.driver is not None:
        return DriverMessage(message.read, *_decoders().values(message.driver))
    if message.error is not None:
        return ErrorMessage(message.read, *_decoders().values(message.error))
    raise ValueError("neither a driver nor a gpu nor an error")


def gpu_from_object(value: object) -> GpuReading:
    """The inverse of `gpu_object`. Raises `ValueError`."""
    text = _JSON.encode(value)  # refuses numbers that are not finite
    return _reading(_decoders().gpu.decode(text))


def _reading(gpu: Any) -> GpuReading:
    values = _decoders().values
    gpu.instances = tuple([MigInstance(*values(instance)) for instance in gpu.instances])
    return GpuReading(*values(gpu))


class _Decoders(NamedTuple):
    line: msgspec.json.Decoder[Any]
    gpu: msgspec.json.Decoder[Any]
    values: Callable[[Any], tuple[Any, ...]]
    """Return the values of a decoded object, in the order of its declaration."""


@cache
def _decoders() -> _Decoders:
    """Made from the declarations. The worker does not make it: msgspec would cost it 2.3 MiB."""
    import msgspec

    def object_of(declared: Any, **other_types: Any) -> Any:
        """Return a type for a JSON object with the fields of a `NamedTuple`. msgspec takes a `NamedTuple` for an
        array."""
        defaults = declared._field_defaults
        types = {name: kind for name, kind in get_type_hints(declared).items() if name != "read"} | other_types
        fields = [(name, kind, defaults[name]) if name in defaults else (name, kind) for name, kind in types.items()]
        return msgspec.defstruct(declared.__name__, fields, rename=_NAMES)

    gpu = object_of(GpuReading, instances=tuple[object_of(MigInstance), ...])  # type: ignore[misc] # made at run time
    of_read = {
        "gpu": gpu,
        "driver": object_of(DriverMessage, gpus=Annotated[int, msgspec.Meta(ge=0, le=MAX_GPUS)]),
        "error": object_of(ErrorMessage),
    }
    kinds = {"read": int, **of_read, "xid": XidMessage, "listening": tuple[ListeningPeriod, ...]}
    line = msgspec.defstruct("Line", [(name, kind | None, None) for name, kind in kinds.items()])
    return _Decoders(msgspec.json.Decoder(line), msgspec.json.Decoder(gpu), msgspec.structs.astuple)
