"""The dialect of the "pod gpu metrics exporter": which pod holds which GPU, one row per (pod, device), value 1.

Where the original repeated rows, and made metric names that are not valid out of node names, this does neither.
"""

import re
from collections.abc import Iterator

from gpumap.model.families import Family, Series
from gpumap.model.snapshot import Snapshot

_LABELS = ("gpu_id", "gpu_model", "namespace", "node", "pod_name")


def _rows(snapshot: Snapshot) -> Iterator[Series]:
    models = {leaf.uuid: leaf.gpu.model for leaf in snapshot.leaves if leaf.gpu}
    models.update({gpu.uuid: gpu.model for gpu in snapshot.gpus})
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
