"""The services that the rows of a file share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.faults.site import Sites


@pytest_asyncio.fixture(name="sites", scope="module", loop_scope="module")
async def make_sites(library: Path) -> AsyncIterator[Sites]:
    """One service at a time; it ends with the file."""
    sites = Sites(library)
    yield sites
    await sites.close()
