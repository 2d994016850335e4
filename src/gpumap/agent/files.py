"""Open files that may be anything: a pipe, a directory, a link."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def open_at_once(path: Path, more_flags: int = 0) -> BinaryIO:
    """Open a file to read bytes. A pipe without a writer does not block. Raises OSError; then no file stays open."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | more_flags))
