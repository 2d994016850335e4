"""What is told of a GPU for which groups of families, as the NVML worker has it: calls for the others are not made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import get_type_hints

from gpumap.model.readings import CARD, GpuReading, MigInstance

LISTENS = "health"
"""The group for which XID events are listened to."""
_HINTS = get_type_hints(GpuReading, include_extras=True)
FIELDS: Mapping[str, tuple[str, ...]] = {
    group: tuple(name for name, hint in _HINTS.items() if group in getattr(hint, "__metadata__", ()))
    for group in ("health", "links", "gpm", "codec", CARD)
}
_BLANK = GpuReading(index=-1)


def told(groups: Collection[str], *, release: bool) -> tuple[str, ...]:
    """The groups of which something is told: GPM's values take two samples, and no end of NVML between them."""
    return tuple(group for group in groups if not (release and group == "gpm"))


def only(gpu: GpuReading, groups: Collection[str]) -> GpuReading:
    """A reading without what these groups do not need."""
    unasked = [group for group in FIELDS if group not in groups]
    if not unasked:
        return gpu
    gpu = gpu._replace(**{name: getattr(_BLANK, name) for group in unasked for name in FIELDS[group]})
    return gpu._replace(instances=tuple(map(_without_activity, gpu.instances))) if "gpm" in unasked else gpu


def _without_activity(instance: MigInstance) -> MigInstance:
    return instance._replace(activity=None)
