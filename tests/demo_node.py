"""A scenario that is played as a node, for tests in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from gpumap.lab.capture.format import About, Capture
from gpumap.lab.demo import world
from gpumap.lab.demo.scenario_model import Scenario
from gpumap.lab.node import PlayedNode


@contextlib.asynccontextmanager
async def demo_node(
    scenario: Scenario, directory: Path, clock: Callable[[], float] = time.time, epoch: float | None = None
) -> AsyncIterator[PlayedNode]:
    """Play below `directory` until the block ends."""
    play = world.play(scenario, clock, epoch)
    _, first = next(play)
    node = PlayedNode(Capture(About(scenario.node), (first,)), directory, hangs=True)
    async with node.playing(play):
        yield node
