"""The tables of docs/dev/mutation.md, from the result of the runs and the list of explained survivors."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULT = HERE / "result.json"
EXPLAINED = HERE / "explained.toml"


def results() -> dict[str, dict[str, Any]]:
    """Return what the runs found, by module."""
    found: dict[str, dict[str, Any]] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    return found


def explained() -> dict[str, dict[str, str]]:
    """Return the reasons why a mutant may survive, by module and key."""
    return tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))


def tables() -> str:
    """Return the score of each module, and the survivors with their reasons."""
    reasons = explained()
    lines = ["| module | mutants | tried | noticed | explained | score |", "|---|---|---|---|---|---|"]
    total = [0, 0, 0, 0]
    for name, one in results().items():
        known = sum(1 for survivor in one["survivors"] if survivor in reasons.get(name, {}))
        numbers = [one["mutants"], one["tried"], one["tried"] - len(one["survivors"]), known]
        total = [sum(pair) for pair in zip(total, numbers, strict=True)]
        lines.append(_row(_short(name), numbers))
    lines.append(_row("all", total))
    lines += ["", "## Explained survivors", "", "| module | mutant | reason |", "|---|---|---|"]
    for module, of_module in sorted(reasons.items()):
        lines += [f"| {_short(module)} | {key.replace('|', chr(92) + '|')} | {why} |" for key, why in of_module.items()]
    return "\n".join(lines)


def _row(name: str, numbers: list[int]) -> str:
    _, tried, noticed, known = numbers
    score = f"{(noticed + known) / tried:.0%}" if tried else ""
    return f"| {name} | {' | '.join(map(str, numbers))} | {score} |"


def _short(module: str) -> str:
    return f"`{module.removeprefix('src/gpumap/')}`"
