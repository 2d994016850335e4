"""`gpumap inspect`: the columns and numbers of `kubectl inspect gpushare` and `cgpu`, and with --used real use too.

The original is AliyunContainerService/gpushare-device-plugin, cmd/inspect/display.go. Its totals are cut off, not
rounded; so are these. What is not known is not 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from gpumap.cli.table import Column, Shape, join_blocks, notes, refuse_huge, table
from gpumap.model.devices import sources_up
from gpumap.model.errors import FatalError
from gpumap.model.formatting import UNKNOWN
from gpumap.model.gaps import use_known
from gpumap.model.grouping import grouped
from gpumap.model.node import VERSION, ContainerOnDevice, Device, Node
from gpumap.model.plugins import GPU_MEM, gpushare_slot_bytes
from gpumap.model.readings import DeviceMemory
from gpumap.model.terms import Owner, PodName

GPUS_MAX = 1024
"""Of a node. The table has a column for each index."""
LEGEND = "! a pod uses more than it was granted"
MIB, GIB = 1 << 20, 1 << 30
_CELL = 16
"""About the characters of a cell."""


class Amount(NamedTuple):
    """Bytes; if not `exact`, a part of the amount is unknown, and `bytes` is the least that it can be."""

    bytes: int = 0
    exact: bool = True


UNKNOWN_AMOUNT = Amount(0, exact=False)


OnDevice = tuple[Device, ContainerOnDevice]


class Amounts(NamedTuple):
    """The memory of a GPU or node: used, granted, and in all."""

    used: Amount
    granted: Amount
    total: Amount


class Share(NamedTuple):
    """What a pod has of a GPU. `holds`: it was granted."""

    used: Amount
    granted: Amount
    holds: bool

    @property
    def is_over(self) -> bool:
        """It uses more than it was granted, as far as both are known."""
        return self.granted.exact and self.used.bytes > self.granted.bytes


class InspectedGpu(NamedTuple):
    """A GPU. `holders_known`, `use_known`: a pod without a share of it holds, or uses, nothing of it.

    `slot_bytes`: size of a slot of gpushare here; 0 without such slots.
    """

    uuid: str | None = None
    amounts: Amounts = Amounts(UNKNOWN_AMOUNT, UNKNOWN_AMOUNT, UNKNOWN_AMOUNT)
    shares: Mapping[PodName, Share] = {}
    holders_known: bool = False
    use_known: bool = False
    slot_bytes: int = 0

    @property
    def is_over(self) -> bool:
        return any(share.is_over for share in self.shares.values())


class InspectedNode(NamedTuple):
    """A node. `gpus` are by index. `pods` have their shares by the index of the GPU, which is `None` if it is unknown.

    `pending`: what is granted on unknown GPUs, `None` if there is nothing. `is_blind`: no GPU of the node is known.
    """

    name: str
    address: str
    gpus: Sequence[InspectedGpu]
    pods: Mapping[PodName, Mapping[int | None, Share]]
    pending: Amount | None
    amounts: Amounts
    is_blind: bool
    slot_bytes: int


def inspect_nodes(nodes: Iterable[Node]) -> list[InspectedNode]:
    """Return the nodes with GPUs, by name."""
    inspected = [entry for node in nodes if (entry := _inspect_node(node)) is not None]
    return sorted(inspected, key=lambda node: _natural_key(node.name))


def unit_of(nodes: Iterable[InspectedNode]) -> int:
    """Return the unit of the amounts in bytes: a MiB if all of gpushare's slots are a MiB, else a GiB."""
    return MIB if {node.slot_bytes for node in nodes} - {0} == {MIB} else GIB


def _natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key of names as people sort them: node-9 before node-10."""
    return tuple((int(piece) if place % 2 else 0, piece) for place, piece in enumerate(re.split(r"([0-9]+)", name)))


def _exact(value: int | None) -> Amount:
    return UNKNOWN_AMOUNT if value is None else Amount(value)


def _sum(amounts: Iterable[Amount]) -> Amount:
    addends = list(amounts)
    return Amount(sum(amount.bytes for amount in addends), all(amount.exact for amount in addends))


# --- a node -----------------------------------------------------------------------------------------------------------


def _inspect_node(node: Node) -> InspectedNode | None:
    """Return what is on the GPUs of a node; `None` if it has none."""
    indexes = [gpu.index for gpu in node.gpus] + [gpu.index for gpu in node.nameless_gpus]
    size = max(indexes, default=-1) + 1
    if size > GPUS_MAX:
        raise FatalError(f"a node has a GPU with the index {size - 1}: no node has more than {GPUS_MAX} GPUs")
    answered = "kubelet" in sources_up(node)
    # A partitioned GPU that is assigned as a whole is its own GPU.
    devices = grouped((device.gpu_uuid or device.uuid, device) for device in node.devices)
    sees = bool(node.capabilities.get("pid_visibility"))
    gpus = [InspectedGpu()] * size
    for gpu in node.gpus:
        memory = gpu.reading.memory if gpu.reading else None
        gpus[gpu.index] = _inspect_gpu(gpu.uuid, memory, devices.pop(gpu.uuid, []), answered, sees)
    unplaced = [device for of_gpu in devices.values() for device in of_gpu]
    is_blind = not node.gpus and ("nvml" not in sources_up(node) or bool(unplaced))
    waiting = grouped((slots.pod_name, slots.slots) for slots in node.unmatched if slots.resource == GPU_MEM)
    if not (gpus or unplaced or waiting or is_blind):
        return None
    lost = _inspect_gpu("", None, unplaced, answered, sees)
    slot_bytes = max((gpu.slot_bytes for gpu in gpus), default=0)
    pods: dict[PodName, dict[int | None, Share]] = {}
    for index, shares in (*enumerate(gpu.shares for gpu in gpus), (None, lost.shares)):
        for pod, share in shares.items():
            pods.setdefault(pod, {})[index] = share
    for pod, slots in waiting.items():
        share = pods.setdefault(pod, {}).get(None, Share(Amount(), Amount(), holds=True))
        granted = _sum([share.granted, Amount(sum(slots) * (slot_bytes or GIB))])
        pods[pod][None] = Share(UNKNOWN_AMOUNT, granted, holds=True)
    pending = [shares[None].granted for shares in pods.values() if None in shares]
    holders_known = all(device.holders is not None for device in node.devices) if node.devices else answered
    # Slots of other plugins that gpumap cannot place are on one of the node's GPUs.
    is_placed = all(slots.resource == GPU_MEM or slots.reason == "not_in_nvml" for slots in node.unmatched)
    used, granted, total = _sums(gpus)
    return InspectedNode(
        node.name,
        node.internal_ip,
        gpus,
        {pod: pods[pod] for pod in sorted(pods, key=lambda pod: _pod_key(pod, pods[pod]))},
        _sum(pending) if pending else None,
        Amounts(
            Amount(used.bytes, used.exact and not is_blind),
            _sum([granted, *pending, Amount(0, holders_known and is_placed)]),
            Amount(total.bytes, total.exact and not unplaced and not is_blind),
        ),
        is_blind,
        slot_bytes,
    )


def _pod_key(pod: PodName, shares: Mapping[int | None, Share]) -> tuple[object, ...]:
    """Sort key: by the first GPU that a pod holds, those without a GPU last; then by name."""
    index = next((index for index, share in shares.items() if share.holds), next(iter(shares)))
    return GPUS_MAX if index is None else index, _natural_key(pod.namespace), _natural_key(pod.pod)


def _sums(entries: Iterable[InspectedGpu | InspectedNode]) -> Amounts:
    amounts = [entry.amounts for entry in entries]
    return Amounts(*(_sum(column) for column in zip(*amounts, strict=True))) if amounts else Amounts(*[Amount()] * 3)


# --- a GPU ------------------------------------------------------------------------------------------------------------


def _inspect_gpu(
    uuid: str, memory: DeviceMemory | None, devices: Sequence[Device], kubelet_answered: bool, sees_processes: bool
) -> InspectedGpu:
    """Count the grants and use of one GPU's devices. Without the GPU's own `memory`, that of its device is taken.

    The memory of a partitioned GPU is that of its MIG devices: no container can be assigned the rest.
    """
    memory = memory or next((device.memory for device in devices if device.uuid == uuid), None)
    offered = sum(device.allocatable.get(GPU_MEM, 0) for device in devices)
    slot_bytes = gpushare_slot_bytes(offered, memory.total_bytes) if offered and memory else 0
    instances = {device.mig.gpu_instance_id: device.memory for device in devices if device.mig}
    total = _exact(memory.total_bytes if memory else None)
    if instances:
        total = _sum(_exact(instance.total_bytes if instance else None) for instance in instances.values())
    elif slot_bytes:
        total = Amount(offered * slot_bytes)
    holders_known = all(device.holders is not None for device in devices) if devices else kubelet_answered
    pairs = [(device, container) for device in devices for container in device.containers]
    pods = grouped((container.pod_name, (device, container)) for device, container in pairs)
    shares = {pod: share for pod, of_pod in pods.items() if (share := _share(of_pod))}
    granted = _granted(pairs) if holders_known else UNKNOWN_AMOUNT
    return InspectedGpu(
        uuid,
        Amounts(_exact(memory.used_bytes if memory else None), granted, total),
        shares,
        holders_known,
        sees_processes and all(map(use_known, [device for device in devices if device.mig] or devices)),
        slot_bytes,
    )


def _share(pairs: Sequence[OnDevice]) -> Share | None:
    """Return what the containers of a pod hold and use."""
    holders = {container.name for _, container in pairs if container.holds}
    users = [container for _, container in pairs if container.use]
    used = _sum(_exact(user.use.memory_bytes) for user in users if user.use)
    if holders:
        is_measured = holders <= {user.name for user in users}
        return Share(Amount(used.bytes, used.exact and is_measured), _granted(pairs), holds=True)
    # A pod that is reported to use it without a grant was granted nothing. The grants of other users are unknown.
    is_unassigned = all(user.owner is Owner.UNASSIGNED for user in users)
    return Share(used, Amount(0, is_unassigned), holds=False) if users else None


def _granted(pairs: Iterable[OnDevice]) -> Amount:
    """Return what is granted to these containers.

    Compute instances share the memory of their GPU instance, which counts once for all its holders.
    """
    instances: dict[tuple[str, int | None], list[tuple[Amount, bool]]] = {}
    for of_device in grouped((device.uuid, (device, holder)) for device, holder in pairs if holder.holds).values():
        device, _ = of_device[0]
        granted = _sum(_exact(holder.allocated_memory_bytes) for _, holder in of_device)
        is_all = bool(device.mig and device.memory and granted.bytes >= device.memory.total_bytes)
        key = device.gpu_uuid or device.uuid, device.mig.gpu_instance_id if device.mig else None
        instances.setdefault(key, []).append((granted, is_all))
    return _sum(
        Amount(max(grants)[0].bytes, max(grants)[1] or all(granted.exact for granted, _ in grants))
        for grants in instances.values()
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def inspect_table(
    nodes: Sequence[InspectedNode], sentences: Sequence[str], shape: Shape, *, details: bool = False, used: bool = False
) -> str:
    """Return a line for each node, or with `details` a table of pods for each.

    `sentences` are about what is not known.
    """
    title, unit = "Used/Allocated/Total" if used else "Allocated/Total", unit_of(nodes)
    if details:
        refuse_huge(sum(len(node.gpus) * len(node.pods) for node in nodes) * _CELL)
        blocks = [_pod_table(node, unit, shape, used=used) for node in nodes]
    else:
        blocks = [table(_node_columns(nodes, title, unit, used=used), nodes, shape)] if nodes else []
    sums = _sums(nodes)
    parts = (sums.used, sums.granted) if used else (sums.granted,)
    percents = "/".join(_percent(amount, sums.total) for amount in parts)
    lines = [f"{title} GPU Memory In Cluster: {_cell((*parts, sums.total), unit)} ({percents})"]
    if used and any(gpu.is_over for node in nodes for gpu in node.gpus):
        lines.append(LEGEND)
    return join_blocks([*blocks, notes(lines, shape.screen), notes(sentences, shape.screen)])


def _node_columns(nodes: Sequence[InspectedNode], title: str, unit: int, *, used: bool) -> list[Column[InspectedNode]]:
    skipped = 0 if used else 1

    def gpu_cell(index: int, node: InspectedNode) -> str:
        if index < len(node.gpus):
            gpu = node.gpus[index]
            return _cell(gpu.amounts[skipped:], unit, is_over=used and gpu.is_over)
        nothing = UNKNOWN_AMOUNT if node.is_blind else Amount()  # a GPU that only another node has
        return _cell([nothing] * (3 - skipped), unit)

    def pending_cell(node: InspectedNode) -> str:
        return "" if node.pending is None else _cell([node.pending], unit)

    indexes = range(max(len(node.gpus) for node in nodes))
    return [
        Column("NAME", lambda node: node.name, name=True),
        Column("IPADDRESS", lambda node: node.address or "unknown"),
        *(Column(f"GPU{index}({title})", partial(gpu_cell, index)) for index in indexes),
        *([Column("PENDING(Allocated)", pending_cell)] if any(node.pending for node in nodes) else []),
        Column(f"GPU Memory({_unit_name(unit)})", lambda node: _cell(node.amounts[skipped:], unit)),
    ]


def _pod_table(node: InspectedNode, unit: int, shape: Shape, *, used: bool) -> str:
    pods = [pod for pod, shares in node.pods.items() if used or any(share.holds for share in shares.values())]
    total = node.amounts.total
    parts = {"Allocated": node.amounts.granted, **({"Used": node.amounts.used} if used else {})}
    sums = [f"{title}: {_cell([amount], unit)} ({_percent(amount, total)})" for title, amount in parts.items()]
    head = notes([f"NAME: {node.name}   IPADDRESS: {node.address or 'unknown'}"], shape.screen)
    rows = [table(_pod_columns(node, unit, used=used), pods, shape)] if pods else []
    return "\n".join([head, *rows, "   ".join([*sums, f"Total: {_cell([total], unit)}"])])


def _pod_columns(node: InspectedNode, unit: int, *, used: bool) -> list[Column[PodName]]:
    def gpu_cell(index: int, pod: PodName) -> str:
        """A pod without a share of a GPU has nothing of it if all pods that have one are known."""
        gpu, share = node.gpus[index], node.pods[pod].get(index)
        if share is None or not (used or share.holds):
            share = Share(Amount(0, gpu.use_known), Amount(0, gpu.holders_known), holds=False)
        amounts = (share.used, share.granted) if used else (share.granted,)
        return _cell(amounts, unit, is_over=used and share.is_over)

    def pending_cell(pod: PodName) -> str:
        share = node.pods[pod].get(None)
        return _cell([share.granted if share else Amount()], unit)

    title = "Used/Allocated" if used else "Allocated"
    return [
        Column("NAME", lambda pod: pod.pod, name=True, shortened_last=True),
        Column("NAMESPACE", lambda pod: pod.namespace, name=True),
        *(Column(f"GPU{index}({title})", partial(gpu_cell, index)) for index in range(len(node.gpus))),
        *([Column("Pending(Allocated)", pending_cell)] if node.pending else []),
    ]


def _cell(amounts: Iterable[Amount], unit: int, *, is_over: bool = False) -> str:
    """Return whole units, cut off; a part of a unit as <1, and what is known in part as >=."""
    texts = []
    for amount in amounts:
        number, remainder = divmod(amount.bytes, unit)
        if amount.exact:
            texts.append("<1" if remainder and not number else str(number))
        else:
            texts.append(f">={number}" if number else UNKNOWN)
    return "/".join([texts[0] + "!" * is_over, *texts[1:]])


def _percent(amount: Amount, total: Amount) -> str:
    """Return a percentage, cut off as Go's int64(float64) does it: 29/100 is 28%."""
    if not total.exact or (not amount.exact and not amount.bytes):
        return UNKNOWN
    number = int(amount.bytes / total.bytes * 100) if total.bytes else 0
    return f"{number}%" if amount.exact else f">={number}%"


def _unit_name(unit: int) -> str:
    return "MiB" if unit == MIB else "GiB"


# --- values -----------------------------------------------------------------------------------------------------------


def inspect_values(nodes: Sequence[InspectedNode], missing: Sequence[str]) -> dict[str, object]:
    """Return the same for scripts, always with pods and use. An amount that is unknown, or known only in part, is
    null."""
    return {
        "version": VERSION,
        "unit": _unit_name(unit_of(nodes)),
        "nodes": [
            {
                "node": node.name,
                "internal_ip": node.address,
                "gpus": [
                    {"index": index, "uuid": gpu.uuid, **_values(gpu.amounts)} for index, gpu in enumerate(node.gpus)
                ],
                "pods": [
                    {"namespace": pod.namespace, "pod": pod.pod, "gpus": _share_values(shares)}
                    for pod, shares in node.pods.items()
                ],
                "pending_bytes": _bytes(node.pending) if node.pending else None,
                **_values(node.amounts),
            }
            for node in nodes
        ],
        "cluster": _values(_sums(nodes)),
        "missing": list(missing),
    }


def _share_values(shares: Mapping[int | None, Share]) -> list[dict[str, object]]:
    return [
        {
            "index": index,
            "allocated_bytes": _bytes(share.granted),
            "used_bytes": _bytes(share.used),
            "over": share.is_over,
        }
        for index, share in shares.items()
    ]


def _values(amounts: Amounts) -> dict[str, int | None]:
    return {
        "allocated_bytes": _bytes(amounts.granted),
        "total_bytes": _bytes(amounts.total),
        "used_bytes": _bytes(amounts.used),
    }


def _bytes(amount: Amount) -> int | None:
    return amount.bytes if amount.exact else None
