"""The dialects of the "pod gpu metrics exporter": which pod holds which GPU, one row per (pod, device), value 1.

The original repeated rows, and made invalid metric names out of node names. This dialect does neither. The original
also has names that it calls deprecated: a family for each row of its map, value 0, with the number of the row in the
name. It numbered rows in random order; this dialect sorts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpumap.agent.dialects.common import gpus_by_uuid
from gpumap.model.families import Family, NumberedFamilies, Series
from gpumap.model.snapshot import Snapshot

_LABELS = ("gpu_id", "gpu_model", "namespace", "node", "pod_name")


def _rows(snapshot: Snapshot) -> Iterator[Series]:
    models = {uuid: gpu.model for uuid, gpu in gpus_by_uuid(snapshot).items()}
    held = sorted({(row.uuid, row.name.namespace, row.name.pod) for row in snapshot.containers if row.holds})
    for uuid, namespace, pod in held:
        yield Series((uuid, models.get(uuid, ""), namespace, snapshot.node.name, pod), 1)


FAMILIES = (
    Family("pod_and_gpu_map_info", "gauge", "Provide a mapping relationship between pod and gpu", _LABELS, _rows),
)


def node_family(node: str) -> Family:
    """The family of /metrics/nodes: `<node>_info`, the node's name made a valid metric name."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", node)
    name = f"_{name}" if name[:1].isdigit() else name
    return Family(f"{name}_info", "gauge", "Provide every node's pod and gpu mapping relationship", _LABELS, _rows)


# --- pod-gpu-map-deprecated -------------------------------------------------------------------------------------------

_DEPRECATED_HELP = "pod gpu map info - please use labels value to match pod and gpu"
(_MAP,) = FAMILIES


def _position(series: Series) -> tuple[str, ...]:
    gpu, _, namespace, _, pod = series.labels
    return namespace, pod, gpu


def _deprecated_family(number: int, row: Series) -> Family:
    return Family(
        f"POD_GPU_MAP_INFO_{number}", "gauge", _DEPRECATED_HELP, _MAP.labels, lambda _: (Series(row.labels, 0),)
    )


def _deprecated(snapshot: Snapshot) -> Iterator[Family]:
    for number, row in enumerate(sorted(_MAP.read(snapshot), key=_position)):
        yield _deprecated_family(number, row)


DEPRECATED_FAMILIES = (NumberedFamilies("POD_GPU_MAP_INFO_<n>", "gauge", _DEPRECATED_HELP, _MAP.labels, _deprecated),)
