"""What a command found out: the maps of the nodes that it asked, one node or a whole cluster. No logic."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import NamedTuple

from gpumap.model.errors import FatalError
from gpumap.model.map import NodeMap


class NodeMaps(NamedTuple):
    """`maps` are in the order of their nodes' names. `missing` says what is not in them, a sentence each.

    `fleet`: more than one node was asked, and tables have a column with the node of a row.
    """

    maps: tuple[NodeMap, ...]
    missing: tuple[str, ...] = ()
    fleet: bool = False


NodeMapStream = AsyncGenerator[NodeMaps | FatalError, None]
"""One answer after the other. A failed attempt is a FatalError in its place: a watch goes on after it."""
