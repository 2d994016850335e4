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
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["gpumap", *arguments]
    sys.exit(main())
