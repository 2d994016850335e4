"""Names that users' dashboards already query: each dialect a table over the same snapshot (contract §4)."""

from collections.abc import Mapping

from gpumap.dialects import pod_gpu_map
from gpumap.families import Family

DIALECTS: Mapping[str, tuple[Family, ...]] = {"pod-gpu-map": pod_gpu_map.FAMILIES}
"""Dialects that are built, by their `--dialect` name; `native` is gpumap's own (`gpumap.metrics`)."""
DEFAULT_DIALECTS = ("native", "pod-gpu-map")
LATER_DIALECTS = (
    "pod-gpu-map-deprecated",
    "gpu-mem-monitor",
    "cadvisor",
    "gpu-manager",
    "nvidia-smi",
    "dcgm",
    "dcgm-join",
    "arms",
)
