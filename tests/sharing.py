"""What each device plugin hands out, for generated nodes: ids, its answer to the kubelet, the devices truly meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from gpumap.model.observations import ClaimDevice, PluginAnswer
from gpumap.model.readings import Uuid
from tests.nodes import Gpu, uuid_of


@dataclass
class Given:
    """To one container: `ids` and `answers` by resource, DRA devices, and the devices that it truly got."""

    ids: dict[str, list[str]] = field(default_factory=dict)
    answers: dict[str, PluginAnswer] = field(default_factory=dict)
    claims: list[ClaimDevice] = field(default_factory=list)
    on: frozenset[Uuid] = frozenset()
    by_answer: bool = False
    """Only the answer reports the devices."""


def answer(**envs: str) -> PluginAnswer:
    """A plugin's answer of environment variables."""
    return PluginAnswer(envs=tuple(sorted(envs.items())))


@dataclass
class PluginNode:
    """The cards to hand out from. `number` makes ids that no other test has."""

    draw: st.DrawFn
    gpus: Sequence[Gpu]
    number: int

    def gpu(self) -> Gpu:
        return self.draw(st.sampled_from(self.gpus))

    def whole(self) -> Gpu | None:
        whole = [gpu for gpu in self.gpus if gpu.mig is None]
        return self.draw(st.sampled_from(whole)) if whole else None

    def instance(self) -> tuple[Gpu, tuple[int, int, int]] | None:
        pairs = [(gpu, instance) for gpu in self.gpus for instance in gpu.mig or ()]
        return self.draw(st.sampled_from(pairs)) if pairs else None


def _leaf(gpu: Gpu, instance: tuple[int, int, int]) -> Uuid:
    return gpu.leaves[(gpu.mig or []).index(instance)]


def nvidia_old_mig(node: PluginNode) -> Given:
    found = node.instance()
    if found is None:
        return Given()
    gpu, (gi, ci, _) = found
    return Given(
        {"nvidia.com/mig-1g.10gb": [f"MIG-{gpu.uuid}/{gi}/{ci}::{node.number}"]}, on=frozenset({_leaf(*found)})
    )


def nvidia_mps(node: PluginNode) -> Given:
    uuid = node.gpu().uuid
    plugin_answer = answer(NVIDIA_VISIBLE_DEVICES=uuid, CUDA_MPS_PIPE_DIRECTORY="/mps/nvidia.com/gpu/pipe")
    ids = [f"{uuid}::{node.number * 2 + n}" for n in (0, 1)]
    return Given({"nvidia.com/gpu": ids}, {"nvidia.com/gpu": plugin_answer}, on=frozenset({uuid}))


def gke(node: PluginNode) -> Given:
    found = node.instance() if node.draw(st.booleans()) else None
    share = f"/vgpu{node.number}" if node.draw(st.booleans()) else ""
    if found is None:
        gpu = node.gpu()
        return Given({"nvidia.com/gpu": [f"nvidia{gpu.device_minor}{share}"]}, on=frozenset({gpu.uuid}))
    gpu, (gi, _, _) = found
    on = frozenset(_leaf(gpu, one) for one in gpu.mig or () if one[:2] == (gi, 0))
    return Given({"nvidia.com/gpu": [f"nvidia{gpu.device_minor}/gi{gi}{share}"]}, on=on)


def gpushare(node: PluginNode) -> Given:
    card, other = node.gpu(), node.gpu()
    resource = "aliyun.com/gpu-mem"
    ids = [f"{other.uuid}-_-{node.number * 100 + n}" for n in range(node.draw(st.integers(1, 4)))]
    failed = answer(NVIDIA_VISIBLE_DEVICES="no-gpu-has-4GiB-to-run", ALIYUN_COM_GPU_MEM_IDX="-1")
    well = answer(NVIDIA_VISIBLE_DEVICES=str(card.index), ALIYUN_COM_GPU_MEM_IDX=str(other.index))
    fails = node.draw(st.integers(0, 4)) == 0
    on: frozenset[Uuid] = frozenset() if fails else frozenset({card.uuid})
    return Given({resource: ids}, {resource: failed if fails else well}, on=on, by_answer=True)


def hami(node: PluginNode) -> Given:
    cards = node.draw(st.lists(st.sampled_from(node.gpus), min_size=1, max_size=2, unique_by=lambda gpu: gpu.index))
    limits = {f"CUDA_DEVICE_MEMORY_LIMIT_{place}": f"{1000 + place}m" for place in range(len(cards))}
    cores = str(node.draw(st.sampled_from([0, 30, 100])))
    plugin_answer = answer(NVIDIA_VISIBLE_DEVICES=",".join(c.uuid for c in cards), CUDA_DEVICE_SM_LIMIT=cores, **limits)
    ids = [f"{node.gpu().uuid}-{node.number * 2 + n}" for n in range(len(cards))]
    return Given(
        {"nvidia.com/gpu": ids}, {"nvidia.com/gpu": plugin_answer}, on=frozenset(c.uuid for c in cards), by_answer=True
    )


def hami_mig(node: PluginNode) -> Given:
    found = node.instance()
    if found is None:
        return Given()
    leaf = _leaf(*found)
    plugin_answer = answer(NVIDIA_VISIBLE_DEVICES=leaf)
    ids = [f"{found[0].uuid}-{node.number}"]
    return Given({"nvidia.com/gpu": ids}, {"nvidia.com/gpu": plugin_answer}, on=frozenset({leaf}), by_answer=True)


def vcuda(node: PluginNode) -> Given:
    cards = node.draw(st.lists(st.sampled_from(node.gpus), min_size=1, max_size=2, unique_by=lambda gpu: gpu.index))
    cores = 2 * len(cards) if len(cards) > 1 else node.draw(st.integers(1, 5))
    plugin_answer = PluginAnswer(
        annotations=(("tencent.com/vcuda-device", ",".join(f"/dev/nvidia{card.device_minor}" for card in cards)),)
    )
    ids = {
        "tencent.com/vcuda-core": [f"tencent.com/vcuda-core-{node.number * 1000 + n}" for n in range(cores)],
        "tencent.com/vcuda-memory": [f"tencent.com/vcuda-memory-268435456-{node.number * 100 + n}" for n in range(4)],
    }
    answers = {"tencent.com/vcuda-core": plugin_answer, "tencent.com/vcuda-memory": PluginAnswer()}
    return Given(ids, answers, on=frozenset(card.uuid for card in cards), by_answer=True)


def volcano(node: PluginNode) -> Given:
    card, resource = node.gpu(), "volcano.sh/gpu-memory"
    plugin_answer = answer(NVIDIA_VISIBLE_DEVICES=str(card.index), VOLCANO_GPU_ALLOCATED="2000")
    ids = [f"{node.gpu().index}-{node.number * 100 + n}" for n in range(5)]
    return Given({resource: ids}, {resource: plugin_answer}, on=frozenset({card.uuid}), by_answer=True)


def volcano_vgpu(node: PluginNode) -> Given:
    card, home = node.gpu(), node.gpu().uuid
    plugin_answer = answer(
        NVIDIA_VISIBLE_DEVICES=card.uuid, CUDA_DEVICE_SM_LIMIT="30", CUDA_DEVICE_MEMORY_LIMIT_0="3000m"
    )
    ids = {
        "volcano.sh/vgpu-number": [f"{home}-{node.number}"],
        "volcano.sh/vgpu-memory": [f"{home}-memory-{node.number * 100 + n}" for n in range(3)],
        "volcano.sh/vgpu-cores": [f"{home}-core-{node.number * 100 + n}" for n in range(3)],
    }
    return Given(ids, {"volcano.sh/vgpu-number": plugin_answer}, on=frozenset({card.uuid}), by_answer=True)


def aws(node: PluginNode) -> Given:
    uuid = node.gpu().uuid
    return Given({"k8s.amazonaws.com/vgpu": [f"{uuid}-{node.number}"]}, on=frozenset({uuid}))


def passed_through(node: PluginNode) -> Given:
    ids = ["0000:3b:00.0", str(node.number), uuid_of("mdev", node.number)]
    return Given({"nvidia.com/GA102GL_A10": ids})


def dra(node: PluginNode) -> Given:
    found = node.instance() if node.draw(st.booleans()) else None
    share = node.draw(st.sampled_from(["", "", uuid_of("share", node.number)]))
    claim = node.draw(st.sampled_from(["shared", f"own-{node.number}"]))
    if found is None:
        gpu = node.gpu()
        device, on = f"gpu-{gpu.device_minor}", frozenset({gpu.uuid})
    else:
        gpu, (gi, _, _) = found
        form = node.draw(st.sampled_from(["19-{}-1", "1g10gb-19-{}"]))
        device = f"gpu-{gpu.device_minor}-mig-{form.format(gi)}"
        on = frozenset(_leaf(gpu, one) for one in gpu.mig or () if one[0] == gi)
        on = on if gpu.has_placements and len(on) == 1 else frozenset()
    claims = [
        ClaimDevice("gpu.nvidia.com", "node-a", device, share, "ml", claim),
        ClaimDevice("compute-domain.nvidia.com", "node-a", "channel-0", "", "ml", "domain"),
        ClaimDevice("gpu.nvidia.com", "node-a", "gpu-vfio-1", "", "ml", f"vfio-{node.number}"),
    ]
    return Given(claims=claims, on=on)


PLUGINS: tuple[Callable[[PluginNode], Given], ...] = (
    nvidia_old_mig,
    nvidia_mps,
    gke,
    gpushare,
    hami,
    hami_mig,
    vcuda,
    volcano,
    volcano_vgpu,
    aws,
    passed_through,
    dra,
)
