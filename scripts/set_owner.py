"""Write the owner's name into the files of a release: `python -m scripts.set_owner NAME`.

release.env has the name that they have now. The workflows need no name: GitHub gives it to them.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "release.env",
    "pyproject.toml",
    "SECURITY.md",
    "artifacthub-repo.yml",
    "charts/gpumap/Chart.yaml",
    "deploy/krew/gpumap.yaml",
    "docs/dev/release.md",
    ".github/ISSUE_TEMPLATE/config.yml",
)
"""The only files that name the owner."""
ACCOUNT = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}"
"""A name that GitHub permits."""


def owner(root: Path = ROOT) -> str:
    """Return the name in release.env."""
    found = re.search(r"^OWNER=(\S+)$", (root / "release.env").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, "release.env has a line OWNER=NAME"
    return found[1]


def renamed(text: str, old: str, new: str) -> str:
    """Return the text with the new name. A registry takes only small letters."""
    text = text.replace(f"ghcr.io/{old.lower()}/", f"ghcr.io/{new.lower()}/")
    return re.sub(
        rf"(?<=github\.com/){re.escape(old)}\b|(?<=OWNER=){re.escape(old)}$|(?<=- name: ){re.escape(old)}$",
        new,
        text,
        flags=re.MULTILINE,
    )


def set_owner(new: str, root: Path = ROOT) -> None:
    """Write the name into each file."""
    old = owner(root)
    for name in FILES:
        path = root / name
        path.write_text(renamed(path.read_text(encoding="utf-8"), old, new), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="an account of GitHub")
    args = parser.parse_args()
    if not re.fullmatch(ACCOUNT, args.name):
        parser.error(f"{args.name}: not a name of a GitHub account")
    set_owner(args.name)
