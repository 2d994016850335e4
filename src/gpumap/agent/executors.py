"""Calls that may block: one thread runs them for the event loop, one at a time, each with a deadline.

A call that hangs is abandoned: no file and no library can block the service or its shutdown.
"""

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], object], "asyncio.Future[object]", asyncio.AbstractEventLoop]


class SerialExecutor:
    """Runs calls in its own daemon thread, in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    async def run(self, call: Callable[[], T], timeout_seconds: float | None = None) -> T:
        """Run `call` in the thread. Raises TimeoutError if it, or an earlier call, does not return in time."""
        if not self._thread.is_alive():
            self._thread.start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[object] = loop.create_future()
        self._jobs.put((call, done, loop))
        async with asyncio.timeout(timeout_seconds):
            return await done  # type: ignore[return-value] # a future holds what its call returns

    def close(self) -> None:
        """End the thread after its current call."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, done, loop = job
            if done.cancelled():
                continue  # the caller has given up
            try:
                result: object = call()
                error: Exception | None = None
            except Exception as raised:  # the caller handles whatever the call raises
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, done, result, error)
            except RuntimeError:
                return  # the loop is closed: no caller waits


def _settle(done: "asyncio.Future[object]", result: object, error: Exception | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


def open_at_once(path: Path, more_flags: int = 0) -> BinaryIO:
    """Open a file to read bytes. A pipe without a writer does not block. Raises OSError; then no file stays open."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | more_flags))
