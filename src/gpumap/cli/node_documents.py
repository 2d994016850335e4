"""What a look finds: the documents of the nodes that it saw, one node or a whole cluster. No logic."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import NamedTuple

from gpumap.model.document import Document
from gpumap.model.errors import FatalError


class Seen(NamedTuple):
    """`documents` are in the order of their nodes' names. `missing` tells what is not in them, a sentence each.

    `fleet`: it was looked at more than one node, and tables say which a row is of.
    """

    documents: tuple[Document, ...]
    missing: tuple[str, ...] = ()
    fleet: bool = False


Sights = AsyncGenerator[Seen | FatalError, None]
"""One look after the other. One that failed is a FatalError in its place, so that a watch can go on."""
