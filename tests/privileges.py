"""Another user for a while: what root cannot be refused, an ordinary user can."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534


@contextlib.contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Have the file rights of an ordinary user. Nothing changes for one who is one."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder below which only rights decide (pytest's own are closed to other users)."""
    folder = Path(tempfile.mkdtemp(prefix="gpumap-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in folder.rglob("*"):
            if path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(folder)
