"""sizing.md says how many series there are: counted on nodes that the demo plays, and on every capture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings

from gpumap.agent.exposition import Exposition
from gpumap.agent.flags import DEFAULT_GROUPS
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.model.snapshot import Snapshot
from tests import golden
from tests.demo_process import fetch
from tests.docs import sized
from tests.examples import examples
from tests.generated import runs
from tests.nodes import TestNode
from tests.test_budget import MOST

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "reference" / "sizing.md").read_text()
EVERYTHING = ("--collect", "all", "--dialect", "all", "--process-metrics")
KINDS = {"whole": "whole GPU", "shared": "time-sliced GPU", "mig": "MIG device"}
DEFAULT = (*native(DEFAULT_GROUPS, process_metrics=False), *self_families("1", "3.11"))
CODEC = {family.name for family in GROUPS["codec"]}


def rows(first: str) -> Iterator[list[str]]:
    """The cells of the table whose head begins with this."""
    (table,) = re.findall(rf"^\| {first} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", DOCS, re.MULTILINE)
    for line in str(table).splitlines():
        yield [cell.strip().strip("*`").replace(" ", "") for cell in line.strip("|").split("|")]


def formula() -> Mapping[str, int]:
    """The numbers of the formula, by what they are of."""
    (line,) = re.findall(r"^    (50 \+ .*pods.*)$", DOCS, re.MULTILINE)
    found = {of.rstrip("s"): int(number) for number, of in re.findall(r"(\d+) × (GPUs|devices|holdings|pods)", line)}
    return {"agent": int(line.partition(" ")[0]), **found}


@pytest.fixture(name="pages", scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, bool], str]:
    """The page of each node, as it is by default and with everything."""
    folder = tmp_path_factory.mktemp("sized")

    def page(one: tuple[str, bool]) -> str:
        node, whole = one
        (home := folder / f"{node}-{whole}").mkdir()
        with sized.playing(home, node, *(EVERYTHING if whole else ())) as url:
            return fetch(f"{url}/metrics")[0]

    wanted = [(node, whole) for node in sized.NODES for whole in (False, True)]
    with ThreadPoolExecutor(2) as threads:
        return dict(zip(wanted, threads.map(page, wanted), strict=True))


@pytest.mark.parametrize("node", sized.NODES)
def test_each_part_has_as_many_series_as_is_said(pages: Mapping[tuple[str, bool], str], node: str) -> None:
    """The table by group, dialect and flag is what is counted on a page with all of them."""
    place = 1 + list(sized.NODES).index(node)
    said = {
        name.strip("`"): int(cells[place - 1])
        for names, *cells in rows("part")
        for name in names.removesuffix(":each").split(",")
    }
    counted = sized.by_part(pages[node, True])
    counted["theagentitself"] = counted.pop("agent")
    assert said.pop("bydefault") == len(list(sized.series(pages[node, False])))
    assert said.pop("everything") == len(list(sized.series(pages[node, True]))) == counted.total()
    assert {name: number for name, number in said.items() if number} == dict(counted)


@pytest.mark.parametrize("node", sized.NODES)
def test_the_formula_holds_on_the_nodes(pages: Mapping[tuple[str, bool], str], node: str) -> None:
    """The formula is no less than what is counted, and all of it on whole cards."""
    page = pages[node, False]
    there, most = sized.bearers(page), formula()
    said = sum(number * there[of] for of, number in most.items()) + sized.by_part(page)["pod-gpu-map"]
    counted = len(list(sized.series(page)))
    assert counted <= said
    assert counted == said or node != "whole"


@pytest.mark.parametrize("node", sized.NODES)
def test_each_thing_has_as_many_series_as_is_said(pages: Mapping[tuple[str, bool], str], node: str) -> None:
    """The table by what a series is a series of is what is counted by default."""
    said = {name: int(number) for name, number in rows("a series of")}
    counted, there = sized.by_bearer(pages[node, False]), sized.bearers(pages[node, False])
    named = {"agent": "theagent", "GPU": "eachpartitionedGPU" if node == "mig" else "eachGPU", "device": "eachdevice"}
    named["holding"] = f"eachholding,ofa{KINDS[node].replace(' ', '')}"
    for of, name in named.items():
        assert counted[of] == said[name] * there[of], name


def check_budget(page: str) -> None:
    """No more series than the numbers that a version may ever have by default."""
    there, counted = sized.bearers(page), Counter(sized.by_bearer(page))
    del counted["XID code"]
    named = {"agent": "agent", "GPU": "gpu", "device": "leaf", "holding": "container", "pod": "pod"}
    assert counted.total() <= sum(MOST[name] * there[of] for of, name in named.items())


@pytest.mark.parametrize("capture", golden.captures(), ids=lambda capture: capture.name)
def test_the_budget_holds_on_every_capture(capture: Path) -> None:
    """No capture has more series of its default groups than the budget."""
    page = (capture / "expected.prom").read_text()
    check_budget("\n".join(line for line in page.splitlines() if not is_extra(line)))


@settings(max_examples=examples(60))
@given(runs(lambda _, snapshot: check_budget(Exposition(DEFAULT).render(snapshot).decode())))
def test_the_budget_holds_on_nodes_made_by_chance(run: list[Snapshot | TestNode]) -> None:
    """Nor has a node with any sharing, any faults and anybody's processes."""


def is_extra(line: str) -> bool:
    """A family that is off by default, on the captures' pages all the same."""
    name = re.split(r"[ {]", line, maxsplit=1)[0]
    return name in CODEC or name.startswith("gpumap_process_")


def test_the_table_of_prometheus_is_reckoned_from_the_rest() -> None:
    """Series, samples, disk and memory are a node's series times what was measured."""
    (bytes_a_sample,) = map(float, re.findall(r"takes ([\d.]+)\s+bytes\s+a\s+sample", DOCS))
    (kilobytes,) = map(float, re.findall(r"([\d.]+)\s+kB\s+a\s+series,\s+and", DOCS))
    a_node = next(int(cells[1]) for name, *cells in rows("part") if name == "bydefault")
    for nodes, gpus, series, samples, disk, memory in rows("nodes"):
        assert int(gpus) == int(nodes) * sized.GPUS
        assert int(series) == int(nodes) * a_node
        assert int(samples) == int(series) // 15
        assert float(disk.removesuffix("GB")) == pytest.approx(int(samples) * 86400 * bytes_a_sample / 1e9, abs=0.1)
        assert float(memory.removesuffix("GB")) == pytest.approx(int(series) * kilobytes / 1e6, abs=0.05)


def test_the_rules_record_as_many_series_as_is_said() -> None:
    """The formula of the fleet's records is made of how many of them there are by each level."""
    groups = yaml.safe_load((ROOT / "rules" / "fleet.yaml").read_text())["groups"]
    levels = Counter(rule["record"].partition(":")[0] for group in groups for rule in group["rules"])
    said = re.search(
        r"^    (\d+) × namespaces \+ (\d+) × nodes \+ (\d+) × namespaces on each node \+ 8 owners "
        r"\+ (\d+) × models of GPU \+ (\d+)$",
        DOCS,
        re.M,
    )
    assert said is not None
    levels["cluster_namespace_node"] += levels.pop("cluster_namespace_node_share")
    by = ("cluster_namespace", "cluster_node", "cluster_namespace_node", "cluster_model", "cluster")
    assert [int(number) for number in said.groups()] == [levels[level] for level in by]
    assert levels.total() == sum(levels[level] for level in by) + 2, "by owner, and the helper"
