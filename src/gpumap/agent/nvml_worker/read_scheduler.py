"""Answers requests: initializes NVML, counts the GPUs, and schedules the read of each one.

One thread reads GPU after GPU while the driver answers at once: parallel threads would cost more in waiting for each
other than all the calls. If no GPU is done for a moment, another thread reads the rest. So a call that hangs affects
only its GPU. The scheduler does not read a GPU again that is still busy with an earlier read.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

import pynvml

from gpumap.agent.nvml_worker import driver, wire
from gpumap.agent.nvml_worker.calls import GONE, LOST_TOUCH, UNINITIALIZED
from gpumap.agent.nvml_worker.driver import ReinitBackoff, close_within
from gpumap.agent.nvml_worker.library import Library, LibraryError, RefusedError
from gpumap.agent.nvml_worker.listener import Listener
from gpumap.agent.nvml_worker.processes import KEPT_SECONDS
from gpumap.agent.nvml_worker.reading import GpuReader, HandleGeneration
from gpumap.agent.nvml_worker.wire import Output, word

NEEDS_NEW_PROCESS = frozenset({pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""The library does not match the driver, and a process that has loaded one of this name never gets another."""
PATIENCE_SECONDS = 0.01
"""If no GPU is done for this time, one more thread starts."""
REINIT_SECONDS = 60.0
"""Time after a lost GPU until NVML is initialized again. It grows while that does not help."""
CLOSE_PART = 0.3
"""A shutdown of NVML that takes this part of the deadline hangs. The process ends, and another one reads the healthy
GPUs in the rest of the time."""
RELEASE_SECONDS = 30.0
"""Limit of the wait for a GPU. Then the process ends, which releases the driver. Without persistence mode each GPU
takes one to three seconds whenever NVML is initialized (NVIDIA, "Driver Persistence")."""


class _Sweep:
    """The GPUs to read for one request. `ended` has an item of each thread that found no more work.

    After that request, a sweep may also only take the samples that the driver would drop before the next one.
    """

    def __init__(self, request: wire.Request, generation: HandleGeneration, gpus: Iterable[GpuReader]) -> None:
        self.request = request
        self.generation = generation
        self.keeps_samples = False
        self.to_do = deque(gpus)
        self.engaged = 0
        self.ended: SimpleQueue[None] = SimpleQueue()
        for gpu in self.to_do:
            gpu.busy = True


class _Sweeper:
    """A thread that reads GPUs of one sweep at a time. It may hang in one of them for ever."""

    def __init__(self, output: Output, listener: Listener, idle: "SimpleQueue[_Sweeper]") -> None:
        self.begin: SimpleQueue[_Sweep] = SimpleQueue()
        self._output = output
        self._listener = listener
        self._idle = idle
        threading.Thread(target=self._run, name="sweeper", daemon=True).start()

    def _run(self) -> None:
        while True:
            sweep = self.begin.get()
            while True:
                try:
                    gpu = sweep.to_do.popleft()
                except IndexError:
                    break
                if sweep.keeps_samples:
                    gpu.keep_samples()
                    gpu.busy = False
                    continue
                request = sweep.request
                reading = gpu.read(sweep.generation, request.interval_seconds, request.groups, request.hold_seconds)
                if _listens(sweep.request):
                    reading = self._listener.attend(reading, gpu.handle)
                elif "health" in sweep.request.groups:
                    self._listener.leave(reading, gpu.handle)
                line = wire.encode(wire.GpuMessage(sweep.request.read, reading))
                gpu.busy = False  # before the answer: its reader may rely on this GPU
                self._output.add(line)
            self._output.flush()
            self._idle.put(self)
            sweep.ended.put(None)


def _listens(request: wire.Request) -> bool:
    """Skips all GPUs. With a release of the driver after each read there are no XID events."""
    return "health" in request.groups and not request.release


class ReadScheduler:
    """Answers one request after the other; if several wait, only the newest."""

    def __init__(self, library: Library, output: Output, exit_process: Callable[[int], None]) -> None:
        self._library = library
        self._output = output
        self._listener = Listener(library, output)
        self._exit_process = exit_process
        self._requests: SimpleQueue[wire.Request] = SimpleQueue()
        self._gpus: list[GpuReader] = []
        self._idle: SimpleQueue[_Sweeper] = SimpleQueue()
        self._sweepers = 0
        self._open = False
        self._close_seconds = 0.0
        self._backoff = ReinitBackoff(REINIT_SECONDS)
        self._bound: frozenset[str] = frozenset()
        self._generation = HandleGeneration(0, 0)
        self._versions: dict[str, tuple[int, str]] = {}

    def ask(self, request: wire.Request) -> None:
        """Any thread may call it."""
        self._requests.put(request)

    def run(self) -> None:
        request = self._requests.get()
        while True:
            while not self._requests.empty():
                request = self._requests.get()
            self._close_seconds = CLOSE_PART * request.deadline_seconds
            try:
                message = self._driver(request)
            except LibraryError as error:
                self._write(wire.encode(wire.ErrorMessage(request.read, error.code, error.reason, str(error))))
                if error.code in NEEDS_NEW_PROCESS:
                    self._end()
            else:
                if _listens(request):
                    self._listener.report()
                self._write(wire.encode(message))
                self._read_gpus(request, message)
            if request.release:
                self._release_driver()
            request = self._next_after(request)

    def _next_after(self, request: wire.Request) -> wire.Request:
        """Return the next request. If the interval is long, take the samples until then that the driver would drop."""
        stretches = 1 if request.release else math.ceil(request.interval_seconds / KEPT_SECONDS)
        for _ in range(1, stretches):
            try:
                return self._requests.get(timeout=request.interval_seconds / stretches)
            except Empty:
                self._keep_samples(request)
        return self._requests.get()

    def _keep_samples(self, request: wire.Request) -> None:
        left_out = {*request.skip, *request.last_gpus}
        gpus = [gpu for gpu in self._gpus[: self._generation.gpus] if not gpu.busy and gpu.index not in left_out]
        if self._open:
            sweep = _Sweep(request, self._generation, gpus)
            sweep.keeps_samples = True
            self._sweep(sweep)

    def _write(self, line: bytes) -> None:
        self._output.add(line)
        self._output.flush()

    def _driver(self, request: wire.Request) -> wire.DriverMessage:
        if self._open and self._must_initialize():
            self._close_unless_busy()
        if not self._open:
            self._bound = driver.bound_devices()
            self._library.open()
            self._open = True
            self._generation = self._generation._replace(initialised=self._generation.initialised + 1)
        try:
            count = self._library.count()
        except RefusedError as refused:
            self._close_unless_busy()
            raise LibraryError(refused.code, word(refused.code), str(refused)) from refused
        self._generation = self._generation._replace(gpus=count)
        return wire.DriverMessage(
            request.read,
            driver_version=self._version(self._library.driver_version),
            cuda_version=self._version(self._library.cuda_version),
            nvml_version=self._version(self._library.nvml_version),
            gpus=count,
            busy=tuple(gpu.index for gpu in self._gpus[:count] if gpu.busy),
        )

    def _must_initialize(self) -> bool:
        """Return whether to initialize NVML again.

        The reason is the code of a GPU, or of all GPUs, a GPU that was bound or unbound, or a lost GPU after a pause.
        """
        gpus = self._gpus[: self._generation.gpus]
        codes = {gpu.refused_with for gpu in gpus if not gpu.busy}
        if codes & UNINITIALIZED or (codes and codes <= LOST_TOUCH) or driver.bound_devices() != self._bound:
            return True
        lost = frozenset(gpu.index for gpu in gpus if gpu.refused_with in GONE | LOST_TOUCH)
        return self._backoff.is_due(lost, time.monotonic())

    def _release_driver(self) -> None:
        """Release the driver, unless the next request already exists."""
        give_up = time.monotonic() + RELEASE_SECONDS
        while self._idle.qsize() < self._sweepers and time.monotonic() < give_up:
            if not self._requests.empty():
                return
            time.sleep(PATIENCE_SECONDS)
        self._close_unless_busy()
        if self._open or driver.holds_devices():
            self._end()

    def _close_unless_busy(self) -> None:
        """A thread that hangs in a call may make a shutdown hang, too. Then only another process helps."""
        if self._open and not any(gpu.busy for gpu in self._gpus):
            if not close_within(self._close, self._close_seconds):
                self._end()
            self._open = False

    def _close(self) -> bool:
        if not self._listener.stop():
            return False
        for gpu in self._gpus:
            gpu.drop_device()
        self._library.close()
        return True

    def _end(self) -> None:
        """End the process. The reader of the lines sees it at once, even if a thread hangs in the kernel."""
        self._output.close()
        self._exit_process(0)

    def _version(self, ask: Callable[[], str]) -> str:
        """Return a version, which the driver keeps while NVML is initialized; if it is refused, the last one."""
        initialised, version = self._versions.get(ask.__name__, (0, ""))
        if initialised != self._generation.initialised:
            try:
                version = ask()
                self._versions[ask.__name__] = self._generation.initialised, version
            except RefusedError:
                pass
        return version

    def _read_gpus(self, request: wire.Request, message: wire.DriverMessage) -> None:
        while len(self._gpus) < message.gpus:
            self._gpus.append(GpuReader(self._library, len(self._gpus), self._listener.count_xids))
        left_out = {*message.busy, *request.skip}
        gpus = [gpu for gpu in self._gpus[: message.gpus] if gpu.index not in left_out]
        sweep = _Sweep(request, self._generation, [gpu for gpu in gpus if gpu.index not in request.last_gpus])
        self._sweep(sweep)
        suspects = [gpu for index in request.last_gpus for gpu in gpus if gpu.index == index]
        self._read_suspects(sweep, suspects)

    def _sweep(self, sweep: _Sweep) -> None:
        """Wait until each GPU has begun and every line of the finished ones is written."""
        if sweep.to_do:
            self._engage(sweep)
        while sweep.engaged:
            to_do = len(sweep.to_do)
            try:
                sweep.ended.get(timeout=PATIENCE_SECONDS)
                sweep.engaged -= 1
            except Empty:
                still_to_do = len(sweep.to_do)
                self._output.flush()  # a reading that is written survives a crash in the next one
                if not still_to_do:
                    return  # a thread writes the line of its current GPU itself
                if still_to_do == to_do:
                    self._engage(sweep)

    def _engage(self, sweep: _Sweep) -> None:
        """Start one more thread: an idle one, or a new one."""
        try:
            sweeper = self._idle.get_nowait()
        except Empty:
            sweeper = _Sweeper(self._output, self._listener, self._idle)
            self._sweepers += 1
        sweep.engaged += 1
        sweeper.begin.put(sweep)

    def _read_suspects(self, sweep: _Sweep, suspects: Sequence[GpuReader]) -> None:
        """Yield GPUs one after another. Stop when the next request arrives."""
        for gpu in suspects:
            while sweep.engaged:
                try:
                    sweep.ended.get(timeout=PATIENCE_SECONDS)
                    sweep.engaged -= 1
                except Empty:
                    if not self._requests.empty():
                        return
            sweep = _Sweep(sweep.request, sweep.generation, [gpu])
            self._sweep(sweep)
