"""What happens to GPUs and to their driver while gpumap runs: lost, reset, bound, unbound, unloaded, replaced."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumap.agent.join.inventory import take_inventory
from gpumap.agent.join.needs_restart import LostDriverMemory, find_lost_driver
from gpumap.agent.metrics import GROUPS
from gpumap.agent.nvml_worker.driver import ReinitBackoff
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.model.observations import Complaint, Failed, Moment, NvmlReading, Observed
from gpumap.model.readings import DeviceMemory, GpuReading, Uuid
from tests import standin
from tests.agent import IMPATIENT_GPUMAP, PATIENCE_SECONDS, serve
from tests.machine import GIB, Node, gpu_uuid
from tests.standin import Code, Driver, Gpu
from tests.worker import Start, Worker
from tests.worker import worker_command as changed_worker

A, B, C = (Uuid(f"GPU-00000000-0000-0000-0000-00000000000{letter}") for letter in "abc")
CARD, OTHER = gpu_uuid(1), gpu_uuid(2)
USED = "gpumap_container_gpu_memory_used_bytes"


# --- one GPU ----------------------------------------------------------------------------------------------------------


def test_a_lost_gpu_is_looked_for_now_and_then(start: Start, tmp_path: Path) -> None:
    """NVML is initialised again now and then while a GPU is lost, and not while all are well."""
    calls = tmp_path / "calls"
    worker = start(changed={"read_scheduler.REINIT_SECONDS": 0.5}, STANDIN_CALLS=str(calls))
    driver = Driver(gpus=[Gpu(A), Gpu(B)])
    begun = time.monotonic()
    while time.monotonic() < begun + 0.6:
        worker.read(driver)
    assert not calls.exists(), "NVML was shut down for no reason"
    driver.fail["*", 0] = Code.GPU_IS_LOST
    begun = time.monotonic()
    while (seconds := time.monotonic() - begun) < 1.2:
        gpus = worker.read(driver).gpus
        assert [gpus[index].fault for index in (0, 1)] == ["lost", None]
        assert gpus[0].uuid == A
    assert 1 <= standin.read_calls(calls)["nvmlShutdown"] <= 1 + seconds / 0.5


def test_looks_are_farther_and_farther_apart() -> None:
    """After 1, 2, 4, … 64 minutes, and from the beginning when others are lost, or all were well."""
    again = ReinitBackoff(60.0)
    looks = [minute for minute in range(400) if again.is_due(frozenset({0}), 60.0 * minute)]
    apart = [later - earlier for earlier, later in itertools.pairwise([0, *looks])]
    assert apart == [1, 2, 4, 8, 16, 32] + [64] * 5
    for lost in (frozenset({0, 1}), frozenset({1}), frozenset[int](), frozenset({1})):
        assert [again.is_due(lost, 30000.0 + seconds) for seconds in (0, 59, 60)] == [False, False, bool(lost)]


def test_lost_gpus_are_not_searched_while_another_gpu_hangs(start: Start, tmp_path: Path) -> None:
    """A shutdown may wait for ever for a call that hangs."""
    calls = tmp_path / "calls"
    worker = start(changed={"read_scheduler.REINIT_SECONDS": 0.0}, STANDIN_CALLS=str(calls))
    driver = Driver(gpus=[Gpu(A), Gpu(B), Gpu(C)], fail={("*", 0): Code.RESET_REQUIRED})
    driver.delay["nvmlDeviceGetMemoryInfo_v2", 1] = float("inf")
    for _ in range(3):
        gpus = worker.read(driver, hung=1).gpus
        assert [gpus[index].fault for index in (0, 2)] == ["reset_required", None]
    assert not calls.exists()


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
@pytest.mark.parametrize("call", ["nvmlEventSetFree", "nvmlGpmSampleFree", "nvmlShutdown"])
async def test_a_hang_during_the_release_costs_no_reading(
    tmp_path: Path, library: Path, call: str, *, release: bool
) -> None:
    """The worker ends itself, another one answers in the same read, and there is no complaint."""
    state = tmp_path / "state"
    changed = {"read_scheduler.REINIT_SECONDS": 0.1, "read_scheduler.CLOSE_PART": 0.005}
    command = ["env", f"STANDIN_STATE={state}", *changed_worker(library, changed)]
    source = NvmlSource(command, ("health", "gpm"), release=release)
    driver = Driver(gpus=[Gpu(A), Gpu(B, gpm=standin.Gpm())], fail={("*", 0): Code.GPU_IS_LOST})
    driver.delay[call, "*"] = float("inf")
    driver.write(state)
    workers: set[int] = set()
    deadline = time.monotonic() + PATIENCE_SECONDS
    never_called = release and call == "nvmlEventSetFree"  # who lets go after each read registers for nothing
    try:
        while len(workers) < (1 if never_called else 3):
            assert time.monotonic() < deadline, "the worker does not end itself"
            answer = await source.read(1.0, PATIENCE_SECONDS)
            workers |= set(children())
            assert [gpu.fault for gpu in answer.value.gpus] == ["lost", None]
            assert {complaint.reason for complaint in answer.complaints} == {"lost"}
            await asyncio.sleep(0.05)
    finally:
        await source.close()


# --- GPUs and drivers that come and go --------------------------------------------------------------------------------


def test_a_gpu_that_is_bound_or_unbound_is_noticed(start: Start, tmp_path: Path) -> None:
    """NVML is initialised again as soon as the kernel's driver has other devices."""
    calls, bound = tmp_path / "calls", tmp_path / "bound"
    bound.mkdir()
    for name in ("bind", "module", "0000:3b:00.0"):
        (bound / name).touch()
    worker = start(changed={"driver.BOUND": str(bound)}, STANDIN_CALLS=str(calls))
    driver = Driver(gpus=[Gpu(A)])
    for _ in range(3):
        worker.read(driver)
    assert not calls.exists()
    (bound / "0000:3c:00.0").touch()
    driver.gpus.append(Gpu(B))
    assert sorted(reading.uuid or "" for reading in worker.read(driver).gpus.values()) == [A, B]
    worker.read()
    assert standin.read_calls(calls)["nvmlShutdown"] == 1
    (bound / "0000:3b:00.0").unlink()
    driver.gpus.pop(0)
    assert [reading.uuid for reading in worker.read(driver).gpus.values()] == [B]
    worker.read()
    assert standin.read_calls(calls)["nvmlShutdown"] == 2


def test_a_gpu_that_answers_is_never_a_lost_one() -> None:
    """After a driver's return an index may be another GPU's."""
    before = take_inventory(NvmlReading("", "", "", (GpuReading(0, uuid=A), GpuReading(1, uuid=B))), 1.0, (), 0)
    after = NvmlReading("", "", "", (GpuReading(0, uuid=A, fault="lost"), GpuReading(1, uuid=A)))
    inventory = take_inventory(after, 2.0, before.known, before.count)
    assert [(gpu.uuid, gpu.index, gpu.fault) for gpu in inventory.gpus] == [(A, 1, None)]
    assert [(gpu.index, gpu.fault) for gpu in inventory.nameless] == [(0, "lost")]


def test_a_lost_gpu_that_reports_its_uuid_keeps_what_is_known_of_it() -> None:
    """Its name, its leaf and the time of its last answer, also at another index."""
    memory = DeviceMemory(80 * GIB, 0, 80 * GIB, 0)
    first = NvmlReading("", "", "", (GpuReading(0, uuid=A, model="NVIDIA Test", memory=memory),))
    before = take_inventory(first, 1.0, (), 0)
    lost = NvmlReading("", "", "", (GpuReading(1, uuid=A, fault="lost"),))
    after = take_inventory(lost, 2.0, before.known, before.count)
    assert after.known == tuple(replace(one, index=1) for one in before.known)
    assert [(gpu.uuid, gpu.index, gpu.fault, gpu.last_success) for gpu in after.gpus] == [(A, 1, "lost", 1.0)]
    nameless = take_inventory(NvmlReading("", "", "", (GpuReading(0),)), 2.0, before.known, before.count)
    assert [(gpu.uuid, gpu.fault, gpu.reading) for gpu in nameless.gpus] == [(A, "unknown", None)]


def test_nothing_leaks_while_the_driver_comes_and_goes(start: Start, tmp_path: Path) -> None:
    """Descriptors and threads do not grow; each initialisation, sample and event set has its end."""
    calls = tmp_path / "calls"
    # A thread that is slow, as on a busy machine, is none that hangs: nothing takes its place.
    changed = {"read_scheduler.REINIT_SECONDS": 0.0, "read_scheduler.PATIENCE_SECONDS": 10.0}
    changed |= {"listener.HUNG_SECONDS": 10.0}
    worker = start(changed=changed, groups=tuple(GROUPS), STANDIN_CALLS=str(calls))
    cards = [Gpu(uuid, gpm=standin.Gpm()) for uuid in (A, B, C)]
    seen, turns = [], 10
    for turn in range(turns):
        worker.read(Driver(gpus=cards))
        worker.read(Driver(gpus=cards, fail={("*", turn % 3): Code.GPU_IS_LOST}))
        worker.read(Driver(gpus=cards[:2], fail={("*", 0): Code.RESET_REQUIRED}))
        worker.refusal(Driver(init_code=Code.DRIVER_NOT_LOADED))  # of the look for the GPU that needs a reset
        worker.refusal()
        worker.read(Driver(gpus=cards[::-1]))
        worker.refusal(Driver(fail={("nvmlDeviceGetCount_v2", "*"): Code.UNKNOWN}))  # which makes it shut down
        seen.append((descriptors(worker), threads(worker)))
    open_files, running = zip(*seen[2:], strict=True)
    # The thread of a shutdown may still be ending.
    assert len(set(open_files)) == 1, seen
    assert max(running) - min(running) <= 1, seen
    counted = standin.read_calls(calls)
    refused = 2 * turns
    assert counted["nvmlInitWithFlags"] == counted["nvmlShutdown"] + refused
    for begin, end in (("nvmlGpmSampleAlloc", "nvmlGpmSampleFree"), ("nvmlEventSetCreate", "nvmlEventSetFree")):
        assert counted[begin] == counted[end] > 0


def children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def descriptors(worker: Worker) -> int:
    return len(os.listdir(f"/proc/{worker.process.pid}/fd"))


def threads(worker: Worker) -> int:
    return len(os.listdir(f"/proc/{worker.process.pid}/task"))


# --- a driver that is lost for good -----------------------------------------------------------------------------------


MISMATCH, UNKNOWN = "driver_version_mismatch", "unknown"
ANSWERED = Observed(NvmlReading("550.54.15", "12.4", "12.550.54.15", ()), Moment(0.0, 0.0), 0.1)


def lost_after(*said: str, interval: float = 10.0) -> list[bool]:
    """Whether NVML is lost at each collection, in which it says these: nothing where it answers, else why not."""
    memory, found = LostDriverMemory(), []
    for number, reason in enumerate(said):
        at = Moment(number * interval, 1e9 + number * interval)
        answer = Failed(at, 0.1, (Complaint(reason, "nvmlInitWithFlags said so"),)) if reason else ANSWERED
        memory, lost = find_lost_driver(memory, answer, at, 30.0)
        found.append("restarting to get" in lost)
    return found


@pytest.mark.parametrize("reason", [MISMATCH, UNKNOWN])
def test_a_driver_is_lost_by_and_by(reason: str) -> None:
    """It must stay so for 30 s and three collections; then it is reported, from then on, until NVML answers."""
    assert lost_after("", *[reason] * 5, "", reason) == [False, False, False, False, True, True, False, False]
    assert lost_after("", *[reason] * 4, interval=40.0) == [False, False, False, True, True]
    late = "deadline_exceeded"
    assert lost_after("", reason, late, reason, late, late, reason) == [False] * 6 + [True], "a late read says nothing"


@pytest.mark.parametrize(
    "said",
    [
        [MISMATCH] * 20,
        [UNKNOWN] * 20,
        ["", *["driver_not_loaded"] * 20],
        ["", *["library_not_found"] * 20],
        ["", *["deadline_exceeded"] * 20],
        ["", *[MISMATCH, "", MISMATCH, MISMATCH] * 5],
        ["", *[MISMATCH, UNKNOWN] * 10],
        ["", *[MISMATCH, "driver_not_loaded"] * 10],
        ["", *[MISMATCH, "deadline_exceeded", ""] * 10],
    ],
    ids=lambda said: " ".join(dict.fromkeys(word or "answers" for word in said)),
)
def test_what_a_restart_would_not_help_is_not_lost(said: list[str]) -> None:
    """Not where NVML has never answered, nor for what passes, or is wrong with the node itself."""
    assert not any(lost_after(*said))


def test_a_failure_without_a_reason_begins_again() -> None:
    """A read that failed without a complaint is no evidence; of several complaints the last one counts."""
    at = Moment(0.0, 1e9)
    answered, _ = find_lost_driver(LostDriverMemory(), ANSWERED, at, 30.0)
    mismatch = Complaint(MISMATCH, "detail")
    failing, _ = find_lost_driver(answered, Failed(at, 0.1, (Complaint("unreadable", ""), mismatch)), at, 30.0)
    assert (failing.has_answered, failing.reason, failing.collections) == (True, MISMATCH, 1)
    assert find_lost_driver(failing, Failed(at, 0.1, ()), at, 30.0) == (answered, "")


@given(st.lists(st.sampled_from(["", MISMATCH, UNKNOWN, "driver_not_loaded"]), max_size=20))
def test_one_restart_never_leads_to_the_next(reasons: list[str]) -> None:
    """A service that restarts and sees the same again does not end again. It never ends if NVML never answered."""
    for number, lost in enumerate(lost_after(*reasons)):
        assert not lost or "" in reasons[:number]
        assert not lost or not any(lost_after(*[reasons[number]] * 12))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (Code.LIB_RM_VERSION_MISMATCH, "the driver has changed, and the library in this container does not match it"),
        (Code.UNKNOWN, "NVML answered before and now fails for an unknown reason. This container may have lost its"),
    ],
)
async def test_the_service_ends_where_the_driver_is_lost(node: Node, code: Code, why: str) -> None:
    """One line, and exit code 1: the kubelet makes a container that has the new library, or the device nodes."""
    async with serve(node, program=IMPATIENT_GPUMAP) as agent:
        await agent.later(1)
        node.driver.fail["nvmlDeviceGetCount_v2", "*"] = Code.UNINITIALIZED
        node.driver.init_code = code
        node.update_driver()
        exit_code, log = await agent.ended_itself()
    assert exit_code == 1
    last = log.splitlines()[-1]
    assert last.startswith(f"gpumap: {why}")
    assert f"nvmlInitWithFlags said {int(code)} " in last


@pytest.mark.parametrize("code", [Code.LIB_RM_VERSION_MISMATCH, Code.UNKNOWN, Code.DRIVER_NOT_LOADED])
async def test_a_driver_that_never_answered_ends_no_service(node: Node, code: Code) -> None:
    """A restart would not help: the pod must not crash again and again on such a node."""
    node.driver.init_code = code
    node.update_driver()
    async with serve(node, program=IMPATIENT_GPUMAP) as agent:
        await agent.later(1)
        await asyncio.sleep(2.0)
        assert not agent.ended
