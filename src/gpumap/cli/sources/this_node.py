"""Collects on this node for a command: the flags of its sources, and two collections.

The only file of this room that imports the agent. Every command line reads the flags, so the collector is imported when
it runs.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumap.agent.flags import ABOUT, FLAGS, add_flags
from gpumap.agent.logs import set_up_log
from gpumap.agent.settings import Settings, quiet, resolve
from gpumap.model.errors import UsageError

if TYPE_CHECKING:
    from gpumap.cli.rows import NodeMapStream

LOOK_SECONDS = 1.0
"""Between the two collections of a command."""
SM_SECONDS = 5.0
"""SM time is measured over at least so long, also if the interval is shorter."""
SOURCE_FLAGS = tuple(flag.name for flag in FLAGS if flag.about == "sources")
_ELSEWHERE = {
    "--url": "an agent with its own sources",
    "$GPUMAP_URL": "an agent with its own sources; --url '' asks this node",
    "--prometheus": "a Prometheus",
}
_FLAG_GROUPS = ("sources", "log")
"""Groups of the agent's flags that these commands have."""
NODE_FLAGS = tuple(ABOUT[group] for group in _FLAG_GROUPS)
"""The titles of these groups in the help."""


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags about this node's sources and the log, as `serve` has them."""
    add_flags(parser, _FLAG_GROUPS)


def prepare_elsewhere(args: argparse.Namespace, source_flag: str) -> None:
    """Set up the log. Raises UsageError for flags about this node's sources: `source_flag` asks somewhere else."""
    for flag in SOURCE_FLAGS:
        if getattr(args, flag.removeprefix("--").replace("-", "_")) is not None:
            raise UsageError(f"{flag}: sets a source of this node, but {source_flag} asks {_ELSEWHERE[source_flag]}")
    prepare(args, ("log",))


def prepare(args: argparse.Namespace, about: tuple[str, ...] = _FLAG_GROUPS) -> Settings:
    """Set up the log. Return the settings of this node's sources. Raises UsageError."""
    # --interval is how often it is shown.
    ours = argparse.Namespace(**{name: value for name, value in vars(args).items() if name != "interval"})
    settings = quiet(resolve(ours, os.environ, about), args, os.environ)
    set_up_log(settings.log_format, settings.log_level)
    return settings


async def maps_of_node(
    settings: Settings, interval_seconds: float, *, watch_allocations: bool = False
) -> NodeMapStream:
    """Collect here. The first collection is not shown: SM time and unassigned use need two."""
    import asyncio

    from gpumap.agent import service
    from gpumap.agent.published import published
    from gpumap.agent.sources.nvml import worker_command
    from gpumap.cli.rows import NodeMaps

    sm_seconds = max(interval_seconds, SM_SECONDS)
    stale_after_seconds = max(settings.stale_after_seconds, interval_seconds)
    settings = replace(
        settings,
        interval_seconds=sm_seconds,
        stale_after_seconds=stale_after_seconds,
        push=settings.push and watch_allocations,
    )
    command = worker_command(settings.nvml_library or None)
    async with service.collector(settings, command, lambda snapshot: None) as loop:
        await loop.collect()
        await asyncio.sleep(LOOK_SECONDS)
        while True:
            yield NodeMaps((published(await loop.collect(), collect=settings.groups),))
            await asyncio.sleep(interval_seconds)
