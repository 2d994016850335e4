"""A node with containers that work on engines in jobs of any length. The test knows the truth.

The real `Sampler` reads rows of a simulated driver: `MeanDriver` misses no work, `SamplingDriver` is as coarse as a
real one. The loop collects at the interval, and faster for a while after a new pod or a short process, by the rule of
`agent/collect.py`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple, Protocol

from msgspec import structs

from gpumap.agent.collect import BURST_INTERVAL_SECONDS, BURST_SECONDS, burst_start
from gpumap.agent.join import JoinSettings, Memory, step
from gpumap.agent.nvml_worker.processes import Sampler, SampleRow
from gpumap.model.node import Finding
from gpumap.model.observations import Observations, Observed
from gpumap.model.readings import Activity, GpuReading, Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import PodName
from tests.nodes import GIB, RULES, Gpu, Pod, Process, TestNode

INTERVAL_SECONDS = 5.0
RING_SECONDS = 72
SAMPLES_PER_SECOND, RING_SAMPLES = 6, 72
WALL = 1_700_000_000.0


@dataclass(frozen=True)
class Job:
    """A process of a container that works on engines from `start` to `end`, in percent of each engine.

    Jobs with one PID are one process. `pod` is `None` for a process of the host.
    """

    pid: int
    pod: Pod | None
    leaf: Uuid
    start: float
    end: float
    sm: int = 0
    encoder: int = 0
    memory: int = GIB
    mps_server: int = 0
    """PID of the server of an MPS client. The driver's samples name the server instead."""

    @property
    def works(self) -> bool:
        return bool(self.sm or self.encoder)


class Driver(Protocol):
    def rows(self, jobs: Sequence[Job], since_us: int, now: float) -> Iterator[SampleRow]:
        """Return the rows of a GPU, of which `jobs` are all of the last time."""

    def utilization(self, jobs: Sequence[Job], now: float) -> float | None:
        """Return the utilization of a GPU as a ratio; `None` if it is not reported."""


class MeanDriver:
    """A driver that sees each process in each second: the mean since a whole second, in percents rounded up."""

    def rows(self, jobs: Sequence[Job], since_us: int, now: float) -> Iterator[SampleRow]:
        end = math.floor(now)
        begin = max(math.floor(since_us / 1e6 - WALL + 1e-3), end - RING_SECONDS)
        sums: dict[int, tuple[float, float]] = {}
        for job in jobs if begin < end else ():
            part = (min(job.end, end) - max(job.start, begin)) / (end - begin)
            if part > 0 and job.works:
                sm, encoder = sums.get(job.pid, (0.0, 0.0))
                sums[job.pid] = sm + job.sm * part, encoder + job.encoder * part
        for pid, (sm, encoder) in sums.items():
            yield _row(pid, end, math.ceil(sm), math.ceil(encoder))

    def utilization(self, jobs: Sequence[Job], now: float) -> float | None:
        return None


class _Sample(NamedTuple):
    """What a driver noted of a card in one sample: the process that worked then, and its percent of each engine."""

    number: int
    pid: int
    sm: float
    encoder: float


class SamplingDriver:
    """A model of NVIDIA's driver, as far as nvml.h and open-gpu-kernel-modules describe it:

    - Each 1/6 s it samples the card: the process that works at this moment. If several do, they take turns in slices of
      a few milliseconds, and it may be each of them. A moment without work is a sample without a process.
    - A sample has the part of the last 1/6 s that this process had of each engine.
    - The driver keeps the last 72 samples.
    - A process's row is the mean over all samples that are newer than gpumap asked for, in whole percents, rounded
      down. A process without a sample has no row. With `has_idle_rows` each process has one.
    - The GPU's utilization is the part of the last second in which some process computed, in whole percents, rounded
      down.
    """

    def __init__(self, seed: int, *, has_idle_rows: bool = False) -> None:
        self._random = random.Random(seed)
        self._has_idle_rows = has_idle_rows
        self._next = 0
        self._samples: deque[_Sample] = deque(maxlen=RING_SAMPLES)

    def rows(self, jobs: Sequence[Job], since_us: int, now: float) -> Iterator[SampleRow]:
        newest = math.floor(now * SAMPLES_PER_SECOND)
        oldest = newest - RING_SAMPLES + 1
        for number in range(max(self._next, oldest), newest + 1):
            self._take(jobs, number)
        self._next = newest + 1
        first = max(math.floor((since_us / 1e6 - WALL + 1e-5) * SAMPLES_PER_SECOND) + 1, oldest)
        count = newest + 1 - first
        if count <= 0:
            return
        sums: dict[int, tuple[float, float]] = {}
        for job in jobs if self._has_idle_rows else ():
            if job.start <= now < job.end:
                sums[job.pid] = 0.0, 0.0
        for sample in self._samples:
            if sample.number >= first:
                sm, encoder = sums.get(sample.pid, (0.0, 0.0))
                sums[sample.pid] = sm + sample.sm, encoder + sample.encoder
        for pid, (sm, encoder) in sums.items():
            yield _row(pid, newest / SAMPLES_PER_SECOND, int(sm / count), int(encoder / count))

    def utilization(self, jobs: Sequence[Job], now: float) -> float | None:
        computing = sorted((max(job.start, now - 1.0), min(job.end, now)) for job in jobs if job.sm)
        seconds, until = 0.0, now - 1.0
        for start, end in computing:
            seconds += max(end - max(start, until), 0.0)
            until = max(until, end)
        return int(seconds * 100 + 1e-6) / 100

    def _take(self, jobs: Sequence[Job], number: int) -> None:
        moment = number / SAMPLES_PER_SECOND
        working = [job for job in jobs if job.works and job.start <= moment < job.end]
        if not working:
            return
        job = self._random.choice(working)
        part = min((moment - job.start) * SAMPLES_PER_SECOND, 1.0) / len(working)
        self._samples.append(_Sample(number, job.mps_server or job.pid, job.sm * part, job.encoder * part))


def _row(pid: int, seconds: float, sm: int, encoder: int) -> SampleRow:
    return pid, int((WALL + seconds) * 1e6), sm, 0, encoder, 0, 0, 0


@dataclass
class WorkingNode:
    """GPUs, the pods that hold them, and all jobs of all time. `seconds` is the monotonic clock."""

    gpus: list[Gpu]
    pods: list[Pod]
    jobs: list[Job]
    without_samples: frozenset[int] = frozenset()
    """GPUs with a driver that reports no time of processes."""
    with_gpm: frozenset[int] = frozenset()
    noise: float = 0.0004
    """What GPM reads of an idle device."""
    seconds: float = 1000.0
    refused: frozenset[int] = frozenset()
    """GPUs with samples and GPM that are refused in this collection."""
    rules: JoinSettings = RULES
    driver: Callable[[int], Driver] = lambda _: MeanDriver()
    """Makes the driver of a GPU by its index."""
    change: Callable[[], None] = lambda: None
    """Changes the node before each collection."""
    collections: int = 0
    fast_collections: int = 0
    node: TestNode = field(init=False)
    snapshot: Snapshot | None = None

    def __post_init__(self) -> None:
        self.node = TestNode(self.gpus, self.pods)
        self._starts = {job.pid: int(job.start * 100) for job in reversed(self.jobs)}
        self._coming = deque(sorted(self.jobs, key=attrgetter("start")))
        self._recent: list[Job] = []
        """Jobs of which the driver may have samples now."""
        self._of: dict[tuple[str, str], list[Job]] = {}
        for job in self.jobs:
            self._of.setdefault((job.pod.name if job.pod else "", job.leaf), []).append(job)
        self._drivers = {gpu.index: self.driver(gpu.index) for gpu in self.gpus}
        self.started = self.seconds
        self.restart()

    def restart(self) -> None:
        """Start a new agent."""
        self.started = self.seconds
        self.node.memory = Memory()
        self._burst_since = -math.inf
        self._pods: frozenset[PodName] | None = None
        self._since: dict[str, float] = {}
        """The collection before, by GPU."""
        self._before = dict.fromkeys((gpu.index for gpu in self.gpus), self.seconds)
        self._samplers = {
            gpu.index: Sampler(lambda: self.seconds, lambda: int((WALL + self.seconds) * 1e6)) for gpu in self.gpus
        }

    def run(self, seconds: float) -> Iterator[Snapshot]:
        """Collect for so long as the service does."""
        end = self.seconds + seconds
        due = self.seconds
        while due <= end:
            self.seconds = due
            yield self.collect()
            due += BURST_INTERVAL_SECONDS if self._is_in_burst else INTERVAL_SECONDS
        self.seconds = end

    def collect(self) -> Snapshot:
        """Collect once, now."""
        self.change()
        node = self.node
        node.clock = self.seconds
        node.trigger = "push" if self._is_in_burst else "interval"
        oldest = self.seconds - RING_SECONDS - 1.0
        while self._coming and self._coming[0].start <= self.seconds:
            self._recent.append(self._coming.popleft())
        self._recent = [job for job in self._recent if job.end > oldest]
        alive = {job.pid: job for job in reversed(self._recent) if job.end > self.seconds}
        node.processes = [
            Process(
                job.pid,
                job.leaf,
                job.pod,
                memory=job.memory,
                types="M" if job.mps_server else "C",
                start=self._starts[job.pid],
            )
            for job in alive.values()
        ]
        node.memory, self.snapshot = step(node.memory, self._observe(node.observe()), self.rules)
        self.collections += 1
        pods = frozenset(row.name.pod_name for row in self.snapshot.containers)
        self._burst_since = burst_start(
            self._burst_since,
            self.seconds,
            is_new=self._pods is not None and not pods <= self._pods,
            has_short_process=self.snapshot.has_short_process,
        )
        self.fast_collections += self._is_in_burst
        self._pods = pods
        return self.snapshot

    @property
    def _is_in_burst(self) -> bool:
        return self.seconds - self._burst_since < BURST_SECONDS

    def findings(self, kind: str) -> list[Finding]:
        """Return what the map reports now."""
        assert self.snapshot is not None
        return [one for one in self.snapshot.node.findings or () if one.finding == kind]

    def last_worked(self, pod: str, leaf: str, lag_seconds: float = 1.0) -> float:
        """Return when a pod truly worked last; -inf if it never did. The driver's newest sample may lag a second."""
        sampled = self.seconds - lag_seconds
        working = (job for job in self._of.get((pod, leaf), ()) if job.works and job.start < sampled)
        return max((min(job.end, sampled) for job in working), default=-math.inf)

    def others_on(self, pod: str, leaf: str, lag_seconds: float = 1.0) -> set[str]:
        """Return the other pods that truly worked since the collection before, or had a process at one of the two. The
        driver's newest sample may lag a second."""
        since, now = self._since[leaf], self.seconds
        return {
            job.pod.name
            for job in self._recent
            if job.leaf == leaf
            and job.pod
            and job.pod.name != pod
            and (
                (job.works and job.start < now - lag_seconds and job.end > since)
                or any(job.start <= at < job.end for at in (since, now))
            )
        }

    def worked_seconds(self, pod: str, leaf: str) -> float:
        """Return its SM-seconds since the start of the agent."""
        return sum(
            max(min(job.end, self.seconds) - max(job.start, self.started), 0.0) * job.sm / 100
            for job in self._of.get((pod, leaf), ())
        )

    def had_process(self, pod: str, leaf: str, since: float, lag_seconds: float = 0.0) -> bool:
        """Whether a pod truly had a process after a time, and until a moment ago."""
        until = self.seconds - lag_seconds
        return any(job.start <= until and job.end > since for job in self._of.get((pod, leaf), ()))

    def _observe(self, made: Observations) -> Observations:
        if not isinstance(made.nvml, Observed):
            return made
        reading = made.nvml.value
        gpus = tuple(self._gpu(gpu, one) for gpu, one in zip(self.gpus, reading.gpus, strict=True))
        return replace(made, nvml=replace(made.nvml, value=replace(reading, gpus=gpus)))

    def _gpu(self, gpu: Gpu, reading: GpuReading) -> GpuReading:
        if reading.fault is not None:
            return reading
        since, self._before[gpu.index] = self._before[gpu.index], self.seconds
        self._since[gpu.uuid] = since
        refused = gpu.index in self.refused
        has_gpm = gpu.index in self.with_gpm and not refused
        if gpu.mig is not None:
            instances = [
                structs.replace(one, activity=self._activity(one.uuid, since) if has_gpm else None)
                for one in reading.instances
            ]
            return structs.replace(reading, instances=tuple(instances))
        reading = structs.replace(reading, activity=self._activity(gpu.uuid, since) if has_gpm else None)
        if gpu.index in self.without_samples or refused:
            return structs.replace(reading, samples=None)
        driver, jobs = self._drivers[gpu.index], [job for job in self._recent if job.leaf == gpu.uuid]
        utilization = driver.utilization(jobs, self.seconds)
        sampled = self._samplers[gpu.index].read(
            lambda since_us: driver.rows(jobs, since_us, self.seconds),
            INTERVAL_SECONDS,
        )
        return structs.replace(
            reading,
            samples=sampled.samples,
            sampled_seconds=sampled.seconds,
            unsampled=sampled.unsampled,
            utilization_ratio=utilization,
        )

    def _activity(self, leaf: Uuid, since: float) -> Activity:
        jobs = [job for job in self._recent if job.leaf == leaf]
        parts = [(job, max(min(job.end, self.seconds) - max(job.start, since), 0.0)) for job in jobs]
        length = max(self.seconds - since, 0.001)
        sm = sum(job.sm / 100 * part for job, part in parts) / length
        video = sum(job.encoder / 100 * part for job, part in parts) / length
        return Activity(max(sm, self.noise), None, None, None, graphics_ratio=max(sm, self.noise), video_ratio=video)
