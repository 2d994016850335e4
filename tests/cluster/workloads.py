"""Pods with processes that name themselves, and use devices from the moment that their commands give."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.cluster import layout
from tests.cluster.node import NODE_NAME, busybox_pod

_numbers = itertools.count(1)


def use(mebibytes: int, seconds: int = 100_000, after: float = 0, device: str = "") -> str:
    """A shell's command: wait, then become a process that uses each assigned device, or `device`."""
    variables = f"{layout.MEMORY_MIB}={mebibytes}" + (f" {layout.DEVICE}={device}" if device else "")
    return f"sleep {after}; exec env {variables} sleep {seconds}"


IDLE = "exec sleep 100000"


@dataclass(frozen=True)
class Work:
    """A container: what its shell runs, and the devices that it asks for."""

    command: str = IDLE
    devices: Mapping[str, int] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """A pod. `containers` by name; a name that begins with "init" is an init container's."""

    name: str
    containers: Mapping[str, Work]
    spec: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = "ml"
    static: bool = False
    """Whether it has the UID of a static pod, a hash. Else it gets a UUID, as an API server gives."""

    @property
    def full_name(self) -> str:
        """As the kubelet reports it."""
        return f"{self.name}-{NODE_NAME}"

    def manifest(self) -> tuple[str, str, dict[str, Any]]:
        """A new instance: its name, its UID if it is not a hash, and the pod."""
        instance = f"{self.name}.{next(_numbers)}"
        made = {name: self._container(name, work, instance) for name, work in self.containers.items()}
        pod = busybox_pod(self.name, *(one for name, one in made.items() if not name.startswith("init")), **self.spec)
        pod["metadata"]["namespace"] = self.namespace
        uid = "" if self.static else str(uuid.uuid4())
        if uid:
            pod["metadata"]["uid"] = uid
        first = [one for name, one in made.items() if name.startswith("init")]
        if first:
            (defaults,) = busybox_pod("", {})["spec"]["containers"]
            pod["spec"]["initContainers"] = [defaults | one for one in first]
        return instance, uid, pod

    def _container(self, name: str, work: Work, instance: str) -> dict[str, Any]:
        variables = {
            layout.POD: f"{self.namespace}/{self.full_name}",
            layout.CONTAINER: name,
            layout.INSTANCE: instance,
        }
        return {
            "name": name,
            "command": ["/bin/sh", "-c", work.command],
            "env": [{"name": key, "value": value} for key, value in variables.items()],
            "resources": {"limits": {resource: str(count) for resource, count in work.devices.items()}},
        } | dict(work.more)
