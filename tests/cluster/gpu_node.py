"""A live node with GPUs: device plugins, the stand-in driver, gpumaps as the chart runs them, and who watches them."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import grpc

from gpumap.agent._proto.podresources import v1_pb2
from tests.cluster import agents, layout
from tests.cluster.device_plugin import Allocations, DevicePlugin
from tests.cluster.judge import Disturbance, Judge, Verdict
from tests.cluster.node import DEVICE_PLUGINS, LiveNode, RunningContainer
from tests.cluster.recorder import Recorder
from tests.cluster.truth import Watch
from tests.cluster.workloads import Workload
from tests.laws import Span

DRIVER = Path("/var/lib/nvml")
"""The driver's folder on the node."""
PATIENCE_SECONDS = 90.0
LOOK_SECONDS = 0.05


class GpuNode:
    """All of it, in a `with` block. Cases change it from several threads at once."""

    def __init__(self, node: LiveNode, archive: Path) -> None:
        self.node = node
        self.allocations = Allocations()
        self.disturbances: list[Disturbance] = []
        self.plugins: dict[str, DevicePlugin] = {}
        self._archive = archive
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as ends:
            state = agents.make_driver(self.node.path(DRIVER))
            self.watch = ends.enter_context(Watch(self.node.path("/proc"), state, self.allocations))
            for resource in layout.resources():
                plugin = DevicePlugin(self.node.path(DEVICE_PLUGINS), resource, self.allocations)
                self.plugins[resource.name] = ends.enter_context(plugin)
            self.node.import_image(self._archive)
            self.recorders = {one.name: self._recorder(one.name) for one in agents.AGENTS}
            for recorder in self.recorders.values():
                ends.enter_context(recorder)
            for agent in agents.AGENTS:
                self.node.apply(agent.manifest(DRIVER))
            for agent in agents.AGENTS:
                self.until(agent.name, lambda text: "gpumap_device_info{" in text, "its first page")
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _recorder(self, name: str) -> Recorder:
        return Recorder(name, self.node.path("/proc"), lambda: self.watch.agent(name))

    # --- pods ---

    def apply(self, workload: Workload, *, ends: bool = False) -> str:
        """Write the pod's manifest, and give the name of the new instance. `ends`: it ends by itself, for good."""
        instance, uid, manifest = workload.manifest()
        pod = self.watch.truth.pod(instance, workload.namespace, workload.full_name)
        pod.uid, pod.ends = uid, ends
        self.node.apply(manifest)
        return instance

    def replace(self, workload: Workload, instance: str) -> str:
        """Write the manifest of a new instance over that of another one."""
        self.watch.mark_deleted(instance)
        return self.apply(workload)

    def delete(self, workload: Workload, instance: str) -> None:
        self.watch.mark_deleted(instance)
        self.node.delete(workload.name, workload.namespace)

    @contextlib.contextmanager
    def running(self, *workloads: Workload) -> Iterator[None]:
        """These pods, until the end of the block."""
        instances = [self.apply(workload) for workload in workloads]
        try:
            yield
        finally:
            for workload, instance in zip(workloads, instances, strict=True):
                self.delete(workload, instance)

    def container(self, workload: Workload, name: str) -> RunningContainer:
        """A container that runs, as containerd lists it."""
        running = self.node.wait_running(workload.name, workload.namespace)
        return next(one for one in running if one.name == name)

    @contextlib.contextmanager
    def disturbed(self, what: str, *, lists_old: bool = False) -> Iterator[None]:
        """Something is away in this block."""
        begun = time.time()
        index = len(self.disturbances)
        self.disturbances.append(Disturbance(what, Span(begun, begun + 600), lists_old))
        try:
            yield
        finally:
            self.disturbances[index] = Disturbance(what, Span(begun, time.time()), lists_old)

    # --- pages ---

    def until(self, agent: str, holds: Callable[[str], bool], what: str, seconds: float = PATIENCE_SECONDS) -> float:
        """Wait for a page of a gpumap, answered from now on, that holds. Give the time that it took."""
        begun, called = time.monotonic(), time.time()
        answer = None
        while time.monotonic() - begun < seconds:
            assert self.watch.running, "the watch has ended: see its traceback"
            answer = self.recorders[agent].latest()
            if answer is not None and answer.last_at > called and holds(answer.text):
                return time.monotonic() - begun
            time.sleep(LOOK_SECONDS)
        raise AssertionError(f"{agent}: no {what} in {seconds:.0f} s\n{_of_containers(answer.text if answer else '')}")

    def list_devices(self) -> dict[tuple[str, str, str], set[str]]:
        """The kubelet's List: ids by namespace, pod and container; empty while it does not answer."""
        try:
            answer = v1_pb2.ListPodResourcesResponse.FromString(self.node.list_pod_resources())
        except grpc.RpcError:
            return {}
        return {
            (pod.namespace, pod.name, container.name): {id_ for one in container.devices for id_ in one.device_ids}
            for pod in answer.pod_resources
            for container in pod.containers
        }

    def judge(self) -> list[Verdict]:
        """Judge all that was recorded until now."""
        return [
            Judge(self.watch.truth, self.disturbances, agent.interval_seconds, agent.lacks).judge(
                self.recorders[agent.name]
            )
            for agent in agents.AGENTS
        ]


def _of_containers(text: str) -> str:
    wanted = (
        "gpumap_container_gpu_memory_used",
        "gpumap_allocation_info",
        "gpumap_container_unassigned",
        "gpumap_source_up",
    )
    return "\n".join(line for line in text.splitlines() if line.startswith(wanted))


def values(text: str, family: str, **labels: str) -> list[float]:
    """The samples of a family with these labels, read without a parser: cases look at many pages."""
    lines = re.findall(rf"^{family}\{{.*$", text, re.MULTILINE)
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    return [float(line.rpartition(" ")[2]) for line in lines if all(one in line for one in wanted)]
