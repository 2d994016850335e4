"""Metric names that existing dashboards query. Each dialect is a table over the snapshot (docs/reference/dialects.md).

A dialect is one file with its `FAMILIES` and one row in `DIALECTS`. `common` has what several dialects need.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpumap.agent.dialects import arms, cadvisor, dcgm, dcgm_join, gpu_manager, gpu_mem_monitor, nvidia_smi, pod_gpu_map
from gpumap.model.families import Family, NumberedFamilies


class Dialect(NamedTuple):
    families: tuple[Family | NumberedFamilies, ...]
    """On /metrics."""
    needs: tuple[str, ...] = ()
    """Groups of NVML's values that some families need: groups of `--collect`, and `readings.CARD`."""
    pages: Callable[[str], Mapping[str, tuple[Family, ...]]] = lambda node: {}
    """Families of the dialect's own pages: from the name of the node, by path."""


DIALECTS: Mapping[str, Dialect] = {
    "pod-gpu-map": Dialect(
        pod_gpu_map.FAMILIES, pages=lambda node: {"/metrics/nodes": (pod_gpu_map.node_family(node),)}
    ),
    "pod-gpu-map-deprecated": Dialect(pod_gpu_map.DEPRECATED_FAMILIES),
    "gpu-mem-monitor": Dialect(gpu_mem_monitor.FAMILIES),
    "cadvisor": Dialect(cadvisor.FAMILIES),
    "gpu-manager": Dialect(gpu_manager.FAMILIES, pages=lambda node: {"/metric": gpu_manager.FAMILIES}),
    "nvidia-smi": Dialect(nvidia_smi.FAMILIES, nvidia_smi.NEEDS),
    "dcgm": Dialect(dcgm.BEFORE_4_9, dcgm.NEEDS),
    "dcgm49": Dialect(dcgm.SINCE_4_9, dcgm.NEEDS),
    "dcgm-join": Dialect(dcgm_join.FAMILIES),
    "arms": Dialect(arms.FAMILIES),
}
"""By `--dialect` name. gpumap's own metrics are in `gpumap.agent.metrics`."""
