"""`gpumap inspect`: the columns and numbers of `kubectl inspect gpushare` and `cgpu`, and with --used real use too.

The original is AliyunContainerService/gpushare-device-plugin, cmd/inspect/display.go. Its totals are cut off, not
rounded; so are these. What is not known is not 0.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from gpumap.cli.args import add_form, add_watch
from gpumap.cli.commands import Program
from gpumap.cli.filter import select_rows
from gpumap.cli.parser import did_you_mean
from gpumap.cli.rows import NodeMaps
from gpumap.cli.screen import Report
from gpumap.cli.table import Column, Shape, join_blocks, notes, refuse_huge, table
from gpumap.cli.unknowns import few, sentences_of_each
from gpumap.model.devices import has_kubelet, sources_up
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.formatting import UNKNOWN
from gpumap.model.gaps import invisible, unknown_of_devices, use_known
from gpumap.model.grouping import grouped
from gpumap.model.node import VERSION, ContainerOnDevice, Device, Node
from gpumap.model.plugins import GPU_MEM, gpushare_slot_bytes
from gpumap.model.readings import GpuReading
from gpumap.model.terms import Owner, PodName

if TYPE_CHECKING:
    from gpumap.cli.commands import Commands

_DETAILS = """\
For GPUs that gpushare shares, the columns and numbers are those of `kubectl inspect gpushare`
and `kubectl inspect cgpu`. For other GPUs they show the granted memory in GiB."""
_EXAMPLES = {
    "gpumap": [
        ("this node", "gpumap inspect"),
        ("this node, container by container", "gpumap inspect -d"),
        ("who uses more than was granted", "gpumap inspect -d --used --url http://127.0.0.1:9401"),
    ],
    "kubectl gpumap": [
        ("the whole cluster", "kubectl gpumap inspect"),
        ("one node with its pods and their used memory", "kubectl gpumap inspect gpu-1 -d --used"),
    ],
}
NOT_KNOWN = "- means unknown, and >= means at least. A time-sliced GPU grants no memory."
LEGEND = "! a pod uses more than it was granted"
GPUS_MAX = 1024
"""Of a node. The table has a column for each index."""
_MIB, _GIB = 1 << 20, 1 << 30
_UNITS = {_MIB: "MiB", _GIB: "GiB"}
_CELL = 16
"""About the characters of a cell."""


def add(commands: Commands, program: Program) -> None:
    parser = program.add_command(commands, "inspect", _inspect, _EXAMPLES, details=_DETAILS, usage="[NODE] [flags]")
    parser.add_argument("only_node", metavar="NODE", nargs="?", help="Show only this node.")
    output = parser.add_argument_group("output")
    add_form(output, ("table", "json", "yaml"))
    output.add_argument("-d", "--details", action="store_true", help="Show one table for each node, with its pods.")
    output.add_argument("--used", action="store_true", help="Show used memory next to granted memory.")
    add_watch(output, program.interval_help)
    program.add_source(parser, "inspect")


def _inspect(program: Program, args: argparse.Namespace) -> int:
    if args.only_node == "":
        raise UsageError("NODE: must not be empty")
    report = inspect_report(details=args.details, used=args.used, node=args.only_node)
    return program.show(args, report, Shape(), None)


def inspect_report(*, details: bool, used: bool, node: str | None = None) -> Report:
    """Return the report of all nodes, or of the one with this name."""

    def write_table(maps: NodeMaps, shape: Shape) -> str:
        maps = select_node(maps, node)
        nodes = inspect_nodes(maps.maps)
        return inspect_table(nodes, unknown_sentences(maps, nodes, used=used), shape, details=details, used=used)

    def values(maps: NodeMaps, _: Shape) -> object:
        return inspect_values(inspect_nodes(select_node(maps, node).maps), maps.missing)

    return Report(write_table, values)


def select_node(maps: NodeMaps, name: str | None) -> NodeMaps:
    """Return the map of one node; without a name of all. Raises FatalError if there is none of that name."""
    nodes = tuple(node for node in maps.maps if name in (None, node.name))
    if name is not None and not nodes:
        hint = did_you_mean(name, [node.name for node in maps.maps])
        if any(node.devices for node in select_rows(maps, "", [name]).maps):
            hint = f"; inspect shows nodes: did you mean `map {name}`?"
        raise FatalError(f'unknown node "{name}"{hint}')
    return maps._replace(maps=nodes)


# --- memory of pods, GPUs and nodes -----------------------------------------------------------------------------------


Amount = tuple[int | None, ...]
"""Addends in bytes. With one that is unknown, the sum of the others is the least that the amount can be."""


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
        return None not in self.granted and known_bytes(self.used) > known_bytes(self.granted)


class InspectedGpu(NamedTuple):
    """A GPU. `share_of_others` is of pods that are not in `shares`: nothing, as far as that is known.

    `slot_bytes`: size of a slot of gpushare here; 0 without such slots.
    """

    uuid: str | None = None
    amounts: Amounts = Amounts((None,), (None,), (None,))
    shares: Mapping[PodName, Share] = {}
    share_of_others: Share = Share((None,), (None,), holds=False)
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


def inspect_nodes(nodes: Iterable[Node]) -> list[InspectedNode]:
    """Return the nodes with GPUs, by name."""
    return sorted(filter(None, map(_inspect_node, nodes)), key=lambda node: _natural_key(node.name))


def _natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key of names as people sort them: node-9 before node-10."""
    return tuple((int(piece) if place % 2 else 0, piece) for place, piece in enumerate(re.split(r"([0-9]+)", name)))


def known_bytes(amount: Amount) -> int:
    return sum(addend or 0 for addend in amount)


def _nothing(*, known: bool) -> Amount:
    """Return no addend, or one that is unknown."""
    return () if known else (None,)


def _sum(amounts: Iterable[Amount]) -> Amount:
    return tuple(itertools.chain.from_iterable(amounts))


def _inspect_node(node: Node) -> InspectedNode | None:
    """Return what is on the GPUs of a node; `None` if it has none."""
    size = max([gpu.index for gpu in node.gpus] + [gpu.index for gpu in node.nameless_gpus], default=-1) + 1
    if size > GPUS_MAX:
        raise FatalError(f"a node has a GPU with the index {size - 1}: no node has more than {GPUS_MAX} GPUs")
    answered = "kubelet" in sources_up(node)
    # A partitioned GPU that is assigned as a whole is its own GPU.
    devices = grouped((device.gpu_uuid or device.uuid, device) for device in node.devices)
    sees = bool(node.capabilities.get("pid_visibility"))
    gpus = [InspectedGpu()] * size
    for gpu in node.gpus:
        gpus[gpu.index] = _inspect_gpu(gpu.uuid, gpu.reading, devices.pop(gpu.uuid, []), answered, sees)
    unplaced = [device for of_gpu in devices.values() for device in of_gpu]
    is_blind = not node.gpus and ("nvml" not in sources_up(node) or bool(unplaced))
    waiting = grouped((slots.pod_name, slots.slots) for slots in node.unmatched if slots.resource == GPU_MEM)
    if not (gpus or unplaced or waiting or is_blind):
        return None
    slot_bytes = max((gpu.slot_bytes for gpu in gpus), default=0) or _GIB
    pending = dict(_inspect_gpu("", None, unplaced, answered, sees).shares)
    for pod, slots in waiting.items():
        granted = pending[pod].granted if pod in pending else ()
        pending[pod] = Share((None,), (*granted, sum(slots) * slot_bytes), holds=True)
    pods: dict[PodName, dict[int | None, Share]] = {}
    for index, shares in (*enumerate(gpu.shares for gpu in gpus), (None, pending)):
        for pod, share in shares.items():
            pods.setdefault(pod, {})[index] = share

    def pod_key(pod: PodName) -> tuple[object, ...]:
        """By the first GPU that a pod holds, those without a GPU last; then by name."""
        index = next((index for index, share in pods[pod].items() if share.holds), next(iter(pods[pod])))
        return GPUS_MAX if index is None else index, _natural_key(pod.namespace), _natural_key(pod.pod)

    holders_known = all(device.holders is not None for device in node.devices) if node.devices else answered
    # Slots of other plugins that gpumap cannot place are on one of the node's GPUs.
    is_placed = all(slots.resource == GPU_MEM or slots.reason == "not_in_nvml" for slots in node.unmatched)
    granted_elsewhere = _sum(share.granted for share in pending.values())
    used, granted, total = _sums(gpus)
    return InspectedNode(
        node.name,
        node.internal_ip,
        gpus,
        {pod: pods[pod] for pod in sorted(pods, key=pod_key)},
        granted_elsewhere if pending else None,
        Amounts(
            used + _nothing(known=not is_blind),
            granted + granted_elsewhere + _nothing(known=holders_known and is_placed),
            total + _nothing(known=not unplaced and not is_blind),
        ),
        is_blind,
    )


def _sums(entries: Sequence[InspectedGpu | InspectedNode]) -> Amounts:
    return Amounts(*(_sum(entry.amounts[place] for entry in entries) for place in range(3)))


def _inspect_gpu(
    uuid: str, reading: GpuReading | None, devices: Sequence[Device], kubelet_answered: bool, sees_processes: bool
) -> InspectedGpu:
    """Count the grants and use of one GPU's devices. Without a reading of its memory, that of its device is taken.

    The memory of a partitioned GPU is that of its MIG devices: no container can be assigned the rest.
    """
    memories = [reading.memory if reading else None, *(device.memory for device in devices if device.uuid == uuid)]
    memory = next(filter(None, memories), None)
    offered = sum(device.allocatable.get(GPU_MEM, 0) for device in devices)
    slot_bytes = gpushare_slot_bytes(offered, memory.total_bytes) if offered and memory else 0
    instances = {device.mig.gpu_instance_id: device.memory for device in devices if device.mig}
    total: Amount = (offered * slot_bytes if slot_bytes else memory.total_bytes if memory else None,)
    if instances:
        total = tuple(instance.total_bytes if instance else None for instance in instances.values())
    holders_known = all(device.holders is not None for device in devices) if devices else kubelet_answered
    users_known = sees_processes and all(map(use_known, [device for device in devices if device.mig] or devices))
    pairs = [(device, container) for device in devices for container in device.containers]
    pods = grouped((container.pod_name, (device, container)) for device, container in pairs)
    return InspectedGpu(
        uuid,
        Amounts((memory.used_bytes if memory else None,), _granted(pairs) if holders_known else (None,), total),
        {pod: share for pod, of_pod in pods.items() if (share := _share(of_pod))},
        Share(_nothing(known=users_known), _nothing(known=holders_known), holds=False),
        slot_bytes,
    )


def _share(pairs: Sequence[tuple[Device, ContainerOnDevice]]) -> Share | None:
    """Return what the containers of a pod hold and use."""
    holders = {container.name for _, container in pairs if container.holds}
    users = {container.name for _, container in pairs if container.use}
    used = tuple(container.use.memory_bytes for _, container in pairs if container.use)
    used += _nothing(known=holders <= users)
    if holders:
        return Share(used, _granted(pairs), holds=True)
    # A pod that is reported to use it without a grant was granted nothing. The grants of other users are unknown.
    is_unassigned = all(container.owner is Owner.UNASSIGNED for _, container in pairs if container.use)
    return Share(used, _nothing(known=is_unassigned), holds=False) if users else None


def _granted(pairs: Iterable[tuple[Device, ContainerOnDevice]]) -> Amount:
    """Return what is granted to these containers.

    Compute instances share the memory of their GPU instance, which counts once for all its holders.
    """
    instances: dict[tuple[str, int | None], list[tuple[Amount, int | None]]] = {}
    for of_device in grouped((device.uuid, (device, holder)) for device, holder in pairs if holder.holds).values():
        device, _ = of_device[0]
        key = device.gpu_uuid or device.uuid, device.mig.gpu_instance_id if device.mig else None
        granted = tuple(holder.allocated_memory_bytes for _, holder in of_device)
        instance_bytes = device.memory.total_bytes if device.mig and device.memory else None
        instances.setdefault(key, []).append((granted, instance_bytes))
    return _sum(map(_granted_of_instance, instances.values()))


def _granted_of_instance(grants: Sequence[tuple[Amount, int | None]]) -> Amount:
    """Return the largest of the grants of an instance's devices. All of its memory is never more."""
    largest = max(known_bytes(granted) for granted, _ in grants)
    is_all = any(instance_bytes is not None and largest >= instance_bytes for _, instance_bytes in grants)
    return largest, *_nothing(known=is_all or all(None not in granted for granted, _ in grants))


# --- what is not known ------------------------------------------------------------------------------------------------


def unknown_sentences(maps: NodeMaps, nodes: Sequence[InspectedNode], *, used: bool) -> list[str]:
    """Return what is not known, a sentence each; of many nodes each sentence once, with their names."""
    sentences = list(few(sentences_of_each(maps, partial(_unknown_of_node, used=used)), maps.fleet))
    if not nodes:
        sentences.append("no GPU found")
    amounts = [amount for node in nodes for amount in node.amounts[0 if used else 1 :]]
    for index, share in (item for node in nodes for shares in node.pods.values() for item in shares.items()):
        amounts += [share.granted] if share.holds or used else []
        amounts += [share.used] if used and index is not None else []
    return [*maps.missing, *sentences, *([] if all(None not in amount for amount in amounts) else [NOT_KNOWN])]


def _unknown_of_node(node: Node, *, used: bool) -> Iterator[str]:
    if node.stale:
        yield node.stale
        return
    up = sources_up(node)
    if "nvml" not in up:
        yield "NVML does not answer: gpumap cannot find the GPU of a grant; PENDING contains all grants"
    if not has_kubelet(node):
        yield "this machine has no kubelet (--no-kubelet): nothing is assigned"
    elif "kubelet" not in up:
        yield "the kubelet does not answer: the assignments may be old or unknown"
    yield from unknown_of_devices(node, use=used)
    for gpu in node.gpus:
        if not gpu.up:
            yield f"GPU {gpu.index} is down: {gpu.fault}"
    for nameless in node.nameless_gpus:
        yield f"GPU {nameless.index} is down, and has not reported its uuid: {nameless.fault}"
    for resource, reason in sorted({(slots.resource, slots.reason) for slots in node.unmatched}):
        if resource != GPU_MEM:
            yield f"slots of {resource} match no known GPU ({reason}) and are not in the table"
    if used and "nvml" in up and not node.capabilities.get("pid_visibility"):
        yield f"the use of pods is not known. {invisible(node)}"


# --- tables -----------------------------------------------------------------------------------------------------------


def inspect_table(
    nodes: Sequence[InspectedNode], sentences: Sequence[str], shape: Shape, *, details: bool = False, used: bool = False
) -> str:
    """Return a line for each node, or with `details` a table of pods for each. `sentences` are below the tables."""
    unit = _unit(nodes)
    if details:
        refuse_huge(sum(len(node.gpus) * len(node.pods) for node in nodes) * _CELL)
        blocks = [_pod_table(node, unit, shape, used=used) for node in nodes]
    else:
        blocks = [_node_table(nodes, unit, shape, used=used)] if nodes else []
    sums, first = _sums(nodes), 0 if used else 1
    percents = "/".join(_percent(amount, sums.total) for amount in sums[first:2])
    lines = [f"{_title('/Total', used)} GPU Memory In Cluster: {_cell(sums[first:], unit)} ({percents})"]
    if used and any(gpu.is_over for node in nodes for gpu in node.gpus):
        lines.append(LEGEND)
    return join_blocks([*blocks, notes(lines, shape.screen), notes(sentences, shape.screen)])


def _title(total: str, used: bool) -> str:
    return f"{'Used/' if used else ''}Allocated{total}"


def _node_table(nodes: Sequence[InspectedNode], unit: int, shape: Shape, *, used: bool) -> str:
    first, title = 0 if used else 1, _title("/Total", used)
    indexes = range(max(len(node.gpus) for node in nodes))
    has_pending = any(node.pending is not None for node in nodes)
    lines = []
    for node in nodes:
        cells = [_cell(gpu.amounts[first:], unit, is_over=used and gpu.is_over) for gpu in node.gpus]
        absent = _cell([_nothing(known=not node.is_blind)] * (3 - first), unit)  # a GPU that only another node has
        cells += [absent] * (len(indexes) - len(cells))
        if has_pending:
            cells.append("" if node.pending is None else _cell([node.pending], unit))
        lines.append([node.name, node.address or "unknown", *cells, _cell(node.amounts[first:], unit)])
    columns = [
        Column("NAME", itemgetter(0), name=True),
        Column("IPADDRESS", itemgetter(1)),
        *(Column(f"GPU{index}({title})", itemgetter(2 + index)) for index in indexes),
        *([Column("PENDING(Allocated)", itemgetter(-2))] if has_pending else []),
        Column(f"GPU Memory({_UNITS[unit]})", itemgetter(-1)),
    ]
    return table(columns, lines, shape)


def _pod_table(node: InspectedNode, unit: int, shape: Shape, *, used: bool) -> str:
    lines = []
    for pod, shares in node.pods.items():
        if used or any(share.holds for share in shares.values()):
            cells = [_share_cell(shares.get(index), gpu, unit, used=used) for index, gpu in enumerate(node.gpus)]
            pending = _cell([shares[None].granted if None in shares else ()], unit)
            lines.append([pod.pod, pod.namespace, *cells, pending])
    columns = [
        Column("NAME", itemgetter(0), name=True, shortened_last=True),
        Column("NAMESPACE", itemgetter(1), name=True),
        *(Column(f"GPU{index}({_title('', used)})", itemgetter(2 + index)) for index in range(len(node.gpus))),
        *([Column("Pending(Allocated)", itemgetter(-1))] if node.pending is not None else []),
    ]
    total = node.amounts.total
    parts = {"Allocated": node.amounts.granted, **({"Used": node.amounts.used} if used else {})}
    sums = [f"{title}: {_cell([amount], unit)} ({_percent(amount, total)})" for title, amount in parts.items()]
    head = notes([f"NAME: {node.name}   IPADDRESS: {node.address or 'unknown'}"], shape.screen)
    pods = [table(columns, lines, shape)] if lines else []
    return "\n".join([head, *pods, "   ".join([*sums, f"Total: {_cell([total], unit)}"])])


def _share_cell(share: Share | None, gpu: InspectedGpu, unit: int, *, used: bool) -> str:
    if share is None or not (used or share.holds):
        share = gpu.share_of_others
    return _cell([share.used, share.granted][0 if used else 1 :], unit, is_over=used and share.is_over)


def _cell(amounts: Iterable[Amount], unit: int, *, is_over: bool = False) -> str:
    """Return whole units, cut off; a part of a unit as <1, and what is known in part as >=."""
    texts = []
    for amount in amounts:
        number, remainder = divmod(known_bytes(amount), unit)
        if None in amount:
            texts.append(f">={number}" if number else UNKNOWN)
        else:
            texts.append("<1" if remainder and not number else str(number))
    return "/".join([texts[0] + "!" * is_over, *texts[1:]])


def _percent(amount: Amount, total: Amount) -> str:
    """Return a percentage, cut off as Go's int64(float64) does it: 29/100 is 28%."""
    amount_bytes, total_bytes = known_bytes(amount), known_bytes(total)
    if None in total or (None in amount and not amount_bytes):
        return UNKNOWN
    return f"{'>=' if None in amount else ''}{int(amount_bytes / total_bytes * 100) if total_bytes else 0}%"


def _unit(nodes: Iterable[InspectedNode]) -> int:
    """Return the unit of the amounts in bytes: a MiB if all of gpushare's slots are a MiB, else a GiB."""
    return _MIB if {gpu.slot_bytes for node in nodes for gpu in node.gpus} - {0} == {_MIB} else _GIB


# --- values -----------------------------------------------------------------------------------------------------------


def inspect_values(nodes: Sequence[InspectedNode], missing: Sequence[str]) -> dict[str, object]:
    """Return the same for scripts, always with pods and use. An amount that is not known, or in part, is null."""
    return {
        "version": VERSION,
        "unit": _UNITS[_unit(nodes)],
        "nodes": [
            {
                "node": node.name,
                "internal_ip": node.address,
                "gpus": [
                    {"index": index, "uuid": gpu.uuid, **_values(gpu.amounts)} for index, gpu in enumerate(node.gpus)
                ],
                "pods": [
                    {
                        "namespace": pod.namespace,
                        "pod": pod.pod,
                        "gpus": [
                            {
                                "index": index,
                                "allocated_bytes": _bytes(share.granted),
                                "used_bytes": _bytes(share.used),
                                "over": share.is_over,
                            }
                            for index, share in shares.items()
                        ],
                    }
                    for pod, shares in node.pods.items()
                ],
                "pending_bytes": None if node.pending is None else _bytes(node.pending),
                **_values(node.amounts),
            }
            for node in nodes
        ],
        "cluster": _values(_sums(nodes)),
        "missing": list(missing),
    }


def _values(amounts: Amounts) -> dict[str, int | None]:
    return {
        "allocated_bytes": _bytes(amounts.granted),
        "total_bytes": _bytes(amounts.total),
        "used_bytes": _bytes(amounts.used),
    }


def _bytes(amount: Amount) -> int | None:
    return None if None in amount else known_bytes(amount)
