"""`gpumap serve` that may end by itself: what must last 30 s before only a new container helps is half a second."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Self

from tests import standin
from tests.agent import PATIENCE_SECONDS, until
from tests.demo_process import environment
from tests.machine import Node

IMPATIENT = """
import functools, sys
from gpumap.__main__ import main
from gpumap.agent import collect, service
collect.DEADLINE_SECONDS_MIN = collect.DEADLINE_SECONDS_MAX
service.serve = functools.partial(service.serve, restart_after_seconds=0.5)
sys.exit(main())
"""


class Service:
    """A running `gpumap serve` that may end by itself, and what it logged."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._log = node.directory / "log.txt"

    async def __aenter__(self) -> Self:
        variables = standin.environment(self._node.library, self._node.state)
        flags = ["serve", "--listen", "127.0.0.1:0", "--interval", "100ms", *self._node.flags]
        with self._log.open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", IMPATIENT, *flags), stderr=errors, env=environment(**variables)
            )
        seen = re.compile(r"source (?:up|down|complains) source=(nvml|kubelet)")
        await until(self._logged, lambda log: set(seen.findall(log)) == {"nvml", "kubelet"}, "it does not collect")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _logged(self) -> str:
        return self._log.read_text()

    async def ended(self) -> tuple[int, str]:
        """Its exit code and its log, once it has ended by itself."""
        code = await asyncio.wait_for(self._process.wait(), PATIENCE_SECONDS)
        return code, await self._logged()

    async def lasts(self, seconds: float) -> bool:
        """Whether it runs on for so long; then it is ended by a signal."""
        await asyncio.wait((waiting := asyncio.create_task(self._process.wait()),), timeout=seconds)
        if waiting.done():
            return False
        self._process.terminate()
        return await asyncio.wait_for(waiting, PATIENCE_SECONDS) == 0
