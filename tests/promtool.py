"""promtool, as tests ask it: of rules, configurations, pages and queries."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.tools import tool

SECONDS = 300.0


def promtool(*words: str | Path, cwd: Path | None = None, page: str = "") -> subprocess.CompletedProcess[str]:
    """What it says. `page` is what it reads."""
    command = (tool("promtool"), *words)
    return subprocess.run(command, cwd=cwd, input=page, capture_output=True, text=True, timeout=SECONDS, check=False)


def accepted(*words: str | Path, cwd: Path | None = None, page: str = "") -> subprocess.CompletedProcess[str]:
    """What it says, where it has nothing against it."""
    done = promtool(*words, cwd=cwd, page=page)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def assert_parses(queries: Iterable[str], folder: Path) -> None:
    """Every one of them is PromQL."""
    rules = [{"record": f"asked:{number}", "expr": query} for number, query in enumerate(queries)]
    file = folder / "asked.json"
    file.write_text(json.dumps({"groups": [{"name": "asked", "rules": rules}]}))  # JSON is YAML
    accepted("check", "rules", "--lint=none", file)
