"""The `gpumap` command, run to its end: called in a fork (`run_command`), or started as users start it (`gpumap`).

Most tests call it. A process that has imported gpumap once is forked for each call, which takes a few milliseconds
instead of the half second in which Python starts and imports. The fork has a main thread, signal handlers, an
environment and file descriptors of its own: so commands run beside a test's event loop, and beside each other, and
leave nothing behind in the tests' process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import forked
from tests.agent import PATIENCE_SECONDS
from tests.demo_process import GPUMAP, environment

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.forked"])


def run_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call gpumap's `main` in a fork. What it writes on stderr never holds a traceback."""
    with tempfile.TemporaryDirectory(prefix="gpumap-command-") as name:
        folder = Path(name)
        fork = _FORKS.Process(target=forked.call, args=(arguments, environment(**variables), Path.cwd(), folder))
        fork.start()
        fork.join(PATIENCE_SECONDS)
        if fork.exitcode is None:
            fork.kill()
            fork.join()
            raise subprocess.TimeoutExpired(["gpumap", *arguments], PATIENCE_SECONDS)
        out, errors = ((folder / stream).read_bytes().decode() for stream in ("stdout", "stderr"))
    assert "Traceback" not in errors, errors
    return subprocess.CompletedProcess(["gpumap", *arguments], fork.exitcode, out, errors)


class ForkOnTerminal:
    """gpumap's `main` in a fork with the controlling terminal at the path `terminal`. It has what Popen has."""

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str], terminal: str) -> None:
        given = (arguments, dict(variables), Path.cwd(), terminal)
        self._fork = _FORKS.Process(target=forked.call_on_terminal, args=given)
        self._fork.start()

    @property
    def returncode(self) -> int | None:
        return self._fork.exitcode

    def poll(self) -> int | None:
        return self._fork.exitcode

    def send_signal(self, number: int) -> None:
        if self._fork.pid is not None:
            os.kill(self._fork.pid, number)

    def kill(self) -> None:
        self._fork.kill()

    def wait(self) -> None:
        self._fork.join()


async def run_command_in_loop(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call it while this process serves what it asks."""
    return await asyncio.to_thread(run_command, *arguments, **variables)


def gpumap(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start the installed program. What it writes on stderr never holds a traceback."""
    done = subprocess.run(
        [str(GPUMAP), *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


async def gpumap_in_loop(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start it while this process serves what it asks."""
    return await asyncio.to_thread(gpumap, *arguments, **variables)


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The single line that a failure says, and nothing else."""
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("gpumap: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("gpumap: ").rstrip("\n")
