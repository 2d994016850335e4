"""A worker process of gpumap's, spoken to by its protocol, over the compiled stand-in."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gpumap.model import GpuReading
from gpumap.nvml_worker import wire
from tests import standin
from tests.standin import Driver

PATIENCE_SECONDS = 10.0


class Answers(NamedTuple):
    driver: wire.DriverSaid
    gpus: dict[int, GpuReading]


class Worker:
    """A worker process, and the state file of its driver."""

    def __init__(self, library: Path, state: Path, **environment: str) -> None:
        self.state = state
        self._reads = 0
        self._pending = b""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpumap.nvml_worker", "--library", str(library)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"GPUMAP_STANDIN_STATE": str(state)} | environment,
        )

    def ask(self, driver: Driver | None = None, last: tuple[int, ...] = (), skip: tuple[int, ...] = ()) -> int:
        """Send a request, `driver` being written before, and return its number."""
        if driver is not None:
            driver.write(self.state)
        self._reads += 1
        assert self.process.stdin is not None
        self.process.stdin.write(wire.encode_request(wire.Request(self._reads, 1.0, tuple(last), tuple(skip))))
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
        said = self.answer()
        assert isinstance(said, wire.DriverSaid), said
        gpus: dict[int, GpuReading] = {}
        while len(gpus) < said.gpus - hung:
            answer = self.answer()
            assert isinstance(answer, wire.GpuSaid), answer
            assert answer.read == said.read == number
            gpus[answer.gpu.index] = answer.gpu
        return Answers(said, gpus)

    def read_one(self, driver: Driver) -> GpuReading:
        return self.read(driver).gpus[0]

    def refusal(self, driver: Driver | None = None) -> wire.ErrorSaid:
        """The error that answers a new request."""
        self.ask(driver)
        said = self.answer()
        assert isinstance(said, wire.ErrorSaid), said
        return said


Start = Callable[..., Worker]


@contextlib.contextmanager
def starting(state: Path, libraries: Path) -> Iterator[Start]:
    """Starts workers, with a library that lacks the functions in `without`, and ends them."""
    workers: list[Worker] = []

    def start_worker(without: tuple[str, ...] = (), library: Path | None = None, **environment: str) -> Worker:
        worker = Worker(library or standin.build(libraries, without), state, **environment)
        workers.append(worker)
        return worker

    try:
        yield start_worker
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.communicate()
