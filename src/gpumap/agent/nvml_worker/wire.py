"""The messages on the worker's pipe: JSON, one object a line. The simulator uses the same messages.

The worker answers a `Request` with one error, or with the driver and then each GPU as soon as it is ready. It leaves
out the GPUs in `skip` and those still `busy` with an earlier read. It reads `last_gpus` after the others, one by one.
`groups` are the groups of families for which it makes more than the basic calls, and `card`. Values that change slowly
may be as old as `hold_seconds`. With `release` it shuts NVML down afterwards. After `deadline_seconds` the service
reports what has not answered. Both ends ignore unknown keys of an object.

The worker sends an XID event when it comes, and equal events of one moment together. It sends the listening periods
before each driver's line, and when it begins or ends to listen to a GPU. The events of these periods come before them.
Both messages belong to no read. Their times are of the monotonic clock, which all processes of a machine share.

The types below and in `gpumap.model.readings` are the only declaration of a message: encoder and decoder follow them.
`word` names NVML's return codes for both ends: the service does not have nvidia-ml-py. The worker compares with its
numbers (`calls`).
"""

from __future__ import annotations

import os
import threading
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from gpumap.model.readings import GpuReading, Uuid

T = TypeVar("T")
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_GPUS = 1024


class Request(Struct, frozen=True, rename={"last_gpus": "last"}):
    read: int
    interval_seconds: float
    deadline_seconds: float
    last_gpus: tuple[int, ...] = ()
    skip: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    release: bool = False
    hold_seconds: float = 0.0


class DriverMessage(Struct, frozen=True, tag_field="kind", tag="driver"):
    """The driver counts GPUs. GPUs that are `busy` with an earlier read are not read."""

    read: int
    driver_version: str
    cuda_version: str
    nvml_version: str
    gpus: Annotated[int, Meta(ge=0, le=MAX_GPUS)]
    busy: tuple[int, ...] = ()


class GpuMessage(Struct, frozen=True, tag_field="kind", tag="gpu"):
    read: int
    gpu: GpuReading


class ErrorMessage(Struct, frozen=True, tag_field="kind", tag="error"):
    """The library cannot be loaded or initialized. `code` is NVML's; 0 if NVML was not reached."""

    read: int
    code: int
    reason: str
    detail: str


class XidMessage(Struct, frozen=True, tag_field="kind", tag="xid", rename={"monotonic": "at"}):
    """One or several equal XID events, with the time of the last one (monotonic clock)."""

    uuid: Uuid
    code: int
    gpu_instance_id: int | None
    compute_instance_id: int | None
    monotonic: float
    times: Annotated[int, Meta(ge=1)] = 1


class ListeningPeriod(NamedTuple):
    """Between these times of the monotonic clock, the worker has sent every XID event of a GPU."""

    uuid: Uuid
    since: float
    until: float


class ListeningMessage(Struct, frozen=True, tag_field="kind", tag="listening"):
    """At most one period for each GPU."""

    periods: tuple[ListeningPeriod, ...]


Answer = DriverMessage | GpuMessage | ErrorMessage | XidMessage | ListeningMessage

_ENCODER = msgspec.json.Encoder()
_REQUESTS = msgspec.json.Decoder(Request)
_ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """Return a line. A number that is not finite becomes `null`."""
    return _ENCODER.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Read a request. Raises `ValueError` if the line is not one."""
    return _decode(line, _REQUESTS)


def decode(line: bytes) -> Answer:
    """Read a worker's line. Raises `ValueError` if it is not one."""
    return _decode(line, _ANSWERS)


def _decode(line: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class Output:
    """The worker's end of the pipe: whole lines from any thread. One write carries many lines.

    From now on, prints of a library go to stderr; only these lines go to stdout.
    """

    def __init__(self) -> None:
        self._pipe = os.dup(1)
        os.dup2(2, 1)
        self._lines: list[bytes] = []
        self._adding = threading.Lock()
        self._writing = threading.Lock()  # its own lock: a full pipe must not stop threads that add lines

    def add(self, line: bytes) -> None:
        """Keep a line until `flush`."""
        with self._adding:
            self._lines.append(line)

    def flush(self) -> None:
        """Write the added lines. End the process if no process reads them."""
        with self._writing:
            with self._adding:
                lines, self._lines = self._lines, []
            data = memoryview(b"".join(lines))
            try:
                while data:
                    data = data[os.write(self._pipe, data) :]
            except OSError:
                os._exit(0)

    def close(self) -> None:
        """Write the added lines and close the pipe. Later writers wait for ever."""
        self.flush()
        self._writing.acquire()
        os.close(self._pipe)


# --- NVML's return codes (nvml.h, nvmlReturn_t) -----------------------------------------------------------------------

_WORDS = {
    0: "success",
    1: "uninitialized",
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    5: "already_initialized",
    6: "not_found",
    7: "insufficient_size",
    8: "insufficient_power",
    9: "driver_not_loaded",
    10: "timeout",
    11: "irq_issue",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "gpu_is_lost",
    16: "reset_required",
    17: "operating_system",
    18: "driver_version_mismatch",
    19: "in_use",
    20: "memory",
    21: "no_data",
    22: "vgpu_ecc_not_supported",
    23: "insufficient_resources",
    24: "freq_not_supported",
    25: "argument_version_mismatch",
    26: "deprecated",
    27: "not_ready",
    28: "gpu_not_found",
    29: "invalid_state",
    30: "reset_type_not_supported",
    999: "unknown",
}

_FAULTS = {4: "no_permission", 8: "insufficient_power", 11: "irq_issue", 15: "lost", 16: "reset_required", 28: "lost"}


def word(code: int) -> str:
    """Return a code's name as a label value."""
    return _WORDS.get(code, f"code_{code}")


def fault_word(code: int) -> str:
    """Return the fault reason (docs/how-to/troubleshoot.md) of a GPU, if an essential call returned this code."""
    return _FAULTS.get(code, "unknown")
