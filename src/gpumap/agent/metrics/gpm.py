"""The group `gpm`: what the GPU's own counters measured of each leaf's engines between two collections."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumap.model.families import Family, Series
from gpumap.model.readings import Activity
from gpumap.model.snapshot import Snapshot


def _active(name: str, help: str, value: Callable[[Activity], float | None]) -> Family:
    def read(snapshot: Snapshot) -> Iterator[Series]:
        for leaf in snapshot.leaves:
            if (activity := leaf.activity) is not None and (found := value(activity)) is not None:
                yield Series((leaf.uuid,), found)

    return Family(name, "gauge", help, ("uuid",), read)


GPM = (
    _active(
        "gpumap_device_sm_activity_ratio",
        "Share of the device's SMs that were busy, 0-1, mean over the interval. Hopper and later.",
        lambda activity: activity.sm_ratio,
    ),
    _active(
        "gpumap_device_sm_occupancy_ratio",
        "Warps on the device's SMs against the most that they can hold, 0-1, mean over the interval.",
        lambda activity: activity.sm_occupancy_ratio,
    ),
    _active(
        "gpumap_device_tensor_activity_ratio",
        "Time that the device's tensor cores were busy, 0-1, mean over the interval.",
        lambda activity: activity.tensor_ratio,
    ),
    _active(
        "gpumap_device_dram_activity_ratio",
        "Memory bandwidth of the device that was used, 0-1, mean over the interval.",
        lambda activity: activity.dram_ratio,
    ),
)
