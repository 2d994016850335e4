"""The NVML source, over small children that misbehave in one way each, and over the real worker with the stand-in."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpumap.agent.sources import nvml_process
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.agent.sources.nvml_state import SampleRing
from gpumap.model.observations import Complaint, NvmlReading, SourceAnswer, SourceError
from gpumap.model.readings import GpuReading

A, B, C = (f"GPU-00000000-0000-0000-0000-00000000000{letter}" for letter in "abc")
PATIENCE_SECONDS = 60.0

CHILD = """
import json, os, signal, sys, time

def say(**answer):
    os.write(1, json.dumps(answer).encode() + b"\\n")

def driver(read, count=2, busy=()):
    versions = dict(driver_version=str(os.getpid()), cuda_version="12.4", nvml_version="")  # the pid is for the tests
    say(kind="driver", read=read, **versions, gpus=count, busy=busy)

def gpu(read, *indices, **more):
    for index in indices:
        say(kind="gpu", read=read, gpu={"index": index, "uuid": f"GPU-{index}", **more})

def hear(code):
    now = time.monotonic()
    say(kind="xid", uuid="GPU-0", code=code, gpu_instance_id=None, compute_instance_id=None, at=now)
    say(kind="listening", periods=[["GPU-0", STARTED, now]])

STARTED = time.monotonic()
is_second = os.path.exists(sys.argv[1])  # a second child of the test

def requests():
    for line in sys.stdin:
        request = json.loads(line)
        with open(sys.argv[1], "a") as log:
            print(line, end="", file=log)
        yield request["read"], request

"""

Start = Callable[..., NvmlSource]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the small children write their requests."""
    return tmp_path / "requests"


@pytest.fixture
async def start(log: Path) -> AsyncIterator[Start]:
    """Makes sources with a child that runs the given lines; each is closed, and has left nothing behind."""
    sources: list[NvmlSource] = []
    before = set(os.listdir("/proc/self/fd"))

    def make(program: str, **options: Any) -> NvmlSource:
        sources.append(NvmlSource([sys.executable, "-S", "-c", CHILD + program, str(log)], **options))
        return sources[-1]

    yield make
    for source in sources:
        await source.close()
    await poll(lambda: len(os.listdir("/proc/self/fd")) <= len(before), "file descriptors were left open")
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("nvml")] == []


async def poll(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise
        await asyncio.sleep(0.005)


async def read(source: NvmlSource, timeout_seconds: float = PATIENCE_SECONDS) -> SourceAnswer[NvmlReading]:
    """A read that must end by its deadline; later only as a busy machine makes it."""
    begun = time.monotonic()
    try:
        return await source.read(1.0, timeout_seconds)
    finally:
        assert time.monotonic() - begun < timeout_seconds + 5.0


async def failure(source: NvmlSource, timeout_seconds: float = PATIENCE_SECONDS) -> Complaint:
    with pytest.raises(SourceError) as caught:
        await read(source, timeout_seconds)
    return caught.value.complaints[-1]


def faults(answer: SourceAnswer[NvmlReading]) -> list[str | None]:
    return [gpu.fault for gpu in answer.value.gpus]


def pid(answer: SourceAnswer[NvmlReading]) -> int:
    return int(answer.value.driver_version)


def requests(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_one_child_answers_all_reads(start: Start, log: Path) -> None:
    """The child is started by the first read and asked again by the next; GPUs come in the order of their indices."""
    source = start("for n, _ in requests(): driver(n); gpu(n, 1, 0)")
    first, second = await read(source), await read(source)
    assert first == second
    assert first.complaints == ()
    assert first.value.gpus == (
        GpuReading(0, uuid=first.value.gpus[0].uuid),
        GpuReading(1, uuid=second.value.gpus[1].uuid),
    )
    request = {"interval_seconds": 1.0, "last": [], "skip": [], "groups": [], "release": False, "hold_seconds": 0.0}
    assert requests(log) == [{"read": n, **request, "deadline_seconds": PATIENCE_SECONDS} for n in (1, 2)]


async def test_faults_and_refusals_are_complaints(start: Start) -> None:
    """A GPU's fault passes through with its complaint; a refusal that two GPUs share is said once."""
    source = start(
        """for n, _ in requests():
            driver(n, 3)
            gpu(n, 0, fault="lost", refusals={"nvmlDeviceGetUUID": 15})
            gpu(n, 1, 2, refusals={"nvmlDeviceGetPowerUsage": 4})"""
    )
    answer = await read(source)
    assert faults(answer) == ["lost", None, None]
    assert answer.complaints == (
        Complaint("lost", "gpu 0 (GPU-0): nvmlDeviceGetUUID said 15 (gpu_is_lost)"),
        Complaint("no_permission", "gpu 1, 2: nvmlDeviceGetPowerUsage said 4 (no_permission)"),
    )


async def test_an_error_is_the_sources_failure(start: Start) -> None:
    """What the library says in place of an answer is raised with its word; the child is asked again."""
    source = start(
        """for n, _ in requests():
            n > 2 or say(kind="error", read=n, code=9, reason="driver_not_loaded", detail="no driver")
            n < 3 or driver(n, 0)"""
    )
    for _ in range(2):
        assert await failure(source) == Complaint("driver_not_loaded", "no driver")
    assert (await read(source)).value.gpus == ()


# --- hangs ------------------------------------------------------------------------------------------------------------


async def test_a_hung_gpu_costs_itself(start: Start) -> None:
    """The read ends at its deadline with the others' answers; later reads do not wait for a GPU that is not asked."""
    source = start("for n, _ in requests(): driver(n, busy=[1] if n > 1 else []); gpu(n, 0)")
    deadline = 3.0  # in which a busy machine has the other GPU's answer
    answer = await read(source, deadline)
    assert faults(answer) == [None, "hung"]
    assert answer.complaints[0].reason == "hung"
    assert answer.value.gpus[1].stuck_seconds >= deadline
    begun = time.monotonic()
    again = await read(source, deadline)
    assert time.monotonic() - begun < deadline
    assert faults(again) == [None, "hung"]
    assert again.value.gpus[1].stuck_seconds > answer.value.gpus[1].stuck_seconds


async def test_a_late_answer_is_not_used_and_ends_the_hang(start: Start) -> None:
    """An answer to an older read says that the GPU lives, and nothing about now."""
    source = start(
        """for n, _ in requests():
            if n == 2: gpu(1, 1, model="old")
            if n == 4: gpu(3, 1, model="old")
            driver(n, busy=[1] if n == 4 else [])
            gpu(n, 0)
            if n == 2 or n > 5: gpu(n, 1)"""
    )
    assert faults(await read(source, 2.0)) == [None, "hung"]  # the program starts meanwhile
    answer = await read(source)
    assert faults(answer) == [None, None]
    assert answer.value.gpus[1].model == ""
    begun = time.monotonic()
    assert faults(await read(source, 0.2)) == [None, "hung"]
    assert faults(await read(source)) == [None, "hung"]  # it was not asked
    await asyncio.sleep(0.3)
    again = await read(source, 0.2)
    assert faults(again) == [None, "hung"]
    assert again.value.gpus[1].stuck_seconds <= time.monotonic() - begun  # a hang of its own
    assert faults(await read(source)) == [None, None]


async def test_samples_are_unknown_after_the_clock_was_set_back_whichever_worker_reads_them(start: Start) -> None:
    """The driver's old samples look new for 72 s. A worker that starts meanwhile cannot know that; the service does."""
    at, wall = 1000.0, 1e9
    source = start(
        """for n, _ in requests():
            driver(n, 1); gpu(n, 0, samples=[[7, 0.5, 0, 0, 0]], sampled_seconds=5.0); os._exit(0)""",
        ring=SampleRing(lambda: at, lambda: wall),
    )

    async def sampled() -> tuple[float | None, float | None]:
        (gpu,) = (await read(source)).value.gpus
        return gpu.samples[0].sm_ratio if gpu.samples else None, gpu.sampled_seconds

    assert await sampled() == (0.5, 5.0)
    wall -= 30
    assert await sampled() == (None, None)
    at, wall = at + 71, wall + 71
    assert await sampled() == (None, None)
    at, wall = at + 2, wall + 2
    assert await sampled() == (0.5, 5.0)


async def test_a_worker_that_stays_stuck_is_replaced_with_growing_patience(start: Start) -> None:
    """The child of a GPU that is stuck for long is killed and started again, each time after twice as long."""
    source = start(
        "for i, (n, _) in enumerate(requests()): driver(n, busy=[1] if i else []); gpu(n, 0)", replace_after_seconds=0.2
    )
    first_seen: dict[int, float] = {}
    begun = time.monotonic()
    while len(first_seen) < 3:
        assert time.monotonic() < begun + PATIENCE_SECONDS, "the worker was not replaced"
        with contextlib.suppress(SourceError):  # a new child may take longer than that
            answer = await read(source, 0.1)
            other, stuck = faults(answer)
            assert stuck == "hung"
            if other is None:  # a busy machine may be late with both
                first_seen.setdefault(pid(answer), time.monotonic())
        await asyncio.sleep(0.01)
    assert answer.value.gpus[1].stuck_seconds > 0.6
    first, second, third = first_seen.values()
    assert second - first > 0.05  # of 0.2 s, less the wait of the first read
    assert third - second > 0.1  # of 0.4 s, less the wait until the second was seen
    await poll(lambda: all(gone(process) for process in list(first_seen)[:-1]), "a replaced worker was left behind")


# --- crashes ----------------------------------------------------------------------------------------------------------


async def test_a_crash_costs_no_other_gpu(start: Start, log: Path) -> None:
    """Answers before the crash remain; another child asks the other GPUs, one by one, in the same read."""
    source = start(
        """for n, request in requests():
            asked = [i for i in range(4) if i not in request["skip"]]
            driver(n, 4)
            for i in sorted(asked, key=lambda i: i in request["last"]):
                if i == 2 and n == 1: os.kill(os.getpid(), signal.SIGSEGV)
                gpu(n, i)"""
    )
    answer = await read(source)
    assert faults(answer) == [None, None, "worker_crashed", None]
    assert answer.complaints == (
        Complaint("worker_crashed", "the worker was killed by SIGSEGV"),
        Complaint("worker_crashed", "gpu 2 crashed the worker; gpumap skips it for a while"),
    )
    assert faults(await read(source)) == [None, None, "worker_crashed", None]
    assert faults(await read(source)) == [None, None, None, None]
    assert [(calls["read"], calls["last"], calls["skip"]) for calls in requests(log)] == [
        (1, [], []),
        (1, [2, 3], [0, 1]),
        (1, [3], [0, 1, 2]),
        (2, [], [2]),
        (3, [2], []),
    ]


async def test_a_gpu_that_crashes_the_worker_is_left_out_for_a_while(start: Start) -> None:
    """The only GPU that had not answered is the culprit: for a while the others are read without it."""
    source = start(
        """for n, request in requests():
            driver(n)
            gpu(n, 0)
            1 in request["skip"] or os.abort()"""
    )
    answer = [await read(source) for _ in range(6)]
    assert all(faults(each) == [None, "worker_crashed"] for each in answer)
    aborted = ["SIGABRT" in each.complaints[0].detail for each in answer]
    assert aborted == [True, False, True, False, False, True]


async def test_a_child_that_dies_before_it_answers_is_a_failure(start: Start) -> None:
    """The failure says how the child ended, and the last that it wrote to stderr."""
    source = start("print('first', file=sys.stderr); sys.exit('no such flag')")
    assert await failure(source) == Complaint("worker_crashed", "the worker exited with 1: no such flag")


async def test_a_child_that_ends_on_purpose_between_two_reads_is_no_fault(start: Start) -> None:
    """It exits with 0, and the next read starts another one."""
    source = start("for n, _ in requests(): driver(n, 1); gpu(n, 0); os.close(1); sys.exit(0)")
    for _ in range(2):
        assert (await read(source)).complaints == ()


async def test_the_end_of_a_child_is_reported_once_the_driver_answers(start: Start, log: Path) -> None:
    """A read that fails for another reason does not lose it."""
    source = start(
        """
ERROR = dict(kind="error", code=9, reason="gone", detail="")
for n, _ in requests(): say(read=n, **ERROR) if n == 2 else (driver(n, 1), gpu(n, 0))"""
    )
    os.kill(pid(await read(source)), signal.SIGKILL)
    assert (await failure(source)).reason == "gone"
    assert [complaint.reason for complaint in (await read(source)).complaints] == ["worker_crashed"]


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/kubepods/pod1/c1\n", "kubepods/pod1/c1/memory.events", "low 0\noom 3\noom_kill {}\n"),
        ("0::/\n", "memory.events", "oom_kill {}\n"),
        ("4:memory:/kubepods/pod1\n0::/\n", "memory/kubepods/pod1/memory.oom_control", "under_oom 0\noom_kill {}\n"),
        ("4:cpu,memory:/kubepods/pod1\n", "memory/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    ],
)
async def test_a_child_that_the_kernel_killed_for_memory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, file: str, text: str
) -> None:
    """By the count of gpumap's own cgroup, version 2 or 1, as the host or a container mounts it."""
    events = tmp_path / "fs" / file
    events.parent.mkdir(parents=True)
    events.write_text(text.format(4))
    (tmp_path / "cgroup").write_text(cgroup)
    monkeypatch.setattr(nvml_process, "OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(nvml_process, "CGROUPS", tmp_path / "fs")
    for kills, reason in ((4, "worker_crashed"), (5, "worker_oom_killed")):
        worker = await nvml_process.Worker.start([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        worker.kill()
        events.write_text(text.format(kills))
        assert (await worker.reason_of_end()).reason == reason
        worker.end()
        await worker.ended()


async def test_a_line_cut_off_by_a_crash_is_a_crash(start: Start) -> None:
    """Half a line at the end of the output is not nonsense, but what a dying child had no time to finish."""
    source = start("""for n, _ in requests(): driver(n, 1); os.write(1, b'{"kind'); os.abort()""")
    assert faults(await read(source)) == ["worker_crashed"]


@pytest.mark.parametrize(
    "line", ["hello", "[]", '{"kind": "gpu", "read": 1}', '{"kind": "gpu", "read": 1, "gpu": {"index": "0"}}', "\\xff"]
)
async def test_nonsense_is_a_failure_and_ends_the_child(start: Start, line: str) -> None:
    """A child that does not keep to the protocol is replaced by the next read."""
    source = start(f"""for n, _ in requests(): driver(n, 1); gpu(n, 0) if n > 1 else os.write(1, b'{line}\\n')""")
    assert (await failure(source)).reason == "protocol"
    assert faults(await read(source)) == [None]


async def test_a_line_without_an_end_is_nonsense(start: Start) -> None:
    source = start("for n, _ in requests(): [os.write(1, b'x' * (1 << 20)) for _ in range(40)]")
    assert (await failure(source)).reason == "protocol"


async def test_a_worker_that_was_started_ahead_answers_the_reads(start: Start, tmp_path: Path) -> None:
    born = tmp_path / "born"
    source = start(f"open({str(born)!r}, 'a').write('x')\nfor n, _ in requests(): driver(n, 1); gpu(n, 0)")
    await source.start()
    await poll(born.exists, "the worker was not started")
    for _ in range(2):
        answer = await source.read(1.0, PATIENCE_SECONDS)
        assert [gpu.uuid for gpu in answer.value.gpus] == ["GPU-0"]
    assert born.read_text() == "x"


# --- ends -------------------------------------------------------------------------------------------------------------


async def test_a_cancelled_read_leaves_the_next_one_right(start: Start) -> None:
    """After a cancellation, the answers to the cancelled read are passed over."""
    source = start("for n, _ in requests(): driver(n, 1); time.sleep(0.2); gpu(n, 0, model=str(n))")
    reading = asyncio.create_task(source.read(1.0, PATIENCE_SECONDS))
    await asyncio.sleep(0.1)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    assert (await read(source)).value.gpus[0].model == "2"


# --- XID events -------------------------------------------------------------------------------------------------------


async def heard(source: NvmlSource, code: int) -> NvmlReading:
    """The reading with this event, which is one of the next."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                reading = (await read(source, 0.3)).value
            except SourceError:
                continue
            if [xid.code for xid in reading.xids] == [code]:
                return reading
            assert reading.xids == ()


async def test_events_between_two_reads_are_reported_by_the_second(start: Start) -> None:
    """With its age and the stretch in which somebody listened; the third has nothing of it."""
    source = start("for n, _ in requests(): driver(n, 1); gpu(n, 0); n == 1 and hear(31)")
    assert (await read(source)).value.xids == ()
    reading = await heard(source, 31)
    assert reading.xids[0][:4] == ("GPU-0", 31, None, None)
    (listening,) = reading.listening
    assert 0.0 < listening.until_seconds <= reading.xids[0].age_seconds + 1e-9
    assert listening.since_seconds > listening.until_seconds
    later = (await read(source)).value
    assert (later.xids, later.listening) == ((), ())


ONLY_SECOND_ANSWERS = """for n, _ in requests():
    if not is_second: {first}
    driver(n, 1); gpu(n, 0)"""


@pytest.mark.parametrize(
    ("program", "options", "fails"),
    [
        ("for n, _ in requests(): driver(n, 1); gpu(n, 0); is_second or (hear(79), sys.exit(1))", {}, None),
        (ONLY_SECOND_ANSWERS.format(first="hear(79); time.sleep(600)"), {"replace_after_seconds": 0.2}, None),
        ("for n, _ in requests(): n > 1 or (hear(79), say(**ERROR)); n < 2 or (driver(n, 1), gpu(n, 0))", {}, "gone"),
        (ONLY_SECOND_ANSWERS.format(first="hear(79); say(nonsense=1); time.sleep(600)"), {}, "protocol"),
    ],
    ids=["it died between two reads", "it hung and was replaced", "NVML failed at first", "it was ended for nonsense"],
)
async def test_the_last_events_of_a_worker_are_received(
    start: Start, program: str, options: dict[str, float], fails: str | None
) -> None:
    """Whatever happens to the worker, the next reading has its events."""
    source = start(f'ERROR = dict(kind="error", read=1, code=9, reason="gone", detail="")\n{program}', **options)
    if fails is not None:
        assert (await failure(source)).reason == fails
    await heard(source, 79)


@pytest.mark.parametrize("times", [0, -1, 1.5])
async def test_a_count_that_is_none_is_nonsense(start: Start, times: float) -> None:
    """A counter can never go back, whatever a worker says."""
    source = start(f'for n, _ in requests(): say(xid=["GPU-0", 31, None, None, 0.0, {times}]); driver(n, 1); gpu(n, 0)')
    assert (await failure(source)).reason == "protocol"
