"""Each command of the documents runs on the demo and prints what is shown below it, or has a reason why it does not."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from gpumap.lab.demo.scenario import default_scenario
from tests.command import run_command
from tests.demo_process import GPUMAP, demo, environment
from tests.docs.test_links import DOCUMENTS
from tests.fences import read_blocks
from tests.prometheus import eventually
from tests.shells import shell

AGENT = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):9401")
NEEDS = {
    r"kubectl|helm|oc|\w+=\S+": "a cluster",
    r"gpumap \w+ .*--prometheus .*": "a Prometheus that has scraped gpumap for hours",
    r"gpumap \w+ .*--ca-file .*": "a proxy with a certificate",
    r"/opt/gpumap/.*|python3 -m venv /opt/.*|cp deploy/systemd/.*|systemctl .*": "a machine with GPUs, and root",
    r"docker .*|make (?:image|wheel).*": "docker, or the network",
    r"cosign .*|sha256sum .*": "a release",
    r"\./prometheus .*|make demo": "a terminal of its own; tests run both programs without it",
}
"""What a command needs beside the demo, by its beginning."""
PODS = {pod.name for pod in default_scenario().pods}


class Command(NamedTuple):
    place: str
    line: str
    """What to type, wrapped lines joined, without a comment."""
    output: tuple[str, ...]
    exit_code: int

    @property
    def inner(self) -> str:
        """What runs in gpumap's pod, or on this computer."""
        inside = re.fullmatch(r"kubectl .*exec .* -- (gpumap .*)", self.line)
        return inside[1] if inside else self.line.removeprefix(".venv/bin/")

    @property
    def tried(self) -> str:
        """The line for the demo: one that reads its node has --url. Empty if the demo is not enough."""
        if any(re.match(rf"(?:{beginning})(?:\s|$)", self.inner) for beginning in NEEDS):
            return ""
        first, pipe, rest = self.inner.partition(" | ")
        return self.inner if AGENT.search(first) else f"{first} --url http://127.0.0.1:9401{pipe}{rest}"


def read_commands(page: Path) -> Iterator[Command]:
    """Those of `console` blocks. `echo $?` shows the exit code of the command above it."""
    for block in read_blocks(page.read_text(encoding="utf-8"), "console"):
        prompts = re.split(r"^\$ ", re.sub(r"\\\n\s*", "", block.body), flags=re.MULTILINE)[1:]
        for prompt, after in zip(prompts, [*prompts[1:], ""], strict=True):
            line, *output = prompt.splitlines()
            code = re.match(r"echo \$\?\n(\d+)", after)
            if not line.startswith("echo $?"):
                line = re.sub(r"\s+(?:# .*|&)$", "", line)
                yield Command(f"{page.name}:{block.line}", line, tuple(output), int(code[1]) if code else 0)


COMMANDS = [command for page in DOCUMENTS for command in read_commands(page)]
TRIED = [*{(command.tried, command.output): command for command in COMMANDS if command.tried}.values()]
SENTENCES = [
    (page.name, " ".join(code.split()))
    for page in DOCUMENTS
    for code in re.findall(r"`((?:kubectl|gpumap)\s[^`]+)`", page.read_text(encoding="utf-8"))
    if page.name != "CHANGELOG.md"  # it names what is gone
]
LINES = {
    line: (place, line) for place, line in [*((command.place, command.inner) for command in COMMANDS), *SENTENCES]
}.values()
OF_GPUMAP = [(place, line) for place, line in LINES if re.match(r"(?:kubectl )?gpumap [a-z]", line)]
OF_KUBECTL = [
    shell.Command(place, tuple(line.split()))
    for place, line in SENTENCES
    if re.match(r"kubectl (?!gpumap|inspect|krew)", line)
]


@pytest.fixture(name="url", scope="module")
def run_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo(tmp_path_factory.mktemp("demo"), "--interval", "1s", "--idle-after", "5s") as url:
        yield url


def run(line: str, url: str) -> tuple[str, int]:
    """Its output and exit code. The rest of a pipe runs if the machine has the program."""
    first, _, rest = AGENT.sub(url, line).partition(" | ")
    words = shlex.split(first)
    if words[0] == "gpumap":
        done = run_command(*words[1:])
    else:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if rest and shutil.which(rest.split()[0]):
        done = subprocess.run(
            shlex.split(rest), input=done.stdout, capture_output=True, text=True, timeout=60, check=False
        )
    return done.stdout, done.returncode


def titles(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def prints(output: str, shown: tuple[str, ...]) -> bool:
    """Whether the output has the columns and pods of a table that is shown, and the other lines up to their values."""
    header = re.match(r"[A-Z]{2,}.*  ", shown[0]) if shown else None
    if header and titles(shown[0]) != titles(output.splitlines()[0]):
        return False
    for line in shown[1 if header else 0 :]:
        if "slurm_job" in line:
            continue  # the demo has none
        parts = PODS & set(line.split()) if header and "  " in line else {line.partition("…")[0]}
        if re.match(r"gpumap_\w+{|.*\t", line):
            parts = {line.partition("…")[0].rpartition("\t" if "\t" in line else " ")[0] or line.partition("…")[0]}
        if not all(part in output for part in parts):
            return False
    return True


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 100
    assert not any([*read_blocks(page.read_text(encoding="utf-8"), "sh")] for page in DOCUMENTS)
    assert {command.tried.split()[0] for command in TRIED} == {"gpumap", "curl"}
    assert {command.line for command in TRIED if command.exit_code == 1} == {"gpumap check"}


@pytest.mark.parametrize("command", TRIED, ids=lambda command: f"{command.place} {command.tried}")
def test_a_command_prints_what_is_shown(url: str, command: Command) -> None:
    """It is tried again, because the demo's kubelet restarts and its findings come and go."""
    if command.line.startswith("curl") and not shutil.which("curl"):
        pytest.skip("curl is missing")

    def is_printed() -> bool:
        output, code = run(command.tried, url)
        return code == command.exit_code and prints(output, command.output)

    eventually(is_printed, about=lambda: (command, run(command.tried, url)))


@cache
def read_help(*words: str) -> str:
    if words[0] == "gpumap":
        return run_command(words[1], "--help-all").stdout
    program = (GPUMAP.parent / "kubectl-gpumap", words[2], "--help")
    return subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize(("place", "line"), OF_GPUMAP, ids=lambda text: text)
def test_a_command_has_its_flags(place: str, line: str) -> None:
    """Also one that needs more than the demo, and the column that --sort-by is given."""
    words = line.partition(" | ")[0].split()
    text = read_help(*words[: 3 if words[0] == "kubectl" else 2])
    for flag in (word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)):
        assert re.search(rf"{flag}\b", text), place
    if "--sort-by" in words:
        (columns,) = re.findall(r"--sort-by COLUMN\s+Sort by ([a-z,\s]+)\.\s", text)
        assert words[words.index("--sort-by") + 1] in re.split(r",\s+", columns), place


@pytest.mark.parametrize("command", OF_KUBECTL, ids=lambda command: " ".join(command.words))
def test_a_command_of_kubectl_has_its_flags(command: shell.Command) -> None:
    """One in a sentence; tests/shells has those in blocks."""
    assert set(command.flags) <= shell.known_flags("kubectl", command.verb), command.place
