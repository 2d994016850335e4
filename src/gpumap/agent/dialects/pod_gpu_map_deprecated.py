"""The names that the "pod gpu metrics exporter" calls abandoned: a family of its own for each row of its map, value 0.

The number in a name is the row's place. The original counted rows as they came, this in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpumap.agent.dialects import pod_gpu_map
from gpumap.model.families import Family, Numbered, Series
from gpumap.model.snapshot import Snapshot

_HELP = "pod gpu map info - please use labels value to match pod and gpu"
(_MAP,) = pod_gpu_map.FAMILIES
_ORDER = ("namespace", "pod_name", "gpu_id")


def _place(series: Series) -> tuple[str, ...]:
    labels = dict(zip(_MAP.labels, series.labels, strict=True))
    return tuple(labels[name] for name in _ORDER)


def _family(number: int, row: Series) -> Family:
    return Family(f"POD_GPU_MAP_INFO_{number}", "gauge", _HELP, _MAP.labels, lambda _: (Series(row.labels, 0),))


def _families(snapshot: Snapshot) -> Iterator[Family]:
    for number, row in enumerate(sorted(_MAP.read(snapshot), key=_place)):
        yield _family(number, row)


FAMILIES = (Numbered("POD_GPU_MAP_INFO_<n>", "gauge", _HELP, _MAP.labels, _families),)
