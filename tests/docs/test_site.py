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
REPOSITORY = r"https://github.com/[\w-]+/gpumap"


def build_site(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build with the flags of `make site`."""
    if importlib.util.find_spec("sphinx") is None and not os.environ.get("CI"):
        pytest.skip("Sphinx is missing: run `make setup`")
    (flags,) = re.findall(r"-m sphinx (.*) --doctree-dir", (ROOT / "Makefile").read_text(encoding="utf-8"))
    words = ["-m", "sphinx", *flags.split(), "--doctree-dir", folder / "doctrees", ".", folder / "site"]
    return subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True, timeout=300, check=False)


def test_the_site_is_complete(tmp_path: Path) -> None:
    """It loads nothing from other hosts, has its search index, and its links lead to pages or to the repository."""
    done = build_site(ROOT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    site = tmp_path / "site"
    pages = {path: path.read_text(encoding="utf-8") for path in (*site.rglob("*.html"), *site.rglob("*.css"))}
    outside = r"(?:<(?:script|img|source|link)\b[^>]*\b(?:src|srcset|href)=\"|url\(['\"]?|@import .)(?:https?:)?//"
    assert [path for path, text in pages.items() if re.search(outside, text)] == []
    assert "squatter" in (site / "searchindex.js").read_text(encoding="utf-8")
    for path, text in pages.items():
        for target in re.findall(r"\b(?:href|src|srcset)=\"([^\"#?]+)", text):
            inside = re.fullmatch(rf"{REPOSITORY}/(?:blob|tree)/main/(.+)", target)
            if inside or not re.match(r"[a-z]+:", target):
                assert (ROOT / inside[1] if inside else path.parent / target).exists(), f"{path}: {target}"


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
