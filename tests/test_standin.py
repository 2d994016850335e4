"""The stand-in for libnvidia-ml.so.1 as the real pynvml sees it: each test talks to a process of its own."""

import json
import os
import random
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from msgspec import structs

from gpumap.model.readings import CARD, GpuReading
from tests.standin import (
    FUNCTIONS,
    Code,
    Driver,
    Gpm,
    Gpu,
    MigInstance,
    Placement,
    Process,
    Sample,
    build,
    environment,
    read_calls,
)
from tests.worker import Start, Worker

T = TypeVar("T")

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"

CHILD = """
import ctypes, json, sys
import pynvml as n

def plain(value):
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, ctypes.Union):
        return value.ullVal
    if isinstance(value, n.nvmlFriendlyObject):
        return vars(value)
    if isinstance(value, ctypes._SimpleCData):
        return plain(value.value)
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, (str, int, float)) else "opaque"

names = {"n": n, "ctypes": ctypes}
for line in sys.stdin:
    try:
        name, _, expression = line.strip().rpartition(" := ")
        value = eval(expression, names)
        if name:
            names[name] = value
        print(json.dumps({"value": plain(value)}), flush=True)
    except n.NVMLError as error:
        print(json.dumps({"code": error.value}), flush=True)
    except Exception as error:
        print(json.dumps({"error": type(error).__name__ + ": " + str(error)}), flush=True)
"""


class Failed(Exception):  # noqa: N818 - it is what a call said, not a fault of the test
    """What an NVML call in the child raised: a code, or another exception's text."""


class Session:
    """A process with pynvml on the stand-in, which evaluates expressions; "name := expression" keeps a value."""

    def __init__(self, library: Path, state: Path, look_milliseconds: int = 0) -> None:
        self.calls = state.with_name("calls")
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env={**os.environ, **environment(library, state, self.calls, look_milliseconds)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def send(self, expression: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(expression + "\n")
        self._child.stdin.flush()

    def answered(self, within_seconds: float) -> bool:
        assert self._child.stdout is not None
        return bool(select.select([self._child.stdout], [], [], within_seconds)[0])

    def receive(self) -> Any:
        assert self._child.stdout is not None
        assert self.answered(10), "the call hangs"
        answer = json.loads(self._child.stdout.readline())
        if "value" not in answer:
            raise Failed(answer.get("code", answer.get("error")))
        return answer["value"]

    def ask(self, expression: str) -> Any:
        self.send(expression)
        return self.receive()

    def code(self, expression: str) -> Any:
        """The code (or other exception) that the expression ends with, 0 if none."""
        try:
            self.ask(expression)
        except Failed as failed:
            return failed.args[0]
        return 0

    @property
    def counted(self) -> Counter[str]:
        return read_calls(self.calls, [self._child.pid])

    def leave(self) -> tuple[int, str]:
        """End the child; its exit status and what it wrote to stderr."""
        _, stderr = self._child.communicate(timeout=10)
        return self._child.returncode, stderr

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


class Bench:
    """A state file and the processes that read it."""

    def __init__(self, libraries: Path, state: Path) -> None:
        self.libraries = libraries
        self.state = state
        self.sessions: list[Session] = []

    def start(
        self, driver: Driver, without: tuple[str, ...] = (), initialize: bool = True, look_milliseconds: int = 0
    ) -> Session:
        driver.write(self.state)
        session = Session(build(self.libraries, without), self.state, look_milliseconds)
        self.sessions.append(session)
        if initialize:
            session.ask("n.nvmlInit()")
            for index in range(len(driver.gpus)):
                session.ask(f"gpu{index} := n.nvmlDeviceGetHandleByIndex({index})")
        return session


@pytest.fixture
def bench(libraries: Path, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(libraries, tmp_path / "state")
    yield bench
    for session in bench.sessions:
        session.close()


def test_rules_must_name_what_exists(tmp_path: Path) -> None:
    """A misspelt function or target, or a line break in a value, is an error of the test that writes it."""
    with pytest.raises(ValueError, match="nvmlDeviceGetNam"):
        Driver(fail={("nvmlDeviceGetNam", 0): 3}).write(tmp_path / "state")
    with pytest.raises(ValueError, match="target"):
        Driver(crash={("nvmlDeviceGetName", "gpu0")}).write(tmp_path / "state")
    with pytest.raises(ValueError, match="line break"):
        Driver(gpus=[Gpu("GPU-1\ncount 9")]).write(tmp_path / "state")
    with pytest.raises(ValueError, match="nvmlNothing"):
        build(tmp_path, without=["nvmlNothing"])
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_a_state_are_loud(bench: Bench) -> None:
    """A state that makes no sense ends the process with a word why, instead of looking like a driver's answer."""
    nvml = bench.start(Driver(gpus=[Gpu(A)]))
    bench.state.with_name("bad").write_text("count 1\ngpu.0.uuid " + A + "\ngpu.0.power many\n")
    bench.state.with_name("bad").replace(bench.state)
    nvml.send("n.nvmlDeviceGetPowerUsage(gpu0)")
    assert nvml.leave() == (-6, "NVML stand-in: 'many' is not a number\n")


def test_every_function_is_exported_and_can_be_left_out(libraries: Path) -> None:
    """The whole library exports each function that the source names, the empty variant none of them."""
    probe = "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); print([f for f in sys.argv[2:] if hasattr(lib, f)])"
    for without in ((), tuple(FUNCTIONS)):
        command = [sys.executable, "-c", probe, str(build(libraries, without)), *sorted(FUNCTIONS)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert found.strip() == str(sorted(FUNCTIONS - set(without)))


GIVEN: dict[str, Any] = {
    "garbage_rows": 3,
    "fields": {138: ("ulonglong", 1 << 40), 142: ("uint", 7), 230: ("error", Code.NO_PERMISSION), 307: ("sint", -1)},
    "clocks_megahertz": {"graphics": 1, "sm": 2, "memory": 3, "video": 4},
    "max_clocks_megahertz": {"graphics": 5, "sm": 6, "memory": 7, "video": 8},
    "fan_percents": [30, None, 40],
    "ecc": {(1, 1, 2): 1 << 40, (0, 1, 7): 3},
    "vbios": "96.00.A5.00.03",
    "compute_capability": (9, 0),
    "power_limits_milliwatts": (200_000, 750_000),
    "cc_protected_kib": 7,
    "cc_unprotected_kib": 8,
    "clock_events": 5,
    "clock_events_supported": 7,
    "performance_state": 2,
    "compute_mode": 3,
}


def _some_driver(draw: random.Random) -> Driver:
    """GPUs, some partitioned, with processes; each lacks something."""

    def some(value: T) -> T | None:
        return value if draw.random() < 0.8 else None

    def processes() -> list[Process] | None:
        kinds: tuple[Literal["compute", "graphics", "mps"], ...] = ("compute", "graphics", "mps")
        return some([Process(draw.randrange(1, 999), some(1 << 20), draw.choice(kinds)) for _ in range(5)])

    def gpm() -> Gpm | None:
        return some(Gpm(100 * draw.random(), tensor=some(2.5), dram=some(Code.NO_DATA)))

    def instance(slot: int) -> MigInstance | None:
        placement = some(Placement(draw.randrange(20), slot))
        return some(MigInstance(f"MIG-{slot}", slot, processes=processes(), placement=placement, gpm=gpm()))

    def gpu(index: int) -> Gpu:
        made = Gpu(f"GPU-{index}", processes=processes(), gpm=gpm())
        for name, value in GIVEN.items():
            if some(name):
                setattr(made, name, value)
        made.memory_used_bytes, made.utilization_gpu = some(draw.randrange(1 << 30)), some(draw.randrange(100))
        made.temperature_celsius, made.energy_millijoules = some(-draw.randrange(9)), some(draw.randrange(1 << 40))
        made.samples = some([Sample(draw.randrange(1, 999), 40, 30, 20, 10) for _ in range(3)])
        made.mig_mode = bool(index % 2)
        made.instances = [instance(slot) for slot in range(4)]
        return made

    return Driver(gpus=[gpu(index) for index in range(4)])


def test_answers_from_memory_are_those_of_the_file(start: Start, tmp_path: Path) -> None:
    """Whether it looks at its state in each call or now and then, gpumap reads the same by the same calls."""
    groups = ("codec", "health", "links", "gpm", "accounting", CARD)
    calls = tmp_path / "each", tmp_path / "some"
    workers = [
        start(groups=groups, STANDIN_CALLS=str(path), STANDIN_LOOK_MILLISECONDS=pause)
        for path, pause in zip(calls, ("0", "20"), strict=True)
    ]
    for seed in range(4):
        driver = _some_driver(random.Random(seed))
        for _ in range(2):  # GPM tells what happened between two reads
            driver.write(workers[0].state)
            time.sleep(0.12)
            of_file, of_memory = (
                [structs.replace(gpu, sampled_seconds=None) for gpu in _read(worker)] for worker in workers
            )
            assert of_memory == of_file
    made = [set(standin_calls) for standin_calls in map(read_calls, calls)]
    assert made[0] == made[1] > {"nvmlGpmMetricsGet", "nvmlDeviceGetFieldValues", "nvmlDeviceGetProcessUtilization"}


def _read(worker: Worker) -> list[GpuReading]:
    return [gpu for _, gpu in sorted(worker.read().gpus.items())]
