"""Answers requests: initialises NVML, counts the GPUs, and lets each GPU's thread read it.

A call that hangs costs the thread that it hangs in: a GPU whose thread has not come back is not asked again.
"""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from gpumap.nvml_worker import wire
from gpumap.nvml_worker.codes import DRIVER_VERSION_MISMATCH, FUNCTION_NOT_FOUND, LOST_TOUCH, UNINITIALIZED, word
from gpumap.nvml_worker.library import Library, LibraryError, RefusedError
from gpumap.nvml_worker.reading import Epoch, GpuReader

Write = Callable[[bytes], None]

NEEDS_NEW_PROCESS = frozenset({DRIVER_VERSION_MISMATCH, FUNCTION_NOT_FOUND})
"""The library is not the driver's, and a process that has one of this name mapped never gets another."""
LOOK_SECONDS = 0.02


class GpuThread:
    """One GPU's thread. `busy` from `start` on until the reading is done, and for ever if a call hangs."""

    def __init__(self, library: Library, index: int, write: Write) -> None:
        self.index = index
        self.busy = False
        self.reader = GpuReader(library, index)
        self._write = write
        self._begin: SimpleQueue[tuple[wire.Request, Epoch, SimpleQueue[int]]] = SimpleQueue()
        threading.Thread(target=self._run, name=f"gpu-{index}", daemon=True).start()

    def start(self, request: wire.Request, epoch: Epoch, done: "SimpleQueue[int]") -> None:
        """Read once; the index is put into `done` when the answer has been written."""
        self.busy = True
        self._begin.put((request, epoch, done))

    def _run(self) -> None:
        while True:
            request, epoch, done = self._begin.get()
            reading = self.reader.read(epoch, request.interval_seconds)
            self.busy = False  # before the answer: who reads it may count on this thread
            self._write(wire.encode_gpu(request.read, reading))
            done.put(self.index)


class Rounds:
    """Answers one request after the other; of several that wait, the newest."""

    def __init__(self, library: Library, write: Write, exit_process: Callable[[int], None]) -> None:
        self._library = library
        self._write = write
        self._exit_process = exit_process
        self._requests: SimpleQueue[wire.Request] = SimpleQueue()
        self._threads: list[GpuThread] = []
        self._open = False
        self._epoch = Epoch(0, 0)

    def ask(self, request: wire.Request) -> None:
        """From any thread."""
        self._requests.put(request)

    def run(self) -> None:
        while True:
            request = self._requests.get()
            while not self._requests.empty():
                request = self._requests.get()
            try:
                driver = self._driver(request)
            except LibraryError as error:
                self._write(wire.encode_error(wire.ErrorSaid(request.read, error.code, error.reason, str(error))))
                if error.code in NEEDS_NEW_PROCESS:
                    self._exit_process(0)
                continue
            self._write(wire.encode_driver(driver))
            self._read_gpus(request, driver)

    def _driver(self, request: wire.Request) -> wire.DriverSaid:
        if self._open and self._lost_touch():
            self._close_unless_busy()
        if not self._open:
            self._library.open()
            self._open = True
            self._epoch = self._epoch._replace(initialised=self._epoch.initialised + 1)
        try:
            count = self._library.count()
        except RefusedError as refused:
            self._close_unless_busy()
            raise LibraryError(refused.code, word(refused.code), str(refused)) from refused
        self._epoch = self._epoch._replace(gpus=count)
        return wire.DriverSaid(
            request.read,
            driver_version=self._or_unknown(self._library.driver_version),
            cuda_version=self._or_unknown(self._library.cuda_version),
            nvml_version=self._or_unknown(self._library.nvml_version),
            gpus=count,
            busy=tuple(thread.index for thread in self._threads[:count] if thread.busy),
        )

    def _lost_touch(self) -> bool:
        """Whether a GPU's reading said that NVML must be initialised anew, or all of them said what may mean it."""
        codes = [thread.reader.refused_with for thread in self._threads[: self._epoch.gpus] if not thread.busy]
        hopeless = bool(codes) and all(code in LOST_TOUCH for code in codes)
        return hopeless or any(code in UNINITIALIZED for code in codes)

    def _close_unless_busy(self) -> None:
        """A thread that hangs in a call may make a shutdown hang too: then another process is what helps."""
        if not any(thread.busy for thread in self._threads):
            self._library.close()
            self._open = False

    def _or_unknown(self, ask: Callable[[], str]) -> str:
        try:
            return ask()
        except RefusedError:
            return ""

    def _read_gpus(self, request: wire.Request, driver: wire.DriverSaid) -> None:
        while len(self._threads) < driver.gpus:
            self._threads.append(GpuThread(self._library, len(self._threads), self._write))
        left_out = {*driver.busy, *request.skip}
        asked = [thread for thread in self._threads[: driver.gpus] if thread.index not in left_out]
        done: SimpleQueue[int] = SimpleQueue()
        together = [thread for thread in asked if thread.index not in request.last]
        for thread in together:
            thread.start(request, self._epoch, done)
        suspects = sorted((t for t in asked if t.index in request.last), key=lambda t: request.last.index(t.index))
        self._read_suspects(request, suspects, len(together), done)

    def _read_suspects(
        self, request: wire.Request, suspects: Sequence[GpuThread], running: int, done: "SimpleQueue[int]"
    ) -> None:
        """Each when all before it are done; none any more as soon as the next request is there."""
        for thread in suspects:
            while running:
                try:
                    done.get(timeout=LOOK_SECONDS)
                    running -= 1
                except Empty:
                    if not self._requests.empty():
                        return
            thread.start(request, self._epoch, done)
            running = 1
