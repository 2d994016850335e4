"""What `inspect` shows: its tables, of all nodes or of one, and below them what is not known. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gpumap.cli.inspect.gpu_grants import GPU_MEM
from gpumap.cli.inspect.grants import Grants, grants
from gpumap.cli.inspect.table import inspect_table, inspect_values
from gpumap.cli.parser import did_you_mean
from gpumap.cli.rows import NodeMaps
from gpumap.cli.screen import Report
from gpumap.cli.table import Shape
from gpumap.cli.unknowns import few, of_each
from gpumap.model.devices import has_kubelet, sources_up
from gpumap.model.errors import FatalError
from gpumap.model.gaps import invisible, unknown_of_devices
from gpumap.model.node import Node

NOT_KNOWN = "- means unknown, and >= means at least. A time-sliced GPU grants no memory."


def inspect_report(*, details: bool, used: bool, node: str | None = None) -> Report:
    """Return the report of all nodes, or of the one with this name."""

    def table(maps: NodeMaps, shape: Shape) -> str:
        maps = only(maps, node)
        found = grants(maps)
        return inspect_table(found, notes(maps, found, used=used), shape, details=details, used=used)

    def values(maps: NodeMaps, _: Shape) -> object:
        return inspect_values(grants(only(maps, node)), maps.missing)

    return Report(table, values)


def only(maps: NodeMaps, node: str | None) -> NodeMaps:
    """Return the map of one node. Raises FatalError if there is none of that name."""
    if node is None:
        return maps
    found = tuple(one for one in maps.maps if one.name == node)
    if not found:
        raise FatalError(f'unknown node "{node}"{did_you_mean(node, [one.name for one in maps.maps])}')
    return maps._replace(maps=found)


# --- what is not known ------------------------------------------------------------------------------------------------


def notes(maps: NodeMaps, found: Grants, *, used: bool) -> list[str]:
    """Return what is not known, a sentence each; of many nodes each sentence once, with their names.

    `found` are the grants of these maps.
    """
    sentences = list(few(of_each(maps, partial(_unknown_of_node, used=used)), maps.fleet))
    if not found.nodes:
        sentences.append("no GPU found")
    return [*maps.missing, *sentences, *([] if _is_known(found, used=used) else [NOT_KNOWN])]


def _unknown_of_node(node_map: Node, *, used: bool) -> Iterator[str]:
    if node_map.stale:
        yield node_map.stale
        return
    up = sources_up(node_map)
    if "nvml" not in up:
        yield "NVML does not answer: gpumap cannot find the GPU of a grant; PENDING contains all grants"
    if not has_kubelet(node_map):
        yield "this machine has no kubelet (--no-kubelet): nothing is assigned"
    elif "kubelet" not in up:
        yield "the kubelet does not answer: the assignments may be old or unknown"
    yield from unknown_of_devices(node_map, use=used)
    for gpu in node_map.gpus:
        if not gpu.up:
            yield f"GPU {gpu.index} is down: {gpu.fault}"
    for nameless in node_map.nameless_gpus:
        yield f"GPU {nameless.index} is down, and has not reported its uuid: {nameless.fault}"
    for resource, reason in sorted({(one.resource, one.reason) for one in node_map.unmatched}):
        if resource != GPU_MEM:
            yield f"slots of {resource} match no known GPU ({reason}) and are not in the table"
    if used and "nvml" in up and not node_map.capabilities.get("pid_visibility"):
        yield f"the use of pods is not known. {invisible(node_map)}"


def _is_known(found: Grants, *, used: bool) -> bool:
    """Return whether the table has every number."""
    amounts = [one for node in found.nodes for one in (node.allocated, node.total, *([node.used] if used else []))]
    shares = [share for node in found.nodes for pod in node.pods for share in pod.shares]
    amounts += [share.allocated for share in shares if share.held or used]
    amounts += [share.used for share in shares if used and share.index is not None]
    return all(one.whole for one in amounts)
