"""The laws of the contract as properties over generated nodes, whose truth is known.

A run is a node that lives through some collections while pods come and go, sources fail and processes start and end.
After each collection every law must hold for the snapshot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumap.device_ids import ByUuid
from gpumap.exposition import Exposition
from gpumap.join import step
from gpumap.metrics import native, self_families
from gpumap.model import CgroupKind, ContainerName, DeviceId, Uuid
from gpumap.plugins import recognise, recognise_dra
from gpumap.snapshot import Owner, Snapshot
from tests import sharing
from tests.nodes import GIB, RULES, Gpu, Pod, Process, TestNode, gpu_uuid

FAMILIES = (*native(("allocation", "use", "device", "codec"), process_metrics=True), *self_families("1", "3.11"))
MIG_SHAPES: list[list[tuple[int, int, int]] | None] = [
    None,
    None,
    None,
    [(1, 0, 3), (2, 0, 4)],
    [(1, 0, 1), (1, 1, 2), (5, 0, 1)],
    [],
]


@st.composite
def nodes(draw: st.DrawFn) -> TestNode:
    """A node with some GPUs, pods that hold all kinds of ids, and processes of anybody anywhere."""
    minors = draw(st.permutations(range(3)))
    gpus = [
        Gpu(
            index,
            mig=draw(st.sampled_from(MIG_SHAPES)),
            tells_samples=draw(st.booleans()),
            minor=minors[index],
            tells_places=draw(st.booleans()),
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    leaves = [leaf for gpu in gpus for leaf in gpu.leaves]
    free = [str(uuid) for gpu in gpus for uuid in (gpu.leaves if gpu.mig else [gpu.uuid])]
    shared = [uuid for uuid in free if draw(st.booleans())]
    replicas = [f"{uuid}::{n}" for uuid in shared for n in range(4)]
    pods = []
    for number in range(draw(st.integers(0, 5))):
        pod = Pod(draw(st.sampled_from(["ml", "web"])), f"pod{number}")
        for container in draw(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=2, unique=True)):
            if draw(st.booleans()):
                made = sharing.Node(draw, gpus, 10 * number + len(pod.ids))
                _give(pod, container, draw(st.sampled_from(sharing.PLUGINS))(made))
            else:
                pod.ids[container] = _take_ids(draw, [uuid for uuid in free if uuid not in shared], replicas, number)
        if draw(st.booleans()):
            pod.init["warm"] = draw(st.sampled_from(list(pod.ids.values())))
        pod.listed, pod.in_checkpoint = draw(st.sampled_from([(True, True)] * 4 + [(True, False), (False, True)]))
        pod.has_tree, pod.has_links = draw(st.sampled_from([(True, True)] * 4 + [(True, False), (False, False)]))
        pods.append(pod)
    node = TestNode(gpus, pods, registered={"nvidia.com/gpu.shared": [f"{u}::{n}" for u in shared for n in range(4)]})
    for pid in range(100, 100 + draw(st.integers(0, 8)) if leaves else 100):
        node.processes.append(_process(draw, pid, leaves, pods))
    return node


def _give(pod: Pod, container: str, given: sharing.Given) -> None:
    pod.ids[container] = given.ids
    pod.claims[container] = given.claims
    pod.answers.update({(container, resource): said for resource, said in given.answers.items()})
    pod.truth[container] = given.on
    pod.by_answer |= {container} if given.by_answer else set()


def _take_ids(draw: st.DrawFn, free: list[str], replicas: list[str], number: int) -> dict[str, list[str]]:
    kind = draw(st.sampled_from(["none", "whole", "shared", "shared", "odd"]))
    if kind == "whole" and free:
        return {"nvidia.com/gpu": [free[number % len(free)]]}
    if kind == "shared" and replicas:
        taken, replicas[:] = replicas[:2], replicas[2:]
        return {"nvidia.com/gpu.shared": taken}
    if kind == "odd":
        odd = [
            f"{gpu_uuid(0)}-_-3",
            "tencent.com/vcuda-core-7",
            "0-12",
            "nvidia0",
            str(gpu_uuid(99)),
            "0000:3b:00.0",
            "",
        ]
        return {"nvidia.com/gpu": draw(st.lists(st.sampled_from(odd), min_size=1, max_size=3, unique=True))}
    return {}


def _process(draw: st.DrawFn, pid: int, leaves: list[Uuid], pods: list[Pod]) -> Process:
    pod = draw(st.sampled_from([*pods, None]))
    container = draw(st.sampled_from([*pod.ids, *pod.init])) if pod else "main"
    return Process(
        pid,
        draw(st.sampled_from(leaves)),
        pod,
        container,
        memory=draw(st.sampled_from([None, 0, GIB, 3 * GIB])),
        sm=draw(st.sampled_from([0.0, 0.25, 1.0])),
        types=draw(st.sampled_from(["C", "G", "C+G", "M+C"])),
        readable=draw(st.sampled_from([True] * 5 + [False])),
        left=draw(st.sampled_from([False] * 5 + [True])),
    )


def _write_checkpoint(node: TestNode) -> None:
    """A kubelet that gives an id to a pod writes that down: no ended pod's row stands for a listed one's."""
    rows = [(pod, container, str(ids)) for pod in node.pods for container, ids in pod.ids.items() if ids]
    for pod, container, ids in rows:
        if pod.listed and any((container, ids) == (one, same) for other, one, same in rows if other is not pod):
            pod.in_checkpoint = True


def _recreate(draw: st.DrawFn, node: TestNode, old: Pod) -> None:
    """A pod is deleted and made again under its name, as a StatefulSet's are; processes of the old one may live on."""
    if any(pod.name == old.name and pod.generation > old.generation for pod in node.pods):
        return
    new = replace(old, generation=old.generation + 1, listed=True, in_checkpoint=True, has_tree=True)
    old.listed, old.in_checkpoint, old.has_tree = False, draw(st.booleans()), draw(st.booleans())
    node.pods.append(new)
    for pid, leaf in ((900 + len(node.pods), gpu.leaves[0]) for gpu in node.gpus if gpu.leaves):
        if draw(st.booleans()) and pid not in {process.pid for process in node.processes}:
            node.processes.append(Process(pid, leaf, new, next(iter(new.ids)), memory=2 * GIB))


@st.composite
def runs(draw: st.DrawFn) -> list[Snapshot | TestNode]:
    """A node lived through: pairs of the truth at a collection and its snapshot are checked on the way."""
    node = draw(nodes())
    for _ in range(draw(st.integers(1, 5))):
        node.down = set(draw(st.lists(st.sampled_from(["kubelet", "nvml", "procfs", "pod_identity"]), max_size=1)))
        node.visible = draw(st.sampled_from([True] * 4 + [False]))
        node.checkpoint_readable = draw(st.sampled_from([True] * 4 + [False]))
        node.logs_readable = draw(st.sampled_from([True] * 4 + [False]))
        for gpu in node.gpus:
            gpu.fault = draw(st.sampled_from([None] * 5 + ["lost", "hung"]))
        if draw(st.booleans()) and node.pods:
            pod = draw(st.sampled_from(node.pods))
            pod.listed = not pod.listed
        if node.pods and draw(st.integers(0, 3)) == 0:
            _recreate(draw, node, draw(st.sampled_from(node.pods)))
        if draw(st.integers(0, 4)) == 0:
            node.socket += "+"
        _write_checkpoint(node)
        for seconds in draw(st.lists(st.sampled_from([0.5, 5.0, 70.0]), min_size=1, max_size=4)):
            if draw(st.booleans()) and node.processes:
                process = draw(st.sampled_from(node.processes))
                process.memory = draw(st.sampled_from([None, 0, GIB]))
            before = node.memory
            snapshot = node.collect(seconds)
            _, afresh = step(replace(before, attribution=None, allocation=None), node.observe(), RULES)
            assert snapshot == afresh, "what was judged before is judged otherwise now"
            check(node, snapshot)
    return [node]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(runs())
def test_every_law_holds_at_every_collection(run: list[Snapshot | TestNode]) -> None:
    """L1 to L9 hold for every snapshot of every run."""


def check(node: TestNode, snapshot: Snapshot) -> None:
    """Assert every law that one snapshot can show."""
    conservation(node, snapshot)
    unknown_is_absent(node, snapshot)
    idle_is_zero(node, snapshot)
    one_series_each(snapshot)
    nothing_is_lost(node, snapshot)
    nothing_is_stale(node, snapshot)
    the_page_is_valid(snapshot)
    sums_mean_something(node, snapshot)
    nobody_is_credited_with_anothers_memory(node, snapshot)
    nobody_holds_anothers_device(node, snapshot)


def conservation(node: TestNode, snapshot: Snapshot) -> None:
    for leaf in snapshot.leaves:
        if leaf.memory is not None:
            assert sum(use.memory_bytes or 0 for use in leaf.owners) == leaf.memory.used_bytes, "L1"


def unknown_is_absent(node: TestNode, snapshot: Snapshot) -> None:
    if not node.visible or node.down & {"procfs", "nvml"}:
        assert all(row.use is None for row in snapshot.containers), "L2"
    for leaf in snapshot.leaves:
        if leaf.gpu is None or leaf.gpu.fault is not None:
            assert leaf.memory is None, "L2"
            assert leaf.owners == (), "L2"
        if not node.visible:
            assert {use.owner for use in leaf.owners} <= {Owner.UNKNOWN, Owner.UNACCOUNTED}, "L2"
    for row in snapshot.containers:
        if row.use is not None and row.uuid.startswith("MIG-"):
            assert row.use.sm_ratio is None, "L3: SM is absent on MIG"


def idle_is_zero(node: TestNode, snapshot: Snapshot) -> None:
    """A holder none of whose pod's processes is on its readable leaf has zeros, if every process there can be read."""
    if not node.visible or node.down or not (node.checkpoint_readable and node.logs_readable):
        return
    for row in snapshot.containers:
        leaf = next((leaf for leaf in snapshot.leaves if leaf.uuid == row.uuid), None)
        if not row.holds or leaf is None or leaf.memory is None:
            continue
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
    assert len({leaf.uuid for leaf in snapshot.leaves}) == len(snapshot.leaves), "L4"
    parents = {gpu.uuid for gpu in snapshot.gpus if gpu.partitioned}
    assert parents.isdisjoint(leaf.uuid for leaf in snapshot.leaves if leaf.gpu is not None), "L4"


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
            told[row.name] += sum(count for _, count in row.slots)
        for unmatched in snapshot.unmatched:
            told[unmatched.name] += unmatched.slots
            assert unmatched.reason in {"unparsed", "not_in_nvml", "untrusted_id", "nvml_down", "device_down"}
            assert not ("nvml" in node.down and unmatched.reason == "not_in_nvml"), "L5"
        assert +told == +ids, f"L5: {node.pods}"
    for leaf in snapshot.leaves:
        if leaf.owners and leaf.gpu is not None:
            own = sum(use.processes or 0 for use in leaf.owners if use.owner is not Owner.SIBLING)
            assert own == sum(1 for process in node.processes if process.leaf == leaf.uuid), "L5"


def nothing_is_stale(node: TestNode, snapshot: Snapshot) -> None:
    kubelet = node.memory.kubelet
    if kubelet is None or node.clock - kubelet.at.monotonic >= RULES.stale_after_seconds:
        assert not any(row.holds for row in snapshot.containers), "L6"
        assert all(leaf.holders is None for leaf in snapshot.leaves), "L6"
    if "kubelet" in node.down:
        for leaf in snapshot.leaves:
            assert not {use.owner for use in leaf.owners} & {Owner.UNASSIGNED, Owner.GONE}, "L6"
        assert not any(row.use and row.use.unassigned for row in snapshot.containers), "L6"
    if "nvml" in node.down:
        assert snapshot.gpus == (), "L6"


def the_page_is_valid(snapshot: Snapshot) -> None:
    page = Exposition(FAMILIES).render(snapshot).decode()
    lines = page.splitlines()
    names = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(set(names)) == len(names), "L8"
    heads = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(heads)) == len(heads), "L8"
    assert Exposition(FAMILIES).render(snapshot).decode() == page, "L8"


def sums_mean_something(node: TestNode, snapshot: Snapshot) -> None:
    gpu_of = {leaf.uuid: leaf.gpu.uuid for leaf in snapshot.leaves if leaf.gpu}
    shares: dict[Uuid, float] = {}
    for row in snapshot.containers:
        gpu = gpu_of.get(row.uuid, row.uuid)
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
            held = {row.uuid for row in snapshot.containers if row.name == name and row.holds}
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
            and (process.pod.generation == newest[process.pod.name] or served_from_memory)
            and process.readable
            and not process.left
        ]
        assert row.use.memory_bytes <= sum(process.memory or 0 for process in own)
        if row.use.processes == len(own):
            assert row.use.memory_bytes == sum(process.memory or 0 for process in own)


@settings(max_examples=60, deadline=None)
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
    assert [leaf for leaf in ill.leaves if leaf.uuid not in touched] == [
        leaf for leaf in well.leaves if leaf.uuid not in touched
    ]
    assert [row for row in ill.containers if row.uuid not in touched] == [
        row for row in well.containers if row.uuid not in touched
    ]


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=60), st.text(max_size=120))
def test_no_device_id_raises(resource: str, device_id: str) -> None:
    """Any string is an id of some device or of none, and never an error."""
    recognise(resource, DeviceId(device_id))
    recognise_dra(resource, device_id)


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet=st.sampled_from("/.:-_pod0af\nslice"), max_size=200), st.text(max_size=80))
def test_no_cgroup_text_raises(text: str, own: str) -> None:
    """Any text of a cgroup file is a membership, and never an error."""
    from gpumap import cgroups

    assert cgroups.parse(text, cgroups.own(own)).kind in CgroupKind
    cgroups.is_outside(text, cgroups.own(own))
