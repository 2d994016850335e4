"""The proof that no XID event outside the blind time is lost: events all the time, while all that can go wrong does.

Through the worker over the stand-in, the source and the reducer. Each event has a number of its own for its code.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from gpumap.agent.join.inventory import KnownGpu, take_inventory
from gpumap.agent.join.xids import GpuXidMemory, XidMemory, count_xids
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.model.observations import Failed, Moment, NvmlReading, Observed, SourceError
from gpumap.model.readings import Uuid
from tests.standin import Code, Driver, Gpu, Xid
from tests.worker import worker_command

A, B = (Uuid(f"GPU-00000000-0000-0000-0000-00000000000{letter}") for letter in "ab")
READS = 90
CLOCK_SECONDS = 0.005
"""A reading's moment is noted this much later at most than its ages were reckoned from."""


class Fired(NamedTuple):
    """An event, which the driver has had at the latest at `after`, and not before `before`."""

    gpu: Uuid
    code: int
    before: float
    after: float


class Driving:
    """The stand-in's state, which a thread adds events to at random moments."""

    def __init__(self, state: Path) -> None:
        self.fired: list[Fired] = []
        self._state = state
        self._driver = Driver(gpus=[Gpu(A), Gpu(B)])
        self._driver.write(state)
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._fire)
        self._random = random.Random(20)

    def __enter__(self) -> Driving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def fail(self, **codes: Code) -> None:
        """Let these functions fail: `all_of_0` is every call on GPU 0."""
        with self._writing:
            self._driver.fail = {("*", 0) if name == "all_of_0" else (name, "*"): code for name, code in codes.items()}
            self._driver.write(self._state)

    def _fire(self) -> None:
        while not self._over.wait(self._random.expovariate(100)):
            gpu, code = self._random.randrange(2), 1000 + len(self.fired)
            with self._writing:
                self._driver.xids.append(Xid(gpu, code))
                before = time.monotonic()
                self._driver.write(self._state)
                self.fired.append(Fired((A, B)[gpu], code, before, time.monotonic()))


class Counting:
    """Collections only of NVML, reduced, with the stretches in which each GPU was listened to."""

    def __init__(self, source: NvmlSource) -> None:
        self.source = source
        self.memory = XidMemory()
        self.stretches: dict[Uuid, list[tuple[float, float]]] = {A: [], B: []}
        self.first_seen: float | None = None
        self._known: tuple[KnownGpu, ...] = ()

    async def collect(self) -> None:
        observed = await self._observe()
        reading = observed.value if isinstance(observed, Observed) else None
        inventory = take_inventory(reading, 0.0, self._known, 2)
        self._known = inventory.known
        before = self.memory
        self.memory, _, _ = count_xids(
            before, observed, inventory, (), list_current=True, finished=observed.at.monotonic
        )
        for uuid, gpu in before.gpus.items():
            assert self.memory.gpus[uuid].blind_seconds >= gpu.blind_seconds
        if reading is not None:
            self.first_seen = self.first_seen or observed.at.monotonic
            for uuid, since, until in reading.listening:
                self.stretches[uuid].append((observed.at.monotonic - since, observed.at.monotonic - until))

    async def _observe(self) -> Observed[NvmlReading] | Failed:
        try:
            answer = await self.source.read(0.05, 2.0)
        except SourceError as error:
            return Failed(Moment(time.monotonic(), 0.0), 0.0, error.complaints)
        return Observed(answer.value, Moment(time.monotonic(), 0.0), 0.0)

    def must_have(self, event: Fired) -> bool:
        """Whether the event lies wholly in a stretch in which somebody listened."""
        return any(
            since + CLOCK_SECONDS < event.before and event.after < until - CLOCK_SECONDS
            for since, until in self.stretches[event.gpu]
        )

    def unheard_seconds(self, uuid: Uuid, now: float) -> float:
        assert self.first_seen is not None
        total, end = 0.0, self.first_seen
        for since, until in sorted(self.stretches[uuid]):
            total += max(0.0, since - end)
            end = max(end, until)
        return total + now - end


@pytest.fixture(name="source")
def make_source(tmp_path: Path, library: Path) -> NvmlSource:
    command = worker_command(library, {"listener.LISTEN_SECONDS": 0.05})
    return NvmlSource(["env", f"STANDIN_STATE={tmp_path / 'state'}", *command], ("health",))


async def test_no_event_outside_the_blind_time_is_lost(source: NvmlSource, tmp_path: Path) -> None:
    """While NVML is initialised again, the worker killed, the driver released, and a GPU lost, again and again."""
    counting = Counting(source)
    with Driving(tmp_path / "state") as driving:
        for number in range(READS):
            await trouble(number, source, driving)
            await counting.collect()
            await asyncio.sleep(0.03)
    await counting.collect()
    ended = time.monotonic()
    await source.close()
    counted = {uuid: gpu.errors for uuid, gpu in counting.memory.gpus.items()}
    assert all(errors == 1 for of_gpu in counted.values() for errors in of_gpu.values())
    must = [event for event in driving.fired if counting.must_have(event)]
    assert [event for event in must if event.code not in counted[event.gpu]] == []
    lost = [event for event in driving.fired if event.code not in counted[event.gpu]]
    assert len(must) > len(driving.fired) / 10  # how many depends on how busy the machine is
    assert len(lost) > 10  # the troubles were troubles
    for uuid, gpu in counting.memory.gpus.items():
        check_blind_time(gpu, counting.unheard_seconds(uuid, ended), ended)


def check_blind_time(gpu: GpuXidMemory, unheard: float, ended: float) -> None:
    assert gpu.settled_until is not None
    still_open = ended - gpu.settled_until
    # A reading may miss a listener that began in the midst of it: blind time is rather too long than too short.
    assert unheard - still_open - 2 * CLOCK_SECONDS * READS < gpu.blind_seconds < unheard + 0.1 + still_open


async def trouble(number: int, source: NvmlSource, driving: Driving) -> None:
    """What is wrong from this read on, or not any more."""
    match number % 15:
        case 3:
            driving.fail(nvmlDeviceGetCount_v2=Code.UNKNOWN)
        case 6:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
        case 8:
            driving.fail(all_of_0=Code.GPU_IS_LOST)
        case 11:
            await source.close()
        case 4 | 10:
            driving.fail()


def children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
