"""What `gpumap doctor` does: get a map and the facts of this node, judge them, print the results."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

from gpumap.cli import screen
from gpumap.cli.args import refuse_details
from gpumap.cli.doctor.checks import doctor_values, examine, works
from gpumap.cli.doctor.table import doctor_table
from gpumap.cli.main import until_stopped
from gpumap.cli.rows import NodeMapStream
from gpumap.cli.sources.agent import maps_of_agent
from gpumap.cli.sources.this_node import LOOK_SECONDS, from_node, node_facts, prepare_elsewhere, prepare_here
from gpumap.cli.table import Shape
from gpumap.model.errors import FatalError
from gpumap.model.node_facts import Facts


def run(given: argparse.Namespace) -> int:
    """Examine the agent of --url, or this node. Raises UsageError and FatalError."""
    shape = Shape(headers=not given.no_headers)
    if given.url is not None:
        prepare_elsewhere(given, "--url")
        sights = maps_of_agent(given, 0.0)
        return asyncio.run(until_stopped(_examine(sights, None, given.output, shape)))
    refuse_details(given)
    settings = prepare_here(given)
    sights = from_node(settings, LOOK_SECONDS)
    return asyncio.run(until_stopped(_examine(sights, lambda: node_facts(settings), given.output, shape)))


async def _examine(
    sights: NodeMapStream, look_around: Callable[[], Awaitable[Facts]] | None, form: str, shape: Shape
) -> int:
    """Print what works and what not. Returns 1 if something required fails."""
    screen.take_any_text()
    async with contextlib.aclosing(sights):
        maps = await anext(sights)
    if isinstance(maps, FatalError):
        raise maps
    (node_map,) = maps.maps
    results = examine(node_map, await look_around() if look_around else None)
    if form == "table":
        text = doctor_table(results, replace(shape, screen=screen.screen_of_stdout()))
    else:
        text = json.dumps(doctor_values(maps, results), indent=2, ensure_ascii=False) + "\n"
    print(end=text, flush=True)
    screen.warn_if_stale(maps)
    return 0 if works(results) else 1
