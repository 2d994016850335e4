"""The queries of docs/how-to/replace/, fence by fence.

docs/how-to/replace/README.md tells what the words after `promql` mean.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.fences import read_blocks
from tests.fleet import WORLDS, Relabeling

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "replace"
SAME = ("same-as-old", "same-values-as-old")
WORDS = {"old", *SAME, "gone", "empty", "sometimes", *WORLDS[1:]}


@dataclass(frozen=True)
class Fence:
    place: str
    """The guide and the line."""
    words: frozenset[str]
    query: str
    old: str | None
    """The last `old` query before this one."""

    @property
    def world(self) -> str:
        chosen = [word for word in self.words if word in WORLDS]
        return chosen[0] if chosen else "dialects"


def read_fences(guide: Path) -> Iterator[Fence]:
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
NATIVE = [fence for fence in FENCES if fence.words <= {*SAME}]


def native(guide: str, part: str) -> str:
    """The one new query of the guide that has this in it, for all namespaces."""
    (found,) = [fence.query for fence in NATIVE if fence.place.startswith(guide) and part in fence.query]
    return found.replace('{namespace="research"}', "")
