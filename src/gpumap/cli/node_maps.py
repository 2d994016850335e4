"""What a command found out: the maps of the nodes that it asked, one node or a whole cluster. No logic."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

from gpumap.model.errors import FatalError
from gpumap.model.node import Node


class SumRow(NamedTuple):
    """The sums of a node or namespace, by their keys. Those that are not known are absent."""

    name: str
    values: Mapping[str, float]


class ClusterSums(NamedTuple):
    """A cluster in numbers. `by` is "node" or "namespace"."""

    by: str
    rows: tuple[SumRow, ...]


class NodeMaps(NamedTuple):
    """`maps` are in the order of their nodes' names. `missing` says what is not in them, a sentence each. `notices` are
    about agents that were not asked.

    `fleet`: more than one node was asked, and tables have a column with the node of a row. `sums`: a server was asked
    for sums, in the place of maps.
    """

    maps: tuple[Node, ...]
    missing: tuple[str, ...] = ()
    fleet: bool = False
    sums: ClusterSums | None = None
    notices: tuple[str, ...] = ()


NodeMapStream = AsyncGenerator[NodeMaps | FatalError, None]
"""One answer after the other. A failed attempt is a FatalError in its place: a watch goes on after it."""
