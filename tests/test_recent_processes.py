"""Samples reach back in time: which process has the time of a row if the PID ended or is reused."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gpumap.model.readings import ProcessSample
from gpumap.model.terms import ContainerName
from tests.nodes import Gpu, Pod, Process, TestNode, gpu_uuid, use

CARD = gpu_uuid(0)


def replica(name: str, number: int, generation: int = 0) -> Pod:
    return Pod("ml", name, {"main": {"nvidia.com/gpu": [f"{CARD}::{number}"]}}, generation=generation)


def sm(node: TestNode, pod: Pod, seconds: float = 0.25) -> float | None:
    """SM of a pod's container after another collection."""
    return pod.use(node.collect(seconds), CARD).sm_ratio


def a_node() -> tuple[TestNode, Pod, Pod]:
    """A card of two pods, of which the first has computed; the driver has that time in its samples from now on."""
    one, two = replica("one", 0), replica("two", 1)
    node = TestNode([Gpu(0)], [one, two], [Process(10, CARD, one, sm=0.5, start=1)])
    node.collect()
    node.processes[0].sm = 0.0
    node.gpus[0].late_samples = (ProcessSample(10, 0.5, 0.25, 0.0, 0.0),)
    return node, one, two


def test_time_of_an_ended_process_is_not_its_successors() -> None:
    """A pod recreated under its name has none of it; while its UID is not known, it is unknown."""
    node, one, _ = a_node()
    node.processes.clear()
    again = replica("one", 0, generation=1)
    again.in_checkpoint = again.has_tree = False
    one.listed = one.in_checkpoint = False
    node.pods.append(again)
    assert sm(node, again) is None
    again.in_checkpoint = again.has_tree = True
    node.pods.remove(one)
    assert sm(node, again) == 0.0


def test_process_that_ends_between_two_reads_counts_for_its_container() -> None:
    """NVML still lists it and /proc does not. If /proc only keeps it back, it may be another one."""
    node, one, _ = a_node()
    node.processes[0].left = True
    assert sm(node, one) == 0.5
    node, one, _ = a_node()
    node.processes[0].readable = False
    node.processes.append(Process(11, CARD, one))
    assert sm(node, one) is None
    node.processes[0].readable = True
    assert sm(node, one) == 0.5, "it was itself"


def test_node_where_nothing_ends_keeps_what_it_has_seen() -> None:
    """The very same object: an idle collection makes none again."""
    node, _, _ = a_node()
    node.collect()
    seen = node.memory.recent_processes[CARD]
    node.collect()
    assert node.memory.recent_processes[CARD] is seen


@dataclass
class Life:
    """A process, and when it had ended."""

    process: Process
    ended: float | None = None

    def may_have_time(self, since: float) -> bool:
        return self.ended is None or self.ended > since


@dataclass
class Driver:
    """A card with samples that reach back `window` seconds, and which does not report the process of a PID."""

    window: float
    pods: list[Pod] = field(default_factory=lambda: [replica(name, number) for number, name in enumerate("abc")])
    lives: list[Life] = field(default_factory=list)
    starts: int = 0

    def __post_init__(self) -> None:
        self.node = TestNode([Gpu(0)], self.pods)

    def change(self, data: st.DataObject) -> None:
        """Let some processes end, or be hidden, and others begin, under the same few PIDs."""
        for life in self.lives:
            if life.ended is None and data.draw(st.integers(0, 3)) == 0:
                life.ended = self.node.clock
            life.process.readable = data.draw(st.integers(0, 5)) > 0
        here = {life.process.pid for life in self.lives if life.ended is None}
        for pid in {10, 11, 12} - here:
            if data.draw(st.booleans()):
                self.starts += 1
                pod = data.draw(st.sampled_from(self.pods))
                self.lives.append(Life(Process(pid, CARD, pod, start=self.starts)))

    def sample(self, data: st.DataObject) -> dict[ContainerName, float | None]:
        """Fill the samples. Gives the truth: each container's SM, `None` where it is in a row with another process."""
        truth: dict[ContainerName, float | None] = {pod.full(): 0.0 for pod in self.pods}
        rows = []
        since = self.node.clock - self.window
        for pid in (10, 11, 12):
            had = [one for one in self.lives if one.process.pid == pid and one.may_have_time(since)]
            time = data.draw(st.sampled_from([0.0, 0.125, 0.25]))
            if not had or not time:
                continue
            rows.append(ProcessSample(pid, time, 0.0, 0.0, 0.0))
            for name in {one.process.pod.full() for one in had if one.process.pod}:
                before = truth[name]
                truth[name] = None if len(had) > 1 or before is None else before + time
        self.node.gpus[0].late_samples = tuple(rows)
        self.node.processes = [life.process for life in self.lives if life.ended is None]
        return truth


@given(st.data(), st.sampled_from([1.2, 5.0, 72.0]))
def test_sm_is_true_or_absent(data: st.DataObject, window: float) -> None:
    """No container has another one's time, or less than its own, whatever processes have which PIDs."""
    driver = Driver(window)
    for _ in range(data.draw(st.integers(2, 8))):
        seconds = data.draw(st.sampled_from([0.25, 1.0, 5.0, 30.0]))
        driver.node.clock += seconds
        driver.change(data)
        truth = driver.sample(data)
        snapshot = driver.node.collect(0.0)
        pids = [life.process.pid for life in driver.lives]
        certain = len(pids) == len(set(pids)) and all(process.readable for process in driver.node.processes)
        for pod in driver.pods:
            found = use(snapshot, pod.full(), CARD)
            if found is None or found.sm_ratio is None:
                assert not certain
            else:
                assert found.sm_ratio == truth[pod.full()]
