"""The kubelet's device checkpoint, cut down to what gpumap reads of it. Pure: JSON in, JSON out.

Of each row of a GPU resource stay pod UID, container, resource, ids, and what the plugin said of GPUs. The checksum
becomes 0: the kubelet's own is over the whole, and gpumap does not check it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable

from gpumap.agent.sources.checkpoint import ids_in, read
from gpumap.lab.capture import allocated
from gpumap.lab.capture.answers import is_gpus

Rename = Callable[[str], str]

_NUMA_NODE = re.compile(r"-1|[0-9]{1,4}")
_NO_NUMA_NODE = "-1"
"""The kubelet's key of ids without a NUMA node (nodeWithoutTopology in its pkg/kubelet/cm/devicemanager/manager.go)."""


def cut(
    text: bytes,
    is_gpu_resource: Callable[[str], bool],
    *,
    uid: Rename = str,
    container: Rename = str,
    id_: Rename = str,
) -> bytes:
    """Cut a checkpoint down; `uid`, `container` and `id_` give other names. Raises ValueError where it is none."""
    entries, registered = read(text)
    rows = [
        {
            "PodUID": uid(row.pod_uid),
            "ContainerName": container(row.container),
            "ResourceName": row.resource,
            "DeviceIDs": _renamed(row.ids, id_),
            "AllocResp": _alloc_resp(row.answer, id_),
        }
        for row in entries
        if row is not None and is_gpus(row.resource, ids_in(row.ids), is_gpu_resource)
    ]
    rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
    offered = {
        resource: sorted(map(id_, ids_in(value)))
        for resource, value in sorted(registered.items())
        if is_gpus(resource, ids_in(value), is_gpu_resource)
    }
    kept = {"Data": {"PodDeviceEntries": rows or None, "RegisteredDevices": offered}, "Checksum": 0}
    return json.dumps(kept, indent=1, ensure_ascii=False).encode() + b"\n"


def _renamed(value: object, id_: Rename) -> dict[str, list[str]] | list[str]:
    """Ids by NUMA node, or in kubelets until 1.19 a list. Of a key that is no node's number its ids stay."""
    if not isinstance(value, dict):
        return sorted(map(id_, ids_in(value)))
    nodes: dict[str, list[str]] = {}
    for key, group in value.items():
        node = key if _NUMA_NODE.fullmatch(key) else _NO_NUMA_NODE
        nodes.setdefault(node, []).extend(map(id_, ids_in({key: group})))
    return {node: sorted(ids) for node, ids in sorted(nodes.items())}


def _alloc_resp(text: object, rename: Rename) -> str:
    try:
        message = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
        return base64.b64encode(allocated.cut(message, rename)).decode()
    except ValueError:
        return ""
