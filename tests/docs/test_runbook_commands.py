"""What runbooks say to type is what gpumap and kubectl take: commands, their flags, the columns to sort by."""

from __future__ import annotations

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.demo_process import GPUMAP, environment
from tests.shells.shell import Command, known_flags

RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks"


def typed(program: str) -> list[tuple[str, str]]:
    """Each page with what it says to type of a program, in its sentences."""
    pages = [(page.name, page.read_text(encoding="utf-8")) for page in sorted(RUNBOOKS.glob("*.md"))]
    return [(name, " ".join(one.split())) for name, text in pages for one in re.findall(rf"`({program}\s[^`]+)`", text)]


TYPED = typed("gpumap")
KUBECTL = [Command(page, tuple(shlex.split(line))) for page, line in typed("kubectl")]


@cache
def help_of(command: str) -> str:
    words = (GPUMAP, command, "--help")
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_commands_are_found() -> None:
    assert len(TYPED) > 5
    assert len(KUBECTL) > 5


@pytest.mark.parametrize("command", KUBECTL, ids=lambda command: " ".join(command.words))
def test_a_command_is_one_of_kubectls(command: Command) -> None:
    assert set(command.flags) <= known_flags("kubectl", command.verb), command.place


@pytest.mark.parametrize(("page", "line"), TYPED)
def test_a_command_is_one_of_gpumaps(page: str, line: str) -> None:
    """The command exists, with each flag, and with the column that --sort-by is given."""
    _, command, *words = line.split()
    told = help_of(command)
    for flag in (word for word in words if word.startswith("--")):
        assert re.search(rf"{flag}\b", told), f"{page}: {line}"
    if "--sort-by" in words:
        by = re.search(r"--sort-by COLUMN Sort by ([a-z, ]+)\. ", told)
        assert by
        assert words[words.index("--sort-by") + 1] in by[1].split(", "), f"{page}: {line}"
