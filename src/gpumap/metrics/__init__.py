"""The native families, group by group: how each sample is read out of a snapshot (contract §3).

Pure. An unknown value gives no sample, never a 0. No device's value is ever given to a container.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpumap.families import Family
from gpumap.metrics import device, use
from gpumap.metrics.allocation import ALLOCATION
from gpumap.metrics.device import DEVICE
from gpumap.metrics.itself import self_families
from gpumap.metrics.use import PROCESSES, USE

__all__ = ["DEFAULT_GROUPS", "GROUPS", "LATER_GROUPS", "PROCESSES", "native", "self_families"]

GROUPS: Mapping[str, tuple[Family, ...]] = {
    "allocation": ALLOCATION,
    "use": USE,
    "device": DEVICE,
    "codec": (*use.CODEC, *device.CODEC),
}
"""The groups of `--collect` that are built."""
DEFAULT_GROUPS = ("allocation", "use", "device")
LATER_GROUPS = ("accounting", "health", "links", "gpm")


def native(groups: Iterable[str], process_metrics: bool) -> tuple[Family, ...]:
    """The native families of the chosen groups, in the page's order."""
    chosen = set(groups)
    families = [family for group, rows in GROUPS.items() if group in chosen for family in rows]
    return (*families, *(PROCESSES if process_metrics else ()))
