"""What a gpumap that answers does not tell, though its node has it: groups or families that are not served. Pure.

Nothing of a kind is no zero: where nobody tells who holds a device, it is not free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from gpumap.cli.fleet import families
from gpumap.cli.fleet.cluster import newest, placeless
from gpumap.cli.fleet.node_results import Found
from gpumap.cli.words import listed
from gpumap.model.document import Document

_SERVED = "its gpumap serves nothing of"
_GIVEN = "who holds its GPUs (--collect allocation; or its series are dropped)"
_USED = "who uses its GPUs (--collect use; or its series are dropped)"
_BUILT = "its GPUs themselves (--collect device, --dialect native; or its series are dropped)"


def untold(found: Found, parts: Collection[str], namespace: str) -> Iterator[str]:
    """A sentence for each kind of series that a look needs and that the node's gpumap does not serve, though its source
    answers."""
    document = found.document
    up = {source["source"] for source in document["sources"] if source["up"]}
    devices = document["devices"]
    if not document["sources"]:
        yield "its gpumap does not tell how its sources are (gpumap_source_up is dropped)"
        return
    if "nvml" in up and _lacks_gpus(found):
        yield f"{_SERVED} {_BUILT}"
    if families.HOLDERS in _with_needed(parts) and "kubelet" in up and devices:
        if not any(device["holders_known"] for device in devices):
            yield f"{_SERVED} {_GIVEN}"
        elif not namespace and (fewer := [one["uuid"] for one in devices if _has_more_holders(one, found)]):
            yield f"not all who hold {listed(fewer)} are told (gpumap_allocation_slots is dropped)"
    if families.USE in parts and "nvml" in up:
        yield from _use(document, found, namespace)


def nowhere(found: Iterable[Found]) -> Iterator[str]:
    """Devices that no node says it has, though containers hold or use them: these are not shown."""
    clusters = {id(one.cluster): one.cluster for one in found}  # mostly one, of all nodes
    lost = sorted({uuid for cluster in clusters.values() for uuid in placeless(cluster)})
    if lost:
        yield f"which node has {listed(lost)} is not told: who holds and who uses it is not shown"


def _with_needed(parts: Collection[str]) -> set[str]:
    return {family.part for family in families.needed(parts)}


def _lacks_gpus(found: Found) -> bool:
    """NVML answers, and no series tells of a GPU; or none tells which are the devices that others name."""
    document = found.document
    if document["gpus"] or document["nameless_gpus"]:
        return False
    return bool(document["devices"]) or not newest(found.cluster, found.node).driver


def _has_more_holders(device: Document, found: Found) -> bool:
    return found.cluster.held.get(device["uuid"], 0) > len(device["holders"])


def _use(document: Document, found: Found, namespace: str) -> Iterator[str]:
    down = {gpu["uuid"] for gpu in document["gpus"] if not gpu["up"]}
    partitioned = {gpu["uuid"] for gpu in document["gpus"] if gpu["partitioned"]}
    alive = [one for one in document["devices"] if one["gpu_uuid"] not in down and one["uuid"] not in partitioned]
    if alive and not any(one["owners"] for one in alive):
        yield f"{_SERVED} {_USED}"
    elif not namespace and any(_has_unnamed(one) for one in alive):
        yield "not all who use its GPUs are told (gpumap_container_gpu_processes is dropped)"


def _has_unnamed(device: Document) -> bool:
    """Containers' processes run there, and no container is told to have any."""
    told = sum(row["processes"] or 0 for row in device["owners"] if row["owner"] in ("assigned", "unassigned"))
    return told > 0 and not device["users"]
