"""Release of the driver: by the worker between two reads, by the service on a signal, and what hangs in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from msgspec import structs

from gpumap.agent.collect import Collector, Sources
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.model.observations import KubeletAnswer, NvmlReading, PodIdentity, SourceAnswer, SourceError
from gpumap.model.readings import Listening, Uuid
from gpumap.model.snapshot import Snapshot
from tests import standin
from tests.agent import PATIENCE_SECONDS, Agent, gone, serve, until
from tests.demo_process import GPUMAP, environment
from tests.machine import Node, gpu_uuid
from tests.nodes import RULES
from tests.standin import Driver, Gpu
from tests.test_push import NoProcfs
from tests.worker import Start, Worker, worker_command

A, B, C = (f"GPU-00000000-0000-0000-0000-00000000000{letter}" for letter in "abc")


@pytest.fixture(name="device")
def make_device(tmp_path: Path) -> Path:
    """What the driver's library has open while it is initialised."""
    device = tmp_path / "dev" / "nvidia0"
    device.parent.mkdir()
    device.touch()
    return device


def opened(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:
            pass  # it was closed meanwhile
    return found


def wait(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


# --- the worker -------------------------------------------------------------------------------------------------------


def holds(worker: Worker, device: Path) -> bool:
    return str(device) in opened(worker.process.pid)


def test_a_worker_without_the_flag_keeps_the_driver(start: Start, device: Path) -> None:
    """NVML stays initialised from one read to the next."""
    worker = start(changed={"driver.DEVICES": str(device.parent)})
    worker.read(Driver(gpus=[Gpu(A)], holds=device))
    worker.read()
    assert holds(worker, device)


def test_the_driver_is_released_after_each_read(start: Start, device: Path, tmp_path: Path) -> None:
    """Between two reads the worker has none of the driver's devices open, and the same process answers."""
    calls = tmp_path / "calls"
    worker = start(changed={"driver.DEVICES": str(device.parent)}, STANDIN_CALLS=str(calls))
    worker.release = True
    driver = Driver(gpus=[Gpu(A), Gpu(B)], holds=device)
    readings, descriptors = [], []
    for _ in range(4):
        readings.append(dict(sorted(worker.read(driver).gpus.items())))
        wait(lambda: not holds(worker, device), "the device stays open")
        wait(lambda: len(readings) == standin.read_calls(calls)["nvmlShutdown"], "it is not closed")
        descriptors.append(len(opened(worker.process.pid)))
    answer = [[structs.replace(gpu, sampled_seconds=None) for gpu in gpus.values()] for gpus in readings]
    assert all(gpus == answer[0] for gpus in answer)
    assert standin.read_calls(calls)["nvmlInitWithFlags"] == 4
    wait(lambda: len(opened(worker.process.pid)) <= descriptors[0], "descriptors are left")  # it may look at its own
    assert worker.process.poll() is None


def test_a_library_that_leaves_a_device_open_costs_the_process(start: Start, device: Path) -> None:
    """What nvmlShutdown did not close is closed by the end of the worker, once its answers are written."""
    worker = start(changed={"driver.DEVICES": str(device.parent)})
    worker.release = True
    answers = worker.read(Driver(gpus=[Gpu(A), Gpu(B)], leaks=device))
    assert sorted(answers.gpus) == [0, 1]
    assert worker.process.wait(PATIENCE_SECONDS) == 0


def test_the_end_of_the_worker_releases_a_hanging_gpu(start: Start, device: Path) -> None:
    """A shutdown would hang too: after a time the worker ends itself; the other GPUs' answers remain."""
    changed = {"driver.DEVICES": str(device.parent), "read_scheduler.RELEASE_SECONDS": 0.3}
    worker = start(changed=changed)
    worker.release = True
    driver = Driver(gpus=[Gpu(A), Gpu(B)], holds=device, delay={("nvmlDeviceGetMemoryInfo_v2", 0): float("inf")})
    assert list(worker.read(driver, hung=1).gpus) == [1]
    assert worker.process.wait(PATIENCE_SECONDS) == 0


def test_a_slow_gpu_is_waited_for(start: Start, device: Path) -> None:
    """Without persistence mode GPUs take seconds: the worker shuts NVML down after the last answer, not before."""
    worker = start(changed={"driver.DEVICES": str(device.parent)})
    worker.release = True
    answers = worker.read(Driver(gpus=[Gpu(A), Gpu(B)], holds=device, delay={("nvmlDeviceGetMemoryInfo_v2", 0): 0.4}))
    assert sorted(answers.gpus) == [0, 1]
    wait(lambda: not holds(worker, device), "the device stays open")
    assert worker.process.poll() is None


# --- the source -------------------------------------------------------------------------------------------------------


@pytest.fixture(name="make_source")
async def make_sources(tmp_path: Path, library: Path, device: Path) -> AsyncIterator[Callable[..., NvmlSource]]:
    sources = []

    def make(replace_after_seconds: float = 30.0) -> NvmlSource:
        command = worker_command(library, {"driver.DEVICES": str(device.parent)})
        command = ["env", f"STANDIN_STATE={tmp_path / 'state'}", *command]
        sources.append(NvmlSource(command, release=True, replace_after_seconds=replace_after_seconds))
        return sources[-1]

    yield make
    for source in sources:
        assert await source.close()


def faults(answer: SourceAnswer[NvmlReading]) -> list[str | None]:
    return [gpu.fault for gpu in answer.value.gpus]


async def test_a_worker_that_ended_itself_is_replaced_without_a_complaint(
    make_source: Callable[..., NvmlSource], tmp_path: Path, device: Path
) -> None:
    """Each read has a worker of its own if the library leaves devices open, and there is no complaint."""
    source = make_source()
    Driver(gpus=[Gpu(A), Gpu(B)], leaks=device).write(tmp_path / "state")
    for _ in range(4):
        answer = await source.read(1.0, PATIENCE_SECONDS)
        assert answer.complaints == ()
        assert faults(answer) == [None, None]


async def test_a_gpu_without_events_has_no_blind_time(tmp_path: Path, library: Path) -> None:
    """Without a listener, blind time is only of GPUs with events: no event of the others is missed."""
    Driver(gpus=[Gpu(A, event_types=None), Gpu(B), Gpu(C, event_types=1)]).write(tmp_path / "state")
    command = ["env", f"STANDIN_STATE={tmp_path / 'state'}", *worker_command(library)]
    source = NvmlSource(command, ("health",), release=True)
    try:
        for _ in range(2):
            answer = await source.read(1.0, PATIENCE_SECONDS)
            assert answer.value.listening == (Listening(Uuid(B), 0.0, 0.0),)
            assert answer.complaints == ()
    finally:
        await source.close()


async def test_a_hung_gpu_is_skipped_while_the_driver_is_released(
    make_source: Callable[..., NvmlSource], tmp_path: Path, device: Path
) -> None:
    """The worker that hangs is ended, the next ones read the others and let go; later the GPU is asked again."""
    state = tmp_path / "state"
    source = make_source(replace_after_seconds=0.5)
    driver = Driver(gpus=[Gpu(A), Gpu(B)], holds=device)
    driver.delay = {("nvmlDeviceGetMemoryInfo_v2", 0): float("inf")}
    driver.write(state)
    timeout_seconds = 1.5  # enough for a new worker on a busy machine
    rested = False
    deadline = time.monotonic() + 3 * PATIENCE_SECONDS
    while not rested:
        assert time.monotonic() < deadline
        begun = time.monotonic()
        answer = await source.read(1.0, timeout_seconds)
        assert faults(answer)[0] == "hung"
        rested = time.monotonic() - begun < timeout_seconds - 0.2 and faults(answer)[1] is None and not held(device)
    assert (answer.value.gpus[0].stuck_seconds or 0.0) > 0.3
    driver.delay = {}
    driver.write(state)
    while faults(answer) != [None, None]:
        assert time.monotonic() < deadline
        answer = await source.read(1.0, timeout_seconds)
        await asyncio.sleep(0.05)


def held(device: Path) -> bool:
    """Whether any process has it open."""
    return any(_has_open(pid, str(device)) for pid in os.listdir("/proc") if pid.isdecimal())


def _has_open(pid: str, path: str) -> bool:
    try:
        return path in opened(int(pid))
    except OSError:
        return False


async def test_a_driver_that_hangs_is_left_alone_too(
    make_source: Callable[..., NvmlSource], tmp_path: Path, device: Path
) -> None:
    """While NVML as a whole hangs there is a worker only now and then: processes that hang may not die."""
    state = tmp_path / "state"
    source = make_source(replace_after_seconds=0.3)
    driver = Driver(gpus=[Gpu(A)], holds=device, delay={("nvmlInitWithFlags", "*"): float("inf")})
    driver.write(state)
    deadline = time.monotonic() + PATIENCE_SECONDS
    quick = False
    while not quick:
        assert time.monotonic() < deadline
        begun = time.monotonic()
        with pytest.raises(SourceError, match="NVML has not answered"):
            await source.read(1.0, 0.2)
        quick = time.monotonic() - begun < 0.1
    driver.delay = {}
    driver.write(state)
    deadline = time.monotonic() + PATIENCE_SECONDS
    answered: list[str | None] = []
    while answered != [None]:
        assert time.monotonic() < deadline
        with contextlib.suppress(SourceError):  # no further hung reads: each would double the pause
            answered = faults(await source.read(1.0, PATIENCE_SECONDS))
        await asyncio.sleep(0.05)


# --- the service ------------------------------------------------------------------------------------------------------


def released(agent: Agent) -> list[str]:
    return re.findall(r"driver released until=\S+", agent.log)


async def signalled(agent: Agent, times: int = 1) -> None:
    """Signal it to release the driver, and return when its log says so."""
    os.kill(agent.pid, signal.SIGUSR1)

    async def said() -> list[str]:
        return released(agent)

    await until(said, lambda lines: len(lines) >= times, "it does not let go")


async def test_a_signal_releases_the_driver_for_an_interval(node: Node) -> None:
    """The worker is gone, the page serves what it has, and nothing collects before the interval is over."""
    async with serve(node, "--interval", "3s", program=[str(GPUMAP)]) as agent:
        await agent.until(lambda page: page.up("nvml"), "it does not collect")
        comm = await asyncio.to_thread(Path(f"/proc/{agent.pid}/comm").read_text)
        assert comm == "gpumap\n", "pkill -x gpumap would not find it"
        workers = agent.children()
        assert len(workers) == 1
        begun = time.monotonic()
        await signalled(agent)
        await gone(*workers)
        node.admit("pushed", main=[gpu_uuid(1)])  # news, which has to wait
        collections = (await agent.page()).collections
        while time.monotonic() < begun + 2.0:
            page = await agent.page()
            assert page.collections == collections
            assert page.value("gpumap_gpu_up", gpu_uuid=gpu_uuid(1)) == 1
            assert agent.children() == {}
            await asyncio.sleep(0.1)
        page = await agent.until(lambda page: page.collections > collections, "it does not collect again")
        assert time.monotonic() >= begun + 3.0
        assert page.value("gpumap_gpu_up", gpu_uuid=gpu_uuid(1)) == 1
        assert len(agent.children()) == 1
        assert len(released(agent)) == 1


class _SlowNvml:
    """Its reads take until `gate` is set; it does not end."""

    def __init__(self) -> None:
        self.reads = self.closed = 0
        self.gate = asyncio.Event()
        self.snapshots: list[Snapshot] = []

    async def read(self, interval_seconds: float, timeout_seconds: float) -> SourceAnswer[NvmlReading]:
        self.reads += 1
        await self.gate.wait()
        raise SourceError("driver_not_loaded", "this is a test")

    async def close(self) -> bool:
        self.closed += 1
        return False


class _NoKubelet:
    async def read(self, timeout_seconds: float) -> SourceAnswer[KubeletAnswer]:
        raise SourceError("unavailable", "this is a test")

    async def wait_until_back(self) -> None:
        """Return at once: a kubelet that is back is news."""


def _no_identity() -> SourceAnswer[PodIdentity]:
    raise SourceError("pod_logs_missing", "this is a test")


async def test_a_release_during_a_collection_waits_for_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """What is being read is published first; and a worker that survives its end is said to hold on."""
    nvml, rules = _SlowNvml(), RULES
    sources = Sources(nvml, NoProcfs(), _no_identity, _NoKubelet())
    loop = Collector(sources, rules, interval_seconds=3600.0, publish=nvml.snapshots.append)
    task = asyncio.create_task(loop.run())
    try:
        await _until(lambda: nvml.reads == 1)
        loop.release()
        await asyncio.sleep(0.1)
        assert nvml.closed == 0
        nvml.gate.set()
        await _until(lambda: nvml.closed == 1)
        assert len(nvml.snapshots) == 1
        await asyncio.sleep(0.3)  # in which a kubelet that is back would be asked
        assert nvml.reads == 1
        assert "driver not released" in caplog.text
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loop.close()


async def _until(holds: Callable[[], bool]) -> None:
    async def ask() -> bool:
        return holds()

    await until(ask, bool, "it does not come to that")


async def test_another_signal_begins_the_interval_again(node: Node) -> None:
    """Who signals again in time keeps gpumap away from the driver for as long as it takes."""
    async with serve(node, "--interval", "2s") as agent:
        await agent.until(lambda page: page.up("nvml"), "it does not collect")
        for times in range(1, 5):
            await signalled(agent, times)
            await asyncio.sleep(0.7)
            assert agent.children() == {}
        page = await agent.page()
        await agent.until(lambda later: later.collections > page.collections, "it does not collect again")


async def test_sigterm_ends_it_while_the_driver_is_released(node: Node) -> None:
    async with serve(node, "--interval", "60s") as agent:
        await agent.until(lambda page: page.up("nvml"), "it does not collect")
        await signalled(agent)
        assert await agent.stop() == 0


async def test_the_worker_ignores_the_signal(node: Node) -> None:
    """A signal to all processes that have gpumap in their command line is one for the service."""
    async with serve(node) as agent:
        await agent.until(lambda page: page.up("nvml"), "it does not collect")
        (worker,) = agent.children()
        os.kill(worker, signal.SIGUSR1)
        await agent.later(3)
        assert list(agent.children()) == [worker]


async def test_the_flag_releases_the_driver_after_each_collection(node: Node, device: Path) -> None:
    """With --nvml-release nothing is open between two collections, and the worker stays the same."""
    node.driver.holds = device
    node.driver.gpus[0].gpm = standin.Gpm()
    node.update_driver()
    async with serve(node, "--nvml-release", "--interval", "500ms") as agent:
        await agent.until(lambda page: page.up("nvml"), "it does not collect")
        (worker,) = agent.children()
        for _ in range(3):
            page = await agent.later(1)
            assert page.value("gpumap_gpu_up", gpu_uuid=gpu_uuid(0)) == 1
            await until(_held_by(worker, device), lambda is_held: not is_held, "the device stays open")
        assert list(agent.children()) == [worker]
        assert page.value("gpumap_source_errors_total", source="nvml", reason="worker_crashed") == 0
        assert not page.capable("xid_events")
        blind = page.value("gpumap_xid_blind_seconds_total", gpu_uuid=gpu_uuid(0))
        assert blind is not None
        later = await agent.later(1)
        assert (later.value("gpumap_xid_blind_seconds_total", gpu_uuid=gpu_uuid(0)) or 0) > blind, "nobody listens"
        assert not page.capable("gpm")


def _held_by(pid: int, device: Path) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        return str(device) in opened(pid)

    return ask


async def test_a_command_that_only_looks_is_not_ended_by_the_signal(node: Node) -> None:
    variables = environment(**standin.environment(node.library, node.state))
    flags = ["map", "--watch", "--interval", "200ms", *node.flags]
    process = await asyncio.create_subprocess_exec(GPUMAP, *flags, stdout=subprocess.PIPE, env=variables)
    assert process.stdout is not None
    try:
        await process.stdout.readuntil(b"DEVICE")
        process.send_signal(signal.SIGUSR1)
        for _ in range(2):
            await process.stdout.readuntil(b"DEVICE")
        assert process.returncode is None
    finally:
        process.kill()
        await process.wait()
