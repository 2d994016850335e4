"""Asks the NVML worker for one reading of every GPU. Never takes longer than the deadline, whatever the driver does.

A GPU that hangs or crashes the worker affects only itself: the source returns the answers of the others. It replaces a
worker that is dead, sends invalid lines or hung for long. It remembers only what it needs to run the worker
(`nvml_state`).
"""

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from gpumap.agent.nvml_worker import wire
from gpumap.agent.nvml_worker.wire import word
from gpumap.agent.own_process import WORKER_DESCRIPTORS, WORKER_THREADS, lack
from gpumap.agent.sources.nvml_process import END_SECONDS, Worker
from gpumap.agent.sources.nvml_state import CrashSuspects, ReplacementPolicy, SampleRing, XidEvents
from gpumap.model.grouping import grouped
from gpumap.model.observations import Complaint, NvmlReading, SourceAnswer, SourceError
from gpumap.model.readings import GpuReading, Listening

MOST_CRASHES = 4
"""In one read; a GPU that was not asked by then waits for the next read."""
DRIVER = -1
"""A key like the GPUs' indices: the whole driver has not answered."""


def worker_command(library: str | None) -> list[str]:
    """Return the command of this package's worker, under this interpreter, with `library` (default: the loader's)."""
    # -P: do not import from the working directory.
    command = [sys.executable, "-P", "-m", "gpumap.agent.nvml_worker"]
    return command if library is None else [*command, "--library", library]


@dataclass(slots=True)
class _Read:
    """One read: the requested GPUs, and the answers so far, possibly of several workers."""

    number: int
    asked_at: float
    last_gpus: tuple[int, ...]
    skip: tuple[int, ...]
    driver: wire.DriverMessage | None = None
    busy: set[int] = field(default_factory=set)
    gpus: dict[int, GpuReading] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)
    crashed: set[int] = field(default_factory=set)
    crashes: list[Complaint] = field(default_factory=list)

    @property
    def settled(self) -> set[int]:
        """The GPUs that need no request, or no second one."""
        return {*self.skip, *self.busy, *self.gpus, *self.crashed}

    @property
    def missing(self) -> list[int]:
        """The GPUs that were asked and have not answered."""
        settled = self.settled
        return [index for index in range(self.driver.gpus if self.driver else 0) if index not in settled]

    @property
    def complete(self) -> bool:
        return self.driver is not None and not self.missing

    def has_later_turn(self, index: int) -> bool:
        """Return whether a GPU is under suspicion, and another one before it has not answered."""
        turns = sorted(self.missing, key=lambda gpu: self.last_gpus.index(gpu) if gpu in self.last_gpus else -1)
        return index in self.last_gpus and turns[0] != index


class NvmlSource:
    """One read at a time. A read starts the worker if there is none, also after `close`.

    With `release` the worker releases the driver after each read, if necessary by its end. Values that change slowly
    are at most `hold_seconds` old (docs/reference/metrics.md).
    """

    def __init__(
        self,
        command: Sequence[str],
        groups: Sequence[str] = (),
        *,
        release: bool = False,
        hold_seconds: float = 0.0,
        replace_after_seconds: float = 30.0,
        ring: SampleRing | None = None,
    ) -> None:
        self._command = tuple(command)
        self._groups = tuple(groups)
        self._release = release
        self._hold_seconds = hold_seconds
        self._replacement = ReplacementPolicy(replace_after_seconds, skips_hung=release)
        self._worker: Worker | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._reads = 0
        self._unanswered: dict[int, float] = {}  # since when, by index; survives the worker
        self._suspects = CrashSuspects()
        self._xid_news = XidEvents()
        self._ring = ring or SampleRing()
        self._earlier_crashes: dict[Complaint, None] = {}  # of workers between two reads, until an answer reports them

    async def start(self) -> None:
        """Start the worker before the first read, during other work. If it cannot start, the read reports it."""
        with contextlib.suppress(SourceError):
            await self._start()

    async def read(self, interval_seconds: float, timeout_seconds: float) -> SourceAnswer[NvmlReading]:
        """Return the reading. Raises `SourceError` with the library's reason, or with the worker's end."""
        asked_at = asyncio.get_running_loop().time()
        if self._replacement.is_over(asked_at, self._unanswered, self._worker.started if self._worker else None):
            self._end_worker()
        self._reads += 1
        read = _Read(self._reads, asked_at, *self._suspects.plan(), busy=set(self._replacement.skipped))
        try:
            async with asyncio.timeout_at(asked_at + timeout_seconds):
                if DRIVER not in read.busy:
                    await self._ask_worker(read, interval_seconds, timeout_seconds)
        except TimeoutError:
            pass  # answers so far remain
        if read.driver is None:
            since = self._unanswered.setdefault(DRIVER, asked_at)
            waited = asyncio.get_running_loop().time() - since
            raise SourceError("deadline_exceeded", f"NVML has not answered for {waited:.1f} s")
        return self._build_reading(read, read.driver)

    async def close(self) -> bool:
        """Kill the worker and wait a moment. Return whether it ended, and holds nothing of the driver."""
        self._end_worker()
        hanging: set[asyncio.Task[None]] = set()
        if self._ending:
            _, hanging = await asyncio.wait(self._ending, timeout=END_SECONDS)
        for task in self._ending:
            task.cancel()  # it hangs in the driver, and gpumap cannot change that
        await asyncio.gather(*self._ending, return_exceptions=True)
        return not hanging

    # --- the worker ---

    async def _ask_worker(self, read: _Read, interval_seconds: float, timeout_seconds: float) -> None:
        """Wait until the read is complete. If a worker dies, another one reads the remaining GPUs."""
        while not read.complete and len(read.crashes) < MOST_CRASHES:
            worker = self._worker
            fresh = worker is None or worker.dead
            if worker is not None and worker.dead:
                self._record_crash(worker, await worker.reason_of_end())
            if worker is None or fresh:
                worker = await self._start()
            request = wire.Request(
                read.number,
                interval_seconds,
                timeout_seconds,
                read.last_gpus,
                tuple(sorted(read.settled)),
                self._groups,
                self._release,
                self._hold_seconds,
            )
            worker.send(wire.encode(request))
            has_driver = await self._await_answers(worker, read)
            if read.complete:
                return
            read.crashes.append(Complaint("worker_crashed", "the worker closed its output"))  # if time is short
            read.crashes[-1] = await worker.reason_of_end()
            self._end_worker()
            if has_driver:
                self._find_crashed_gpu(read)
            elif not fresh:
                self._record_crash(worker, read.crashes.pop())  # it had died before: no GPU of this read caused it
            elif read.driver is None:
                raise SourceError(*read.crashes[-1])

    def _record_crash(self, worker: Worker, reason: Complaint) -> None:
        """Handle a worker that died between two reads. If it ended on purpose, that is not a fault."""
        if not worker.ended_on_purpose:
            self._earlier_crashes[reason] = None

    def _find_crashed_gpu(self, read: _Read) -> None:
        index = self._suspects.crashed(read.missing, read.last_gpus)
        if index is not None:
            read.crashed.add(index)
        # The GPUs that were last come after the others again.
        read.last_gpus = tuple(sorted(read.missing, key=lambda index: index in read.last_gpus))

    async def _start(self) -> Worker:
        self._end_worker()
        if (lacking := lack(WORKER_DESCRIPTORS, WORKER_THREADS)) is not None:
            raise SourceError("worker_start", f"cannot start {self._command[0]}: {lacking.detail}")
        try:
            self._worker = await Worker.start(self._command)
        except OSError as error:
            raise SourceError("worker_start", f"cannot start {self._command[0]}: {error}") from error
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            task = asyncio.create_task(self._drain(self._worker), name="nvml-worker-ending")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            self._worker = None

    async def _drain(self, worker: Worker) -> None:
        """Take the events that it still wrote, and wait until it ends."""
        try:
            for line in await worker.last_lines():
                with contextlib.suppress(ValueError):  # it may be the reason for the end of the worker
                    message = wire.decode(line)
                    if isinstance(message, wire.XidMessage | wire.ListeningMessage):
                        self._xid_news.add(message)
        finally:
            worker.end()
        await worker.ended()

    async def _await_answers(self, worker: Worker, read: _Read) -> bool:
        """Wait until the read is complete or the worker has ended. Return whether the driver's line came."""
        has_driver = False
        while not (has_driver and read.complete):
            try:
                line = await worker.line()
                answer = None if line is None else wire.decode(line)
            except ValueError as error:
                self._end_worker()
                raise SourceError("protocol", f"the worker's line is not an answer: {error}") from error
            match answer:
                case None:
                    break
                case wire.XidMessage() | wire.ListeningMessage():
                    self._xid_news.add(answer)
                case _:
                    has_driver |= self._accept(answer, read)
        return has_driver

    def _accept(self, answer: wire.DriverMessage | wire.GpuMessage | wire.ErrorMessage, read: _Read) -> bool:
        """Return whether the answer is that of the driver, the first of a read."""
        if answer.read != read.number:
            # An answer of an older read is too late to use, but its GPU does not hang.
            index = answer.gpu.index if isinstance(answer, wire.GpuMessage) else DRIVER
            if index in self._unanswered:
                read.late[index] = self._unanswered.pop(index)
            return False
        match answer:
            case wire.ErrorMessage():
                self._unanswered.pop(DRIVER, None)
                raise SourceError(answer.reason, answer.detail)
            case wire.DriverMessage():
                self._unanswered = {i: since for i, since in self._unanswered.items() if 0 <= i < answer.gpus}
                read.driver = answer
                read.busy.update(answer.busy)
                return True
            case wire.GpuMessage(gpu=gpu):
                self._unanswered.pop(gpu.index, None)
                self._suspects.answered(gpu.index)
                read.gpus[gpu.index] = gpu
        return False

    # --- the answer ---

    def _build_reading(self, read: _Read, driver: wire.DriverMessage) -> SourceAnswer[NvmlReading]:
        monotonic = asyncio.get_running_loop().time()
        pairs = [self._gpu_reading(index, read, monotonic) for index in range(driver.gpus)]
        gpus = tuple(gpu for gpu, _ in pairs)
        if not self._ring.is_drained():
            gpus = tuple(structs.replace(gpu, samples=None, sampled_seconds=None, unsampled=()) for gpu in gpus)
        complaints = [*self._earlier_crashes, *read.crashes]
        self._earlier_crashes.clear()
        complaints += [complaint for _, complaint in pairs if complaint is not None]
        complaints += _refusals(gpus)
        versions = driver.driver_version, driver.cuda_version, driver.nvml_version
        xids, listening = self._xid_news.take(monotonic)
        if self._release:  # no listener; the GPU supports XID events, so this is blind time
            listening = tuple(Listening(uuid, 0.0, 0.0) for uuid in sorted({period.uuid for period in listening}))
        reading = NvmlReading(*versions, gpus, xids, listening)
        return SourceAnswer(reading, tuple(dict.fromkeys(complaints)))

    def _gpu_reading(self, index: int, read: _Read, monotonic: float) -> tuple[GpuReading, Complaint | None]:
        gpu = read.gpus.get(index)
        if gpu is not None:
            return gpu, _fault(gpu) if gpu.fault else None
        if index in read.skip or index in read.crashed:
            return _crashed(index, f"gpu {index} crashed the worker; gpumap skips it for a while")
        if index not in self._unanswered and index not in read.late and (read.crashes or read.has_later_turn(index)):
            return _crashed(index, f"gpu {index} may have crashed the worker; gpumap did not read it")
        since = read.late.get(index) or self._unanswered.setdefault(index, read.asked_at)
        stuck = monotonic - since
        detail = f"gpu {index} has not answered for {stuck:.1f} s"
        return GpuReading(index, fault="hung", stuck_seconds=stuck), Complaint("hung", detail)


def _crashed(index: int, detail: str) -> tuple[GpuReading, Complaint]:
    return GpuReading(index, fault="worker_crashed"), Complaint("worker_crashed", detail)


def _fault(gpu: GpuReading) -> Complaint:
    who = f"gpu {gpu.index}" + (f" ({gpu.uuid})" if gpu.uuid else "")
    refusals = ", ".join(f"{call} said {code} ({word(code)})" for call, code in gpu.refusals.items())
    return Complaint(gpu.fault or "", f"{who}: {refusals}" if refusals else who)


def _refusals(gpus: Iterable[GpuReading]) -> Iterator[Complaint]:
    """Return one complaint for each call and code, with all GPUs that refused it."""
    by_refusal = grouped((refusal, gpu.index) for gpu in gpus if not gpu.fault for refusal in gpu.refusals.items())
    for (call, code), indices in by_refusal.items():
        who = ", ".join(str(index) for index in indices)
        yield Complaint(word(code), f"gpu {who}: {call} said {code} ({word(code)})")
