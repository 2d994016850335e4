"""The GPUs of the live node, how device plugins offer them, and the variables by which workloads name themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests import standin
from tests.cluster.device_plugin import Allocation, Resource, by_id, gpushare, replicas
from tests.machine import GIB, MIB, gpu_uuid

WHOLE, SHARED, MIG, GPUSHARE = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "aliyun.com/gpu-mem"
GPUS = 21
WHOLE_GPUS = [gpu_uuid(index) for index in range(16)]
SHARED_GPU, MIG_GPU = gpu_uuid(16), gpu_uuid(17)
GPUSHARE_GPUS = {18: (gpu_uuid(18), 16), 19: (gpu_uuid(19), 16)}
FREE_GPU = gpu_uuid(20)
"""No plugin offers it. Workloads that hold nothing use it: an assignment never explains what runs there."""
MIG_DEVICES = [f"MIG-00000000-0000-0000-0000-{number:012d}" for number in range(3)]
BASE_BYTES = 64 * MIB
"""Memory of each device that no process explains."""

# Variables of workloads. A process that has MEMORY_MIB uses so much memory of each device that its container was
# assigned (`device_plugin.ALLOCATION`), or of DEVICE instead.
POD, CONTAINER, INSTANCE = "TEST_POD", "TEST_CONTAINER", "TEST_INSTANCE"
MEMORY_MIB, DEVICE = "TEST_MEMORY_MIB", "TEST_DEVICE"
AGENT = "TEST_AGENT"
"""The name of a gpumap, in its environment."""


def resources() -> Iterator[Resource]:
    """What each plugin offers."""
    yield by_id(WHOLE, WHOLE_GPUS)
    yield replicas(SHARED, SHARED_GPU, 4)
    yield by_id(MIG, MIG_DEVICES)
    yield gpushare(GPUSHARE_GPUS)


NEEDS = {GPUSHARE: frozenset({"checkpoint"})}
"""Only the checkpoint has the plugin's answer, which names the card."""


def leaves() -> dict[str, str]:
    """The GPU of each device."""
    whole = [gpu_uuid(index) for index in range(GPUS) if gpu_uuid(index) != MIG_GPU]
    return {uuid: uuid for uuid in whole} | dict.fromkeys(MIG_DEVICES, MIG_GPU)


def share(allocation: Allocation, leaf: str) -> tuple[int, float]:
    """The slots of an allocation on a device, and the share of the GPU that they are."""
    slots = sum(1 for one in allocation.ids if allocation.resource == GPUSHARE or one.startswith(leaf))
    return slots, {WHOLE: 1.0, SHARED: slots / 4, MIG: 1 / 7, GPUSHARE: slots / 16}[allocation.resource]


class Use(NamedTuple):
    """A process on a device."""

    pid: int
    uuid: str
    memory_bytes: int


def driver(uses: list[Use]) -> standin.Driver:
    """What the driver answers while these processes use its devices."""
    by_device: dict[str, list[standin.Process]] = {}
    for use in uses:
        by_device.setdefault(use.uuid, []).append(standin.Process(use.pid, use.memory_bytes))

    def used(uuid: str) -> int:
        return BASE_BYTES + sum(process.memory_bytes or 0 for process in by_device.get(uuid, ()))

    def gpu(index: int) -> standin.Gpu:
        uuid = gpu_uuid(index)
        processes = by_device.get(uuid, [])
        one = standin.Gpu(uuid, memory_used_bytes=used(uuid), processes=processes)
        one.samples = [standin.Sample(process.pid, sm=10) for process in processes]
        if index in GPUSHARE_GPUS:
            one.name, one.memory_total_bytes = "Tesla V100-SXM2-16GB", GPUSHARE_GPUS[index][1] * GIB
        return one

    gpus = [gpu(index) for index in range(GPUS)]
    partitioned = gpus[17]
    partitioned.instances = [
        standin.MigInstance(uuid, gi=7 + slot, memory_used_bytes=used(uuid), processes=by_device.get(uuid, []))
        for slot, uuid in enumerate(MIG_DEVICES)
    ]
    partitioned.mig_mode = True
    partitioned.memory_used_bytes = sum(used(uuid) for uuid in MIG_DEVICES)
    partitioned.samples = None
    return standin.Driver(gpus=gpus)
