"""What the commands and the fleet's views show of every collection of every capture."""

from pathlib import Path

import pytest

from gpumap.agent.published import published
from tests.golden import captures, snapshots
from tests.test_fleet import KINDS, agree, named
from tests.test_top_waste import accounts_for_memory


@pytest.mark.parametrize("capture", captures(), ids=lambda path: path.name)
def test_what_is_shown_is_what_was_collected(capture: Path) -> None:
    """`top` accounts for all memory, and the findings that series have are the agent's own."""
    for number, snapshot in enumerate(snapshots(capture)):
        accounts_for_memory(published(snapshot))
        agree(named(snapshot, "node-1", "10.0.0.1"), KINDS[number % len(KINDS)], honour=bool(number % 2))
