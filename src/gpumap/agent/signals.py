"""What signals do to the service: set an event or release the driver. They never raise in the middle of something."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def stop_by_signal() -> asyncio.Event:
    """From now on SIGTERM and SIGINT do nothing but set this, and SIGUSR1 does nothing."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    release_by_signal(lambda: None)
    return stop


def release_by_signal(release: Callable[[], None]) -> None:
    """From now on SIGUSR1 does nothing but call this."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, release)
