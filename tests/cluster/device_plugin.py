"""A fake NVIDIA device plugin: a real gRPC server on a Unix socket for each resource, registered with a kubelet.

Each allocation has a number. The plugin puts it into the container's environment and into `Allocations`. So the
environment of a process names the devices that its container was assigned. This takes neither the kubelet nor gpumap.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

messages, services = grpc.protos_and_services("tests/cluster/device_plugin.proto")

VERSION = "v1beta1"
ALLOCATION = "TEST_ALLOCATION_"
"""Begins the name of the variable of each allocation; the number follows. Its value lists the uuids of the leaves."""
WATCH_SECONDS = 0.05
CALL_SECONDS = 10.0

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices that the kubelet assigned to one container in one call; `at` is the wall clock."""

    number: int
    resource: str
    ids: tuple[str, ...]
    leaves: tuple[str, ...]
    at: float


@dataclass
class Allocations:
    """Every allocation of every plugin of a node, by its number. Kubelets repeat an answer; they do not ask twice."""

    made: dict[int, Allocation] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, resource: str, ids: Sequence[str], leaves: Sequence[str]) -> Allocation:
        with self._lock:
            one = Allocation(len(self.made) + 1, resource, tuple(ids), tuple(leaves), time.time())
            self.made[one.number] = one
            return one


@dataclass(frozen=True)
class Resource:
    """What a plugin offers: ids, and `allocate`, which gives the leaves and the variables of a container's ids."""

    name: str
    ids: tuple[str, ...]
    allocate: Callable[[Sequence[str]], tuple[Sequence[str], Environment]]


def by_id(name: str, ids: Sequence[str]) -> Resource:
    """Whole GPUs (`UUID`), replicas (`UUID::n`) or MIG devices: the id names the device."""

    def allocate(chosen: Sequence[str]) -> tuple[Sequence[str], Environment]:
        leaves = sorted({one.partition("::")[0] for one in chosen})
        return leaves, {"NVIDIA_VISIBLE_DEVICES": ",".join(leaves)}

    return Resource(name, tuple(ids), allocate)


def replicas(name: str, uuid: str, count: int) -> Resource:
    """One GPU, time-sliced."""
    return by_id(name, [f"{uuid}::{number}" for number in range(count)])


def gpushare(cards: Mapping[int, tuple[str, int]]) -> Resource:
    """Aliyun's plugin: the ids lie, the answer names the card. `cards` has each card's index, uuid and GiB.

    Its scheduler chooses a card; here the cards take turns (pkg/gpu/nvidia/{nvidia,allocate}.go).
    """
    turns = itertools.cycle(cards)
    gibibytes = min(size for _, size in cards.values())
    ids = [f"{uuid}-_-{number}" for uuid, _ in cards.values() for number in range(gibibytes)]

    def allocate(chosen: Sequence[str]) -> tuple[Sequence[str], Environment]:
        index = next(turns)
        amount = str(len(chosen))
        return [cards[index][0]], {
            "NVIDIA_VISIBLE_DEVICES": str(index),
            "ALIYUN_COM_GPU_MEM_IDX": str(index),
            "ALIYUN_COM_GPU_MEM_POD": amount,
            "ALIYUN_COM_GPU_MEM_CONTAINER": amount,
            "ALIYUN_COM_GPU_MEM_DEV": str(gibibytes),
        }

    return Resource("aliyun.com/gpu-mem", tuple(ids), allocate)


class DevicePlugin:
    """The plugin of one resource, in the kubelet's folder. It registers again with each new kubelet, as NVIDIA's."""

    def __init__(self, folder: Path, resource: Resource, allocations: Allocations) -> None:
        self.resource = resource
        self.registrations = 0
        self._folder = folder
        self._allocations = allocations
        self._socket = folder / f"{resource.name.replace('/', '_')}.sock"
        self._unhealthy: frozenset[str] = frozenset()
        self._changed = threading.Condition()
        self._server: grpc.Server | None = None
        self._generation = 0
        self._ending = threading.Event()
        self._watch: threading.Thread | None = None

    # --- how it comes and goes ---

    def start(self) -> None:
        """Serve and register as soon as there is a kubelet."""
        self._ending.clear()
        self._watch = threading.Thread(target=self._follow_kubelet, name=self._socket.name, daemon=True)
        self._watch.start()

    def stop(self) -> None:
        """Go away, as a plugin's pod that was deleted: the kubelet loses the connection."""
        self._ending.set()
        if self._watch is not None:
            self._watch.join()
        self._end_server()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def set_unhealthy(self, *ids: str) -> None:
        """Report these devices as unhealthy, and all others as healthy."""
        with self._changed:
            self._unhealthy = frozenset(ids)
            self._changed.notify_all()

    def _follow_kubelet(self) -> None:
        registered: tuple[int, int] | None = None
        while not self._ending.wait(WATCH_SECONDS):
            with contextlib.suppress(OSError, grpc.RpcError):  # no kubelet, or one that is not ready: again soon
                found = (self._folder / "kubelet.sock").stat()
                kubelet = found.st_ino, found.st_ctime_ns
                if kubelet != registered or not self._socket.exists():
                    self._end_server()
                    self._serve()
                    self._register()
                    registered = kubelet

    def _serve(self) -> None:
        self._socket.unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor(max_workers=4), options=[("grpc.so_reuseport", 0)])
        services.add_DevicePluginServicer_to_server(self, server)
        server.add_insecure_port(f"unix:{self._socket}")
        server.start()
        self._server = server

    def _end_server(self) -> None:
        with self._changed:
            self._generation += 1
            self._changed.notify_all()
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None
        self._socket.unlink(missing_ok=True)

    def _register(self) -> None:
        options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"unix:{self._folder / 'kubelet.sock'}", options=options) as channel:
            request = messages.RegisterRequest(
                version=VERSION,
                endpoint=self._socket.name,
                resource_name=self.resource.name,
                options=messages.DevicePluginOptions(),
            )
            services.RegistrationStub(channel).Register(request, timeout=CALL_SECONDS)
        self.registrations += 1

    # --- what the kubelet calls ---

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: N802 # the API's own names
        return messages.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        with self._changed:
            generation = self._generation
        sent: frozenset[str] | None = None
        while context.is_active():
            with self._changed:
                if self._generation == generation and self._unhealthy == sent:
                    self._changed.wait(CALL_SECONDS)
                if self._generation != generation:
                    return
                if self._unhealthy == sent:
                    continue
                sent = self._unhealthy
            yield messages.ListAndWatchResponse(devices=[self._device(one, one in sent) for one in self.resource.ids])

    def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = messages.AllocateResponse()
        for container in request.container_requests:
            leaves, variables = self.resource.allocate(container.devicesIDs)
            made = self._allocations.add(self.resource.name, container.devicesIDs, leaves)
            answer.container_responses.add(envs={**variables, f"{ALLOCATION}{made.number}": ",".join(leaves)})
        return answer

    def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.PreferredAllocationResponse()

    def PreStartContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.PreStartContainerResponse()

    @staticmethod
    def _device(device_id: str, unhealthy: bool) -> Any:
        # Kubelet 1.20 omits devices without topology from its List answer (kubernetes/kubernetes#103289).
        topology = messages.TopologyInfo(nodes=[messages.NUMANode(ID=0)])
        return messages.Device(ID=device_id, health="Unhealthy" if unhealthy else "Healthy", topology=topology)
