"""This node, looked at by a command: the flags of its sources, and two collections. The one file of this room that
imports the agent.

The flags are read also where another command runs: what collects is imported when it is done.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumap.agent.flags import FLAGS, add_flags
from gpumap.agent.logs import set_up_log
from gpumap.agent.settings import Settings, quiet, resolve
from gpumap.cli.node_documents import Seen, Sights
from gpumap.model.errors import UsageError

if TYPE_CHECKING:
    from gpumap.model.node_facts import Facts

LOOK_SECONDS = 1.0
"""Between the two collections of a look."""
UNHURRIED_SECONDS = 5.0
"""A source's deadline is the interval; the driver's first answer may take longer than a second."""
FLAG_CHOICES = {flag.name: flag.choices for flag in FLAGS if flag.choices}
"""The words that a flag of the agent takes, by the flag."""
_LOOKING = ("sources", "log")
"""What the flags are about that commands which look take."""


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags about this node's sources and the log, as `serve` has them."""
    add_flags(parser, _LOOKING)


def prepare_here(given: argparse.Namespace) -> Settings:
    """Set up the log; give the settings of this node's sources. Raises UsageError."""
    return _prepare(given, _LOOKING)


def prepare_elsewhere(given: argparse.Namespace, asked: str, other: str) -> None:
    """Set up the log. Raises UsageError for flags about this node's sources: the flag `asked` asks `other`."""
    for flag in FLAGS:
        if flag.about == "sources" and getattr(given, flag.name.removeprefix("--").replace("-", "_")) is not None:
            raise UsageError(f"{flag.name}: is about this node's sources, and {asked} asks {other}")
    _prepare(given, ("log",))


def _prepare(given: argparse.Namespace, about: tuple[str, ...]) -> Settings:
    # --interval is how often it is shown.
    ours = argparse.Namespace(**{name: value for name, value in vars(given).items() if name != "interval"})
    settings = quiet(resolve(ours, os.environ, about), given, os.environ)
    set_up_log(settings.log_format, settings.log_level)
    return settings


async def from_node(settings: Settings, interval_seconds: float) -> Sights:
    """Collect here. The first collection is not shown: time on the SMs, and accusations, take two."""
    from gpumap.agent import service
    from gpumap.agent.sources.nvml import worker_command
    from gpumap.model.document import document

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


async def node_facts(settings: Settings) -> Facts:
    """Collect what only this node's own files and privileges show."""
    from gpumap.agent import self_check

    return await self_check.look(settings)
