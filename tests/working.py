"""A node with containers that work on engines in jobs of any length. The test knows the truth, and the samples follow

The driver is the real `Sampler` over a ring of a sample per second. The loop collects at the
interval, and faster for a while after a short process, by the rule of `agent/collect.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from msgspec import structs

from gpumap.agent.collect import FOLLOW_FOR_SECONDS, FOLLOW_SECONDS, follow_start
from gpumap.agent.join import Memory, step
from gpumap.agent.nvml_worker.processes import Sampler, SampleRow
from gpumap.model.node import Finding
from gpumap.model.observations import Observations, Observed
from gpumap.model.readings import Activity, GpuReading, Uuid
from gpumap.model.snapshot import Snapshot
from tests.nodes import GIB, RULES, Gpu, Pod, Process, TestNode

INTERVAL_SECONDS = 5.0
RING_SECONDS = 72
WALL = 1_700_000_000.0


@dataclass(frozen=True)
class Job:
    """A process of a container that works on engines from `start` to `end`, in percent of each engine.

    Jobs with one PID are one process.
    """

    pid: int
    pod: Pod
    leaf: Uuid
    start: float
    end: float
    sm: int = 0
    encoder: int = 0
    memory: int = GIB


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
    collections: int = 0
    node: TestNode = field(init=False)
    snapshot: Snapshot | None = None

    def __post_init__(self) -> None:
        self.node = TestNode(self.gpus, self.pods)
        self._starts = {job.pid: int(job.start * 100) for job in reversed(self.jobs)}
        self._recent: list[Job] = []
        """Jobs of which the driver may have samples now."""
        self._of: dict[tuple[str, str], list[Job]] = {}
        for job in self.jobs:
            self._of.setdefault((job.pod.name, job.leaf), []).append(job)
        self.started = self.seconds
        self.restart()

    def restart(self) -> None:
        """Start a new agent."""
        self.started = self.seconds
        self.node.memory = Memory()
        self._follow_from = -math.inf
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
            due += FOLLOW_SECONDS if self._is_following else INTERVAL_SECONDS
        self.seconds = end

    def collect(self) -> Snapshot:
        """Collect once, now."""
        node = self.node
        node.clock = self.seconds
        node.trigger = "push" if self._is_following else "interval"
        oldest = self.seconds - RING_SECONDS - 1.0
        self._recent = [job for job in self.jobs if job.start <= self.seconds and job.end > oldest]
        alive = {job.pid: job for job in reversed(self._recent) if job.end > self.seconds}
        node.processes = [
            Process(job.pid, job.leaf, job.pod, memory=job.memory, start=self._starts[job.pid])
            for job in alive.values()
        ]
        node.memory, self.snapshot = step(node.memory, self._observe(node.observe()), RULES)
        self.collections += 1
        self._follow_from = follow_start(
            self._follow_from, self.seconds, is_new=False, has_short_process=self.snapshot.has_short_process
        )
        return self.snapshot

    @property
    def _is_following(self) -> bool:
        return self.seconds - self._follow_from < FOLLOW_FOR_SECONDS

    def findings(self, kind: str) -> list[Finding]:
        """Return what the map reports now."""
        assert self.snapshot is not None
        return [one for one in self.snapshot.node.findings or () if one.finding == kind]

    def last_worked(self, pod: str, leaf: str, lag_seconds: float = 1.0) -> float:
        """Return when a pod truly worked last; -inf if it never did. The driver's newest sample may lag a second."""
        sampled = self.seconds - lag_seconds
        working = (job for job in self._of.get((pod, leaf), ()) if (job.sm or job.encoder) and job.start < sampled)
        return max((min(job.end, sampled) for job in working), default=-math.inf)

    def others_on(self, pod: str, leaf: str, lag_seconds: float = 1.0) -> set[str]:
        """Return the other pods that truly worked since the collection before, or had a process at one of the two. The
        driver's newest sample may lag a second."""
        since, now = self._since[leaf], self.seconds
        return {
            job.pod.name
            for job in self._recent
            if job.leaf == leaf
            and job.pod.name != pod
            and (
                ((job.sm or job.encoder) and job.start < now - lag_seconds and job.end > since)
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
        sampled = self._samplers[gpu.index].read(
            lambda since_us: self._rows(gpu.uuid, since_us), INTERVAL_SECONDS, busy=self._is_busy(gpu.uuid)
        )
        return structs.replace(
            reading, samples=sampled.samples, sampled_seconds=sampled.seconds, unsampled=sampled.unsampled
        )

    def _is_busy(self, leaf: Uuid) -> bool:
        """Whether the driver reports utilization of the GPU, which is that of SMs in the last second."""
        return any(
            job.leaf == leaf and job.sm and job.start < self.seconds and job.end > self.seconds - 1.0
            for job in self._recent
        )

    def _rows(self, leaf: Uuid, since_us: int) -> Iterator[SampleRow]:
        """Return one row of each process: the mean, in whole percent, over the seconds in the ring after a time."""
        end = math.floor(self.seconds)
        begin = max(math.floor(since_us / 1e6 - WALL + 1e-3), end - RING_SECONDS)
        sums: dict[int, tuple[float, float]] = {}
        for job in self._recent if begin < end else ():
            part = (min(job.end, end) - max(job.start, begin)) / (end - begin)
            if job.leaf == leaf and part > 0 and (job.sm or job.encoder):
                sm, encoder = sums.get(job.pid, (0.0, 0.0))
                sums[job.pid] = sm + job.sm * part, encoder + job.encoder * part
        for pid, (sm, encoder) in sums.items():
            yield pid, int((WALL + end) * 1e6), math.ceil(sm), 0, math.ceil(encoder), 0, 0, 0

    def _activity(self, leaf: Uuid, since: float) -> Activity:
        jobs = [job for job in self._recent if job.leaf == leaf]
        parts = [(job, max(min(job.end, self.seconds) - max(job.start, since), 0.0)) for job in jobs]
        length = max(self.seconds - since, 0.001)
        sm = sum(job.sm / 100 * part for job, part in parts) / length
        video = sum(job.encoder / 100 * part for job, part in parts) / length
        return Activity(max(sm, self.noise), None, None, None, graphics_ratio=max(sm, self.noise), video_ratio=video)
