"""What the tests on a live node share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.node import LiveNode
from tests.deploy.image import needs_root
from tests.machine import short_directory


@pytest.fixture(name="node_folder", scope="module")
def make_node_folder() -> Iterator[Path]:
    with short_directory() as folder:
        yield folder


@pytest.fixture(name="live_node", scope="module")
def start_live_node(node_folder: Path) -> Iterator[LiveNode]:
    """A live node. Tests of a file share it; each brings its own pods, and takes them away."""
    needs_root()
    with LiveNode(node_folder) as node:
        yield node
