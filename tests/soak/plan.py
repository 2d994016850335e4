"""What happens to the node: rounds of churn, each with one kind of fault, drawn from a seed.

The plan depends on the seed only, not on how fast gpumap or the machine is: a round waits for collections, and draws
nothing while it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from random import Random

import grpc

from gpumap.lab.demo.kubelet import Refuse
from tests import standin
from tests.kubelet import RATE_LIMITED, Hang, Raw, Slow
from tests.soak.node import AGENTS, GPUS, PARTITIONED, SoakNode
from tests.soak.watch import STALE_AFTER_SECONDS, Watched

RECOVERY_COLLECTIONS = 100.0
"""A recovery may take so many: the longest pause of gpumap is 64 reads, and some waits are in seconds."""
PODS = 14
PROCESSES = 40


@dataclass
class Round:
    """One round, and what it needs."""

    node: SoakNode
    agents: list[Watched]
    random: Random

    def draw_gpu(self) -> int:
        """The index of the GPU that a fault hits."""
        return self.random.randrange(len(GPUS))


Fault = Callable[[Round], AbstractAsyncContextManager[None]]
FAULTS: dict[str, Fault] = {}
Steps = Callable[[Round], AsyncIterator[None]]


def fault(name: str, *parts: str, agents: Sequence[str] = AGENTS) -> Callable[[Steps], Steps]:
    """Add a kind of fault: what is before its `yield` breaks these parts for agents, what is after it mends them."""

    def add(steps: Steps) -> Steps:
        async def hold(at: Round) -> AsyncIterator[None]:
            taken = steps(at)
            with at.node.breaks(agents, parts):
                await anext(taken)
            yield
            with at.node.mends(agents, parts):
                await anext(taken, None)

        FAULTS[name] = contextlib.asynccontextmanager(hold if parts else steps)
        return steps

    return add


# --- the kubelet ------------------------------------------------------------------------------------------------------


def _kubelet(name: str, behaviour: object, *parts: str) -> None:
    @fault(name, "kubelet", *parts)
    async def broken(at: Round) -> AsyncIterator[None]:
        at.node.kubelet.misbehave(behaviour)  # type: ignore[arg-type]
        yield
        at.node.kubelet.behave()


_kubelet("kubelet: refuses", Refuse(grpc.StatusCode.UNAVAILABLE, "not now"), "no kubelet")
_kubelet("kubelet: hangs", Hang(), "no kubelet")
_kubelet("kubelet: is slow", Slow(0.7))
_kubelet("kubelet: limits calls", RATE_LIMITED, "no kubelet")
_kubelet("kubelet: sends garbage", Raw(b"\xff\xff\xff"), "no kubelet")


@fault("kubelet: away until its List is too old")
async def _away_long(at: Round) -> AsyncIterator[None]:
    with at.node.breaks(AGENTS, ("kubelet", "no kubelet")):
        at.node.kubelet.misbehave(Refuse(grpc.StatusCode.UNAVAILABLE, "not now"))
    yield
    for agent in at.agents:
        await agent.passes(1.5 * STALE_AFTER_SECONDS)
    with at.node.mends(AGENTS, ("kubelet", "no kubelet")):
        at.node.kubelet.behave()


@fault("kubelet: away")
async def _away(at: Round) -> AsyncIterator[None]:
    with at.node.breaks(AGENTS, ("kubelet",)):
        await at.node.kubelet.stop(leave_socket=at.random.random() < 0.5)
    with at.node.breaks(AGENTS, ("no kubelet",)):
        pass
    yield
    with at.node.mends(AGENTS, ("kubelet", "no kubelet")):
        await at.node.kubelet.start()


@fault("kubelet: restarts", "kubelet")
async def _restarts(at: Round) -> AsyncIterator[None]:
    await at.node.kubelet.stop()
    await at.node.kubelet.start()
    yield


# --- files ------------------------------------------------------------------------------------------------------------


@fault("checkpoint: away", "checkpoint")
async def _no_checkpoint(at: Round) -> AsyncIterator[None]:
    at.node.checkpoint.unlink()
    yield


@fault("checkpoint: cut off", "checkpoint")
async def _cut_off(at: Round) -> AsyncIterator[None]:
    at.node.checkpoint.write_bytes(at.node.checkpoint.read_bytes()[:-40])
    yield


@fault("logs: away", "logs")
async def _no_logs(at: Round) -> AsyncIterator[None]:
    (at.node.logs / "pods").rename(at.node.logs / "pods.away")
    yield
    (at.node.logs / "pods.away").rename(at.node.logs / "pods")


@fault("proc: entries unreadable", "proc")
async def _unreadable(at: Round) -> AsyncIterator[None]:
    chosen = at.random.sample(sorted(at.node.truth.processes), k=min(3, len(at.node.truth.processes)))
    for pid in chosen:
        (at.node.proc / str(pid) / "cgroup").rename(at.node.proc / str(pid) / "kept")
        (at.node.proc / str(pid) / "cgroup").mkdir()
    yield
    for pid in chosen:
        if (kept := at.node.proc / str(pid) / "kept").exists():
            (at.node.proc / str(pid) / "cgroup").rmdir()
            kept.rename(at.node.proc / str(pid) / "cgroup")


# --- the driver -------------------------------------------------------------------------------------------------------


def _gpu(name: str, function: str, code: int, *, lost: bool = False) -> None:
    @fault(name)
    async def broken(at: Round) -> AsyncIterator[None]:
        index = at.draw_gpu()
        parts = (GPUS[index], *((f"lost {GPUS[index]}",) if lost else ()))
        with at.node.breaks(AGENTS, parts):
            for driver in at.node.drivers.values():
                driver.fail[function, index] = code
        yield
        with at.node.mends(AGENTS, parts):
            for driver in at.node.drivers.values():
                driver.fail.clear()


_gpu("GPU: lost", "*", standin.Code.GPU_IS_LOST, lost=True)
_gpu("GPU: needs a reset", "*", standin.Code.RESET_REQUIRED, lost=True)
_gpu("GPU: no permission", "*", standin.Code.NO_PERMISSION, lost=True)
_gpu("GPU: process list refused", "nvmlDeviceGetComputeRunningProcesses_v3", standin.Code.UNKNOWN)
_gpu("GPU: memory refused", "nvmlDeviceGetMemoryInfo_v2", standin.Code.UNKNOWN)
_gpu("GPU: samples refused", "nvmlDeviceGetProcessUtilization", standin.Code.UNKNOWN)


def _delay(name: str, seconds: float) -> None:
    @fault(name)
    async def slow(at: Round) -> AsyncIterator[None]:
        index = at.draw_gpu()
        with at.node.breaks(AGENTS, (GPUS[index],)):
            for driver in at.node.drivers.values():
                driver.delay["*", index] = seconds
        yield
        with at.node.mends(AGENTS, (GPUS[index],)):
            for driver in at.node.drivers.values():
                driver.delay.clear()


_delay("GPU: slow calls", 0.02)
_delay("GPU: a call hangs", float("inf"))


@fault("GPU: XID events")
async def _xids(at: Round) -> AsyncIterator[None]:
    for _ in range(at.random.randint(1, 4)):
        index = at.draw_gpu()
        with at.node.change():
            gi = 1 if index == PARTITIONED and at.random.random() < 0.5 else None
            at.node.xids.append(standin.Xid(index, at.random.choice((31, 43, 79)), gi, None if gi is None else 0))
    yield


@fault("driver: unloaded", "nvml", "no nvml")
async def _unloaded(at: Round) -> AsyncIterator[None]:
    for driver in at.node.drivers.values():
        driver.fail["nvmlDeviceGetCount_v2", "*"] = standin.Code.UNINITIALIZED
        driver.init_code = standin.Code.DRIVER_NOT_LOADED
    yield
    for driver in at.node.drivers.values():
        driver.fail.clear()
        driver.init_code = 0


@fault("MIG: re-partitioned")
async def _repartitioned(at: Round) -> AsyncIterator[None]:
    at.node.repartition()
    yield


# --- gpumap's processes -----------------------------------------------------------------------------------------------


def _worker(name: str, number: signal.Signals) -> None:
    @fault(name, "nvml")
    async def hit(at: Round) -> AsyncIterator[None]:
        stopped = []
        for agent in at.agents:
            if (pid := agent.worker) is not None:
                os.kill(pid, number)
                stopped.append(pid)
        yield
        for pid in stopped if number is signal.SIGSTOP else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


_worker("worker: killed", signal.SIGKILL)
_worker("worker: stopped", signal.SIGSTOP)


@fault("worker: crashes in the driver", "nvml")
async def _crashes(at: Round) -> AsyncIterator[None]:
    index = at.draw_gpu()
    for driver in at.node.drivers.values():
        driver.crash.add(("*", index))
    yield
    for driver in at.node.drivers.values():
        driver.crash.clear()


@fault("gpumap: releases the driver", "nvml")
async def _released(at: Round) -> AsyncIterator[None]:
    for agent in at.agents:
        assert agent.process is not None
        agent.process.send_signal(signal.SIGUSR1)
    yield


def _restart(name: str, number: signal.Signals) -> None:
    @fault(name)
    async def restarted(at: Round) -> AsyncIterator[None]:
        with at.node.breaks(AGENTS[1:], ("page",)):
            pass
        for agent in at.agents[1:]:
            await agent.end(number)
        yield
        for agent in at.agents[1:]:
            await agent.start()
        with at.node.mends(AGENTS[1:], ("page",)):
            pass


_restart("gpumap: terminated", signal.SIGTERM)
_restart("gpumap: killed", signal.SIGKILL)


@fault("gpumap: another password", "page", agents=AGENTS[1:])
async def _password(at: Round) -> AsyncIterator[None]:
    for agent in at.agents[1:]:
        await agent.replace_password()
    yield


# --- the rounds -------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Plays rounds for ever. `slowest` has the collections of the slowest recovery from each kind of fault.

    `pace` makes its pauses longer or shorter; they do not change the plan.
    """

    node: SoakNode
    agents: list[Watched]
    random: Random
    pace: float = 1.0
    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    now: str = ""

    async def play(self, most_rounds: float = math.inf) -> None:
        """Play so many rounds, in each of them one kind of fault. All kinds come before one comes again."""
        waiting: list[str] = []
        with self.node.mends(AGENTS, ("page",)):
            pass
        await self._settle("start")
        while self.rounds < most_rounds:
            if not waiting:
                waiting = sorted(FAULTS)
                self.random.shuffle(waiting)
            await self._round(waiting.pop())

    async def _round(self, kind: str) -> None:
        at = Round(self.node, self.agents, self.random)
        self.now = f"round {self.rounds}: {kind}"
        await self._churn(self.random.randint(2, 8))
        self.faults[kind] += 1
        async with FAULTS[kind](at):
            await self._churn(self.random.randint(0, 6))
            await asyncio.sleep(self.pace * self.random.choice((0.5, 1.0, 2.0)))
        await self._settle(kind)
        self.rounds += 1

    async def _settle(self, kind: str) -> None:
        """Wait until both agents show all that is true; then nothing may be missing."""
        took = [await agent.settled(RECOVERY_COLLECTIONS) for agent in self.agents]
        self.slowest[kind] = max([self.slowest.get(kind, 0.0), *took])
        self.node.recovered()

    async def _churn(self, changes: int) -> None:
        for _ in range(changes):
            self._change()
            await asyncio.sleep(self.pace * self.random.choice((0.0, 0.02, 0.1, 0.2)))

    def _change(self) -> None:
        """One change of pods or processes; more start while there are few."""
        node, random = self.node, self.random
        pods = sorted(node.truth.pods.values(), key=lambda pod: pod.uid)
        pids = sorted(node.truth.processes)
        left = [pid for pid in pids if (of := node.truth.processes[pid].pod) and of.uid not in node.truth.pods]
        if len(pods) < PODS * random.random():
            node.start_pod(idle=random.random() < 0.2)
        elif len(pids) < PROCESSES * random.random():
            pod = random.choice([None, *pods])
            container = random.choice(sorted(pod.containers)) if pod else ""
            leaf = random.choice(sorted(node.truth.leaves)) if random.random() < 0.15 else None
            node.start_process(pod, container, leaf)
        elif left and random.random() < 0.5:
            node.end_process(random.choice(left))
        elif pids and random.random() < 0.6:
            pid = random.choice(pids)
            node.end_process(pid) if random.random() < 0.6 else node.use_memory(pid)
        elif pods and random.random() < 0.3:
            node.restart_container(random.choice(pods))
        elif pods:
            node.stop_pod(random.choice(pods), left_over=random.random() < 0.3)
