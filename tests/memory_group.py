"""A memory cgroup for one command, as a pod has one: of version 2, or of version 1 with its count of socket memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
_PATIENCE_SECONDS = 10.0


class MemoryGroup:
    """A cgroup, and what the kernel counts of it that no other cgroup has to share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def parent(self) -> tuple[str, ...]:
        """A command that runs the one after it in the cgroup, as its only child."""
        return "/bin/sh", "-c", 'echo $$ >"$0/cgroup.procs" && "$@"; exit', str(self._path)

    def held_bytes(self) -> int:
        """Memory of processes, kernel and sockets. Pages of files are left out: the kernel takes them back."""
        stat = dict(line.split() for line in (self._path / "memory.stat").read_text().splitlines())
        if "anon" in stat:  # version 2
            return sum(int(stat.get(name, 0)) for name in ("anon", "kernel", "sock"))
        kernel = (self._path / f"memory.kmem.{name}usage_in_bytes" for name in ("", "tcp."))
        return int(stat["rss"]) + sum(int(file.read_text()) for file in kernel)


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Skip the test where no cgroup can be made: that takes root and a writable /sys/fs/cgroup."""
    parent = _ROOT if (_ROOT / "cgroup.controllers").exists() else _ROOT / "memory"
    path = parent / f"gpumap-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        if not (path / "memory.stat").exists():
            pytest.skip("cgroups have no memory controller")
        with contextlib.suppress(FileNotFoundError):  # version 1 counts sockets from the first limit on
            (path / "memory.kmem.tcp.limit_in_bytes").write_text(str(1 << 40))
        yield MemoryGroup(path)
    finally:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (path / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        path.rmdir()
