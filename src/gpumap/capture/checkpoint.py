"""The kubelet's device checkpoint, cut down to what gpumap reads of it. Pure: JSON in, JSON out.

Of each row of a GPU resource stay pod UID, container, resource, ids, and what the plugin said of GPUs. The checksum
becomes 0: the kubelet's own is over the whole, and gpumap does not check it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator

from gpumap.capture import allocated
from gpumap.capture.answers import is_gpus

Rename = Callable[[str], str]
Ids = dict[str, list[str]] | list[str]


def cut(
    text: bytes,
    is_gpu_resource: Callable[[str], bool],
    *,
    uid: Rename = str,
    container: Rename = str,
    id_: Rename = str,
) -> bytes:
    """Cut a checkpoint down; `uid`, `container` and `id_` give other names. Raises ValueError where it is none."""
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    data = document.get("Data") if isinstance(document, dict) else None
    if not isinstance(data, dict):
        raise ValueError("no object Data in it")
    rows = [
        {
            "PodUID": uid(row.pod_uid),
            "ContainerName": container(row.container),
            "ResourceName": row.resource,
            "DeviceIDs": _renamed(row.ids, id_),
            "AllocResp": _alloc_resp(row.alloc_resp, id_),
        }
        for row in _rows(data.get("PodDeviceEntries"))
        if is_gpus(row.resource, _flat(row.ids), is_gpu_resource)
    ]
    rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
    registered = {
        resource: sorted(map(id_, ids))
        for resource, ids in _registered(data.get("RegisteredDevices"))
        if is_gpus(resource, ids, is_gpu_resource)
    }
    kept = {"Data": {"PodDeviceEntries": rows or None, "RegisteredDevices": registered}, "Checksum": 0}
    return json.dumps(kept, indent=1, ensure_ascii=False).encode() + b"\n"


class _Row:
    """A row that has all of what gpumap reads."""

    def __init__(self, row: dict[str, object]) -> None:
        self.pod_uid = _text(row.get("PodUID"))
        self.container = _text(row.get("ContainerName"))
        self.resource = _text(row.get("ResourceName"))
        self.ids = _ids(row.get("DeviceIDs"))
        response = row.get("AllocResp")
        self.alloc_resp = response if isinstance(response, str) else ""


def _rows(rows: object) -> Iterator[_Row]:
    for row in rows if isinstance(rows, list) else []:
        try:
            if isinstance(row, dict):
                yield _Row(row)
        except ValueError:
            continue  # gpumap skips it too


def _registered(registered: object) -> Iterator[tuple[str, list[str]]]:
    for resource, ids in sorted(registered.items()) if isinstance(registered, dict) else []:
        try:
            yield _text(resource), _flat(_ids(ids))
        except ValueError:
            continue


def _ids(value: object) -> Ids:
    """Ids by NUMA node, or in kubelets until 1.19 a list."""
    if isinstance(value, dict):
        return {str(node): _flat(_ids(ids)) for node, ids in value.items() if str(node).lstrip("-").isdigit()}
    return [_text(one) for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _flat(ids: Ids) -> list[str]:
    return [one for group in ids.values() for one in group] if isinstance(ids, dict) else ids


def _renamed(ids: Ids, id_: Rename) -> Ids:
    if isinstance(ids, dict):
        return {node: sorted(map(id_, group)) for node, group in sorted(ids.items())}
    return sorted(map(id_, ids))


def _alloc_resp(text: str, rename: Rename) -> str:
    try:
        return base64.b64encode(allocated.cut(base64.b64decode(text, validate=True), rename)).decode()
    except ValueError:
        return ""


def _text(value: object) -> str:
    """A string that can be written out again; half a character cannot."""
    if not isinstance(value, str):
        raise ValueError("not a text")
    value.encode()
    return value
