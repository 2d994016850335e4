"""Attacks on owners: situations in which gpumap accuses, or says 0, without evidence for it. Each test is a lie."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from gpumap.agent.join import Memory
from gpumap.agent.published import published
from gpumap.cli.table import Shape
from gpumap.model.observations import (
    CheckpointEntry,
    ClaimDevice,
    ClaimPods,
    DeviceId,
    DraState,
    LogTree,
    PluginAnswer,
    PodIdentity,
    PreparedDevice,
    ReportedPod,
)
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests.nodes import GIB, Gpu, Pod, Process, Renumbered, TestNode, gpu_uuid, owners, use
from tests.shown import waste_values

CARD, OTHER = gpu_uuid(0), gpu_uuid(1)
WHOLE, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"


def holder(name: str, *uuids: Uuid, **more: dict[str, list[str]]) -> Pod:
    return Pod("ml", name, {"main": {WHOLE: list(map(str, uuids))}, **more})


@dataclass
class IdentityNode(TestNode):
    """A node with identity files that a test writes itself, if they are not None. A device plugin offers two GPUs."""

    allocatable: dict[str, list[str]] | None = field(default_factory=lambda: {WHOLE: [str(CARD), str(OTHER)]})
    dra: DraState | None = None
    reported: tuple[ReportedPod, ...] | None = None
    rows: tuple[CheckpointEntry, ...] | None = None
    trees: tuple[LogTree, ...] | None = None

    @property
    def has_no_identity(self) -> bool:
        return "pod_identity" in self.down or (
            self.reported is None and not (self.checkpoint_readable or self.logs_readable)
        )

    def _identity(self) -> PodIdentity:
        found = super()._identity()
        if self.rows is not None and found.checkpoint is not None:
            found = replace(found, checkpoint=self._same(replace(found.checkpoint, entries=self.rows)))
        if self.trees is not None and found.logs is not None:
            found = replace(found, logs=self._same(replace(found.logs, trees=self.trees)))
        return replace(
            found,
            dra=found.dra if self.dra is None else self._same(self.dra),
            pods=None if self.reported is None else self._same(self.reported),
        )


def lies(snapshot: Snapshot, leaf: Uuid = CARD) -> dict[str, int | None]:
    """The bytes of accused owners on a leaf, those that are not 0."""
    found = owners(snapshot, leaf)
    return {name: found[name] for name in ("unassigned", "gone") if found.get(name)}


def blamed(snapshot: Snapshot) -> list[tuple[str, str]]:
    """The findings of `gpumap waste`, with their pods."""
    shown = waste_values(published(snapshot), Shape())
    return [(one["finding"], one["pod"]) for one in shown["findings"] if one["finding"] in ("squatter", "leftover")]


def holders(snapshot: Snapshot, leaf: Uuid = CARD) -> int | None:
    return next(one.holders for one in snapshot.node.devices if one.uuid == leaf)


# --- log directories --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_second_log_directory_of_a_uid_makes_no_pod_gone(from_the_start: bool) -> None:
    """A directory may name another pod with the UID of a live one."""
    whole, squatter = holder("whole", OTHER), Pod("ml", "squatter", {"main": {}})
    node = IdentityNode([Gpu(0), Gpu(1)], [whole, squatter], [Process(10, CARD, squatter, memory=5 * GIB)])
    true = tuple(LogTree(pod.uid, "ml", pod.name, ("main",)) for pod in (whole, squatter))
    node.trees = true
    if not from_the_start:
        node.collect()
    node.trees = (*true, LogTree(squatter.uid, "ml", "whole", ("main",)))
    node.collect()
    assert lies(node.collect()) == ({} if from_the_start else {"unassigned": 5 * GIB})


# --- DRA on kubelets that do not list claims --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "allocatable",
    [None, {"rdma/hca": ["mlx5_0"]}, {WHOLE: [str(OTHER)]}],
    ids=["no plugin", "a NIC's plugin", "another GPU's plugin"],
)
@pytest.mark.parametrize("files", [True, False], ids=["state files", "no state files"])
def test_user_of_a_claim_that_the_kubelet_does_not_list_is_no_squatter(
    files: bool, allocatable: dict[str, list[str]] | None
) -> None:
    """Kubelets 1.32 and 1.33 leave claims out of the List (gate KubeletPodResourcesDynamicResources)."""
    pod, other = Pod("ml", "trainer", {"main": {}}), Pod("kube-system", "proxy", {"main": {}})
    processes = [Process(10, CARD, pod, memory=40 * GIB)]
    node = IdentityNode([Gpu(0), Gpu(1)], [pod, other], processes, allocatable=allocatable)
    if files:
        node.dra = DraState(
            (ClaimPods("ml", "trainer-gpu-x7k2p", (pod.uid,)),),
            (PreparedDevice("ml", "trainer-gpu-x7k2p", "gpu-0", "", CARD, False, None),),
        )
    node.collect()
    snapshot = node.collect()
    assert lies(snapshot) == {}
    assert holders(snapshot) != 0, "the claim holds it"


def test_claim_that_may_be_for_administrators_is_named() -> None:
    """A monitor's claim with admin access takes no device from a pod."""
    claims = {"main": [ClaimDevice("gpu.nvidia.com", "node-a", "gpu-0", "", "mon", "all-gpus")]}
    monitor, other = Pod("mon", "dcgm-exporter", claims=claims), Pod("kube-system", "proxy", {"main": {}})
    node = IdentityNode([Gpu(0)], [monitor, other], allocatable=None)
    shown = waste_values(published(node.watch()), Shape())
    (finding,) = shown["findings"]
    assert (finding["finding"], finding["reason"]) == ("maybe_idle", "admin_access_unknown")
    assert "`privileges.dra`" in finding["why"]
    assert "`privileges.dra=true`" in finding["remedy"]
    assert (shown["sums"]["idle_gpus"], shown["sums"]["unused_bytes"]) == (0, None)


# --- log directories --------------------------------------------------------------------------------------------------


def test_only_directory_that_is_left_names_no_other_container() -> None:
    """After a cleaner removed a pod's logs, the directory of a restarted sidecar names only the sidecar."""
    pod = holder("server", CARD, side={})
    node = IdentityNode(
        [Gpu(0)], [pod, Pod("kube-system", "proxy", {"main": {}})], [Process(10, CARD, pod, memory=40 * GIB)]
    )
    node.collect()
    pod.has_links = False
    node.trees = (LogTree(pod.uid, "ml", "server", ("side",)),)
    node.collect()
    snapshot = node.collect()
    assert lies(snapshot) == {}
    assert use(snapshot, pod.full("side"), CARD) is None, "it is the memory of main"
    found = use(snapshot, pod.full(), CARD)
    assert found is None or found.memory_bytes == 40 * GIB, "main is not idle"


@pytest.mark.parametrize("restarted", [False, True], ids=["gpumap goes on", "gpumap restarted"])
def test_directory_of_a_predecessor_makes_no_holder_idle(restarted: bool) -> None:
    """The only directory is an earlier pod's of the name, and no row names the UID of the holder's process."""
    claims = {"main": [ClaimDevice("gpu.nvidia.com", "node-a", "gpu-0", "", "ml", "c")]}
    old, other = Pod("ml", "web-0", claims=claims, listed=False), Pod("kube-system", "proxy", {"main": {}})
    node = IdentityNode([Gpu(0)], [replace(old, listed=True), other])
    node.collect()
    new = replace(old, generation=1, listed=True, has_tree=False, has_links=False)
    node.pods = [old, new, other]
    node.processes = [Process(10, CARD, new, memory=40 * GIB)]
    if restarted:
        node.memory = Memory()
    node.collect()
    snapshot = node.collect()
    assert lies(snapshot) == {}
    found = use(snapshot, new.full(), CARD)
    assert found is None or found.memory_bytes == 40 * GIB, "its process runs"


@pytest.mark.parametrize("dra", [False, True], ids=["a GPU, then none", "claims of two GPUs"])
def test_successor_without_a_directory_yet_does_not_pay_for_its_predecessor(dra: bool) -> None:
    """A notebook with a GPU was deleted with --force, and made again without one, or with a claim of another one."""
    old, other = holder("notebook-0", CARD), Pod("kube-system", "proxy", {"main": {}})
    new_claims: dict[str, list[ClaimDevice]] = {}
    if dra:
        claims = [
            {"main": [ClaimDevice("gpu.nvidia.com", "node-a", f"gpu-{n}", "", "ml", f"gpu-{n}")]} for n in range(2)
        ]
        old, new_claims = Pod("ml", "notebook-0", claims=claims[0]), claims[1]
    node = IdentityNode([Gpu(0), Gpu(1)], [old, other], [Process(10, CARD, old, memory=40 * GIB)])
    node.collect()
    assert owners(node.collect(), CARD)["assigned"] == 40 * GIB
    ids: dict[str, dict[str, list[str]]] = {} if dra else {"main": {}}
    new = replace(old, ids=ids, claims=new_claims, generation=1, has_tree=False, has_links=False)
    old.listed = False
    node.pods.append(new)
    node.collect()
    snapshot = node.collect()
    assert owners(snapshot, CARD)["unassigned"] == 0
    assert ("squatter", "notebook-0") not in blamed(snapshot)
    assert use(snapshot, new.full(), CARD) is None, "the memory is its predecessor's"


# --- the Pods API -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["new", "old"], ids=["new name", "same name"])
def test_pod_that_the_pods_api_does_not_report_yet_is_not_gone(name: str) -> None:
    """A kubelet drops an event; gpumap lists again after 60 s."""
    claims = {"main": [ClaimDevice("gpu.nvidia.com", "node-a", "gpu-0", "", "ml", "c")]}
    old, new = Pod("ml", "old", {"main": {}}), Pod("ml", name, claims=claims, generation=1)
    node = IdentityNode([Gpu(0)], [old], checkpoint_readable=False, logs_readable=False)
    node.reported = (ReportedPod(old.uid, "ml", "old"),)
    node.collect()
    node.pods = [old, new] if name == "new" else [new, Pod("kube-system", "proxy", {"main": {}})]
    node.processes = [Process(10, CARD, new, memory=40 * GIB)]
    node.collect()
    snapshot = node.collect()
    assert lies(snapshot) == {}
    found = use(snapshot, new.full(), CARD)
    assert found is None or found.memory_bytes == 40 * GIB, "it is not idle"


def dropping_node() -> tuple[TestNode, Pod]:
    """The kubelet drops the events of the Pods API while a pod with a claim is re-created under its name."""
    claims = {"main": [ClaimDevice("gpu.nvidia.com", "node-a", "gpu-0", "", "ml", "c")]}
    old, other = Pod("ml", "web-0", claims=claims), Pod("kube-system", "proxy", {"main": {}})
    node = TestNode([Gpu(0)], [old, other], reports_pods=True, checkpoint_readable=False, logs_readable=False)
    node.collect()
    node.drop_pod_events()
    node.pods[0] = new = replace(old, generation=1)
    return node, new


def test_kept_answer_makes_no_pod_gone_until_it_is_confirmed() -> None:
    """The names of List and answer agree, but the UID is older. An ended pod is gone by the next complete answer."""
    node, new = dropping_node()
    node.processes = [Process(10, CARD, new, memory=GIB)]
    for _ in range(5):
        snapshot = node.collect(400.0)
        split = owners(snapshot, CARD)
        assert (split["unknown"], split["gone"]) == (GIB, 0)
        assert use(snapshot, new.full(), CARD) is None, "a zero would be a finding"
        assert published(snapshot).findings == ()
    node.list_pods_again()
    snapshot = node.collect()
    assert owners(snapshot, CARD)["assigned"] == GIB


def test_kept_answer_goes_on_to_show_what_it_has_shown() -> None:
    """A process that gpumap knew before the last complete answer, without its pod there, is a leftover from then on."""
    node, new = dropping_node()
    node.processes = [Process(10, CARD, new, memory=GIB)]
    node.collect()
    node.pods[0] = replace(new, generation=2)
    node.list_pods_again()
    node.collect()
    node.drop_pod_events()
    for _ in range(3):
        snapshot = node.collect(20.0)
        assert owners(snapshot, CARD)["gone"] == GIB
        assert new.use(snapshot, CARD).memory_bytes == 0, "the process is certainly not that of the holder"
    assert [kind for kind, _ in blamed(snapshot)] == ["leftover"]


def test_kept_answer_confirms_no_directory_of_a_predecessor() -> None:
    """Both pods of a name have a log directory, and the kept answer has the UID of the ended one."""
    node, new = dropping_node()
    node.logs_readable, node.memory = True, Memory()
    node.pods.append(replace(new, generation=0, listed=False))
    node.processes = [Process(10, CARD, new, memory=GIB)]
    for _ in range(3):
        snapshot = node.collect()
        assert owners(snapshot, CARD)["gone"] == 0
        assert use(snapshot, new.full(), CARD) is None


# --- a List that fails while the files go on --------------------------------------------------------------------------


def handed_on(*, logs: bool) -> tuple[IdentityNode, Pod, Pod]:
    """A card goes from one job to the next, with containers of the same name, while the List fails (another client uses
    up the kubelet's hundred calls a second; an answer that is too large). The files are read as before."""
    old, new, neighbour = holder("job-1", CARD), holder("job-2", CARD), holder("neighbour", OTHER)
    node = IdentityNode([Gpu(0), Gpu(1)], [old, neighbour], logs_readable=logs)
    node.processes = [Process(10, CARD, old, memory=GIB)]
    node.collect()
    node.down, node.kubelet_reason = {"kubelet"}, "rate_limited"
    node.pods[0] = new
    new.has_tree = new.has_links = False  # the kubelet writes the row first
    node.processes = []
    node.collect()
    new.has_tree = new.has_links = True
    node.processes = [Process(11, CARD, new, memory=40 * GIB)]
    return node, old, new


@pytest.mark.parametrize("logs", [False, True])
def test_live_pod_is_not_gone_after_a_list_that_failed(*, logs: bool) -> None:
    """The List is back, and has job-2, which holds the card and uses it. With the logs it is known again."""
    node, _, new = handed_on(logs=logs)
    node.collect()
    node.down = set()
    for _ in range(5):
        snapshot = node.collect(30)
    assert (lies(snapshot), blamed(snapshot)) == ({}, [])
    found = use(snapshot, new.full(), CARD)
    assert (found is None and not logs) or (found is not None and found.memory_bytes == 40 * GIB)
    assert not logs or owners(snapshot, CARD)["assigned"] == 40 * GIB


# --- a kubelet that restarted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", ["none", "emptied"])
def test_empty_list_after_a_restart_is_no_zero_of_holders(files: str) -> None:
    """After a restart the kubelet lists no pod, and no file has one: the holders are unknown."""
    pod = holder("server", CARD)
    node = IdentityNode([Gpu(0)], [pod])
    node.checkpoint_readable = node.logs_readable = files == "emptied"
    node.rows, node.trees = (), ()
    assert holders(node.collect()) == 1
    node.socket, pod.listed = "second", False
    pod.has_links = False
    assert holders(node.collect()) != 0


def test_static_pod_with_a_uid_of_its_own_makes_no_list_complete() -> None:
    """A manifest that was saved with `kubectl get -o yaml` has `metadata.uid`; the kubelet takes it as it is."""
    static, pod = Pod("kube-system", "proxy-node-a", {"main": {}}), holder("server", CARD)
    node = IdentityNode([Gpu(0)], [static, pod], [Process(10, CARD, pod, memory=40 * GIB)])
    node.collect()
    node.socket, pod.listed = "second", False
    for _ in range(20):
        snapshot = node.collect()
        assert lies(snapshot) == {}


# --- processes --------------------------------------------------------------------------------------------------------


# --- gpumap's own restart ---------------------------------------------------------------------------------------------


@pytest.mark.xfail(strict=True, reason="gpumap does not keep across its restarts which GPU an index was")
def test_index_of_an_answer_from_before_gpumap_accuses_nobody() -> None:
    """A card was unbound and NVML counts again; then gpumap restarts (a new version of its DaemonSet)."""
    resource = "aliyun.com/gpu-mem"
    pod = Pod("ml", "server", {"main": {resource: [f"{CARD}-_-1"]}})
    pod.answers = {("main", resource): PluginAnswer(envs=(("NVIDIA_VISIBLE_DEVICES", "1"),))}
    node = IdentityNode([Gpu(0), Gpu(1), Gpu(2)], [pod, Pod("ml", "other", {"main": {}})])
    node.processes = [Process(10, OTHER, pod, memory=10 * GIB)]
    node.collect()
    _, second, third = node.gpus
    node.gpus = [Renumbered(second, 0), Renumbered(third, 1)]
    assert lies(node.collect(), OTHER) == {}
    node.memory = Memory()
    node.collect()
    snapshot = node.collect()
    assert lies(snapshot, OTHER) == {}
    assert use(snapshot, pod.full(), gpu_uuid(2)) is None, "it never had that card: there is no zero of it"


# --- since when a holder is idle --------------------------------------------------------------------------------------


# --- devices that the List does not have ------------------------------------------------------------------------------


def test_card_of_an_init_container_has_not_0_holders() -> None:
    """Only the init container requests the card (a compiler of kernels, a warm-up)."""
    pod = Pod("ml", "job", {"main": {}}, init={"warm": {WHOLE: [str(CARD)]}})
    node = IdentityNode([Gpu(0)], [pod], [Process(10, CARD, pod, "warm", memory=40 * GIB)])
    node.collect()
    snapshot = node.collect()
    assert owners(snapshot, CARD)["assigned"] == 40 * GIB
    assert holders(snapshot) != 0


def test_leftover_of_a_job_that_ended_is_no_squatter() -> None:
    """Kubelets before 1.34 list a Succeeded pod without its devices; its row stays in the checkpoint."""
    job, other = Pod("ml", "job", {"main": {}}), Pod("kube-system", "proxy", {"main": {}})
    node = IdentityNode([Gpu(0)], [job, other], [Process(10, CARD, job, memory=40 * GIB)])
    node.rows = (CheckpointEntry(job.uid, "main", WHOLE, frozenset({DeviceId(str(CARD))})),)
    node.collect()
    assert lies(node.collect()) == {}


def test_pod_that_only_the_grace_keeps_has_no_zero() -> None:
    """A job ended while the kubelet restarted. No List has it since; its directory is there for a while."""
    job, other = holder("job", CARD), Pod("kube-system", "proxy", {"main": {}})
    node = IdentityNode([Gpu(0)], [job, other], [Process(10, CARD, job, memory=40 * GIB)])
    node.collect()
    node.socket, job.listed, node.processes = "second", False, []
    for node.down in (set(), {"kubelet"}):
        assert use(node.collect(), job.full(), CARD) is None


@pytest.mark.parametrize("away_seconds", [0.0, 600.0])
def test_pod_that_only_the_grace_keeps_is_not_accused(away_seconds: float) -> None:
    """A pod without a GPU used one, and was deleted while the kubelet was down. Its process still runs."""
    squatter, other = Pod("ml", "notebook", {"main": {}}), holder("server", OTHER)
    node = IdentityNode([Gpu(0), Gpu(1)], [squatter, other], [Process(10, CARD, squatter, memory=GIB)])
    node.collect()
    assert lies(node.collect()) == {"unassigned": GIB}
    node.down.add("kubelet")
    node.collect(away_seconds)
    node.down.clear()
    node.socket, squatter.listed = "second", False
    for _ in range(3):
        snapshot = node.collect()
        assert lies(snapshot) == {}
        assert blamed(snapshot) == []
    squatter.listed = True
    assert lies(node.collect()) == {"unassigned": GIB}, "it was not deleted: the kubelet lists it again"
