"""Looks at this node: two collections, or one after the other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from gpumap import service
from gpumap.document import document
from gpumap.look.seen import Seen, Sights
from gpumap.settings import Settings
from gpumap.sources.nvml import worker_command

LOOK_SECONDS = 1.0
"""Between the two collections of a look."""
UNHURRIED_SECONDS = 5.0
"""A source's deadline is the interval; the driver's first answer may take longer than a second."""


async def from_node(settings: Settings, interval_seconds: float) -> Sights:
    """Collect here. The first collection is not shown: time on the SMs, and accusations, take two."""
    deadline_seconds = max(interval_seconds, UNHURRIED_SECONDS)
    stale_after_seconds = max(settings.stale_after_seconds, interval_seconds)
    settings = replace(settings, interval_seconds=deadline_seconds, stale_after_seconds=stale_after_seconds, push=False)
    command = worker_command(settings.nvml_library or None)
    async with service.collector(settings, command, lambda snapshot: None) as loop:
        await loop.collect()
        await asyncio.sleep(LOOK_SECONDS)
        while True:
            yield Seen((document(await loop.collect(), collect=settings.groups),))
            await asyncio.sleep(interval_seconds)
