"""The state of a simulated GPU: its load and power, what it counts, clocks, memory errors, fans and links. Pure.

It depends on the model: only Hopper and later have GPM, GPUs in a server have no fans, and GPUs with PCIe only have no
NVLink.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec import structs

from gpumap.lab.demo.scenario_model import Fault, Gpu, Leaf, Process, Scenario, ratio_at
from gpumap.lab.demo.schedule import play_of
from gpumap.model.readings import (
    CLOCK_EVENT_TIMES,
    CLOCK_EVENTS,
    NVLINK_ERRORS,
    PCIE_RATES,
    Activity,
    Fabric,
    GpuReading,
)

# --- load and power ---------------------------------------------------------------------------------------------------

SLICES = 7
"""Of a card with MIG devices."""
IDLE_SHARE_OF_POWER = 0.12
FULL_SHARE_OF_POWER = 0.96
CAPPED_SHARE_OF_POWER = 0.93
"""From here on the driver lowers clocks, to stay below the limit."""


def fault_at(gpu: Gpu, moment: float) -> Fault | None:
    """What is wrong with a GPU at a time of the play."""
    return next((fault for fault in gpu.faults if fault.start <= moment < fault.end), None)


def working(specs: Sequence[Process]) -> list[Process]:
    """Those that do not hang: the others keep a card busy, but need neither power nor memory traffic."""
    return [spec for spec in specs if not spec.hangs]


def load_of_leaf(leaf: Leaf, moment: float, specs: Sequence[Process]) -> float:
    """The share of a device, whole or MIG, that computes."""
    return min(1.0, sum(ratio_at(spec.sm, moment) for spec in specs if leaf in spec.leaves))


def load_of_gpu(gpu: Gpu, moment: float, specs: Sequence[Process]) -> float:
    """The share of a card that computes; on a MIG GPU a device counts as much as its slices."""
    if not gpu.mig:
        return load_of_leaf(Leaf(gpu.index), moment, specs)
    return sum(
        load_of_leaf(Leaf(gpu.index, number), moment, specs) * (device.compute_slices or 0) / SLICES
        for number, device in enumerate(gpu.devices)
    )


def power_watts(gpu: Gpu, load: float) -> float:
    return gpu.power_limit_watts * (IDLE_SHARE_OF_POWER + (FULL_SHARE_OF_POWER - IDLE_SHARE_OF_POWER) * load)


def is_idle(load: float) -> bool:
    """Nothing computes."""
    return load < 0.005  # as NVML's percents round it


def is_capped(gpu: Gpu, load: float) -> bool:
    """The power is near its limit."""
    return power_watts(gpu, load) >= CAPPED_SHARE_OF_POWER * gpu.power_limit_watts


# --- counters ---------------------------------------------------------------------------------------------------------

STEPS = 600
"""Of a play, in each of which a card does the same all the time."""
BEFORE_JOULES = 1_000_000.0
BEFORE_SECONDS = 3600.0
"""The driver was loaded a while before the demo began, and the cards were idle then."""

IDLE_PCIE_BYTES_PER_SECOND = 20e3
PCIE_TRANSMIT_BYTES_PER_SECOND = 0.6e9
PCIE_RECEIVE_BYTES_PER_SECOND = 1.4e9
NVLINK_BYTES_PER_SECOND = 60e9
"""At full load; over NVLink by processes that use several cards."""


class Counters(NamedTuple):
    """Since the driver was loaded; or, of a moment, by the second."""

    joules: float
    idle_seconds: float
    capped_seconds: float
    pcie_transmit_bytes: float
    pcie_receive_bytes: float
    nvlink_bytes: float


def counters(scenario: Scenario, gpu: Gpu, seconds: float) -> Counters:
    play, moment = play_of(scenario, seconds)
    times, sums = _of_play(scenario, gpu.index)
    right = min(bisect.bisect_right(times, moment), len(times) - 1)
    left = right - 1
    share = (moment - times[left]) / (times[right] - times[left])
    ending = sums[-1]
    before = (BEFORE_JOULES * (gpu.index + 1), BEFORE_SECONDS, 0.0, 0.0, 0.0, 0.0)
    return Counters(
        *(
            first + play * whole + early + (late - early) * share
            for first, whole, early, late in zip(before, ending, sums[left], sums[right], strict=True)
        )
    )


@lru_cache(maxsize=256)
def _of_play(scenario: Scenario, index: int) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """What was counted by a time of the play, at STEPS times of it."""
    gpu = scenario.gpus[index]
    specs: list[Process] = [*scenario.host_processes]
    specs += [spec for pod in scenario.pods for container in pod.containers for spec in container.processes]
    specs = [spec for spec in specs if any(leaf.gpu == index for leaf in spec.leaves)]
    step = scenario.repeat_seconds / STEPS
    rates = (_rates(gpu, (number + 0.5) * step, specs) for number in range(STEPS))
    sums = itertools.accumulate(
        rates,
        lambda sum_, rate: tuple(one + step * more for one, more in zip(sum_, rate, strict=True)),
        initial=(0.0,) * len(Counters._fields),
    )
    return tuple(number * step for number in range(STEPS + 1)), tuple(sums)


def _rates(gpu: Gpu, moment: float, specs: Sequence[Process]) -> tuple[float, ...]:
    """By the second."""
    alive = [spec for spec in specs if spec.runs_at(moment)]
    work = load_of_gpu(gpu, moment, working(alive))
    apart = (spec for spec in working(alive) if len({leaf.gpu for leaf in spec.leaves}) > 1)
    linked = min(1.0, sum(ratio_at(spec.sm, moment) for spec in apart))
    return Counters(
        joules=power_watts(gpu, work),
        idle_seconds=float(is_idle(load_of_gpu(gpu, moment, alive))),
        capped_seconds=float(is_capped(gpu, work)),
        pcie_transmit_bytes=IDLE_PCIE_BYTES_PER_SECOND + PCIE_TRANSMIT_BYTES_PER_SECOND * work,
        pcie_receive_bytes=IDLE_PCIE_BYTES_PER_SECOND + PCIE_RECEIVE_BYTES_PER_SECOND * work,
        nvlink_bytes=NVLINK_BYTES_PER_SECOND * linked,
    )


# --- clocks, memory errors, fans, links -------------------------------------------------------------------------------

_HOPPER = re.compile(r"\bG?[HB][12345]\d\d\b")
"""H100, H200, GH200, B200, GB300, …: Hopper and Blackwell."""
_BLACKWELL = re.compile(r"\bG?B[123]\d\d?\b|Blackwell|RTX 50\d\d")
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

    def hertz(self) -> dict[str, float]:
        """By domain, as NVML has them."""
        megahertz = {"graphics": self.sm, "sm": self.sm, "memory": self.memory, "video": self.video}
        return {domain: value * MHZ for domain, value in megahertz.items()}


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


def is_blackwell(model: str) -> bool:
    """Whether the driver refuses the old call for process samples."""
    return _BLACKWELL.search(model) is not None


def with_health(
    reading: GpuReading, gpu: Gpu, load: float, work: float, counted: Counters, seconds: float
) -> GpuReading:
    """Add the values of the group of families `health`. `work` is the load without processes that hang."""
    capped, idle = is_capped(gpu, work), is_idle(load)
    has_process = bool(reading.processes) or any(instance.processes for instance in reading.instances)
    events = {"gpu_idle": idle, "sw_power_cap": capped}
    lasted = {"low_utilization": counted.idle_seconds, "sw_power_cap": counted.capped_seconds}
    has_fans = _has_fans(gpu)
    reading = structs.replace(
        reading,
        clocks_hertz=_clocks(gpu, load, work),
        clock_events={reason: events.get(reason, False) for reason in KNOWN_EVENTS},
        clock_event_seconds={reason: round(lasted.get(reason, 0.0), 3) for reason in COUNTED_TIMES},
        performance_state=0 if has_process else 8,
        fan_speed_ratios={"0": round(0.3 + 0.5 * work, 2)} if has_fans else {},
        recovery_action="none",
    )
    return reading if has_fans else _with_memory_errors(reading, gpu, seconds)


def with_card(reading: GpuReading, gpu: Gpu, seconds: float) -> GpuReading:
    """Add the values of the group `card`. The power limit is the default one."""
    hopper = is_hopper(gpu.model)
    watts = float(gpu.power_limit_watts)
    return structs.replace(
        reading,
        power_limits_watts={"requested": watts, "default": watts, "min": min(LEAST_POWER_WATTS, watts), "max": watts},
        max_clocks_hertz=_top(gpu).hertz(),
        vbios_version=VBIOS if hopper else OLDER_VBIOS,
        compute_capability="9.0" if hopper else "8.0",
        compute_mode="default",
        ecc_totals={} if _has_fans(gpu) else _ecc_totals(gpu, seconds),
        pcie_replays=0,
    )


def _has_fans(gpu: Gpu) -> bool:
    return _OWN_FANS.search(gpu.model) is not None


def _ecc_totals(gpu: Gpu, seconds: float) -> dict[str, dict[str, int]]:
    grown = _grown(gpu, seconds)
    return {
        "corrected": {"volatile": grown, "aggregate": gpu.ecc.corrected + grown},
        "uncorrected": {"volatile": 0, "aggregate": gpu.ecc.uncorrected},
    }


def _top(gpu: Gpu) -> Clocks:
    return HOPPER if is_hopper(gpu.model) else AMPERE


def _clocks(gpu: Gpu, load: float, work: float) -> dict[str, float]:
    top = _top(gpu)
    over = max(0.0, power_watts(gpu, work) / gpu.power_limit_watts - CAPPED_SHARE_OF_POWER)
    lowered = CLOCK_STEP_MHZ * round(over * CAPPED_MHZ / CLOCK_STEP_MHZ)
    sm, video = (IDLE_MHZ, IDLE_MHZ) if is_idle(load) else (top.sm - lowered, top.video)
    return Clocks(sm, top.memory, video).hertz()


def _with_memory_errors(reading: GpuReading, gpu: Gpu, seconds: float) -> GpuReading:
    """Cards in a server have ECC, and spare rows for what it cannot mend."""
    rows, grown = gpu.remapped_rows, _grown(gpu, seconds)
    return structs.replace(
        reading,
        ecc_errors={
            "corrected": {"sram": 0, "dram": gpu.ecc.corrected + grown},
            "uncorrected": {"sram": 0, "dram": gpu.ecc.uncorrected},
        },
        remapped_rows={"correctable": rows.correctable, "uncorrectable": rows.uncorrectable},
        row_remap_pending=rows.pending,
        row_remap_failure=rows.failure,
    )


def _grown(gpu: Gpu, seconds: float) -> int:
    """Errors that were corrected since the play began."""
    every = gpu.ecc.corrected_every
    return 0 if every is None else int(max(seconds, 0.0) / every)


def with_links(reading: GpuReading, gpu: Gpu, counted: Counters) -> GpuReading:
    """Add the values of the group of families `links`. PCIe comes from GPM, which measures no partitioned GPU."""
    nvlinked, hopper = _NVLINKED.search(gpu.model) is not None, is_hopper(gpu.model)
    over_nvlink = int(counted.nvlink_bytes) // 1024 * 1024 if nvlinked else None  # NVML counts KiB
    if hopper and not gpu.mig:
        reading = structs.replace(
            reading,
            pcie_source=PCIE_RATES,
            pcie_transmit_bytes=int(counted.pcie_transmit_bytes),
            pcie_receive_bytes=int(counted.pcie_receive_bytes),
        )
    return structs.replace(
        reading,
        nvlink_transmit_bytes=over_nvlink,
        nvlink_receive_bytes=over_nvlink,
        nvlink_errors=dict.fromkeys(NVLINK_ERRORS, 0) if nvlinked and not is_blackwell(gpu.model) else {},
        fabric=Fabric("completed", "success") if nvlinked and hopper else None,
    )


def activity(load: float, memory_load: float, video_load: float) -> Activity:
    """Return what GPM measures of a device, whole or MIG. `video_load` is that of its busiest video engine."""
    return Activity(
        sm_ratio=round(0.88 * load, 4),
        sm_occupancy_ratio=round(0.46 * load, 4),
        tensor_ratio=round(0.52 * load, 4),
        dram_ratio=round(0.9 * min(memory_load, 1.0), 4),
        graphics_ratio=round(load, 4),
        fp64_ratio=0.0,
        fp32_ratio=round(0.14 * load, 4),
        fp16_ratio=round(0.06 * load, 4),
        video_ratio=round(min(video_load, 1.0), 4),
    )
