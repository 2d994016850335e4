"""Names that users' dashboards already query: each dialect a table over the same snapshot (contract §4)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpumap.agent.dialects import (
    arms,
    cadvisor,
    dcgm,
    dcgm_join,
    gpu_manager,
    gpu_mem_monitor,
    nvidia_smi,
    pod_gpu_map,
    pod_gpu_map_deprecated,
)
from gpumap.model.families import Family, Numbered


def _no_pages(node: str) -> Mapping[str, tuple[Family, ...]]:
    return {}


class Dialect(NamedTuple):
    """`families` stand on /metrics. `needs` are the groups of NVML's answers without which some of them have no
    value: those of `--collect`, and `readings.CARD`. `pages` gives the families of pages of its own, by their path, for a
    node's name."""

    families: tuple[Family | Numbered, ...]
    needs: tuple[str, ...] = ()
    pages: Callable[[str], Mapping[str, tuple[Family, ...]]] = _no_pages


DIALECTS: Mapping[str, Dialect] = {
    "pod-gpu-map": Dialect(
        pod_gpu_map.FAMILIES, pages=lambda node: {"/metrics/nodes": (pod_gpu_map.node_family(node),)}
    ),
    "pod-gpu-map-deprecated": Dialect(pod_gpu_map_deprecated.FAMILIES),
    "gpu-mem-monitor": Dialect(gpu_mem_monitor.FAMILIES),
    "cadvisor": Dialect(cadvisor.FAMILIES),
    "gpu-manager": Dialect(gpu_manager.FAMILIES, pages=lambda node: {"/metric": gpu_manager.FAMILIES}),
    "nvidia-smi": Dialect(nvidia_smi.FAMILIES, nvidia_smi.NEEDS),
    "dcgm": Dialect(dcgm.FAMILIES, dcgm.NEEDS),
    "dcgm-join": Dialect(dcgm_join.FAMILIES),
    "arms": Dialect(arms.FAMILIES),
}
"""By their `--dialect` name; `native` is gpumap's own (`gpumap.agent.metrics`)."""
DEFAULT_DIALECTS = ("native", "pod-gpu-map")
