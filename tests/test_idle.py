"""No container that works is idle, and one that does not is: against the truth of a node with known jobs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

import pytest

from gpumap.model.findings import judged_kinds
from gpumap.model.readings import ProcessSample, Uuid
from gpumap.model.snapshot import Snapshot
from tests.examples import examples
from tests.lives import CARD, CASES, INTERVAL_SECONDS, SLICE, Case, Job, SamplingDriver, WorkingNode
from tests.nodes import GIB, RULES, Gpu, Pod, Process, TestNode, holder

SPAN = 1200.0
SETTLED_SECONDS = RULES.idle_after_seconds + 90.0
"""A driver keeps samples for 72 s: for so long an old one may look like new work."""


def repeated(pod: Pod, leaf: Uuid, length: float, every: float, pids: Iterator[int], **work: int) -> list[Job]:
    """Return a run of equal jobs, each a process of its own."""
    starts = [1001.3 + number * every for number in range(int(SPAN / every))]
    return [Job(next(pids), pod, leaf, start, start + length, **work) for start in starts]


def counting() -> Iterator[int]:
    return iter(range(100, 1 << 22))


@pytest.mark.parametrize(
    ("length", "every", "charged"), [(3.0, 20.0, 0.25), (2.0, 20.3, 0.4), (0.5, 7.3, 0.25), (3.0, 47.0, 0.3)]
)
@pytest.mark.parametrize("is_mig", [False, True])
def test_jobs_shorter_than_the_interval_are_work(length: float, every: float, charged: float, *, is_mig: bool) -> None:
    """A pod that works in short jobs is never idle, and the time of jobs that a list showed is charged."""
    leaf = SLICE if is_mig else CARD
    pod = holder("short", str(leaf))
    jobs = repeated(pod, leaf, length, every, counting(), sm=30)
    node = WorkingNode(
        [Gpu(0, mig=[(1, 0, 3)] if is_mig else None)], [pod], jobs, with_gpm=frozenset({0} if is_mig else ())
    )
    for _snapshot in node.run(SPAN / 2):
        assert not node.findings("idle")
    account = next(one for one in _snapshot.node.accounts if one.uuid == leaf)
    if not is_mig:
        assert account.sm_seconds is not None
        assert charged < account.sm_seconds / node.worked_seconds("short", leaf) < 1.05


def test_a_short_job_of_every_minute_is_seen_with_its_owner() -> None:
    """After a sample of a process that no list had, gpumap collects faster for half a minute."""
    pod = holder("short", str(CARD))
    node = WorkingNode([Gpu(0)], [pod], [Job(100, pod, CARD, 1101.0, 1104.0, sm=50)])
    times = [node.seconds for _ in node.run(300.0)]
    faster = [later for earlier, later in itertools.pairwise(times) if later - earlier < 1.0]
    assert 1105.0 < min(faster) < max(faster) < 1141.0


@pytest.mark.parametrize("engine", ["sm", "encoder"])
@pytest.mark.parametrize("has_gpm", [False, True])
@pytest.mark.parametrize("is_mig", [False, True])
def test_every_engine_counts(engine: str, *, has_gpm: bool, is_mig: bool) -> None:
    """A pod that only encodes video works, on a whole GPU and on a MIG device with GPM."""
    leaf = SLICE if is_mig else CARD
    pod = holder("worker", str(leaf))
    jobs = [Job(100, pod, leaf, 0.0, 1e9, **{engine: 85})]
    node = WorkingNode(
        [Gpu(0, mig=[(1, 0, 3)] if is_mig else None)], [pod], jobs, with_gpm=frozenset({0} if has_gpm else ())
    )
    assert not [one for _ in node.run(900.0) for one in node.findings("idle")]


@pytest.mark.parametrize("kind", ["samples", "gpm", "mig_gpm"])
@pytest.mark.parametrize("has_process", [False, True])
def test_a_holder_that_does_not_work_is_idle(kind: str, *, has_process: bool) -> None:
    """It is idle after five minutes, not before, although GPM reads a little more than 0."""
    leaf = SLICE if kind == "mig_gpm" else CARD
    pod = holder("resting", str(leaf))
    jobs = [Job(100, pod, leaf, 0.0, 1e9)] if has_process else []
    node = WorkingNode(
        [Gpu(0, mig=[(1, 0, 3)] if kind == "mig_gpm" else None)],
        [pod],
        jobs,
        without_samples=frozenset({0} if kind == "gpm" else ()),
        with_gpm=frozenset(() if kind == "samples" else {0}),
    )
    reports = [(node.seconds, one.why) for _ in node.run(600.0) for one in node.findings("idle")]
    first, why = reports[0]
    assert 1300.0 <= first <= 1310.0
    assert why.startswith("no activity seen for at least 5m" if has_process else "no process seen for at least 5m")


@pytest.mark.parametrize("kind", ["samples", "both"])
def test_the_work_of_another_pod_on_the_gpu_is_not_the_holders(kind: str) -> None:
    """Samples show which pod's work GPM measured: a pod that rests beside one that works is idle."""
    works, rests = holder("works", f"{CARD}::0"), holder("rests", f"{CARD}::1")
    jobs = [Job(100, works, CARD, 0.0, 1e9, sm=50), Job(101, rests, CARD, 0.0, 1e9)]
    node = WorkingNode([Gpu(0)], [works, rests], jobs, with_gpm=frozenset({0} if kind == "both" else ()))
    found = {one.pod for _ in node.run(400.0) for one in node.findings("idle")}
    assert found == {"rests"}


@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
def test_holders_that_rest_are_found_and_those_that_work_are_not(case: Case) -> None:
    """A short form of `make bench-idle`: each row with one life and a short `--idle-after`."""
    # An interval without a reading, and rows that are a habit, take too large a part of a short time.
    idle_after_seconds = 300.0 if "refused" in case.name or "rows of 0 %" in case.name else 60.0
    result = case.result([0], idle_after_seconds, 3 * idle_after_seconds + 180.0)
    assert result.snapshots
    assert case.is_reached(result), result


# --- the pod that worked ----------------------------------------------------------------------------------------------


def rest_kinds(snapshot: Snapshot) -> list[str]:
    """Return what the findings say of rest."""
    return [one.finding for one in snapshot.node.findings or () if one.finding in ("idle", "maybe_idle")]


@pytest.mark.parametrize("container", ["sidecar", "setup"])
def test_the_work_of_any_container_of_a_pod_counts_after_it_has_ended(container: str) -> None:
    """The work of a sidecar, or of a container that no List has, is its pod's: the holder was not idle."""
    pod = Pod("ml", "trainer", {"main": {"nvidia.com/gpu": [CARD]}, "sidecar": {}}, init={"setup": {}})
    node = TestNode([Gpu(0)], [pod])
    assert rest_kinds(node.watch()) == ["idle"]
    node.processes = [Process(100, CARD, pod, container, sm=0.5)]
    node.collect()
    node.processes = []
    node.trigger = "push"
    for seconds in (0.4, *[30.0] * 9, 29.0):
        assert not rest_kinds(node.collect(seconds))
    finding = next(one for one in node.collect(1.0).node.findings or () if one.finding == "idle")
    assert (finding.why, finding.reason) == ("no process seen for 5m", "no_process")


@pytest.mark.parametrize("files", ["checkpoint and logs", "logs", "none"])
def test_a_new_pod_of_the_same_name_takes_over_no_idle_time(files: str) -> None:
    """A StatefulSet's pod is back within a second, so no List shows that it was gone."""
    old, other = holder("web-0", str(CARD)), Pod("kube-system", "proxy", {"main": {}})
    has_files = files != "none"
    node = TestNode([Gpu(0)], [old, other], checkpoint_readable="checkpoint" in files, logs_readable=has_files)
    assert rest_kinds(node.watch(700.0)) == (["idle"] if has_files else ["maybe_idle"])
    new = replace(old, generation=1, has_tree=False, has_links=False)
    old.listed = old.in_checkpoint = False
    node.pods = [old, new, other]
    for _ in range(4):
        assert "idle" not in rest_kinds(node.collect(0.5))
    new.has_tree = new.has_links = True
    node.pods = [new, other]
    for _ in range(19):
        assert "idle" not in rest_kinds(node.collect(15.0))
    assert rest_kinds(node.watch(60.0)) == (["idle"] if has_files else ["maybe_idle"])


@pytest.mark.parametrize("is_mig", [False, True])
def test_too_little_work_for_a_percent_is_no_rest(*, is_mig: bool) -> None:
    """A light server has a new row of 0 % now and then. On a MIG device GPM measures 0.8 %."""
    leaf = SLICE if is_mig else CARD
    pod = holder("server", str(leaf))
    node = TestNode([Gpu(0, mig=[(1, 0, 3)] if is_mig else None)], [pod], [Process(100, leaf, pod)])
    node.gpus[0].activities = {(1, 0): 0.008}
    for number in range(60):
        has_row = number % 8 == 0 and not is_mig
        node.gpus[0].late_samples = (ProcessSample(100, 0.0, 0.0, 0.0, 0.0),) if has_row else ()
        assert "idle" not in rest_kinds(node.collect(30.0))


def test_since_is_never_in_the_future() -> None:
    """The wall clock is set back by two hours, then on by one: the times of a lost GPU and an idle holder move too."""
    node = TestNode([Gpu(0), Gpu(1)], [holder("resting", str(CARD))])
    node.watch(60.0)
    node.gpus[1].fault = "lost"
    node.watch()
    ages: dict[str, list[float]] = {}
    for node.wall_step in (0.0, -7200.0, -7200.0, -3600.0):
        snapshot = node.collect(1.0)
        for finding in snapshot.node.findings or ():
            ages.setdefault(finding.finding, []).append(snapshot.node.timestamp - finding.since)
    assert ages.keys() == {"fault", "idle"}
    for seconds in ages.values():
        assert seconds == pytest.approx([seconds[0] + number for number in range(4)], abs=0.01)
        assert seconds[0] > 300.0


# --- nodes drawn by chance ------------------------------------------------------------------------------------------


class Drawn:
    """A node drawn by chance, and what befalls it."""

    KINDS = ("samples", "samples", "both", "both", "gpm", "mig_gpm", "mig", "none")

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        kinds = [self.random.choice(self.KINDS) for _ in range(3)]
        self.pids = counting()
        gpus = [Gpu(index, mig=[(1, 0, 3)] if kind.startswith("mig") else None) for index, kind in enumerate(kinds)]
        pods: list[Pod] = []
        jobs: list[Job] = []
        for gpu, kind in zip(gpus, kinds, strict=True):
            leaf = gpu.leaves[0]
            # Without samples gpumap cannot know which pod's short process worked while another one works.
            count = self.random.randint(1, 3) if kind in ("samples", "both") else 1
            for number in range(count):
                pod = holder(f"pod-{gpu.index}-{number}", f"{leaf}::{number}" if count > 1 else str(leaf))
                pods.append(pod)
                jobs += self._jobs(pod, leaf, only_long=kind in ("mig", "none"))
        self.node = WorkingNode(
            gpus,
            pods,
            jobs,
            without_samples=frozenset(index for index, kind in enumerate(kinds) if kind in ("gpm", "none")),
            with_gpm=frozenset(index for index, kind in enumerate(kinds) if kind in ("gpm", "both", "mig_gpm")),
        )
        self.blind = {index for index, kind in enumerate(kinds) if kind in ("mig", "none")}
        """GPUs of which only the process lists are known."""
        self.disturbed = -math.inf
        """When a fault last hid something."""
        self.is_calm = self.random.random() < 0.5

    def _jobs(self, pod: Pod, leaf: Uuid, *, only_long: bool) -> list[Job]:
        draw = self.random
        work = draw.choice([{"sm": 40}, {"sm": 100}, {"encoder": 60}])
        shape = draw.choice(["nothing", "resting", "bursts", "steady", *([] if only_long else ["short"] * 4)])
        begin = 1000.0 + draw.choice([-500.0, draw.random() * 1000])
        if shape == "nothing":
            return []
        if shape == "resting":
            return [Job(next(self.pids), pod, leaf, begin, 1e9, memory=draw.choice([0, GIB, 7 * GIB]))]
        if shape == "steady":
            return [Job(next(self.pids), pod, leaf, begin, begin + 3000.0, **work)]
        jobs, pid = [], next(self.pids)
        length, pause = draw.choice([0.5, 1.0, 3.0, 8.0]), draw.choice([7.3, 20.0, 20.3, 60.0, 250.0, 290.0, 400.0])
        while begin < 1000.0 + SPAN:
            jobs.append(Job(next(self.pids) if shape == "short" else pid, pod, leaf, begin, begin + length, **work))
            begin += length + pause * draw.choice([1.0, 1.0, draw.random() + 0.5])
        return [*jobs, *([] if shape == "short" else [Job(pid, pod, leaf, jobs[0].start, 1e9)])]

    def live(self, seconds: float) -> Iterator[None]:
        """Run the node, with faults, and yield after each collection."""
        node, draw = self.node, self.random
        for _ in node.run(seconds):
            yield
            node.refused, node.node.down = frozenset(), set()
            for gpu in node.gpus:
                gpu.fault = None
            chance = 1.0 if self.is_calm else draw.random()
            if chance < 0.01:
                node.refused = frozenset({draw.choice(node.gpus).index})
            elif chance < 0.02:
                node.node.down = {draw.choice(["kubelet", "nvml", "procfs", "pod_identity"])}
            elif chance < 0.025:
                draw.choice(node.gpus).fault = "lost"
            elif chance < 0.027:
                node.restart()
            if chance < 0.027:
                self.disturbed = node.seconds + INTERVAL_SECONDS

    def certainly_idle(self, *, judged: bool = False) -> set[str]:
        """Return the pods that truly rest, where no other pod of the leaf worked and nothing hid that. If the agent
        says that it has judged all holders, it knows also what was hidden."""
        node, since = self.node, self.node.seconds - SETTLED_SECONDS
        found = set()
        for gpu in node.gpus:
            leaf = gpu.leaves[0]
            here = [pod.name for pod in node.pods if pod.name.startswith(f"pod-{gpu.index}-")]
            rests = all(node.last_worked(pod, leaf, 0.0) < since for pod in here)
            is_judged = gpu.index not in self.blind or not any(node.had_process(pod, leaf, since) for pod in here)
            if rests and is_judged and (judged or max(self.disturbed, node.started) < since):
                found.update(here)
        return found


def check_activity(node: WorkingNode) -> int:
    """Check which containers have SM activity on GPUs, and return how many containers have it."""
    assert node.snapshot is not None
    activities = {one.uuid: one.activity for one in node.snapshot.node.devices if one.is_leaf and one.mig is None}
    found = 0
    for row in node.snapshot.containers:
        if row.use is None or row.use.sm_activity_ratio is None or row.uuid not in activities:
            continue
        activity = activities[row.uuid]
        assert activity is not None
        assert row.use.sm_activity_ratio == activity.sm_ratio
        assert not node.others_on(row.pod, row.uuid), f"{node.seconds}: it may be another one's"
        found += 1
    return found


def test_the_activity_of_a_gpu_is_its_only_users() -> None:
    """While only one pod has a process there, and no short process of another one works between two lists."""
    steady, short = holder("steady", f"{CARD}::0"), holder("short", f"{CARD}::1")
    jobs = [Job(100, steady, CARD, 0.0, 1e9, sm=50), Job(101, short, CARD, 1101.0, 1103.0, sm=40)]
    node = WorkingNode([Gpu(0)], [steady, short], jobs, with_gpm=frozenset({0}))
    shown = {snapshot.at.monotonic: check_activity(node) for snapshot in node.run(300.0)}
    assert all(shown[1000.0 + seconds] == 1 for seconds in range(5, 101, 5))
    assert not any(number for at, number in shown.items() if 1103.0 <= at <= 1106.0)
    assert all(number == 1 for at, number in shown.items() if at > 1115.0)


def test_clients_of_an_mps_server_are_not_measured_by_gpm() -> None:
    """The server's time explains the activity of the leaf: it may be that of any client."""
    first, second = holder("first", f"{CARD}::0"), holder("second", f"{CARD}::1")
    jobs = [
        Job(99, None, CARD, 0.0, 1e9),
        *(Job(100 + number, pod, CARD, 0.0, 1e9, sm=40, mps_server=99) for number, pod in enumerate((first, second))),
    ]
    node = WorkingNode([Gpu(0)], [first, second], jobs, with_gpm=frozenset({0}), driver=SamplingDriver)
    for _snapshot in node.run(700.0):
        assert node.findings("idle") == node.findings("maybe_idle") == []
    unjudged = {entry.pod: entry.reason for entry in _snapshot.node.unjudged if "idle" in entry.findings}
    assert unjudged == dict.fromkeys(("first", "second"), "use_not_measured")


def test_activity_that_samples_do_not_explain_is_no_ones() -> None:
    """The driver's newest sample lags: it does not have the short process yet, and that of the list rests."""
    resting, short = holder("resting", f"{CARD}::0"), holder("short", f"{CARD}::1")
    jobs = [Job(100, resting, CARD, 0.0, 1e9), Job(101, short, CARD, 1105.1, 1105.4, sm=80)]
    node = WorkingNode([Gpu(0)], [resting, short], jobs, with_gpm=frozenset({0}), seconds=1000.5)
    shown = {snapshot.at.monotonic: check_activity(node) for snapshot in node.run(120.0)}
    assert (shown[1100.5], shown[1105.5]) == (1, 0)


@pytest.mark.parametrize("kind", ["gpm", "samples"])
def test_without_samples_the_activity_of_a_gpu_is_no_ones(kind: str) -> None:
    """A short process of another pod would not be seen."""
    pod = holder("steady", str(CARD))
    node = WorkingNode(
        [Gpu(0)],
        [pod],
        [Job(100, pod, CARD, 0.0, 1e9, sm=50)],
        without_samples=frozenset({0} if kind == "gpm" else ()),
        with_gpm=frozenset({0} if kind == "gpm" else ()),
    )
    assert not any(check_activity(node) for _ in node.run(60.0))


@pytest.mark.parametrize("seed", range(examples(40)))
def test_no_pod_that_worked_is_idle(seed: int) -> None:
    """gpumap reports as idle only pods that did not work, and all of them, if nothing hides what they did."""
    drawn = Drawn(seed)
    node = drawn.node
    for _ in drawn.live(SPAN):
        now, watched = node.seconds, node.seconds - node.started
        idle = node.findings("idle")
        assert node.snapshot is not None
        for one in idle:
            assert one.uuid is not None
            seconds = node.snapshot.node.timestamp - one.since
            assert RULES.idle_after_seconds <= seconds <= watched + 1e-6
            assert node.last_worked(one.pod, one.uuid) <= now - seconds + 1e-6, one.why
            if one.reason == "no_process":
                assert not node.had_process(one.pod, one.uuid, now - seconds, 1.0)
        check_activity(node)
        for one in node.findings("unused"):
            assert watched >= RULES.grace_seconds
            assert node.had_process(one.pod, one.uuid or "", node.started)
        judged = "idle" in judged_kinds(node.snapshot.node)
        idle_pods = {one.pod for one in idle}
        assert idle_pods >= drawn.certainly_idle()
        assert idle_pods | {one.pod for one in node.findings("maybe_idle")} >= drawn.certainly_idle(judged=judged)


def test_drawn_nodes_have_idle_holders() -> None:
    """The law above is not empty: on some nodes a holder certainly rests, and gpumap finds it."""
    found = 0
    for seed in (1, 6):
        drawn = Drawn(seed)
        for _ in drawn.live(900.0):
            pass
        found += len(drawn.certainly_idle())
    assert found >= 2
