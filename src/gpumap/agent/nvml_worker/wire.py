"""The words that go over the worker's pipe: JSON, one object a line. The simulator and recordings speak them too.

    parent → worker  {"read": n, "interval": seconds, "last": [index, …], "skip": [index, …], "groups": [word, …],
                      "release": whether NVML is to be let go of afterwards}
    worker → parent  {"read": n, "driver": {"driver_version", "cuda_version", "nvml_version", "count", "busy"}}
                     {"read": n, "gpu": {a GpuReading; fields that have their default are left out}}
                     {"read": n, "error": {"code": NVML's, "reason": word, "detail": sentence}}
                     {"xid": [uuid, code, GPU instance, compute instance, at, times]}
                     {"listening": [[uuid, since, until], …]}

A read is answered by one error, or by the driver and then each GPU as soon as it is ready, except those in `skip` and
those still `busy` with an earlier read. GPUs in `last` are read after the others, one by one. Unknown keys are ignored.
`groups` are those groups of families whose calls are made besides the basic ones, and `card`. An XID event is told as
it comes, equal ones of a moment together. Before each driver's line stands what is listened to, every event of that
time told before; so it does when listening to a GPU begins or ends. Both are of no read; their times are of the
monotonic clock, which all processes of a machine share.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from gpumap.agent.nvml_worker import fields
from gpumap.agent.nvml_worker.fields import Fields
from gpumap.agent.nvml_worker.gpu_json import GpuText, KnownRows, gpu_object, read_gpu
from gpumap.model.readings import GpuReading, Uuid

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
    """The driver counts GPUs. Those that are `busy` with an earlier read are not asked."""

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
    """The library cannot be loaded or initialised. `code` is NVML's; 0 where NVML was not reached."""

    read: int
    code: int
    reason: str
    detail: str


class XidMessage(NamedTuple):
    """An XID event, at a time of the monotonic clock; or several that are equal, the last of them then."""

    uuid: Uuid
    code: int
    gpu_instance_id: int | None
    compute_instance_id: int | None
    at: float
    times: int = 1


class Heard(NamedTuple):
    """Between these times of the monotonic clock every XID event of a GPU was told."""

    uuid: Uuid
    since: float
    until: float


class ListeningMessage(NamedTuple):
    """Of each GPU at most one."""

    heard: tuple[Heard, ...]


Answer = DriverMessage | GpuMessage | ErrorMessage | XidMessage | ListeningMessage


# --- out --------------------------------------------------------------------------------------------------------------


def encode_request(asked: Request) -> bytes:
    said = {"read": asked.read, "interval": asked.interval_seconds, "last": asked.last, "skip": asked.skip}
    return _line({**said, "groups": asked.groups, "release": asked.release})


def encode_driver(said: DriverMessage) -> bytes:
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
    """`encode_gpu` for the readings of one GPU."""

    def __init__(self) -> None:
        self._text = GpuText()

    def __call__(self, read: int, gpu: GpuReading) -> bytes:
        return f'{{"read":{read},"gpu":{self._text(gpu)}}}\n'.encode()


def encode_xid(said: XidMessage) -> bytes:
    return _line({"xid": said})


def encode_listening(said: ListeningMessage) -> bytes:
    return _line({"listening": said.heard})


def encode_error(said: ErrorMessage) -> bytes:
    return _line({"read": said.read, "error": {"code": said.code, "reason": said.reason, "detail": said.detail}})


def _line(value: Mapping[str, object]) -> bytes:
    return _JSON.encode(value).encode() + b"\n"


_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


# --- in ---------------------------------------------------------------------------------------------------------------


def decode_request(line: bytes) -> Request:
    """Raises `ValueError` where the line is not a request."""
    said = Fields(_parsed(line))
    return Request(
        said.integer("read"),
        said.number("interval"),
        said.integers("last"),
        said.integers("skip"),
        said.optional("groups", fields.each(fields.text)) or (),
        said.optional("release", fields.flag) or False,
    )


def decode(line: bytes) -> Answer:
    """A worker's line. Raises `ValueError` where it is none."""
    return Decoder().decode(line)


class Decoder:
    """`decode` for one line after the other: rows that were in a GPU's line before give the very same tuple."""

    def __init__(self) -> None:
        self._known: dict[int, KnownRows] = {}

    def decode(self, line: bytes) -> Answer:
        """A worker's line. Raises `ValueError` where it is none."""
        said = Fields(_parsed(line))
        if said.has("xid"):
            return _xid(said.value("xid"))
        if said.has("listening"):
            return ListeningMessage(fields.each(_heard)(said.value("listening")))
        read = said.integer("read")
        if said.has("gpu"):
            gpu = Fields(said.value("gpu"))
            return GpuMessage(read, read_gpu(gpu, self._known.setdefault(gpu.integer("index"), KnownRows())))
        if said.has("driver"):
            return _driver(read, Fields(said.value("driver")))
        error = Fields(said.value("error"))
        return ErrorMessage(read, error.integer("code"), error.text("reason"), error.text("detail"))


def _parsed(line: bytes) -> object:
    try:
        value: object = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _xid(value: object) -> XidMessage:
    uuid, code, gpu_instance, compute_instance, at, times = fields.row(value, 6)[:6]
    instances = fields.optional_integer(gpu_instance), fields.optional_integer(compute_instance)
    said = XidMessage(
        Uuid(fields.text(uuid)), fields.integer(code), *instances, fields.number(at), fields.integer(times)
    )
    if said.times < 1:
        raise ValueError(f"an event that came {said.times} times")
    return said


def _heard(value: object) -> Heard:
    uuid, since, until = fields.row(value, 3)[:3]
    return Heard(Uuid(fields.text(uuid)), fields.number(since), fields.number(until))


def _driver(read: int, driver: Fields) -> DriverMessage:
    count = driver.integer("count")
    if not 0 <= count <= MAX_GPUS:
        raise ValueError(f"{count} GPUs")
    return DriverMessage(
        read,
        driver.text("driver_version"),
        driver.text("cuda_version"),
        driver.text("nvml_version"),
        gpus=count,
        busy=driver.integers("busy"),
    )
