"""What was seen, less the rows of all namespaces but one. A device stays where one of its pods has a row. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpumap.cli.node_documents import Seen
from gpumap.model.document import Document

_ROWS = ("unmatched", "pods", "accounts", "container_xids")
_ON_A_DEVICE = ("holders", "users", "processes")


def of_namespace(seen: Seen, namespace: str) -> Seen:
    """Only the rows of this namespace; all of them where it is empty. What a device has and uses as a whole stays."""
    if not namespace:
        return seen
    return seen._replace(documents=tuple(_document(one, namespace) for one in seen.documents))


def _document(document: Document, namespace: str) -> Document:
    devices = [_device(device, namespace) for device in document["devices"]]
    found = {name: _ours(document[name], namespace) for name in _ROWS if name in document}
    if document.get("device_health"):
        found["device_health"] = _ours(document["device_health"], namespace)
    shown = [device for device in devices if any(device[name] for name in _ON_A_DEVICE)]
    return {**document, **found, "devices": shown}


def _device(device: Document, namespace: str) -> Document:
    rows = {name: _ours(device[name], namespace) for name in _ON_A_DEVICE}
    there = {process["owner"] for process in rows["processes"]}
    owners = [row for row in device["owners"] if row["owner"] in there] if device["processes"] else []
    return {**device, **rows, "owners": owners}


def _ours(rows: Iterable[Document], namespace: str) -> list[Document]:
    return [row for row in rows if row["namespace"] == namespace]
