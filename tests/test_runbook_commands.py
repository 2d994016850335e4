"""What runbooks tell to type is what gpumap takes: its commands, their flags, the columns to sort by."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.demo_process import GPUMAP, environment

RUNBOOKS = Path(__file__).resolve().parent.parent / "docs" / "runbooks"
TYPED = sorted(
    (page.name, " ".join(typed.split()))
    for page in RUNBOOKS.glob("*.md")
    for typed in re.findall(r"`(gpumap\s[^`]+)`", page.read_text(encoding="utf-8"))
)


@cache
def help_of(command: str) -> str:
    words = (GPUMAP, command, "--help")
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_commands_are_found() -> None:
    """There is something to check."""
    assert len(TYPED) > 5


@pytest.mark.parametrize(("page", "typed"), TYPED)
def test_a_command_is_one_of_gpumaps(page: str, typed: str) -> None:
    """The command exists, with each flag, and with the column that --sort-by is given."""
    _, command, *words = typed.split()
    told = help_of(command)
    for flag in (word for word in words if word.startswith("--")):
        assert re.search(rf"{flag}\b", told), f"{page}: {typed}"
    if "--sort-by" in words:
        by = re.search(r"--sort-by COLUMN by ([a-z, ]+) \(default", told)
        assert by
        assert words[words.index("--sort-by") + 1] in by[1].split(", "), f"{page}: {typed}"
