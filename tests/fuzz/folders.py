"""A folder in memory for one run of a target."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Make an empty folder, and remove it. Its name is the same in all runs of a process: errors contain it."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    made = Path(place) / f"gpumap-fuzz-{os.getpid()}"
    made.mkdir(mode=0o700)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def lay_out(files: Mapping[str, bytes], place: Path) -> None:
    """Write files below a folder. What cannot be a path is left out."""
    for path, text in files.items():
        if ".." in path.split("/") or "\0" in path or path.startswith("/"):
            continue
        with contextlib.suppress(OSError, ValueError):
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(text)
