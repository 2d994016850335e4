"""`gpumap inspect`: its flags, what it shows of all nodes or of one, and below the tables what is not known."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpumap.cli.args import add_form, add_watch
from gpumap.cli.commands import Program
from gpumap.cli.commands.inspect_table import InspectedNode, inspect_nodes, inspect_table, inspect_values
from gpumap.cli.filter import select_rows
from gpumap.cli.parser import did_you_mean
from gpumap.cli.rows import NodeMaps
from gpumap.cli.screen import Report
from gpumap.cli.table import Shape
from gpumap.cli.unknowns import few, sentences_of_each
from gpumap.model.devices import has_kubelet, sources_up
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.gaps import invisible, unknown_of_devices
from gpumap.model.node import Node
from gpumap.model.plugins import GPU_MEM

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


# --- what it shows ----------------------------------------------------------------------------------------------------


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
        hint = did_you_mean(name, [node.name for node in maps.maps])
        if any(node.devices for node in select_rows(maps, "", [name]).maps):
            hint = f"; inspect shows nodes: did you mean `map {name}`?"
        raise FatalError(f'unknown node "{name}"{hint}')
    return maps._replace(maps=nodes)


# --- what is not known ------------------------------------------------------------------------------------------------


def unknown_sentences(maps: NodeMaps, nodes: Sequence[InspectedNode], *, used: bool) -> list[str]:
    """Return what is not known, a sentence each; of many nodes each sentence once, with their names."""
    sentences = list(few(sentences_of_each(maps, partial(_unknown_of_node, used=used)), maps.fleet))
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
