"""What is not known of a node's devices, such as the holders of one, as sentences. What no source reports is not 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpumap.model.devices import device_name, has_kubelet, sources_up
from gpumap.model.formatting import listed
from gpumap.model.node import Device, Node

_NAMES_MAX = 8


def invisible(node: Node) -> str:
    """Return why the use of containers is unknown."""
    remedy = node.remedies.get("pid_visibility")
    return remedy or "Processes of other containers are not visible: set hostPID: true."


def use_known(device: Device) -> bool:
    """Return whether the use of a device is known: then each owner is listed, with 0 if it uses nothing."""
    return bool(device.owners)


def unknown_of_devices(node: Node, *, use: bool = True) -> Iterator[str]:
    """Return what is not known of devices although their GPU answers; of their `use` only if that is asked for."""
    by_series = node.collect is None
    gaps = gaps_of(node)
    if gaps.nowhere and not (by_series and not node.gpus):
        yield f"the GPU of {_which(gaps.nowhere, node)} is not known"
    is_node_wide = by_series and "kubelet" in sources_up(node) and len(gaps.unheld) == len(node.devices)
    if gaps.unheld and not is_node_wide:
        yield f"the holders of {_which(gaps.unheld, node)} are not known"
    if use and gaps.unused and not (by_series and len(gaps.unused) == len(gaps.measurable)):
        yield f"the use of {_which(gaps.unused, node)} is not known"


class Gaps(NamedTuple):
    """Devices by what is not known of them: their GPU (`nowhere`), their holders, their use.

    On a machine without a kubelet, no device can have holders.

    `measurable`: the devices whose use could be known.
    """

    nowhere: Sequence[Device]
    unheld: Sequence[Device]
    unused: Sequence[Device]
    measurable: Sequence[Device]


def gaps_of(node: Node) -> Gaps:
    devices = () if node.stale else node.devices
    measured = "nvml" in sources_up(node)
    measurable = list(_measurable(node)) if measured else []
    return Gaps(
        nowhere=[device for device in devices if device.gpu_uuid is None] if measured else [],
        unheld=[device for device in devices if device.holders is None] if has_kubelet(node) else [],
        unused=[device for device in measurable if not use_known(device)],
        measurable=measurable,
    )


def _measurable(node: Node) -> Iterator[Device]:
    """Return all devices but those of a GPU that is down, and partitioned GPUs that were assigned as a whole."""
    down = {gpu.uuid for gpu in node.gpus if not gpu.up}
    for device in node.devices:
        if device.gpu_uuid not in down and not device.partitioned:
            yield device


def _which(devices: Sequence[Device], node: Node) -> str:
    if len(devices) == len(node.devices) >= len(node.gpus):  # not a selection
        return "all devices" if len(devices) > 1 else "the only device"
    return named(devices)


def named(devices: Sequence[Device]) -> str:
    """Return `GPU 0, 1`: some devices by their index, or by UUID if that is not known."""
    gpu = "" if all(device.index is None for device in devices) else "GPU "
    return gpu + listed(
        [device.uuid if device.index is None else device_name(device) for device in devices], _NAMES_MAX
    )
