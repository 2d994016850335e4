"""A worker process of gpumap's, spoken to by its protocol, over the compiled stand-in."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from gpumap.agent.nvml_worker import wire
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import GpuReading
from tests import standin
from tests.standin import Driver

PATIENCE_SECONDS = 10.0


class Answers(NamedTuple):
    driver: wire.DriverMessage
    gpus: dict[int, GpuReading]


class Worker:
    """A worker process, and the state file of its driver.

    `groups` are those that it is asked for, `unasked` what it said of no read while one was answered. With `release`
    it is asked to let go of the driver.
    """

    def __init__(self, command: Sequence[str], state: Path, directory: Path | None = None, **environment: str) -> None:
        self.state = state
        self.release = False
        self.hold_seconds = 0.0
        self.groups: tuple[str, ...] = ()
        self.unasked: list[wire.XidMessage | wire.ListeningMessage] = []
        self._reads = 0
        self._pending = b""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=directory,
            env=os.environ | {"STANDIN_STATE": str(state)} | environment,
        )

    def ask(self, driver: Driver | None = None, last: tuple[int, ...] = (), skip: tuple[int, ...] = ()) -> int:
        """Send a request, `driver` being written before, and return its number."""
        if driver is not None:
            driver.write(self.state)
        self._reads += 1
        assert self.process.stdin is not None
        request = wire.Request(
            self._reads, 1.0, 5.0, tuple(last), tuple(skip), self.groups, self.release, self.hold_seconds
        )
        self.process.stdin.write(wire.encode(request))
        return self._reads

    def answer(self, patience_seconds: float = PATIENCE_SECONDS) -> wire.Answer | None:
        """The next answer; `None` where the worker has ended, or says nothing for so long."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + patience_seconds
        while b"\n" not in self._pending:
            readable, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))
            more = os.read(self.process.stdout.fileno(), 1 << 20) if readable else b""
            if not more:
                return None
            self._pending += more
        line, _, self._pending = self._pending.partition(b"\n")
        return wire.decode(line)

    def read(self, driver: Driver | None = None, last: tuple[int, ...] = (), hung: int = 0) -> Answers:
        """All answers to a new request; but `hung` of the GPUs do not answer."""
        number = self.ask(driver, last)
        message = self._answer_to_read()
        assert isinstance(message, wire.DriverMessage), message
        gpus: dict[int, GpuReading] = {}
        while len(gpus) < message.gpus - hung:
            answer = self._answer_to_read()
            assert isinstance(answer, wire.GpuMessage), answer
            assert answer.read == message.read == number
            gpus[answer.gpu.index] = answer.gpu
        return Answers(message, gpus)

    def _answer_to_read(self) -> wire.Answer | None:
        while isinstance(message := self.answer(), wire.XidMessage | wire.ListeningMessage):
            self.unasked.append(message)
        return message

    def read_one(self, driver: Driver) -> GpuReading:
        return self.read(driver).gpus[0]

    def refusal(self, driver: Driver | None = None) -> wire.ErrorMessage:
        """The error that answers a new request."""
        self.ask(driver)
        message = self._answer_to_read()
        assert isinstance(message, wire.ErrorMessage), message
        return message


Start = Callable[..., Worker]


def worker_command(library: Path, changed: Mapping[str, object] = MappingProxyType({})) -> list[str]:
    """The worker. Names of its modules in `changed`, such as "listener.HUNG_SECONDS", have another value."""
    if not changed:
        return [sys.executable, "-P", "-m", "gpumap.agent.nvml_worker", "--library", str(library)]
    modules = ", ".join(sorted({name.partition(".")[0] for name in changed}))
    lines = [
        f"from gpumap.agent.nvml_worker import {modules}",
        "from gpumap.agent.nvml_worker.__main__ import main",
        "import sys",
    ]
    lines += [f"{name} = {value!r}" for name, value in changed.items()]
    return [sys.executable, "-P", "-c", "\n".join([*lines, "main(sys.argv[1:])"]), "--library", str(library)]


@contextlib.contextmanager
def starting(state: Path, libraries: Path) -> Iterator[Start]:
    """Starts workers, with a library that lacks the functions in `without`, and ends them.

    Those with `changed` have other values under these names of their modules. `directory` is where they run.
    """
    workers: list[Worker] = []

    def start_worker(
        without: tuple[str, ...] = (),
        library: Path | None = None,
        groups: tuple[str, ...] = (),
        changed: Mapping[str, object] = MappingProxyType({}),
        directory: Path | None = None,
        **environment: str,
    ) -> Worker:
        command = worker_command(library or standin.build(libraries, without), changed)
        worker = Worker(command, state, directory, **environment)
        worker.groups = groups
        workers.append(worker)
        return worker

    try:
        yield start_worker
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.communicate()


async def measure(driver: Driver, folder: Path) -> NvmlReading:
    """What a worker says of a driver."""
    driver.write(folder / "state")
    source = NvmlSource(["env", f"STANDIN_STATE={folder / 'state'}", *worker_command(standin.build(standin.LIBRARIES))])
    try:
        return (await source.read(1.0, 60.0)).value
    finally:
        await source.close()
