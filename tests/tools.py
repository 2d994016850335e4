"""Finds the programs that tests run beside gpumap (chromium, curl, helm, prometheus, …).

A machine without one skips the tests that need it, and says how to get it; under CI a missing tool is a failure,
so that nothing is skipped there unnoticed.
"""

import os
import shutil
from pathlib import Path

import pytest

BIN = Path(__file__).resolve().parent.parent / ".tools" / "bin"


def tool(name: str) -> Path:
    """The program's path: .tools/bin first, then PATH."""
    found = shutil.which(name, path=str(BIN)) or shutil.which(name)
    if found is not None:
        return Path(found)
    reason = f"{name} is missing: run `make tools`, or put {name} on PATH"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
