"""What `inspect` shows: its tables, of all nodes or of one, and below them what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from gpumap.cli.command_line import did_you_mean
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.reports import Report
from gpumap.cli.tables import Shape
from gpumap.cli.tables.inspect import InspectedNode, inspect_nodes, inspect_table, inspect_values
from gpumap.cli.tables.unknowns import few, of_each
from gpumap.model.devices import has_kubelet, sources_up
from gpumap.model.errors import FatalError
from gpumap.model.gaps import invisible, unknown_of_devices
from gpumap.model.node import Node
from gpumap.model.plugins import GPU_MEM

NOT_KNOWN = "- means unknown, and >= means at least. A time-sliced GPU grants no memory."


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
    if name is None:
        return maps
    nodes = tuple(node for node in maps.maps if node.name == name)
    if not nodes:
        raise FatalError(f'unknown node "{name}"{did_you_mean(name, [node.name for node in maps.maps])}')
    return maps._replace(maps=nodes)


# --- what is not known ------------------------------------------------------------------------------------------------


def unknown_sentences(maps: NodeMaps, nodes: Sequence[InspectedNode], *, used: bool) -> list[str]:
    """Return what is not known, a sentence each; of many nodes each sentence once, with their names."""
    sentences = list(few(of_each(maps, partial(_unknown_of_node, used=used)), maps.fleet))
    if not nodes:
        sentences.append("no GPU found")
    return [*maps.missing, *sentences, *([] if _is_known(nodes, used=used) else [NOT_KNOWN])]


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


def _is_known(nodes: Sequence[InspectedNode], *, used: bool) -> bool:
    """Return whether the table has every number."""
    amounts = [amount for node in nodes for amount in (node.amounts if used else node.amounts[1:])]
    shares = [item for node in nodes for shares in node.pods.values() for item in shares.items()]
    amounts += [share.granted for _, share in shares if share.holds or used]
    amounts += [share.used for index, share in shares if used and index is not None]
    return all(amount.exact for amount in amounts)
