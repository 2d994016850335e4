"""Metric names that existing dashboards query. Each dialect is a table over the snapshot (docs/reference/dialects.md).

A dialect is one file with its `FAMILIES`, or a part of `small`, and one row in `DIALECTS`. `common` has what several
dialects need.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpumap.agent.dialects import arms, dcgm, gpu_manager, nvidia_smi, small
from gpumap.model.families import Family, NumberedFamilies


class Dialect(NamedTuple):
    families: tuple[Family | NumberedFamilies, ...]
    """On /metrics."""
    needs: tuple[str, ...] = ()
    """Groups of NVML's values that some families need: groups of `--collect`, and `readings.CARD`."""
    pages: Callable[[str], Mapping[str, tuple[Family, ...]]] = lambda node: {}
    """Families of the dialect's own pages: from the name of the node, by path."""


DIALECTS: Mapping[str, Dialect] = {
    "pod-gpu-map": Dialect(small.POD_GPU_MAP, pages=lambda node: {"/metrics/nodes": (small.node_family(node),)}),
    "pod-gpu-map-deprecated": Dialect(small.POD_GPU_MAP_DEPRECATED),
    "gpu-mem-monitor": Dialect(small.GPU_MEM_MONITOR),
    "cadvisor": Dialect(small.CADVISOR),
    "gpu-manager": Dialect(gpu_manager.FAMILIES, pages=lambda node: {"/metric": gpu_manager.FAMILIES}),
    "nvidia-smi": Dialect(nvidia_smi.FAMILIES, nvidia_smi.NEEDS),
    "dcgm": Dialect(dcgm.BEFORE_4_9, dcgm.NEEDS),
    "dcgm49": Dialect(dcgm.SINCE_4_9, dcgm.NEEDS),
    "dcgm-join": Dialect(small.DCGM_JOIN),
    "arms": Dialect(arms.FAMILIES),
}
"""By `--dialect` name. gpumap's own metrics are in `gpumap.agent.metrics`."""
