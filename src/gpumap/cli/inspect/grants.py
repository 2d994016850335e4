"""What is granted, and used, of the memory of each node's GPUs: by GPU, and by pod. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from gpumap.cli.inspect.gpu_grants import (
    GIB,
    GPU_MEM,
    MIB,
    UNKNOWN_AMOUNT,
    Amount,
    GpuGrants,
    PodKey,
    PodShare,
    count,
    guessed_slot_bytes,
    sum_of,
)
from gpumap.cli.rows import NodeMaps
from gpumap.model.devices import sources_up
from gpumap.model.errors import FatalError
from gpumap.model.grouping import grouped
from gpumap.model.node import Device, NamelessGpu, Node, UnmatchedSlots
from gpumap.model.readings import DeviceMemory

GPUS_MAX = 1024
"""Of a node. The table has a column for each index."""
_DIGITS = re.compile(r"([0-9]+)")


class PodGrants(NamedTuple):
    """A pod that holds, or uses, part of a node's GPUs."""

    namespace: str
    pod: str
    shares: tuple[PodShare, ...]


class NodeGrants(NamedTuple):
    """A node. `pending` is held on no known GPU; `None` if there is nothing of it.

    `blind`: the GPUs of the node are unknown. `slot_bytes`: size of gpushare's slots here; `None` without such slots.
    """

    name: str
    address: str
    gpus: tuple[GpuGrants, ...]
    pods: tuple[PodGrants, ...]
    pending: Amount | None
    allocated: Amount
    total: Amount
    used: Amount
    blind: bool
    slot_bytes: int | None


class Grants(NamedTuple):
    """All nodes with GPUs, by name. `unit_bytes` is the unit in which amounts are shown."""

    nodes: tuple[NodeGrants, ...]
    unit_bytes: int

    @property
    def unit(self) -> str:
        return "MiB" if self.unit_bytes == MIB else "GiB"


def grants(maps: NodeMaps) -> Grants:
    """Count the grants of nodes. The unit is MiB if all of gpushare's slots are a MiB, else GiB."""
    nodes = [node for one in maps.maps if (node := _node(one)) is not None]
    slot_bytes = {node.slot_bytes for node in nodes if node.slot_bytes is not None}
    return Grants(tuple(sorted(nodes, key=lambda node: natural(node.name))), MIB if slot_bytes == {MIB} else GIB)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key of names as people sort them: node-9 before node-10."""
    return tuple((int(part) if place % 2 else 0, part) for place, part in enumerate(_DIGITS.split(name)))


def _node(node_map: Node) -> NodeGrants | None:
    """Count one node; `None` if it has no GPU."""
    holders_known = _holders_known(node_map)
    counted = _counted(node_map, holders_known=holders_known)
    slot_bytes = _slot_bytes(counted, node_map.unmatched)
    waiting = _waiting(node_map.unmatched, slot_bytes or GIB)
    lost = [one for one in counted if one.index is None]
    # The GPUs of the node are unknown: none is, and NVML does not answer or there are devices.
    blind = len(lost) == len(counted) and ("nvml" not in sources_up(node_map) or bool(node_map.devices))
    if not (counted or waiting or blind or node_map.nameless_gpus):
        return None
    gpus = _in_places(counted, node_map.nameless_gpus)
    pods = _pods([*(one.shares for one in counted), waiting])
    pending = [share.allocated for pod in pods for share in pod.shares if share.index is None]
    # Slots of other plugins that gpumap cannot place are on one of the node's GPUs.
    unplaced = any(one.resource != GPU_MEM and one.reason != "not_in_nvml" for one in node_map.unmatched)
    hidden = _unknown_if(not holders_known or unplaced)
    return NodeGrants(
        name=node_map.name,
        address=node_map.internal_ip,
        gpus=gpus,
        pods=pods,
        pending=sum_of(pending) if pending else None,
        allocated=sum_of([*(gpu.allocated for gpu in gpus), *pending, *hidden]),
        total=sum_of([*(gpu.total for gpu in (*gpus, *lost)), *_unknown_if(blind)]),
        used=sum_of([*(gpu.used for gpu in gpus), *_unknown_if(blind)]),
        blind=blind,
        slot_bytes=slot_bytes,
    )


def _unknown_if(unknown: bool) -> tuple[Amount, ...]:
    """Return what makes a sum not whole, or nothing."""
    return (UNKNOWN_AMOUNT,) if unknown else ()


# --- GPUs and their places --------------------------------------------------------------------------------------------


def _holders_known(node_map: Node) -> bool:
    """Return whether the holders of each device are known. A node without devices knows them if its kubelet answers."""
    if node_map.devices:
        return all(device.holders is not None for device in node_map.devices)
    kubelet = [one for one in node_map.sources if one.source == "kubelet"]
    return not node_map.stale and any(one.up or one.last_success is not None for one in kubelet)


def _counted(node_map: Node, *, holders_known: bool) -> list[GpuGrants]:
    """Count each GPU with its devices, if any; then the devices of unknown GPUs."""
    # A partitioned GPU that is assigned as a whole is its own GPU.
    devices_of = grouped((device.gpu_uuid or device.uuid, device) for device in node_map.devices)
    sees = bool(node_map.capabilities.get("pid_visibility"))

    def counted(place: int | None, uuid: str, memory: DeviceMemory | None, devices: list[Device]) -> GpuGrants:
        known = all(device.holders is not None for device in devices) if devices else holders_known
        return count(place, uuid, memory, devices, holders_known=known, sees_processes=sees)

    found = [
        counted(gpu.index, gpu.uuid, gpu.reading.memory if gpu.reading else None, devices_of.pop(gpu.uuid, []))
        for gpu in node_map.gpus
    ]
    lost = (one for of_gpu in devices_of.values() for one in of_gpu)
    return found + [counted(None, one.uuid, one.memory, [one]) for one in lost]


def _in_places(counted: Iterable[GpuGrants], nameless: Sequence[NamelessGpu]) -> tuple[GpuGrants, ...]:
    """Return each GPU at the place of its index, with unknown amounts of one that did not report its UUID."""
    known = {one.index: one for one in counted if one.index is not None}
    size = max([*known, *(one.index for one in nameless)], default=-1) + 1
    if size > GPUS_MAX:
        raise FatalError(f"a node has a GPU with the index {size - 1}: no node has more than {GPUS_MAX} GPUs")
    nothing = UNKNOWN_AMOUNT
    return tuple(known.get(index) or GpuGrants(index, None, nothing, nothing, nothing) for index in range(size))


# --- slots on no GPU --------------------------------------------------------------------------------------------------


def _slot_bytes(counted: Iterable[GpuGrants], unmatched: Sequence[UnmatchedSlots]) -> int | None:
    """Return the size of the node's slots: MiB if all are, else GiB; a guess if no slot is on a GPU."""
    units = {one.slot_bytes for one in counted if one.slot_bytes is not None}
    if units:
        return MIB if units == {MIB} else GIB
    most = max((one.slots for one in unmatched if one.resource == GPU_MEM), default=0)
    return guessed_slot_bytes(most) if most else None


def _waiting(unmatched: Iterable[UnmatchedSlots], slot_bytes: int) -> dict[PodKey, PodShare]:
    """Return gpushare's slots that match no GPU: those of pods that kubectl inspect calls pending."""
    found: dict[PodKey, int] = {}
    for one in unmatched:
        if one.resource == GPU_MEM:
            key = one.namespace, one.pod
            found[key] = found.get(key, 0) + one.slots * slot_bytes
    return {key: PodShare(None, True, Amount(granted), UNKNOWN_AMOUNT) for key, granted in found.items()}


# --- pods -------------------------------------------------------------------------------------------------------------


def _pods(found: Iterable[Mapping[PodKey, PodShare]]) -> tuple[PodGrants, ...]:
    """Return pods by the first GPU that they hold, those without a GPU last; then by name."""
    shares = grouped(chain.from_iterable(of_gpu.items() for of_gpu in found))
    pods = [PodGrants(*key, _by_place(of_pod)) for key, of_pod in shares.items()]
    return tuple(sorted(pods, key=lambda pod: (_first_place(pod.shares), natural(pod.namespace), natural(pod.pod))))


def _first_place(shares: Sequence[PodShare]) -> float:
    """Return the place of the first GPU that a pod holds, whatever others it uses."""
    return _place(next((one for one in shares if one.held), shares[0]))


def _by_place(shares: Iterable[PodShare]) -> tuple[PodShare, ...]:
    """Return shares in the order of their GPUs; those of unknown GPUs, of whatever resources, as one."""
    shares = list(shares)
    placed = sorted((one for one in shares if one.index is not None), key=_place)
    unplaced = [one for one in shares if one.index is None]
    if unplaced:
        allocated, used = sum_of(one.allocated for one in unplaced), sum_of(one.used for one in unplaced)
        placed.append(PodShare(None, True, allocated, used))
    return tuple(placed)


def _place(share: PodShare) -> float:
    return float("inf") if share.index is None else share.index
