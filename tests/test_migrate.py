"""Every query of docs/migrate/ is asked of a real Prometheus, and answers what its fence says.

docs/migrate/README.md tells what the words after `promql` mean.
"""

import math
import re
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.fleet import BESIDE_DCGM, WORLDS, Fleet, Relabeling, running_fleet
from tests.test_prometheus import Prometheus

GUIDES = Path(__file__).resolve().parent.parent / "docs" / "migrate"
FENCE = re.compile(
    r"^(?P<indent> *)```promql(?P<words>[^\n]*)\n(?P<query>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
SAME = ("same-as-old", "same-values-as-old")
WORDS = {"old", *SAME, "gone", "empty", "sometimes", *WORLDS[1:]}
ROUNDED = 1e-3
"""How much of a value the originals' units may round off: whole MiB."""
SETTLE_SECONDS = 1.5
"""How long ago a question is about: a scrape of then has been stored, of every name at once."""

Rows = dict[frozenset[tuple[str, str]], float]


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
    text = guide.read_text(encoding="utf-8")
    old = None
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        words, query = frozenset(match["words"].split()), textwrap.dedent(match["query"])
        yield Fence(f"{guide.name}:{line}", words, query, old)
        if "old" in words:
            old = query


def read_relabelings() -> Iterator[Relabeling]:
    """What the guides advise for gpumap's scrape, in Prometheus's own spelling: source_labels, not sourceLabels."""
    for guide in sorted(GUIDES.glob("*.md")):
        for text in re.findall(r"^```yaml metricRelabelings\n(.*?)^```$", guide.read_text("utf-8"), re.M | re.S):
            for rule in yaml.safe_load(text):
                yield {re.sub("[A-Z]", lambda big: f"_{big[0].lower()}", name): value for name, value in rule.items()}


FENCES = [fence for guide in sorted(GUIDES.glob("*.md")) for fence in read_fences(guide)]


@pytest.fixture(name="fleet", scope="module")
def run_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), *WORLDS, relabelings=list(read_relabelings())) as fleet:
        yield fleet


def ask(prometheus: Prometheus, query: str, moment: float) -> Rows:
    """Answer the query at that moment: values by labels, without the name. NaN is no answer."""
    answer = prometheus.api("query", query=query, time=str(moment))
    if answer["resultType"] == "scalar":
        return {frozenset(): float(answer["result"][1])}
    rows = ((row["metric"], float(row["value"][1])) for row in answer["result"])
    return {
        frozenset((name, text) for name, text in labels.items() if name != "__name__"): value
        for labels, value in rows
        if not math.isnan(value)
    }


@pytest.mark.parametrize("fence", FENCES, ids=lambda fence: fence.place)
def test_a_query_answers_what_its_fence_says(fleet: Fleet, fence: Fence) -> None:
    """It parses, gives no error, and has an answer; or none, where the fence says so."""
    moment = time.time() - SETTLE_SECONDS
    answer = ask(fleet[fence.world], fence.query, moment)
    if fence.words & {"gone", "empty"}:
        assert not answer
    elif "sometimes" not in fence.words:
        assert answer, "no answer"
    if fence.words & {*SAME}:
        assert fence.old is not None
        assert_same(answer, ask(fleet[fence.world], fence.old, moment), by_labels="same-as-old" in fence.words)


def assert_same(new: Rows, old: Rows, *, by_labels: bool) -> None:
    if by_labels:
        assert new == pytest.approx(old, rel=ROUNDED)
    else:
        assert sorted(new.values()) == pytest.approx(sorted(old.values()), rel=ROUNDED)


DIALECT = re.compile("DCGM_|gpumap_dcgm_owner_info|pod_and_gpu_map_info")
"""What stands there, and yet is not in gpumap's own names."""
BY_POD = re.compile(r"\bby \([^)]*\bpod\b")
"""Asked by pod, what has no pod is the agent's by its scrape: a family of devices was taken for one of containers."""
NATIVE = [fence for fence in FENCES if fence.words <= {*SAME}]


@pytest.mark.parametrize("fence", NATIVE, ids=lambda fence: fence.place)
def test_a_new_query_needs_no_dialect(fleet: Fleet, fence: Fence) -> None:
    """With no dialect on it has an answer all the same: it is what remains once users have moved."""
    assert not DIALECT.search(fence.query)
    answer = ask(fleet["with-dcgm-honored"], fence.query, time.time() - SETTLE_SECONDS)
    assert answer
    if BY_POD.search(fence.query):
        assert not any(name == "pod" and pod.startswith("gpumap-") for labels in answer for name, pod in labels)


@pytest.mark.parametrize("world", BESIDE_DCGM)
def test_a_join_with_dcgm_exporter_has_a_row_for_each_owner(fleet: Fleet, world: str) -> None:
    """No owner of an exclusive GPU, a shared one or a MIG device is lost in the join or doubled, by either version."""
    owners = "count by (node, UUID, GPU_I_ID, namespace, pod, container) (gpumap_dcgm_owner_info)"
    fields = "max by (UUID, GPU_I_ID) (DCGM_FI_PROF_SM_UTIL_RATIO or DCGM_FI_PROF_SM_ACTIVE)"
    moment = time.time() - SETTLE_SECONDS
    expected = ask(fleet[world], owners, moment)
    joined = ask(fleet[world], f"{owners} * on(UUID, GPU_I_ID) group_left() {fields}", moment)
    assert len(expected) > 30
    assert set(expected.values()) == {1}
    assert joined.keys() == expected.keys()


def test_the_words_of_fences_are_known() -> None:
    """A fence has words that README.md explains, and not two that contradict each other."""
    kinds = {"old", *SAME, "gone", "empty", "sometimes"}
    for fence in FENCES:
        assert fence.words <= WORDS, fence.place
        assert len(fence.words & kinds) <= 1, fence.place
        assert len(fence.words & set(WORLDS)) <= 1, fence.place
        assert not (fence.words & {*SAME} and "[" in fence.query), f"{fence.place}: the same over time?"


def test_every_guide_is_in_the_index_and_has_queries() -> None:
    """README.md links each guide; each asks old queries and new ones."""
    index = (GUIDES / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {guide.name for guide in GUIDES.glob("*.md")} - {"README.md"}
    for name in linked:
        fences = [fence for fence in FENCES if fence.place.startswith(f"{name}:")]
        assert any(fence.words & {"old", "gone"} for fence in fences), name
        assert any(fence.words <= {*SAME} for fence in fences), name
