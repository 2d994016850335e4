"""The prose check of `make prose`: what it reports, and what it skips."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_prose

LONG = " ".join(["word"] * 31) + "."


def findings(folder: Path, name: str, body: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the check reports on a file with this body."""
    monkeypatch.setattr(check_prose, "ROOT", folder)
    (folder / name).write_text(body, encoding="utf-8")
    return [line for text in check_prose.texts(name) for line in check_prose.mistakes(text)]


@pytest.mark.parametrize(
    ("name", "body", "line", "word"),
    [
        ("a.md", f"Short.\n\n{LONG}\n", 3, "31 words"),
        ("a.md", "| title |\n|---|\n| NVML tells it |\n", 3, "tells"),
        ("a.py", f'"""{LONG}"""\n', 1, "31 words"),
        ("a.py", '"""Fine."""\n# Nobody reads it.\n', 2, "Nobody"),
        ("a.py", 'raise ValueError(f"{1}: the driver is silent")\n', 1, "silent"),
        ("a.yaml", "groups:\n- rules:\n  - annotations:\n      summary: it stands here\n", 4, "stands"),
        ("a.js", "/** Whoever reads it. */\n", 1, "Whoever"),
    ],
)
def test_what_is_reported(
    name: str, body: str, line: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sentences and replaced words, with their line, in each kind of file."""
    (found,) = findings(tmp_path, name, body, monkeypatch)
    assert found.startswith(f"{name}:{line}: ")
    assert word in found


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("a.md", f"```\n{LONG} nobody\n```\n"),
        ("a.md", "The label `nobody` and a [page](https://example.com/nobody).\n"),
        ("a.md", f"{'word ' * 20}ends. {'word ' * 20}ends.\n"),
        ("a.py", 'told = {"told": 1}\n'),
        ("a.py", f'"""Examples:\n\n    {LONG}\n\nThe end.\n"""\n'),
        ("a.py", f'NAMES = """\n{"NAME " * 40}\n"""\n'),
    ],
)
def test_what_is_skipped(name: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code, names, addresses, examples and lists of words are no sentences."""
    assert findings(tmp_path, name, body, monkeypatch) == []
