"""A node for each dialect: such as its reference shows. Its page is in tests/dialects (`make golden`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import structs

from gpumap.agent.dialects import DIALECTS
from gpumap.model.names import Source
from gpumap.model.node import Driver, Gpu, GpuXids
from gpumap.model.readings import DeviceMemory, GpuProcess, GpuReading, Uuid
from gpumap.model.snapshot import Snapshot
from tests.dcgm_nodes import sample_node
from tests.dialect_pages import (
    ALONE,
    GIB,
    GOLDEN,
    GPUSHARE,
    PARENT,
    SHARED_1,
    SHARED_2,
    card,
    holder,
    node,
    page,
    process,
    titans,
    used,
)
from tests.snapshots import ACTIVITY, gpu, with_node

# --- arms: reference 002 ----------------------------------------------------------------------------------------------

V100 = "GPU-5a9b1c2d-0000-1111-2222-333344445555"
FIRST, SECOND = ("default", "app-3g-v1-0", "app-3g-v1"), ("default", "app-3g-v1-1", "app-3g-v1")


def hangzhou() -> Snapshot:
    """The node of reference 002: two applications with 4 GiB each of a V100, that use 6396 MiB together."""
    return node(
        "cn-hangzhou.192.168.2.167",
        [card(0, V100, "Tesla V100-SXM2-16GB")],
        [holder(name, V100, used(3198), slots=GPUSHARE, gpus=4 / 15, memory_mib=4096) for name in (FIRST, SECOND)],
        [
            process(4711, V100, 3198, FIRST, "cuda_malloc", 0.0),
            process(4712, V100, 3198, SECOND, "cuda_malloc", 0.07),
        ],
    )


# --- gpu-manager: reference 004 ---------------------------------------------------------------------------------------

T4 = tuple(f"GPU-{index:08d}-1111-2222-3333-444444444444" for index in range(3))
IDLE = ("default", "gpu-test", "gpu-test-container")


def vcuda(cores: int, blocks: int = 0) -> dict[str, int]:
    return {"tencent.com/vcuda-core": cores, **({"tencent.com/vcuda-memory": blocks} if blocks else {})}


def tke() -> Snapshot:
    """The requests of reference 004: half a card with 30 blocks of 256 MiB, and two whole cards; and an idle one."""
    cards = [card(index, uuid, "Tesla T4", 15360) for index, uuid in enumerate(T4)]
    whole = [
        holder(("ml", "two", "c"), uuid, used(memory, sm), slots=vcuda(100), memory_mib=None)
        for uuid, memory, sm in ((T4[1], 9000, 0.9), (T4[2], 8000, 0.75))
    ]
    return node(
        "10.0.0.1",
        cards,
        [
            *whole,
            holder(("ml", "half", "c"), T4[0], used(7000, 0.33), slots=vcuda(50, 30), gpus=0.5, memory_mib=7680),
            holder(IDLE, T4[0], used(0, 0.0, 0), slots=vcuda(10, 4), gpus=0.1, memory_mib=1024),
        ],
    )


# --- the pod gpu metrics exporter: reference 004 ----------------------------------------------------------------------

CARD_0 = "GPU-40f717b2-01dc-1a31-6b17-d487ffe7cb61"
CARD_1 = "GPU-40f717b2-01dc-1a31-6b17-d487ffe7cb91"


def ti() -> Snapshot:
    """The rows of reference 004 that are of the node ti."""
    cards = card(0, CARD_0, "4080ti"), card(1, CARD_1, "2080ti")
    return node("ti", cards, [holder(("default", "test", "c"), CARD_0), holder(("default", "test3", "c"), CARD_1)])


# --- nvidia-smi: the original's docs/METRICS.md -----------------------------------------------------------------------

SUPER = Uuid("GPU-df6e7a7c-7314-46f8-abc4-b88b36dcf3aa")
LOST = Uuid("GPU-11111111-1111-1111-1111-111111111111")


def nvml(snapshot: Snapshot, **record: object) -> Snapshot:
    """With another record of what NVML answered."""
    sources = (structs.replace(one, **record) if one.source == Source.NVML else one for one in snapshot.node.sources)
    return with_node(snapshot, sources=tuple(sources))


def rtx() -> Gpu:
    """The card of the original's docs/METRICS.md: it has a fan, and neither ECC nor rows to remap."""
    reading = GpuReading(
        0,
        uuid=SUPER,
        memory=DeviceMemory(8 * GIB, 706740224, 7883194368, 0),
        processes=(GpuProcess(4242, 499122176, "C+G"),),
        utilization_ratio=0.42,
        memory_controller_busy_ratio=0.02,
        encoder_ratio=0.0,
        decoder_ratio=0.0,
        temperatures_celsius={"gpu": 34.0},
        power_watts=28.07,
        power_limit_watts=250.0,
        energy_joules=12_345.678,
        clocks_hertz={"graphics": 6e6, "sm": 6e6, "memory": 1.6e7, "video": 5.4e8},
        clock_events={"gpu_idle": True, "sw_power_cap": False, "hw_slowdown": False},
        performance_state=8,
        fan_speed_ratios={"0": 0.0, "1": 0.3},
        compute_mode="default",
        power_limits_watts={"requested": 250.0, "default": 250.0, "min": 105.0, "max": 350.0},
        max_clocks_hertz={"graphics": 2.1e9, "sm": 2.1e9, "memory": 7.751e9, "video": 1.95e9},
        vbios_version="90.04.7A.40.73",
        compute_capability="7.5",
    )
    return Gpu(
        SUPER,
        0,
        0,
        "00000000:71:00.0",
        "NVIDIA GeForce RTX 2080 SUPER",
        False,
        None,
        0.0,
        1e9,
        reading,
        recovery_action="none",
    )


def original() -> Snapshot:
    """That card with a process on it, a partitioned one, and one that is lost."""
    instances = (
        structs.replace(SHARED_1, processes=()),
        structs.replace(SHARED_2, processes=()),
        structs.replace(ALONE, processes=(), activity=ACTIVITY),
    )
    parent = card(1, PARENT, "NVIDIA H200", 143771, instances=instances)
    assert parent.reading is not None
    reading = structs.replace(
        parent.reading,
        utilization_ratio=None,
        memory_controller_busy_ratio=None,
        encoder_ratio=None,
        decoder_ratio=None,
        fan_speed_ratios={},
        ecc_totals={"corrected": {"volatile": 1}, "uncorrected": {"volatile": 0, "aggregate": 2}},
        retired_pages_pending=False,
        vbios_version="96.00.A5.00.03",
        compute_capability="9.0",
    )
    parent = structs.replace(parent, reading=reading)
    gone = structs.replace(gpu(2, fault="lost"), uuid=LOST, recovery_action=None)
    made = node("n", [rtx(), parent], processes=[process(4242, SUPER, 476, comm="python")])
    made = nvml(made, up=True, attempts=7, last_success=1751475457.0, failures=1, last_seconds=0.0557)
    return with_node(
        made,
        gpus=(*made.node.gpus, gone),
        driver=Driver("471.11", "11.4", "11.471.11"),
        xids=(GpuXids(LOST, {79: 1}, 0.0, 79, {79: 1751475400.5}),),
    )


SAMPLES: Mapping[str, Callable[[], Snapshot]] = {
    "pod-gpu-map": ti,
    "pod-gpu-map-deprecated": ti,
    "gpu-mem-monitor": titans,
    "cadvisor": titans,
    "gpu-manager": tke,
    "nvidia-smi": original,
    "dcgm": sample_node,
    "dcgm49": sample_node,
    "dcgm-join": sample_node,
    "arms": hangzhou,
}
"""By dialect."""


def write_pages() -> None:
    """Write the page of each again."""
    for name, sample in SAMPLES.items():
        (GOLDEN / f"{name}.prom").write_text(page(DIALECTS[name].families, sample()), encoding="utf-8")
