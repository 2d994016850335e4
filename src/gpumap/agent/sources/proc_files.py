"""Read single files of a process tree, which may consist of plain files."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE_BYTES_MAX = 1 << 16
"""The kernel writes at most a page for each hierarchy of cgroups (kernel/cgroup/cgroup.c: proc_cgroup_show)."""


class Stat(NamedTuple):
    comm: str
    is_ending: bool
    parent: int
    start: int


@contextlib.contextmanager
def opened(path: Path, folder: int | None = None) -> Iterator[int]:
    """Open a directory, below `folder` if given. It stays that of its process, also if the PID is reused."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        yield directory
    finally:
        os.close(directory)


def text(path: str, folder: int | None = None, bytes_max: int = FILE_BYTES_MAX) -> str:
    """Return the text of a file below `folder`. Raises OSError, also for a file that is too large."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)  # a pipe in a plain tree does not block a read
    try:
        data = b""
        while part := os.read(file, bytes_max):
            data += part
            if len(data) > bytes_max:
                raise OSError(errno.EFBIG, f"larger than {bytes_max >> 10} KiB", path)
    finally:
        os.close(file)
    return data.decode(errors="replace")


def stat(line: str) -> Stat:
    """Return fields 2, 3, 4 and 22 of /proc/PID/stat. The name is in brackets and may itself contain blanks and
    brackets."""
    name, _, rest = line.rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        raise ValueError("its stat has too few fields")
    return Stat(name.partition("(")[2], is_ending=fields[0] in ("Z", "X"), parent=int(fields[1]), start=int(fields[19]))
