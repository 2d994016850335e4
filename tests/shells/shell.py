"""The commands in a document's `console` blocks, and what the programs themselves say of their flags."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.fences import read_blocks
from tests.tools import tool

_ALIASES = {"oc": "kubectl", "helm3": "helm"}
_WRAPPERS = {"microk8s"}
_NESTED = {("kubectl", "create"), ("kubectl", "create", "secret"), ("kubectl", "rollout")}
"""Commands that are followed by another command."""


class Command(NamedTuple):
    place: str
    """The document and the line of its block."""
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def verb(self) -> tuple[str, ...]:
        """The words that name what the program does: ("install",), ("create", "role")."""
        length = 2
        while self.words[:length] in _NESTED:
            length += 1
        return self.words[1:length]

    @property
    def own(self) -> tuple[str, ...]:
        """Its words up to a bare `--`: what follows is for a program in a container."""
        return self.words[: self.words.index("--")] if "--" in self.words else self.words

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(word.partition("=")[0] for word in self.own if re.match("--[a-z]", word))

    def given(self, flag: str) -> Iterator[str]:
        """The values of a flag, in both spellings."""
        for number, word in enumerate(self.own):
            if word == flag:
                yield self.own[number + 1]
            elif word.startswith(f"{flag}="):
                yield word.partition("=")[2]


def read_commands(document: Path) -> Iterator[Command]:
    """Each command of each prompt, wrapped lines joined, pipes and `&&` taken apart."""
    for block in read_blocks(document.read_text(encoding="utf-8"), "console"):
        for line in block.body.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield from _commands_of(f"{document.name}:{block.line}", line.removeprefix("$ "))


def _commands_of(place: str, line: str) -> Iterator[Command]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, "&&"]:
        if token and set(token) <= set("&|;"):
            if words:
                yield Command(place, tuple(_unwrapped(words)))
            words = []
        else:
            words.append(token)


def _unwrapped(words: list[str]) -> list[str]:
    words = words[1:] if words[0] in _WRAPPERS else words
    return [_ALIASES.get(words[0], words[0]), *words[1:]]


@cache
def known_flags(program: str, verb: tuple[str, ...]) -> frozenset[str]:
    """Those that the program names in its help for the verb, and those of all its verbs."""
    answer = _help(program, *verb, "--help")
    if program == "kubectl":
        answer += _help(program, "options")
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", answer))


def _help(program: str, *arguments: str) -> str:
    environment = {**os.environ, "KUBECONFIG": os.devnull, "HELM_PLUGINS": os.devnull}
    done = subprocess.run(
        [tool(program), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{program} {' '.join(arguments)}: {done.stderr}"
    return done.stdout
