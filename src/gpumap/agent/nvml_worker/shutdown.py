"""Letting go of NVML, which may hang as any call may: in a thread of its own, which is waited for only so long."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue


class Shutdown:
    """`close` lets go of all, and returns whether that is done."""

    def __init__(self, close: Callable[[], bool]) -> None:
        self._close = close
        self._begin: SimpleQueue[None] = SimpleQueue()
        self._done: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def within(self, seconds: float) -> bool:
        """Whether it is done by then. If not, it may hang for ever: this is not to be asked again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="letting-go", daemon=True)
            self._thread.start()
        self._begin.put(None)
        try:
            return self._done.get(timeout=seconds)
        except Empty:
            return False

    def _run(self) -> None:
        while True:
            self._begin.get()
            self._done.put(self._close())
