"""What comes from outside may be anything: it never raises, never costs anything but itself, and no id is lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumap.agent.exposition import Exposition
from gpumap.agent.metrics import native, self_families
from gpumap.model.observations import ClaimDevice
from gpumap.model.snapshot import Snapshot
from tests.examples import examples
from tests.nodes import RULES, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid
from tests.sharing import answer

FAMILIES = (
    *native(("allocation", "use", "host", "device", "codec"), process_metrics=True),
    *self_families("1", "3.11"),
)
CARD = gpu_uuid(0)
MIG = [(1, 0, 1), (2, 0, 3)]
SEEDS = [
    str(CARD),
    f"{CARD}::3",
    f"{CARD}-_-14",
    f"{CARD}-9",
    f"{CARD}-memory-12",
    str(mig_uuid(1, 1, 0)),
    f"MIG-{gpu_uuid(1)}/1/0::2",
    "nvidia0/gi1/vgpu1",
    "tencent.com/vcuda-memory-268435456-30",
    "0-123",
    "0000:3b:00.0",
    "42",
    "all",
]
RESOURCES = [
    "nvidia.com/gpu",
    "aliyun.com/gpu-mem",
    "tencent.com/vcuda-core",
    "volcano.sh/gpu-memory",
    "volcano.sh/vgpu-number",
    "k8s.amazonaws.com/vgpu",
    "foreign.example/thing",
]
VALUES = [
    "",
    "0",
    "1,0",
    "all",
    "void",
    "-1",
    "3000m",
    "99999999999999999999",
    "0=9M",
    CARD,
    f"{CARD},{mig_uuid(1, 1, 0)}",
]
NAMES = ["NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_SM_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_MPS_PIPE_DIRECTORY"]
NAMES += ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "VOLCANO_GPU_ALLOCATED", "VOLCANO_GPU_FACTOR", "ALIYUN_COM_GPU_MEM_IDX"]


@st.composite
def broken(draw: st.DrawFn) -> str:
    """An id of some plugin, whole, cut off, with something in it or beside it."""
    id_ = draw(st.sampled_from(SEEDS) | st.text(max_size=20))
    at = draw(st.integers(0, len(id_)))
    return draw(st.sampled_from([id_, id_[:at], id_[:at] + draw(st.text(max_size=3)) + id_[at:], id_ * 2]))


def check(node: TestNode, snapshot: Snapshot) -> None:
    """Every id of a GPU resource is on a device or unmatched, and the page is whole."""
    page = Exposition(FAMILIES).render(snapshot).decode()
    series = [line.rpartition(" ")[0] for line in page.split("\n") if line and not line.startswith("#")]
    assert len(series) == len(set(series))
    for pod in node.pods:
        found = Counter[str]()
        for one in snapshot.node.unmatched:
            found[one.resource] += one.slots
        for row in snapshot.containers:
            found.update(dict(row.slots))
        for resource, ids in pod.ids["main"].items():
            assert RULES.is_gpu_resource(resource) is False or found[resource] >= len(set(ids)), "L5"


@settings(max_examples=examples(200))
@given(
    st.dictionaries(st.sampled_from(RESOURCES), st.lists(broken(), min_size=1, max_size=4), min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES) | st.text(max_size=8)),
    st.lists(broken() | st.sampled_from(["gpu-0", "gpu-1-mig-19-1-1", "gpu-vfio-0"]), max_size=3),
    st.text(max_size=300),
)
def test_ids_and_answers_of_any_kind(
    ids: dict[str, list[str]], envs: dict[str, str], claims: list[str], name: str
) -> None:
    """Whatever ids, answers and names a node has, its page is whole, and no id is missing on it."""
    pod = Pod("ml", name, {"main": ids})
    pod.claims = {"main": [ClaimDevice("gpu.nvidia.com", "n", device, "", "ml", name) for device in claims]}
    pod.answers = {("main", resource): answer(**envs) for resource in ids}
    offered = {resource: found * 2 for resource, found in ids.items()}
    node = TestNode([Gpu(0), Gpu(1, mig=MIG)], [pod], [Process(10, CARD, pod)], allocatable=offered, registered=offered)
    for _ in range(2):
        check(node, node.collect())
