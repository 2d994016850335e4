"""Rows in which gpumap ends, or does not start. Their page says so: `gpumap exits with 1`."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

from tests import standin
from tests.agent import PATIENCE_SECONDS, gone
from tests.demo_process import environment
from tests.faults.expected import matches
from tests.faults.matrix import Fault
from tests.faults.site import running
from tests.machine import short_directory


def exits_with(code: int) -> tuple[str]:
    return (f"gpumap exits with {code}",)


def _code(fault: Fault) -> int:
    match = re.fullmatch(r"gpumap exits with (\d)", fault.page[0])
    assert match is not None, fault.page
    return int(match[1])


async def refuse_start(fault: Fault, library: Path) -> None:
    """Start gpumap, and compare its exit code and its one line. `{port}` in a flag is a port that is in use."""
    with short_directory() as directory, socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        flags = [flag.replace("{port}", port) for flag in ("--listen", "127.0.0.1:0", *fault.start.flags)]
        variables = standin.environment(library, directory / "state") | dict(fault.start.variables)
        process = await asyncio.create_subprocess_exec(
            *(*fault.start.parent, *fault.start.program, "serve", "--no-kubelet", *flags),
            stderr=asyncio.subprocess.PIPE,
            env=environment(**variables),
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            _, errors = await process.communicate()
    lines = errors.decode().splitlines()
    assert fault.log is not None
    assert process.returncode == _code(fault), lines
    assert len(lines) == len(fault.log), lines
    for text, line in zip(fault.log, lines, strict=True):
        assert matches(text, line), lines


async def stop(fault: Fault, library: Path) -> None:
    """Inject the fault, send SIGTERM while it lasts, and compare the exit code and the log. No process is left."""
    async with running(fault.start, library) as site:
        async with fault.inject(site):
            children = site.agent.children()
            assert await site.agent.stop() == _code(fault), site.agent.log
        await gone(*children)
        for text in fault.log or ():
            assert sum(matches(text, line) for line in site.agent.log.splitlines()) == 1, site.agent.log
