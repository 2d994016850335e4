"""A GPU that is partitioned, partitioned again and made whole again under the running agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpumap.model.observations import DeviceId, ResourceDevices
from tests import standin
from tests.agent import IMPATIENT_GPUMAP, Agent, serve
from tests.exposed import Page
from tests.machine import GIB, MIB, WHOLE, Node, Pod, gpu_uuid
from tests.processes import PlainProcesses
from tests.standin import Attributes, Code, MigInstance, Placement

CARD, OTHER = gpu_uuid(1), gpu_uuid(2)
USED = "gpumap_container_gpu_memory_used_bytes"
ALLOCATED = "gpumap_container_allocated_gpus"
SMALL = [f"MIG-00000000-0000-5000-8000-00000000000{n}" for n in range(3)]
HALF = "MIG-00000000-0000-5000-8000-00000000000f"


class MigNode(Node):
    """GPU 0 is shared, the others are offered whole; of the partitioned ones their MIG devices, which `offers` has."""

    def __init__(self, directory: Path, library: Path, processes: PlainProcesses) -> None:
        self.offers: dict[int, Sequence[str]] = {}
        super().__init__(directory, library, processes)
        for card in self.driver.gpus:
            card.mig_mode = False
        self.update_driver()

    @property
    def offered(self) -> tuple[ResourceDevices, ...]:
        shared = super().offered[1]
        ids = [id_ for gpu in range(1, self.gpus) for id_ in self.offers.get(gpu, [gpu_uuid(gpu)])]
        return ResourceDevices(WHOLE, tuple(map(DeviceId, sorted(ids)))), shared

    def partition(self, gpu: int, instances: Sequence[MigInstance], *, offered: Sequence[str] | None = None) -> None:
        """The driver has these devices from now on; without any, the GPU is whole. The plugin offers `offered`."""
        card = self.driver.gpus[gpu]
        card.instances, card.mig_mode = [*instances], bool(instances)
        card.processes, card.samples, card.memory_used_bytes = [], [], 64 * MIB
        self.update_driver()
        self.offers[gpu] = [one.uuid or "" for one in instances] if offered is None else offered
        if not self.offers[gpu]:
            del self.offers[gpu]
        self.update_kubelet()

    def run_on(self, pod: Pod, instance: MigInstance, memory_bytes: int) -> int:
        """A process of a pod on a MIG device."""
        pid = self.processes.start(pod.cgroup("main"))
        assert instance.processes is not None
        instance.processes.append(standin.Process(pid, memory_bytes))
        instance.memory_used_bytes = memory_bytes
        self.update_driver()
        return pid


def small(number: int, handle: int | None = None) -> MigInstance:
    return MigInstance(SMALL[number], gi=7 + number, placement=Placement(19, number, 1), handle=handle)


def half(handle: int | None = None) -> MigInstance:
    return MigInstance(
        HALF,
        gi=1,
        name="NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        memory_total_bytes=40192 * MIB,
        attributes=Attributes(gpu_instance_slice_count=3, compute_instance_slice_count=3, memory_size_mib=40192),
        placement=Placement(9, 4, 4),
        handle=handle,
    )


@pytest.fixture(name="node")
async def make_node(directory: Path, library: Path) -> AsyncIterator[MigNode]:
    node = MigNode(directory, library, PlainProcesses(directory / "proc"))
    async with node.kubelet:
        node.processes.start("/system.slice/sshd.service")
        yield node


def uuids(page: Page, prefix: str = "gpumap_") -> set[str]:
    """The containers with series on the page; without the counters, which outlive containers and GPUs."""
    names = [name for name in page.samples if name.startswith(prefix) and not name.endswith("_total")]
    labels = (dict(row) for name in names for row in page.samples[name])
    return {found["uuid"] for found in labels if "uuid" in found}


def leaves(page: Page) -> set[str]:
    return uuids(page, "gpumap_device_") | uuids(page, "gpumap_container_")


async def shows(agent: Agent, pod: str, uuid: str, memory_bytes: int) -> Page:
    """The first page on which a pod holds and uses a device, and no other."""
    page = await agent.until(
        lambda page: (
            page.by(USED, "uuid", pod=pod) == {uuid: memory_bytes} and bool(page.by(ALLOCATED, "uuid", pod=pod))
        ),
        f"{pod} does not appear on {uuid}",
    )
    assert set(page.by(ALLOCATED, "uuid", pod=pod)) == {uuid}
    return page


@pytest.mark.parametrize("handle", [None, 5], ids=["stale handles", "recycled handles"])
async def test_a_gpu_changes_its_partitions_under_the_agent(node: MigNode, handle: int | None) -> None:
    """Each pod appears on its device with its own bytes; no series of the earlier devices is left."""
    whole = node.admit("whole", main=[CARD])
    steady = node.admit("steady", main=[OTHER])
    node.run(steady.cgroup("main"), 2, 2 * GIB)
    pid = node.run(whole.cgroup("main"), 1, 5 * GIB)
    async with serve(node) as agent:
        page = await shows(agent, "whole", CARD, 5 * GIB)
        assert CARD in leaves(page)
        node.release(pid)
        node.delete(whole)

        parts = [small(0, handle), small(1), small(2)]
        node.partition(1, parts)
        first = node.admit("first", main=[SMALL[0]])
        pid = node.run_on(first, parts[0], 3 * GIB)
        page = await shows(agent, "first", SMALL[0], 3 * GIB)
        assert leaves(page) & {CARD, *SMALL, HALF} == {*SMALL}
        assert page.by("gpumap_device_info", "mig_profile", uuid=SMALL[0]) == {"1g.10gb": 1}

        node.processes.end(pid)
        node.delete(first)
        node.partition(1, [half(handle)])
        page = await agent.later()
        assert leaves(page) & {CARD, *SMALL, HALF} == {HALF}, "devices that are gone have series"
        instance = node.driver.gpus[1].instances[0]
        assert instance is not None
        second = node.admit("second", main=[HALF])
        pid = node.run_on(second, instance, 30 * GIB)
        page = await shows(agent, "second", HALF, 30 * GIB)
        assert page.by("gpumap_device_info", "mig_profile", uuid=HALF) == {"3g.40gb": 1}
        assert page.value(ALLOCATED, uuid=HALF) == pytest.approx(3 / 7)

        node.processes.end(pid)
        node.delete(second)
        node.partition(1, [])
        again = node.admit("again", main=[CARD])
        node.run(again.cgroup("main"), 1, 7 * GIB)
        page = await shows(agent, "again", CARD, 7 * GIB)
        assert uuids(page) & {CARD, *SMALL, HALF} == {CARD}
        await shows(agent, "steady", OTHER, 2 * GIB)
        assert "worker_crashed" not in agent.log


async def test_another_profile_under_the_same_uuid_is_reported_as_such(node: MigNode) -> None:
    """A device that comes back with its name, its ids and another size has that size in the next page."""
    node.partition(1, [replace(half(), uuid=SMALL[0], gi=7)])
    async with serve(node) as agent:
        await agent.until(
            lambda page: page.by("gpumap_device_info", "mig_profile", uuid=SMALL[0]) == {"3g.40gb": 1},
            "it is not reported",
        )
        node.partition(1, [small(0)])
        page = await agent.later()
        assert page.by("gpumap_device_info", "mig_profile", uuid=SMALL[0]) == {"1g.10gb": 1}
        assert page.value("gpumap_device_memory_total_bytes", uuid=SMALL[0]) == 9728 * MIB


@pytest.mark.parametrize("code", [Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.INVALID_ARGUMENT, Code.UNKNOWN])
async def test_a_gpu_that_is_reset_for_its_partitions_costs_itself(node: MigNode, code: int) -> None:
    """While every call on it fails, whatever NVML says, the others are reported; then its new devices are there."""
    node.partition(1, [small(0)])
    async with serve(node) as agent:
        await agent.until(lambda page: SMALL[0] in leaves(page), "the first device does not appear")
        node.driver.fail = {("*", 1): code}
        node.update_driver()
        during = await agent.later()
        assert during.value("gpumap_gpu_up", gpu_uuid=CARD) == 0
        assert during.value("gpumap_gpu_up", gpu_uuid=OTHER) == 1
        assert during.value("gpumap_device_memory_used_bytes", uuid=SMALL[0]) is None
        node.driver.fail = {}
        node.partition(1, [small(1)])
        page = await agent.until(lambda page: SMALL[1] in leaves(page), "the new device does not appear")
        assert SMALL[0] not in uuids(page)


async def test_the_service_ends_where_new_devices_are_hidden(node: MigNode) -> None:
    """Partitions that came after its start, which its container has no device nodes for: one line, and exit code 1."""
    node.partition(1, [small(0)])
    async with serve(node, program=IMPATIENT_GPUMAP) as agent:
        await agent.later(1)
        node.partition(1, [], offered=[HALF])  # NVML lists none of what the plugin offers
        node.driver.gpus[1].mig_mode = True
        node.update_driver()
        code, log = await agent.ended_itself()
    assert code == 1
    assert log.count("mig device hidden") == 1
    assert log.splitlines()[-1] == (
        f"gpumap: {HALF} appeared after gpumap's start, and this container does not have its device nodes: "
        "restarting to get them"
    )


async def test_the_service_ends_where_new_devices_are_denied(node: MigNode) -> None:
    """NVML may list a new device and refuse its memory: that is the same."""
    node.partition(1, [small(0)])
    async with serve(node, program=IMPATIENT_GPUMAP) as agent:
        await agent.later(1)
        node.driver.fail = {("nvmlDeviceGetMemoryInfo_v2", "1.1"): Code.NO_PERMISSION}
        node.partition(1, [small(0), small(1), small(2)])
        code, log = await agent.ended_itself()
    assert code == 1
    assert f"{SMALL[1]} appeared after gpumap's start" in log


async def test_what_was_missing_at_the_start_ends_no_service(node: MigNode) -> None:
    """If gpumap never sees the MIG devices of a node, it goes on: a restart would not bring them."""
    node.driver.fail = {("nvmlDeviceGetMemoryInfo_v2", "1.0"): Code.NO_PERMISSION}
    node.partition(1, [small(0)], offered=[SMALL[0], HALF])
    async with serve(node, program=IMPATIENT_GPUMAP) as agent:
        await agent.later(1)
        await asyncio.sleep(2.0)
        assert not agent.ended
