"""Links between the project's documents lead somewhere."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("charts", "deploy", "docs")
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md")))]
DEVELOPER_PAGES = ["CONTRIBUTING.md", *(f"docs/dev/{page.name}" for page in sorted((ROOT / "docs/dev").glob("*.md")))]
PROGRAMS = ("src", "tests", "scripts", "bench", "boards", "charts", "deploy")
PLACEHOLDERS = {"SLOW_", "SHA256SUMS"}
"""Beginnings of names, and a file of a release."""
BY_RUNS = {"tests/fuzz/crashes/TARGET/"}
"""Folders that only a run makes."""
_CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def read_links(document: Path) -> Iterator[str]:
    """What links and pictures name, but for other hosts; nothing in code is a link."""
    text = _CODE.sub("", document.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
        name = target[0] or target[1]
        if not re.match(r"[a-z]+:", name):
            yield name


@cache
def anchors(document: Path) -> frozenset[str]:
    """The names that GitHub gives a document's headings."""
    text = re.sub(r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    named = re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text)
    return frozenset(named) | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    for link in read_links(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{document.name}: {link}"


@pytest.mark.parametrize("document", DEVELOPER_PAGES)
def test_files_in_code_exist(document: str) -> None:
    """A path that a page for contributors names begins at the project's root or at a room."""
    paths = re.findall(
        r"`((?:\w[\w.-]*/)+(?:[\w-]+\.(?:py|yaml|toml|md|c|proto))?)`", (ROOT / document).read_text(encoding="utf-8")
    )
    rooms = [ROOT, *(ROOT / "src/gpumap" / room for room in ("", "agent", "cli"))]
    missing = {path for path in paths if not any((room / path).exists() for room in rooms)}
    assert missing - BY_RUNS == set()


@cache
def program_words() -> frozenset[str]:
    """Every word of the programs, their tests and their configuration."""
    files = [
        path for folder in PROGRAMS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".c")
    ]
    texts = (path.read_text(encoding="utf-8") for path in (*files, ROOT / "Makefile", ROOT / "pyproject.toml"))
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


@pytest.mark.parametrize("document", DEVELOPER_PAGES)
def test_names_in_code_exist(document: str) -> None:
    """Identifiers that a page for contributors names are in the program, and in the file that the page says."""
    text = re.sub(
        r"^ *```.*?^ *```$", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    names = {
        name
        for code in re.findall(r"`([^`\n]+)`", text)
        for name in re.findall(r"(?<![\w/.-])[A-Za-z_]\w+(?![\w/-]|\.\w)", code)
        if "_" in name or re.search("[a-z][A-Z]", name) or re.fullmatch(rf"{name}(\(.*\))?", code)
    }
    assert names - program_words() <= PLACEHOLDERS
    for name, file in re.findall(r"`(\w+)` (?:in|of) `([\w/]+/[\w.]+)`", text):
        path = next(room / file for room in (ROOT, ROOT / "src/gpumap") if (room / file).exists())
        assert re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")), f"{name} in {file}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.* ## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        name
        for page in DOCUMENTS
        for name in re.findall(r"(?:`|\$ )make ([a-z0-9][a-z0-9-]*)", page.read_text("utf-8"))
    }
    assert len(named) > 20
    assert named <= targets


def test_every_page_is_in_the_index() -> None:
    """docs/README.md links every page of its four kinds, and the indexes of folders link theirs."""
    docs = ROOT / "docs"
    for index in docs.rglob("README.md"):
        linked = {(index.parent / link.partition("#")[0]).resolve() for link in read_links(index)}
        of_index = docs.rglob("*.md") if index.parent == docs else index.parent.glob("*.md")
        pages = {page for page in of_index if page.parent == index.parent or not (page.parent / "README.md").exists()}
        assert pages - {index} <= linked, f"{index.relative_to(ROOT)} lacks {pages - {index} - linked}"
