"""The fake device plugin, against a tiny fake of the kubelet's Registration service and device manager."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cluster.device_plugin import (
    Allocations,
    DevicePlugin,
    Resource,
    by_id,
    gpushare,
    messages,
    replicas,
    services,
)
from tests.prometheus import eventually

FIRST, SECOND = "GPU-00000000-0000-0000-0000-000000000000", "GPU-00000000-0000-0000-0000-000000000001"
WHOLE = by_id("nvidia.com/gpu", [FIRST, SECOND])


class DeviceManager:
    """A kubelet's side of the API: it takes registrations, watches each plugin's devices, and allocates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registered: list[tuple[str, str]] = []
        self.offered: dict[str, dict[str, str]] = {}
        self.lost: list[str] = []
        self._channels: dict[str, grpc.Channel] = {}
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2), options=[("grpc.so_reuseport", 0)])
        services.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{folder / 'kubelet.sock'}")

    def __enter__(self) -> DeviceManager:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()
        self._server.stop(0).wait()
        (self.folder / "kubelet.sock").unlink(missing_ok=True)

    def Register(self, request: Any, context: Any) -> Any:  # noqa: N802 # the API's own name
        self.registered.append((request.version, request.resource_name))
        channel = grpc.insecure_channel(f"unix:{self.folder / request.endpoint}")
        self._channels[request.resource_name] = channel
        threading.Thread(target=self._watch, args=(request.resource_name, channel), daemon=True).start()
        return messages.Empty()

    def _watch(self, resource: str, channel: grpc.Channel) -> None:
        try:
            for answer in services.DevicePluginStub(channel).ListAndWatch(messages.Empty()):
                self.offered[resource] = {device.ID: device.health for device in answer.devices}
        except (grpc.RpcError, ValueError):
            pass
        self.lost.append(resource)

    def allocate(self, resource: str, *ids: str) -> dict[str, str]:
        request = messages.AllocateRequest(container_requests=[messages.ContainerAllocateRequest(devicesIDs=ids)])
        answer = services.DevicePluginStub(self._channels[resource]).Allocate(request, timeout=10)
        return dict(answer.container_responses[0].envs)


@pytest.fixture(name="manager")
def run_manager(directory: Path) -> Iterator[DeviceManager]:
    with DeviceManager(directory) as manager:
        yield manager


def served(manager: DeviceManager, resource: Resource) -> bool:
    return set(manager.offered.get(resource.name, ())) == set(resource.ids)


def test_offers_its_devices(manager: DeviceManager) -> None:
    """A plugin registers its resource, and lists every device as healthy."""
    with DevicePlugin(manager.folder, WHOLE, Allocations()):
        eventually(lambda: served(manager, WHOLE))
        assert manager.registered == [("v1beta1", "nvidia.com/gpu")]
        assert manager.offered["nvidia.com/gpu"] == {FIRST: "Healthy", SECOND: "Healthy"}


def test_reports_an_unhealthy_device(manager: DeviceManager) -> None:
    """The kubelet learns at once that a device is unhealthy, and that it is healthy again."""
    with DevicePlugin(manager.folder, WHOLE, Allocations()) as plugin:
        eventually(lambda: served(manager, WHOLE))
        plugin.set_unhealthy(SECOND)
        eventually(lambda: manager.offered["nvidia.com/gpu"] == {FIRST: "Healthy", SECOND: "Unhealthy"})
        plugin.set_unhealthy()
        eventually(lambda: manager.offered["nvidia.com/gpu"] == {FIRST: "Healthy", SECOND: "Healthy"})


def test_goes_away_and_comes_back(manager: DeviceManager) -> None:
    """The kubelet sees the end of a plugin's stream; a plugin that starts again registers again."""
    plugin = DevicePlugin(manager.folder, WHOLE, Allocations())
    with plugin:
        eventually(lambda: served(manager, WHOLE))
    eventually(lambda: manager.lost == ["nvidia.com/gpu"])
    assert list(manager.folder.glob("nvidia*")) == []
    manager.offered.clear()
    with plugin:
        eventually(lambda: served(manager, WHOLE))
    assert len(manager.registered) == 2


def test_registers_with_each_new_kubelet(directory: Path) -> None:
    """A kubelet that starts removes every socket of its folder; the plugin serves and registers again."""
    with DevicePlugin(directory, WHOLE, Allocations()):
        for _ in range(2):
            with DeviceManager(directory) as manager:
                eventually(lambda manager=manager: served(manager, WHOLE))  # type: ignore[misc]
            for socket in directory.glob("*.sock"):
                socket.unlink()


def test_answers_name_the_devices(manager: DeviceManager) -> None:
    """The variables of a container name the card by uuid, and the allocation by its number."""
    allocations = Allocations()
    shared = replicas("nvidia.com/gpu.shared", FIRST, 4)
    with DevicePlugin(manager.folder, WHOLE, allocations), DevicePlugin(manager.folder, shared, allocations):
        eventually(lambda: served(manager, WHOLE) and served(manager, shared))
        assert manager.allocate("nvidia.com/gpu", SECOND) == {
            "NVIDIA_VISIBLE_DEVICES": SECOND,
            "TEST_ALLOCATION_1": SECOND,
        }
        assert manager.allocate("nvidia.com/gpu.shared", f"{FIRST}::0", f"{FIRST}::3") == {
            "NVIDIA_VISIBLE_DEVICES": FIRST,
            "TEST_ALLOCATION_2": FIRST,
        }
    assert [(one.resource, one.leaves) for one in allocations.made.values()] == [
        ("nvidia.com/gpu", (SECOND,)),
        ("nvidia.com/gpu.shared", (FIRST,)),
    ]


def test_gpushare_chooses_the_card(manager: DeviceManager) -> None:
    """Ids of gpushare name any card; the answer names the one that the container gets."""
    shared = gpushare({3: (FIRST, 16), 4: (SECOND, 15)})
    assert len(shared.ids) == 30  # the smaller card's GiB, for each card
    with DevicePlugin(manager.folder, shared, Allocations()):
        eventually(lambda: served(manager, shared))
        ids = [f"{SECOND}-_-{number}" for number in range(4)]
        answers = [manager.allocate(shared.name, *ids) for _ in range(2)]
    assert [answer["ALIYUN_COM_GPU_MEM_IDX"] for answer in answers] == ["3", "4"]
    assert [answer["TEST_ALLOCATION_1"] for answer in answers[:1]] == [FIRST]
    assert {answer["ALIYUN_COM_GPU_MEM_CONTAINER"] for answer in answers} == {"4"}
