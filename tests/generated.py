"""Nodes drawn by chance, and what they live through; their truth is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from gpumap.agent.join import Memory, step
from gpumap.model.node import Workload
from gpumap.model.observations import ScheduledShare
from gpumap.model.readings import ProcessSample, Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import PodUid
from tests import sharing
from tests.nodes import GIB, RULES, WHOLE, Gpu, Pod, Process, TestNode, gpu_uuid

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
                made = sharing.PluginNode(draw, gpus, 10 * number + len(pod.ids))
                _give(pod, container, draw(st.sampled_from(sharing.PLUGINS))(made))
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


def _give(pod: Pod, container: str, given: sharing.Given) -> None:
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
