"""Shell completion, asked as the shells ask: every command and flag is offered, and nothing that is not there."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumap.agent.metrics import GROUPS
from gpumap.cli.command_line import flags_of, subcommands
from gpumap.cli.completion import SHELLS, script
from gpumap.dispatch import command_parser
from tests.demo_process import GPUMAP, environment
from tests.tools import tool

PATIENCE_SECONDS = 60.0
COMMANDS = sorted(subcommands(command_parser()))
ANSWERS: list[tuple[str, list[str]]] = [
    ("gpumap ", COMMANDS),
    ("gpumap m", ["map"]),
    ("gpumap map -o ", ["json", "name", "table", "wide", "yaml"]),
    ("gpumap doctor --output ", ["json", "table"]),
    ("gpumap top --sort-by m", ["memory"]),
    ("gpumap waste -o json --sort-by id", ["idle"]),
    ("gpumap serve --collect ", sorted((*GROUPS, "all"))),
    ("gpumap serve --dialect n", ["none", "nvidia-smi"]),
    ("gpumap serve --log-level d", ["debug"]),
    ("gpumap waste --idle", ["--idle-after"]),
    ("gpumap inspect --det", ["--details"]),
    ("gpumap completion z", ["zsh"]),
]


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path) -> Path:
    """A folder with something to complete: a file and a folder."""
    (tmp_path / "node one.yaml").touch()
    (tmp_path / "nodes").mkdir()
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_has_every_flag(shell: str) -> None:
    """Each command with each flag that its help shows, by its long name."""
    text = script(command_parser(), shell)
    for name, (_, parser) in subcommands(command_parser()).items():
        assert name in text
        for action in flags_of(parser):
            for option in action.option_strings:
                assert option.lstrip("-") in text or not option.startswith("--")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_it(shell: str) -> None:
    """`gpumap completion SHELL` prints the script and nothing else."""
    done = subprocess.run(
        [str(GPUMAP), "completion", shell], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", script(command_parser(), shell))


# --- bash -------------------------------------------------------------------------------------------------------------


def bash(line: str, folder: Path, words: list[str] | None = None) -> list[str]:
    """What bash would offer at the end of a line."""
    words = line.split(" ") if words is None else words
    program = f"""
        source <({GPUMAP} completion bash)
        COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
        COMP_LINE='{line}'; COMP_POINT={len(line)}
        _gpumap
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    command = ["bash", "--norc", "--noprofile", "-eu", "-o", "pipefail", "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(word for word in done.stdout.split("\n") if word)


@pytest.mark.parametrize(("line", "offered"), [*ANSWERS[1:], ("gpumap ", [*COMMANDS, "--help", "--version"])])
def test_bash(line: str, offered: list[str], folder: Path) -> None:
    """Commands, flags and choices, by what has been typed."""
    assert bash(line, folder) == sorted(offered)


def test_bash_with_an_equals_sign(folder: Path) -> None:
    """To readline `--sort-by=me` is three words."""
    assert bash("gpumap top --sort-by=me", folder, ["gpumap", "top", "--sort-by", "=", "me"]) == ["memory"]
    assert bash("gpumap map -o=", folder, ["gpumap", "map", "--output", "="]) == [
        "json",
        "name",
        "table",
        "wide",
        "yaml",
    ]


def test_bash_completes_paths(folder: Path) -> None:
    """Files where a file is meant, folders where a folder is; names with blanks stay whole; other values: nothing."""
    assert bash("gpumap demo --scenario n", folder) == ["node one.yaml", "nodes"]
    assert bash("gpumap serve --kubelet-root n", folder) == ["nodes"]
    assert bash("gpumap record n", folder) == ["nodes"]
    assert bash("gpumap serve --interval ", folder) == []


# --- fish -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "offered"), ANSWERS)
def test_fish(line: str, offered: list[str], folder: Path) -> None:
    """The same in fish, which shows each with a word of explanation."""
    program = f"{GPUMAP} completion fish | source; complete -C '{line}'"
    done = subprocess.run(
        [tool("fish"), "-c", program], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(one.partition("\t")[0] for one in done.stdout.splitlines()) == offered


# --- zsh --------------------------------------------------------------------------------------------------------------


class Zsh:
    """An interactive zsh on a terminal of its own, with the completion loaded."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._said = ""

    def type(self, text: str, *wanted: str) -> str:
        """Type, and wait until all that is wanted is on the screen."""
        self._said = ""
        os.write(self._terminal, text.encode())
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(word in self._said for word in wanted):
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted} is not in {self._said!r}"
            if select.select([self._terminal], [], [], left)[0]:
                self._said += os.read(self._terminal, 1 << 16).decode(errors="replace")
        return self._said


@contextlib.contextmanager
def zsh(folder: Path) -> Iterator[Zsh]:
    program = tool("zsh")
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execve(program, ["zsh", "-i"], environment(TERM="xterm", COLUMNS="200", HOME=str(folder)))
    try:
        shell = Zsh(terminal)
        # The prompt is put together, so that the echo of what is typed is not taken for it.
        setup = f"autoload -U compinit; compinit -u -D; source <({GPUMAP} completion zsh); PS1='rea''dy> '\n"
        shell.type(setup, "ready> ")
        yield shell
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


def test_zsh(folder: Path) -> None:
    """The same in zsh: what is the only one is put in, several are listed."""
    with zsh(folder) as shell:
        for line, offered in ANSWERS:
            if len(offered) == 1:
                shell.type(f"{line}\t", line[: line.rindex(" ") + 1].strip(), offered[0])
            else:
                shell.type(f"{line}\t", *offered)
            shell.type("\x15\n", "ready> ")
