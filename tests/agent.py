"""`gpumap` as a process, asked over HTTP.

Everything is waited for with a deadline; an agent that logged a traceback, or did not end well, fails its test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self, TypeVar

import aiohttp

from tests import standin
from tests.demo_process import PATIENT_GPUMAP, environment
from tests.exposed import Page
from tests.machine import Node

T = TypeVar("T")
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.03
RESTARTS_SOON = """
import functools, sys
from gpumap.__main__ import main
from gpumap.agent import collect, service
collect.DEADLINE_SECONDS_MIN = collect.DEADLINE_SECONDS_MAX
service.serve = functools.partial(service.serve, restart_after_seconds=0.5)
sys.exit(main())
"""
IMPATIENT_GPUMAP = (sys.executable, "-P", "-c", RESTARTS_SOON)
"""What must last 30 s before only a new container helps is half a second."""


async def until(ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool], what: str) -> T:
    """Ask again and again until the answer holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds(answer := await ask()):
        assert time.monotonic() < deadline, f"{what}; the last answer was\n{answer}"
        await asyncio.sleep(POLL_SECONDS)
    return answer


class Client(NamedTuple):
    """How to ask: over TLS with a context, with headers."""

    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = MappingProxyType({})


PLAIN = Client()


class Answer(NamedTuple):
    status: int
    text: str
    headers: Mapping[str, str]


class Agent:
    """A running `gpumap`, and what it logged so far."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, wrapped: bool, client: Client = PLAIN) -> None:
        self.process = process
        self.url = ""
        self._log = log
        self._wrapped = wrapped
        self._client = client
        self._expected_code = 0
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS),
            connector=aiohttp.TCPConnector(ssl=client.tls or True),
            headers=client.headers,
        )

    async def __aenter__(self) -> Self:
        async def log() -> str:
            return self.log

        try:
            found = await until(log, lambda text: "serving address=" in text or self.ended, "it does not serve")
            match = re.search(r"serving address=(\S+)", found)
            assert match is not None, f"it ended with {self.process.returncode}\n{found}"
        except BaseException:
            await self._kill()
            raise
        self.url = f"{'https' if self._client.tls else 'http'}://{match[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            code = await self.stop()
        finally:
            await self._kill()
        assert code == self._expected_code, f"it ended with {code}\n{self.log}"
        assert "Traceback" not in self.log, self.log

    @property
    def pid(self) -> int:
        """gpumap's own, not that of the command it was started by."""
        return next(iter(_children(self.process.pid))) if self._wrapped else self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it by a signal, if it has not ended, and give its exit code."""
        if not self.ended:
            os.kill(self.pid, number)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()

    async def ended_itself(self) -> tuple[int, str]:
        """Its exit code and its log, once it has ended by itself. That is no failure then."""
        self._expected_code = await asyncio.wait_for(self.process.wait(), PATIENCE_SECONDS)
        return self._expected_code, self.log

    async def _kill(self) -> None:
        await self._session.close()
        if not self.ended:
            self.process.kill()
            await self.process.wait()

    async def get(self, path: str) -> Answer:
        async with self._session.get(self.url + path) as response:
            return Answer(response.status, await response.text(), response.headers)

    async def page(self) -> Page:
        """/metrics now; an empty page before the first collection."""
        answer = await self.get("/metrics")
        return Page(answer.text if answer.status == 200 else "")

    async def until(self, holds: Callable[[Page], bool], what: str) -> Page:
        """The first page that holds."""
        return await until(self.page, holds, what)

    async def later(self, collections: int = 2) -> Page:
        """The page after so many more collections; by default of one that began after this call."""
        goal = (await self.page()).collections + collections
        return await self.until(lambda page: page.collections >= goal, "it does not collect")

    async def pages(self) -> AsyncIterator[Page]:
        """Each collection's page from now on, as far as polling sees them all."""
        seen = 0.0

        def is_new(page: Page) -> bool:
            return page.collections > seen

        while True:
            page = await self.until(is_new, "it does not collect")
            seen = page.collections
            yield page

    def children(self) -> dict[int, str]:
        """The processes that it started: their command lines by PID."""
        return {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in _children(self.pid)}


async def gone(*pids: int) -> None:
    """Return when none of these processes exists any more."""

    async def left() -> list[int]:
        return [pid for pid in pids if _exists(pid)]

    await until(left, lambda found: not found, "processes are left over")


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.asynccontextmanager
async def serve(
    node: Node,
    *flags: str,
    library: Path | None = None,
    parent: Sequence[str] = (),
    program: Sequence[str] = PATIENT_GPUMAP,
    client: Client = PLAIN,
    **variables: str,
) -> AsyncIterator[Agent]:
    """Run `gpumap serve` over a node until the block ends; without `library` the loader finds the stand-in."""
    found = () if library is None else ("--nvml-library", str(library))
    options = [*node.flags, *found, "--interval", "200ms", *flags]
    variables = standin.environment(node.library, node.state) | variables
    async with run_agent("serve", *options, parent=parent, program=program, client=client, **variables) as agent:
        yield agent


@contextlib.asynccontextmanager
async def run_agent(
    *arguments: str,
    parent: Sequence[str] = (),
    program: Sequence[str] = PATIENT_GPUMAP,
    client: Client = PLAIN,
    **variables: str,
) -> AsyncIterator[Agent]:
    """Run `gpumap` on a free port until the block ends; `parent` is a command that has it as its only child.

    `program` may be another way to run gpumap's own code.
    """
    with tempfile.TemporaryDirectory(prefix="gpumap-log-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(*parent, *program, arguments[0], "--listen", "127.0.0.1:0", *arguments[1:]),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=errors,
                env=environment(**variables),
            )
        async with Agent(process, log, wrapped=bool(parent), client=client) as agent:
            yield agent
