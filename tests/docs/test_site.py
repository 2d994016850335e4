"""The site of `make site`: it builds from the documents, needs no other host, and has no broken link."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = r"https://github.com/[\w-]+/gpumap/"


def build_site(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build with the flags of `make site`."""
    if importlib.util.find_spec("sphinx") is None and not os.environ.get("CI"):
        pytest.skip("Sphinx is missing: run `make setup`")
    (flags,) = re.findall(r"-m sphinx (.*) --doctree-dir", (ROOT / "Makefile").read_text(encoding="utf-8"))
    command = [
        sys.executable,
        "-m",
        "sphinx",
        *flags.split(),
        "--doctree-dir",
        folder / "doctrees",
        ".",
        folder / "site",
    ]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)


def test_the_site_is_complete(tmp_path: Path) -> None:
    """It loads nothing from other hosts, has its search index, and its links lead to pages or to the repository."""
    done = build_site(ROOT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    site = tmp_path / "site"
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    loaded = r"<(?:script|img|source|iframe)\b[^>]*https?://|<link\b[^>]*\bhref=\"(?:https?:)?//|url\(['\"]?(?:https?:)?//|@import"
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert [text for text in (*texts.values(), *styles) if re.search(loaded, text)] == []
    assert "squatter" in (site / "searchindex.js").read_text(encoding="utf-8")
    for path, text in texts.items():
        targets = re.findall(r"(?:href|src|srcset)=\"([^\"#?]+)", text)
        files = [target for target in targets if not re.match(r"[a-z]+:", target)]
        assert [target for target in files if not (path.parent / target).exists()] == [], path
    assert {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")} <= {
        path.relative_to(site / "docs") for path in texts if path.is_relative_to(site / "docs")
    }
    linked = {
        link for text in texts.values() for link in re.findall(rf"\"{REPOSITORY}(?:blob|tree)/main/([^\"#]*)", text)
    }
    assert len(linked) > 20
    assert [link for link in linked if not (ROOT / link).exists()] == []


def test_a_broken_link_fails(tmp_path: Path) -> None:
    """A page, an anchor or a file that does not exist."""
    (tmp_path / "docs/pictures").mkdir(parents=True)
    for name in ("docs/conf.py", "release.env"):
        shutil.copy(ROOT / name, tmp_path / name)
    links = "[a](CHANGELOG.md#none) [b](none.md) [c](none.yaml) [d](docs/README.md) [e](docs)"
    (tmp_path / "README.md").write_text(f"# gpumap\n\n{links}\n")
    for name in ("CHANGELOG", "CONTRIBUTING", "docs/README"):
        (tmp_path / f"{name}.md").write_text("# Page\n")
    done = build_site(tmp_path, tmp_path)
    assert done.returncode == 1
    broken = set(re.findall(r"'([^'\n]+)' \[myst.xref_missing\]", done.stderr))
    assert broken == {"none", "none.md", "none.yaml"}, done.stderr
