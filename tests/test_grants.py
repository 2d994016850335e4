"""What each sharing mode grants, and on which device: the contract's table, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumap.agent.join import Memory, step
from gpumap.cli.commands.doctor import doctor_checks
from gpumap.model.observations import ClaimDevice, PluginAnswer, PreparedDevice
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests.generated import answer
from tests.nodes import GIB, RULES, Gpu, Pod, Process, Renumbered, TestNode, gpu_uuid, mig_uuid

A, B = gpu_uuid(0), gpu_uuid(1)
MIB = 1 << 20
MIG = [(1, 0, 1), (2, 0, 3)]
SMALL, LARGE = mig_uuid(0, 1, 0), mig_uuid(0, 2, 0)
Granted = dict[Uuid, tuple[int, float | None, int | None]]
"""By device: slots, GPUs, bytes."""


def granted(snapshot: Snapshot, pod: Pod, container: str = "main") -> Granted:
    rows = [row for row in snapshot.containers if row.name == pod.full(container) and row.holds]
    return {row.uuid: (sum(row.slots.values()), row.allocated_gpus, row.allocated_memory_bytes) for row in rows}


def node_of(*pods: Pod, mig: bool = False, offered: dict[str, list[str]] | None = None) -> TestNode:
    """Two cards of 80 GiB, the first one partitioned if asked; minors in the other order; `offered` by resource."""
    gpus = [Gpu(0, mig=MIG if mig else None, minor=1), Gpu(1, minor=0)]
    return TestNode(gpus, list(pods), allocatable=offered)


def pod_of(ids: dict[str, list[str]], answers: dict[str, PluginAnswer] | None = None, name: str = "p") -> Pod:
    plugin_answer = {("main", resource): one for resource, one in (answers or {}).items()}
    return Pod("ml", name, {"main": ids}, answers=plugin_answer)


def ids(form: str, count: int, start: int = 0) -> list[str]:
    return [form.format(number) for number in range(start, start + count)]


@pytest.mark.parametrize(
    ("id_", "mig", "expected"),
    [
        (str(B), False, {B: (1, 1.0, 80 * GIB)}),
        (str(SMALL), True, {SMALL: (1, 1 / 7, 10 * GIB)}),
        (f"MIG-{A}/2/0", True, {LARGE: (1, 3 / 7, 10 * GIB)}),
        ("nvidia0", False, {B: (1, 1.0, 80 * GIB)}),
        ("nvidia1/gi2", True, {LARGE: (1, 3 / 7, 10 * GIB)}),
        (str(A), True, {A: (1, 1.0, 80 * GIB)}),
    ],
)
def test_exclusive_devices(id_: str, mig: bool, expected: Granted) -> None:
    """A whole GPU is 1 and its memory; a MIG device its slices by the GPU's; GKE's ids count by minor."""
    pod = pod_of({"nvidia.com/gpu": [id_]})
    assert granted(node_of(pod, mig=mig).collect(), pod) == expected


@pytest.mark.parametrize(
    ("resource", "form", "uuid"),
    [
        ("nvidia.com/gpu.shared", f"{A}::{{}}", A),
        ("example.com/renamed", f"{A}::{{}}", A),
        ("nvidia.com/gpu", "nvidia0/vgpu{}", B),
        ("k8s.amazonaws.com/vgpu", f"{B}-{{}}", B),
    ],
)
def test_replicas_are_shares_of_the_gpu_and_grant_no_memory(resource: str, form: str, uuid: Uuid) -> None:
    """Slots by replicas: of those offered, else of those registered, else not known; bytes never."""
    pod = pod_of({resource: ids(form, 3)})
    node = node_of(pod, offered={resource: ids(form, 4)})
    assert granted(node.collect(), pod) == {uuid: (3, 0.75, None)}
    node.allocatable, node.registered = None, {resource: ids(form, 6)}
    assert granted(node.collect(), pod) == {uuid: (3, 0.5, None)}
    node.registered = {}
    assert granted(node.collect(), pod) == {uuid: (3, None, None)}


@pytest.mark.parametrize(
    ("slots_of_a_card", "bytes_of_a_slot"),
    [(79, GIB), (80, GIB), (100, GIB), (101, MIB), (81920, MIB)],
)
def test_gpushare_counts_gib_or_mib(slots_of_a_card: int, bytes_of_a_slot: int) -> None:
    """The card is the answer's, not the id's; more than 1.25 GiB slots for each GiB of the card are MiB."""
    resource = "aliyun.com/gpu-mem"
    plugin_answer = answer(NVIDIA_VISIBLE_DEVICES="1", ALIYUN_COM_GPU_MEM_IDX="1")
    pod = pod_of({resource: ids(f"{A}-_-{{}}", 4)}, {resource: plugin_answer})
    offered = [*ids(f"{A}-_-{{}}", slots_of_a_card), *ids(f"{B}-_-{{}}", slots_of_a_card)]
    snapshot = node_of(pod, offered={resource: offered}).collect()
    assert granted(snapshot, pod) == {B: (4, 4 / slots_of_a_card, 4 * bytes_of_a_slot)}


def test_gpushare_without_its_inventory() -> None:
    """The card's slots are in the answer too; else the size of one is unknown, both share and bytes."""
    resource = "aliyun.com/gpu-mem"
    pod = pod_of({resource: ids(f"{A}-_-{{}}", 4)}, {resource: answer(NVIDIA_VISIBLE_DEVICES="0")})
    assert granted(node_of(pod).collect(), pod) == {A: (4, None, None)}
    plugin_answer = answer(NVIDIA_VISIBLE_DEVICES="0", ALIYUN_COM_GPU_MEM_DEV="80")
    pod = pod_of({resource: ids(f"{A}-_-{{}}", 4)}, {resource: plugin_answer})
    assert granted(node_of(pod).collect(), pod) == {A: (4, 0.05, 4 * GIB)}


def hami_answer(cores: int, *cards: Uuid) -> PluginAnswer:
    limits = {f"CUDA_DEVICE_MEMORY_LIMIT_{place}": f"{3000 + place}m" for place in range(len(cards))}
    return answer(NVIDIA_VISIBLE_DEVICES=",".join(cards), CUDA_DEVICE_SM_LIMIT=str(cores), **limits)


@pytest.mark.parametrize("cores", ["0", None])
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (["81920m"], {B: (1, 1.0, 80 * GIB)}),
        (["20g"], {B: (1, 0.25, 20 * GIB)}),
        (["0m"], {B: (1, 0.1, None)}),
        ([], {B: (1, 0.1, None)}),
        (["40g", "20g"], {B: (1, 0.5, 40 * GIB), A: (1, 0.25, 20 * GIB)}),
    ],
)
def test_hami_without_an_sm_limit_is_shared_by_memory(cores: str | None, limits: list[str], expected: Granted) -> None:
    """Each device by its own memory limit. Without a limit of both it is one share of those that the card has."""
    resource, cards = "nvidia.com/gpu", [B, A][: max(len(limits), 1)]
    envs = {f"CUDA_DEVICE_MEMORY_LIMIT_{place}": limit for place, limit in enumerate(limits)}
    envs |= {} if cores is None else {"CUDA_DEVICE_SM_LIMIT": cores}
    plugin_answer = answer(NVIDIA_VISIBLE_DEVICES=",".join(cards), **envs)
    pod = pod_of({resource: ids(f"{A}-{{}}", len(cards))}, {resource: plugin_answer})
    snapshot = node_of(pod, offered={resource: [*ids(f"{A}-{{}}", 10), *ids(f"{B}-{{}}", 10)]}).collect()
    assert granted(snapshot, pod) == expected


@pytest.mark.parametrize(
    ("envs", "shares"),
    [
        ([{"CUDA_DEVICE_MEMORY_LIMIT_0": "120g"}], [1.0]),
        ([{"CUDA_DEVICE_MEMORY_LIMIT_0": "120g"}, {"CUDA_DEVICE_MEMORY_LIMIT_0": "40g"}], [0.75, 0.25]),
        ([{"CUDA_DEVICE_SM_LIMIT": "60"}, {"CUDA_DEVICE_MEMORY_LIMIT_0": "80g"}], [0.375, 0.625]),
        ([{"CUDA_DEVICE_SM_LIMIT": "50"}, {"CUDA_DEVICE_MEMORY_LIMIT_0": "40g"}], [0.5, 0.5]),
    ],
)
def test_hami_shares_beyond_the_card_are_scaled(envs: list[dict[str, str]], shares: list[float]) -> None:
    """With scaled memory, or cores beside memory, the shares of a card may be more than it. Bytes are not scaled."""
    resource = "nvidia.com/gpu"
    pods = [
        pod_of({resource: [f"{A}-{number}"]}, {resource: answer(NVIDIA_VISIBLE_DEVICES=B, **one)}, f"p{number}")
        for number, one in enumerate(envs)
    ]
    snapshot = node_of(*pods).collect()
    rows = [granted(snapshot, pod)[B] for pod in pods]
    assert [gpus for _, gpus, _ in rows] == pytest.approx(shares)
    limits = [one.get("CUDA_DEVICE_MEMORY_LIMIT_0", "") for one in envs]
    assert [memory for _, _, memory in rows] == [int(limit[:-1]) * GIB if limit else None for limit in limits]


def test_hami_mig_is_the_instance_that_was_made() -> None:
    """The id names the parent; the answer the MIG device, which is the container's own."""
    resource = "nvidia.com/gpu"
    pod = pod_of({resource: [f"{A}-4"]}, {resource: answer(NVIDIA_VISIBLE_DEVICES=LARGE)})
    assert granted(node_of(pod, mig=True).collect(), pod) == {LARGE: (1, 3 / 7, 10 * GIB)}
    for device, limit, expected in (
        (LARGE, {"CUDA_DEVICE_SM_LIMIT": "50"}, (1, 3 / 14, None)),
        (LARGE, {"CUDA_DEVICE_MEMORY_LIMIT_0": "5g"}, (1, 3 / 14, 5 * GIB)),
        (B, {}, (1, None, None)),
    ):
        pod = pod_of({resource: [f"{A}-4"]}, {resource: answer(NVIDIA_VISIBLE_DEVICES=device, **limit)})
        assert granted(node_of(pod, mig=True).collect(), pod) == {device: expected}, "a part of it, or unknown"


def test_vcuda_is_hundredths_and_blocks() -> None:
    """Cores are hundredths of a card, memory blocks of 256 MiB; both follow the one answer, over two cards in runs."""
    core, memory = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
    one = PluginAnswer(annotations=(("tencent.com/vcuda-device", "/dev/nvidia0"),))
    two = PluginAnswer(annotations=(("tencent.com/vcuda-device", "/dev/nvidia1,/dev/nvidia0"),))
    half = pod_of(
        {core: ids(f"{core}-{{}}", 50), memory: ids(f"{memory}-268435456-{{}}", 8)}, {core: one, memory: PluginAnswer()}
    )
    assert granted(node_of(half).collect(), half) == {B: (58, 0.5, 2 * GIB)}
    small = pod_of({memory: ids(f"{memory}-134217728-{{}}", 8)}, {memory: one})
    assert granted(node_of(small).collect(), small) == {B: (8, None, GIB)}, "blocks of 128 MiB"
    whole = pod_of({core: ids(f"{core}-{{}}", 200), memory: ids(f"{memory}-268435456-{{}}", 7)}, {core: two})
    assert granted(node_of(whole).collect(), whole) == {A: (104, 1.0, GIB), B: (103, 1.0, 3 * 256 * MIB)}


def test_volcano_memory_and_cards() -> None:
    """MiB as the plugin says them, by a factor or in all; a card that is given by number is whole."""
    memory, number = "volcano.sh/gpu-memory", "volcano.sh/gpu-number"
    factor = answer(NVIDIA_VISIBLE_DEVICES="1", VOLCANO_GPU_ALLOCATED="20", VOLCANO_GPU_FACTOR="100")
    plugin_answer = answer(NVIDIA_VISIBLE_DEVICES="1", VOLCANO_GPU_ALLOCATED="2000")
    silent = answer(NVIDIA_VISIBLE_DEVICES="1")
    for one, expected in ((factor, 2000 * MIB), (plugin_answer, 2000 * MIB), (silent, None)):
        pod = pod_of({memory: ids("0-{}", 20)}, {memory: one})
        assert granted(node_of(pod).collect(), pod) == {B: (20, None, expected)}
    pod = pod_of({number: ["0-3", "0-4"]}, {number: answer(NVIDIA_VISIBLE_DEVICES="0,1")})
    assert granted(node_of(pod).collect(), pod) == {A: (1, 1.0, 80 * GIB), B: (1, 1.0, 80 * GIB)}


def test_untrusted_ids_without_an_answer() -> None:
    """Without the plugin's answer they are on no device, even if there is only one card."""
    pod = pod_of({"aliyun.com/gpu-mem": [f"{A}-_-1"], "tencent.com/vcuda-core": ["tencent.com/vcuda-core-1"]})
    snapshot = node_of(pod).collect()
    assert granted(snapshot, pod) == {}
    assert {(one.reason, one.slots) for one in snapshot.node.unmatched} == {("untrusted_id", 1)}
    assert granted(TestNode([Gpu(0)], [pod]).collect(), pod) == {}


def test_an_answer_wins_over_an_id() -> None:
    """Where NVIDIA's plugin answered with another card than the id's, the container has that card."""
    resource = "nvidia.com/gpu"
    pod = pod_of({resource: [str(A)]}, {resource: answer(NVIDIA_VISIBLE_DEVICES=B)})
    assert set(granted(node_of(pod).collect(), pod)) == {B}
    by_index = pod_of({resource: [str(A)]}, {resource: answer(NVIDIA_VISIBLE_DEVICES="1")})
    assert set(granted(node_of(by_index).collect(), by_index)) == {A}, "an index says less than a uuid"


# --- DRA --------------------------------------------------------------------------------------------------------------


def claim_of(device: str, claim: str = "c", share_id: str = "") -> ClaimDevice:
    return ClaimDevice("gpu.nvidia.com", "node-a", device, share_id, "ml", claim)


def prepared_of(device: str, uuid: Uuid, claim: str = "c", **rest: object) -> PreparedDevice:
    one = PreparedDevice("ml", claim, device, "", uuid, admin_access=False, memory_bytes=None)
    return replace(one, **rest)  # type: ignore[arg-type]


def claimant(name: str, *claims: ClaimDevice) -> Pod:
    return Pod("ml", name, claims={"main": list(claims)})


def test_dra_devices_by_minor_and_placement() -> None:
    """A whole GPU by minor, a MIG device by its GPU's minor and where it begins, in both forms of its name."""
    pods = [
        claimant("whole", claim_of("gpu-0", "a")),
        claimant("old", claim_of("gpu-1-mig-19-1-1", "b")),
        claimant("new", claim_of("gpu-1-mig-1g10gb-19-2", "c")),
    ]
    snapshot = node_of(*pods, mig=True).collect()
    assert [granted(snapshot, pod) for pod in pods] == [
        {B: (1, 1.0, 80 * GIB)},
        {SMALL: (1, 1 / 7, 10 * GIB)},
        {LARGE: (1, 3 / 7, 10 * GIB)},
    ]


def test_dra_devices_whose_place_is_kept_back() -> None:
    """Without the right to read places the instance is unknown, unless the driver's notes have its uuid."""
    pod = claimant("p", claim_of("gpu-1-mig-1g10gb-19-2"))
    node = node_of(pod, mig=True)
    node.gpus[0].has_placements = False
    assert [one.reason for one in node.collect().node.unmatched] == ["untrusted_id"]
    node.prepared = (prepared_of("gpu-1-mig-1g10gb-19-2", LARGE),)
    assert set(granted(node.collect(), pod)) == {LARGE}
    gone = prepared_of("gpu-1-mig-1g10gb-19-2", mig_uuid(0, 9, 9), "before")
    node.prepared = (prepared_of("gpu-1-mig-1g10gb-19-2", LARGE, "another"), gone)
    assert set(granted(node.collect(), pod)) == {LARGE}, "by the note of another claim"
    node.prepared = (gone,)
    assert [one.reason for one in node.collect().node.unmatched] == ["untrusted_id"]
    node.prepared = (prepared_of("gpu-1-mig-1g10gb-19-2", mig_uuid(0, 9, 9)),)
    assert [one.reason for one in node.collect().node.unmatched] == ["not_in_nvml"], (
        "a note of an instance that is gone"
    )


@pytest.mark.parametrize(
    ("device", "reason"), [("gpu-0-mig-19-1-1", "untrusted_id"), ("gpu-0-mig-9-2-1", "not_in_nvml")]
)
def test_dra_device_with_the_place_of_several_instances(device: str, reason: str) -> None:
    """Compute instances of one GPU instance have one placement: the name means one of them."""
    node = TestNode([Gpu(0, mig=[(1, 0, 1), (1, 1, 1), (2, 0, 3)])], [claimant("p", claim_of(device))])
    assert [one.reason for one in node.collect().node.unmatched] == [reason]


def test_dra_admin_access() -> None:
    """Two claims on one device: one has admin access. Only the driver's notes show which."""
    owner, admin = claimant("owner", claim_of("gpu-0", "own")), claimant("admin", claim_of("gpu-0", "look"))
    node = node_of(owner, admin)
    snapshot = node.collect()
    assert granted(snapshot, owner) == granted(snapshot, admin) == {B: (1, None, None)}
    assert [one.grant and one.grant.admin_access for one in snapshot.containers] == [None, None]
    node.prepared = (prepared_of("gpu-0", B, "own"), prepared_of("gpu-0", B, "look", admin_access=True))
    snapshot = node.collect()
    assert granted(snapshot, owner) == {B: (1, 1.0, 80 * GIB)}
    assert granted(snapshot, admin) == {B: (1, 0.0, None)}
    access = {one.pod: one.grant and one.grant.admin_access for one in snapshot.containers}
    assert access == {"owner": False, "admin": True}


def test_dra_shares_of_consumable_capacity() -> None:
    """Each share is a slot; only the driver's notes have its size."""
    pod = claimant("p", claim_of("gpu-0", share_id="s1"), claim_of("gpu-0", share_id="s2"))
    node = node_of(pod)
    assert granted(node.collect(), pod) == {B: (2, None, None)}
    node.prepared = tuple(prepared_of("gpu-0", B, share_id=share, memory_bytes=GIB) for share in ("s1", "s2"))
    assert granted(node.collect(), pod) == {B: (2, None, 2 * GIB)}


def test_dra_devices_that_are_no_gpus_of_nvml() -> None:
    """What is passed through is allocated and not in NVML; channels are no GPUs; an odd name is reported as such."""
    channel = ClaimDevice("compute-domain.nvidia.com", "node-a", "channel-0", "", "ml", "d")
    pod = claimant("p", claim_of("gpu-vfio-0", "v"), channel, claim_of("gpu-what", "w"), claim_of("gpu-7", "x"))
    found = {(one.reason, one.slots) for one in node_of(pod).collect().node.unmatched}
    assert found == {("not_in_nvml", 2), ("unparsed", 1)}


# --- owners and offers ------------------------------------------------------------------------------------------------


def test_an_init_container_is_on_the_device_of_its_answer() -> None:
    """A container that is only in the checkpoint holds the card of its answer while it works."""
    resource = "nvidia.com/gpu"
    init = {"warm": {resource: [f"{A}-3"]}}
    pod = Pod("ml", "p", {"main": {resource: [f"{A}-3"]}}, init)
    pod.answers = {("warm", resource): hami_answer(0, B), ("main", resource): hami_answer(0, B)}
    node = node_of(pod, offered={resource: [A, B]})
    node.processes = [Process(10, B, pod, "warm"), Process(11, A, pod, "warm")]
    node.collect()
    found = {process.pid: process.owner.value for process in node.collect().processes}
    assert found == {10: "assigned", 11: "unassigned"}


def owners_of(node: TestNode) -> dict[int, str]:
    """By PID, once two collections have agreed."""
    node.collect()
    return {process.pid: process.owner.value for process in node.collect().processes}


def test_an_init_container_with_an_unknown_claim_is_no_squatter() -> None:
    """The List leaves init containers out, and no file has their claims: what they use of a claimant's is unknown."""
    pod = claimant("p", claim_of("gpu-0"))
    pod.init = {"warm": {}}
    node = node_of(pod)
    node.processes = [Process(10, B, pod, "warm"), Process(11, A, pod, "main")]
    assert owners_of(node) == {10: "unknown", 11: "unassigned"}


def test_an_init_container_without_the_checkpoint_is_no_squatter() -> None:
    """Only the checkpoint has its devices; if it cannot be read, they are unknown."""
    pod = Pod("ml", "p", {"main": {"nvidia.com/gpu": [str(A)]}}, {"warm": {"nvidia.com/gpu": [str(A)]}})
    node = node_of(pod)
    node.processes = [Process(10, A, pod, "warm")]
    assert owners_of(node) == {10: "assigned"}
    node.checkpoint_readable = False
    assert owners_of(node) == {10: "unknown"}


def test_a_renamed_resource_keeps_its_slots_without_the_answer() -> None:
    """Ids that name a GPU which is here are of a GPU resource, whatever it is called: their slots are unmatched."""
    resource = "example.com/vgpu"
    pod = pod_of({resource: [f"{A}-3"]}, {resource: hami_answer(20, B)})
    node = node_of(pod)
    node.processes = [Process(10, B, pod)]
    assert set(granted(node.collect(), pod)) == {B}
    node.checkpoint_readable = False
    assert [(one.resource, one.reason) for one in node.collect().node.unmatched] == [(resource, "untrusted_id")]
    assert owners_of(node) == {10: "unknown"}


def test_a_card_that_no_plugin_offers_is_not_unhealthy() -> None:
    """0 is said of a card among others that are all offered; not where a DRA claim was seen."""
    node = node_of(offered={"nvidia.com/gpu": [str(A)]})
    assert {leaf.uuid: leaf.allocatable for leaf in node.collect().node.devices}[B] == {"nvidia.com/gpu": 0}
    node = node_of(claimant("p", claim_of("gpu-0")), offered={"nvidia.com/gpu": [str(A)]})
    assert {leaf.uuid: leaf.allocatable for leaf in node.collect().node.devices}[B] == {}
    node = TestNode(
        [Gpu(0), Gpu(1), Gpu(2)], allocatable={"nvidia.com/gpu": [str(A)], "aliyun.com/gpu-mem": [f"{B}-_-1"]}
    )
    zeros = {"nvidia.com/gpu": 0, "aliyun.com/gpu-mem": 0}
    assert {leaf.uuid: leaf.allocatable for leaf in node.collect().node.devices}[gpu_uuid(2)] == zeros


def test_a_card_that_was_offered_is_unhealthy_among_cards_of_another_plugin() -> None:
    """It has 0 slots of its own resource, although the cards of the node are not all offered alike."""
    resource = "nvidia.com/gpu"
    others = {"aliyun.com/gpu-mem": [f"{B}-_-1"]}
    node = TestNode([Gpu(0), Gpu(1), Gpu(2)], allocatable={resource: [str(A), str(gpu_uuid(2))], **others})
    node.collect()
    node.allocatable = {resource: [str(A)], **others}
    assert {leaf.uuid: leaf.allocatable for leaf in node.collect().node.devices} == {
        A: {resource: 1},
        B: {"aliyun.com/gpu-mem": 1},
        gpu_uuid(2): {resource: 0},
    }


def test_an_index_means_the_card_that_it_meant() -> None:
    """When a GPU is unbound NVML counts again; what a container was given stays the same card, and its own."""
    resource = "aliyun.com/gpu-mem"
    pod = pod_of({resource: [f"{A}-_-1"]}, {resource: answer(NVIDIA_VISIBLE_DEVICES="1")})
    node = TestNode([Gpu(0), Gpu(1), Gpu(2)], [pod])
    node.processes = [Process(10, B, pod)]
    assert owners_of(node) == {10: "assigned"}
    _, second, third = node.gpus
    node.gpus = [Renumbered(second, 0), Renumbered(third, 1)]
    assert set(granted(node.collect(), pod)) == {B}
    assert owners_of(node) == {10: "assigned"}
    new = pod_of({resource: [f"{A}-_-2"]}, {resource: answer(NVIDIA_VISIBLE_DEVICES="1")}, name="new")
    node.pods.append(new)
    assert set(granted(node.collect(), new)) == {gpu_uuid(2)}, "a container made since is told by the new order"


@pytest.mark.parametrize("has_tree", [True, False])
def test_a_row_of_an_ended_pod_answers_for_no_other_pod(has_tree: bool) -> None:
    """A new pod without a row yet is not placed by the row of the ended pod that had its ids before."""
    resource = "aliyun.com/gpu-mem"
    old = pod_of({resource: [f"{A}-_-1"]}, {resource: answer(NVIDIA_VISIBLE_DEVICES="0")}, name="old")
    new = pod_of({resource: [f"{A}-_-1"]}, {resource: answer(NVIDIA_VISIBLE_DEVICES="1")}, name="new")
    node = node_of(old)
    assert set(granted(node.collect(), old)) == {A}
    node.pods.append(new)
    old.listed, old.has_tree, new.in_checkpoint, new.has_tree = False, has_tree, False, False
    assert granted(node.collect(), new) == {}
    if has_tree:
        assert granted(replace(node, memory=Memory()).collect(), new) == {}, "also if gpumap never saw the old pod"
    new.in_checkpoint = new.has_tree = True
    assert set(granted(node.collect(), new)) == {B}


def test_an_answer_is_not_for_the_resources_of_other_plugins() -> None:
    """An id without its own plugin's answer is on no device, whatever another plugin answered."""
    gpushare, vcuda, renamed = "aliyun.com/gpu-mem", "tencent.com/vcuda-core", "example.com/gpu"
    plugin_answer = {gpushare: answer(NVIDIA_VISIBLE_DEVICES="1")}
    for resource, id_ in ((vcuda, f"{vcuda}-1"), (renamed, f"{A}-3")):
        pod = pod_of({gpushare: [f"{A}-_-1"], resource: [id_]}, plugin_answer)
        snapshot = node_of(pod).collect()
        assert granted(snapshot, pod) == {B: (1, None, None)}
        assert [(one.resource, one.reason) for one in snapshot.node.unmatched] == [(resource, "untrusted_id")]


def test_a_predecessors_row_does_not_answer_for_its_successor() -> None:
    """A pod that is re-created under its name with the same ids gets the device of its own answer."""
    resource = "aliyun.com/gpu-mem"
    old = pod_of({resource: [f"{A}-_-1"]}, {resource: answer(NVIDIA_VISIBLE_DEVICES="0")})
    node = node_of(old)
    assert set(granted(node.collect(), old)) == {A}
    new = replace(old, generation=1, answers={("main", resource): answer(NVIDIA_VISIBLE_DEVICES="1")})
    node.pods.append(new)
    old.listed = old.has_tree = False
    assert set(granted(node.collect(), new)) == {B}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("listed", [0, 2])
def test_rows_that_hold_more_than_is_listed(listed: int, is_old: bool) -> None:
    """Kubelets 1.20 to 1.22 leave devices out of the List; the row of those that are listed counts."""
    resource = "tencent.com/vcuda-core"
    plugin_answer = PluginAnswer(annotations=(("tencent.com/vcuda-device", "/dev/nvidia0"),))
    pod = pod_of({resource: ids(f"{resource}-{{}}", 4)}, {resource: plugin_answer})
    node = node_of(pod)
    node.left_out, node.processes = {"another/resource"} if is_old else set(), [Process(10, B, pod)]
    identity = node.observe().pod_identity
    pod.ids = {"main": {resource: ids(f"{resource}-{{}}", listed)}}
    _, snapshot = step(node.memory, replace(node.observe(), pod_identity=identity), RULES)
    slots = listed or (4 if is_old else 0)
    assert granted(snapshot, pod) == ({B: (slots, slots / 100, None)} if slots else {})


def test_dra_notes_of_other_claims_do_not_move_a_claim() -> None:
    """A claim's own note is final; another's counts only for a MIG device without a readable place."""
    pod = claimant("p", claim_of("gpu-1"))
    node = node_of(pod)
    node.prepared = (prepared_of("gpu-1", B, "another"),)
    assert set(granted(node.collect(), pod)) == {A}
    node.prepared = (prepared_of("gpu-1", B, "another"), prepared_of("gpu-1", A))
    assert set(granted(node.collect(), pod)) == {A}
    node.prepared = (prepared_of("gpu-1", B),)
    assert set(granted(node.collect(), pod)) == {B}


def test_dra_shares_that_an_old_kubelet_lists_without_their_ids() -> None:
    """The driver's notes say that it is a share, and of how much; or that it is admin access."""
    pod = claimant("p", claim_of("gpu-0"))
    node = node_of(pod)
    node.prepared = (prepared_of("gpu-0", B, share_id="s1", memory_bytes=GIB),)
    assert granted(node.collect(), pod) == {B: (1, None, GIB)}
    node.prepared = tuple(prepared_of("gpu-0", B, share_id=share, memory_bytes=GIB) for share in ("s1", "s2"))
    assert granted(node.collect(), pod) == {B: (1, None, 2 * GIB)}
    admin = prepared_of("gpu-0", B, share_id="s1", admin_access=True)
    node.prepared = (admin,)
    assert granted(node.collect(), pod) == {B: (1, 0.0, None)}
    node.prepared = (admin, prepared_of("gpu-0", B, share_id="s2"))
    snapshot = node.collect()
    assert granted(snapshot, pod) == {B: (1, None, None)}, "one share is more than admin access"
    assert [one.grant and one.grant.admin_access for one in snapshot.containers] == [False]


def test_an_init_container_on_an_unknown_device_hides_only_itself() -> None:
    """Its own process may be on its own device. What the pod's other container and another pod use is unassigned."""
    pod = Pod("ml", "p", {"main": {}}, {"warm": {"nvidia.com/gpu": ["card-0"]}})
    other = Pod("ml", "other", {"main": {}, "warm": {}})
    node = node_of(pod, other, offered={"nvidia.com/gpu": [A, B]})
    node.processes = [
        Process(0, A, pod, "warm"),
        Process(1, A, pod),
        Process(2, A, other),
        Process(3, A, other, "warm"),
    ]
    assert owners_of(node) == {0: "unknown", 1: "unassigned", 2: "unassigned", 3: "unassigned"}


def test_a_partitioned_gpu_that_is_given_out_whole_and_in_part() -> None:
    """Its memory is granted once: to whoever has the MIG device. By claims, the whole GPU is admin access or not."""
    whole, part = pod_of({"nvidia.com/gpu": [str(A)]}), pod_of({"nvidia.com/mig": [str(SMALL)]}, name="part")
    snapshot = node_of(whole, part, mig=True).collect()
    assert granted(snapshot, whole)[A][2] is None
    assert granted(snapshot, part)[SMALL][2] == 10 * GIB
    admin = claimant("admin", claim_of("gpu-1", "look"))
    snapshot = node_of(admin, part, mig=True).collect()
    assert granted(snapshot, admin) == {A: (1, None, None)}
    assert granted(snapshot, part) == {SMALL: (1, 1 / 7, 10 * GIB)}


def test_an_mps_limit_that_cannot_be_read_grants_nothing_known() -> None:
    """Another form than the plugin's own is a limit all the same, so and no share of the replicas is known."""
    given = answer(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=5G,1=6G", CUDA_MPS_PIPE_DIRECTORY="/mps")
    pod = pod_of({"nvidia.com/gpu": ["nvidia0/vgpu1"]}, {"nvidia.com/gpu": given})
    snapshot = node_of(pod, offered={"nvidia.com/gpu": ids("nvidia0/vgpu{}", 10)}).collect()
    assert granted(snapshot, pod) == {B: (1, 0.1, None)}


@pytest.mark.parametrize("faults", [(0,), (0, 1)])
def test_limits_count_devices_that_are_down(faults: tuple[int, ...]) -> None:
    """What the third device was granted stays that, however many of those before it have no uuid."""
    resource, uuids = "nvidia.com/gpu", [gpu_uuid(number) for number in range(3)]
    pod = pod_of({resource: [f"{uuids[0]}-{number}" for number in range(3)]}, {resource: hami_answer(0, *uuids)})
    gpus = [Gpu(number, fault="lost" if number in faults else None) for number in range(3)]
    snapshot = TestNode(gpus, [pod]).collect()
    assert granted(snapshot, pod)[uuids[2]] == (1, 3002 / 81920, 3002 * MIB)
    assert sum(one.slots for one in snapshot.node.unmatched) == len(faults)


def test_another_resource_of_an_init_container_explains_no_use() -> None:
    """A row of a resource that is no GPU's leaves nothing open: what it uses of a foreign card is unassigned."""
    pod = Pod("ml", "p", {"main": {}}, {"warm": {"rdma/hca": ["mlx5_0"]}})
    node = node_of(pod, offered={"nvidia.com/gpu": [A, B]})
    node.processes = [Process(10, A, pod, "warm")]
    assert owners_of(node) == {10: "unassigned"}


def test_ids_of_two_plugins_under_one_resource() -> None:
    """Those that name their card have it; the others get what is left of the answer's."""
    resource = "nvidia.com/gpu"
    pod = pod_of({resource: [str(A), f"{B}-3"]}, {resource: hami_answer(30, A, B)})
    found = granted(node_of(pod).collect(), pod)
    assert {uuid: slots for uuid, (slots, _, _) in found.items()} == {A: 1, B: 1}


def test_gkes_instance_is_its_first_compute_instance() -> None:
    """Its plugin makes one in each GPU instance; another beside it is somebody else's."""
    pod = pod_of({"nvidia.com/gpu": ["nvidia0/gi1"]})
    node = TestNode([Gpu(0, mig=[(1, 0, 1), (1, 1, 2)])], [pod])
    assert set(granted(node.collect(), pod)) == {mig_uuid(0, 1, 0)}


def test_an_unreadable_id_takes_no_device_from_the_others() -> None:
    """Beside an odd id, a device that is down still keeps its place among those of the answer."""
    resource = "nvidia.com/gpu"
    pod = pod_of({resource: [f"{B}-0", f"{B}-1", "odd"]}, {resource: hami_answer(0, A, B)})
    snapshot = TestNode([Gpu(0, fault="lost"), Gpu(1)], [pod]).collect()
    assert {uuid: found[0] for uuid, found in granted(snapshot, pod).items()} == {B: 1}
    assert {(one.reason, one.slots) for one in snapshot.node.unmatched} == {("device_down", 1), ("unparsed", 1)}


def test_an_id_on_no_device_of_the_answer_is_on_one_without_an_id() -> None:
    """An answer by uuid counts: such an id is a position, also if each device has an id."""
    resource, other = "nvidia.com/gpu", gpu_uuid(9)
    pod = pod_of({resource: [str(A), str(other)]}, {resource: answer(NVIDIA_VISIBLE_DEVICES=f"{A},{B}")})
    assert {uuid: slots for uuid, (slots, _, _) in granted(node_of(pod).collect(), pod).items()} == {A: 1, B: 1}
    pod = pod_of({resource: [str(A), str(other)]}, {resource: answer(NVIDIA_VISIBLE_DEVICES=str(A))})
    assert {uuid: slots for uuid, (slots, _, _) in granted(node_of(pod).collect(), pod).items()} == {A: 2}


# --- ids that two pods hold -------------------------------------------------------------------------------------------


def assigned_twice(snapshot: Snapshot) -> dict[str, tuple[str | None, str]]:
    """By pod: the device, and why."""
    findings = snapshot.node.findings or ()
    return {one.pod: (one.uuid, one.why) for one in findings if one.reason == "assigned_twice"}


@pytest.mark.parametrize(
    ("id_", "uuid"),
    [(str(B), B), (f"{B}::3", B), ("nvidia0/vgpu1", B), (str(SMALL), SMALL), ("nvidia1/gi2", LARGE)],
)
def test_an_exclusive_id_of_two_pods_is_assigned_twice(id_: str, uuid: Uuid) -> None:
    """After `--grace` each of them has a finding, which names the other one and began when both first had the id."""
    first, second = (pod_of({"nvidia.com/gpu": [id_]}, name=name) for name in ("p", "q"))
    node = node_of(first, mig=True)
    node.collect()
    node.pods.append(second)
    since = node.collect().node.timestamp
    assert assigned_twice(node.collect(RULES.grace_seconds - 1)) == {}
    node.down = {"procfs"}
    assert assigned_twice(node.collect(0.5)) == {}
    node.down = set()
    snapshot = node.collect(0.5)
    why = "1 slot of nvidia.com/gpu also assigned to ml/"
    assert assigned_twice(snapshot) == {"p": (uuid, f"{why}q"), "q": (uuid, f"{why}p")}
    assert {one.since for one in snapshot.node.findings or () if one.reason == "assigned_twice"} == {since}
    checks = {result.check: result.why for result in doctor_checks(snapshot.node)}
    assert checks["unmatched_slots/assigned_twice"] == "assigned_twice: ml/p, ml/q"
    first.listed = False
    assert assigned_twice(node.collect()) == {}


@pytest.mark.parametrize(
    ("id_", "mig"), [(str(A), True), (f"{A}-_-1", False), (f"{A}-1", False), ("0000:3b:00.0", False)]
)
def test_what_several_pods_may_hold_is_not_assigned_twice(id_: str, mig: bool) -> None:
    """A partitioned GPU, and ids that name no device."""
    pods = [pod_of({"nvidia.com/gpu": [id_]}, {"nvidia.com/gpu": hami_answer(0, A)}, name) for name in ("p", "q")]
    node = node_of(*pods, mig=mig)
    node.collect()
    assert assigned_twice(node.collect(RULES.grace_seconds)) == {}


def test_a_shared_claim_is_not_assigned_twice() -> None:
    """Containers of several pods may use one claim."""
    node = node_of(claimant("p", claim_of("gpu-0")), claimant("q", claim_of("gpu-0")))
    node.collect()
    assert assigned_twice(node.collect(RULES.grace_seconds)) == {}


@pytest.mark.parametrize("hidden", ["ended", "no PIDs", "unknown UID"])
def test_only_pods_that_certainly_exist_are_assigned_one_id(hidden: str) -> None:
    """Kubelets before 1.34 list pods that have ended. A process in the pod's cgroup is the evidence."""
    pods = [pod_of({"nvidia.com/gpu": [str(A)]}, name=name) for name in ("p", "q")]
    node = node_of(*pods)
    node.ended = {"p"} if hidden == "ended" else set()
    node.visible = hidden != "no PIDs"
    pods[0].in_checkpoint = pods[0].has_tree = hidden != "unknown UID"
    node.collect()
    assert assigned_twice(node.collect(RULES.grace_seconds)) == {}
    assert node.collect().pods_to_verify == {pod.uid for pod in pods if pod.has_tree}, (
        "gpumap looks for their processes"
    )
    if hidden == "ended":
        node.processes = [Process(10, A, pods[0])]
        node.collect()
        assert assigned_twice(node.collect(RULES.grace_seconds)).keys() == {"p", "q"}
