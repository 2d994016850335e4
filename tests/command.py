"""The installed `gpumap` command, run to its end as users run it."""

from __future__ import annotations

import asyncio
import subprocess

from tests.agent import PATIENCE_SECONDS
from tests.demo_process import GPUMAP, environment


def gpumap(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. What it writes on stderr never holds a traceback."""
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
    """The same while this process serves what it asks."""
    return await asyncio.to_thread(gpumap, *arguments, **variables)


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The single line that a failure says, and nothing else."""
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("gpumap: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("gpumap: ").rstrip("\n")
