"""What `tests.command` forks: a process that has imported gpumap's commands, and what a fork of it does."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

import gpumap.cli
import gpumap.dispatch  # not imported in vain: forks have it
import gpumap.lab.capture.run
from gpumap.__main__ import main

for _module in pkgutil.walk_packages(gpumap.cli.__path__, "gpumap.cli."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)


def call(arguments: Sequence[str], variables: dict[str, str], directory: Path, folder: Path) -> None:
    """Be the command: with its environment, its working directory, and files of a folder as its output."""
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT), descriptor)
    _be(arguments, variables, directory)


def call_on_terminal(arguments: Sequence[str], variables: dict[str, str], directory: Path, terminal: str) -> None:
    """Be the command with a terminal as its controlling one."""
    os.setsid()
    opened = os.open(terminal, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(opened, descriptor)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")  # a terminal's buffers
    _be(arguments, variables, directory)


def _be(arguments: Sequence[str], variables: dict[str, str], directory: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    sys.argv = ["gpumap", *arguments]
    sys.exit(main())
