"""docs/how-to/troubleshoot.md has a place for all that `doctor` and gpumap's own metrics say."""

import re
from itertools import chain
from pathlib import Path

import pytest

from gpumap.cli.doctor.checks import (
    DRIVER_CHECKS,
    OPTIONAL_CHECKS,
    PRIVILEGE_CHECKS,
    REQUESTED_CHECKS,
    UNMATCHED_BY_REASON,
)
from gpumap.cli.doctor.gpu_checks import GPU_CHECKS
from gpumap.model import remedies

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
DOCTOR = ROOT / "src" / "gpumap" / "cli" / "doctor"
SOURCES = "".join((DOCTOR / name).read_text(encoding="utf-8") for name in ("checks.py", "gpu_checks.py"))
STATES = ("ok", "degraded", "missing", "failed", "warning", "not needed", "unknown")
TABLES = (
    *remedies.SOURCES.values(),
    *(remedies.FAULTS, remedies.RECOVERY, remedies.UNMATCHED, remedies.CAPABILITIES, remedies.HEALTH, remedies.PUSH),
)
REASONS = {*chain.from_iterable(TABLES)}


LISTED = (*DRIVER_CHECKS, *OPTIONAL_CHECKS, *REQUESTED_CHECKS, *PRIVILEGE_CHECKS)
CHECKS = sorted({UNMATCHED_BY_REASON, *GPU_CHECKS, *(one.name for one in LISTED)})


def test_checks_are_found() -> None:
    """The names are those of the lists: the best known of them are among them."""
    known = {"kubelet", "nvml", "device_checkpoint", "pod_logs", "push", "proc", "api_token"}
    assert known <= {*CHECKS}
    assert {"pid_visibility", "gpu/<index>", "gpu/<index>/xid", "unmatched_slots/<reason>", "gpm"} <= {*CHECKS}


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_is_named(check: str) -> None:
    """Whoever reads a line of `gpumap doctor` finds its name below "Checks of doctor"."""
    assert f"`{check}`" in PAGE.partition("## Checks of doctor")[2].partition("\n## ")[0]


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_explained(state: str) -> None:
    """docs/reference/commands.md has a row for each word of the second column."""
    assert f"| `{state}` |" in COMMANDS.partition("## doctor")[2]
    assert f'"{state}"' in SOURCES


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
