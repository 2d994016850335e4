"""What is not known of a node's devices, such as the holders of one, as sentences. What no source reports is not 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpumap.model.devices import device_name, has_kubelet, partitioned_gpus, sources_up
from gpumap.model.map import DeviceEntry, NodeMap
from gpumap.model.words import listed

_NAMES_MAX = 8


def invisible(node_map: NodeMap) -> str:
    """Return why the use of containers is unknown."""
    remedy = node_map.remedies.get("pid_visibility")
    return remedy or "Processes of other containers are not visible: set hostPID: true."


def use_known(device: DeviceEntry) -> bool:
    """Return whether the use of a device is known: then each owner is listed, with 0 if it uses nothing."""
    return bool(device.owners)


def repairs(node_map: NodeMap) -> Iterator[tuple[int, str]]:
    """Return GPUs that answer and need repair: the index, and what is wrong with the remedy."""
    for gpu in node_map.gpus if not node_map.stale else ():
        recovery = gpu.recovery_action
        if not gpu.up:
            continue
        rows = "row_remap_failure" if gpu.row_remap_failure else "row_remap_pending" if gpu.row_remap_pending else ""
        if rows:
            yield gpu.index, f"has bad memory rows: {gpu.remedies.get(rows, rows)}"
        if recovery and recovery.action != "none":
            yield gpu.index, f"needs recovery: {recovery.remedy or recovery.action}"


def unknown_of_devices(node_map: NodeMap, *, use: bool = True) -> Iterator[str]:
    """Return what is not known of devices although their GPU answers; of their `use` only if that is asked for.

    What a server has no series of, for a whole node, is reported by the query (gpumap.cli.fleet.joins).
    """
    by_series = node_map.collect is None
    gaps = gaps_of(node_map)
    if gaps.nowhere and not (by_series and not node_map.gpus):
        yield f"the GPU of {_which(gaps.nowhere, node_map)} is not known"
    whole = by_series and "kubelet" in sources_up(node_map) and len(gaps.unheld) == len(node_map.devices)
    if gaps.unheld and not whole:
        yield f"the holders of {_which(gaps.unheld, node_map)} are not known"
    if use and gaps.unused and not (by_series and len(gaps.unused) == len(gaps.measurable)):
        yield f"the use of {_which(gaps.unused, node_map)} is not known"


class Gaps(NamedTuple):
    """Devices by what is not known of them: their GPU (`nowhere`), their holders, their use.

    On a machine without a kubelet, no device can have holders.

    `measurable`: the devices whose use could be known.
    """

    nowhere: Sequence[DeviceEntry]
    unheld: Sequence[DeviceEntry]
    unused: Sequence[DeviceEntry]
    measurable: Sequence[DeviceEntry]


def gaps_of(node_map: NodeMap) -> Gaps:
    devices = () if node_map.stale else node_map.devices
    measured = "nvml" in sources_up(node_map)
    measurable = list(_measurable(node_map)) if measured else []
    return Gaps(
        nowhere=[device for device in devices if device.gpu_uuid is None] if measured else [],
        unheld=[device for device in devices if not device.holders_known] if has_kubelet(node_map) else [],
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
        return "all devices" if len(devices) > 1 else "the only device"
    return named(devices)


def named(devices: Sequence[DeviceEntry]) -> str:
    """Return `GPU 0, 1`: some devices by their index, or by UUID if that is not known."""
    gpu = "" if all(one.index is None for one in devices) else "GPU "
    return gpu + listed([one.uuid if one.index is None else device_name(one) for one in devices], _NAMES_MAX)
