"""Owners of processes: assigned, unassigned, gone, host, unknown, and what each needs."""

from dataclasses import replace

import pytest

from gpumap.agent.published import published
from gpumap.cli.table import Shape
from gpumap.model import remedies
from gpumap.model.observations import CgroupKind, CgroupMembership, ClaimDevice, PodCgroup
from gpumap.model.readings import ProcessSample
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import ContainerName, Owner
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid, owners, processes_by_owner, row, use
from tests.shown import waste_table

CARD = gpu_uuid(0)
OFFER = {"nvidia.com/gpu": [str(CARD)]}


def shared(pod: str, *replicas: int, container: str = "main") -> Pod:
    return Pod("ml", pod, {container: {"nvidia.com/gpu.shared": [f"{CARD}::{n}" for n in replicas]}})


def test_card_shared_by_three_pods_gives_each_container_its_own_bytes() -> None:
    """Each container has the memory of its own processes, the idle one 0, and the owners add up to the device."""
    idle, greedy = shared("idle", 0), shared("greedy", 1)
    pair = Pod("ml", "pair", {name: {"nvidia.com/gpu.shared": [f"{CARD}::{n}"]} for name, n in (("a", 2), ("b", 3))})
    node = TestNode(
        [Gpu(0)], [idle, greedy, pair], allocatable={"nvidia.com/gpu.shared": [f"{CARD}::{n}" for n in range(4)]}
    )
    node.processes = [
        Process(10, CARD, greedy, memory=50 * GIB, sm=0.5),
        Process(11, CARD, pair, "a", memory=2 * GIB, sm=0.2),
        Process(12, CARD, pair, "a", memory=1 * GIB),
        Process(13, CARD, pair, "b", memory=None),
    ]
    snapshot = node.collect()
    found = {r.name: r for r in snapshot.containers}
    assert found[idle.full()].use == use(snapshot, idle.full(), CARD)
    assert {name.pod + "/" + name.container: r.use.memory_bytes for name, r in found.items() if r.use} == {
        "idle/main": 0,
        "greedy/main": 50 * GIB,
        "pair/a": 3 * GIB,
        "pair/b": None,
    }
    assert all(r.allocated_gpus == 0.25 and r.allocated_memory_bytes is None for r in snapshot.containers)
    assert {one.pid: one.sm_ratio for one in snapshot.processes} == {10: 0.5, 11: 0.2, 12: 0.0, 13: 0.0}
    split = owners(snapshot, CARD)
    assert split == {
        "assigned": 53 * GIB,
        "unassigned": 0,
        "gone": 0,
        "host": 0,
        "unknown": 0,
        "unaccounted": 100 << 20,
    }
    assert processes_by_owner(snapshot, CARD)["assigned"] == 4


def test_unassigned_is_reported_when_two_snapshots_agree() -> None:
    """A container on a card that it does not hold is unknown at first, and a squatter in the second snapshot."""
    squatter = Pod("ml", "squatter", {"main": {}})
    node = TestNode([Gpu(0)], [squatter], [Process(10, CARD, squatter)], allocatable=OFFER)
    first, second = node.collect(), node.collect()
    assert (owners(first, CARD)["unassigned"], owners(first, CARD)["unknown"]) == (0, GIB)
    assert (owners(second, CARD)["unassigned"], owners(second, CARD)["unknown"]) == (GIB, 0)
    found = [row(each, squatter.full(), CARD) for each in (first, second)]
    assert [one and one.owner for one in found] == [Owner.UNKNOWN, Owner.UNASSIGNED]
    assert use(first, squatter.full(), CARD) is not None, "its use is measured all the same"
    assert [one.grant for one in second.containers] == [None]


def test_process_of_deleted_pod_is_gone_with_its_last_name() -> None:
    """A process that outlives its pod is `gone` in the second snapshot, credited to no container, its name kept."""
    pod, other = Pod("ml", "old", {"main": {"nvidia.com/gpu": [CARD]}}), Pod("ml", "other", {"main": {}})
    node = TestNode([Gpu(0)], [pod, other], [Process(10, CARD, pod)])
    node.collect()
    node.pods.remove(pod)
    snapshot = [node.collect(), node.collect()][1]
    assert owners(snapshot, CARD)["gone"] == GIB
    assert snapshot.containers == ()
    assert snapshot.processes[0].name == ContainerName("ml", "old", "")
    assert [pod.pod for pod in snapshot.node.pods] == []


def test_recreated_pod_of_the_same_name_is_distinguished_from_its_predecessor() -> None:
    """The new pod's process is assigned; the old one's, with a UID that no longer goes with the name, is gone."""
    old = Pod("ml", "db", {"main": {"nvidia.com/gpu": [CARD]}})
    new = replace(old, generation=1)
    node = TestNode([Gpu(0)], [old], [Process(10, CARD, old)])
    node.collect()
    old.listed, old.in_checkpoint = False, False
    node.pods.append(new)
    node.processes.append(Process(11, CARD, new, memory=3 * GIB))
    node.collect()
    snapshot = node.collect()
    assert (owners(snapshot, CARD)["assigned"], owners(snapshot, CARD)["gone"]) == (3 * GIB, GIB)
    assert new.use(snapshot, CARD).memory_bytes == 3 * GIB
    assert [pod.uid for pod in snapshot.node.pods] == [new.uid]


def test_recreated_pod_is_unknown_while_both_pods_have_a_row_and_a_log_tree() -> None:
    """Two UIDs are possible for the name: neither process has an owner, until the kubelet removes the old log tree."""
    old = Pod("ml", "db", {"main": {"nvidia.com/gpu": [CARD]}})
    new = replace(old, generation=1)
    node = TestNode([Gpu(0)], [old], [Process(10, CARD, old)])
    node.collect()
    old.listed = False
    node.pods.append(new)
    node.processes.append(Process(11, CARD, new, memory=3 * GIB))
    node.collect()
    assert owners(node.collect(), CARD)["unknown"] == 4 * GIB
    old.has_tree = False
    node.collect()
    assert owners(node.collect(), CARD)["assigned"] == 3 * GIB


def test_card_handed_on_within_one_interval_takes_no_process_along() -> None:
    """While the checkpoint has the old row, the old pod's process is never the new pod's."""
    old, new = (Pod("ml", name, {"main": {"nvidia.com/gpu": [str(CARD)]}}) for name in ("old", "new"))
    node = TestNode([Gpu(0)], [old], [Process(10, CARD, old)])
    node.collect()
    old.listed, old.has_tree = False, False
    new.in_checkpoint, new.has_tree = False, False
    node.pods.append(new)
    snapshot = node.collect()
    assert owners(snapshot, CARD)["assigned"] == 0
    found = use(snapshot, new.full(), CARD)
    assert found is None or found.memory_bytes == 0


def test_init_container_is_assigned_while_it_runs_and_never_a_holder() -> None:
    """A plain init container, which only the checkpoint knows, owns its processes but holds no slot."""
    ids = {"nvidia.com/gpu": [str(CARD)]}
    pod = Pod("ml", "job", {"main": dict(ids)}, init={"warm": dict(ids)})
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod, "warm")])
    snapshot = node.collect()
    assert owners(snapshot, CARD)["assigned"] == GIB
    assert {r.name.container: (r.holds, r.use and r.use.memory_bytes) for r in snapshot.containers} == {
        "main": (True, 0),
        "warm": (False, GIB),
    }
    assert [leaf.holders for leaf in snapshot.node.devices] == [1]


def test_container_that_cannot_be_named_leaves_its_pods_zeros_out() -> None:
    """Without container links in a pod of two, the use is under container="", and no sibling is called idle."""
    ids = {"nvidia.com/gpu.shared": [f"{CARD}::0"]}
    pod = Pod("ml", "two", {"a": ids, "b": {"nvidia.com/gpu.shared": [f"{CARD}::1"]}}, has_links=False)
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod, "a")])
    snapshot = node.collect()
    assert owners(snapshot, CARD)["assigned"] == GIB, "the pod's allocation decides"
    assert {r.name.container: r.use.memory_bytes if r.use else None for r in snapshot.containers} == {
        "": GIB,
        "a": None,
        "b": None,
    }


def test_unmatched_slots_leave_the_owner_unknown() -> None:
    """A container with ids that name no device may hold any: it is not called a squatter."""
    pod = Pod("ml", "legacy", {"main": {"aliyun.com/gpu-mem": [f"{CARD}-_-{n}" for n in range(4)]}})
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod)])
    node.collect()
    snapshot = node.collect()
    assert owners(snapshot, CARD)["unknown"] == GIB
    assert [(u.reason, u.slots) for u in snapshot.node.unmatched] == [("untrusted_id", 4)]
    assert pod.use(snapshot, CARD).memory_bytes == GIB


def test_host_and_unreadable_and_departed_processes() -> None:
    """Host processes are `host`; a PID that left or cannot be read is `unknown`, and only the latter blocks a zero."""
    idle = shared("idle", 0)
    node = TestNode([Gpu(0)], [idle])
    node.processes = [Process(10, CARD, None, memory=GIB), Process(11, CARD, None, memory=2 * GIB, left=True)]
    snapshot = node.collect()
    assert (owners(snapshot, CARD)["host"], owners(snapshot, CARD)["unknown"]) == (GIB, 2 * GIB)
    assert use(snapshot, idle.full(), CARD) is not None
    node.processes[1].left, node.processes[1].readable = False, False
    snapshot = node.collect()
    assert owners(snapshot, CARD)["unknown"] == 2 * GIB
    assert use(snapshot, idle.full(), CARD) is None, "the unreadable process may be its own"


def test_pid_that_stays_missing_makes_no_holder_idle() -> None:
    """A PID that /proc lacks once has just left; one that it lacks again is hidden from us, and may be the holder's."""
    idle = shared("idle", 0)
    node = TestNode([Gpu(0)], [idle], [Process(11, CARD, None, memory=2 * GIB, left=True)])
    assert use(node.collect(), idle.full(), CARD) is not None
    assert use(node.collect(), idle.full(), CARD) is None


def test_holder_of_a_partitioned_gpu_is_assigned_on_all_its_leaves() -> None:
    """Allocation is on the GPU of the assigned id, use on its leaves, each of them assigned or idle."""
    gpu = Gpu(0, mig=[(1, 0, 3), (2, 0, 4)])
    pod = Pod("ml", "whole", {"main": {"nvidia.com/gpu": [str(gpu.uuid)]}})
    node = TestNode([gpu], [pod], [Process(10, gpu.leaves[0], pod)])
    snapshot = node.collect()
    assert owners(snapshot, gpu.leaves[0])["assigned"] == GIB
    held = pod.row(snapshot, gpu.uuid)
    assert (held.allocated_gpus, held.use) == (1.0, None)
    assert [use(snapshot, pod.full(), leaf).memory_bytes for leaf in gpu.leaves] == [GIB, 0]  # type: ignore[union-attr]
    assert {leaf.uuid: leaf.holders for leaf in snapshot.node.devices} == dict.fromkeys([*gpu.leaves, gpu.uuid], 1)


def test_pid_that_was_given_to_another_process_gets_no_sm_time_of_the_old_one() -> None:
    """After PID re-use the sample row of the interval may be of the process before: its SM time is not known."""
    pod = shared("a", 0)
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod, sm=0.7, start=1)])
    node.collect()
    node.processes[0].start = 2
    assert pod.use(node.collect(), CARD).sm_ratio is None


def test_time_of_a_process_that_just_left_counts_for_its_container() -> None:
    """A sample of a PID that left within the interval goes to the container that it was in at the last snapshot."""
    pod = shared("a", 0)
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod, sm=0.3), Process(11, CARD, pod, sm=0.2)])
    node.collect()
    node.gpus[0].late_samples = (ProcessSample(11, 0.2, 0.1, 0.0, 0.0),)
    node.processes.pop()
    assert pod.use(node.collect(), CARD).sm_ratio == 0.5


def test_ratios_of_a_container_are_sums_over_its_processes() -> None:
    """Each ratio of its own samples, and none is more than 1."""
    pod = shared("a", 0)
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod), Process(11, CARD, pod)])
    node.gpus[0].late_samples = (ProcessSample(10, 0.5, 0.25, 0.5, 0.125), ProcessSample(11, 0.25, 0.125, 0.25, 0.5))
    found = pod.use(node.collect(), CARD)
    ratios = (found.sm_ratio, found.memory_controller_busy_ratio, found.encoder_ratio, found.decoder_ratio)
    assert ratios == (0.75, 0.375, 0.75, 0.625)
    node.gpus[0].late_samples = tuple(ProcessSample(pid, 0.75, 0.75, 0.75, 0.75) for pid in (10, 11))
    found = pod.use(node.collect(), CARD)
    ratios = (found.sm_ratio, found.memory_controller_busy_ratio, found.encoder_ratio, found.decoder_ratio)
    assert ratios == (1.0, 1.0, 1.0, 1.0)


def test_process_of_a_pod_without_any_trace_is_unknown() -> None:
    """A UID that no file and no earlier snapshot names may be a live pod's: `unknown`, and without a name."""
    stranger, other = Pod("ml", "x", {"main": {}}, listed=False, has_tree=False), Pod("ml", "other", {"main": {}})
    node = TestNode([Gpu(0)], [stranger, other], [Process(10, CARD, stranger)])
    node.collect()
    snapshot = node.collect()
    assert (owners(snapshot, CARD)["unknown"], owners(snapshot, CARD)["gone"]) == (GIB, 0)
    assert snapshot.processes[0].name is None


@pytest.mark.parametrize("up_before", [True, False])
def test_short_list_makes_no_pod_gone(up_before: bool) -> None:
    """A kubelet that lists only static pods may not know the others yet: a pod with traces is not gone."""
    pod = Pod("ml", "job", {"main": {"nvidia.com/gpu": [str(CARD)]}})
    agent = Pod("gpumap", "gpumap-x", {"main": {}})
    node = TestNode([Gpu(0)], [pod, agent], [Process(10, CARD, pod)])
    if up_before:
        node.collect()
    pod.listed = agent.listed = False
    node.socket = "second"
    for _ in range(20):
        snapshot = node.collect(30)
        assert not owners(snapshot, CARD).get("gone")
    agent.listed = True
    node.collect()
    assert owners(node.collect(), CARD)["gone"] == GIB


def test_two_collections_close_together_accuse_no_pod() -> None:
    """A suspicion must last a while if collections are pushed. What was reported once is not taken back."""
    pod = Pod("ml", "p", {"main": {}})
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod)], allocatable=OFFER)
    node.collect()
    node.trigger = "push"
    assert [owners(node.collect(0.15), CARD)["unassigned"] for _ in range(4)] == [0, 0, GIB, GIB]
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod)], allocatable=OFFER)
    node.collect()
    assert owners(node.collect(0.1), CARD)["unassigned"] == GIB, "an interval of 100 ms is what the user chose"
    node.trigger = "push"
    assert owners(node.collect(0.1), CARD)["unassigned"] == GIB


def in_cgroup(*pods: Pod) -> CgroupMembership:
    """A path with the containers `main` of these pods in it, outermost first."""
    return CgroupMembership(CgroupKind.POD, tuple(PodCgroup(pod.uid, pod.container_id("main")) for pod in pods))


def test_container_that_makes_cgroups_charges_no_other_pod() -> None:
    """A container that puts the UID of a victim into its own cgroup pays for its memory itself."""
    thief, victim, inner = shared("thief", 0), shared("victim", 1), Pod("in", "nested", listed=False, has_tree=False)
    inner.has_links = False
    node = TestNode([Gpu(0)], [thief, victim])
    node.processes = [
        Process(10, CARD, thief, memory=7 * GIB, cgroup=in_cgroup(thief, victim)),
        Process(11, CARD, victim, memory=GIB, cgroup=in_cgroup(inner, victim)),
    ]
    snapshot = node.collect()
    found = [use(snapshot, pod.full(), CARD) for pod in (thief, victim)]
    assert [one and one.memory_bytes for one in found] == [7 * GIB, 0], (
        "nobody knows the other pod: it is not the victim"
    )
    assert owners(snapshot, CARD)["unknown"] == GIB


def test_container_in_no_pods_cgroup_is_found_by_its_link() -> None:
    """With `cgroupsPerQOS: false` the id in the path and the link of that container give the pod."""
    pod = shared("trainer", 0)
    cgroup = CgroupMembership(CgroupKind.HOST, (), pod.container_id("main"))
    stranger = CgroupMembership(CgroupKind.HOST, (), "1" * 64)
    node = TestNode([Gpu(0)], [pod])
    node.processes = [Process(10, CARD, pod, cgroup=cgroup), Process(11, CARD, None, memory=2 * GIB, cgroup=stranger)]
    snapshot = node.collect()
    assert (owners(snapshot, CARD)["assigned"], owners(snapshot, CARD)["host"]) == (GIB, 2 * GIB)
    assert pod.use(snapshot, CARD).memory_bytes == GIB


@pytest.mark.parametrize(
    ("side", "owner"),
    [(None, "assigned"), ({}, "unknown"), ({"nvidia.com/gpu.shared": [f"{CARD}::1"]}, "assigned")],
)
def test_sibling_of_a_holder_is_unknown_without_container_names(side: dict[str, list[str]] | None, owner: str) -> None:
    """Without log directories a process has only a pod."""
    pod = shared("pair", 0)
    if side is not None:
        pod.ids["side"] = side
    node = TestNode([Gpu(0)], [pod], [Process(10, CARD, pod, "main")], logs_readable=False)
    for _ in range(3):
        snapshot = node.collect()
        assert owners(snapshot, CARD)[owner] == GIB
    assert use(snapshot, pod.full(), CARD) is None


def test_devices_that_an_old_kubelet_leaves_out_are_taken_from_the_checkpoint() -> None:
    """Kubelets 1.20 to 1.22 do not list devices without NUMA topology: no pod that uses its own card is a squatter."""
    user, idle = (
        Pod("ml", name, {"main": {"nvidia.com/gpu": [gpu_uuid(n)]}}) for n, name in enumerate(("user", "idle"))
    )
    node = TestNode([Gpu(0), Gpu(1)], [user, idle], [Process(10, CARD, user)], left_out={"nvidia.com/gpu"})
    for snapshot in (node.collect(), node.collect()):
        assert owners(snapshot, CARD)["assigned"] == GIB
        assert [(one.name, one.allocated_gpus) for one in snapshot.containers] == [(user.full(), 1.0)], (
            "a row alone may be of an ended pod"
        )
        assert [leaf.holders for leaf in snapshot.node.devices] == [1, None], "and yet its card may be held"


@pytest.mark.parametrize("odd", ["pod without a UID", "no checkpoint"])
def test_what_an_old_kubelet_leaves_out_and_no_row_shows_is_unknown(odd: str) -> None:
    """A pod that just started has neither a row nor a directory; without the checkpoint no pod has a row."""
    resource = "nvidia.com/gpu"
    pod, new = Pod("ml", "user", {"main": {resource: [CARD]}}), Pod("ml", "new", {"main": {resource: [gpu_uuid(1)]}})
    new.in_checkpoint = new.has_tree = False
    node = TestNode([Gpu(0), Gpu(1)], [pod, new], [Process(10, CARD, pod)], left_out={resource})
    node.checkpoint_readable = odd != "no checkpoint"
    for snapshot in (node.collect(), node.collect()):
        owner = "assigned" if node.checkpoint_readable else "unknown"
        assert owners(snapshot, CARD)[owner] == GIB
        assert row(snapshot, new.full(), gpu_uuid(1)) is None
    assert node.checkpoint_readable or [leaf.holders for leaf in snapshot.node.devices] == [None, None]


def test_recreated_pod_with_a_claim_is_known_by_its_newer_log_tree() -> None:
    """A DRA pod that is re-created under its name is `assigned` at once, while its predecessor's tree still exists."""
    claims = {"main": [ClaimDevice("gpu.nvidia.com", "node-a", "gpu-0", "", "ml", "claim")]}
    old = Pod("ml", "db", claims=claims)
    node = TestNode([Gpu(0)], [old], [Process(10, CARD, old)])
    assert owners(node.collect(), CARD)["assigned"] == GIB
    new = replace(old, generation=1)
    old.listed = False
    node.pods.append(new)
    node.processes = [Process(11, CARD, new, memory=3 * GIB)]
    for _ in range(3):
        snapshot = node.collect()
        assert owners(snapshot, CARD)["assigned"] == 3 * GIB
        assert [pod.uid for pod in snapshot.node.pods] == [new.uid]
    node.processes.append(Process(10, CARD, old))
    for _ in range(3):
        split = owners(node.collect(), CARD)
        assert (split["assigned"], split["unknown"], split["gone"]) == (3 * GIB, GIB, 0)
    old.has_tree = False
    assert owners(node.collect(), CARD)["assigned"] == 3 * GIB


def test_name_that_the_list_lost_is_another_pod_when_it_is_back() -> None:
    """The directory of the name is the predecessor's, even if the successor holds the same devices."""
    claims = {"main": [ClaimDevice("gpu.nvidia.com", "node-a", "gpu-0", "", "ml", "gpu-0")]}
    old = Pod("ml", "notebook-0", claims=claims)
    node = TestNode([Gpu(0)], [old, Pod("kube-system", "proxy", {"main": {}})], [Process(10, CARD, old)])
    node.collect()
    old.listed = False
    node.collect()
    new = replace(old, generation=1, listed=True, has_tree=False, has_links=False)
    node.pods.append(new)
    node.collect()
    assert use(node.collect(), new.full(), CARD) is None
    new.has_tree = new.has_links = True
    node.processes.append(Process(11, CARD, new, memory=3 * GIB))
    assert new.use(node.collect(), CARD).memory_bytes == 3 * GIB


def test_checkpoint_that_contradicts_a_log_directory_accuses_no_pod() -> None:
    """An old copy of the checkpoint has the row of an earlier pod for the same container and device."""
    live = Pod("ml", "server", {"main": {"nvidia.com/gpu": [CARD]}}, in_checkpoint=False)
    corpse = replace(live, generation=9, listed=False, in_checkpoint=True, has_tree=False, has_links=False)
    node = TestNode([Gpu(0)], [live, corpse, Pod("kube-system", "proxy", {"main": {}})], [Process(10, CARD, live)])
    node.collect()
    snapshot = node.collect()
    assert owners(snapshot, CARD)["unknown"] == GIB
    assert use(snapshot, live.full(), CARD) is None


@pytest.mark.parametrize("source", ["log tree", "Pods API"])
def test_ended_pod_keeps_the_name_that_any_source_gave(source: str) -> None:
    """gpumap starts after the end of a pod, so no List ever has its name."""
    old = Pod("ml", "job-1", {"main": {"nvidia.com/gpu": [str(CARD)]}}, listed=False, has_links=False)
    new = Pod("ml", "job-2", {"main": {"nvidia.com/gpu": [str(CARD)]}}, in_checkpoint=False, has_tree=False)
    node = TestNode([Gpu(0)], [old, Pod("ml", "other", {"main": {}})], [Process(10, CARD, old)])
    if source == "Pods API":
        old.has_tree, node.reports_pods, old.listed = False, True, True
        node.drop_pod_events()
        old.listed = False
    for _ in range(2):
        snapshot = node.collect()
        assert snapshot.processes[0].name == old.full("main" if node.reports_pods else "")
    old.has_tree, node.reports_pods = False, False
    node.list_pods_again()
    node.pods.append(new)
    for down in ({"pod_identity"}, {"procfs"}, set[str](), set[str]()):
        node.down = down
        snapshot = node.collect()
        assert owners(snapshot, CARD).get("assigned", 0) == 0
        held = use(snapshot, new.full(), CARD)
        assert held is None or held.memory_bytes == 0, "the memory is the ended pod's"
    assert owners(snapshot, CARD)["gone"] == GIB
    assert snapshot.processes[0].name == old.full("")


def have_outage(node: TestNode, outage: str, *, is_down: bool) -> None:
    if outage == "log directories":
        node.logs_readable = not is_down
    elif outage == "PID visibility":
        node.visible = not is_down
    elif outage == "GPU":
        for gpu in node.gpus:
            gpu.fault = "hung" if is_down else None
    elif outage == "/proc entries":
        for process in node.processes:
            process.readable = not is_down
    else:
        node.down = {outage} if is_down else set()


def accused_node() -> TestNode:
    """A squatter with PID 10, and with PID 11 the leftover of a pod that is gone, both found for a minute."""
    squatter = Pod("ml", "squat", {"main": {}})
    other, gone = (
        Pod("ml", name, {"main": {"nvidia.com/gpu": [str(gpu_uuid(index))]}})
        for index, name in enumerate(("other", "gone"))
    )
    node = TestNode([Gpu(0), Gpu(1)], [squatter, gone, other])
    node.processes = [Process(10, CARD, squatter), Process(11, gpu_uuid(1), gone)]
    node.collect()
    gone.listed = False
    node.collect()
    node.collect(60.0)
    return node


def test_remedy_of_a_leftover_names_its_processes() -> None:
    """`kill` with each PID, to be copied."""
    node = accused_node()
    node.processes.append(replace(node.processes[1], pid=13))
    node.collect()
    node.collect()
    (leftover,) = (one for one in node.collect(20.0).node.findings or () if one.finding == "leftover")
    assert leftover.pids == (11, 13)
    assert "`kill 11 13`" in (leftover.remedy or "")
    assert "<PID>" in (remedies.finding_remedy("leftover", "pod_gone", None) or ""), "of series, which have no PIDs"


def since(snapshot: Snapshot) -> dict[str, float]:
    findings = snapshot.node.findings or ()
    return {one.finding: one.since for one in findings if one.finding in ("squatter", "leftover")}


@pytest.mark.parametrize(
    "outage",
    ["nvml", "procfs", "kubelet", "pod_identity", "log directories", "PID visibility", "GPU", "/proc entries"],
)
def test_finding_of_the_same_process_is_as_old_after_an_outage(outage: str) -> None:
    """Whatever could not be read in between: the process has its PID and start, so the finding has its time."""
    node = accused_node()
    before = since(node.collect())
    assert before.keys() == {"squatter", "leftover"}
    for is_down in (True, True, False, False):
        have_outage(node, outage, is_down=is_down)
        snapshot = node.collect()
    assert since(snapshot) == before


def test_finding_of_processes_that_follow_each_other_is_one() -> None:
    """Without an outage, a container whose process is another one in each collection was never without one."""
    node = accused_node()
    before = since(node.collect())["squatter"]
    for pid in (20, 21):
        node.processes[0].pid = pid
        snapshot = node.collect()
    assert since(snapshot)["squatter"] == before


@pytest.mark.parametrize(("pid", "start"), [(12, 1000), (10, 2000)])
def test_finding_of_another_process_begins_again(pid: int, start: int) -> None:
    """After an outage of NVML, the container has another process. Whether it had one in between is unknown."""
    node = accused_node()
    before = since(node.collect())["squatter"]
    node.down = {"nvml"}
    node.collect()
    node.down = set()
    node.processes[0] = replace(node.processes[0], pid=pid, start=start)
    node.collect()
    assert since(node.collect())["squatter"] > before


def test_leftover_is_found_after_the_kubelet_had_time_to_end_it() -> None:
    """`kubectl delete --force` removes the pod at once, and the kubelet then ends its process."""
    pod, other = Pod("ml", "old", {"main": {"nvidia.com/gpu": [CARD]}}), Pod("ml", "other", {"main": {}})
    node = TestNode([Gpu(0)], [pod, other], [Process(10, CARD, pod)])
    node.collect()
    node.pods.remove(pod)
    node.trigger = "push"
    found = []
    for seconds in (1.0, 1.0, 5.0, 2.9, 0.2, 1.0):  # 10 s after the first of them, the process is a leftover
        snapshot = node.collect(seconds)
        made = published(snapshot)
        found.append(
            [(one.finding, one.pids, one.memory_bytes) for one in made.findings or () if one.finding == "leftover"]
        )
        assert (made.finding_sums["leftover_bytes"] or 0) == sum(one[2] or 0 for one in found[-1])
        assert ("LEFTOVER" in waste_table(made, Shape())) is bool(found[-1])
        assert owners(snapshot, CARD)["gone"] == (GIB if len(found) > 1 else 0)
    assert found == [[]] * 5 + [[("leftover", (10,), GIB)]]


def test_pod_that_starts_between_two_reads_is_no_squatter() -> None:
    """A process seen before its pod is listed is unknown once and then assigned: never unassigned, never gone."""
    pod = Pod("ml", "new", {"main": {"nvidia.com/gpu": [CARD]}}, listed=False)
    node = TestNode([Gpu(0)], [pod, Pod("ml", "other", {"main": {}})], [Process(10, CARD, pod)])
    first = node.collect()
    pod.listed = True
    second = node.collect()
    assert (owners(first, CARD)["unknown"], owners(second, CARD)["assigned"]) == (GIB, GIB)
    assert owners(first, CARD)["gone"] == owners(second, CARD)["gone"] == owners(second, CARD)["unassigned"] == 0


def test_compute_instances_of_one_gpu_instance_show_its_memory_whole() -> None:
    """Each compute instance shows the shared memory whole, the others' processes as `sibling`; SM is absent on MIG."""
    leaves = [mig_uuid(0, 1, 0), mig_uuid(0, 1, 1)]
    pods = [Pod("ml", f"p{n}", {"main": {"nvidia.com/mig-1c.2g": [str(leaf)]}}) for n, leaf in enumerate(leaves)]
    node = TestNode([Gpu(0, mig=[(1, 0, 1), (1, 1, 1)])], pods)
    node.processes = [Process(10, leaves[0], pods[0], memory=GIB), Process(11, leaves[1], pods[1], memory=2 * GIB)]
    snapshot = node.collect()
    assert (owners(snapshot, leaves[0])["assigned"], owners(snapshot, leaves[0])["sibling"]) == (GIB, 2 * GIB)
    assert (owners(snapshot, leaves[1])["assigned"], owners(snapshot, leaves[1])["sibling"]) == (2 * GIB, GIB)
    for leaf in leaves:
        assert sum(value or 0 for value in owners(snapshot, leaf).values()) == 3 * GIB + (100 << 20)
    assert all(r.use and r.use.sm_ratio is None for r in snapshot.containers)


def test_a_process_on_two_compute_instances_is_a_part_on_each() -> None:
    """Each row is its own instance's, and a sibling's on the other; the container's series add up."""
    first, second, alone = mig_uuid(0, 1, 0), mig_uuid(0, 1, 1), mig_uuid(0, 2, 0)
    both = Pod("ml", "both", {"main": {"nvidia.com/mig-1c.3g.40gb": [str(first), str(second)]}})
    node = TestNode([Gpu(0, mig=[(1, 0, 1), (1, 1, 2), (2, 0, 1)])], [both])
    node.processes = [Process(10, first, both, memory=GIB), Process(10, second, both, memory=2 * GIB)]
    snapshot = node.collect()
    assert (owners(snapshot, first)["assigned"], owners(snapshot, first)["sibling"]) == (GIB, 2 * GIB)
    assert (owners(snapshot, second)["assigned"], owners(snapshot, second)["sibling"]) == (2 * GIB, GIB)
    assert "sibling" not in owners(snapshot, alone)
    assert sum(one.use.memory_bytes or 0 for one in snapshot.containers if one.use) == 3 * GIB
    assert sum(one.allocated_gpus or 0 for one in snapshot.containers) == pytest.approx(3 / 7)
