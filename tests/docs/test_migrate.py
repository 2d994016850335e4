"""Every query of docs/how-to/replace/ is asked of a real Prometheus, and answers what its fence says.

tests/docs/guides.py describes the words after `promql` and the columns of tables.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.docs.guides import FENCES, GUIDES, KINDS, NATIVE, SAME, Fence, native, read_relabelings
from tests.fleet import SERVERS, Fleet, running_fleet
from tests.prometheus import Prometheus
from tests.promtool import assert_answers

ROUNDED = 1e-3
"""How much of a value the originals' units may round off: whole MiB."""
SETTLE_SECONDS = 1.5
"""How long ago a question is about: a scrape of then has been stored, of every name at once."""

Rows = dict[frozenset[tuple[str, str]], float]


@pytest.fixture(name="fleet", scope="module")
def run_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), *SERVERS, relabelings=list(read_relabelings())) as fleet:
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
    moment = fleet[fence.server].last_whole(SETTLE_SECONDS)
    answer = ask(fleet[fence.server], fence.query, moment)
    assert bool(answer) == ("gone" not in fence.words)
    if SAME in fence.words:
        assert fence.old is not None
        old = ask(fleet[fence.server], fence.old, moment)
        assert sorted(answer.values()) == pytest.approx(sorted(old.values()), rel=ROUNDED)


DIALECT = re.compile("DCGM_|gpumap_dcgm_owner_info|pod_and_gpu_map_info")
"""What is there, and yet is not in gpumap's own names."""
BY_POD = re.compile(r"\bby \([^)]*\bpod\b")
"""Asked by pod, what has no pod is the agent's by its scrape: a family of devices was taken for one of containers."""


@pytest.mark.parametrize("fence", NATIVE, ids=lambda fence: fence.place)
def test_a_new_query_needs_no_dialect(fleet: Fleet, fence: Fence) -> None:
    """With no dialect on it has an answer all the same: it is what remains once users have moved."""
    assert not DIALECT.search(fence.query)
    server = fleet["with-dcgm-honored"]
    answer = ask(server, fence.query, server.last_whole(SETTLE_SECONDS))
    assert answer
    if BY_POD.search(fence.query):
        assert not any(name == "pod" and pod.startswith("gpumap-") for labels in answer for name, pod in labels)


MEASURED = re.compile(r"\s+and gpumap_container_gpu_memory_used_bytes")
"""What keeps a grant out of a quotient if its use is not known."""
QUOTIENTS = [fence for fence in NATIVE if MEASURED.search(fence.query)]


@pytest.mark.parametrize("fence", QUOTIENTS, ids=lambda fence: fence.place)
def test_unknown_use_is_not_taken_for_idleness(fleet: Fleet, fence: Fence) -> None:
    """On the node with a lost card whoever has a known use uses one half of the grant; without the `and` less."""
    query = fence.query.replace('{namespace="recsys"}', "")
    moment = fleet["dialects"].last_whole(SETTLE_SECONDS)

    def broken(query: str) -> set[float]:
        answer = ask(fleet["dialects"], query, moment)
        places = {("node", "broken-node"), ("namespace", "halves"), ("namespace", "alone")}
        return {value / (100 if "100 *" in query else 1) for labels, value in answer.items() if labels & places}

    assert broken(query) == {0.5}
    assert min(broken(MEASURED.sub("", query))) < 0.5


def test_quotients_of_used_by_granted_are_tested() -> None:
    assert len(QUOTIENTS) == 1


HOLDERS = {
    "which": ("README.md", "index) ("),
    "memory": ("nvidia_gpu_exporter.md", "label_replace(gpumap_gpu_memory_used_bytes"),
}


@pytest.mark.parametrize("which", HOLDERS)
def test_a_partitioned_gpu_held_whole_has_its_holder(fleet: Fleet, which: str) -> None:
    """Its uuid is in no row of gpumap_device_info; the join names who has it, and every other holder once."""
    moment = fleet["dialects"].last_whole(SETTLE_SECONDS)
    answer = ask(fleet["dialects"], native(*HOLDERS[which]), moment)
    named = [
        (told["node"], told["namespace"], told["pod"], told["container"], told["uuid"]) for told in map(dict, answer)
    ]
    assert len(named) == len(set(named))
    assert any(pod[:2] == ("broken-node", "whole") for pod in named)
    if which == "which":
        assert all({"model", "index"} <= dict(told).keys() for told in answer)
        assert len(named) == ask(fleet["dialects"], "count(gpumap_allocation_info)", moment)[frozenset()]


def test_mig_devices_of_a_gpu_held_whole_are_not_free(fleet: Fleet) -> None:
    """The container that holds the GPU counts on each of them; a node on which all is held has nothing free."""
    moment = fleet["dialects"].last_whole(SETTLE_SECONDS)
    answer = ask(fleet["dialects"], "count by (node) (gpumap_device_holders == 0)", moment)
    assert frozenset({("node", "broken-node")}) not in answer
    assert answer


def test_memory_errors_of_long_ago_raise_no_alert(fleet: Fleet) -> None:
    """A counter of the card's whole life is at three; nothing was added."""
    moment = fleet["dialects"].last_whole(SETTLE_SECONDS)
    of_life = 'sum(gpumap_gpu_ecc_errors_total{type="uncorrected",node="broken-node"})'
    assert ask(fleet["dialects"], of_life, moment)[frozenset()] == 3
    answer = ask(fleet["dialects"], native("nvidia_gpu_exporter.md", "gpumap_gpu_ecc_errors_total"), moment)
    assert set(answer.values()) == {0}


_HOLDER = 'namespace="ml",pod="a",container="main"'
ONE_LOST = {
    f'gpumap_container_sm_seconds_total{{{_HOLDER},uuid="GPU-0"}}': "0+30x10",
    f'gpumap_container_sm_seconds_total{{{_HOLDER},uuid="GPU-1"}}': "100x10",
    f'gpumap_container_sm_utilization_ratio{{{_HOLDER},uuid="GPU-0"}}': "0.5x10",
    f'gpumap_container_allocated_gpus{{{_HOLDER},uuid="GPU-0"}}': "1x10",
    f'gpumap_container_allocated_gpus{{{_HOLDER},uuid="GPU-1"}}': "1x10",
    'gpumap_gpu_utilization_ratio{gpu_uuid="GPU-0"}': "0.5x10",
    'gpumap_gpu_up{gpu_uuid="GPU-0"}': "1x10",
    'gpumap_gpu_up{gpu_uuid="GPU-1"}': "0x10",
}
"""A container keeps half of one card busy; its other one does not answer."""
NVML_DOWN = {
    f'gpumap_allocation_info{{{_HOLDER},uuid="GPU-0"}}': "1x10",
    f'gpumap_container_allocated_gpus{{{_HOLDER},uuid="GPU-0"}}': "1x10",
}
"""What remains is what the kubelet reports."""


@pytest.mark.parametrize(
    ("series", "guide", "part", "labels", "value"),
    [
        (ONE_LOST, "nvitop-exporter.md", "gpumap_container_allocated_gpus", '{namespace="ml",pod="a"}', 0.5),
        (
            NVML_DOWN,
            "README.md",
            "index) (",
            f'gpumap_allocation_info{{{_HOLDER},uuid="GPU-0",node="n",instance="n:9401"}}',
            1,
        ),
    ],
)
def test_what_does_not_answer_is_neither_idle_nor_unheld(
    tmp_path: Path, series: Mapping[str, str], guide: str, part: str, labels: str, value: float
) -> None:
    """A lost card is in no mean of what is busy; while NVML is down, holders have no model."""
    samples = {f'{name[:-1]},node="n",instance="n:9401"}}': of for name, of in series.items()}
    assert_answers(tmp_path, samples, (native(guide, part), "10m", {labels: value}))


def test_the_words_of_fences_are_known() -> None:
    """A fence has words that guides.py describes, and not two that contradict each other."""
    for fence in FENCES:
        assert fence.words <= {*KINDS, *SERVERS[1:]}, fence.place
        assert len(fence.words & KINDS) <= 1, fence.place
        assert len(fence.words & set(SERVERS)) <= 1, fence.place
        assert not (SAME in fence.words and "[" in fence.query), f"{fence.place}: the same over time?"


def test_every_guide_is_in_the_index_and_has_queries() -> None:
    """README.md links each guide; each asks old queries and new ones."""
    index = (GUIDES / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {guide.name for guide in GUIDES.glob("*.md")} - {"README.md"}
    for name in linked:
        fences = [fence for fence in FENCES if fence.place.startswith(f"{name}:")]
        assert any(fence.words & {"old", "gone"} for fence in fences), name
        assert any(fence.words <= {SAME} for fence in fences), name
