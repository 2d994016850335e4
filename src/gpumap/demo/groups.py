"""What is told of a GPU for which groups of families, as the NVML worker has it: calls for the others are not made."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpumap.model import GpuReading, MigInstance

LISTENS = "health"
"""The group for which XID events are listened to."""
FIELDS: Mapping[str, tuple[str, ...]] = {
    "health": (
        "clocks_hertz",
        "clock_events",
        "clock_event_seconds",
        "performance_state",
        "fan_ratios",
        "ecc_errors",
        "remapped_rows",
        "row_remap_pending",
        "row_remap_failure",
        "retired_pages",
        "recovery_action",
    ),
    "links": ("pcie_transmit_bytes", "pcie_receive_bytes", "nvlink_transmit_bytes", "nvlink_receive_bytes"),
    "gpm": ("activity",),
}
_BLANK = GpuReading(index=-1)


def only(gpu: GpuReading, groups: Collection[str]) -> GpuReading:
    """A reading without what these groups do not need."""
    unasked = [group for group in FIELDS if group not in groups]
    if not unasked:
        return gpu
    gpu = gpu._replace(**{name: getattr(_BLANK, name) for group in unasked for name in FIELDS[group]})
    return gpu._replace(instances=tuple(map(_without_activity, gpu.instances))) if "gpm" in unasked else gpu


def _without_activity(instance: MigInstance) -> MigInstance:
    return instance._replace(activity=None)
