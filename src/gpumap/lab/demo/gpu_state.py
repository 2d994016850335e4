"""How a simulated card is: clocks and why they are lowered, memory errors, fans, bytes over its links. Pure.

By its model: only Hopper and later have GPM, cards in a server no fans, and cards on PCIe alone no NVLink.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gpumap.lab.demo.counters import Counters
from gpumap.lab.demo.load import CAPPED_SHARE_OF_POWER, is_capped, is_idle, power_watts
from gpumap.lab.demo.scenario_model import GpuSpec
from gpumap.model.readings import CLOCK_EVENT_TIMES, CLOCK_EVENTS, Activity, GpuReading

_HOPPER = re.compile(r"\bG?[HB][12345]\d\d\b")
"""H100, H200, GH200, B200, GB300, …: Hopper and Blackwell."""
_NVLINKED = re.compile(r"SXM|HBM3|NVL|\bG[HB]\d00\b|\bB\d00\b")
_OWN_FANS = re.compile(r"GeForce|RTX|TITAN|Quadro")

MHZ = 1_000_000.0
IDLE_MHZ = 345.0
CLOCK_STEP_MHZ = 15.0
CAPPED_MHZ = 2000.0
"""How fast the clocks fall with the share of the limit that the power takes, above CAPPED_SHARE_OF_POWER."""


class Clocks(NamedTuple):
    """The highest of a model, in MHz."""

    sm: float
    memory: float
    video: float

    def hertz(self) -> tuple[tuple[str, float], ...]:
        """By domain, as NVML has them."""
        return (
            ("graphics", self.sm * MHZ),
            ("sm", self.sm * MHZ),
            ("memory", self.memory * MHZ),
            ("video", self.video * MHZ),
        )


HOPPER = Clocks(1980.0, 2619.0, 1545.0)  # as nvidia-smi has them of an H100 SXM
AMPERE = Clocks(1410.0, 1593.0, 1290.0)  # … of an A100 SXM4 80GB; here of every older model
VBIOS, OLDER_VBIOS = "96.00.A5.00.03", "92.00.36.00.02"
LEAST_POWER_WATTS = 100.0
"""The lowest limit that a card can be set to."""

KNOWN_EVENTS = CLOCK_EVENTS[:8]
"""Those that a simulated card knows."""
COUNTED_TIMES = tuple(reason for reason in CLOCK_EVENT_TIMES if not reason.startswith("total_"))


def is_hopper(model: str) -> bool:
    """Whether a card has GPM: Hopper, or later."""
    return _HOPPER.search(model) is not None


def with_health(reading: GpuReading, gpu: GpuSpec, load: float, counted: Counters, seconds: float) -> GpuReading:
    """What is told for the group of families `health`."""
    capped, idle = is_capped(gpu, load), is_idle(load)
    has_process = bool(reading.processes) or any(instance.processes for instance in reading.instances)
    events = {"gpu_idle": idle, "sw_power_cap": capped}
    lasted = {"low_utilization": counted.idle_seconds, "sw_power_cap": counted.capped_seconds}
    has_fans = _has_fans(gpu)
    reading = reading._replace(
        clocks_hertz=_clocks(gpu, load),
        clock_events=tuple((reason, events.get(reason, False)) for reason in KNOWN_EVENTS),
        clock_event_seconds=tuple((reason, round(lasted.get(reason, 0.0), 3)) for reason in COUNTED_TIMES),
        performance_state=0 if has_process else 8,
        fan_ratios=(("0", round(0.3 + 0.5 * load, 2)),) if has_fans else (),
        recovery_action="none",
    )
    return reading if has_fans else _with_memory_errors(reading, gpu, seconds)


def with_card(reading: GpuReading, gpu: GpuSpec, seconds: float) -> GpuReading:
    """What is told for the group `card`; nobody has set another power limit than its default."""
    hopper = is_hopper(gpu.model)
    watts = gpu.power_limit_watts
    limits = {"requested": watts, "default": watts, "min": min(LEAST_POWER_WATTS, watts), "max": watts}
    return reading._replace(
        power_limits_watts=tuple(limits.items()),
        max_clocks_hertz=_top(gpu).hertz(),
        vbios_version=VBIOS if hopper else OLDER_VBIOS,
        compute_capability="9.0" if hopper else "8.0",
        compute_mode="default",
        ecc_totals=() if _has_fans(gpu) else _ecc_totals(gpu, seconds),
        pcie_replays=0,
    )


def _has_fans(gpu: GpuSpec) -> bool:
    return _OWN_FANS.search(gpu.model) is not None


def _ecc_totals(gpu: GpuSpec, seconds: float) -> tuple[tuple[str, str, int], ...]:
    grown = _grown(gpu, seconds)
    return (
        ("corrected", "volatile", grown),
        ("uncorrected", "volatile", 0),
        ("corrected", "aggregate", gpu.ecc.corrected + grown),
        ("uncorrected", "aggregate", gpu.ecc.uncorrected),
    )


def _top(gpu: GpuSpec) -> Clocks:
    return HOPPER if is_hopper(gpu.model) else AMPERE


def _clocks(gpu: GpuSpec, load: float) -> tuple[tuple[str, float], ...]:
    top = _top(gpu)
    over = max(0.0, power_watts(gpu, load) / gpu.power_limit_watts - CAPPED_SHARE_OF_POWER)
    lowered = CLOCK_STEP_MHZ * round(over * CAPPED_MHZ / CLOCK_STEP_MHZ)
    sm, video = (IDLE_MHZ, IDLE_MHZ) if is_idle(load) else (top.sm - lowered, top.video)
    return Clocks(sm, top.memory, video).hertz()


def _with_memory_errors(reading: GpuReading, gpu: GpuSpec, seconds: float) -> GpuReading:
    """Cards in a server have ECC, and spare rows for what it cannot mend."""
    rows, grown = gpu.remapped_rows, _grown(gpu, seconds)
    return reading._replace(
        ecc_errors=(
            ("corrected", "sram", 0),
            ("corrected", "dram", gpu.ecc.corrected + grown),
            ("uncorrected", "sram", 0),
            ("uncorrected", "dram", gpu.ecc.uncorrected),
        ),
        remapped_rows=(("correctable", rows.correctable), ("uncorrectable", rows.uncorrectable)),
        row_remap_pending=rows.pending,
        row_remap_failure=rows.failure,
    )


def _grown(gpu: GpuSpec, seconds: float) -> int:
    """Errors that were corrected since the play began."""
    every = gpu.ecc.corrected_every
    return 0 if every is None else int(max(seconds, 0.0) / every)


def with_links(reading: GpuReading, gpu: GpuSpec, counted: Counters) -> GpuReading:
    """What is told for the group of families `links`."""
    over_nvlink = int(counted.nvlink_bytes) // 1024 * 1024 if _NVLINKED.search(gpu.model) else None  # NVML counts KiB
    return reading._replace(
        pcie_transmit_bytes=int(counted.pcie_transmit_bytes),
        pcie_receive_bytes=int(counted.pcie_receive_bytes),
        nvlink_transmit_bytes=over_nvlink,
        nvlink_receive_bytes=over_nvlink,
    )


def activity(load: float, memory_load: float) -> Activity:
    """What GPM measures of a device, whole or MIG, that computes so much."""
    return Activity(
        sm_ratio=round(0.88 * load, 4),
        sm_occupancy_ratio=round(0.46 * load, 4),
        tensor_ratio=round(0.52 * load, 4),
        dram_ratio=round(0.9 * min(memory_load, 1.0), 4),
    )
