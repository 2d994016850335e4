"""docs/how-to/troubleshoot.md has a place for all that `doctor` and gpumap's own metrics say."""

import re
from itertools import chain
from pathlib import Path

import pytest

from gpumap.agent.sources import inotify
from gpumap.cli.commands.doctor import GPU_CHECKS, STATES
from gpumap.model import remedies
from gpumap.model.terms import Source

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
TABLES = (
    *remedies.SOURCES.values(),
    *(remedies.FAULTS, remedies.RECOVERY, remedies.UNMATCHED, remedies.CAPABILITIES, remedies.HEALTH),
)
REASONS = {*chain.from_iterable(TABLES), *inotify.REASONS.values()}
CHECKS = (*Source, *remedies.CAPABILITIES, *GPU_CHECKS, "pci", "unmatched_slots/<reason>", "dra_claims", "slurm")


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_is_named(check: str) -> None:
    """Whoever reads a line of `gpumap doctor` finds its name below "Checks of doctor"."""
    assert f"`{check}`" in PAGE.partition("## Checks of doctor")[2].partition("\n## ")[0]


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_explained(state: str) -> None:
    """docs/reference/commands.md has a row for each word of the second column."""
    assert f"| `{state}` |" in COMMANDS.partition("## doctor")[2]


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_every_reason_is_there(reason: str) -> None:
    """Whoever reads a reason in a label, on the page or in the log finds it."""
    assert f"`{reason}`" in PAGE.partition("## Remedies by reason")[2]


def test_a_remedy_begins_with_the_fault() -> None:
    """The first sentence says what is wrong in at most eight words, and the next one what to do."""
    texts = [text for table in (*TABLES, remedies.FINDINGS) for text in table.values()]
    assert [text for text in texts if not re.match(r"(?:[^ ]+ ){0,7}[^ ]+\. [A-Z]", text)] == []


def test_a_reboot_comes_after_a_drain() -> None:
    """A reboot ends the work on the node's healthy GPUs."""
    texts = [text for table in (*TABLES, remedies.IN_SHORT) for text in table.values()]
    guides = (ROOT / "docs" / "how-to" / "upgrade.md", *(ROOT / "docs" / "runbooks").glob("*.md"))
    items = [item for page in (PAGE, *(guide.read_text(encoding="utf-8") for guide in guides))
             for item in re.split(r"\n *(?=- |\d\. )|\n\n", page)]  # fmt: skip
    reboots = [text for text in (*texts, *items) if re.search(r"(?<!a )\breboot\b", text, re.IGNORECASE)]
    assert len(reboots) > 10
    assert [text for text in reboots if not re.search("drain", text, re.IGNORECASE)] == []
