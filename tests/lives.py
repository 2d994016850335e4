"""Lives of nodes with holders that rest, beside others that work: what truly is, and what gpumap says of each holder.

`CASES` are the rows of `make bench-idle`, and short tests of `tests/test_idle.py`. The driver is `SamplingDriver`. The
truth is that of the jobs:

- A holder *rests* if its pod did not work for twice `--idle-after` and a minute, and the agent runs for so long.
- A holder *works* if its pod worked 1.2 s or more within `--idle-after`. The driver may miss less than that.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from gpumap.model.findings import judged_kinds
from gpumap.model.node import Node
from gpumap.model.readings import Uuid
from tests.nodes import RULES, Gpu, Pod, gpu_uuid, holder, mig_uuid
from tests.working import Job, SamplingDriver, WorkingNode

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
