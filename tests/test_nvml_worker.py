"""The NVML worker as a process of its own, over the compiled stand-in and the real pynvml, by its protocol."""

import re
import time
from pathlib import Path

import pynvml
import pytest
from msgspec import structs

from gpumap.agent.nvml_worker import library, wire
from gpumap.agent.sources.nvml_state import LONGEST_PAUSE_READS, CrashSuspects
from gpumap.model.readings import SAMPLES_NEW, SAMPLES_OLD, DeviceMemory, GpuProcess, GpuReading, ProcessSample, Uuid
from tests import standin
from tests.snapshots import gpu, instances
from tests.standin import Code, Driver, Gpu, Process, Sample
from tests.worker import PATIENCE_SECONDS, Start

A, B, C = (f"GPU-00000000-0000-0000-0000-00000000000{letter}" for letter in "abc")
GIB = 1 << 30


# --- a whole GPU ------------------------------------------------------------------------------------------------------


def test_a_whole_gpu_is_reported_in_base_units(start: Start) -> None:
    """Watts, joules, bytes, ratios and degrees Celsius, with the GPU's identity as NVML gives it."""
    gpu = Gpu(
        A,
        minor=3,
        memory_used_bytes=GIB,
        utilization_gpu=61,
        utilization_memory=7,
        encoder_utilization=5,
        decoder_utilization=4,
        power_milliwatts=250_500,
    )
    answers = start(groups=("codec",)).read(Driver(gpus=[gpu]))
    assert structs.astuple(answers.driver)[1:] == ("550.54.15", "12.4", "12.550.54.15", 1, ())
    assert answers.gpus[0] == GpuReading(
        index=0,
        uuid=Uuid(A),
        minor=3,
        pci_bus_id="00000000:3B:00.0",
        model="NVIDIA A100-SXM4-80GB",
        memory=DeviceMemory(80 * GIB, GIB, 79 * GIB - (512 << 20), 512 << 20),
        processes=(),
        sampled_seconds=1.2,
        samples=(),
        utilization_ratio=0.61,
        memory_controller_busy_ratio=0.07,
        encoder_ratio=0.05,
        decoder_ratio=0.04,
        temperatures_celsius={"gpu": 40.0, "memory": 45.0},
        power_watts=250.5,
        power_limit_watts=400.0,
        energy_joules=1000.0,
    )


def test_what_a_gpu_does_not_support_is_absent_without_complaint(start: Start) -> None:
    """A card without memory sensor, power metering, codecs, device memory or process lists reports the rest."""
    gpu = Gpu(
        A,
        memory_total_bytes=None,
        memory_temperature_celsius=None,
        power_milliwatts=None,
        energy_millijoules=None,
        encoder_utilization=None,
        processes=None,
        samples=None,
    )
    reading = start(groups=("codec", "health", "links", "gpm")).read_one(Driver(gpus=[gpu]))
    assert reading.fault is None
    assert reading.refusals == {}
    assert (reading.memory, reading.power_watts, reading.energy_joules) == (None, None, None)
    assert (reading.encoder_ratio, reading.processes, reading.samples) == (None, None, None)
    assert reading.temperatures_celsius == {"gpu": 40.0}


def test_a_memory_of_zero_degrees_is_no_temperature(start: Start) -> None:
    """T4 and GeForce cards have no sensor for the memory, and some drivers answer 0 for it."""
    assert start().read_one(Driver(gpus=[Gpu(A, memory_temperature_celsius=0)])).temperatures_celsius == {"gpu": 40.0}


def test_a_failing_call_costs_its_value_alone_and_is_reported(start: Start) -> None:
    """A value that NVML refuses is absent, and the refusal is reported with its code."""
    driver = Driver(gpus=[Gpu(A)], fail={("nvmlDeviceGetPowerUsage", 0): Code.NO_PERMISSION})
    reading = start().read_one(driver)
    assert (reading.fault, reading.power_watts, reading.energy_joules) == (None, None, 1000.0)
    assert reading.refusals == {"nvmlDeviceGetPowerUsage": Code.NO_PERMISSION}


def test_what_is_not_supported_is_not_called_again(start: Start, tmp_path: Path) -> None:
    """A call that answered "not supported" is asked once in a few minutes, and when NVML is initialised again."""
    calls = tmp_path / "calls"
    worker = start(groups=("codec",), STANDIN_CALLS=str(calls))
    driver = Driver(gpus=[Gpu(A, encoder_utilization=None)])
    for _ in range(3):
        worker.read(driver)
    driver.fail["nvmlDeviceGetCount_v2", "*"] = Code.UNKNOWN  # makes it shut down, which writes the calls
    worker.refusal(driver)
    counted = standin.read_calls(calls)
    assert (counted["nvmlDeviceGetEncoderUtilization"], counted["nvmlDeviceGetDecoderUtilization"]) == (1, 3)
    assert (counted["nvmlDeviceGetHandleByIndex_v2"], counted["nvmlDeviceGetUUID"]) == (1, 1)


SOON = {"calls.SOON_SECONDS": 0.2, "calls.RETRY_SECONDS": 600.0}
PASSING = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetMigMode",
)


@pytest.mark.parametrize("call", PASSING)
def test_a_temporary_refusal_is_reported_and_ends(start: Start, call: str) -> None:
    """A value that was there before and is refused is asked for again soon; no other value is."""
    worker = start(groups=("codec", "health"), changed=SOON)
    driver = Driver(gpus=[Gpu(A, encoder_utilization=None, processes=[Process(10)], mig_mode=False)])
    whole = worker.read_one(driver)
    assert whole.refusals == {}
    driver.fail = {(call, 0): Code.NOT_SUPPORTED}
    assert worker.read_one(driver).refusals == {call: Code.NOT_SUPPORTED}
    driver.fail = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while structs.replace(worker.read_one(driver), sampled_seconds=None) != structs.replace(
        whole, sampled_seconds=None
    ):
        assert time.monotonic() < deadline, "it is not asked for again"


@pytest.mark.parametrize(
    ("without", "used_bytes", "reserved_bytes"),
    [((), GIB, 512 << 20), (("nvmlDeviceGetMemoryInfo_v2",), GIB + (512 << 20), None)],
)
def test_memory_of_an_old_driver_is_as_it_counts(
    start: Start, without: tuple[str, ...], used_bytes: int, reserved_bytes: int | None
) -> None:
    """Without the v2 call, used includes what the driver reserves, and reserved is absent."""
    memory = start(without).read_one(Driver(gpus=[Gpu(A, memory_used_bytes=GIB)])).memory
    assert memory is not None
    assert (memory.used_bytes, memory.reserved_bytes) == (used_bytes, reserved_bytes)


def test_memory_falls_back_where_v2_is_another_version(start: Start) -> None:
    """A driver that refuses the v2 struct's version is asked for v1."""
    driver = Driver(gpus=[Gpu(A)], fail={("nvmlDeviceGetMemoryInfo_v2", 0): Code.ARGUMENT_VERSION_MISMATCH})
    memory = start().read_one(driver).memory
    assert memory is not None
    assert memory.reserved_bytes is None


@pytest.mark.parametrize("symbol", ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"])
def test_either_temperature_call_will_do(start: Start, symbol: str) -> None:
    """The temperature is reported by drivers that lack the new call, and by those that will lack the old one."""
    assert start((symbol,)).read_one(Driver(gpus=[Gpu(A)])).temperatures_celsius["gpu"] == 40.0


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_process_in_several_lists_is_one(start: Start) -> None:
    """A PID in two lists has both types and the larger memory; memory that is not reported stays unknown."""
    processes = [
        Process(30, None),
        Process(10, 2 * GIB),
        Process(10, 3 * GIB, kind="graphics"),
        Process(20, None, kind="mps"),
        Process(20, GIB),
        Process(40, GIB, kind="graphics"),
        Process(50, 0, kind="mps"),
    ]
    assert start().read_one(Driver(gpus=[Gpu(A, processes=processes)])).processes == (
        GpuProcess(10, 3 * GIB, "C+G"),
        GpuProcess(20, GIB, "M+C"),
        GpuProcess(30, None, "C"),
        GpuProcess(40, GIB, "G"),
        GpuProcess(50, 0, "M"),
    )


LISTS = [f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute")]


@pytest.mark.parametrize("suffixes", [("_v3",), ("_v3", "_v2")])
def test_older_process_lists_are_read_too(start: Start, suffixes: tuple[str, ...]) -> None:
    """Drivers without the third version of the lists are asked by the second, or the first with its shorter rows."""
    worker = start(tuple(name + suffix for name in LISTS for suffix in suffixes))
    processes = [Process(10, GIB), Process(11, None), Process(12, 5, kind="graphics")]
    assert worker.read_one(Driver(gpus=[Gpu(A, processes=processes)])).processes == (
        GpuProcess(10, GIB, "C"),
        GpuProcess(11, None, "C"),
        GpuProcess(12, 5, "G"),
    )


def test_the_longer_rows_of_early_535_drivers_are_read(start: Start) -> None:
    """Drivers 535.43 to 535.98 wrote 32-byte rows under the name of the 24-byte ones."""
    worker = start(("nvmlDeviceGetRunningProcessDetailList",))
    processes = [Process(pid, pid, cc_protected_bytes=77) for pid in range(1, 4)]
    reading = worker.read_one(Driver(version="535.54.03", abi535=True, gpus=[Gpu(A, processes=processes)]))
    assert reading.processes == tuple(GpuProcess(pid, pid, "C") for pid in range(1, 4))


def test_a_list_that_a_gpu_never_had_is_not_missed(start: Start) -> None:
    """A GPU without graphics has no such processes. If a list is refused otherwise, its processes are unknown."""
    worker = start()
    driver = Driver(gpus=[Gpu(A, processes=[Process(10)])])
    driver.fail["nvmlDeviceGetGraphicsRunningProcesses_v3", 0] = Code.NOT_SUPPORTED
    assert worker.read_one(driver).processes == (GpuProcess(10, GIB, "C"),)
    driver.fail = {("nvmlDeviceGetMPSComputeRunningProcesses_v3", 0): Code.NO_PERMISSION}
    reading = worker.read_one(driver)
    assert reading.processes is None
    assert reading.refusals == {"nvmlDeviceGetMPSComputeRunningProcesses_v3": Code.NO_PERMISSION}
    driver.fail = {("nvmlDeviceGetComputeRunningProcesses_v3", 0): Code.UNKNOWN}
    assert worker.read_one(driver).processes is None


def test_samples_are_means_by_process(start: Start) -> None:
    """Percent become ratios; several rows of a PID become their mean."""
    samples = [Sample(10, 50, 10), Sample(10, 70, 30), Sample(11, 100, 0, 20, 40)]
    assert start().read_one(Driver(gpus=[Gpu(A, samples=samples)])).samples == (
        ProcessSample(10, 0.6, 0.2, 0.0, 0.0),
        ProcessSample(11, 1.0, 0.0, 0.2, 0.4),
    )


OLD_REFUSED: dict[tuple[str, standin.Target], int] = {(SAMPLES_OLD, 1): Code.NOT_SUPPORTED}
"""GPU 1 is a Blackwell."""


@pytest.mark.parametrize("mig_first", [False, True])
def test_the_new_call_is_used_if_a_gpu_refuses_the_old_one(start: Start, *, mig_first: bool) -> None:
    """Beside a GPU that answers the old one; no samples are an idle GPU in both. JPEG and OFA are only in the new."""
    samples = [Sample(10, 50, 10, 20, 30, 40, 60), Sample(10, 70, 30, 40, 50, 60, 80)]
    gpus = [Gpu(uuid, samples=samples, processes=[Process(10)], mig_mode=mig_first) for uuid in (A, B)]
    worker, driver = start(), Driver(gpus=gpus, fail={**OLD_REFUSED})
    if mig_first:
        worker.read(driver)
        for gpu in gpus:
            gpu.mig_mode = False
    read = worker.read(driver).gpus
    assert read[0].samples == (ProcessSample(10, 0.6, 0.2, 0.3, 0.4),)
    assert read[1].samples == (ProcessSample(10, 0.6, 0.2, 0.3, 0.4, 0.5, 0.7),)
    for gpu in gpus:
        gpu.samples = []
    idle = worker.read(driver).gpus
    assert [gpu.samples for gpu in idle.values()] == [(), ()]
    for one in (read, idle):
        assert [gpu.samples_from for gpu in one.values()] == [SAMPLES_OLD, SAMPLES_NEW]
        assert [gpu.refusals for gpu in one.values()] == [{}, {}]


def test_a_library_without_the_old_call_has_samples_by_the_new_one(start: Start) -> None:
    """As a later driver may."""
    reading = start((SAMPLES_OLD,)).read_one(Driver(gpus=[Gpu(A, samples=[Sample(10, 50)])]))
    assert (reading.samples, reading.samples_from) == ((ProcessSample(10, 0.5, 0.0, 0.0, 0.0),), SAMPLES_NEW)


@pytest.mark.parametrize("without", [(), (SAMPLES_NEW,)])
def test_a_gpu_that_refuses_both_calls_has_no_samples(start: Start, without: tuple[str, ...]) -> None:
    """That is no empty list, and no fault. Drivers before R550 lack the new call."""
    driver = Driver(gpus=[Gpu(uuid, samples=[Sample(10, 50)]) for uuid in (A, B)], fail={**OLD_REFUSED})
    if not without:
        driver.fail[SAMPLES_NEW, 1] = Code.NOT_SUPPORTED
    read = start(without).read(driver).gpus
    assert [gpu.samples is None for gpu in read.values()] == [False, True]
    assert read[1].refusals == {}


def test_samples_are_those_of_the_interval_or_since_the_last_reading(start: Start) -> None:
    """Whichever is longer: what was sampled is not left out, and a reading before its time shows no idleness."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        worker, now, began = start(), time.time_ns() // 1000, time.monotonic()
        gpu = Gpu(A, samples=[Sample(9, 90, timestamp_us=now - 60_000_000), Sample(10, 50, timestamp_us=now - 400_000)])
        driver = Driver(gpus=[gpu])
        # The second one is asked at once, while the driver has sampled nothing more.
        readings = [worker.read_one(driver), worker.read_one(driver)]
        read = time.monotonic()
        if read - began > 0.7:
            continue  # a busy machine: the sample was too old, or the second reading came in time
        assert [[sample.pid for sample in reading.samples or ()] for reading in readings] == [[10], [10]]
        assert [reading.sampled_seconds for reading in readings] == [1.2, 0.0]
        time.sleep(max(read + 1.0 - time.monotonic(), 0.0))  # its interval
        gpu.samples = [Sample(10, 50, timestamp_us=now - 400_000), Sample(11, 20, timestamp_us=now - 399_999)]
        reading = worker.read_one(driver)
        assert [sample.pid for sample in reading.samples or ()] == [11]
        assert reading.sampled_seconds is not None
        assert 1.0 <= reading.sampled_seconds <= time.monotonic() - began
        return
    pytest.fail("the machine was never quick enough")


@pytest.mark.parametrize(
    ("without", "engines"),
    [((), ("sm", "mem", "enc", "dec")), ((SAMPLES_OLD,), ("sm", "mem", "enc", "dec", "jpeg", "ofa"))],
)
def test_garbage_samples_are_dropped(start: Start, without: tuple[str, ...], engines: tuple[str, ...]) -> None:
    """Rows above 100 %, of the future, of long ago, and rows that the driver counted and did not write, say nothing."""
    now = time.time_ns() // 1000
    garbage = [
        Sample(20, 37_100, enc=50_583, timestamp_us=now),
        Sample(21, 5, dec=101, timestamp_us=now),
        Sample(22, 50, timestamp_us=now + 3_600_000_000),
        Sample(23, 50, timestamp_us=49_936),
        Sample(24, 50, timestamp_us=now - 60_000_000),
        *[Sample(25 + engine, **{name: 101}) for engine, name in enumerate(engines)],
    ]
    worker = start(without)
    for running in ([10, 11], [11]):
        processes = [Process(pid) for pid in running]
        gpu = Gpu(A, samples=[*garbage, *[Sample(pid, 40) for pid in running]], processes=processes, garbage_rows=94)
        reading = worker.read_one(Driver(gpus=[gpu]))
        assert reading.samples == tuple(ProcessSample(pid, 0.4, 0.0, 0.0, 0.0) for pid in running)
        assert reading.processes == tuple(GpuProcess(pid, GIB, "C") for pid in running)


def test_samples_of_the_future_hide_no_others(start: Start) -> None:
    """A row of the future is not taken for the newest one: the next reading asks for those of the last interval."""
    worker = start()
    gpu = Gpu(A, samples=[Sample(10, 50, timestamp_us=time.time_ns() // 1000 + 3_600_000_000)])
    driver = Driver(gpus=[gpu])
    assert worker.read_one(driver).samples == ()
    gpu.samples = [Sample(11, 20)]
    assert [sample.pid for sample in worker.read_one(driver).samples or ()] == [11]


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "code", "fault"),
    [
        ("nvmlDeviceGetHandleByIndex_v2", Code.GPU_IS_LOST, "lost"),
        ("nvmlDeviceGetHandleByIndex_v2", Code.NO_PERMISSION, "no_permission"),
        ("nvmlDeviceGetUUID", Code.UNKNOWN, "unknown"),
        ("nvmlDeviceGetHandleByIndex_v2", 8, "insufficient_power"),
        ("nvmlDeviceGetHandleByIndex_v2", 11, "irq_issue"),
        ("nvmlDeviceGetTemperatureV", 28, "lost"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", Code.RESET_REQUIRED, "reset_required"),
    ],
)
def test_a_fault_is_of_one_gpu_and_passes(start: Start, call: str, code: int, fault: str) -> None:
    """A GPU that NVML calls faulty from the start reports only that; the other is read; it comes back by itself."""
    worker = start()
    driver = Driver(gpus=[Gpu(A), Gpu(B)], fail={(call, 1): code})
    gpus = worker.read(driver).gpus
    assert (gpus[0].fault, gpus[1].fault) == (None, fault)
    assert gpus[1].memory is None
    assert [*gpus[1].refusals.values()] == [code]
    driver.fail.clear()
    assert worker.read(driver).gpus[1].uuid == B


def test_a_gpu_lost_later_keeps_its_identity(start: Start) -> None:
    """A GPU that falls off the bus keeps the identity that it had, and loses it where the count changes."""
    worker = start()
    driver = Driver(gpus=[Gpu(A), Gpu(B)])
    worker.read(driver)
    driver.fail["*", 1] = Code.GPU_IS_LOST
    lost = worker.read(driver).gpus[1]
    assert (lost.fault, lost.uuid, lost.minor, lost.pci_bus_id) == ("lost", B, 1, "00000000:3C:00.0")
    driver.gpus.append(Gpu(C))
    assert worker.read(driver).gpus[1].uuid is None


def test_a_driver_that_lost_everything_is_initialised_again(start: Start) -> None:
    """Where NVML has forgotten its initialisation, the GPUs are at fault once, and back in the next reading."""
    worker = start()
    driver = Driver(gpus=[Gpu(A), Gpu(B)])
    worker.read(driver)
    for code in (Code.UNINITIALIZED, Code.UNKNOWN):
        driver.fail = {("*", 0): code, ("*", 1): code}
        assert [gpu.fault for gpu in worker.read(driver).gpus.values()] == ["unknown", "unknown"]
        driver.fail.clear()
        assert {gpu.fault for gpu in worker.read(driver).gpus.values()} == {None}


def test_many_hung_gpus_delay_no_other_gpu(start: Start) -> None:
    """However many GPUs hang at a time, and whatever their places, those that do not are read."""
    worker = start()
    uuids = [f"GPU-00000000-0000-0000-0000-{index:012d}" for index in range(8)]
    hung = [0, 1, 2, 4, 6]
    driver = Driver(gpus=[Gpu(uuid) for uuid in uuids])
    driver.delay = {("nvmlDeviceGetPowerUsage", index): float("inf") for index in hung}
    assert set(worker.read(driver, hung=len(hung)).gpus) == {3, 5, 7}
    answers = worker.read(hung=len(hung))
    assert (sorted(answers.driver.busy), set(answers.gpus)) == (hung, {3, 5, 7})
    Driver(gpus=driver.gpus).write(worker.state)
    late = [worker.answer() for _ in hung]
    assert sorted((one.read, one.gpu.index) for one in late if isinstance(one, wire.GpuMessage)) == [
        (1, n) for n in hung
    ]
    assert set(worker.read().gpus) == set(range(8))


def test_what_was_read_before_a_crash_is_written(start: Start) -> None:
    """While its GPUs answer, the worker writes the lines of those that did: the crash of one does not cost them."""
    gpus = [Gpu(f"{A[:-2]}{index:02}") for index in range(10)]
    worker = start(changed={"read_scheduler.PATIENCE_SECONDS": 0.1})
    slow: dict[tuple[str, standin.Target], float] = {("nvmlDeviceGetPowerUsage", index): 0.08 for index in range(9)}
    worker.ask(Driver(gpus=gpus, delay=slow, crash={("nvmlDeviceGetPowerUsage", 9)}))
    assert isinstance(worker.answer(), wire.DriverMessage)
    assert isinstance(worker.answer(), wire.GpuMessage)


def test_skipped_gpus_are_not_read(start: Start) -> None:
    """The worker does not call a GPU in `skip`, which therefore cannot crash it."""
    worker = start()
    worker.ask(Driver(gpus=[Gpu(A), Gpu(B)], crash={("*", 0)}), skip=(0,))
    assert isinstance(worker.answer(), wire.DriverMessage)
    answer = worker.answer()
    assert isinstance(answer, wire.GpuMessage)
    assert answer.gpu.index == 1


# --- the library ------------------------------------------------------------------------------------------------------


def test_room_for_texts_is_enough() -> None:
    """No text that gpumap asks for is longer than its buffer, by NVIDIA's own sizes."""
    assert (
        max(
            pynvml.NVML_DEVICE_UUID_V2_BUFFER_SIZE,
            pynvml.NVML_DEVICE_NAME_V2_BUFFER_SIZE,
            pynvml.NVML_DEVICE_VBIOS_VERSION_BUFFER_SIZE,
            pynvml.NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE,
            pynvml.NVML_SYSTEM_NVML_VERSION_BUFFER_SIZE,
        )
        <= library.TEXT_BYTES
    )


def test_the_functions_that_are_called_are_in_the_library() -> None:
    """Each name of a function is one of the stand-in's, so that no misspelt one passes for an old driver's gap."""
    modules = Path(library.__file__).parent.glob("*.py")
    named = {name for module in modules for name in re.findall(r'"(nvml[A-Z]\w*)"', module.read_text())}
    lists = {name for name in named if name.endswith("RunningProcesses")}  # `Lists` adds the version
    assert len(lists) == 3
    assert (named - lists) | {SAMPLES_OLD, SAMPLES_NEW} | {
        f"{name}{suffix}" for name in lists for suffix in ("_v2", "_v3")
    } <= standin.FUNCTIONS


def test_every_code_of_nvml_has_a_reason() -> None:
    """A code that nvidia-ml-py names has a word of gpumap's for labels and messages."""
    codes_of_nvidia = {code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    assert {code for code in codes_of_nvidia if wire.word(code) == f"code_{code}"} == set()


@pytest.mark.parametrize("hung", ["nvmlInitWithFlags", "nvmlDeviceGetMemoryInfo_v2"])
def test_the_worker_ends_with_its_stdin(start: Start, hung: str) -> None:
    """Whoever started it being gone, it ends at once, also while a call hangs."""
    worker = start()
    worker.ask(Driver(gpus=[Gpu(A)], delay={(hung, "*"): float("inf")}))
    if hung == "nvmlInitWithFlags":
        assert worker.answer(0.5) is None
    else:
        assert isinstance(worker.answer(), wire.DriverMessage)
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(PATIENCE_SECONDS) == 0
    worker.process.stdin = None


# --- the words --------------------------------------------------------------------------------------------------------


def test_a_reading_survives_the_wire() -> None:
    """What is decoded equals what was encoded, on one line: a reading with every value, and one without."""
    whole = gpu(0).reading
    assert whole is not None
    full = structs.replace(
        whole, model='of "a"\n\u2028', instances=instances(gpu(1)), refusals={"nvmlDeviceGetUUID": 999}
    )
    for reading in (full, GpuReading(0, uuid=Uuid(A), fault="lost", stuck_seconds=1.5)):
        line = wire.encode(wire.GpuMessage(7, reading))
        assert line.count(b"\n") == 1
        assert wire.decode(line) == wire.GpuMessage(7, reading)


def test_a_culprit_is_left_out_for_longer_each_time() -> None:
    """1, 2, 4 … 64 reads, as long as it crashes whenever it is asked."""
    suspects = CrashSuspects()
    suspects.crashed([0, 1], last_gpus=())  # both at the same time: each is asked last
    pauses: list[int] = []
    left_out = 0
    while len(pauses) < 9:
        last, skip = suspects.plan()
        left_out += 1 in skip
        if 1 in last:
            pauses.append(left_out)
            left_out = 0
            suspects.crashed([1], last)
        suspects.answered(0)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, LONGEST_PAUSE_READS, LONGEST_PAUSE_READS]


def test_a_suspect_that_answers_is_cleared_by_and_by() -> None:
    """Each answer halves the pause that its next crash would cost, and the last one clears it."""
    suspects = CrashSuspects()
    suspects.crashed([3], last_gpus=())
    assert suspects.plan() == ((), (3,))
    for expected in ((3,), (3,), ()):
        assert suspects.plan() == (expected, ())
        suspects.answered(3)
