"""Ends a command in an event loop on a signal: with exit code 0, without a traceback."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine

_AGAIN_SECONDS = 0.2


async def until_stopped(work: Coroutine[None, None, int]) -> int:
    """Run to the end and return the result, or 0 as soon as a signal comes. Then the process ends: another signal
    changes nothing."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, lambda: None)
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    while not working.done():
        working.cancel()  # what it waits for may swallow the cancellation: repeat it
        await asyncio.wait((working,), timeout=_AGAIN_SECONDS)
    _ignore_more()
    return 0 if working.cancelled() else working.result()


def _ignore_more() -> None:
    """Ignore further signals: the closing loop and Python restore their defaults, and a second signal would kill."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
