"""A machine below a folder, with the files and the kubelet that gpumap reads there: one for tests, soak and bench.

What runs on it, and the driver's answers, are of those who use it.
"""

from __future__ import annotations

import secrets
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpumap.lab.demo import texts
from gpumap.model.names import ContainerName, PodUid
from gpumap.model.observations import (
    CheckpointEntry,
    ContainerLink,
    ListedContainer,
    ListedPod,
    LogTree,
    PluginAnswer,
    ResourceDevices,
)
from tests.kubelet import FakeKubelet


def new_uid() -> PodUid:
    return PodUid(str(uuid.uuid4()))


def new_container_id() -> str:
    return secrets.token_hex(32)


@dataclass(frozen=True)
class Pod:
    """A pod of a machine. `containers` has the container ids by name, `devices` the kubelet's device ids."""

    namespace: str
    name: str
    uid: PodUid
    containers: Mapping[str, str]
    devices: Mapping[str, tuple[ResourceDevices, ...]]
    answers: Mapping[str, PluginAnswer] = field(default_factory=dict)
    """What its plugin answered, by container."""

    @property
    def full(self) -> tuple[str, str]:
        return self.namespace, self.name

    def cgroup(self, container: str, style: str = "v1-cgroupfs") -> str:
        return texts.pod_cgroup(style, "besteffort", self.uid, self.containers[container])

    def listed(self) -> ListedPod:
        containers = (ListedContainer(name, tuple(self.devices.get(name, ()))) for name in self.containers)
        return ListedPod(self.namespace, self.name, tuple(containers))

    def entries(self) -> Iterable[CheckpointEntry]:
        for name, devices in self.devices.items():
            for one in devices:
                yield CheckpointEntry(self.uid, name, one.resource, frozenset(one.ids), self.answers.get(name))

    @property
    def tree(self) -> str:
        return texts.tree_name(LogTree(self.uid, self.namespace, self.name, ()))

    def link(self, container: str) -> ContainerLink:
        name = ContainerName(self.namespace, self.name, container)
        return ContainerLink(self.containers[container], self.uid, name)


class Machine:
    """Its kubelet, and the files of kubelet and pods."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kubelet_root = directory / "kubelet"
        self.logs = directory / "log"
        self.sys = directory / "sys"
        self.checkpoint = self.kubelet_root / "device-plugins" / "kubelet_internal_checkpoint"
        self.kubelet = FakeKubelet(self.kubelet_root / "pod-resources" / "kubelet.sock")
        for folder in (self.checkpoint.parent, self.logs / "pods", self.logs / "containers"):
            folder.mkdir(parents=True)

    def flags_for(self, proc: Path) -> list[str]:
        """What points gpumap at this machine, but for the driver."""
        return [
            *("--kubelet-root", str(self.kubelet_root)),
            *("--device-checkpoint", str(self.checkpoint)),  # else that of a kubelet of this machine may be taken too
            *("--pod-log-root", str(self.logs)),
            *("--proc", str(proc)),
            *("--sys", str(self.sys)),
        ]

    def write_kubelet(self, pods: Iterable[Pod], offered: Sequence[ResourceDevices]) -> None:
        """Let the kubelet list these pods and offer these devices."""
        self.kubelet.set_pods([pod.listed() for pod in pods])
        self.kubelet.set_allocatable(offered)

    def write_checkpoint(self, pods: Iterable[Pod], offered: Sequence[ResourceDevices]) -> None:
        rows = [entry for pod in pods for entry in pod.entries()]
        temporary = self.checkpoint.with_suffix(".tmp")
        temporary.write_text(texts.checkpoint_text(rows, offered, {}))
        temporary.rename(self.checkpoint)

    # --- logs ---

    @property
    def pod_logs(self) -> Path:
        """Where the trees are: a test may have moved them."""
        moved = self.logs / "pods.away"
        return moved if moved.exists() else self.logs / "pods"

    def write_logs(self, pod: Pod) -> None:
        for container in pod.containers:
            (self.pod_logs / pod.tree / container).mkdir(parents=True)
            self.write_link(pod, container)

    def remove_logs(self, pod: Pod) -> None:
        shutil.rmtree(self.pod_logs / pod.tree)
        for container in pod.containers:
            self.remove_link(pod, container)

    def write_link(self, pod: Pod, container: str) -> None:
        self._link(pod, container).symlink_to(texts.link_target(pod.link(container)))

    def remove_link(self, pod: Pod, container: str) -> None:
        self._link(pod, container).unlink(missing_ok=True)

    def _link(self, pod: Pod, container: str) -> Path:
        return self.logs / "containers" / texts.link_name(pod.link(container))
