"""The loop: ask the sources in the right order, step, publish the newest snapshot.

The order makes the truth: NVML's processes, their /proc entries at once, pod identity, and the kubelet's List last. A
process exists only after its pod was given the device, so a List read after NVML knows every owner. The loop itself
remembers nothing about the node; that is all in `Memory`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from gpumap.agent.changes import log_changes
from gpumap.agent.executors import SerialExecutor
from gpumap.agent.join import Memory, Rules, step
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

T = TypeVar("T")
DEADLINE_SECONDS_MIN = 1.0
DEADLINE_SECONDS_MAX = 5.0
PUSH_PAUSE_SECONDS = 0.25
"""From the start of a collection to one that news asks for: at most four a second, eight of the hundred calls a second
that a kubelet grants to all of its clients together (k/k pkg/kubelet/apis/podresources/constants.go). A collection that
takes long is followed by a pause as long: at most half of the time is spent on news."""

log = logging.getLogger("gpumap")


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
    def read(self, pids: list[int], not_after: int | None) -> SourceAnswer[ProcTable]: ...


class CollectionTrigger(Protocol):
    """What starts a collection before its time."""

    @property
    def is_on(self) -> bool: ...
    @property
    def trouble(self) -> Complaint | None: ...
    def watch(self) -> None: ...
    async def wait(self) -> None: ...
    def clear(self) -> None: ...


class IntervalOnly:
    """The interval alone decides."""

    is_on = False
    trouble: Complaint | None = None

    def watch(self) -> None:
        pass

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def clear(self) -> None:
        pass


def now() -> Moment:
    monotonic = time.monotonic()
    # clock_gettime(2): CLOCK_BOOTTIME is CLOCK_MONOTONIC and the time that the machine was suspended.
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - monotonic if hasattr(time, "CLOCK_BOOTTIME") else 0.0
    return Moment(monotonic, time.time(), asleep)


class Collector:
    """One node's loop. `publish` gets each snapshot, on the event loop. `clock` tells when answers came in.

    `news` starts a collection before the interval is over. `memory` is what outlived a restart; `keep` gets each
    collection's memory before its snapshot is published.
    """

    def __init__(
        self,
        nvml: Nvml,
        procfs: Procfs,
        read_identity: Callable[[], SourceAnswer[PodIdentity]],
        kubelet: Kubelet,
        rules: Rules,
        interval_seconds: float,
        publish: Callable[[Snapshot], None],
        clock: Callable[[], Moment] = now,
        news: CollectionTrigger | None = None,
        memory: Memory | None = None,
        keep: Callable[[Memory], Awaitable[None]] | None = None,
    ) -> None:
        self._nvml = nvml
        self._procfs = procfs
        self._read_identity = read_identity
        self._kubelet = kubelet
        self._rules = rules
        self._interval_seconds = interval_seconds
        self._deadline_seconds = min(max(interval_seconds, DEADLINE_SECONDS_MIN), DEADLINE_SECONDS_MAX)
        self._publish = publish
        self._now = clock
        self._news = news or IntervalOnly()
        self._push_said: tuple[bool, str] = False, ""
        self._release = asyncio.Event()
        self._has_let_go = False
        self._proc_lane = SerialExecutor("gpumap-procfs")
        self._identity_lane = SerialExecutor("gpumap-identity")
        self._steps = SerialExecutor("gpumap-step")
        self._memory = memory or Memory()
        self._keep = keep
        self._last: Snapshot | None = None

    def set_deadline(self, seconds: float) -> None:
        """Wait so long for each source. A replay must not depend on how fast the machine is."""
        self._deadline_seconds = seconds

    async def run(self) -> None:
        """Collect for ever: at each interval, when there is news, and as soon as a kubelet that was away is back."""
        trigger = "interval"
        while True:
            started = time.monotonic()
            expires = None
            self._news.clear()  # what comes while this collection runs may have come too late for it
            try:
                expires = (await self.collect(trigger)).expires
            except Exception as error:  # the page goes stale and says so; the next collection may be well
                log.error("collection failed error=%s detail=%r", type(error).__name__, str(error))
                log.debug("where it failed", exc_info=True)
            due = started + self._interval_seconds
            # Data of an earlier collection is dropped when it gets too old, not an interval later.
            ended = time.monotonic()
            earliest = max(started + PUSH_PAUSE_SECONDS, ended + (ended - started))
            trigger = await self._wait(earliest, due if expires is None else min(due, expires))
            if self._release.is_set():
                trigger = await self._let_go()

    async def collect(self, trigger: str = "interval") -> Snapshot:
        """Ask every source once, publish the snapshot and return it. No source's failure is raised."""
        ticks = await self._clock_ticks()
        nvml = await self._observe(self._nvml.read(self._interval_seconds, self._deadline_seconds))
        pids = _pids(nvml.value) if isinstance(nvml, Observed) else []
        procfs = await self._observe(self._in_lane(self._proc_lane, lambda: self._procfs.read(pids, ticks)))
        pod_identity = await self._observe(self._in_lane(self._identity_lane, self._watch_and_read_identity))
        self._log_push()
        kubelet = await self._observe(self._kubelet.read(self._deadline_seconds))
        observations = Observations(nvml, procfs, pod_identity, kubelet, self._now(), trigger, self._news.is_on)
        memory = self._memory
        self._memory, snapshot = await self._steps.run(lambda: step(memory, observations, self._rules))
        if self._keep is not None:
            await self._keep(self._memory)  # before anybody can see a counter that a restart would take back
        log_changes(log, self._last, snapshot, observations)
        self._last = snapshot
        self._publish(snapshot)
        return snapshot

    @property
    def has_let_go(self) -> bool:
        """Whether the driver was let go of, as somebody asked, and nothing is collected meanwhile."""
        return self._has_let_go

    def release(self) -> None:
        """Let go of the driver as soon as no collection is under way, until an interval has passed."""
        self._release.set()

    def close(self) -> None:
        """Let every thread end."""
        for lane in (self._proc_lane, self._identity_lane, self._steps):
            lane.close()

    async def _wait(self, earliest: float, until: float) -> str:
        """Until then, or until there is news (not before `earliest`), or a kubelet is back. Gives what starts the next
        collection."""
        back = asyncio.create_task(self._kubelet.wait_until_back())
        news = asyncio.create_task(self._news_after(earliest))
        release = asyncio.create_task(self._release.wait())
        try:
            timeout = max(until - time.monotonic(), 0.0)
            await asyncio.wait((back, news, release), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return "push" if news.done() else "interval"
        finally:
            for task in (back, news, release):
                task.cancel()

    async def _let_go(self) -> str:
        """Hold nothing of the driver's for an interval, whatever news there is; anew when told so again."""
        self._has_let_go = True
        while self._release.is_set():
            self._release.clear()
            gone = await self._nvml.close()
            until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self._interval_seconds))
            if gone:
                log.info("driver released until=%s", until)
            else:
                log.warning("driver not released: the worker hangs in it, and does not die until=%s", until)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._release.wait(), self._interval_seconds)
        self._has_let_go = False
        return "interval"

    async def _news_after(self, earliest: float) -> None:
        """Return when there is news, but not before `earliest`: what comes until then needs one collection together."""
        await self._news.wait()
        await asyncio.sleep(max(earliest - time.monotonic(), 0.0))

    def _watch_and_read_identity(self) -> SourceAnswer[PodIdentity]:
        # Watched first: what changes after it was read is news. Both look at the same directories, where both may hang.
        self._news.watch()
        return self._read_identity()

    def _log_push(self) -> None:
        """Log a change of whether allocations are pushed, and why not."""
        is_on, trouble = self._news.is_on, self._news.trouble
        said = is_on, trouble.reason if trouble else ""
        if said == self._push_said:
            return
        self._push_said = said
        what = "allocations start a collection" if is_on else "allocations wait for the interval"
        if trouble is None:
            log.info("%s push=%d", what, is_on)
        else:
            level = logging.INFO if trouble.reason.endswith("_missing") else logging.WARNING
            log.log(level, "%s push=%d reason=%s detail=%r", what, is_on, trouble.reason, trouble.detail)

    async def _in_lane(self, lane: SerialExecutor, call: Callable[[], SourceAnswer[T]]) -> SourceAnswer[T]:
        return await lane.run(call, self._deadline_seconds)

    async def _clock_ticks(self) -> int | None:
        if self._procfs.is_real:
            return self._procfs.clock_ticks()  # a clock, which no file can keep waiting
        try:
            return await self._proc_lane.run(self._procfs.clock_ticks, self._deadline_seconds)
        except (OSError, TimeoutError):
            return None  # the read of /proc itself will say why

    async def _observe(self, asked: Awaitable[SourceAnswer[T]]) -> Observed[T] | Failed:
        """Await a source's answer and turn whatever it raises into health."""
        started = time.monotonic()
        try:
            told = await asked
        except SourceError as error:
            return Failed(self._now(), time.monotonic() - started, error.complaints)
        except TimeoutError:
            detail = f"no answer within {self._deadline_seconds:g} s"
            complaint = Complaint("deadline_exceeded", detail)
            return Failed(self._now(), time.monotonic() - started, (complaint,))
        except Exception as error:
            log.debug("a source failed in a way that it should not", exc_info=True)
            complaint = Complaint("internal_error", f"{type(error).__name__}: {error}")
            return Failed(self._now(), time.monotonic() - started, (complaint,))
        return Observed(told.value, self._now(), time.monotonic() - started, told.complaints)


def _pids(reading: NvmlReading) -> list[int]:
    pids: set[int] = set()
    for gpu in reading.gpus:
        pids.update(process.pid for process in gpu.processes or ())
        for instance in gpu.instances:
            pids.update(process.pid for process in instance.processes or ())
    return sorted(pids)
