"""What a snapshot says while sources are down, away, stale or back: nothing stale, no false zero, no flap."""

from dataclasses import replace

import pytest
from msgspec import structs

from gpumap.agent.join import Memory, step
from gpumap.agent.join.inventory import Inventory, take_inventory
from gpumap.agent.metrics import native
from gpumap.model.observations import ClaimDevice, NvmlReading, Observed
from gpumap.model.readings import GpuReading
from gpumap.model.snapshot import Snapshot
from tests.nodes import GIB, RULES, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid, owners, row, use

CARD = gpu_uuid(0)


def one_pod() -> tuple[TestNode, Pod]:
    pod = Pod("ml", "job", {"main": {"nvidia.com/gpu": [str(CARD)]}})
    offered = {"nvidia.com/gpu": [str(CARD), str(gpu_uuid(1))]}
    return TestNode([Gpu(0), Gpu(1)], [pod], [Process(10, CARD, pod)], offered), pod


def test_collections_are_counted_by_what_started_them() -> None:
    """If an allocation can start a collection, its counter is 0 before the first one. Otherwise it does not exist."""
    node, _ = one_pod()
    assert node.collect().collections == (("interval", 1),)
    memory, first = step(node.memory, replace(node.observe(), push=True), RULES)
    _, second = step(memory, replace(node.observe(), push=True, trigger="push"), RULES)
    assert first.collections == (("interval", 2), ("push", 0))
    assert second.collections == (("interval", 2), ("push", 1))


@pytest.mark.parametrize("logs", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_capabilities_show_which_files_of_the_kubelet_can_be_read(checkpoint: bool, logs: bool) -> None:
    """Also if none can be read. Without a kubelet there is no such capability."""
    node, _ = one_pod()
    node.checkpoint_readable, node.logs_readable = checkpoint, logs
    found = node.collect().node.capabilities
    assert (found["device_checkpoint"], found["pod_logs"], found["push"]) == (checkpoint, logs, False)
    node.has_kubelet = False
    assert not {"device_checkpoint", "pod_logs", "push"} & node.collect().node.capabilities.keys()


def test_capabilities_of_a_driver_are_those_of_any_gpu() -> None:
    """One GPU that reports samples, or one with GPM values, is enough."""
    whole, partitioned = Gpu(0), Gpu(1, mig=[(1, 0, 3)])
    node = TestNode([whole, partitioned, Gpu(2, has_samples=False)])
    found = node.collect().node.capabilities
    assert (found["process_utilization"], found["gpm"]) == (True, False)
    whole.has_samples = False
    partitioned.activities = {(1, 0): 0.5}
    found = node.collect().node.capabilities
    assert (found["process_utilization"], found["gpm"]) == (False, True)


def test_uid_that_was_read_without_the_list_counts_with_the_next_one() -> None:
    """The List and the files did not change, and now both are of one collection."""
    node, pod = one_pod()
    pod.has_tree = pod.in_checkpoint = False
    node.collect()
    node.down = {"kubelet"}
    pod.has_tree = pod.in_checkpoint = True
    assert [one.uid for one in node.collect().node.pods if one.pod == pod.name] == [""]
    node.down = set()
    assert [one.uid for one in node.collect().node.pods] == [pod.uid]


def test_stale_list_is_not_served_but_measured_use_stays() -> None:
    """Past --stale-after allocation, zeros and owners that need the List are absent; measured container series stay."""
    node, pod = one_pod()
    idle = Pod("ml", "idle", {"main": {"nvidia.com/gpu": [str(gpu_uuid(1))]}})
    node.pods.append(idle)
    node.collect()
    node.down.add("kubelet")
    for _ in range(13):
        snapshot = node.collect()
    found = pod.row(snapshot, CARD)
    assert not found.holds
    assert found.use is not None
    assert found.use.memory_bytes == GIB
    assert row(snapshot, idle.full(), gpu_uuid(1)) is None
    assert owners(snapshot, CARD) == {"host": 0, "unknown": GIB, "unaccounted": 100 << 20}
    assert all(leaf.holders is None and leaf.allocatable == {} for leaf in snapshot.node.devices)


def test_new_pod_is_not_called_gone_while_identity_is_of_an_earlier_collection() -> None:
    """A pod that came after the identity files were last read has no directory in them. That accuses no pod."""
    node, pod = one_pod()
    node.collect()
    node.down.add("pod_identity")
    new = Pod("ml", "new", {"main": {"nvidia.com/gpu": [str(gpu_uuid(1))]}})
    node.pods.append(new)
    node.processes.append(Process(11, gpu_uuid(1), new))
    for _ in range(3):
        snapshot = node.collect()
        assert owners(snapshot, gpu_uuid(1))["unknown"] == GIB
        assert set(owners(snapshot, gpu_uuid(1))) == {"assigned", "host", "unknown", "unaccounted"}
        assert use(snapshot, new.full(), gpu_uuid(1)) is None, "it is not idle either"
    assert pod.use(snapshot, CARD).memory_bytes == GIB


def test_snapshot_has_the_time_when_its_memory_gets_too_old() -> None:
    """What is served from an earlier collection has an end, at which the next collection is due."""
    node, _ = one_pod()
    assert node.collect().expires is None
    read_at = node.clock
    node.down.add("kubelet")
    assert node.collect().expires == read_at + RULES.stale_after_seconds
    node.down.add("pod_identity")
    assert node.collect().expires == read_at + RULES.stale_after_seconds
    assert node.collect(seconds=100).expires is None


def test_restarted_kubelet_that_lists_nothing_yet_keeps_existing_pods() -> None:
    """For 60 s after a restart a pod missing from the List keeps what it held, while its directory or cgroup exists."""
    node, pod = one_pod()
    ended = Pod("ml", "ended", {"main": {"nvidia.com/gpu": [str(gpu_uuid(1))]}})
    node.pods.append(ended)
    node.collect()
    node.down.add("kubelet")
    node.collect()
    node.down.clear()
    node.socket = "second"
    pod.listed = False
    node.pods.remove(ended)
    snapshot = node.collect()
    assert pod.row(snapshot, CARD).holds
    assert owners(snapshot, CARD)["assigned"] == GIB
    assert row(snapshot, ended.full(), gpu_uuid(1)) is None, "its directory is gone: it is too"
    for _ in range(12):
        snapshot = node.collect()
    assert row(snapshot, pod.full(), CARD) is None, "the grace is over"


@pytest.mark.parametrize("then", ["", "deadline_exceeded"])
@pytest.mark.parametrize("reason", ["socket_missing", "connection_refused", "unavailable"])
def test_kubelet_that_was_away_begins_the_grace(reason: str, then: str) -> None:
    """Each reason of a kubelet that does not run, also if it is slow at its start."""
    node, pod = one_pod()
    node.collect()
    for node.kubelet_reason in (reason, then) if then else (reason,):
        node.down = {"kubelet"}
        node.collect()
    node.down, pod.listed = set(), False
    assert pod.row(node.collect(), CARD).holds


def test_slow_kubelet_was_not_away() -> None:
    """A List that missed its deadline starts no grace: a pod missing from the next one is gone."""
    node, pod = one_pod()
    node.collect()
    node.down, node.kubelet_reason = {"kubelet"}, "deadline_exceeded"
    node.collect()
    node.down = set()
    pod.listed = False
    found = row(node.collect(), pod.full(), CARD)
    assert found is None or not found.holds


def test_nvml_down_keeps_allocation_by_the_uuid_that_the_id_carries() -> None:
    """While the driver is away an id's own uuid makes its series, and nothing is called not_in_nvml."""
    node, pod = one_pod()
    odd = Pod("ml", "odd", {"main": {"nvidia.com/gpu": [f"GPU-{'0' * 8}-0000-0000-0000-{'0' * 12}", "card-0"]}})
    node.pods.append(odd)
    node.down.add("nvml")
    snapshot = node.collect()
    found = pod.row(snapshot, CARD)
    assert (found.allocated_gpus, found.allocated_memory_bytes, found.use) == (1.0, None, None)
    assert [(u.reason, u.slots) for u in snapshot.node.unmatched] == [("unparsed", 1)]
    assert all(leaf.gpu_uuid is None and leaf.memory is None for leaf in snapshot.node.devices)
    node.down.clear()
    assert sorted((u.reason, u.slots) for u in node.collect().node.unmatched) == [("not_in_nvml", 1), ("unparsed", 1)]


def test_lost_gpu_keeps_its_uuid_and_its_allocation() -> None:
    """A GPU that fell off the bus keeps name, leaves and holders; its measurements are absent at once."""
    mig = Gpu(2, mig=[(1, 0, 3)])
    leaf = mig_uuid(2, 1, 0)
    node, pod = one_pod()
    on_mig = Pod("ml", "on-mig", {"main": {"nvidia.com/mig-3g.40gb": [str(leaf)]}})
    node.gpus.append(mig)
    node.pods.append(on_mig)
    before = node.collect()
    node.gpus[0].fault = mig.fault = "lost"
    during = node.collect()
    assert [(gpu.uuid, gpu.fault) for gpu in during.node.gpus if gpu.fault] == [(CARD, "lost"), (mig.uuid, "lost")]
    assert {leaf.uuid for leaf in during.node.devices} == {leaf.uuid for leaf in before.node.devices}
    instances = [one.mig for one in during.node.devices if one.mig]
    assert [(one.uuid, one.gpu_instance_id, one.compute_instance_id) for one in instances] == [(leaf, 1, 0)]
    for name, uuid in ((pod.full(), CARD), (on_mig.full(), leaf)):
        found = row(during, name, uuid)
        assert found is not None
        assert found.holds
        assert found.use is None
        assert owners(during, uuid) == {}
    assert during.node.unmatched == ()
    assert row(during, pod.full(), CARD) != row(before, pod.full(), CARD)


def inventory_of(*readings: GpuReading, wall: float, before: Inventory | None = None) -> Inventory:
    answer = NvmlReading("", "", "", readings)
    return take_inventory(answer, wall, before.known if before else (), len(readings))


def test_gpu_that_was_at_fault_from_the_start_has_no_last_success() -> None:
    """It reports its uuid, so it has a name, but it never answered."""
    found = inventory_of(GpuReading(0, uuid=CARD, fault="lost"), wall=10.0)
    assert [(gpu.uuid, gpu.fault, gpu.last_success) for gpu in found.gpus] == [(CARD, "lost", None)]


def test_partitioned_gpu_that_does_not_report_its_mode_keeps_its_mig_devices() -> None:
    """A reading may lack the MIG mode, and then has no instances."""
    gpu, leaf = Gpu(0, mig=[(1, 0, 3)]), mig_uuid(0, 1, 0)
    pod = Pod("ml", "on-mig", {"main": {"nvidia.com/mig-3g.40gb": [str(leaf)]}})
    node = TestNode([gpu], [pod], [Process(10, leaf, pod)])
    before = node.collect()
    observations = node.observe()
    reading = observations.nvml.value  # type: ignore[union-attr]
    unknown = structs.replace(
        reading.gpus[0], partitioned=False, mig_unknown=True, instances=(), processes=node._on(leaf), samples=()
    )
    observed = Observed(replace(reading, gpus=(unknown,)), node.now, 0.0)
    _, during = step(node.memory, replace(observations, nvml=observed), RULES)
    assert [(one.uuid, one.partitioned) for one in during.node.gpus] == [(gpu.uuid, True)]
    assert [(one.uuid, one.holders) for one in during.node.devices] == [
        (one.uuid, one.holders) for one in before.node.devices
    ]
    found = pod.row(during, leaf)
    assert (found.allocated_gpus, found.use, owners(during, leaf)) == (3 / 7, None, {})


def test_allocatable_is_zero_where_the_resource_is_offered_without_the_leaf() -> None:
    """A GPU that its plugin calls unhealthy has 0 slots; while the kubelet does not answer, there is no number."""
    node, _ = one_pod()
    node.allocatable = {"nvidia.com/gpu": [str(CARD), str(gpu_uuid(1))]}
    node.collect()
    node.allocatable = {"nvidia.com/gpu": [str(CARD)]}
    snapshot = node.collect()
    assert {leaf.uuid: leaf.allocatable for leaf in snapshot.node.devices} == {
        CARD: {"nvidia.com/gpu": 1},
        gpu_uuid(1): {"nvidia.com/gpu": 0},
    }
    node.allocatable = None
    assert all(leaf.allocatable == {} for leaf in node.collect().node.devices)


def test_card_offered_twice_is_not_given_away_twice() -> None:
    """Where plugins offer one card as a whole and in replicas, the shares of its holders still add up to one (L9)."""
    whole = Pod("ml", "whole", {"main": {"nvidia.com/gpu": [str(CARD)]}})
    part = Pod("ml", "part", {"main": {"nvidia.com/gpu.shared": [f"{CARD}::0"]}})
    node = TestNode([Gpu(0)], [whole, part], registered={"nvidia.com/gpu.shared": [f"{CARD}::{n}" for n in range(4)]})
    shares = [r.allocated_gpus for r in node.collect().containers]
    assert shares == [0.25 / 1.25, 1 / 1.25]


def test_peak_is_the_most_since_first_seen_and_restarts_with_a_new_pod() -> None:
    """The peak holds while memory falls, and a successor of the same name starts from its own."""
    node, pod = one_pod()
    peaks = []
    for memory in (GIB, 5 * GIB, 2 * GIB):
        node.processes[0].memory = memory
        found = use(node.collect(), pod.full(), CARD)
        peaks.append(found and found.memory_peak_bytes)
    assert peaks == [GIB, 5 * GIB, 5 * GIB]
    pod.generation = 1
    assert pod.use(node.collect(), CARD).memory_peak_bytes == 2 * GIB


def test_peak_of_a_predecessor_is_not_served_while_the_uid_is_not_known() -> None:
    """A pod recreated under its name, with an unknown UID, has no peak rather than its predecessor's."""
    node, pod = one_pod()
    node.collect()
    pod.listed, pod.in_checkpoint = False, False
    node.processes.clear()
    node.pods.append(replace(pod, generation=1, listed=True, has_tree=False))
    holder = pod.row(node.collect(), CARD)
    assert holder.use is not None
    assert (holder.use.memory_bytes, holder.use.memory_peak_bytes) == (0, None)
    assert holder.watch is not None
    assert not holder.watch.certain_pod


def test_device_under_two_names_is_shared_out_once() -> None:
    """One MIG device that two containers hold, each by another form of its name, is half of each."""
    gpu = Gpu(0, mig=[(3, 0, 2)])
    pods = [
        Pod("ml", f"p{number}", {"main": {"nvidia.com/mig-2g.10gb": [name]}})
        for number, name in enumerate((f"MIG-{gpu.uuid}/3/0", str(mig_uuid(0, 3, 0))))
    ]
    assert [r.allocated_gpus for r in TestNode([gpu], pods).collect().containers] == [1 / 7, 1 / 7]


def test_driver_that_gives_two_devices_one_name_spoils_no_page() -> None:
    """Two GPUs of one uuid, and an answer without a name, cost themselves; each name has one leaf."""
    node, pod = one_pod()
    observations = node.observe()
    reading = observations.nvml.value  # type: ignore[union-attr]
    twins = (
        reading.gpus[0],
        structs.replace(reading.gpus[0], index=1),
        structs.replace(reading.gpus[1], index=2, uuid=None),
    )
    lying = Observed(replace(reading, gpus=twins), observations.nvml.at, 0.0)
    _, snapshot = step(Memory(), replace(observations, nvml=lying), RULES)
    assert [leaf.uuid for leaf in snapshot.node.devices] == [CARD]
    assert use(snapshot, pod.full(), CARD) is not None


def test_last_active_is_first_seen_until_it_computes() -> None:
    """Until SM time is seen it is when the pod was first seen; absent if SM time is not known."""
    node, pod = one_pod()

    def last_active() -> float | None:
        holder = pod.row(node.collect(), CARD)
        return holder.watch.last_active if holder.watch else None

    assert last_active() == last_active() == node.now.wall - 5
    node.processes[0].sm = 0.5
    assert last_active() == node.now.wall
    node.gpus[0].has_samples = False
    assert last_active() is None


def test_unchanged_answers_cost_no_second_join() -> None:
    """While List, files and devices are the same, the tables made of them are the very same objects."""
    node, _ = one_pod()
    observations = node.observe()
    first, _ = step(Memory(), observations, RULES)
    second, _ = step(first, observations, RULES)
    assert second.pod_table is first.pod_table
    assert second.allocation is first.allocation


def test_stale_list_credits_neither_of_two_pods_of_one_name_with_both() -> None:
    """With two UIDs under one name and no current List neither is measured: the devices may be handed on meanwhile."""
    node, old = one_pod()
    node.collect()
    node.down.add("kubelet")
    node.collect(seconds=100)
    old.in_checkpoint = False
    new = replace(old, generation=1, in_checkpoint=True)
    node.pods.append(new)
    node.processes.append(Process(11, CARD, new, memory=2 * GIB))
    assert use(node.collect(), new.full(), CARD) is None


def test_measured_series_stay_without_log_directories_too() -> None:
    """With only the checkpoint, a UID that the last List fixed is measured on while the List is stale."""
    node, _ = one_pod()
    node.logs_readable = False
    node.collect()
    node.down.add("kubelet")
    snapshot = node.collect(seconds=100)
    assert [(r.name.pod, r.holds, r.use is not None) for r in snapshot.containers] == [("job", False, True)]


def test_ended_pod_listed_beside_its_successor_changes_nothing() -> None:
    """Kubelets before 1.34 may list both under one name: the one with a row and a directory is the live one."""
    node, live = one_pod()
    ended = Pod("ml", "job", {"main": {}}, generation=7, has_tree=False, in_checkpoint=False)
    node.pods.insert(0, ended)
    node.collect()
    snapshot = node.collect()
    assert owners(snapshot, CARD)["assigned"] == GIB
    assert live.use(snapshot, CARD).memory_bytes == GIB


def test_grace_outlasts_a_collection_without_evidence() -> None:
    """A pod without a visible process for one collection is kept again when it can, until the grace is over."""
    node, pod = one_pod()
    node.logs_readable = False
    node.pods.append(Pod("kube-system", "static", {"main": {}}))
    node.collect()
    node.down.add("kubelet")
    node.collect()
    node.down = {"procfs"}
    pod.listed = False
    node.collect()
    node.down = set()
    snapshot = node.collect()
    assert pod.row(snapshot, CARD).holds
    assert owners(snapshot, CARD)["gone"] == 0


def test_nameless_gpu_is_not_taken_for_one_that_is_no_more() -> None:
    """With another count of GPUs an index may be another GPU: one that reports no uuid then has none."""
    node, _ = one_pod()
    node.gpus.append(Gpu(2))
    third = Pod("ml", "third", {"main": {"nvidia.com/gpu": [str(gpu_uuid(2))]}})
    node.pods.append(third)
    node.collect()
    reading = node.observe().nvml.value  # type: ignore[union-attr]
    left = (reading.gpus[0], structs.replace(reading.gpus[2], index=1, uuid=None, fault="hung"))
    observed = Observed(replace(reading, gpus=left), node.now, 0.0)
    _, snapshot = step(node.memory, replace(node.observe(), nvml=observed), RULES)
    assert [(u.name.pod, u.reason) for u in snapshot.node.unmatched] == [("third", "device_down")]
    assert [gpu.uuid for gpu in snapshot.node.gpus] == [CARD]


def test_container_is_not_guessed_from_directories_of_an_earlier_collection() -> None:
    """A pod's only directory names its container only if it was read after the process was seen."""
    ids = {"nvidia.com/gpu": [str(CARD)]}
    pod = Pod("ml", "job", {"main": ids}, has_links=False)
    node = TestNode([Gpu(0)], [pod])
    node.collect()
    node.down = {"pod_identity"}
    node.processes = [Process(10, CARD, pod)]
    snapshot = node.collect()
    assert {r.name.container: r.use.memory_bytes if r.use else None for r in snapshot.containers} == {
        "": GIB,
        "main": None,
    }


def test_grace_ends_for_a_pod_whose_device_was_assigned_to_another() -> None:
    """After a restart the List gives the id of a pod that it omits to another pod: only that one holds the device."""
    node, pod = one_pod()
    node.collect()
    node.socket, pod.listed = "second", False
    assert row(node.collect(), pod.full(), CARD) is not None
    successor = Pod("ml", "next", {"main": {"nvidia.com/gpu": [str(CARD)]}})
    node.pods.append(successor)
    for _ in range(2):
        snapshot = node.collect()
        held = {r.name.pod: r.allocated_gpus for r in snapshot.containers if r.holds}
        assert held == {"next": 1.0}
        assert [leaf.holders for leaf in snapshot.node.devices] == [1, 0]


def test_stale_identity_ties_no_recreated_pod_to_its_predecessor() -> None:
    """A StatefulSet's pod is re-created while no identity file can be read: its process leaves no false zero."""
    node, old = one_pod()
    node.processes = []
    node.collect()
    node.down = {"pod_identity"}
    node.pods.remove(old)
    node.pods.append(new := replace(old, generation=1))
    node.processes = [Process(11, CARD, new, memory=9 * GIB)]
    for _ in range(2):
        snapshot = node.collect()
        assert owners(snapshot, CARD)["unknown"] == 9 * GIB
        assert use(snapshot, new.full(), CARD) is None
    new.listed = False
    node.collect()
    new.listed = True
    snapshot = node.collect()
    assert [pod.uid for pod in snapshot.node.pods] == [""], "the List showed that it was re-created"
    node.down = set()
    assert [pod.uid for pod in node.collect().node.pods] == [new.uid]


def test_stale_pods_api_ties_no_pod_with_another_device_to_its_predecessor() -> None:
    """Only the Pods API has the UID, and cannot be read. A pod with other devices under the name is another one."""
    node, old = one_pod()
    old.has_tree = old.has_links = node.checkpoint_readable = False
    node.reports_pods, node.processes = True, []
    assert [pod.uid for pod in node.collect().node.pods] == [old.uid]
    node.down = {"pod_identity"}
    assert [pod.uid for pod in node.collect().node.pods] == [old.uid]
    node.pods = [replace(old, generation=1, ids={"main": {"nvidia.com/gpu": [str(gpu_uuid(1))]}})]
    assert [pod.uid for pod in node.collect().node.pods] == [""]


def holder_counts(snapshot: Snapshot) -> list[int | None]:
    """The values of gpumap_device_holders, leaf by leaf."""
    family = next(one for one in native(("allocation",), process_metrics=False) if one.name == "gpumap_device_holders")
    values = {series.labels: series.value for series in family.read(snapshot)}
    return [None if (value := values.get((leaf.uuid,))) is None else int(value) for leaf in snapshot.node.devices]


def test_holders_are_unknown_while_a_slot_may_be_on_the_device() -> None:
    """A slot that gpumap cannot place may be on each device: none of them has 0 holders."""
    node, pod = one_pod()
    assert holder_counts(node.collect()) == [1, 0]
    odd = Pod("ml", "odd", {"main": {"aliyun.com/gpu-mem": [f"{CARD}-_-0"]}})
    node.pods.append(odd)
    snapshot = node.collect()
    assert [u.reason for u in snapshot.node.unmatched] == ["untrusted_id"]
    assert holder_counts(snapshot) == [None, None]
    odd.ids = {"main": {"nvidia.com/gpu": ["card-0"]}}
    assert holder_counts(node.collect()) == [None, None], "unparsed"
    node.allocatable = {"nvidia.com/gpu": ["card-0", str(CARD)]}
    assert holder_counts(node.collect()) == [None, 0], "the other one is not offered"
    node.down = {"nvml"}
    node.allocatable = {"nvidia.com/gpu": [str(CARD), str(gpu_uuid(1))]}
    odd.ids = {}
    snapshot = node.collect()
    answer = dict(zip([leaf.uuid for leaf in snapshot.node.devices], holder_counts(snapshot), strict=True))
    assert answer == {CARD: 1, gpu_uuid(1): 0}
    odd.ids = {"main": {"aliyun.com/gpu-mem": [f"{CARD}-_-0"]}}
    snapshot = node.collect()
    assert [u.reason for u in snapshot.node.unmatched] == ["nvml_down"]
    answer = dict(zip([leaf.uuid for leaf in snapshot.node.devices], holder_counts(snapshot), strict=True))
    assert answer == {CARD: 1, gpu_uuid(1): None}
    node.down = set()
    odd.ids = {"main": {"nvidia.com/gpu": [str(gpu_uuid(99))]}}
    snapshot = node.collect()
    assert [u.reason for u in snapshot.node.unmatched] == ["not_in_nvml"]
    assert holder_counts(snapshot) == [1, 0]
    assert row(snapshot, pod.full(), CARD) is not None


@pytest.mark.parametrize("by", ["claim", "id", "placement"])
def test_slot_by_minor_may_be_on_a_gpu_without_a_known_minor(by: str) -> None:
    """A driver may refuse the minor of a GPU."""
    gpus = [Gpu(0, mig=[(2, 0, 4)] if by == "placement" else None, has_minor=False), Gpu(1)]
    if by == "id":
        pod = Pod("ml", "p", {"main": {"nvidia.com/gpu": ["nvidia0"]}})
    else:
        device = "gpu-0" if by == "claim" else "gpu-0-mig-19-2-1"
        pod = Pod("ml", "p", claims={"main": [ClaimDevice("gpu.nvidia.com", "node-a", device, "", "ml", "c")]})
    node = TestNode(gpus, [pod], allocatable={"nvidia.com/gpu": ["nvidia0", "nvidia1"]} if by == "id" else None)
    snapshot = node.collect()
    assert [(u.reason, u.slots) for u in snapshot.node.unmatched] == [("device_down", 1)]
    assert holder_counts(snapshot) == [None, 0]
    assert snapshot.node.devices[0].allocatable == {}
    gpus[0].has_minor = True
    snapshot = node.collect()
    assert snapshot.node.unmatched == ()
    assert holder_counts(snapshot) == [1, 0]
    gpus[0].has_minor = False
    snapshot = node.collect()
    assert holder_counts(snapshot) == [1, 0], "gpumap remembers the minor"
