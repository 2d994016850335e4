"""Ends a command in an event loop on a signal: with exit code 0, without a traceback, and also while it computes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine

from gpumap.cli.entry import handle_ending_signals, leave

_END_SECONDS = 3.0
"""Time for a clean end."""


async def until_stopped(work: Coroutine[None, None, int]) -> int:
    """Run to the end and return the result, or 0 if a signal comes. It cancels the work.

    The process ends at once on a second signal, or if the work does not end in time: it may be computing. The event
    loop's own handlers wait until it does not. These run between two steps of Python, and inside a regular expression.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101 -- this is a coroutine

    def stop(*_: object) -> None:
        handle_ending_signals(leave)
        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, _END_SECONDS)
        loop.call_soon_threadsafe(task.cancel)

    handle_ending_signals(stop)
    try:
        return await work
    except asyncio.CancelledError:
        return 0
    finally:
        handle_ending_signals(leave)
