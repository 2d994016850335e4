"""What a driver answers: a real worker process over the compiled stand-in of NVML, with changed values."""

from __future__ import annotations

import atexit
import functools
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hypothesis import strategies as st

from gpumap.agent.nvml_worker import wire
from gpumap.agent.sources.nvml import worker_command
from gpumap.model.observations import NvmlReading, SourceError
from gpumap.model.readings import GpuReading
from tests import standin
from tests.fuzz.changes import EDITS, WORDS, edited
from tests.fuzz.folders import folder
from tests.fuzz.node_targets import pages_of
from tests.fuzz.target import target
from tests.standin import Attributes, Driver, Gpm, Gpu, MigInstance, Placement, Process, Sample
from tests.worker import Worker

_GROUPS = ("health", "links", "gpm", "codec", "card", "device", "use")
_VALUE = re.compile(rb"gpu\.\d|driver|nvml|cuda|init|fail|xid")
"""Keys of values that a driver may answer. The others steer the stand-in itself."""
_TEXT = re.compile(rb"driver|nvml|.*\.(?:uuid|name|pci|vbios)")
_CODES = (1, 2, 3, 4, 6, 7, 9, 13, 15, 16, 21, 25, 28, 999, 12345)
_NUMBERS = (b"0", b"1", b"-1", b"255", b"65536", b"2147483647", b"4294967295", b"18446744073709551615", b"-")


def _driver_examples() -> Iterator[bytes]:
    gpu = Gpu(
        "GPU-00000000-0000-4000-8000-000000000000",
        processes=[Process(10), Process(11, None, "graphics"), Process(12, 5 << 20, "mps")],
        samples=[Sample(10, 50, 20), Sample(11, 30)],
        clocks_megahertz={"graphics": 1400, "sm": 1400, "memory": 1500, "video": 1200},
        clock_events=4,
        clock_events_supported=255,
        performance_state=0,
        fan_percents=[30, 40],
        ecc={(0, 1, 2): 3, (1, 1, 2): 1},
        gpm=Gpm(20.0, 10.0, 5.0, 3.0),
        vbios="92.00",
        compute_mode=0,
    )
    mig = Gpu(
        "GPU-00000000-0000-4000-8000-000000000001",
        instances=[
            MigInstance(
                f"MIG-00000000-0000-4000-8000-00000000000{slot}",
                gi=slot,
                attributes=Attributes(),
                placement=Placement(19, slot, 1),
                processes=[Process(20 + slot)],
                gpm=Gpm(5.0),
            )
            for slot in (1, 2)
        ],
    )
    for gpus in ([gpu], [mig], [gpu, mig], []):
        with folder() as place:
            Driver(gpus=gpus).write(place / "state")
            yield (place / "state").read_bytes()


@st.composite
def _changed_answers(draw: st.DrawFn, data: bytes) -> bytes:
    """Change the value of a line, repeat a line, drop one, or let a call fail."""
    lines = [line for line in data.split(b"\n") if line]
    changeable = [index for index, line in enumerate(lines) if _VALUE.match(line)]
    for _ in range(draw(EDITS)):
        index = draw(st.sampled_from(changeable))
        key, _, value = lines[index].partition(b" ")
        words = value.split(b" ")
        match draw(st.integers(0, 7)):
            case 0:
                lines[index] = b""
            case 1:
                lines.append(lines[index])
            case 2:
                function, code = draw(st.sampled_from(sorted(standin.FUNCTIONS))), draw(st.sampled_from(_CODES))
                lines.append(f"fail {function} * {code}".encode())
            case 3 | 4 if _TEXT.fullmatch(key):
                text = draw(st.sampled_from(WORDS) | edited(value))
                lines[index] = key + b" " + text[:90].replace(b"\n", b"")
            case _:
                words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(_NUMBERS))
                lines[index] = key + b" " + b" ".join(words)
    return b"\n".join(line.replace(b"\0", b"") for line in lines) + b"\n"


MODULES = [
    f"gpumap.agent.nvml_worker.{name}" for name in ("library", "reading", "mig", "processes", "gpm", "field_values")
]


@target(_driver_examples, _changed_answers, SourceError, ValueError, slow=True, modules=MODULES)
def read_driver(data: bytes) -> object:
    """Answers of NVML's functions: names, numbers, lists, codes. The worker lives, and answers each request.

    The page is valid. Raises SourceError, and ValueError if the stand-in does not understand the input.
    """
    worker = _worker()
    text = b"\n".join(line for line in data.split(b"\n") if b"\0" not in line) + b"\n"
    fresh = worker.state.with_name("fresh")
    fresh.write_bytes(text)
    os.replace(fresh, worker.state)
    number = worker.ask()
    driver: wire.DriverMessage | None = None
    gpus: dict[int, GpuReading] = {}
    while driver is None or len(gpus) < driver.gpus:
        match worker.answer(60.0):
            case None:
                raise _ended(worker)
            case wire.ErrorMessage(read=read, reason=reason, detail=detail) if read == number:
                raise SourceError(reason, detail)
            case wire.DriverMessage(read=read) as answer if read == number:
                driver = answer
            case wire.GpuMessage(read=read, gpu=gpu) if read == number:
                gpus[gpu.index] = gpu
    versions = driver.driver_version, driver.cuda_version, driver.nvml_version
    reading = NvmlReading(*versions, tuple(gpu for _, gpu in sorted(gpus.items())))
    return reading, pages_of(reading)


def _ended(worker: Worker) -> Exception:
    """Return why a worker has ended. The next input starts another."""
    _worker.cache_clear()
    worker.process.kill()
    _, message = worker.process.communicate()
    if b"NVML stand-in:" in message:
        return ValueError("no answers of a driver")  # the stand-in does not understand its state
    return AssertionError(f"the worker ended: {message[-3000:].decode(errors='replace')}")


@functools.cache
def _worker() -> Worker:
    """Start a worker, once for a process."""
    place = Path(tempfile.mkdtemp(prefix="gpumap-fuzz-driver-"))
    library = standin.build(standin.LIBRARIES)
    worker = Worker([*worker_command(str(library))], place / "state", LD_LIBRARY_PATH=str(library.parent))
    worker.groups = _GROUPS
    atexit.register(worker.process.kill)
    return worker
