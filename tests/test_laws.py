"""The laws of the contract as properties over generated nodes. Their truth is known.

A run is a node that lives through some collections while pods come and go, sources fail and processes start and end.
After each collection every law must hold for the snapshot.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from gpumap.agent.exposition import Exposition
from gpumap.agent.join import Memory, step
from gpumap.agent.join.attribution import MPS_SERVER_COMM
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.agent.published import published
from gpumap.model.device_ids import ByUuid
from gpumap.model.node import encode
from gpumap.model.observations import DeviceId, NvmlReading, Observed
from gpumap.model.plugins import recognise
from gpumap.model.readings import Listening, Uuid, XidError
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import ContainerName, Owner
from tests import laws
from tests.examples import examples
from tests.exposed import Page
from tests.generated import MIG_SHAPES, nodes, runs
from tests.laws import NEVER, SOME_TIME, Span, Window
from tests.nodes import RULES, Gpu, Pod, TestNode

RESERVING = "kai-resource-reservation"
FAMILIES = (
    *native(("allocation", "use", "host", "findings", "device", "gpm", "codec"), process_metrics=True),
    *self_families("1", "3.11"),
)


SLOW = {laws.UNASSIGNED, laws.BY_OWNER, laws.DEVICE_PROCESSES}
"""Families that need a second collection, in which two snapshots agree."""


def check(node: TestNode, snapshot: Snapshot) -> None:
    """Assert every law that one snapshot can show."""
    exposition = Exposition(FAMILIES)
    text = exposition.render(snapshot).decode()
    assert Exposition(FAMILIES).render(snapshot).decode() == text, "L8"
    page, document, window = Page(text), json.loads(encode(published(snapshot))), truth_of(node)
    found = [*laws.wrong(page, window), *laws.wrong_map(document, window), *laws.disagreement(page, document)]
    found += laws.missing(page, window, besides=SLOW)
    assert not found, "\n".join(found)
    if "kubelet" not in node.down:
        assert laws.slots(page) == ids_of(node), f"L5: {node.pods}"
    assert not ("nvml" in node.down and page.by(laws.UNMATCHED, "pod", reason="not_in_nvml")), "L5"
    activity_is_a_sole_users(node, snapshot)
    the_living_are_not_gone(node, snapshot)
    schedulers_are_heard(node, snapshot)


def truth_of(node: TestNode) -> Window:
    """The truth of a collection. What is not fully known is marked so, and then the laws demand less."""
    pods = {id(pod): laws.Pod(pod.namespace, pod.name, pod.uid) for pod in node.pods}
    for pod in node.pods:
        pods[id(pod)].ended = NEVER if pod.listed else SOME_TIME
    processes = [
        laws.Process(
            one.pid,
            pods[id(one.pod)] if one.pod else None,
            one.pod.full(one.container) if one.pod else None,
            {one.leaf: one.memory},
            is_hidden=not one.readable or one.left or bool(one.pod and not is_well_known(node, one.pod)),
        )
        for one in node.processes
    ]
    kubelet = node.memory.served_list.answer
    in_last_list = {pod.pod_name for pod in kubelet.value.pods} if kubelet else set()
    needs = frozenset({"nvml", "proc", "checkpoint", "every GPU"})
    holdings = [
        laws.Holding(
            pods[id(pod)],
            pod.full(container),
            leaf,
            {},
            needs=(needs if pod.in_checkpoint or container not in pod.by_answer else frozenset({"an answer"}))
            | (set() if (pod.namespace, pod.name) in in_last_list else {"kubelet"}),
        )
        for pod in node.pods
        for container, held in pod.truth.items()
        for leaf in held
    ]
    down = {"kubelet": "no kubelet", "nvml": "no nvml", "procfs": "no proc"}
    broken = {"kubelet": "kubelet", "nvml": "nvml", "procfs": "proc", "pod_identity": "checkpoint"}
    touched = {broken[source] for source in node.down}
    touched |= {"checkpoint"} if not node.checkpoint_readable else set()
    touched |= {"logs"} if not node.logs_readable else set()
    touched |= {"proc"} if not node.visible else set()
    faulted = {gpu.uuid for gpu in node.gpus if gpu.fault is not None}
    return Window(
        Span(node.clock, node.clock),
        [*pods.values()],
        holdings,
        processes,
        {leaf: gpu.uuid for gpu in node.gpus for leaf in gpu.leaves},
        {},
        {down[source] for source in node.down & down.keys()}
        | {f"lost {uuid}" for uuid in faulted}
        | ({"no PIDs"} if not node.visible or "procfs" in node.down else set()),
        touched | faulted | {"an answer"} | ({"every GPU"} if faulted else set()),
        has_list=kubelet is not None and node.clock - kubelet.at.monotonic < RULES.stale_after_seconds,
        has_schedulers=bool(node.shares or any(pod.shares or pod.namespace == RESERVING for pod in node.pods)),
        shared={
            pod.full(name) for pod in node.pods if with_shares(node, pod) for name in {*pod.ids, *pod.init, *pod.claims}
        },
        unknown_holdings={
            pod.full(container)
            for pod in node.pods
            for container in {*pod.ids, *pod.init}
            if not are_known(node, pod, container)
        },
    )


def are_known(node: TestNode, pod: Pod, container: str) -> bool:
    """Whether the test knows what a container holds. Without NVML, the older form of a MIG name stands for itself."""
    ids = [one for found in pod.ids.get(container, {}).values() for one in found]
    return container in pod.truth and not ("nvml" in node.down and any("/" in one for one in ids))


def with_shares(node: TestNode, pod: Pod) -> bool:
    return bool(pod.shares) or pod.uid in {one.pod_uid for one in node.shares}


def is_well_known(node: TestNode, pod: Pod) -> bool:
    """Whether the sources name its UID, and no other one for its name (contract, "Owners": two log trees)."""
    namesakes = [other for other in node.pods if other is not pod and (other.namespace, other.name) == pod.full()[:2]]
    has_rows = any(pod.ids.values())
    is_ambiguous = not node.reports_pods and any(
        other.has_tree and (other.in_checkpoint or not has_rows) for other in namesakes
    )
    return pod.listed and pod.in_checkpoint and pod.has_tree and pod.has_links and not is_ambiguous


def ids_of(node: TestNode) -> Counter[tuple[ContainerName, str]]:
    """Count the ids of GPUs in the List, by container and resource or driver."""

    def is_gpu(resource: str, device_id: DeviceId) -> bool:
        named = recognise(resource, device_id)
        return RULES.is_gpu_resource(resource) or (named is not None and isinstance(named.device, ByUuid))

    ids = laws.ids_of(node.memory.served_list.pods, is_gpu)
    for pod in node.memory.served_list.pods:
        for container in pod.containers:
            name = ContainerName(pod.namespace, pod.name, container.name)
            for driver, _, _ in {(one.driver, one.device, one.share_id) for one in container.claims}:
                ids[name, driver] += RULES.is_gpu_resource(driver)
    return +ids


def activity_is_a_sole_users(node: TestNode, snapshot: Snapshot) -> None:
    """The activity of a device is of the container that has all its processes; on a MIG device, it is 0 only
    without one. On a GPU, samples must show that no other process worked."""
    measured = {leaf.uuid: leaf.activity.sm_ratio for leaf in snapshot.node.devices if leaf.activity}
    gpus = {gpu.uuid: gpu for gpu in node.gpus if gpu.mig is None}
    for row in snapshot.containers:
        if row.use is None or row.use.sm_activity_ratio is None:
            continue
        there = [one for one in node.processes if one.leaf == row.uuid and one.comm != MPS_SERVER_COMM]
        uids = {row.use.pod_uid, None}
        own = [one for one in there if one.pod and one.pod.full(one.container) == row.name]
        own = [one for one in own if uids == {None} or (one.pod and one.pod.uid in uids)]
        if row.uuid in gpus:
            assert row.use.sm_activity_ratio == measured[row.uuid], "L4"
            assert own, "L10: it has no process"
            assert own == there, "L10: it may be another one's"
            assert gpus[row.uuid].has_samples, "L10: it may be another one's"
            assert not gpus[row.uuid].late_samples, "L10: it may be another one's"
        elif row.use.sm_activity_ratio:
            assert row.use.sm_activity_ratio == measured[row.uuid], "L4"
            assert own == there, "L10: it may be another one's"
        else:
            assert not measured[row.uuid] or (there and not own), "L10"


def the_living_are_not_gone(node: TestNode, snapshot: Snapshot) -> None:
    """A pod is gone only without a trace: the List, the checkpoint or its log tree, whatever else is missing (L10)."""
    newest = {pod.name: max(one.generation for one in node.pods if one.name == pod.name) for pod in node.pods}
    names = Counter((pod.namespace, pod.name) for pod in node.pods)
    known = {(pod.namespace, pod.name) for pod in node.memory.served_list.pods}
    truth = {(process.pid, process.leaf): process.pod for process in node.processes}
    for shown in snapshot.processes:
        pod = truth[shown.pid, shown.uuid]
        if shown.owner is Owner.GONE and pod is not None:
            assert (pod.namespace, pod.name) not in known or pod.generation < newest[pod.name] or not pod.has_tree
            assert not pod.listed or names[pod.namespace, pod.name] > 1


def schedulers_are_heard(node: TestNode, snapshot: Snapshot) -> None:
    """A process on a reserved device is not accused. `scheduled` needs a reservation or a share."""
    parents = {leaf.uuid: leaf.gpu_uuid for leaf in snapshot.node.devices}
    reserved = {row.uuid for row in snapshot.containers if row.reservation}
    noted = {(row.name.pod_name, row.uuid) for row in snapshot.containers if row.grant and not row.slots}
    with_shares = {one.pod_uid for one in node.shares}
    with_shares |= {pod.uid for pod in node.pods if pod.shares and node.reports_pods}
    for process in snapshot.processes:
        devices = {process.uuid, parents[process.uuid]}
        if process.owner is Owner.UNASSIGNED and process.name and process.name.namespace != RESERVING:
            assert not devices & reserved, "L10"
        if process.owner is Owner.SCHEDULED:
            assert devices & reserved or process.pod_uid in with_shares, "L10"
    for row in snapshot.containers:
        assert row.reservation is (row.name.namespace == RESERVING and bool(row.slots))
        assert not (row.reservation and (row.allocated_gpus is not None or row.allocated_memory_bytes is not None))
        assert (row.name.pod_name, row.uuid) not in noted or row.name.namespace != RESERVING
    for account in snapshot.node.accounts:
        assert account.name.namespace != RESERVING or account.allocated_gpu_seconds is None


@settings(max_examples=examples(300))
@given(runs(check))
def test_every_law_holds_at_every_collection(run: list[Snapshot | TestNode]) -> None:
    """L1 to L10 hold for every snapshot of every run."""


@settings(max_examples=examples(60))
@given(nodes(), st.data())
def test_faults_of_some_gpus_change_nothing_of_the_others(node: TestNode, data: st.DataObject) -> None:
    """L7: losing GPUs leaves every row, leaf and owner of every other GPU as it was."""
    node.collect()
    twin = TestNode(**{name: getattr(node, name) for name in node.__dataclass_fields__})
    twin.gpus = [Gpu(**{name: getattr(gpu, name) for name in gpu.__dataclass_fields__}) for gpu in node.gpus]
    touched = set()
    for broken in data.draw(st.lists(st.sampled_from(twin.gpus), min_size=1, unique_by=lambda gpu: gpu.index)):
        broken.fault = data.draw(st.sampled_from(["lost", "hung", "unknown"]))
        touched |= {broken.uuid, *broken.leaves}
    well, ill = node.collect(), twin.collect()
    assert [leaf for leaf in ill.node.devices if leaf.uuid not in touched] == [
        leaf for leaf in well.node.devices if leaf.uuid not in touched
    ]
    assert [row for row in ill.containers if row.uuid not in touched] == [
        row for row in well.containers if row.uuid not in touched
    ]


# --- counters ---------------------------------------------------------------------------------------------------------


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
