"""What tables do alike with one node and with a fleet: select a namespace, and print values for scripts."""

from __future__ import annotations

from collections.abc import Iterable

from gpumap.cli.node_maps import NodeMaps
from gpumap.model.devices import node_of_namespace
from gpumap.model.names import ContainerName
from gpumap.model.node import VERSION, Node


def of_namespace(maps: NodeMaps, namespace: str) -> NodeMaps:
    """Return only the entries of this namespace; all of them if it is empty.

    Keeps a device if one of its entries remains, with the memory of the whole device.
    """
    if not namespace:
        return maps
    return maps._replace(maps=tuple(node_of_namespace(one, namespace) for one in maps.maps))


def values_of(maps: NodeMaps, **values: object) -> dict[str, object]:
    """Return `values` as -o json has them: after the node, or between the nodes of a fleet and what is missing."""
    if maps.fleet:
        nodes = [{**_named(one), "timestamp": one.timestamp} for one in maps.maps]
        return {"version": VERSION, "nodes": nodes, **values, "missing": list(maps.missing)}
    (one,) = maps.maps
    return {"version": VERSION, "timestamp": one.timestamp, "node": _named(one), **values}


def _named(node: Node) -> dict[str, object]:
    return {"name": node.name, "internal_ip": node.internal_ip}


def pods_in(names: Iterable[ContainerName]) -> list[tuple[str, str]]:
    """Return namespace and name of each pod once, in the order of their first containers."""
    return list(dict.fromkeys((one.namespace, one.pod) for one in names if one.pod))
