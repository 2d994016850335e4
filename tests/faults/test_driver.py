"""The NVIDIA driver: faults of GPUs, and answers that no driver should give."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

import pytest

from tests.faults.matrix import Fault, counts, fault_of, is_down, is_up, suffer
from tests.faults.site import Inject, Site, Sites, Start, injects
from tests.machine import GIB, MIB, gpu_uuid
from tests.standin import Code, Driver, MigInstance, Process, Sample

pytestmark = pytest.mark.asyncio(loop_scope="module")
PART = "Driver"
SHARED, CARD, IDLE = (f'uuid="{gpu_uuid(index)}"' for index in range(3))
"""Of GPU 0, of GPU 1 that `whole` holds, and of GPU 2 that `idle` holds."""
ALL_ONES, ALL_ONES_64 = 2**32 - 1, 2**64 - 1
"""nvml.h, NVML_VALUE_NOT_AVAILABLE: -1 of the type."""
IMPATIENT = Start(deadline_seconds=1.0)
EVERY_VALUE = Start(flags=("--collect", "all"))


OTHERS = (
    "gpumap_allocation_info unchanged",
    'gpumap_container_gpu_memory_used_bytes{pod="left"} unchanged',
    f"gpumap_device_memory_used_by_owner_bytes{{{SHARED}}} unchanged",
    f"gpumap_device_memory_used_bytes{{{IDLE}}} unchanged",
)
"""What concerns other GPUs, and all allocations."""
NOT_MEASURED = (
    'gpumap_container_gpu_memory_used_bytes{pod="whole"} absent',
    f"gpumap_device_memory_used_bytes{{{CARD}}} absent",
    f"gpumap_gpu_power_watts{{gpu_{CARD}}} absent",
)
ALL_AS_BEFORE = (
    "gpumap_allocation_info unchanged",
    "gpumap_container_gpu_memory_used_bytes unchanged",
    "gpumap_device_memory_used_by_owner_bytes unchanged",
)
UP = is_up("nvml")
up_fault = partial(fault_of, PART, UP)


def errors(reason: str) -> str:
    return counts("nvml", reason)


@injects
async def answers(site: Site, change: Callable[[Driver], None]) -> AsyncIterator[None]:
    """The driver answers otherwise."""
    node = site.node
    kept, node.driver = node.driver, copy.deepcopy(node.driver)
    change(node.driver)
    node.update_driver()
    yield
    node.driver = kept
    node.update_driver()


def card(index: int = 1, **values: object) -> Inject:
    """A GPU answers with these values."""

    def change(driver: Driver) -> None:
        for name, value in values.items():
            assert hasattr(driver.gpus[index], name), name
            setattr(driver.gpus[index], name, value)

    return answers(change)


def refuses(rules: Mapping[tuple[str, int | str], int]) -> Inject:
    return answers(lambda driver: driver.fail.update(rules))


def hangs(call: str, target: int | str) -> Inject:
    return answers(lambda driver: driver.delay.update({(call, target): float("inf")}))


def at_fault(fault: str, code: int, reason: str) -> Fault:
    """Every call on GPU 1 is refused with this code."""
    return up_fault(
        f"{fault}: each call on it returns {int(code)}",
        refuses({("*", 1): code}),
        f"gpumap_gpu_up{{gpu_{CARD}}} 0",
        f'gpumap_gpu_fault_info{{gpu_{CARD},reason="{reason}"}} 1',
        *NOT_MEASURED,
        *OTHERS,
        metrics=(errors(reason),),
        log=(f"gpu down uuid={gpu_uuid(1)} index=1 reason={reason}",),
    )


GPUS = (
    at_fault("a GPU is lost", Code.GPU_IS_LOST, "lost"),
    at_fault("a GPU is not found any more", 28, "lost"),
    at_fault("a GPU needs a reset", Code.RESET_REQUIRED, "reset_required"),
    at_fault("a GPU has too little power", 8, "insufficient_power"),
    at_fault("a GPU has an interrupt problem", 11, "irq_issue"),
    at_fault("the process may not read a GPU", Code.NO_PERMISSION, "no_permission"),
    at_fault("a GPU has an unknown error", Code.UNKNOWN, "unknown"),
    up_fault(
        "a call on one GPU never returns",
        hangs("nvmlDeviceGetMemoryInfo_v2", 1),
        f'gpumap_gpu_fault_info{{gpu_{CARD},reason="hung"}} 1',
        *NOT_MEASURED,
        *OTHERS,
        metrics=(
            errors("hung"),
            f"gpumap_nvml_stuck_seconds{{gpu_{CARD}}} present",
        ),
        log=(f"gpu down uuid={gpu_uuid(1)} index=1 reason=hung",),
        recovers=2,
        start=IMPATIENT,
    ),
)

# --- the whole driver -------------------------------------------------------------------------------------------------


def unloaded(code: int) -> Callable[[Driver], None]:
    def change(driver: Driver) -> None:
        driver.fail["nvmlDeviceGetCount_v2", "*"] = Code.UNINITIALIZED
        driver.init_code = code

    return change


@contextlib.asynccontextmanager
async def hangs_at_start(site: Site) -> AsyncIterator[None]:
    """A worker is ended, and NVML never answers the next one."""
    async with hangs("nvmlInitWithFlags", "*")(site):
        for pid in site.agent.children():
            os.kill(pid, signal.SIGKILL)
        yield


DOWN = (
    "gpumap_gpu_up absent",
    "gpumap_device_memory_used_bytes absent",
    "gpumap_container_gpu_memory_used_bytes absent",
    "gpumap_container_unassigned_use absent",
    "gpumap_allocation_info unchanged",
    "/readyz 200",
)


def down(reason: str) -> tuple[str, str]:
    return is_down("nvml", reason)


DRIVER = (
    Fault(
        PART,
        "the driver is unloaded",
        answers(unloaded(Code.DRIVER_NOT_LOADED)),
        page=DOWN,
        self_metrics=down("driver_not_loaded"),
        log=("source=nvml reason=driver_not_loaded detail='nvmlInitWithFlags said 9 (driver_not_loaded)'",),
    ),
    Fault(
        PART,
        "the driver is upgraded, and the loaded library does not match it",
        answers(unloaded(Code.LIB_RM_VERSION_MISMATCH)),
        page=DOWN,
        self_metrics=down("driver_version_mismatch"),
        log=("source=nvml reason=driver_version_mismatch",),
    ),
    Fault(
        PART,
        "NVML counts 4,294,967,295 GPUs",
        answers(lambda driver: setattr(driver, "count", ALL_ONES)),
        page=DOWN,
        self_metrics=down("unknown"),
        log=("source down source=nvml reason=unknown detail='nvmlDeviceGetCount_v2 said 999 (unknown)'",),
    ),
    Fault(
        PART,
        "the first call of NVML never returns",
        hangs_at_start,
        page=DOWN,
        self_metrics=down("deadline_exceeded"),
        log=("source down source=nvml reason=deadline_exceeded detail='NVML has not answered for …",),
        recovers=2,
        start=IMPATIENT,
    ),
    up_fault(
        "the list of compute processes is not supported for a while",
        refuses({("nvmlDeviceGetComputeRunningProcesses_v3", "*"): Code.NOT_SUPPORTED}),
        "gpumap_container_gpu_memory_used_bytes absent",
        "gpumap_device_processes absent",
        "gpumap_device_memory_used_bytes unchanged",
        "gpumap_allocation_info unchanged",
        metrics=(errors("not_supported"),),
        log=("source complains source=nvml reason=not_supported",),
        recovers=30,
    ),
)

# --- answers that no driver should give -------------------------------------------------------------------------------

IDENTITY_LOST = (
    f'gpumap_gpu_fault_info{{gpu_{CARD},reason="unknown"}} 1',
    'gpumap_unmatched_slots{pod="whole"} absent',
    *NOT_MEASURED,
    *OTHERS,
)


def no_identity(fault: str, uuid: str) -> Fault:
    return up_fault(
        fault,
        card(uuid=uuid),
        *IDENTITY_LOST,
        metrics=(errors("unknown"),),
        log=(f"gpu down uuid={gpu_uuid(1)} index=1 reason=unknown",),
        recovers=3,
    )


def lists(*pids: int) -> Inject:
    """GPU 2 lists these PIDs. Its holder is idle."""
    return card(2, processes=[Process(pid, MIB) for pid in pids], samples=[Sample(pid, sm=5) for pid in pids])


@contextlib.asynccontextmanager
async def partitioned_within_a_read(site: Site) -> AsyncIterator[None]:
    """MIG mode is off when a reading of GPU 2 begins, and on after its first call."""

    def change(driver: Driver) -> None:
        changed = copy.deepcopy(driver)
        changed.gpus[2].mig_mode = True
        changed.gpus[2].instances = [MigInstance("MIG-1", gi=1), MigInstance("MIG-2", gi=2)]
        driver.then = ("nvmlDeviceGetMigMode", 2), changed

    site.node.driver.gpus[2].mig_mode = False
    site.node.update_driver()
    for pid in site.agent.children():
        os.kill(pid, signal.SIGKILL)  # the next worker learns that the GPU can be partitioned
    await site.agent.later(2)
    async with answers(change)(site):
        yield


ODD_ANSWERS = (
    no_identity("a GPU's uuid is not UTF-8", "GPU-\udcff\udcfe"),
    no_identity("a GPU's uuid is empty", ""),
    up_fault(
        "two GPUs have one uuid",
        card(2, uuid=gpu_uuid(1), handle=2),
        'gpumap_gpu_without_device_info{index="2",reason="unknown"} 1',
        'gpumap_unmatched_slots{pod="idle",reason="device_down"} 1',
        'gpumap_container_gpu_memory_used_bytes{pod="whole"} unchanged',
        f"gpumap_device_memory_used_by_owner_bytes{{{CARD}}} unchanged",
        'gpumap_container_gpu_memory_used_bytes{pod="idle"} absent',
        log=("gpus changed count=2",),
        recovers=3,
    ),
    up_fault(
        "a GPU's uuid changes",
        card(uuid="GPU-11111111-0000-0000-0000-000000000001"),
        'gpumap_unmatched_slots{pod="whole",reason="not_in_nvml"} 1',
        'gpumap_container_unassigned_use{pod="whole"} absent',
        'gpumap_device_memory_used_by_owner_bytes{uuid="GPU-11111111-0000-0000-0000-000000000001",'
        'owner="unassigned"} 0',
        f"gpumap_device_memory_used_by_owner_bytes{{{SHARED}}} unchanged",
        log=("gpus changed count=3",),
        recovers=3,
    ),
    up_fault("the text of a GPU's name has no end", card(name="(unterminated)", uuid=gpu_uuid(1)), *ALL_AS_BEFORE),
    up_fault(
        "a GPU lists the PIDs 0, 1, 2147483648 and 4294967295",
        lists(0, 1, 2**31, ALL_ONES),
        f'gpumap_device_processes{{{IDLE},owner="unknown"}} 4',
        f'gpumap_device_memory_used_by_owner_bytes{{{IDLE},owner="unknown"}} {4 * MIB}',
        'gpumap_container_gpu_memory_used_bytes{pod="idle"} absent',
        'gpumap_container_gpu_memory_used_bytes{pod="whole"} unchanged',
        'gpumap_container_unassigned_use{pod="whole"} absent',
    ),
    up_fault(
        "a GPU lists 20,000 processes that do not exist",
        lists(*range(1_000_000, 1_020_000)),
        f'gpumap_device_processes{{{IDLE},owner="unknown"}} 20000',
        'gpumap_container_gpu_memory_used_bytes{pod="idle"} absent',
        'gpumap_container_gpu_memory_used_bytes{pod="whole"} unchanged',
        "/healthz 200",
    ),
    up_fault("a GPU counts more process rows than it writes", card(garbage_rows=5), *ALL_AS_BEFORE),
    up_fault(
        "a GPU counts 4,294,967,290 process rows",
        card(garbage_rows=ALL_ONES - 7),
        'gpumap_container_gpu_memory_used_bytes{pod="whole"} absent',
        f"gpumap_device_processes{{{CARD}}} absent",
        f"gpumap_device_memory_used_bytes{{{CARD}}} unchanged",
        *OTHERS,
        metrics=(errors("insufficient_size"),),
        log=("source complains source=nvml reason=insufficient_size",),
    ),
    up_fault(
        "a GPU's memory is -1, the mark of no value",
        card(memory_total_bytes=ALL_ONES_64, memory_used_bytes=ALL_ONES_64, memory_reserved_bytes=ALL_ONES_64),
        f"gpumap_device_memory_total_bytes{{{CARD}}} absent",
        f"gpumap_device_memory_free_bytes{{{CARD}}} absent",
        f"gpumap_device_memory_used_bytes{{{CARD}}} absent",
        'gpumap_container_allocated_gpu_memory_bytes{pod="whole"} absent',
        'gpumap_container_gpu_memory_used_bytes{pod="whole"} unchanged',
        *OTHERS,
    ),
    up_fault(
        "a GPU uses more memory than it has",
        card(memory_used_bytes=90 * GIB),
        f"gpumap_device_memory_free_bytes{{{CARD}}} absent",
        f"gpumap_device_memory_used_bytes{{{CARD}}} absent",
        *OTHERS,
    ),
    up_fault(
        "power, energy, temperature and utilization are -1, the mark of no value",
        card(
            power_milliwatts=ALL_ONES,
            energy_millijoules=ALL_ONES_64,
            temperature_celsius=ALL_ONES,
            memory_temperature_celsius=ALL_ONES,
            utilization_gpu=ALL_ONES,
            utilization_memory=ALL_ONES,
            encoder_utilization=ALL_ONES,
        ),
        f"gpumap_gpu_power_watts{{gpu_{CARD}}} absent",
        f"gpumap_gpu_energy_joules_total{{gpu_{CARD}}} absent",
        f"gpumap_gpu_temperature_celsius{{gpu_{CARD}}} absent",
        f"gpumap_gpu_utilization_ratio{{gpu_{CARD}}} absent",
        f"gpumap_gpu_memory_controller_busy_ratio{{gpu_{CARD}}} absent",
        f"gpumap_gpu_encoder_utilization_ratio{{gpu_{CARD}}} absent",
        *ALL_AS_BEFORE,
        start=EVERY_VALUE,
    ),
    up_fault(
        "the memory's temperature is not a number",
        card(fields={82: ("double", float("nan"))}),
        f'gpumap_gpu_temperature_celsius{{gpu_{CARD},sensor="memory"}} absent',
        *ALL_AS_BEFORE,
    ),
    up_fault(
        "NVML refuses the version of a structure that it knew before",
        refuses({("nvmlDeviceGetMemoryInfo_v2", 1): Code.ARGUMENT_VERSION_MISMATCH}),
        f"gpumap_device_memory_used_bytes{{{CARD}}} absent",
        *OTHERS,
        metrics=(errors("argument_version_mismatch"),),
        log=("source complains source=nvml reason=argument_version_mismatch",),
        recovers=30,
    ),
    up_fault(
        "a GPU is partitioned while it is read",
        partitioned_within_a_read,
        'gpumap_device_info{uuid="MIG-1"} 1',
        'gpumap_device_info{uuid="MIG-2"} 1',
        f"gpumap_device_memory_used_bytes{{{IDLE}}} absent",
        'gpumap_allocation_info{pod="idle"} unchanged',
        'gpumap_container_gpu_memory_used_bytes{pod="whole"} unchanged',
        f"gpumap_device_memory_used_by_owner_bytes{{{SHARED}}} unchanged",
        log=("worker_crashed",),
        recovers=3,
    ),
)


@pytest.mark.parametrize("fault", [*GPUS, *DRIVER, *ODD_ANSWERS], ids=str)
async def test_the_driver(fault: Fault, sites: Sites) -> None:
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)
