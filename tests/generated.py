"""Nodes drawn by chance, how plugins of each kind share them, and what they live through; their truth is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from gpumap.agent.join import Memory, step
from gpumap.model.node import Workload
from gpumap.model.observations import ClaimDevice, PluginAnswer, ScheduledShare
from gpumap.model.readings import ProcessSample, Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import PodUid
from tests.nodes import GIB, RULES, WHOLE, Gpu, Pod, Process, TestNode, gpu_uuid, uuid_of


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


# --- nodes drawn by chance --------------------------------------------------------------------------------------------


MIG_SHAPES: list[list[tuple[int, int, int]] | None] = [
    None,
    None,
    None,
    [(1, 0, 3), (2, 0, 4)],
    [(1, 0, 1), (1, 1, 2), (5, 0, 1)],
    [],
]
ALONE = [WHOLE, (1, 0), (2, 0), (5, 0)]
"""Devices that GPM may measure. Some MIG devices have a GPU instance of their own, in some of the shapes."""
SHORT = ProcessSample(99, 0.25, 0.0, 0.0, 0.0)
"""Of a process that no list has."""


@st.composite
def nodes(draw: st.DrawFn) -> TestNode:
    """A node with some GPUs, pods that hold all kinds of ids, and processes of anybody anywhere."""
    minors = draw(st.permutations(range(3)))
    gpus = [
        Gpu(
            index,
            mig=draw(st.sampled_from(MIG_SHAPES)),
            has_samples=draw(st.booleans()),
            minor=minors[index],
            has_placements=draw(st.booleans()),
            activities=draw(st.fixed_dictionaries({}, optional=dict.fromkeys(ALONE, st.sampled_from([0.0, 0.5])))),
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    leaves = [leaf for gpu in gpus for leaf in gpu.leaves]
    free = [str(uuid) for gpu in gpus for uuid in (gpu.leaves if gpu.mig else [gpu.uuid])]
    shared = [uuid for uuid in free if draw(st.booleans())]
    replicas = [f"{uuid}::{n}" for uuid in shared for n in range(4)]
    pods = []
    for number in range(draw(st.integers(0, 5))):
        pod = Pod(draw(st.sampled_from(["ml", "web", "ml", "web", "kai-resource-reservation"])), f"pod{number}")
        pod.groups = (draw(st.sampled_from(["g", "h"])),)
        pod.shares = tuple(draw(st.lists(_shares(gpus), max_size=2)))
        for container in draw(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=2, unique=True)):
            if draw(st.booleans()):
                made = PluginNode(draw, gpus, 10 * number + len(pod.ids))
                _give(pod, container, draw(st.sampled_from(PLUGINS))(made))
            else:
                pod.ids[container] = _take_ids(draw, [uuid for uuid in free if uuid not in shared], replicas, number)
        if draw(st.booleans()):
            pod.init["warm"] = draw(st.sampled_from(list(pod.ids.values())))
        pod.listed, pod.in_checkpoint = draw(st.sampled_from([(True, True)] * 4 + [(True, False), (False, True)]))
        pod.has_tree, pod.has_links = draw(st.sampled_from([(True, True)] * 4 + [(True, False), (False, False)]))
        pods.append(pod)
    node = TestNode(gpus, pods, registered={"nvidia.com/gpu.shared": [f"{u}::{n}" for u in shared for n in range(4)]})
    node.reports_pods = draw(st.booleans())
    node.shares = tuple(replace(draw(_shares(gpus)), pod_uid=pod.uid) for pod in pods if draw(st.integers(0, 4)) == 0)
    for pid in range(100, 100 + draw(st.integers(0, 8)) if leaves else 100):
        node.processes.append(_process(draw, pid, leaves, pods))
    return node


def _shares(gpus: list[Gpu]) -> st.SearchStrategy[ScheduledShare]:
    """What schedulers note: of a group or a card, that may be none, with any amounts."""
    cards = [*({"uuid": gpu.uuid} for gpu in gpus), *({"minor": gpu.device_minor} for gpu in gpus)]
    return st.builds(
        lambda place, container, gpus, memory_bytes: ScheduledShare(
            PodUid(""), container, gpus=gpus, memory_bytes=memory_bytes, **place
        ),
        st.sampled_from([{"group": "g"}, {"group": "h"}, *cards, {"uuid": gpu_uuid(99)}]),
        st.sampled_from(["a", "b", "other", ""]),
        st.sampled_from([None, 0.5, 0.75, 1.0]),
        st.sampled_from([None, GIB, 200 * GIB]),
    )


def _give(pod: Pod, container: str, given: Given) -> None:
    pod.ids[container] = given.ids
    pod.claims[container] = given.claims
    pod.answers.update({(container, resource): plugin_answer for resource, plugin_answer in given.answers.items()})
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
        work=draw(st.sampled_from([None, Workload("docker", "4f1c9e0b7a2d"), Workload("user", "1000")])),
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


def _without_results(memory: Memory) -> Memory:
    """The same memory, but nothing that the next step could take over instead of computing it."""
    return replace(
        memory,
        allocation=memory.allocation and replace(memory.allocation, basis=()),
        attribution=memory.attribution and replace(memory.attribution, by_leaf={}),
    )


@st.composite
def runs(draw: st.DrawFn, check: Callable[[TestNode, Snapshot], None] | None = None) -> list[Snapshot | TestNode]:
    """A node lived through: pairs of the truth at a collection and its snapshot are checked on the way."""
    node = draw(nodes())
    for _ in range(draw(st.integers(1, 5))):
        node.down = set(draw(st.lists(st.sampled_from(["kubelet", "nvml", "procfs", "pod_identity"]), max_size=1)))
        node.visible = draw(st.sampled_from([True] * 4 + [False]))
        node.checkpoint_readable = draw(st.sampled_from([True] * 4 + [False]))
        node.logs_readable = draw(st.sampled_from([True] * 4 + [False]))
        for gpu in node.gpus:
            gpu.fault = draw(st.sampled_from([None] * 5 + ["lost", "hung"]))
            gpu.late_samples = draw(st.sampled_from([(), (), (SHORT,)]))
        if draw(st.booleans()) and node.pods:
            pod = draw(st.sampled_from(node.pods))
            namesakes = [other for other in node.pods if other.name == pod.name and other is not pod]
            # Never two pods of one name, and none that has a successor.
            may_be_listed = not any(other.listed or other.generation > pod.generation for other in namesakes)
            pod.listed = not pod.listed and may_be_listed
        if node.pods and draw(st.integers(0, 3)) == 0:
            _recreate(draw, node, draw(st.sampled_from(node.pods)))
        if node.pods and draw(st.integers(0, 3)) == 0:  # a disk cleaner
            cleaned = draw(st.sampled_from(node.pods))
            cleaned.has_tree, cleaned.has_links = False, draw(st.booleans())
        if draw(st.integers(0, 4)) == 0:
            node.socket += "+"
        _write_checkpoint(node)
        for seconds in draw(st.lists(st.sampled_from([0.5, 5.0, 70.0]), min_size=1, max_size=4)):
            if draw(st.booleans()) and node.processes:
                process = draw(st.sampled_from(node.processes))
                process.memory = draw(st.sampled_from([None, 0, GIB]))
            before = node.memory
            snapshot = node.collect(seconds)
            _, afresh = step(_without_results(before), node.observe(), RULES)
            assert snapshot == afresh, "what was judged before is judged otherwise now"
            if check:
                check(node, snapshot)
    return [node]
