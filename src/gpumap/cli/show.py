"""Shows the maps of nodes once or repeatedly.

A watch goes on after an agent's failure; a single command does not.
"""

from __future__ import annotations

import asyncio
import contextlib

from gpumap.cli.entry import print_notices
from gpumap.cli.node_maps import NodeMapStream
from gpumap.cli.painting import (
    Painter,
    View,
    is_interactive,
    notices_of,
    screen_of_stdout,
    take_any_text,
    text_of,
    warn_if_stale,
)
from gpumap.cli.signals import until_stopped
from gpumap.cli.tables.unknowns import is_blind
from gpumap.model.errors import FatalError


def run(answers: NodeMapStream, view: View) -> int:
    """Show the answers until they end or a signal comes. Return the exit code."""
    return asyncio.run(until_stopped(_show(answers, view)))


async def _show(answers: NodeMapStream, view: View) -> int:
    """Print the first answer, or each. Return 1 if a node is missing, or neither its kubelet nor NVML answers."""
    take_any_text()
    painter = Painter(view) if view.watch else None
    if view.live or (painter is not None and painter.in_place and is_interactive()):
        from gpumap.cli.live import show_live

        return await show_live(answers, view)
    try:
        async with contextlib.aclosing(answers):
            async for answer in answers:
                if painter is not None:
                    painter.paint(answer)
                    continue
                if isinstance(answer, FatalError):
                    raise answer
                text, notices = text_of(answer, view, screen_of_stdout()), notices_of(answer, view)
                print(end=text, flush=True)
                print_notices(notices)
                knows_nothing = any(map(is_blind, answer.maps))
                if not knows_nothing:  # the notices say so already
                    warn_if_stale(answer)
                return 1 if answer.missing or knows_nothing else 0
    finally:
        if painter is not None:
            painter.leave()
    return 1
