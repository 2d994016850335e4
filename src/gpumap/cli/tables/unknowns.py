"""What is not known of nodes and devices, such as the holders of one, as sentences. What no source reports is not 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.tables.devices import device_name, partitioned_gpus, sources_up
from gpumap.cli.tables.layout import Shape
from gpumap.cli.words import by_reason, listed
from gpumap.model.map import DeviceEntry, NodeMap
from gpumap.model.text import printable

_SENTENCES_MAX, _NAMES_MAX, _BLIND_MAX = 20, 8, 5
_JUDGE_BY = frozenset({"nvml", "kubelet", "pod_identity"})


# --- sentences about nodes --------------------------------------------------------------------------------------------


def few(sentences: Iterable[str], fleet: bool) -> Iterator[str]:
    """Return sentences; of a fleet at most as many as a screen holds."""
    all_of_them = list(sentences)
    yield from all_of_them[:_SENTENCES_MAX] if fleet else all_of_them
    if fleet and len(all_of_them) > _SENTENCES_MAX:
        yield f"and {len(all_of_them) - _SENTENCES_MAX} more of the kind"


def of_each(maps: NodeMaps, sentences: Callable[[NodeMap], Iterable[str]]) -> Iterator[str]:
    """Return the sentences about each node; of a fleet each sentence once, with the names of its nodes."""
    if not maps.fleet:
        for one in maps.maps:
            yield from sentences(one)
        return
    yield from by_reason((one.node.name, sentence) for one in maps.maps for sentence in dict.fromkeys(sentences(one)))


def invisible(node_map: NodeMap) -> str:
    """Return why the use of containers is unknown."""
    remedy = node_map.remedies.get("pid_visibility")
    return remedy or "Processes of other containers are not visible: hostPID: true is needed."


def is_blind(node_map: NodeMap) -> bool:
    """Return whether neither the kubelet nor NVML answers: almost nothing is known of the node."""
    return not sources_up(node_map) & {"kubelet", "nvml"}


def blind(maps: NodeMaps) -> Iterator[str]:
    """Return a sentence for each node that is blind, or for a few of them."""
    nodes = [one for one in maps.maps if is_blind(one)]
    for one in nodes[:_BLIND_MAX]:
        yield f"node {one.node.name}: {one.stale or 'neither its kubelet nor NVML answers'}"
    if len(nodes) > _BLIND_MAX:
        yield f"and {len(nodes) - _BLIND_MAX} more of the kind"


def troubles(maps: NodeMaps) -> Iterator[str]:
    """Return what keeps the maps from being whole: troubles of nodes, and nodes without a map."""
    yield from few(of_each(maps, _troubles), maps.fleet)
    yield from few(maps.missing, maps.fleet)


def _troubles(node_map: NodeMap) -> Iterator[str]:
    if node_map.stale:
        yield node_map.stale
    for gpu in node_map.gpus:
        if not gpu.up:
            yield f"GPU {gpu.index} {gpu.uuid} is down: {gpu.fault}{f'. {gpu.remedy}' if gpu.remedy else ''}"
    for source in node_map.sources:
        if not source.up:
            why = f": {source.reason} ({source.detail or ''})" if source.reason else ""
            yield f"{source.source} is down{why}"
    yield from unknown_of_devices(node_map)
    if not node_map.capabilities.get("pid_visibility"):
        yield invisible(node_map)


# --- what is not known of devices -------------------------------------------------------------------------------------


def use_known(device: DeviceEntry) -> bool:
    """Return whether the use of a device is known: then each owner is listed, with 0 if it uses nothing."""
    return bool(device.owners)


def unknown_of_devices(node_map: NodeMap, *, use: bool = True) -> Iterator[str]:
    """Return what is not known of devices although their GPU answers; of their `use` only if that is asked for.

    What a server has no series of, for a whole node, is reported by the query (gpumap.cli.fleet.gaps).
    """
    by_series = node_map.collect is None
    gaps = _gaps(node_map)
    if gaps.nowhere and not (by_series and not node_map.gpus):
        yield f"which GPU {_which(gaps.nowhere, node_map)} is on, is not known"
    whole = by_series and "kubelet" in sources_up(node_map) and len(gaps.unheld) == len(node_map.devices)
    if gaps.unheld and not whole:
        yield f"who holds {_which(gaps.unheld, node_map)} is not known"
    if use and gaps.unused and not (by_series and len(gaps.unused) == len(gaps.measurable)):
        yield f"what is used of {_which(gaps.unused, node_map)} is not known"


class _Gaps(NamedTuple):
    """Devices by what is not known of them: their GPU (`nowhere`), their holders, their use.

    `measurable`: the devices whose use could be known.
    """

    nowhere: Sequence[DeviceEntry]
    unheld: Sequence[DeviceEntry]
    unused: Sequence[DeviceEntry]
    measurable: Sequence[DeviceEntry]


def _gaps(node_map: NodeMap) -> _Gaps:
    devices = () if node_map.stale else node_map.devices
    measured = "nvml" in sources_up(node_map)
    measurable = list(_measurable(node_map)) if measured else []
    return _Gaps(
        nowhere=[device for device in devices if device.gpu_uuid is None] if measured else [],
        unheld=[device for device in devices if not device.holders_known],
        unused=[device for device in measurable if not use_known(device)],
        measurable=measurable,
    )


def _measurable(node_map: NodeMap) -> Iterator[DeviceEntry]:
    """Return all devices but those of a GPU that is down, and partitioned GPUs that were assigned as a whole."""
    down = {gpu.uuid for gpu in node_map.gpus if not gpu.up}
    partitioned = partitioned_gpus(node_map)
    for device in node_map.devices:
        if device.gpu_uuid not in down and device.uuid not in partitioned:
            yield device


def _which(devices: Sequence[DeviceEntry], node_map: NodeMap) -> str:
    if len(devices) == len(node_map.devices):
        return "its devices" if len(devices) > 1 else "its device"
    return listed([one.uuid if one.index is None else device_name(one) for one in devices], _NAMES_MAX)


def all_known(maps: NodeMaps) -> bool:
    """Return whether nothing can be hidden: all nodes, their sources and each device are known."""
    return not maps.missing and all(map(_all_known, maps.maps))


def _all_known(node_map: NodeMap) -> bool:
    gaps = _gaps(node_map)
    return (
        sources_up(node_map) >= _JUDGE_BY
        and bool(node_map.capabilities.get("pid_visibility"))
        and not node_map.nameless_gpus
        and all(gpu.up for gpu in node_map.gpus)
        and not (gaps.nowhere or gaps.unheld or gaps.unused)
    )


def no_rows(maps: NodeMaps, shape: Shape) -> str:
    """Return the sentence in the place of a table without a device."""
    if shape.namespace:
        verb = "holds or uses" if all_known(maps) else "is known to hold or use"
        return f"Nothing in namespace {printable(shape.namespace)} {verb} a GPU."
    return "No current data." if any(one.stale for one in maps.maps) else "No devices."
