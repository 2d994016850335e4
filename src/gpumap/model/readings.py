"""What a driver reports of one GPU, as values. Each field is declared here, once: the worker's wire and the captures
follow. No logic.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, NewType, TypeVar

from msgspec import Struct

Uuid = NewType("Uuid", str)
"""NVML's string for a GPU or a MIG device."""

RECOVERY_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
"""By nvml.h's NVML_GPU_RECOVERY_ACTION_*."""
COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
"""By nvml.h's NVML_COMPUTEMODE_*."""
CLOCK_EVENTS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
    "board_limit",
    "reliability",
)
"""Why clocks are lowered, by the number of the bit: nvml.h, nvmlClocksEventReason*, and the two more of
nvmlClocksThrottleReason*."""
CLOCK_EVENT_TIMES = (
    "sw_power_cap",
    "thermal",
    "sync_boost",
    "board_limit",
    "low_utilization",
    "reliability",
    "total_app_clocks",
    "total_base_clocks",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
)
"""Reasons whose time the driver counts: nvml.h, NVML_FI_DEV_PERF_POLICY_* and NVML_FI_DEV_CLOCKS_EVENT_REASON_*."""
ECC_TYPES = ("corrected", "uncorrected")
ECC_LOCATIONS = ("l1_cache", "l2_cache", "dram", "register_file", "texture_memory", "texture_shm", "cbu", "sram")
"""Both by nvml.h's numbers, nvmlMemoryErrorType_t and nvmlMemoryLocation_t."""


PCIE_TOTALS, PCIE_RATES = "totals", "rates"
"""Who counts the bytes over PCIe: the driver, or the NVML worker, by the driver's rates."""

SAMPLES_OLD, SAMPLES_NEW = "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"
"""The calls that give samples of processes. Blackwell GPUs refuse the old one. Drivers before R550 lack the new one."""

CARD = "card"
"""NVML reads it only for dialects: no family of a group of `--collect` shows it."""

# A field of one of these types belongs to a group: the worker asks NVML for it only if the group is on.
T = TypeVar("T")
OfHealth = Annotated[T, "health"]
OfLinks = Annotated[T, "links"]
OfGpm = Annotated[T, "gpm"]
OfCodec = Annotated[T, "codec"]
OfCard = Annotated[T, CARD]


class DeviceMemory(Struct, frozen=True, array_like=True):
    """Bytes. `used` excludes `reserved` if NVML's second version reports it; otherwise `used` is as the driver
    reports it."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None = None


class GpuProcess(Struct, frozen=True, array_like=True):
    """A row of NVML's process lists, each PID once. `types` is "C", "G", "M", "C+G", … as in nvidia-smi."""

    pid: int
    used_memory_bytes: int | None
    types: str


class ProcessSample(Struct, frozen=True, array_like=True):
    """A process's time on a GPU's engines, ratios 0–1, mean over the interval."""

    pid: int
    sm_ratio: float
    memory_controller_ratio: float
    encoder_ratio: float
    decoder_ratio: float
    jpeg_ratio: float = 0.0
    """0 also if the driver's call does not report it, as `ofa_ratio` (`GpuReading.samples_from`)."""
    ofa_ratio: float = 0.0


class Activity(Struct, frozen=True, array_like=True):
    """What GPM measured between two samples, ratios 0-1 of the device's own engines. `None`: not reported."""

    sm_ratio: float | None
    sm_occupancy_ratio: float | None
    tensor_ratio: float | None
    dram_ratio: float | None
    graphics_ratio: float | None = None
    fp64_ratio: float | None = None
    fp32_ratio: float | None = None
    fp16_ratio: float | None = None
    video_ratio: float | None = None
    """Of the busiest video engine: decoder, encoder, JPEG or OFA."""


class MigInstance(Struct, frozen=True, omit_defaults=True):
    """A MIG device. Compute instances of one GPU instance (`gpu_instance_id`) share its memory."""

    uuid: Uuid
    gpu_instance_id: int
    compute_instance_id: int
    profile: str
    compute_slices: int | None
    memory: DeviceMemory | None
    processes: tuple[GpuProcess, ...] | None
    profile_id: int | None = None
    """NVML's number of the GPU instance's profile; kept back, as its place is, from who may not manage instances."""
    placement_start: int | None = None
    placement_size: int | None = None
    denied: bool = False
    """Its memory is kept from us, as it is without its device nodes below /dev/nvidia-caps."""
    activity: Activity | None = None
    """`None` too where several compute instances share the GPU instance, which is what the driver measures."""


class GpuReading(Struct, frozen=True, omit_defaults=True):
    """The answers of NVML for one GPU in one read. With a `fault` only its identity, if known, and the recovery
    action.

    `samples` is `None` if the GPU reports no time of processes: both calls are refused (MIG, vGPU guests, WSL). Its
    rows and those of `processes` come last, so that a person who opens a capture sees the GPU first.
    """

    index: int
    fault: str | None = None
    stuck_seconds: float = 0.0
    uuid: Uuid | None = None
    minor: int | None = None
    pci_bus_id: str = ""
    model: str = ""
    memory: DeviceMemory | None = None
    partitioned: bool = False
    max_mig_devices: int | None = None
    instances: tuple[MigInstance, ...] = ()
    mig_unknown: bool = False
    """Whether it is partitioned, or all of its MIG devices, could not be read: `instances` are those that were."""
    samples_from: str = SAMPLES_OLD
    """The call that gave `samples`: SAMPLES_OLD or SAMPLES_NEW."""
    sampled_seconds: float | None = None
    """The time that `samples` cover and no earlier reading covered. `None`: all since the one before. 0 in an early
    reading: its samples overlap with those before, and the next reading contains them again."""
    utilization_ratio: float | None = None
    memory_controller_ratio: float | None = None
    encoder_ratio: OfCodec[float | None] = None
    decoder_ratio: OfCodec[float | None] = None
    temperatures_celsius: tuple[tuple[str, float], ...] = ()
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    clocks_hertz: OfHealth[tuple[tuple[str, float], ...]] = ()
    """By domain: graphics, sm, memory, video."""
    clock_events: OfHealth[tuple[tuple[str, bool], ...]] = ()
    """Why the clocks may be lowered, and whether they are for that; the reasons that the GPU knows."""
    clock_event_seconds: OfHealth[tuple[tuple[str, float], ...]] = ()
    """How long clocks were lowered, by reason, since the driver began to count."""
    performance_state: OfHealth[int | None] = None
    """0 (fastest) to 15."""
    fan_ratios: OfHealth[tuple[tuple[str, float], ...]] = ()
    """By fan's number; of its intended speed, which may be exceeded."""
    ecc_errors: OfHealth[tuple[tuple[str, str, int], ...]] = ()
    """(corrected or uncorrected, location, count over the GPU's life)."""
    remapped_rows: OfHealth[tuple[tuple[str, int], ...]] = ()
    """By what they were remapped for: correctable or uncorrectable errors."""
    row_remap_pending: OfHealth[bool | None] = None
    row_remap_failure: OfHealth[bool | None] = None
    retired_pages: OfHealth[tuple[tuple[str, int], ...]] = ()
    """By what they were retired for: single_bit_ecc or double_bit_ecc."""
    recovery_action: OfHealth[str | None] = None
    """What the driver asks for, in nvml.h's words (NVML_GPU_RECOVERY_ACTION_*)."""
    ecc_totals: OfCard[tuple[tuple[str, str, int], ...]] = ()
    """(corrected or uncorrected, volatile or aggregate, count): since the driver's load, and over the GPU's life."""
    retired_pages_pending: OfCard[bool | None] = None
    """Whether pages wait for the GPU's next reset to be retired."""
    compute_mode: OfCard[str | None] = None
    """Who may compute on it, in nvml.h's words (NVML_COMPUTEMODE_*)."""
    power_limits_watts: OfCard[tuple[tuple[str, float], ...]] = ()
    """requested, default, min, max; the one that is enforced is `power_limit_watts`."""
    max_clocks_hertz: OfCard[tuple[tuple[str, float], ...]] = ()
    """By domain, as `clocks_hertz`."""
    vbios_version: OfCard[str] = ""
    compute_capability: OfCard[str] = ""
    """CUDA's, "9.0"."""
    pcie_source: OfLinks[str | None] = None
    """PCIE_TOTALS or PCIE_RATES."""
    pcie_transmit_bytes: OfLinks[int | None] = None
    """By GPM. `join.pcie` makes one counter of what either source counts."""
    pcie_receive_bytes: OfLinks[int | None] = None
    nvlink_transmit_bytes: OfLinks[int | None] = None
    nvlink_receive_bytes: OfLinks[int | None] = None
    pcie_replays: OfCard[int | None] = None
    """Packets that were sent once more over PCIe, as the GPU counts."""
    activity: OfGpm[Activity | None] = None
    refusals: tuple[tuple[str, int], ...] = ()
    """Calls that failed other than by "not supported", with NVML's return code."""
    unsampled: tuple[int, ...] = ()
    """PIDs whose samples are all impossible: their time is unknown."""
    samples: tuple[ProcessSample, ...] | None = None
    processes: tuple[GpuProcess, ...] | None = None


class XidError(NamedTuple):
    """An XID event of a GPU. Instances' ids are `None` where it is not a MIG instance's, or kept back from us."""

    uuid: Uuid
    code: int
    gpu_instance_id: int | None
    compute_instance_id: int | None
    age_seconds: float
    """Before the reading that it came with."""
    times: int = 1
    """So many equal ones, the last of them then."""


class Listening(NamedTuple):
    """A period with a registered XID listener on a GPU: none was missed between these two times (seconds before the
    reading).

    A reading has several periods of a GPU if the worker registered again since the reading before. It has none without
    a listener. It has one of zero length, now, if the reason is that the driver is released.
    """

    uuid: Uuid
    since_seconds: float
    until_seconds: float
