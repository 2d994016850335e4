"""The queries of docs/how-to/replace/: code blocks, and rows of tables.

A code block has one query. The words after `promql` say what tests/docs/test_migrate.py expects of it. It asks a real
Prometheus that scrapes four simulated nodes (tests/fleet.py), with every dialect and group.

| words | the query | expected |
|---|---|---|
| `promql old` | an old query that a dialect answers, or an exporter that remains | an answer |
| `promql` | the new query, in native names | an answer, also without any dialect |
| `promql same-values-as-old` | a new query | the values of the last `old` query before it, in any order |
| `promql gone` | an old query with names that no dialect has | no answer |
| `promql with-dcgm` | for a dcgm-exporter that remains, scraped without `honorLabels` | an answer |
| `promql with-dcgm-honored` | for the same, scraped with `honorLabels` | an answer |
| `promql relabeled` | an old query that needs the pages' `yaml metricRelabelings` | an answer |

`old` and `same-values-as-old` may have `with-dcgm`, `with-dcgm-honored` or `relabeled` beside them. "Same" is to a
thousandth, because old names round to MiB. A query over time, such as `rate()`, cannot be the same.

A table has the columns `old query`, `native query` and `values`. `values` is "same" for the same values, or begins with
"no dialect" if no dialect has the old names. Otherwise it describes the difference.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.fences import read_blocks
from tests.fleet import SERVERS, Relabeling

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "replace"
QUERIES = {"old query", "native query", "values"}
SAME = "same-values-as-old"
KINDS = {"old", SAME, "gone"}


@dataclass(frozen=True)
class Fence:
    place: str
    """The guide and the line."""
    words: frozenset[str]
    query: str
    old: str | None
    """The last `old` query before this one."""

    @property
    def server(self) -> str:
        chosen = [word for word in self.words if word in SERVERS]
        return chosen[0] if chosen else "dialects"


def read_rows(guide: Path) -> Iterator[Fence]:
    """Yield the queries of tables: the old one and the native one of each row."""
    columns: list[str] = []
    for number, line in enumerate(guide.read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        columns = (columns or cells) if cells else []
        row = dict(zip(columns, cells, strict=True))
        if row.keys() >= QUERIES and cells != columns and set(line) - set("|-"):
            old, new = (row[name].strip("`") for name in ("old query", "native query"))
            kind = "gone" if row["values"].startswith("no dialect") else "old"
            yield Fence(f"{guide.name}:{number}", frozenset({kind}), old, None)
            yield Fence(f"{guide.name}:{number}", frozenset({SAME} if row["values"] == "same" else ()), new, old)


def read_fences(guide: Path) -> Iterator[Fence]:
    yield from read_rows(guide)
    old = None
    for block in read_blocks(guide.read_text(encoding="utf-8"), "promql"):
        yield Fence(f"{guide.name}:{block.line}", block.words, block.body, old)
        if "old" in block.words:
            old = block.body


def read_relabelings() -> Iterator[Relabeling]:
    """What the guides advise for gpumap's scrape, in Prometheus's own spelling: source_labels, not sourceLabels."""
    for guide in sorted(GUIDES.glob("*.md")):
        for text in blocks(guide, "yaml", "metricRelabelings"):
            for rule in yaml.safe_load(text):
                yield {re.sub("[A-Z]", lambda big: f"_{big[0].lower()}", name): value for name, value in rule.items()}


def blocks(guide: Path, language: str, word: str) -> list[str]:
    """The guide's blocks in a language that have this one word after it."""
    return [block.body for block in read_blocks(guide.read_text("utf-8"), language) if block.words == {word}]


FENCES = [fence for guide in sorted(GUIDES.glob("*.md")) for fence in read_fences(guide)]
NATIVE = [fence for fence in FENCES if fence.words <= {SAME}]


def native(guide: str, part: str) -> str:
    """Return the only new query of the guide that contains this."""
    (found,) = [fence.query for fence in NATIVE if fence.place.startswith(guide) and part in fence.query]
    return found
