"""The native families, group by group: how each sample is read from a snapshot (docs/reference/metrics.md).

A metric is one row of its group's table. An unknown value gives no sample, never a 0. A container never gets the value
of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpumap.agent.metrics import device, use
from gpumap.agent.metrics.allocation import ALLOCATION
from gpumap.agent.metrics.device import DEVICE, GPM, LINKS
from gpumap.agent.metrics.health import FINDINGS, HEALTH
from gpumap.agent.metrics.self_metrics import self_families
from gpumap.agent.metrics.use import ACCOUNTING, HOST, PROCESSES, USE
from gpumap.model.families import Family

__all__ = ["GROUPS", "PROCESSES", "native", "self_families"]

GROUPS: Mapping[str, tuple[Family, ...]] = {
    "allocation": ALLOCATION,
    "use": USE,
    "host": HOST,
    "accounting": ACCOUNTING,
    "findings": FINDINGS,
    "device": DEVICE,
    "health": HEALTH,
    "links": LINKS,
    "gpm": GPM,
    "codec": (*use.CODEC, *device.CODEC),
}
"""The groups of `--collect`."""


def native(groups: Iterable[str], process_metrics: bool) -> tuple[Family, ...]:
    """Return the native families of the chosen groups, in the order of the page."""
    chosen = set(groups)
    families = [family for group, rows in GROUPS.items() if group in chosen for family in rows]
    return (*families, *(PROCESSES if process_metrics else ()))
