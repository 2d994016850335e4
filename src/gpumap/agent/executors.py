"""A lane: one thread that does blocking work for the event loop, one call at a time, each with a deadline.

A call that hangs is left behind, never joined: nothing that a file or a library does may hold the service, or its end.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], object], "asyncio.Future[object]", asyncio.AbstractEventLoop]


class SerialExecutor:
    """Runs calls in a daemon thread of its own, in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    async def run(self, call: Callable[[], T], timeout_seconds: float | None = None) -> T:
        """Run `call` in the lane. Raises TimeoutError when it, or one before it, does not return in time."""
        if not self._thread.is_alive():
            self._thread.start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[object] = loop.create_future()
        self._jobs.put((call, done, loop))
        async with asyncio.timeout(timeout_seconds):
            return await done  # type: ignore[return-value] # a future holds what its call returns

    def close(self) -> None:
        """Let the thread end after what it is doing."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, done, loop = job
            if done.cancelled():
                continue  # its caller has given up: what it wanted to know is of the past
            try:
                result: object = call()
                error: Exception | None = None
            except Exception as raised:  # whatever a call raises is its caller's to judge
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, done, result, error)
            except RuntimeError:
                return  # the loop has closed: nobody waits any more


def _settle(done: "asyncio.Future[object]", result: object, error: Exception | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
