"""promtool, as tests ask it: of rules, configurations, pages and queries."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
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


Asked = tuple[str, str, Mapping[str, float]]
"""A query, its moment, and the values that it must have by labels."""


def assert_answers(
    folder: Path, series: Mapping[str, str], *asked: Asked, rules: Iterable[Path] = (), interval: str = "1m"
) -> None:
    """Each query has its answer on played series, which have a sample in each interval."""
    test = {
        "interval": interval,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": moment,
                "exp_samples": [{"labels": labels, "value": value} for labels, value in expected.items()],
            }
            for query, moment, expected in asked
        ],
    }
    file = folder / "test.json"  # JSON is YAML
    document = {"rule_files": [str(rule) for rule in rules], "evaluation_interval": interval, "tests": [test]}
    file.write_text(json.dumps(document), encoding="utf-8")
    accepted("test", "rules", file)


def assert_parses(queries: Iterable[str], folder: Path) -> None:
    """Every one of them is PromQL."""
    rules = [{"record": f"asked:{number}", "expr": query} for number, query in enumerate(queries)]
    file = folder / "asked.json"
    file.write_text(json.dumps({"groups": [{"name": "asked", "rules": rules}]}))  # JSON is YAML
    accepted("check", "rules", "--lint=none", file)
