"""L10 as a property: gpumap accuses no process, and reports no zero, because a trace is missing.

A node lives through events: pods start, end and start again under their names, processes exit and their PIDs are
used again, cleaners remove log directories, files become unreadable, the kubelet and gpumap restart. Events also happen
between two sources of one collection. What gpumap reports must be true of the node at one of these moments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumap.agent.join import Memory, step
from gpumap.model.names import Owner, PodUid
from gpumap.model.observations import Observations
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests.examples import examples
from tests.nodes import GIB, RULES, Gpu, Pod, Process, TestNode, hex_of

DRIVER = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"
REPLICAS = 3


@dataclass
class LivingPod(Pod):
    """A pod, and whether the kubelet still has it. The UID of a static pod is a hash without dashes."""

    alive: bool = True
    static: bool = False

    @property
    def uid(self) -> PodUid:
        if self.static:
            return PodUid(hex_of(self.namespace, self.name, self.generation, digits=32))
        return super().uid


@dataclass
class LivingNode:
    """The truth at one moment. `knows_pods` is false after a restart of the kubelet, until the API server answers."""

    node: TestNode
    pods: list[LivingPod] = field(default_factory=list)
    knows_pods: bool = True
    at_last_list: LivingNode | None = None
    """The moment of the last List that gpumap got."""

    def moment(self) -> LivingNode:
        """Return a copy that later events do not change. Only the values that sources share remain the same."""
        pods = {id(pod): copy.copy(pod) for pod in self.pods}
        for pod in pods.values():
            pod.listed = pod.alive and (pod.static or self.knows_pods)
        node = copy.copy(self.node)
        node.pods = list(pods.values())
        node.processes = [replace(one, pod=pods[id(one.pod)] if one.pod else None) for one in self.node.processes]
        node.down = set(self.node.down)
        return LivingNode(node, list(pods.values()), self.knows_pods)

    def holds(self, pod: LivingPod, container: str, leaf: Uuid) -> bool:
        """Whether the container holds a slot of the leaf; without a container's name, whether any of the pod does."""
        grants = [ids for name, of in pod.ids.items() if container in (name, "") for ids in of.values()]
        return any(given.partition("::")[0] == leaf for ids in grants for given in ids)

    def has_trace(self, pod: LivingPod) -> bool:
        """Whether the identity files can show a pod that is not static."""
        node = self.node
        in_files = (node.logs_readable and pod.has_tree) or (
            node.checkpoint_readable and pod.in_checkpoint and any(pod.ids.values())
        )
        return in_files and not pod.static and "pod_identity" not in node.down

    def pod_of(self, process: Process) -> LivingPod | None:
        return process.pod if isinstance(process.pod, LivingPod) else None

    # --- events ---

    def free_ids(self) -> Iterator[tuple[str, str]]:
        taken = {one for pod in self.pods if pod.alive for of in pod.ids.values() for ids in of.values() for one in ids}
        for gpu in self.node.gpus:
            ids = [str(gpu.uuid)] if gpu.index % 2 == 0 else [f"{gpu.uuid}::{n}" for n in range(REPLICAS)]
            yield from ((DRIVER if gpu.index % 2 == 0 else SHARED, one) for one in ids if one not in taken)

    def start_pod(self, draw: st.DrawFn) -> None:
        """The kubelet assigns the devices, writes the checkpoint, makes the log directory and starts the containers."""
        ended = [pod for pod in self.pods if not pod.alive and not pod.static]
        again = draw(st.sampled_from([*ended, None])) if ended else None
        name = again.name if again else f"pod{len(self.pods)}"
        static = draw(st.integers(0, 9)) == 0
        if any(pod.alive and pod.name == name for pod in self.pods) or not (static or self.knows_pods):
            return
        generation = 1 + max((pod.generation for pod in self.pods if pod.name == name), default=-1)
        pod = LivingPod("ml", name, generation=generation, static=static)
        free = list(self.free_ids())
        for container in draw(st.sampled_from([["main"], ["main", "side"]])):
            pod.ids[container] = {}
            if free and draw(st.integers(0, 3)) > 0:
                resource, one = free.pop(draw(st.integers(0, len(free) - 1)))
                pod.ids[container] = {resource: [one]}
        if any(pod.ids.values()):  # an assignment writes the checkpoint: the rows of ended pods go
            for other in self.pods:
                other.in_checkpoint &= other.alive
        self.pods.append(pod)

    def end_pod(self, draw: st.DrawFn) -> None:
        """The kubelet forgets the pod. A process that does not die remains, and the log directory does for a while."""
        alive = [pod for pod in self.pods if pod.alive]
        if not alive:
            return
        pod = draw(st.sampled_from(alive))
        pod.alive = False
        if draw(st.integers(0, 2)):
            self.node.processes = [one for one in self.node.processes if one.pod is not pod]
        pod.has_tree = pod.has_links = draw(st.booleans())

    def clean_up(self, draw: st.DrawFn) -> None:
        """The kubelet removes what is left of ended pods."""
        for pod in self.pods:
            if not pod.alive:
                pod.has_tree = pod.has_links = False

    def start_process(self, draw: st.DrawFn) -> None:
        alive = [pod for pod in self.pods if pod.alive]
        pod = draw(st.sampled_from([*alive, None]))
        container = draw(st.sampled_from(sorted(pod.ids))) if pod else "main"
        held = [gpu.uuid for gpu in self.node.gpus if pod and self.holds(pod, container, gpu.uuid)]
        leaves = held if held and draw(st.integers(0, 4)) > 0 else [gpu.uuid for gpu in self.node.gpus]
        used = {one.pid for one in self.node.processes}
        pid = draw(st.sampled_from([pid for pid in range(100, 130) if pid not in used]))
        self.node.processes.append(
            Process(pid, draw(st.sampled_from(leaves)), pod, container, memory=draw(st.sampled_from([GIB, 2 * GIB])),
                    start=len(self.node.given) + 1000 + int(self.node.clock * 100) + draw(st.integers(1, 50)))
        )  # fmt: skip

    def end_process(self, draw: st.DrawFn) -> None:
        if self.node.processes:
            self.node.processes.remove(draw(st.sampled_from(self.node.processes)))

    def remove_logs(self, draw: st.DrawFn) -> None:
        """A cleaner, a full disk or an administrator removes log directories of pods that run."""
        with_tree = [pod for pod in self.pods if pod.has_tree or pod.has_links]
        chosen = with_tree if draw(st.booleans()) else with_tree[:1]
        links_only = draw(st.booleans())
        for pod in chosen:
            pod.has_links = False
            pod.has_tree &= links_only

    def switch_files(self, draw: st.DrawFn) -> None:
        self.node.checkpoint_readable = draw(st.sampled_from([True, True, False]))
        self.node.logs_readable = draw(st.sampled_from([True, True, False]))
        self.node.down = set(draw(st.lists(st.sampled_from(["kubelet", "procfs", "pod_identity"]), max_size=1)))

    def restart_kubelet(self, draw: st.DrawFn) -> None:
        self.node.socket += "+"
        self.knows_pods = draw(st.booleans())

    def answer_of_api_server(self, draw: st.DrawFn) -> None:
        self.knows_pods = True

    def restart_gpumap(self, draw: st.DrawFn) -> None:
        self.node.memory = Memory()


EVENTS = (
    LivingNode.start_pod,
    LivingNode.start_pod,
    LivingNode.start_process,
    LivingNode.start_process,
    LivingNode.start_process,
    LivingNode.end_process,
    LivingNode.end_pod,
    LivingNode.clean_up,
    LivingNode.remove_logs,
    LivingNode.switch_files,
    LivingNode.restart_kubelet,
    LivingNode.answer_of_api_server,
    LivingNode.restart_gpumap,
)


class Collected(NamedTuple):
    """A snapshot, and the moments of its sources, in the order in which the service reads them."""

    snapshot: Snapshot
    nvml: LivingNode
    procfs: LivingNode
    identity: LivingNode
    kubelet: LivingNode
    last_list: LivingNode
    is_first: bool
    """gpumap has just started."""

    @property
    def moments(self) -> tuple[LivingNode, ...]:
        return self.last_list, self.nvml, self.procfs, self.identity, self.kubelet


def collect(draw: st.DrawFn, living: LivingNode, seconds: float) -> Collected:
    living.node.clock += seconds
    moments = []
    for _ in range(4):
        if draw(st.integers(0, 3)) == 0:
            happen(draw, living)
        moments.append(living.moment())
    nvml, procfs, identity, kubelet = moments
    if "kubelet" not in kubelet.node.down:
        living.at_last_list = kubelet
    observations = Observations(
        nvml=nvml.node.observe().nvml,
        procfs=procfs.node.observe().procfs,
        pod_identity=identity.node.observe().pod_identity,
        kubelet=kubelet.node.observe().kubelet,
        finished=living.node.now,
        trigger="interval",
    )
    is_first = living.node.memory.pod_table is None
    living.node.memory, snapshot = step(living.node.memory, observations, RULES)
    return Collected(snapshot, nvml, procfs, identity, kubelet, living.at_last_list or kubelet, is_first)


def happen(draw: st.DrawFn, living: LivingNode) -> None:
    event = draw(st.sampled_from(EVENTS))
    event(living, draw)


@st.composite
def lives(draw: st.DrawFn) -> int:
    """A node that lived through some collections, each of which is checked. Returns their number."""
    living = LivingNode(TestNode([Gpu(index) for index in range(draw(st.integers(1, 3)))]))
    count = draw(st.integers(2, 12))
    for _ in range(draw(st.integers(0, 6))):
        happen(draw, living)
    for _ in range(count):
        for _ in range(draw(st.integers(0, 3))):
            happen(draw, living)
        check(collect(draw, living, draw(st.sampled_from([0.5, 5.0, 5.0, 70.0]))))
    return count


def check(found: Collected) -> None:
    """Assert that each accusation and each zero was true at one moment of the collection."""
    accusations_are_true(found)
    zeros_are_true(found)
    holders_are_true(found)


def accusations_are_true(found: Collected) -> None:
    for process in found.snapshot.processes:
        answer = (process.pid, process.uuid, process.owner, process.name, process.pod_uid)
        known = [(living, one, living.pod_of(one)) for living in found.moments for one in living.node.processes
                 if one.pid == process.pid]  # fmt: skip
        if process.owner is Owner.GONE:
            assert any(pod and not pod.alive for _, _, pod in known), f"accused of being gone: {answer}"
        if process.owner is Owner.UNASSIGNED:
            assert any(pod and not living.holds(pod, one.container, process.uuid) for living, one, pod in known), (
                f"accused of use without a grant: {answer}"
            )
        if process.owner is Owner.HOST:
            assert any(pod is None for _, _, pod in known), f"called a process of the host: {answer}"
        if process.owner is Owner.ASSIGNED:
            # A gpumap that has just started may see the log directory of the pod that had the name before.
            assert any(
                living.holds(other, one.container, process.uuid)
                for living, one, pod in known
                for other in (living.pods if found.is_first else [pod])
                if pod and other and other.name == pod.name
            ), answer
    for row in found.snapshot.containers:
        if row.owner is Owner.UNASSIGNED:
            assert any(
                pod.name == row.name.pod and not living.holds(pod, row.name.container, row.uuid)
                for living in found.moments
                for pod in living.pods
                if row.name.container in (*pod.ids, "")
            ), f"accused of use without a grant: {row}"


def zeros_are_true(found: Collected) -> None:
    """NVML's moment decides: a listed pod that has a process there has no zero."""
    listed = {(pod.name, pod.generation) for pod in found.last_list.pods if pod.alive}
    for row in found.snapshot.containers:
        if row.use is None or not row.holds or row.use.processes:
            continue
        its = [
            one
            for one in found.nvml.node.processes
            if one.leaf == row.uuid and (pod := found.nvml.pod_of(one)) is not None
            and (pod.name, one.container) == (row.name.pod, row.name.container)
            and (pod.name, pod.generation) in listed
            and one in found.procfs.node.processes
        ]  # fmt: skip
        assert not its, f"a zero while its own process runs: {row} {its}"


def holders_are_true(found: Collected) -> None:
    """A List without a pod of the API server proves nothing, as long as some file has such a pod."""
    living, files = found.last_list, found.identity
    if not living.knows_pods and not any(files.has_trace(pod) for pod in files.pods):
        return
    for leaf in found.snapshot.node.devices:
        if leaf.holders == 0 and not leaf.may_have_more:
            its = [pod.name for pod in living.pods if pod.alive and living.holds(pod, "", leaf.uuid)]
            assert not its, f"0 holders of {leaf.uuid}, which {its} hold"


@settings(max_examples=examples(400))
@given(lives())
def test_what_is_reported_was_true(count: int) -> None:
    assert count


@pytest.mark.e2e
@settings(max_examples=examples(4000))
@given(lives())
def test_what_is_reported_was_true_in_many_lives(count: int) -> None:
    assert count
