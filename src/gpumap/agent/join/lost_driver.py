"""Whether NVML is lost to this container for good: it had answered, and no new worker process gets it back.

A container keeps the library that it was made with where the runtime injects it or a single file is mounted: after an
update of the driver it fits the kernel module no more. And a runtime that writes the container's cgroup anew (after
`systemctl daemon-reload`) may forget the device nodes that it was given (NVIDIA/nvidia-container-toolkit#48). Only
another container helps. Where NVML has never answered, a restart would not help either: one cannot lead to the next.
"""

from __future__ import annotations

from typing import NamedTuple

from gpumap.model.observations import Failed, Moment, NvmlReading, Observed

COLLECTIONS = 3
"""The first worker ends with the old library, and the next one may find the new one."""
_WHY = {
    "driver_version_mismatch": "the driver was changed, and the library that this container was given does not fit it "
    "any more: restarting to get the new one",
    "unknown": "NVML, which had answered, fails for an unknown reason: this container may have lost its device nodes, "
    "as after `systemctl daemon-reload`: restarting to get them back",
}
_SAYS_NOTHING = frozenset({"deadline_exceeded"})
"""A read that was late in between is no other answer."""


class LostDriverMemory(NamedTuple):
    """A fresh one is our own start. `since` is monotonic."""

    has_answered: bool = False
    reason: str = ""
    since: float = 0.0
    collections: int = 0


def find_lost_driver(
    before: LostDriverMemory, nvml: Observed[NvmlReading] | Failed, at: Moment, after_seconds: float
) -> tuple[LostDriverMemory, str]:
    """Tell why NVML is lost, once it has failed with the same reason for so long; else nothing."""
    if isinstance(nvml, Observed):
        return LostDriverMemory(has_answered=True), ""
    reason = nvml.complaints[-1].reason if nvml.complaints else ""
    if reason in _SAYS_NOTHING:
        return before, ""
    if not before.has_answered or reason not in _WHY:
        return LostDriverMemory(before.has_answered), ""
    if reason != before.reason:
        return LostDriverMemory(True, reason, at.monotonic, 1), ""
    now = before._replace(collections=before.collections + 1)
    lost = now.collections >= COLLECTIONS and at.monotonic - now.since >= after_seconds
    return now, f"{_WHY[reason]} ({nvml.complaints[-1].detail})" if lost else ""
