"""The service's end of the pipe: starts a worker, writes to it, reads its lines, and ends it. It does not know
GPUs."""

import asyncio
import contextlib
import signal
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from gpumap.agent.nvml_worker.wire import MAX_LINE_BYTES
from gpumap.model.observations import Complaint

LAST_WORDS_BYTES = 4096
REASON_SECONDS = 0.5
END_SECONDS = 1.0
OWN_CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
LAST_LINES_SECONDS = 0.3
"""Time to read what a worker had written before it was killed."""


class Worker:
    """A worker process. Call `end` also for one that died."""

    def __init__(self, process: Process, transport: asyncio.SubprocessTransport, started: float) -> None:
        self.started = started
        self._process = process
        self._transport = transport
        self._last_words = b""
        self._oom_kills = _oom_kills()
        self._listening = asyncio.create_task(self._keep_last_words(), name="nvml-worker-stderr")

    @classmethod
    async def start(cls, command: Sequence[str]) -> Self:
        """Start a worker. Raises `OSError` if the program does not exist."""
        # Like asyncio.create_subprocess_exec, which hides the transport: only the transport can release a process that
        # does not die.
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(MAX_LINE_BYTES, loop), *command, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        return cls(Process(transport, protocol, loop), transport, loop.time())

    @property
    def dead(self) -> bool:
        return self._process.returncode is not None

    def send(self, line: bytes) -> None:
        """Send a request. `line` shows whether it arrived: requests are short, and a worker always reads them."""
        assert self._process.stdin is not None  # noqa: S101 -- it is a pipe
        self._process.stdin.write(line)

    async def line(self) -> bytes | None:
        """Return the next line; `None` if the worker has closed its end. Raises `ValueError` if a line has no end."""
        assert self._process.stdout is not None  # noqa: S101 -- it is a pipe
        line = await self._process.stdout.readline()
        return line if line.endswith(b"\n") else None

    @property
    def ended_on_purpose(self) -> bool:
        """Return whether it exited with 0: it released the driver, or only a new process can load its library."""
        return self._process.returncode == 0

    async def reason_of_end(self) -> Complaint:
        """Return how it ended, and its last line on stderr. Waits a moment for both."""
        try:
            async with asyncio.timeout(REASON_SECONDS):
                await self._process.wait()
                await asyncio.shield(self._listening)
        except TimeoutError:
            pass
        lines = self._last_words.decode(errors="replace").strip().splitlines()
        detail = f"the worker {self._manner()}" + (f": {lines[-1][:400]}" if lines else "")
        kills_at_start, kills = self._oom_kills, _oom_kills()
        is_new_kill = None not in (kills_at_start, kills) and kills_at_start != kills
        if self._process.returncode == -signal.SIGKILL and is_new_kill:
            return Complaint("worker_oom_killed", f"{detail}; gpumap's cgroup is out of memory")
        return Complaint("worker_crashed", detail)

    def kill(self) -> None:
        """Kill it. Call `end` afterwards."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.kill()

    async def last_lines(self) -> list[bytes]:
        """After `kill`: return the lines that it had written before, as far as they come within a moment."""
        lines: list[bytes] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_LINES_SECONDS):
                # RuntimeError: a thread that waits for a line gets them now.
                with contextlib.suppress(ValueError, RuntimeError):
                    while (line := await self.line()) is not None:
                        lines.append(line)
                # Otherwise `end` may take its exit status away from asyncio, which then complains.
                await self._process.wait()
        return lines

    def end(self) -> None:
        """Kill it, and close its pipes."""
        self._transport.close()

    async def ended(self) -> None:
        """After `end`: wait until it is dead. A process that hangs in the driver may never be."""
        await self._process.wait()
        await self._listening

    def _manner(self) -> str:
        code = self._process.returncode
        if code is None:
            return "closed its output"
        if code >= 0:
            return f"exited with {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    async def _keep_last_words(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 -- it is a pipe
        while chunk := await self._process.stderr.read(LAST_WORDS_BYTES):
            self._last_words = (self._last_words + chunk)[-LAST_WORDS_BYTES:]


def _oom_kills() -> int | None:
    """Return how many processes of gpumap's own cgroup the kernel killed because of memory; `None` if unknown."""
    for file in _oom_files():
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _oom_files() -> Iterator[Path]:
    """Return the places of the count: a container often sees its own cgroup as the root of the mount."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = CGROUPS, "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = CGROUPS / "memory", "memory.oom_control"
        else:
            continue
        yield mount / path.lstrip("/") / name
        yield mount / name
