"""What may be at the place of a file, a directory or a socket. Each function takes the free path."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tests.faults.site import Site, injects

Make = Callable[[Path], object]


def nothing(path: Path) -> None:
    """Leave the path free."""


def directory(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dead_socket(path: Path) -> None:
    """A socket that no process listens at, as a killed server leaves it."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def text(content: bytes | str) -> Make:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def sparse(size_bytes: int) -> Make:
    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, size_bytes)

    return make


@injects
async def in_place_of(site: Site, path_of: Callable[[Site], Path], make: Make) -> AsyncIterator[None]:
    """Move what is there away, make something else, and at the end put it back."""
    path, kept = path_of(site), site.node.directory / "kept"
    path.rename(kept)
    make(path)
    yield
    remove(path)
    kept.rename(path)


@injects
async def changed(site: Site, path_of: Callable[[Site], Path], change: Callable[[bytes], bytes]) -> AsyncIterator[None]:
    """Another content of a file."""
    path = path_of(site)
    content = change(path.read_bytes())
    async with in_place_of(path_of, text(content))(site):
        yield


@injects
async def closed(site: Site, path_of: Callable[[Site], Path]) -> AsyncIterator[None]:
    """Without any permission; gpumap runs without capabilities, so that this holds for root too."""
    path = path_of(site)
    mode = path.stat().st_mode
    path.chmod(0)
    os.utime(path)  # unchanged, it would not be read again
    yield
    path.chmod(mode)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
