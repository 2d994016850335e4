"""Signal handlers of the service: they set an event or release the driver. They never raise into running code."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def stop_by_signal() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set from now on. SIGUSR1 has no effect."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    release_by_signal(lambda: None)
    return stop


def release_by_signal(release: Callable[[], None]) -> None:
    """Call `release` on each SIGUSR1 from now on."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, release)
