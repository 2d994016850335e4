"""The reference pages in docs/ say what the code says; `make docs` brings them in line."""

import re
from pathlib import Path

import pytest

from gpumap.dialects import DIALECTS
from gpumap.metrics import GROUPS, native, self_families
from gpumap.settings import FLAGS, LATER_FLAGS
from scripts import generate_docs

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("name", generate_docs.PAGES)
def test_the_tables_are_up_to_date(name: str) -> None:
    """Each generated table is what the code would write now; if not, run `make docs`."""
    assert (DOCS / name).read_text(encoding="utf-8") == generate_docs.with_tables(name), "run `make docs`"


def rows(name: str) -> set[str]:
    """What the first cells of a page's tables name."""
    return set(re.findall(r"^\| `([^` ]+)", (DOCS / name).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_native_family_is_in_the_reference() -> None:
    """docs/metrics.md lists all native families, and nothing that does not exist."""
    families = (*native(GROUPS, process_metrics=True), *self_families("1", "2"))
    assert rows("metrics.md") == {one.name for one in families}


def test_every_flag_is_in_the_reference() -> None:
    """docs/flags.md lists all flags; those to come are named as not built yet."""
    assert rows("flags.md") == {flag.name for flag in FLAGS}
    page = (DOCS / "flags.md").read_text(encoding="utf-8")
    for flag in FLAGS:
        assert f"`{flag.variable}`" in page
    for name in LATER_FLAGS:
        assert f"`{name}`" in page


def test_every_dialect_is_in_the_reference() -> None:
    """docs/dialects.md has a chapter for each dialect that is built, and names the others as not built yet."""
    page = (DOCS / "dialects.md").read_text(encoding="utf-8")
    assert rows("dialects.md") == {"native", *DIALECTS}
    assert re.findall(r"^## (\S+)$", page, re.MULTILINE) == ["native", *DIALECTS]
