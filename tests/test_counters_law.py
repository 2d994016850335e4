"""Counters over the life of a node: none falls to a value other than 0, and nothing counts twice.

Pods are re-created under their names, the kubelet and gpumap restart, GPUs are partitioned again, pushes come between
intervals, and XID events arrive late.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from gpumap.agent.join import Memory, step
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.model.names import ContainerName
from gpumap.model.observations import NvmlReading, Observed
from gpumap.model.readings import Listening, Uuid, XidError
from gpumap.model.snapshot import Snapshot
from tests.examples import examples
from tests.generated import MIG_SHAPES, nodes
from tests.nodes import RULES, Pod, TestNode

Values = dict[tuple[str, tuple[str, ...]], float]
_DRIVERS = {"gpumap_gpu_energy_joules_total"}
"""Counters of the driver, which go back with it."""
_COUNTERS = [
    family
    for family in (*native(GROUPS, process_metrics=False), *self_families("1", "3.11"))
    if family.kind == "counter" and family.name not in _DRIVERS
]
_APPEAR_LATE = (
    "gpumap_source_errors",
    "gpumap_collections",
    "gpumap_gpu_xid_errors",
    "gpumap_container_xid_errors",
)


def counters(snapshot: Snapshot) -> Values:
    return {(family.name, series.labels): series.value for family in _COUNTERS for series in family.read(snapshot)}


def change(data: st.DataObject, node: TestNode) -> None:
    """Change what a node's life changes."""
    node.down = set(data.draw(st.sampled_from([[]] * 9 + [["nvml"], ["kubelet"], ["procfs"], ["pod_identity"]])))
    node.trigger = data.draw(st.sampled_from(["interval", "interval", "push"]))
    for gpu in node.gpus:
        gpu.millijoules = (gpu.millijoules or 0) + data.draw(st.integers(0, 5000))
        gpu.sampled_seconds = 0.0 if node.trigger == "push" else data.draw(st.sampled_from([None, 5.0]))
        gpu.fault = data.draw(st.sampled_from([None] * 9 + ["lost"]))
        if data.draw(st.integers(0, 9)) == 0:
            gpu.mig = data.draw(st.sampled_from(MIG_SHAPES))
    for process in node.processes:
        process.sm = data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    if node.pods and data.draw(st.integers(0, 3)) == 0:
        pod: Pod = data.draw(st.sampled_from(node.pods))
        pod.listed = not pod.listed
        pod.generation += data.draw(st.integers(0, 1))
    if data.draw(st.integers(0, 5)) == 0:
        node.socket += "+"  # the kubelet restarts


def restart(data: st.DataObject, node: TestNode) -> bool:
    """Perhaps restart gpumap. Return whether its own counters restart."""
    restarts = data.draw(st.sampled_from([False] * 5 + [True]))
    event("restarts" if restarts else "goes on")
    if restarts:
        node.memory = Memory()
    return restarts


def draw_xids(data: st.DataObject, node: TestNode) -> tuple[XidError, ...]:
    """Draw events of GPUs and of MIG devices, also late ones."""
    found = []
    for gpu in node.gpus:
        if data.draw(st.integers(0, 3)) == 0:
            parts = [(None, None), *((gi, ci) for gi, ci, _ in gpu.mig or ())]
            gi, ci = data.draw(st.sampled_from(parts))
            age, times = data.draw(st.sampled_from([0.1, 4.0])), data.draw(st.integers(1, 2))
            found.append(XidError(gpu.uuid, data.draw(st.sampled_from([31, 79])), gi, ci, age, times))
    return tuple(found)


def collect(data: st.DataObject, node: TestNode, seconds: float) -> tuple[Snapshot, tuple[XidError, ...]]:
    node.clock += seconds
    observations, events = node.observe(), tuple[XidError, ...]()
    if isinstance(observations.nvml, Observed):
        reading: NvmlReading = observations.nvml.value
        events = draw_xids(data, node)
        listening = tuple(Listening(gpu.uuid, seconds, 0.0) for gpu in node.gpus)
        reading = replace(reading, xids=events, listening=listening)
        observations = replace(observations, nvml=replace(observations.nvml, value=reading))
    node.memory, snapshot = step(node.memory, observations, RULES)
    return snapshot, events


def check_xids(snapshot: Snapshot, before: Counter[tuple[ContainerName, int]], events: tuple[XidError, ...]) -> None:
    """A container gets an event at most once, whatever number of its devices the event affects."""
    of_container = _by_container(snapshot)
    new = Counter[int]()
    for one in events:
        new[one.code] += one.times
    for (name, code), errors in of_container.items():
        assert errors - before[name, code] <= new[code], f"{name} got an event twice"


def _by_container(snapshot: Snapshot | None) -> Counter[tuple[ContainerName, int]]:
    sums = Counter[tuple[ContainerName, int]]()
    for one in snapshot.node.container_xids if snapshot else ():
        sums[one.name, one.code] += one.errors
    return sums


@settings(max_examples=examples(400))
@given(nodes(), st.data())
def test_no_counter_falls_and_nothing_counts_twice(node: TestNode, data: st.DataObject) -> None:
    """Values only grow, or restart at 0. A GPU's seconds are charged at most once."""
    last: Values = {}
    before: Snapshot | None = None
    for _ in range(data.draw(st.integers(2, 10))):
        restarted = before is not None and restart(data, node)
        if restarted:  # these appear with their first event, so a scrape may not see their 0
            last = {key: value for key, value in last.items() if not key[0].startswith(_APPEAR_LATE)}
        change(data, node)
        seconds = data.draw(st.sampled_from([0.5, 5.0, 5.0, 64.0, 301.0]))
        snapshot, events = collect(data, node, seconds)
        now = counters(snapshot)
        held = Counter[Uuid]()
        gpu_of = {leaf.uuid: leaf.gpu_uuid for leaf in snapshot.node.devices if leaf.gpu_uuid}
        for (name, labels), value in now.items():
            old = last.get((name, labels), 0.0)
            assert value >= old or value == 0, f"{name}{labels} fell: {old}, {value}"
            if name == "gpumap_container_allocated_gpu_seconds_total":
                uuid = Uuid(labels[-1])
                held[gpu_of.get(uuid, uuid)] += max(value - last.get((name, labels), value), 0.0)  # type: ignore[assignment]
            if name == "gpumap_container_sm_seconds_total":
                assert value <= node.clock - 1000.0 + 1e-6
        assert all(one <= seconds + 1e-6 for one in held.values()), "a second of a GPU was charged twice"
        if not restarted:
            check_xids(snapshot, _by_container(before), events)
        last |= now
        before = snapshot
