"""Signal handlers of the service, its demo and `record`: they set an event or release the driver. They never raise into
running code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable


def stop_by_signal() -> asyncio.Event:
    """Return an event that SIGTERM, SIGINT and SIGHUP set from now on. A second one ends the process at once, even if
    the event loop is busy. SIGUSR1 has no effect."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    numbers = [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]

    def first(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            loop.call_soon_threadsafe(stop.set)

    for number in numbers:
        signal.signal(number, first)
    release_by_signal(lambda: None)
    return stop


def release_by_signal(release: Callable[[], None]) -> None:
    """Call `release` on each SIGUSR1 from now on."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, release)
