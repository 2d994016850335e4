"""Lives of nodes with containers that work in jobs of any length, beside holders that rest. The truth is known.

The real `Sampler` reads rows of a simulated driver: `MeanDriver` misses no work, `SamplingDriver` is as coarse as a
real one. The loop collects at the interval, and faster for a while, by the rule of `agent/collect.py`.

`CASES` are the rows of `make bench-idle`, and short tests of `tests/test_idle.py`. The driver is `SamplingDriver`. The
truth is that of the jobs:

- A holder *rests* if its pod did not work for twice `--idle-after` and a minute, and the agent runs for so long.
- A holder *works* if its pod worked 1.2 s or more within `--idle-after`. The driver may miss less than that.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple, Protocol

from msgspec import structs

from gpumap.agent.collect import BURST_INTERVAL_SECONDS, BURST_SECONDS, burst_start
from gpumap.agent.join import JoinSettings, Memory, step
from gpumap.agent.nvml_worker.processes import Sampler, SampleRow
from gpumap.model.findings import judged_kinds
from gpumap.model.node import Finding, Node
from gpumap.model.observations import Observations, Observed
from gpumap.model.readings import Activity, GpuReading, Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import PodName
from tests.nodes import GIB, RULES, Gpu, Pod, Process, TestNode, gpu_uuid, holder, mig_uuid

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
            due += BURST_INTERVAL_SECONDS if self._is_following else INTERVAL_SECONDS
        self.seconds = end

    def collect(self) -> Snapshot:
        """Collect once, now."""
        self.change()
        node = self.node
        node.clock = self.seconds
        node.trigger = "push" if self._is_following else "interval"
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
        self.fast_collections += self._is_following
        self._pods = pods
        return self.snapshot

    @property
    def _is_following(self) -> bool:
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
            busy=self._is_busy(jobs) if utilization is None else utilization > 0,
        )
        return structs.replace(
            reading,
            samples=sampled.samples,
            sampled_seconds=sampled.seconds,
            unsampled=sampled.unsampled,
            utilization_ratio=utilization,
        )

    def _is_busy(self, jobs: Iterable[Job]) -> bool:
        """Whether a process used SMs in the last second."""
        return any(job.sm and job.start < self.seconds and job.end > self.seconds - 1.0 for job in jobs)

    def _activity(self, leaf: Uuid, since: float) -> Activity:
        jobs = [job for job in self._recent if job.leaf == leaf]
        parts = [(job, max(min(job.end, self.seconds) - max(job.start, since), 0.0)) for job in jobs]
        length = max(self.seconds - since, 0.001)
        sm = sum(job.sm / 100 * part for job, part in parts) / length
        video = sum(job.encoder / 100 * part for job, part in parts) / length
        return Activity(max(sm, self.noise), None, None, None, graphics_ratio=max(sm, self.noise), video_ratio=video)


# --- lives with holders that rest -------------------------------------------------------------------------------------


CARD, SECOND_CARD = gpu_uuid(0), gpu_uuid(1)
SLICE = mig_uuid(0, 1, 0)
START = 1000.0
FOREVER = 1e9
WORK_SECONDS = 1.2
RESTS = "idle", "maybe_idle"
JUDGED_KINDS = frozenset({"fault", "squatter", "leftover", *RESTS, "unmatched"})
"""Those that these nodes can judge: no holder has a known grant, and no card reports its power."""
SETTLED_SECONDS = 60.0


class Plan:
    """Makes the pods and jobs of a life by chance."""

    def __init__(self, seed: int, idle_after_seconds: float, span_seconds: float) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.idle_after_seconds = idle_after_seconds
        self.end = START + span_seconds
        self.pods: list[Pod] = []
        self.jobs: list[Job] = []
        self._pid = 100

    def new_pid(self) -> int:
        self._pid += 1
        return self._pid

    def hold(self, name: str, *ids: str) -> Pod:
        """Add a pod that holds devices."""
        self.pods.append(holder(name, *ids))
        return self.pods[-1]

    def rest(self, pod: Pod, leaf: Uuid, work_seconds: float = 20.0) -> None:
        """Let a pod work for a moment, and rest for ever, with a process that keeps its context."""
        pid = self.new_pid()
        begin = START - 500.0
        end = START + self.random.uniform(0.0, work_seconds)
        self.jobs += [Job(pid, pod, leaf, begin, FOREVER), Job(pid, pod, leaf, begin, end, sm=60)]

    def notebooks(self, leaf: Uuid = CARD) -> None:
        """Add two notebooks that worked before, and one without a process."""
        for number in range(3):
            pod = self.hold(f"notebook-{number}", f"{leaf}::{number}")
            if number < 2:
                self.rest(pod, leaf)

    def work(self, pod: Pod | None, leaf: Uuid, sm: int) -> None:
        """Let a pod, or the host, work all the time."""
        self.jobs.append(Job(self.new_pid(), pod, leaf, START - 500.0, FOREVER, sm=sm))

    def repeat(
        self,
        pod: Pod | None,
        leaf: Uuid,
        length: float,
        every: float,
        *,
        sm: int = 0,
        pid: int = 0,
        jitter: float = 0.1,
    ) -> None:
        """Let a pod, or the host, work again and again. Without a `pid` each time is a new process.

        `jitter` is the part of the pause by which a time may vary.
        """
        start = START + self.random.random() * every
        while start < self.end:
            begin = start + self.random.random() * (every - length) * jitter
            self.jobs.append(
                Job(pid or self.new_pid(), pod, leaf, begin, begin + length, sm=sm or self.random.randint(30, 100))
            )
            start += every

    def node(self, *gpus: Gpu, with_gpm: frozenset[int] = frozenset(), has_idle_rows: bool = False) -> WorkingNode:
        node = WorkingNode(
            list(gpus or (Gpu(0),)),
            self.pods,
            self.jobs,
            with_gpm=with_gpm,
            rules=replace(RULES, idle_after_seconds=self.idle_after_seconds),
            driver=lambda index: SamplingDriver(self.seed * 100 + index, has_idle_rows=has_idle_rows),
        )
        node.node.allocatable = {"nvidia.com/gpu": [leaf for gpu in node.gpus for leaf in gpu.leaves]}
        return node


Life = tuple[WorkingNode, float]
"""A node, and from when on its snapshots count."""


# --- the cases --------------------------------------------------------------------------------------------------------


def _beside_jobs(length: float, every: float, plan: Plan) -> Life:
    plan.notebooks()
    plan.repeat(plan.hold("jobs", f"{CARD}::3"), CARD, length, every)
    return plan.node(), START


def _beside_light_server(length: float, every: float, plan: Plan) -> Life:
    plan.notebooks()
    server, pid = plan.hold("server", f"{CARD}::3"), plan.new_pid()
    plan.jobs.append(Job(pid, server, CARD, START - 500.0, FOREVER))
    plan.repeat(server, CARD, length, every, sm=100, pid=pid, jitter=1.0)
    return plan.node(), START


def _beside_trainer(plan: Plan) -> Life:
    plan.notebooks()
    plan.work(plan.hold("trainer", f"{CARD}::3"), CARD, sm=plan.random.randint(60, 100))
    return plan.node(), START


def _quiet_card(plan: Plan) -> Life:
    plan.notebooks()
    return plan.node(), START


def _beside_strays(plan: Plan) -> Life:
    plan.notebooks()
    plan.repeat(None, CARD, 0.4, 0.8 * plan.idle_after_seconds, jitter=0.5)
    return plan.node(), START


def _with_refused_calls(plan: Plan) -> Life:
    plan.notebooks()
    node, every = plan.node(), 0.8 * plan.idle_after_seconds
    last_seconds = START

    def refuse() -> None:
        nonlocal last_seconds
        is_due = node.seconds >= last_seconds + every
        node.refused = frozenset({0} if is_due else ())
        last_seconds = node.seconds if is_due else last_seconds

    node.change = refuse
    return node, START


def _batch_pods(plan: Plan) -> Life:
    """Pods of 0.4 times `--idle-after`, one after the other, on two cards."""
    length, pause = 0.4 * plan.idle_after_seconds, 6.0
    spans: list[tuple[float, float, Pod]] = []
    for index in range(2):
        start = START + 30.0 + index * length / 3
        while start < plan.end:
            pod = holder(f"batch-{index}-{len(spans)}", gpu_uuid(index))
            spans.append((start, start + length, pod))
            plan.jobs.append(Job(plan.new_pid(), pod, gpu_uuid(index), start + 3.0, start + length - 1.0, sm=70))
            start += length + pause
    other = Pod("kube-system", "proxy", {"main": {}})
    node = plan.node(Gpu(0), Gpu(1))

    def replace_pods() -> None:
        node.pods[:] = [other, *(pod for start, end, pod in spans if start <= node.seconds < end)]

    node.change = replace_pods
    return node, START


def _unmeasured_neighbours(plan: Plan) -> Life:
    """An MPS client on one card, a MIG holder without GPM on another: their work cannot be measured."""
    client = plan.hold("mps-client", CARD)
    plan.work(None, CARD, sm=0)
    server = plan.jobs[-1].pid
    plan.jobs.append(Job(plan.new_pid(), client, CARD, START - 500.0, FOREVER, sm=50, mps_server=server))
    mig = mig_uuid(1, 1, 0)
    plan.work(plan.hold("mig-holder", mig), mig, sm=50)
    plan.notebooks(gpu_uuid(2))
    return plan.node(Gpu(0), Gpu(1, mig=[(1, 0, 3)]), Gpu(2)), START


def _beside_host_process(holds_context: bool, host_works: bool, plan: Plan) -> Life:
    """On a MIG device with GPM: the driver reports no time of processes."""
    pod = plan.hold("notebook", SLICE)
    if holds_context:
        plan.jobs.append(Job(plan.new_pid(), pod, SLICE, START - 500.0, FOREVER))
    plan.work(None, SLICE, sm=40 if host_works else 0)
    return plan.node(Gpu(0, mig=[(1, 0, 3)]), with_gpm=frozenset({0})), START


def _little_gpm(plan: Plan) -> Life:
    """40 ms of work each 5 s."""
    pod, pid = plan.hold("server", SLICE), plan.new_pid()
    plan.jobs.append(Job(pid, pod, SLICE, START - 500.0, FOREVER))
    plan.repeat(pod, SLICE, 0.04, 5.0, sm=100, pid=pid, jitter=0.0)
    return plan.node(Gpu(0, mig=[(1, 0, 3)]), with_gpm=frozenset({0})), START


def _nvml_away(plan: Plan) -> Life:
    """A trainer, one with pauses for data, and short jobs. Snapshots count from NVML's return on."""
    plan.work(plan.hold("trainer", CARD), CARD, sm=90)
    pod, pid = plan.hold("paused-trainer", f"{SECOND_CARD}::0"), plan.new_pid()
    plan.jobs.append(Job(pid, pod, SECOND_CARD, START - 500.0, FOREVER))
    plan.repeat(pod, SECOND_CARD, 8.0, 30.0, pid=pid)
    plan.repeat(plan.hold("jobs", f"{SECOND_CARD}::1"), SECOND_CARD, 1.0, 20.0)
    node = plan.node(Gpu(0), Gpu(1))
    away_from = START + 1.5 * plan.idle_after_seconds
    back_from = away_from + 3.0 * plan.idle_after_seconds

    def take_away() -> None:
        node.node.down = {"nvml"} if away_from <= node.seconds < back_from else set()

    node.change = take_away
    return node, back_from


def _rows_of_idle_contexts(plan: Plan) -> Life:
    for number in range(3):
        plan.rest(plan.hold(f"notebook-{number}", f"{CARD}::{number}"), CARD)
    return plan.node(has_idle_rows=True), START


# --- what gpumap says of them -----------------------------------------------------------------------------------------


class Work:
    """When a pod worked on a leaf. Its jobs do not overlap."""

    def __init__(self, jobs: list[Job]) -> None:
        works = sorted((job.start, job.end) for job in jobs if job.works)
        self._starts = [start for start, _ in works]
        self._ends = [end for _, end in works]
        self._sums = [0.0, *accumulate(end - start for start, end in works)]

    def seconds_until(self, moment: float) -> float:
        """Return for how long it had worked at a moment."""
        count = bisect_right(self._starts, moment)
        return self._sums[count] - (max(self._ends[count - 1] - moment, 0.0) if count else 0.0)

    def last_before(self, moment: float) -> float:
        """Return when it had worked last."""
        count = bisect_right(self._starts, moment)
        return min(self._ends[count - 1], moment) if count else START


class Shares(Counter[str]):
    """How many snapshots of holders have which verdict: a kind of finding, `none`, or why they are not judged."""

    def ratio(self, *verdicts: str) -> float:
        """Return the part of all snapshots with one of these verdicts."""
        return sum(self[verdict] for verdict in verdicts) / self.total() if self else 0.0


NO_WORK = Work([])


@dataclass
class Result:
    """What gpumap said in one or more lives."""

    resting: Shares = field(default_factory=Shares)
    working: Shares = field(default_factory=Shares)
    little: Shares = field(default_factory=Shares)
    """Holders that work again and again, but less than counts as work."""
    snapshots: int = 0
    all_judged: int = 0
    """Snapshots in which all kinds were judged."""
    unjudged_pods: set[str] = field(default_factory=set)
    seconds: float = 0.0
    collections: int = 0
    fast_collections: int = 0
    """Those of the time in which gpumap collected faster than the interval."""


def verdict_of(node: Node, pod: str, leaf: str) -> str:
    """Return what a snapshot says of a holder: whether it rests, or why that is not judged."""
    for finding in node.findings or ():
        if (finding.pod, finding.uuid) == (pod, leaf) and finding.finding in ("idle", "maybe_idle"):
            return finding.finding
    for entry in node.unjudged:
        if (entry.pod, entry.uuid) == (pod, leaf) and "idle" in entry.findings:
            return entry.reason
    return "none"


def live(make: Callable[[Plan], Life], plan: Plan, result: Result) -> None:
    """Let a node live once, and count what gpumap says of each holder in each snapshot."""
    node, counted_from = make(plan)
    works = _works(plan)
    due_seconds = 2 * plan.idle_after_seconds + SETTLED_SECONDS
    first_seen: dict[tuple[str, str], float] = {}
    for snapshot in node.run(plan.end - START):
        now = node.seconds
        if now >= max(counted_from, START + due_seconds):
            result.snapshots += 1
            result.all_judged += judged_kinds(snapshot.node) >= JUDGED_KINDS
            result.unjudged_pods |= {entry.pod for entry in snapshot.node.unjudged if "idle" in entry.findings}
        for row in snapshot.containers:
            key = row.pod, row.uuid
            first = first_seen.setdefault(key, now)
            if now < counted_from or not row.holds:
                continue
            work = works.get(key, NO_WORK)
            seconds = work.seconds_until(now) - work.seconds_until(now - plan.idle_after_seconds)
            rest_seconds = now - max(first, work.last_before(now))
            if rest_seconds >= due_seconds:
                result.resting[verdict_of(snapshot.node, *key)] += 1
            elif seconds >= WORK_SECONDS:
                result.working[verdict_of(snapshot.node, *key)] += 1
            elif now - first >= due_seconds and rest_seconds < plan.idle_after_seconds / 4:
                result.little[verdict_of(snapshot.node, *key)] += 1
    result.collections += node.collections
    result.fast_collections += node.fast_collections
    result.seconds += plan.end - START


def _works(plan: Plan) -> Mapping[tuple[str, str], Work]:
    jobs: dict[tuple[str, str], list[Job]] = {}
    for job in plan.jobs:
        if job.pod is not None:
            jobs.setdefault((job.pod.name, job.leaf), []).append(job)
    return {key: Work(values) for key, values in jobs.items()}


# --- the table --------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A row of the table with its goal. In each row no holder that works is idle; and at most 1 % of its snapshots are
    `maybe_idle`, if not `workers_may_rest`."""

    name: str
    make: Callable[[Plan], Life]
    goal: str
    reaches_goal: Callable[[Result], bool]
    workers_may_rest: bool = False

    def result(self, seeds: Iterable[int], idle_after_seconds: float, span_seconds: float) -> Result:
        """Let a node live for each seed."""
        result = Result()
        for seed in seeds:
            live(self.make, Plan(seed, idle_after_seconds, span_seconds), result)
        return result

    def is_reached(self, result: Result) -> bool:
        spares_workers = self.workers_may_rest or result.working.ratio("maybe_idle") <= 0.01
        return self.reaches_goal(result) and spares_workers and not result.working["idle"]


def _finds(result: Result) -> bool:
    return result.resting.ratio(*RESTS) >= 0.95


def _is_certain(result: Result) -> bool:
    return result.resting.ratio("idle") >= 0.99 and not result.resting["maybe_idle"]


FOUND = "rest ≥ 95 % idle or maybe_idle"
CASES = (
    Case("beside jobs of 1 s each 20 s", partial(_beside_jobs, 1.0, 20.0), FOUND, _finds),
    Case("beside jobs of 1 s each 2 s", partial(_beside_jobs, 1.0, 2.0), FOUND, _finds),
    Case("beside jobs of 0.75 s each 20 s", partial(_beside_jobs, 0.75, 20.0), FOUND, _finds),
    Case("beside jobs of 1 s each 60 s", partial(_beside_jobs, 1.0, 60.0), FOUND, _finds, workers_may_rest=True),
    Case("beside a light server, 12 ms each 4 s", partial(_beside_light_server, 0.012, 4.0), FOUND, _finds),
    Case("beside a light server, 3 ms each 1 s", partial(_beside_light_server, 0.003, 1.0), FOUND, _finds),
    Case("beside a light server, 1 ms each 1 s", partial(_beside_light_server, 0.001, 1.0), FOUND, _finds),
    Case("beside a trainer", _beside_trainer, FOUND, _finds),
    Case("quiet card", _quiet_card, "rest ≥ 99 % idle, never maybe_idle", _is_certain),
    Case("a stray sample every 4 minutes", _beside_strays, FOUND, _finds),
    Case("a refused call every 4 minutes", _with_refused_calls, FOUND, _finds),
    Case(
        "batch pods of 2 minutes",
        _batch_pods,
        "all kinds always judged",
        lambda result: result.all_judged == result.snapshots > 0,
    ),
    Case(
        "one MPS client, one A100 MIG holder",
        _unmeasured_neighbours,
        "only these two unjudged; rest ≥ 95 % found",
        lambda result: result.unjudged_pods == {"mps-client", "mig-holder"} and _finds(result),
    ),
    Case("no process, busy host process (GPM)", partial(_beside_host_process, False, True), FOUND, _finds),
    Case("process, idle host process (GPM)", partial(_beside_host_process, True, False), FOUND, _finds),
    Case(
        "process, busy host process (GPM)",
        partial(_beside_host_process, True, True),
        "unjudged, by name",
        lambda result: result.unjudged_pods == {"notebook"} and not result.resting.ratio(*RESTS),
    ),
    Case(
        "MIG with GPM at 0.8 %",
        _little_gpm,
        "never idle",
        lambda result: not result.little["idle"],
        workers_may_rest=True,
    ),
    Case(
        "NVML away for 15 minutes in training",
        _nvml_away,
        "no holder maybe_idle at its return",
        lambda result: result.working.total() > 0 and not result.working["maybe_idle"],
    ),
    Case(
        "a driver with rows of 0 % for idle contexts",
        _rows_of_idle_contexts,
        "rest ≥ 95 % maybe_idle",
        lambda result: result.resting.ratio("maybe_idle") >= 0.95,
    ),
)
