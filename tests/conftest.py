"""What many tests begin with: a folder whose path a Unix socket can have, and the stand-in for NVIDIA's library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import standin
from tests.node import short_directory


@pytest.fixture(name="library", scope="module")
def build_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the stand-in, once for all tests of a file."""
    return standin.build(tmp_path_factory.mktemp("library"))


@pytest.fixture(name="directory")
def make_directory() -> Iterator[Path]:
    """Make a folder with a short path, and remove it after the test."""
    with short_directory() as directory:
        yield directory
