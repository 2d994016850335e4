"""The laws of the contract as properties over generated nodes, whose truth is known.

A run is a node that lives through some collections while pods come and go, sources fail and processes start and end.
After each collection every law must hold for the snapshot.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumap.agent.exposition import Exposition
from gpumap.agent.join.attribution import MPS_SERVER_COMM
from gpumap.agent.metrics import native, self_families
from gpumap.model.device_ids import ByUuid
from gpumap.model.observations import CgroupKind, ContainerName, DeviceId
from gpumap.model.plugins import recognise, recognise_dra
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner
from tests.examples import examples
from tests.generated import nodes, runs
from tests.nodes import RULES, Gpu, Pod, TestNode

RESERVING = "kai-resource-reservation"
FAMILIES = (
    *native(("allocation", "use", "host", "device", "gpm", "codec"), process_metrics=True),
    *self_families("1", "3.11"),
)


def check(node: TestNode, snapshot: Snapshot) -> None:
    """Assert every law that one snapshot can show."""
    conservation(node, snapshot)
    unknown_is_absent(node, snapshot)
    activity_is_a_sole_users(node, snapshot)
    idle_is_zero(node, snapshot)
    one_series_each(snapshot)
    nothing_is_lost(node, snapshot)
    nothing_is_stale(node, snapshot)
    the_page_is_valid(snapshot)
    sums_mean_something(node, snapshot)
    nobody_is_credited_with_anothers_memory(node, snapshot)
    nobody_holds_anothers_device(node, snapshot)
    missing_traces_are_no_evidence(node, snapshot)
    schedulers_are_heard(node, snapshot)


def conservation(node: TestNode, snapshot: Snapshot) -> None:
    for leaf in snapshot.node.devices:
        if leaf.memory is not None:
            assert sum(use.memory_bytes or 0 for use in leaf.owners) == leaf.memory.used_bytes, "L1"
        host = [use for use in leaf.owners if use.owner is Owner.HOST]
        assert sum(use.processes for use in leaf.host) == sum(use.processes or 0 for use in host)
        if all(use.memory_bytes is not None for use in leaf.host):
            assert sum(use.memory_bytes or 0 for use in leaf.host) == sum(use.memory_bytes or 0 for use in host)


def unknown_is_absent(node: TestNode, snapshot: Snapshot) -> None:
    if not node.visible or node.down & {"procfs", "nvml"}:
        assert all(row.use is None for row in snapshot.containers), "L2"
    answering = {gpu.uuid for gpu in snapshot.node.gpus if gpu.up}
    for leaf in snapshot.node.devices:
        if not leaf.is_leaf or leaf.gpu_uuid not in answering:
            assert leaf.memory is None, "L2"
            assert leaf.owners == (), "L2"
        if not node.visible:
            assert {use.owner for use in leaf.owners} <= {Owner.UNKNOWN, Owner.UNACCOUNTED}, "L2"
    for row in snapshot.containers:
        if row.use is not None and row.uuid.startswith("MIG-"):
            assert row.use.sm_ratio is None, "L3: SM is absent on MIG"


def activity_is_a_sole_users(node: TestNode, snapshot: Snapshot) -> None:
    """The activity of a MIG device is the container's whose processes are all there are; it is 0 only without one."""
    measured = {leaf.uuid: leaf.activity.sm_ratio for leaf in snapshot.node.devices if leaf.mig and leaf.activity}
    for row in snapshot.containers:
        if row.use is None or row.use.sm_activity_ratio is None:
            continue
        there = [one for one in node.processes if one.leaf == row.uuid and one.comm != MPS_SERVER_COMM]
        own = [one for one in there if one.pod and one.pod.full(one.container) == row.name]
        if row.use.sm_activity_ratio:
            assert row.use.sm_activity_ratio == measured[row.uuid], "L4"
            assert own == there, "L10: it may be another one's"
        else:
            assert not measured[row.uuid] or (there and not own), "L10"


def idle_is_zero(node: TestNode, snapshot: Snapshot) -> None:
    """A holder none of whose pod's processes is on its readable leaf has zeros, if every process there can be read."""
    if not node.visible or node.down or not (node.checkpoint_readable and node.logs_readable):
        return
    for row in snapshot.containers:
        leaf = next((leaf for leaf in snapshot.node.devices if leaf.uuid == row.uuid), None)
        if not row.holds or leaf is None or leaf.memory is None:
            continue
        if any(pod.full(row.name.container) == row.name and not pod.listed for pod in node.pods):
            continue  # the grace period after a kubelet's restart keeps it: it may have ended
        there = [process for process in node.processes if process.leaf == row.uuid]
        if any(not process.readable or process.left for process in there):
            continue  # it may be hidden rather than gone
        if any(process.pod and not (process.pod.has_tree and process.pod.listed) for process in there):
            continue
        if any(process.pod and process.pod.name == row.name.pod for process in there):
            continue
        assert row.use is not None, "L3"
        assert (row.use.memory_bytes, row.use.processes) == (0, 0), "L3"


def one_series_each(snapshot: Snapshot) -> None:
    assert len({(row.name, row.uuid) for row in snapshot.containers}) == len(snapshot.containers), "L4"
    assert len({leaf.uuid for leaf in snapshot.node.devices}) == len(snapshot.node.devices), "L4"
    parents = {gpu.uuid for gpu in snapshot.node.gpus if gpu.partitioned}
    assert parents.isdisjoint(leaf.uuid for leaf in snapshot.node.devices if leaf.is_leaf), "L4"


def nothing_is_lost(node: TestNode, snapshot: Snapshot) -> None:
    if "kubelet" not in node.down:
        ids = Counter[ContainerName]()
        for pod in node.memory.pods:
            for container in pod.containers:
                name = ContainerName(pod.namespace, pod.name, container.name)
                for devices in container.devices:
                    named = [recognise(devices.resource, device_id) for device_id in devices.ids]
                    gpu_like = RULES.is_gpu_resource(devices.resource)
                    ids[name] += sum(1 for one in named if gpu_like or (one and isinstance(one.device, ByUuid)))
                gpu_claims = {(c.device, c.share_id) for c in container.claims if RULES.is_gpu_resource(c.driver)}
                ids[name] += len(gpu_claims)
        told = Counter[ContainerName]()
        for row in snapshot.containers:
            told[row.name] += sum(row.slots.values())
        for unmatched in snapshot.node.unmatched:
            told[unmatched.name] += unmatched.slots
            assert unmatched.reason in {"unparsed", "not_in_nvml", "untrusted_id", "nvml_down", "device_down"}
            assert not ("nvml" in node.down and unmatched.reason == "not_in_nvml"), "L5"
        assert +told == +ids, f"L5: {node.pods}"
    for leaf in snapshot.node.devices:
        if leaf.owners:
            own = sum(use.processes or 0 for use in leaf.owners if use.owner is not Owner.SIBLING)
            assert own == sum(1 for process in node.processes if process.leaf == leaf.uuid), "L5"


def nothing_is_stale(node: TestNode, snapshot: Snapshot) -> None:
    kubelet = node.memory.kubelet
    if kubelet is None or node.clock - kubelet.at.monotonic >= RULES.stale_after_seconds:
        assert not any(row.holds for row in snapshot.containers), "L6"
        assert all(leaf.holders is None for leaf in snapshot.node.devices), "L6"
    if "kubelet" in node.down:
        for leaf in snapshot.node.devices:
            assert not {use.owner for use in leaf.owners} & {Owner.UNASSIGNED, Owner.GONE}, "L6"
        assert not any(row.owner is Owner.UNASSIGNED for row in snapshot.containers), "L6"
    if "nvml" in node.down:
        assert snapshot.node.gpus == (), "L6"


def the_page_is_valid(snapshot: Snapshot) -> None:
    page = Exposition(FAMILIES).render(snapshot).decode()
    lines = page.splitlines()
    names = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(set(names)) == len(names), "L8"
    heads = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(heads)) == len(heads), "L8"
    assert Exposition(FAMILIES).render(snapshot).decode() == page, "L8"


def sums_mean_something(node: TestNode, snapshot: Snapshot) -> None:
    gpu_of = {leaf.uuid: leaf.gpu_uuid for leaf in snapshot.node.devices}
    shares: dict[Uuid, float] = {}
    for row in snapshot.containers:
        gpu = gpu_of[row.uuid] or row.uuid
        shares[gpu] = shares.get(gpu, 0.0) + (row.allocated_gpus or 0.0)
        if row.use is not None and row.use.sm_ratio is not None:
            assert 0 <= row.use.sm_ratio <= 1
    assert all(share <= 1 + 1e-9 for share in shares.values()), "L9"


def nobody_holds_anothers_device(node: TestNode, snapshot: Snapshot) -> None:
    """What a container is said to hold is what its plugin gave it; all of that, where every source tells."""
    all_told = not node.down and node.checkpoint_readable and all(gpu.fault is None for gpu in node.gpus)
    for pod in node.pods:
        for container, truth in pod.truth.items():
            name = pod.full(container)
            held = {row.uuid for row in snapshot.containers if row.name == name and row.slots}
            if "nvml" in node.down:
                held = {uuid for uuid in held if "/" not in uuid}  # the older form of a MIG name stands for itself
            if len({one.generation for one in node.pods if one.name == pod.name}) > 1:
                continue
            assert held <= truth, f"a device that was not given: {pod.ids} {pod.claims} {pod.answers}"
            if all_told and pod.listed and (pod.in_checkpoint or container not in pod.by_answer):
                assert held == truth, f"a device that was given is missing: {pod.ids} {pod.claims} {pod.answers}"


def nobody_is_credited_with_anothers_memory(node: TestNode, snapshot: Snapshot) -> None:
    """What a container is said to use is what its own processes use; the owner said is the true one, or unknown."""
    truth = {(process.pid, process.leaf): process for process in node.processes}
    served_from_memory = "kubelet" in node.down or node.has_no_identity
    newest = {pod.name: max(one.generation for one in node.pods if one.name == pod.name) for pod in node.pods}
    listed = {pod.name for pod in node.pods if pod.listed}

    def is_shown(pod: Pod, uid: str | None) -> bool:
        """Of a name that is not listed, only the row says which pod it is about."""
        if uid and pod.name not in listed:
            return pod.uid == uid
        return pod.generation == newest[pod.name] or served_from_memory

    for told in snapshot.processes:
        process = truth[told.pid, told.uuid]
        if process.pod is None:
            assert told.owner in (Owner.HOST, Owner.UNKNOWN)
            continue
        assert told.owner is not Owner.HOST
        if told.name is not None:
            assert (told.name.namespace, told.name.pod) == (process.pod.namespace, process.pod.name)
            assert told.name.container in ("", process.container)
        if told.owner is Owner.GONE:
            known = {(pod.namespace, pod.name) for pod in node.memory.pods}
            alive = process.pod.generation == newest[process.pod.name] and process.pod.has_tree
            assert (process.pod.namespace, process.pod.name) not in known or not alive
    for row in snapshot.containers:
        if row.use is None or row.use.memory_bytes is None or not row.name.container:
            continue
        own = [
            process
            for process in node.processes
            if process.leaf == row.uuid
            and process.pod is not None
            and process.pod.full(process.container) == row.name
            and is_shown(process.pod, row.use.pod_uid)
            and process.readable
            and not process.left
        ]
        assert row.use.memory_bytes <= sum(process.memory or 0 for process in own)
        if row.use.processes == len(own):
            assert row.use.memory_bytes == sum(process.memory or 0 for process in own)


def missing_traces_are_no_evidence(node: TestNode, snapshot: Snapshot) -> None:
    """A listed pod, the only one of its name, is not gone, and has no zero beside its process, whatever is missing."""
    names = Counter((pod.namespace, pod.name) for pod in node.pods)
    truth = {(process.pid, process.leaf): process for process in node.processes}
    rows = {(row.name, row.uuid): row for row in snapshot.containers}
    for told in snapshot.processes:
        process = truth[told.pid, told.uuid]
        pod = process.pod
        if pod is None or not pod.listed or names[pod.namespace, pod.name] > 1:
            continue
        assert told.owner is not Owner.GONE, "L10"
        row = rows.get((pod.full(process.container), process.leaf))
        if row is not None and row.use is not None and process.readable and not process.left:
            assert row.use.processes > 0, "L10"


def schedulers_are_heard(node: TestNode, snapshot: Snapshot) -> None:
    """What a reservation covers accuses nobody and costs nobody; `scheduled` needs a reservation or a share."""
    parents = {leaf.uuid: leaf.gpu_uuid for leaf in snapshot.node.devices}
    reserved = {row.uuid for row in snapshot.containers if row.reservation}
    noted = {(row.name.pod_name, row.uuid) for row in snapshot.containers if row.holds and not row.slots}
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


@settings(max_examples=examples(500))
@given(st.text(max_size=60), st.text(max_size=120))
def test_no_device_id_raises(resource: str, device_id: str) -> None:
    """Any string is an id of some device or of none, and never an error."""
    recognise(resource, DeviceId(device_id))
    recognise_dra(resource, device_id)


@settings(max_examples=examples(500))
@given(st.text(alphabet=st.sampled_from("/.:-_pod0af\nslice"), max_size=200), st.text(max_size=80))
def test_no_cgroup_text_raises(text: str, own: str) -> None:
    """Any text of a cgroup file is a membership, and never an error."""
    from gpumap.model import cgroups

    assert cgroups.parse(text, cgroups.own(own)).kind in CgroupKind
    cgroups.is_outside(text, cgroups.own(own))
