"""The laws of the contract as properties over generated nodes. Their truth is known.

A run is a node that lives through some collections while pods come and go, sources fail and processes start and end.
After each collection every law must hold for the snapshot.
"""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumap.agent.exposition import Exposition
from gpumap.agent.join.attribution import MPS_SERVER_COMM
from gpumap.agent.metrics import native, self_families
from gpumap.agent.published import published
from gpumap.model.device_ids import ByUuid
from gpumap.model.node import encode
from gpumap.model.observations import DeviceId
from gpumap.model.plugins import recognise
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import ContainerName, Owner
from tests import laws, truth
from tests.examples import examples
from tests.exposed import Page
from tests.generated import nodes, runs
from tests.nodes import RULES, Gpu, Pod, TestNode
from tests.truth import NEVER, SOME_TIME, Span, Window

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
    pods = {id(pod): truth.Pod(pod.namespace, pod.name, pod.uid) for pod in node.pods}
    for pod in node.pods:
        pods[id(pod)].ended = NEVER if pod.listed else SOME_TIME
    processes = [
        truth.Process(
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
        truth.Holding(
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
