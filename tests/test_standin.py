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
MIG_A, MIG_B = "MIG-00000000-0000-0000-0000-00000000001a", "MIG-00000000-0000-0000-0000-00000000001b"

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


def test_process_utilization_holds_what_is_newer(bench: Bench) -> None:
    """Only samples after the given time are told; without any the answer is NOT_FOUND."""
    old, new = 1_700_000_000_000_000, 1_700_000_001_000_000
    samples = [Sample(11, 40, 10, timestamp_us=old), Sample(12, 1, 2, 3, 4, timestamp_us=new)]
    nvml = bench.start(Driver(gpus=[Gpu(A, samples=samples), Gpu(B)]))
    row = {"pid": 12, "timeStamp": new, "smUtil": 1, "memUtil": 2, "encUtil": 3, "decUtil": 4}
    assert [each["pid"] for each in nvml.ask("n.nvmlDeviceGetProcessUtilization(gpu0, 0)")] == [11, 12]
    assert nvml.ask(f"n.nvmlDeviceGetProcessUtilization(gpu0, {old})") == [row]
    assert nvml.code(f"n.nvmlDeviceGetProcessUtilization(gpu0, {new})") == Code.NOT_FOUND
    assert nvml.code("n.nvmlDeviceGetProcessUtilization(gpu1, 0)") == Code.NOT_FOUND
    nvml.ask("f := n._nvmlGetFunctionPointer('nvmlDeviceGetProcessUtilization')")
    nvml.ask("rows := (n.c_nvmlProcessUtilizationSample_t * 8)()")
    nvml.ask("count := ctypes.c_uint(1)")
    assert nvml.ask("f(gpu0, rows, ctypes.byref(count), ctypes.c_ulonglong(0))") == Code.INSUFFICIENT_SIZE
    assert nvml.ask("count") == 2
    nvml.ask("count := ctypes.c_uint(8)")
    assert nvml.ask("f(gpu0, rows, ctypes.byref(count), ctypes.c_ulonglong(0))") == 0
    assert nvml.ask("count") == 2


def test_mig_handles_go_stale(bench: Bench) -> None:
    """A handle outlives a move to another slot, but not the end, or a new generation, of its instance."""
    gpu = Gpu(A, instances=[MigInstance(MIG_A)])
    driver = Driver(gpus=[gpu])
    nvml = bench.start(driver)
    nvml.ask("mig := n.nvmlDeviceGetMigDeviceHandleByIndex(gpu0, 0)")
    gpu.instances = [None, MigInstance(MIG_A)]
    driver.write(bench.state)
    assert nvml.ask("n.nvmlDeviceGetUUID(mig)") == MIG_A
    changes: list[list[MigInstance | None]] = [[MigInstance(MIG_B)], [MigInstance(MIG_A, generation=1)], []]
    for instances in changes:
        gpu.instances = instances
        driver.write(bench.state)
        assert nvml.code("n.nvmlDeviceGetUUID(mig)") == Code.INVALID_ARGUMENT
    gpu.instances, gpu.mig_mode = [MigInstance(MIG_A)], False
    driver.write(bench.state)
    assert nvml.code("n.nvmlDeviceGetUUID(mig)") == Code.INVALID_ARGUMENT
    assert nvml.ask("n.nvmlDeviceGetUUID(gpu0)") == A


def test_another_state_takes_over_between_two_calls(bench: Bench) -> None:
    """The call that a "then" line matches is answered by the old state, the next one by the new."""
    after = Driver(gpus=[Gpu(B, memory_used_bytes=5)])
    nvml = bench.start(Driver(gpus=[Gpu(A)], then=(("nvmlDeviceGetUUID", 0), after)))
    assert nvml.ask("n.nvmlDeviceGetName(gpu0)") == "NVIDIA A100-SXM4-80GB"
    assert nvml.ask("n.nvmlDeviceGetUUID(gpu0)") == A
    assert nvml.code("n.nvmlDeviceGetName(gpu0)") == Code.INVALID_ARGUMENT
    assert nvml.ask("n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(0))") == B


def test_initialization_is_counted(bench: Bench) -> None:
    """Calls before the first init, or after as many shutdowns, are UNINITIALIZED."""
    driver = Driver(gpus=[Gpu(A)], init_code=Code.LIB_RM_VERSION_MISMATCH)
    nvml = bench.start(driver, initialize=False)
    nvml.ask("n._LoadNvmlLibrary()")
    assert nvml.code("n.nvmlDeviceGetCount()") == Code.UNINITIALIZED
    assert nvml.code("n.nvmlShutdown()") == Code.UNINITIALIZED
    assert nvml.code("n.nvmlInit()") == Code.LIB_RM_VERSION_MISMATCH
    driver.init_code = 0
    driver.write(bench.state)
    nvml.ask("n.nvmlInit()")
    assert nvml.ask("n._nvmlGetFunctionPointer('nvmlInit_v2')()") == 0
    nvml.ask("n.nvmlShutdown()")
    assert nvml.ask("n.nvmlDeviceGetCount()") == 1
    nvml.ask("n.nvmlShutdown()")
    assert nvml.code("n.nvmlDeviceGetCount()") == Code.UNINITIALIZED


def test_no_state_is_no_driver(libraries: Path, tmp_path: Path) -> None:
    """Without a state file the stand-in says that no driver is loaded."""
    nvml = Session(build(libraries), tmp_path / "missing")
    try:
        assert nvml.code("n.nvmlInit()") == Code.DRIVER_NOT_LOADED
    finally:
        nvml.close()


def test_failures_hit_their_target(bench: Bench) -> None:
    """A rule concerns one GPU with or without its instances, one slot, or everything, and ends with its line."""
    gpus = [Gpu(A, instances=[MigInstance(MIG_A), MigInstance(MIG_B)]), Gpu(B)]
    driver = Driver(gpus=gpus)
    nvml = bench.start(driver)
    for slot in (0, 1):
        nvml.ask(f"mig{slot} := n.nvmlDeviceGetMigDeviceHandleByIndex(gpu0, {slot})")

    def failing() -> set[str]:
        driver.write(bench.state)
        devices = ("gpu0", "gpu1", "mig0", "mig1")
        codes = {device: nvml.code(f"n.nvmlDeviceGetName({device})") for device in devices}
        return {device for device, code in codes.items() if code == Code.GPU_IS_LOST}

    driver.fail["*", 0] = Code.GPU_IS_LOST
    assert failing() == {"gpu0", "mig0", "mig1"}
    assert nvml.code("n.nvmlDeviceGetHandleByIndex(0)") == Code.GPU_IS_LOST
    assert nvml.code("n.nvmlDeviceGetHandleByIndex(1)") == 0
    assert nvml.code("n.nvmlDeviceGetCount()") == 0
    driver.fail = {("nvmlDeviceGetName", "0.gpu"): Code.GPU_IS_LOST}
    assert failing() == {"gpu0"}
    assert nvml.code("n.nvmlDeviceGetUUID(gpu0)") == 0
    driver.fail = {("nvmlDeviceGetName", "0.mig"): Code.GPU_IS_LOST}
    assert failing() == {"mig0", "mig1"}
    driver.fail = {("nvmlDeviceGetName", "0.1"): Code.GPU_IS_LOST}
    assert failing() == {"mig1"}
    driver.fail = {("nvmlDeviceGetName", 1): 3, ("*", "*"): Code.GPU_IS_LOST}
    assert failing() == {"gpu0", "mig0", "mig1"}
    assert nvml.code("n.nvmlDeviceGetCount()") == Code.GPU_IS_LOST
    driver.fail = {}
    assert failing() == set()


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


def test_delay_holds_one_call_only(bench: Bench) -> None:
    """A delayed call takes its time and then answers; the same call of another GPU is not delayed."""
    nvml = bench.start(Driver(gpus=[Gpu(A), Gpu(B)], delay={("nvmlDeviceGetName", 0): 0.3}))
    nvml.send("n.nvmlDeviceGetName(gpu1)")
    started = time.monotonic()
    assert "A100" in nvml.receive()
    assert "A100" in nvml.ask("n.nvmlDeviceGetName(gpu0)")
    assert time.monotonic() - started >= 0.3


def test_hang_ends_when_its_line_is_gone(bench: Bench) -> None:
    """A call that hangs for ever goes on with the new state as soon as that no longer delays it."""
    gpu = Gpu(A, name="before")
    driver = Driver(gpus=[gpu], delay={("nvmlDeviceGetName", 0): float("inf")})
    nvml = bench.start(driver)
    nvml.send("n.nvmlDeviceGetName(gpu0)")
    assert not nvml.answered(within_seconds=0.2)
    gpu.name = "after"
    driver.write(bench.state)
    assert not nvml.answered(within_seconds=0.2)
    driver.delay.clear()
    driver.write(bench.state)
    assert nvml.receive() == "after"


def test_hang_does_not_stop_other_threads(bench: Bench) -> None:
    """While one thread hangs in a call about one GPU, another thread's calls are answered."""
    driver = Driver(gpus=[Gpu(A), Gpu(B)], delay={("*", 0): float("inf")})
    driver.write(bench.state)
    nvml = bench.start(driver, initialize=False)
    nvml.ask("n.nvmlInit()")
    nvml.ask("threading := __import__('threading')")
    nvml.ask("stuck := threading.Thread(target=n.nvmlDeviceGetHandleByIndex, args=(0,), daemon=True)")
    nvml.ask("stuck.start()")
    assert nvml.ask("n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(1))") == B
    assert nvml.ask("stuck.is_alive()")
    driver.delay.clear()
    driver.write(bench.state)
    nvml.ask("stuck.join(10)")
    assert not nvml.ask("stuck.is_alive()")


def test_crash_ends_the_process(bench: Bench) -> None:
    """A crashing call takes its process with it, as a fault in the driver's library does."""
    nvml = bench.start(Driver(gpus=[Gpu(A)], crash={("nvmlDeviceGetPowerUsage", 0)}))
    assert nvml.ask("n.nvmlDeviceGetUUID(gpu0)") == A
    nvml.send("n.nvmlDeviceGetPowerUsage(gpu0)")
    assert nvml.leave()[0] == -6


def test_mistakes_in_a_state_are_loud(bench: Bench) -> None:
    """A state that makes no sense ends the process with a word why, instead of looking like a driver's answer."""
    nvml = bench.start(Driver(gpus=[Gpu(A)]))
    bench.state.with_name("bad").write_text("count 1\ngpu.0.uuid " + A + "\ngpu.0.power many\n")
    bench.state.with_name("bad").replace(bench.state)
    nvml.send("n.nvmlDeviceGetPowerUsage(gpu0)")
    assert nvml.leave() == (-6, "NVML stand-in: 'many' is not a number\n")


def test_gpus_come_and_go(bench: Bench) -> None:
    """A handle stays with its GPU when the order changes, and is invalid once the GPU is gone."""
    first, second = Gpu(A), Gpu(B, temperature_celsius=77)
    nvml = bench.start(Driver(gpus=[first, second]))
    Driver(gpus=[second]).write(bench.state)
    assert nvml.ask("n.nvmlDeviceGetTemperature(gpu1, 0)") == 77
    assert nvml.code("n.nvmlDeviceGetTemperature(gpu0, 0)") == Code.INVALID_ARGUMENT
    assert nvml.ask("n.nvmlDeviceGetCount()") == 1


def test_every_change_is_seen(bench: Bench) -> None:
    """Changes of the same length, one right after the other, are each seen by the next call."""
    gpu = Gpu(A, temperature_celsius=10)
    nvml = bench.start(Driver(gpus=[gpu]))
    for celsius in range(10, 60):
        gpu.temperature_celsius = celsius
        Driver(gpus=[gpu]).write(bench.state)
        assert nvml.ask("n.nvmlDeviceGetTemperatureV(gpu0, 0)") == celsius


def test_symbols_can_be_missing(bench: Bench) -> None:
    """A variant without some symbols is an older driver: FUNCTION_NOT_FOUND, or pynvml's own mismatch error."""
    without = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3")
    nvml = bench.start(Driver(gpus=[Gpu(A, processes=[Process(11)])]), without=without)
    assert nvml.code("n.nvmlDeviceGetTemperatureV(gpu0, 0)") == Code.FUNCTION_NOT_FOUND
    assert nvml.ask("n.nvmlDeviceGetTemperature(gpu0, 0)") == 40
    assert nvml.code("n.nvmlDeviceGetMemoryInfo(gpu0, n.nvmlMemory_v2)") == Code.FUNCTION_NOT_FOUND
    assert nvml.ask("n.nvmlDeviceGetMemoryInfo(gpu0)")["total"] == 80 << 30
    assert nvml.code("n.nvmlDeviceGetComputeRunningProcesses(gpu0)").startswith("NVMLLibraryMismatchError")
    assert [row["pid"] for row in nvml.ask("n.nvmlDeviceGetComputeRunningProcesses_v2(gpu0)")] == [11]


def test_every_function_is_exported_and_can_be_left_out(libraries: Path) -> None:
    """The whole library exports each function that the source names, the empty variant none of them."""
    probe = "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); print([f for f in sys.argv[2:] if hasattr(lib, f)])"
    for without in ((), tuple(FUNCTIONS)):
        command = [sys.executable, "-c", probe, str(build(libraries, without)), *sorted(FUNCTIONS)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert found.strip() == str(sorted(FUNCTIONS - set(without)))


def test_builds_are_kept(libraries: Path) -> None:
    """The same variant is compiled once, whatever the order of what it leaves out."""
    names = ("nvmlDeviceGetName", "nvmlDeviceGetUUID")
    first = build(libraries, names)
    compiled = first.stat().st_mtime_ns
    assert build(libraries, names[::-1]) == first
    assert first.stat().st_mtime_ns == compiled
    assert build(libraries) != first


def test_calls_are_counted(bench: Bench) -> None:
    """The counts of calls are there at any time, for each process, also after its end."""
    nvml, other = (bench.start(Driver(gpus=[Gpu(A)])) for _ in range(2))
    nvml.ask("n.nvmlDeviceGetName(gpu0)")
    nvml.ask("n.nvmlShutdown()")
    nvml.ask("n.nvmlInit()")
    nvml.ask("n.nvmlDeviceGetName(gpu0)")
    expected = {
        "nvmlInitWithFlags": 2,
        "nvmlShutdown": 1,
        "nvmlDeviceGetHandleByIndex_v2": 1,
        "nvmlDeviceGetName": 2,
    }
    assert nvml.counted == expected
    assert nvml.leave() == (0, "")
    assert nvml.counted == expected
    assert other.counted == {"nvmlInitWithFlags": 1, "nvmlDeviceGetHandleByIndex_v2": 1}
    assert read_calls(nvml.calls) == nvml.counted + other.counted


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


def test_a_state_is_not_looked_for_in_between(bench: Bench) -> None:
    """Another state is there after that time, and not before."""
    nvml = bench.start(Driver(gpus=[Gpu(A, temperature_celsius=40)]), look_milliseconds=3_600_000)
    soon = bench.start(Driver(gpus=[Gpu(A, temperature_celsius=41)]), look_milliseconds=20)
    Driver(gpus=[Gpu(A, temperature_celsius=42)]).write(bench.state)
    time.sleep(0.05)
    told = [each.ask("n.nvmlDeviceGetTemperature(gpu0, 0)") for each in (nvml, soon)]
    assert told == [40, 42]
