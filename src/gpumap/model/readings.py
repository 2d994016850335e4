"""What the driver reports for one GPU in one read, as values without logic.

The NVML worker fills these structs, and the service reads them from the worker's pipe. Captures store them. Each field
is declared only here. `None`, or a key that a mapping lacks, means: the driver does not report it. The mappings, too,
do not change after the reading.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, NewType, TypeVar, get_args

from msgspec import Meta, Struct, structs

Uuid = NewType("Uuid", str)
"""NVML's string for a GPU or a MIG device."""

RecoveryAction = Literal[
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
]
RECOVERY_ACTIONS: tuple[str, ...] = get_args(RecoveryAction)
"""In the order of nvml.h's NVML_GPU_RECOVERY_ACTION_*."""
COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
"""In the order of nvml.h's NVML_COMPUTEMODE_*."""
VIRTUALIZATION_MODES = ("none", "passthrough", "vgpu", "host_vgpu", "host_vsga")
"""In the order of nvml.h's NVML_GPU_VIRTUALIZATION_MODE_*."""
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
"""Reasons for lower clocks, in the order of the bits of nvml.h: nvmlClocksEventReason*, and two more of
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
"""Reasons for which the driver counts the time: nvml.h, NVML_FI_DEV_PERF_POLICY_* and
NVML_FI_DEV_CLOCKS_EVENT_REASON_*."""
ECC_TYPES = ("corrected", "uncorrected")
ECC_LOCATIONS = ("l1_cache", "l2_cache", "dram", "register_file", "texture_memory", "texture_shm", "cbu", "sram")
"""In the order of nvml.h's nvmlMemoryErrorType_t and nvmlMemoryLocation_t."""
NVLINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data")
"""In the order of nvml.h's nvmlNvLinkErrorCounter_t."""
FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")
"""In the order of nvml.h's NVML_GPU_FABRIC_STATE_*."""

PCIE_TOTALS, PCIE_RATES = "totals", "rates"
"""What counts the bytes over PCIe: the driver (totals), or the NVML worker, which integrates the driver's rates."""

SAMPLES_OLD, SAMPLES_NEW = "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"
"""The calls that give samples of processes. Blackwell GPUs refuse the old one. Drivers before R550 lack the new one."""

CARD = "card"
"""Group of the values that only dialects show. `--collect` does not name it."""

# The type of a field names its group. The worker asks NVML for the field only if the group is on.
T = TypeVar("T")
HealthField = Annotated[T, "health"]
LinksField = Annotated[T, "links"]
GpmField = Annotated[T, "gpm"]
CodecField = Annotated[T, "codec"]
CardField = Annotated[T, CARD]


class DeviceMemory(Struct, frozen=True, omit_defaults=True):
    """Memory of a device."""

    total_bytes: int
    """All memory of the device."""
    used_bytes: int
    """Excludes `reserved_bytes`. If the driver does not report these (nvmlDeviceGetMemoryInfo, first version), it may
    include them."""
    free_bytes: int
    """Memory that is not used."""
    reserved_bytes: int | None = None
    """Reserved by driver and firmware."""


class GpuProcess(Struct, frozen=True, array_like=True):
    """A process on a device; each PID is listed once. `types` is "C", "G", "M" or "C+G", as in nvidia-smi."""

    pid: int
    used_memory_bytes: int | None
    types: str


class ProcessSample(Struct, frozen=True, array_like=True):
    """Time of a process on the engines of a GPU, as ratios 0–1 of the interval."""

    pid: int
    sm_ratio: float
    memory_controller_busy_ratio: float
    encoder_ratio: float
    decoder_ratio: float
    jpeg_ratio: float = 0.0
    """0 also if the call does not report it, like `ofa_ratio` (`GpuReading.samples_from`)."""
    ofa_ratio: float = 0.0

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of all engines, in the order of the fields."""
        return structs.astuple(self)[1:]

    @property
    def uses_video(self) -> bool:
        return any((self.encoder_ratio, self.decoder_ratio, self.jpeg_ratio, self.ofa_ratio))


class Activity(Struct, frozen=True, omit_defaults=True):
    """Activity of a device between two GPM samples, as ratios 0–1 of its own engines."""

    sm_ratio: float | None = None
    """Share of the SMs that were busy."""
    sm_occupancy_ratio: float | None = None
    """Warps on the SMs, as a ratio of the maximum."""
    tensor_ratio: float | None = None
    """Share of time in which the tensor cores were busy."""
    dram_ratio: float | None = None
    """Used memory bandwidth, as a ratio of the maximum."""
    graphics_ratio: float | None = None
    """Share of time in which any graphics or compute engine was busy."""
    fp64_ratio: float | None = None
    """Share of time in which the FP64 pipes were busy."""
    fp32_ratio: float | None = None
    """Share of time in which the FP32 pipes were busy."""
    fp16_ratio: float | None = None
    """Share of time in which the FP16 pipes were busy."""
    video_ratio: float | None = None
    """Share of time in which the busiest video engine was busy: decoder, encoder, JPEG or OFA."""


class MigInstance(Struct, frozen=True, omit_defaults=True):
    """A MIG device. Compute instances of one GPU instance (`gpu_instance_id`) share its memory."""

    uuid: Uuid
    """NVML's UUID of the device."""
    gpu_instance_id: int
    """NVML's id of its GPU instance."""
    compute_instance_id: int
    """NVML's id of its compute instance."""
    profile: str
    """MIG profile such as 1g.10gb."""
    compute_slices: int | None = None
    """Its compute slices. A GPU has seven."""
    memory: DeviceMemory | None = None
    processes: tuple[GpuProcess, ...] | None = None
    profile_id: int | None = None
    """NVML's number of the GPU instance's profile. The driver reports it and the placement only to a process that may
    manage instances."""
    placement_start: int | None = None
    """The first memory slice of its GPU instance."""
    placement_size: int | None = None
    """Number of memory slices of its GPU instance."""
    denied: bool = False
    """The driver refuses to report its memory: the container has no device node for it in /dev/nvidia-caps."""
    activity: Activity | None = None
    """`None` also if several compute instances share the GPU instance: the driver measures only the GPU instance."""


class Fabric(Struct, frozen=True, omit_defaults=True):
    """Registration of a GPU with the fabric of NVSwitches."""

    state: str
    """One of FABRIC_STATES except not_supported, or code_N."""
    status: str = ""
    """Result of the completed registration: success, or the name of NVML's error. Empty before."""


class GpuReading(Struct, frozen=True, omit_defaults=True):
    """All that NVML reports for one GPU in one read. With a `fault`, only its identity and recovery action are known.

    `samples` is `None` if the GPU reports no time of processes: both calls are refused (MIG, vGPU guests, WSL). The
    rows of `samples` and `processes` are the last fields, so a capture shows the GPU first.
    """

    index: int
    """NVML's number of the GPU."""
    fault: str | None = None
    """Why it does not answer, as one word."""
    stuck_seconds: float = 0.0
    """How long a driver call on it has been running."""
    uuid: Uuid | None = None
    minor: int | None = None
    """Of /dev/nvidiaN."""
    pci_bus_id: str = ""
    model: str = ""
    """NVML's product name."""
    virtualization: str | None = None
    """One of VIRTUALIZATION_MODES, or code_N."""
    numa_node: int | None = None
    """The machine's NUMA node that the GPU's memory is. `None` if it is none."""
    memory: DeviceMemory | None = None
    """Memory of the whole GPU."""
    partitioned: bool = False
    """It is in MIG mode."""
    max_mig_devices: int | None = None
    """How many MIG devices it can have at most."""
    instances: tuple[MigInstance, ...] = ()
    """Its MIG devices."""
    mig_unknown: bool = False
    """The MIG mode or some MIG devices could not be read. `instances` has only those that could."""
    samples_from: str = SAMPLES_OLD
    """The call that gave `samples`: SAMPLES_OLD or SAMPLES_NEW."""
    sampled_seconds: float | None = None
    """Time that `samples` cover and that no earlier reading covered. `None`: all time since the reading before. 0 in an
    early reading: its samples also count in the next one."""
    utilization_ratio: float | None = None
    """Share of time in which a kernel ran."""
    memory_controller_busy_ratio: float | None = None
    """Share of time in which memory was read or written."""
    encoder_ratio: CodecField[float | None] = None
    """Share of time in which the video encoder was busy."""
    decoder_ratio: CodecField[float | None] = None
    """Share of time in which the video decoder was busy."""
    temperatures_celsius: dict[str, float] = {}
    """By sensor: gpu, memory."""
    power_watts: float | None = None
    """Power draw."""
    power_limit_watts: float | None = None
    """The limit that the driver enforces."""
    energy_joules: float | None = None
    """Since the driver was loaded."""
    clocks_hertz: HealthField[dict[str, float]] = {}
    """By domain: graphics, sm, memory, video."""
    clock_events: HealthField[dict[str, bool]] = {}
    """Whether clocks are lower now, by reason: those of CLOCK_EVENTS that the GPU knows."""
    clock_event_seconds: HealthField[dict[str, float]] = {}
    """Time with lower clocks since the driver began to count, by reason: some of CLOCK_EVENT_TIMES."""
    performance_state: HealthField[int | None] = None
    """From 0 (fastest) to 15."""
    fan_speed_ratios: HealthField[dict[str, float]] = {}
    """By number of the fan, as a ratio of its maximum speed. Can exceed 1."""
    ecc_errors: HealthField[dict[str, dict[str, int]]] = {}
    """Over the life of the GPU, by type and location: ECC_TYPES, ECC_LOCATIONS."""
    remapped_rows: HealthField[dict[str, int]] = {}
    """Replaced rows of memory, by their errors: correctable, uncorrectable."""
    row_remap_pending: HealthField[bool | None] = None
    """Whether rows wait for the next reset to be replaced."""
    row_remap_failure: HealthField[bool | None] = None
    """Whether a row could not be replaced."""
    retired_pages: HealthField[dict[str, int]] = {}
    """Retired pages of memory, by their errors: single_bit_ecc, double_bit_ecc."""
    recovery_action: HealthField[str | None] = None
    """What the driver requests: one of RECOVERY_ACTIONS, or code_N."""
    ecc_totals: CardField[dict[str, dict[str, int]]] = {}
    """By type and period: volatile (since the driver was loaded) or aggregate (over the life of the GPU)."""
    retired_pages_pending: CardField[bool | None] = None
    """Whether the next reset of the GPU retires pages."""
    compute_mode: CardField[str | None] = None
    """One of COMPUTE_MODES, or code_N."""
    power_limits_watts: CardField[dict[str, float]] = {}
    """The requested, default, min and max limit. `power_limit_watts` is the enforced one."""
    max_clocks_hertz: CardField[dict[str, float]] = {}
    """By domain, as `clocks_hertz`."""
    vbios_version: CardField[str] = ""
    """Version of the firmware."""
    compute_capability: CardField[str] = ""
    """CUDA's, "9.0"."""
    pcie_source: LinksField[str | None] = None
    """PCIE_TOTALS or PCIE_RATES."""
    pcie_transmit_bytes: LinksField[int | None] = None
    """Bytes that the GPU sent over PCIe. `join/pcie.py` makes one counter of either source."""
    pcie_receive_bytes: LinksField[int | None] = None
    """Bytes that the GPU received over PCIe."""
    nvlink_transmit_bytes: LinksField[int | None] = None
    """Bytes that the GPU sent over all NVLinks."""
    nvlink_receive_bytes: LinksField[int | None] = None
    """Bytes that the GPU received over all NVLinks."""
    nvlink_errors: LinksField[dict[str, int]] = {}
    """Over all NVLinks, by type: NVLINK_ERRORS."""
    fabric: LinksField[Fabric | None] = None
    """`None` also if the GPU has no fabric."""
    pcie_replays: CardField[int | None] = None
    """Packets that PCIe sent again."""
    activity: GpmField[Activity | None] = None
    refusals: dict[str, int] = {}
    """NVML's return code by call, of those that failed, except "not supported"."""
    unsampled: tuple[int, ...] = ()
    """PIDs with only impossible samples: their time is unknown."""
    samples: tuple[ProcessSample, ...] | None = None
    processes: tuple[GpuProcess, ...] | None = None


class XidError(NamedTuple):
    """An XID event of a GPU. The ids are `None` if it is of no MIG device, or if the driver does not report them."""

    uuid: Uuid
    code: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    gpu_instance_id: int | None
    compute_instance_id: int | None
    age_seconds: float
    """Time from the event to the reading that contains it."""
    times: Annotated[int, Meta(ge=1)] = 1
    """Number of equal events. `age_seconds` is that of the last one."""


class Listening(NamedTuple):
    """A period with a registered XID listener on a GPU, in which it missed no event. Both times are seconds before the
    reading.

    A reading has several periods of a GPU if the worker registered again since the reading before, and none without a
    listener. If only the release of the driver is the reason, it has one period of zero length.
    """

    uuid: Uuid
    since_seconds: float
    until_seconds: float
