"""What is not known of nodes and of their devices, such as who holds one. What nobody has told is not 0. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpumap.cli.node_documents import Seen
from gpumap.cli.tables.document import device_name, few, invisible, name_of, of_each, sources_up
from gpumap.cli.tables.layout import Shape
from gpumap.cli.words import listed
from gpumap.model.document import Document

_NAMES_MAX, _BLIND_MAX = 8, 5
_JUDGE_BY = frozenset({"nvml", "kubelet", "pod_identity"})


def holders_known(device: Document) -> bool:
    return bool(device.get("holders_known"))


def use_known(device: Document) -> bool:
    """What is used of a device stands by its owners: each of them with 0 where nothing is used."""
    return bool(device["owners"])


def untold(document: Document, *, use: bool = True) -> Iterator[str]:
    """What is not known of devices though their GPU answers; of their `use` only where that was asked for.

    What a server has no series of, for a whole node, is told by who asked it (gpumap.cli.fleet.gaps).
    """
    asked_elsewhere = document["collect"] is None
    gaps = _gaps(document)
    if gaps.nowhere and not (asked_elsewhere and not document["gpus"]):
        yield f"which GPU {_which(gaps.nowhere, document)} is on, is not known"
    whole = asked_elsewhere and "kubelet" in sources_up(document) and gaps.unheld == document["devices"]
    if gaps.unheld and not whole:
        yield f"who holds {_which(gaps.unheld, document)} is not known"
    if use and gaps.dark and not (asked_elsewhere and gaps.dark == gaps.alive):
        yield f"what is used of {_which(gaps.dark, document)} is not known"


class _Gaps(NamedTuple):
    """Devices that are on no GPU that is known, of which nobody says who holds them, whose use could be told, and of
    which it is not."""

    nowhere: list[Document]
    unheld: list[Document]
    alive: list[Document]
    dark: list[Document]


def _gaps(document: Document) -> _Gaps:
    devices = [] if document.get("stale") else document["devices"]
    measured = "nvml" in sources_up(document)
    alive = list(_alive(document)) if measured else []
    return _Gaps(
        nowhere=[device for device in devices if device["gpu_uuid"] is None] if measured else [],
        unheld=[device for device in devices if not holders_known(device)],
        alive=alive,
        dark=[device for device in alive if not use_known(device)],
    )


def _alive(document: Document) -> Iterator[Document]:
    """Devices whose use could be told: not a GPU that is down, nor one that is partitioned and given out whole."""
    down = {gpu["uuid"] for gpu in document["gpus"] if not gpu["up"]}
    partitioned = {gpu["uuid"] for gpu in document["gpus"] if gpu["partitioned"]}
    for device in document["devices"]:
        if device["gpu_uuid"] not in down and device["uuid"] not in partitioned:
            yield device


def is_blind(document: Document) -> bool:
    """Neither the kubelet nor NVML answers: next to nothing is known of the node."""
    return not sources_up(document) & {"kubelet", "nvml"}


def blind(seen: Seen) -> Iterator[str]:
    """A sentence for each node of which that is so, or for a few of them."""
    nodes = [document for document in seen.documents if is_blind(document)]
    for document in nodes[:_BLIND_MAX]:
        yield f"node {name_of(document)}: {document.get('stale') or 'neither its kubelet nor NVML answers'}"
    if len(nodes) > _BLIND_MAX:
        yield f"and {len(nodes) - _BLIND_MAX} more of the kind"


def all_known(seen: Seen) -> bool:
    """Whether all that could be found was looked for: nodes, their sources, each device."""
    return not seen.missing and all(map(_all_known, seen.documents))


def no_rows(seen: Seen, shape: Shape) -> str:
    """What stands in the place of a table without a device."""
    if shape.namespace:
        says = "holds or uses" if all_known(seen) else "is known to hold or use"
        return f"Nothing in namespace {shape.namespace} {says} a GPU."
    stale = any(document.get("stale") for document in seen.documents)
    return "No current data." if stale else "No devices."


def troubles(seen: Seen) -> Iterator[str]:
    """What keeps what was seen from being whole, a sentence each: of nodes, and nodes that are not seen at all."""
    yield from few(of_each(seen, _troubles), seen.fleet)
    yield from few(seen.missing, seen.fleet)


def _troubles(document: Document) -> Iterator[str]:
    if document.get("stale"):
        yield document["stale"]
    for gpu in document["gpus"]:
        if not gpu["up"]:
            yield f"GPU {gpu['index']} {gpu['uuid']} is down: {gpu['fault']}"
    for source in document["sources"]:
        if not source["up"]:
            why = f": {source['reason']} ({source['detail'] or ''})" if source["reason"] else ""
            yield f"{source['source']} is down{why}"
    yield from untold(document)
    if not document["capabilities"].get("pid_visibility"):
        yield invisible(document)


def _all_known(document: Document) -> bool:
    return (
        sources_up(document) >= _JUDGE_BY
        and bool(document["capabilities"].get("pid_visibility"))
        and not document["nameless_gpus"]
        and all(gpu["up"] for gpu in document["gpus"])
        and not any(_gaps(document)._replace(alive=[]))
    )


def _which(devices: Sequence[Document], document: Document) -> str:
    if len(devices) == len(document["devices"]):
        return "its devices" if len(devices) > 1 else "its device"
    names = [device["uuid"] if device["index"] is None else device_name(device) for device in devices]
    return listed(names, _NAMES_MAX)
