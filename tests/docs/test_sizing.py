"""sizing.md says how many series there are: counted on nodes that the demo plays, and on every capture. fleet-cost.md
says what a fleet's cost: computed from these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import ceil
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
PAGES = ("reference/sizing.md", "explanation/fleet-cost.md")
DOCS = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
EVERYTHING = ("--collect", "all", "--dialect", "all", "--process-metrics")
HOLDERS = {"onepod": "whole", "fourpods,time-sliced": "shared", "sevenMIGdevices": "mig"}
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
    said = sum(number * there[of] for of, number in most.items())
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


def of_a_node(part: str, node: str = "whole") -> int:
    """A cell of the table by group, dialect and flag."""
    (cells,) = (
        cells for name, *cells in rows("part") if part in name.removesuffix(":each").replace("`", "").split(",")
    )
    return int(cells[list(sized.NODES).index(node)])


def test_the_table_of_prometheus_is_reckoned_from_the_rest() -> None:
    """Series, samples, disk and memory are a node's series times what was measured."""
    (bytes_a_sample,) = map(float, re.findall(r"bytes a sample \| ([\d.]+) bytes", DOCS))
    (kilobytes,) = map(float, re.findall(r"kB a series \| ([\d.]+) kB", DOCS))
    for nodes, holders, series, samples, disk, memory in rows("nodes"):
        assert int(series) == int(nodes) * of_a_node("bydefault", HOLDERS[holders])
        assert int(samples) == int(series) // 15
        assert float(disk.removesuffix("GB")) == pytest.approx(int(samples) * 86400 * bytes_a_sample / 1e9, abs=0.1)
        assert float(memory.removesuffix("GB")) == pytest.approx(int(series) * kilobytes / 1e6, abs=0.05)


def test_the_short_answer_is_of_the_tables() -> None:
    """Millions of series, GB of memory and disk of 10 000 nodes with a pod on each GPU, and what two choices save."""
    (short,) = re.findall(r"^\*\*In short:\*\* (.*?)\n\n", DOCS, re.MULTILINE | re.DOTALL)
    (cells,) = (cells for cells in rows("nodes") if cells[:2] == ["10000", "onepod"])
    choices = {name.replace("`", ""): int(cells.split(";")[0]) for name, cells, _ in rows("choice")}
    saved = [
        round(100 - 100 * choices[name] / choices["default"])
        for name in ("--collectwithouthealth", "--collectallocation--collectuse")
    ]
    disk, memory = (float(cell.removesuffix("GB")) for cell in cells[-2:])
    assert re.findall(r"([\d.]+) (?:million|GB|%)", short) == [
        f"{int(cells[2]) / 1e6:.1f}",
        *map(str, (round(memory / 2), round(disk), *saved)),
    ]


def test_a_choice_has_as_many_series_as_is_said(pages: Mapping[tuple[str, bool], str]) -> None:
    """What is switched off is a part of the table by group, dialect and flag, or a family on the nodes' pages."""
    said = {name.replace("`", ""): [int(number) for number in cells.split(";")] for name, cells, _ in rows("choice")}
    for place, node in enumerate(sized.NODES):
        parts = {part: of_a_node(part, node) for part in ("allocation", "use", "theagentitself", "health", "gpm")}
        default, everything = of_a_node("bydefault", node), of_a_node("everything", node)
        events = sum(name == "gpumap_gpu_clock_event" for name, _ in sized.series(pages[node, False]))
        assert {name: numbers[place] for name, numbers in said.items()} == {
            "default": default,
            "--collectallocation--collectuse": sum(parts.values()) - parts["health"] - parts["gpm"],
            "--collectwithouthealth": default - parts["health"],
            "--collectwithoutgpm": default - parts["gpm"],
            "dropgpumap_gpu_clock_eventinthescrape": default - events,
            "everythingon": everything,
        }


def test_the_least_choice_is_what_the_agent_serves_with_it(tmp_path: Path) -> None:
    """The flags of the table's smallest row, tried."""
    with sized.playing(tmp_path, "whole", "--collect", "allocation", "--collect", "use") as url:
        counted = len(list(sized.series(fetch(f"{url}/metrics")[0])))
    assert counted == sum(of_a_node(part) for part in ("allocation", "use", "theagentitself"))


def test_what_a_new_pod_adds_is_counted(pages: Mapping[tuple[str, bool], str]) -> None:
    """Its holding's series and its info."""
    found = [of for _, of in sized.series(pages["whole", False]) if of.get("pod") == "job-0"]
    (said,) = re.findall(r"^    (\d+) × pods that start in an hour × 3$", DOCS, re.MULTILINE)
    assert len(found) == int(said)
    (hourly,) = (int(number.replace(" ", "")) for number in re.findall(r"These add ([\d ]+)\s+series", DOCS))
    assert hourly == 10_000 * sized.GPUS * int(said) * 3


def test_mimirs_share_is_computed_with_its_ratios() -> None:
    """10 000 nodes with a pod on each GPU: rounded up to whole cores and GB."""
    series = 10_000 * of_a_node("bydefault")
    said = {
        name: [int(number) for number in re.findall(r"(\d+)(?:core|GB)", cells[-1])]
        for name, *cells in rows("of Mimir")
    }
    samples, copies = series / 15 / 25_000, 3 * series / 300_000
    assert said["distributors"] == [ceil(samples), ceil(samples)]
    assert said["ingesters,3copies"] == [ceil(copies), ceil(copies * 2.5), ceil(copies * 5)]
    assert said["store-gateways"] == [round(13 * series / 1e6)]
    assert series < 20_000_000
    limits = {name.replace("`", ""): cells for name, *cells in rows("limit")}
    default, nodes = re.findall(r"\d+", limits["max_global_series_per_user"][0])[:2]
    assert int(nodes) == int(default) // of_a_node("bydefault")


def test_what_mimir_limits_is_counted_in_the_rules() -> None:
    """Chunks that one rule reads of a holding, and the groups."""
    files = [yaml.safe_load(file.read_text())["groups"] for file in sorted((ROOT / "rules").glob("*.yaml"))]
    rules = [rule for groups in files for group in groups for rule in group["rules"]]
    (idle,) = (rule["expr"] for rule in rules if rule.get("record") == "gpumap:holder_idle:seconds")
    selections = len(re.findall(r"gpumap_(?:container|allocation)_", idle))
    limits = {name.replace("`", ""): cells for name, *cells in rows("limit")}
    default, (chunks, enough) = (
        limits["max_fetched_chunks_per_query"][0],
        re.findall(r"\d+", limits["max_fetched_chunks_per_query"][1]),
    )
    assert int(chunks) == 2 * selections
    assert int(enough) == int(default) // int(chunks)
    assert (
        f"eachof{sum(map(len, files))}groups"
        in limits["ruler_max_rules_per_rule_group,ruler_max_rule_groups_per_tenant"][1]
    )


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
