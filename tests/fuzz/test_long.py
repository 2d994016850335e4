"""Ten minutes of `make fuzz` in `make e2e`. FUZZ_MINUTES gives it more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.table import TARGETS

pytestmark = pytest.mark.e2e
MINUTES = float(os.environ.get("FUZZ_MINUTES", "10"))


def test_nothing_breaks_in_ten_minutes() -> None:
    """Every target ran, and none crashed. A crash is a file in tests/fuzz/crashes, to be committed with its fix."""
    words = [sys.executable, "-m", "tests.fuzz", f"--minutes={MINUTES}", f"--seed={os.getpid()}"]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = {name: int(runs) for name, runs in re.findall(r"^(\S+) +(\d+)", done.stdout, re.MULTILINE)}
    assert all(ran[name] > 0 for name in TARGETS), done.stdout
