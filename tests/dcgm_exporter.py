"""A played dcgm-exporter, before its 4.9 and since: which rows it has of a device, with its names, labels and units.

The values are anybody's: what is tested is which rows meet which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import NamedTuple

Labels = Mapping[str, str]
Values = Mapping[str, Decimal]
"""By field, in the names and units of before 4.9."""
MIB = 1 << 20


class Renamed(NamedTuple):
    name: str
    factor: Decimal = Decimal(1)
    """What the value is multiplied by."""


_MEGA, _MILLI, _PERCENT, _MIB = Decimal(10**6), Decimal("0.001"), Decimal("0.01"), Decimal(MIB)
RENAMED = {
    "DCGM_FI_DEV_SM_CLOCK": Renamed("DCGM_FI_DEV_SM_CLOCK_HERTZ", _MEGA),
    "DCGM_FI_DEV_MEM_CLOCK": Renamed("DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", _MEGA),
    "DCGM_FI_DEV_GPU_TEMP": Renamed("DCGM_FI_DEV_GPU_TEMP_CELSIUS"),
    "DCGM_FI_DEV_MEMORY_TEMP": Renamed("DCGM_FI_DEV_MEMORY_TEMP_CELSIUS"),
    "DCGM_FI_DEV_POWER_USAGE": Renamed("DCGM_FI_DEV_BOARD_POWER_WATTS"),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": Renamed("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", _MILLI),
    "DCGM_FI_DEV_GPU_UTIL": Renamed("DCGM_FI_DEV_GPU_UTIL_RATIO", _PERCENT),
    "DCGM_FI_DEV_MEM_COPY_UTIL": Renamed("DCGM_FI_DEV_MEMORY_UTIL_RATIO", _PERCENT),
    "DCGM_FI_DEV_ENC_UTIL": Renamed("DCGM_FI_DEV_ENC_UTIL_RATIO", _PERCENT),
    "DCGM_FI_DEV_DEC_UTIL": Renamed("DCGM_FI_DEV_DEC_UTIL_RATIO", _PERCENT),
    "DCGM_FI_DEV_FB_USED": Renamed("DCGM_FI_DEV_FB_USED_BYTES", _MIB),
    "DCGM_FI_DEV_FB_FREE": Renamed("DCGM_FI_DEV_FB_FREE_BYTES", _MIB),
    "DCGM_FI_DEV_FB_RESERVED": Renamed("DCGM_FI_DEV_FB_RESERVED_BYTES", _MIB),
    "DCGM_FI_DEV_FB_TOTAL": Renamed("DCGM_FI_DEV_FB_CAPACITY_BYTES", _MIB),
    "DCGM_FI_DEV_XID_ERRORS": Renamed("DCGM_FI_DEV_XID_ERROR"),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": Renamed("DCGM_FI_DEV_PCIE_REPLAY_TOTAL"),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": Renamed("DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL"),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": Renamed("DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL"),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": Renamed("DCGM_FI_DEV_ROW_REMAP_FAILED"),
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": Renamed("DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND", _MEGA),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": Renamed("DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO"),
    "DCGM_FI_PROF_SM_ACTIVE": Renamed("DCGM_FI_PROF_SM_UTIL_RATIO"),
    "DCGM_FI_PROF_SM_OCCUPANCY": Renamed("DCGM_FI_PROF_SM_OCCUPANCY_RATIO"),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": Renamed("DCGM_FI_PROF_TENSOR_UTIL_RATIO"),
    "DCGM_FI_PROF_DRAM_ACTIVE": Renamed("DCGM_FI_PROF_DRAM_UTIL_RATIO"),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": Renamed("DCGM_FI_PROF_FP64_UTIL_RATIO"),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": Renamed("DCGM_FI_PROF_FP32_UTIL_RATIO"),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": Renamed("DCGM_FI_PROF_FP16_UTIL_RATIO"),
    "DCGM_FI_DEV_POWER_MGMT_LIMIT": Renamed("DCGM_FI_DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS"),
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": Renamed("DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS"),
    "DCGM_FI_DEV_RETIRED_SBE": Renamed("DCGM_FI_DEV_PAGE_RETIRED_SBE_TOTAL"),
    "DCGM_FI_DEV_RETIRED_DBE": Renamed("DCGM_FI_DEV_PAGE_RETIRED_DBE_TOTAL"),
    "DCGM_FI_DEV_RETIRED_PENDING": Renamed("DCGM_FI_DEV_PAGE_RETIRED_PENDING"),
}
"""What each field is called since 4.9; docs/how-to/replace/dcgm-exporter.md has the same table."""
SINCE_4_9_ALONE = "DCGM_FI_DEV_FB_TOTAL"
"""Not there by default before."""
BY_PROCESS = ("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_UTIL")
"""Of a shared GPU these have a row of the device, and one for each slot (from 4.5.3 on, with its virtual GPUs)."""


class Slot(NamedTuple):
    owner: Labels
    """container, namespace, pod."""
    values: Values = MappingProxyType({})
    """Its own, on a device with several slots."""


class Device(NamedTuple):
    labels: Labels
    values: Values
    slots: tuple[Slot, ...]
    """One for each time that it is given out."""


def rows(device: Device, node: str, *, since_4_9: bool) -> Iterator[tuple[str, Labels, Decimal]]:
    """An exclusive device has its pod on every field; a shared one a row for each slot, as by virtual GPUs."""
    shared = len(device.slots) > 1
    for field, value in device.values.items():
        if field == SINCE_4_9_ALONE and not since_4_9:
            continue
        name, factor = RENAMED.get(field, Renamed(field)) if since_4_9 else Renamed(field)
        of = {**device.labels, "hostname" if since_4_9 else "Hostname": node}
        if field == "DCGM_FI_DEV_XID_ERRORS":
            of["err_code"] = str(value)
        by_process = shared and field in BY_PROCESS
        if not device.slots or by_process:
            yield name, of, value * factor
        for number, slot in enumerate(device.slots):
            virtual = {"vgpu": str(number)} if shared else {}
            yield name, {**of, **slot.owner, **virtual}, (slot.values[field] if by_process else value) * factor
