"""The loop: ask the sources in the right order, step, publish the new snapshot.

The order makes the result correct: NVML's processes, at once their /proc entries, pod identity, and the kubelet's List
last. A process starts only after the kubelet assigned the device to its pod, so a List that is read after NVML contains
every owner. The loop itself remembers nothing about the node; `Memory` does.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gpumap.agent.changes import log_changes
from gpumap.agent.executors import SerialExecutor
from gpumap.agent.join import JoinSettings, Memory, step
from gpumap.agent.sources.inotify import Watcher
from gpumap.agent.sources.pci import PciSource
from gpumap.model.device_ids import pci_address
from gpumap.model.observations import (
    Complaint,
    Failed,
    KubeletAnswer,
    Moment,
    NvmlReading,
    Observations,
    Observed,
    PodIdentity,
    ProcTable,
    SourceAnswer,
    SourceError,
)
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import PodUid

T = TypeVar("T")
DEADLINE_SECONDS_MIN, DEADLINE_SECONDS_MAX = 1.0, 5.0
PUSH_PAUSE_SECONDS = 0.25
"""The shortest time between the starts of two collections, if the trigger starts the second: at most four a second.
They make eight calls of the kubelet, which allows a hundred a second to all of its clients together (k/k
pkg/kubelet/apis/podresources/constants.go). After a collection that took longer, gpumap waits as long as it took."""

BURST_INTERVAL_SECONDS = 0.75
"""The interval in a burst. One begins when a container with a GPU starts: nothing shows when it allocates memory, so
gpumap looks often, and sees it within a second. Another begins after a process that ended before any list had it:
gpumap then sees the next short process, with its owner."""
BURST_SECONDS = 30.0
"""How long a burst lasts: most programs have allocated memory by then. After a burst for short processes, as much time
passes until the next one: they take at most half of the time."""

log = logging.getLogger("gpumap")


def deadline_seconds(interval_seconds: float) -> float:
    """Return how long gpumap waits for a source: the interval, but enough for one that works on a busy machine."""
    return min(max(interval_seconds, DEADLINE_SECONDS_MIN), DEADLINE_SECONDS_MAX)


class Nvml(Protocol):
    async def read(self, interval_seconds: float, timeout_seconds: float) -> SourceAnswer[NvmlReading]: ...
    async def close(self) -> bool: ...


class Kubelet(Protocol):
    async def read(self, timeout_seconds: float) -> SourceAnswer[KubeletAnswer]: ...
    async def wait_until_back(self) -> None: ...


class Procfs(Protocol):
    @property
    def is_real(self) -> bool: ...
    def clock_ticks(self) -> int | None: ...
    def read(self, pids: list[int], not_after: int | None, pod_uids: frozenset[PodUid]) -> SourceAnswer[ProcTable]: ...


def burst_start(last_start: float, moment: float, *, is_new: bool, has_short_process: bool) -> float:
    """Return when the newest burst began."""
    has_paused = moment - last_start >= 2 * BURST_SECONDS
    return moment if is_new or (has_short_process and has_paused) else last_start


def now() -> Moment:
    monotonic = time.monotonic()
    # clock_gettime(2): CLOCK_BOOTTIME is CLOCK_MONOTONIC and the time that the machine was suspended.
    return Moment(monotonic, time.time(), time.clock_gettime(time.CLOCK_BOOTTIME) - monotonic)


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of one node, and what starts a collection before the interval is over.

    A machine without a kubelet has neither pod identity nor a kubelet. Without `pci`, gpumap finds no GPUs that NVML
    does not list.
    """

    nvml: Nvml
    procfs: Procfs
    read_identity: Callable[[], SourceAnswer[PodIdentity]] | None
    kubelet: Kubelet | None
    trigger: Watcher = field(default_factory=lambda: Watcher(()))
    """By default, only the interval starts collections."""
    pci: PciSource | None = None


class Collector:
    """One node's loop. It calls `publish` with each snapshot, on the event loop. `clock` times the answers."""

    def __init__(
        self,
        sources: Sources,
        rules: JoinSettings,
        *,
        interval_seconds: float,
        publish: Callable[[Snapshot], None],
        clock: Callable[[], Moment] = now,
    ) -> None:
        self._sources = sources
        self._trigger = sources.trigger
        self._rules = rules
        self._interval_seconds = interval_seconds
        self.deadline_seconds = deadline_seconds(interval_seconds)
        """For each source. A replay must not depend on how fast the machine is, and sets another."""
        self._publish = publish
        self._now = clock
        self._logged_push: tuple[bool, str] = False, ""
        self._failure = ""
        self._release = asyncio.Event()
        self.is_released = False
        """Whether gpumap has released the driver on request, and does not collect."""
        self._proc_executor = SerialExecutor("gpumap-procfs")
        self._identity_executor = SerialExecutor("gpumap-identity")
        self._step_executor = SerialExecutor("gpumap-step")
        self._memory = Memory()
        self._last_snapshot: Snapshot | None = None
        self._burst_since = -math.inf

    async def run(self) -> None:
        """Collect for ever: at each interval, when the trigger fires, and as soon as a missing kubelet is back."""
        trigger = "interval"
        while True:
            started = time.monotonic()
            expires = None
            self._trigger.news.clear()  # this collection may miss a change that happens while it runs
            try:
                expires = (await self.collect(trigger)).expires
                failure = ""
            except Exception as error:  # the page becomes stale and reports it; the next collection may succeed
                failure = f"error={type(error).__name__} detail={str(error)!r}"
                log.debug("traceback", exc_info=True)
            self._log_failure(failure)
            due = started + self._interval_seconds
            # Data of an earlier collection is dropped when it becomes too old, not an interval later.
            ended = time.monotonic()
            earliest = max(started + PUSH_PAUSE_SECONDS, ended + (ended - started))
            quiet_seconds = ended - max(self._trigger.started_at, self._burst_since)
            expects_processes = self._trigger.is_on and quiet_seconds < BURST_SECONDS
            burst = max(started + BURST_INTERVAL_SECONDS, earliest) if expects_processes else math.inf
            trigger = await self._wait(earliest, due if expires is None else min(due, expires), burst)
            if self._release.is_set():
                trigger = await self._release_driver()

    async def collect(self, trigger: str = "interval") -> Snapshot:
        """Ask every source once, publish the snapshot and return it. The failure of a source does not raise."""
        ticks = await self._clock_ticks()
        nvml = await self._observe(self._sources.nvml.read(self._interval_seconds, self.deadline_seconds))
        pids = _pids(nvml.value) if isinstance(nvml, Observed) else []
        uncertain = self._last_snapshot.pods_to_verify if self._last_snapshot else frozenset[PodUid]()
        procfs = await self._observe(
            self._proc_executor.run(lambda: self._sources.procfs.read(pids, ticks, uncertain), self.deadline_seconds)
        )
        pod_identity = kubelet = None
        if (read_identity := self._sources.read_identity) is not None:

            def watch_and_read() -> SourceAnswer[PodIdentity]:
                # Watch first: a change after the reading must fire the trigger. Both may hang in the same directories.
                self._trigger.watch()
                return read_identity()

            pod_identity = await self._observe(self._identity_executor.run(watch_and_read, self.deadline_seconds))
        self._log_push()
        if self._sources.kubelet is not None:
            kubelet = await self._observe(self._sources.kubelet.read(self.deadline_seconds))
        pci = None
        if self._sources.pci is not None and isinstance(nvml, Observed):
            in_nvml = frozenset(pci_address(gpu.pci_bus_id) for gpu in nvml.value.gpus)
            pci = await self._observe(self._sources.pci.read(in_nvml, self.deadline_seconds))
        observations = Observations(nvml, procfs, pod_identity, kubelet, self._now(), trigger, self._trigger.is_on, pci)
        memory = self._memory
        self._memory, snapshot = await self._step_executor.run(lambda: step(memory, observations, self._rules))
        log_changes(log, self._last_snapshot, snapshot, observations)
        self._note_pods(self._last_snapshot, snapshot)
        self._last_snapshot = snapshot
        self._publish(snapshot)
        return snapshot

    def release(self) -> None:
        """Release the driver after the current collection, for one interval."""
        self._release.set()

    def close(self) -> None:
        """End all threads."""
        for executor in (self._proc_executor, self._identity_executor, self._step_executor):
            executor.close()

    def _note_pods(self, before: Snapshot | None, after: Snapshot) -> None:
        """Pass the pods with a GPU to the trigger, and note when a pod gets one, or has run a short process."""
        pods = frozenset(row.name.pod_name for row in after.containers)
        # The container of a new pod may have started before gpumap knew its pod.
        is_new = before is not None and not pods <= {row.name.pod_name for row in before.containers}
        self._burst_since = burst_start(
            self._burst_since, time.monotonic(), is_new=is_new, has_short_process=after.has_short_process
        )
        self._trigger.pods_with_gpu = pods

    async def _wait(self, earliest: float, until: float, burst: float) -> str:
        """Wait until the earlier of the two, or until the trigger fires (not before `earliest`), or a missing kubelet
        is back. At `burst`, the next collection of a burst is due.

        Returns what starts the next collection.
        """
        kubelet = self._sources.kubelet
        back = asyncio.create_task(kubelet.wait_until_back() if kubelet else asyncio.Event().wait())
        pushed = asyncio.create_task(self._pushed_after(earliest))
        release = asyncio.create_task(self._release.wait())
        try:
            timeout = max(min(until, burst) - time.monotonic(), 0.0)
            done, _ = await asyncio.wait((back, pushed, release), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return "push" if pushed.done() or (not done and burst < until) else "interval"
        finally:
            for task in (back, pushed, release):
                task.cancel()

    async def _release_driver(self) -> str:
        """Keep the driver released for an interval, even if the trigger fires. Another request starts it again."""
        self.is_released = True
        while self._release.is_set():
            self._release.clear()
            is_closed = await self._sources.nvml.close()
            until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self._interval_seconds))
            if is_closed:
                log.info("driver released until=%s", until)
            else:
                log.warning("driver not released: the worker hangs in the driver and does not exit until=%s", until)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._release.wait(), self._interval_seconds)
        self.is_released = False
        return "interval"

    async def _pushed_after(self, earliest: float) -> None:
        """Return when the trigger fires, but not before `earliest`: all changes until then need one collection."""
        await self._trigger.news.wait()
        await asyncio.sleep(max(earliest - time.monotonic(), 0.0))

    def _log_failure(self, failure: str) -> None:
        """Log that collections fail, and that they succeed again, whenever it changes."""
        if failure and failure != self._failure:
            log.error("collection failed %s", failure)
        elif self._failure and not failure:
            log.info("collections succeed again")
        self._failure = failure

    def _log_push(self) -> None:
        """Log whether allocations start a collection, and if not why, whenever it changes."""
        is_on, trouble = self._trigger.is_on, self._trigger.trouble
        state = is_on, trouble.reason if trouble else ""
        if state == self._logged_push:
            return
        self._logged_push = state
        sentence = "allocations start a collection" if is_on else "allocations start no collection"
        if trouble is None:
            log.info("%s push=%d", sentence, is_on)
        else:
            level = logging.INFO if trouble.reason.endswith("_missing") else logging.WARNING
            log.log(level, "%s push=%d reason=%s detail=%r", sentence, is_on, trouble.reason, trouble.detail)

    async def _clock_ticks(self) -> int | None:
        if self._sources.procfs.is_real:
            return self._sources.procfs.clock_ticks()  # a clock: no file can block it
        try:
            return await self._proc_executor.run(self._sources.procfs.clock_ticks, self.deadline_seconds)
        except (OSError, TimeoutError):
            return None  # the read of /proc itself reports the reason

    async def _observe(self, read: Awaitable[SourceAnswer[T]]) -> Observed[T] | Failed:
        """Await a source's answer and convert every exception to a failure."""
        started = time.monotonic()
        try:
            answer = await read
            return Observed(answer.value, self._now(), time.monotonic() - started, answer.complaints)
        except SourceError as error:
            complaints = error.complaints
        except TimeoutError:
            complaints = (Complaint("deadline_exceeded", f"no answer within {self.deadline_seconds:g} s"),)
        except Exception as error:
            log.debug("a source failed unexpectedly", exc_info=True)
            complaints = (Complaint("internal_error", f"{type(error).__name__}: {error}"),)
        return Failed(self._now(), time.monotonic() - started, complaints)


def _pids(reading: NvmlReading) -> list[int]:
    pids: set[int] = set()
    for gpu in reading.gpus:
        pids.update(process.pid for process in gpu.processes or ())
        for instance in gpu.instances:
            pids.update(process.pid for process in instance.processes or ())
    return sorted(pids)
