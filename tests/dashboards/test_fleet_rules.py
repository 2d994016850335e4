"""The fleet's recording rules: what promtool says of them, and their laws on every capture and on the demo."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests import golden
from tests.demo_process import demo
from tests.fences import read_blocks
from tests.pages import Page, serving_pages
from tests.prometheus import Prometheus, chart_job, each_second, eventually, prometheus
from tests.promtool import accepted

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "rules" / "fleet.yaml"
DOCS = ROOT / "docs" / "how-to" / "scrape.md"
RECORDS = [rule["record"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
EVERY_RECORD = '{__name__=~"cluster.*:gpumap_.*"}'
SAME = {
    "cluster_namespace:gpumap_container_allocated_gpus:sum": "cluster_node:gpumap_container_allocated_gpus:sum",
    "cluster_namespace:gpumap_container_sm_seconds:rate5m": "cluster_node:gpumap_container_sm_seconds:rate5m",
    "cluster_model:gpumap_gpu:count": "cluster_node:gpumap_gpu_up:count",
}
"""Two ways to add up the same things."""
PARTS = {
    "cluster_node:gpumap_gpu_up:sum": "cluster_node:gpumap_gpu_up:count",
    "cluster_node:gpumap_gpu_utilization_ratio:sum": "cluster_node:gpumap_gpu_utilization_ratio:count",
    "cluster_node:gpumap_device_memory_used_bytes:sum": "cluster_node:gpumap_device_memory_total_bytes:sum",
}
"""What is a part of what, on each node."""


def capture_pages() -> Mapping[str, Page]:
    """A node for each capture. No two nodes share a device."""

    def page(capture: Path) -> Page:
        said = (capture / "expected.prom").read_text()
        return Page(re.sub(r'uuid="((?:GPU|MIG)[^"]*)', rf'uuid="\1@{capture.name}', said).encode())

    return {f"/{capture.name}": page(capture) for capture in golden.captures()}


def with_rules(folder: Path) -> str:
    """The rules, each second."""
    text, number = re.subn(r"\n    interval: 1m\n", "\n    interval: 1s\n", RULES.read_text())
    assert number == text.count("  - name: ")
    copy = folder / "fleet.yaml"
    copy.write_text(text)
    return str(copy)


def just_now() -> str:
    """A moment of which all rules have been evaluated."""
    return str(time.time() - 3)


def assert_equal(fleet: Prometheus, *queries: str) -> None:
    """They have one value at some moment soon: while a busy Prometheus stores a scrape, a rule may miss it."""

    def values() -> list[float]:
        moment = just_now()
        return [value for query in queries for _, value in fleet.ask(query, time=moment)]

    def equal() -> bool:
        found = values()
        return len(found) == len(queries) and found == pytest.approx([found[0]] * len(found), rel=1e-9)

    eventually(equal, 60.0, about=lambda: dict(zip(queries, values(), strict=False)))


@pytest.fixture(name="fleet", scope="module")
def run_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the rules that scrapes all captures, and the demo, by two jobs each."""
    folder = tmp_path_factory.mktemp("fleet")
    (node := folder / "demo").mkdir()
    with (
        serving_pages(capture_pages().__getitem__) as address,
        demo(node, "--interval", "1s", "--idle-after", "5s") as url,
    ):
        nodes = {path[1:]: f"http://{address}{path}" for path in capture_pages()} | {"demo-node": url}
        both = chart_job(nodes), chart_job(nodes, name="gpumap-once-more")
        config = each_second(*both, rule_files=[with_rules(folder)])
        with prometheus(folder, config=config) as found:

            def counted() -> bool:
                """The demo's pods compute, and are charged, in each namespace's record."""
                names = ("gpumap_container_energy_joules", "gpumap_container_sm_seconds")
                return all(found.ask(f"cluster_namespace:{one}:rate5m > 0", time=just_now()) for one in names)

            eventually(counted, 60.0, about=lambda: found.api("rules"))

            def recorded() -> bool:
                return len(found.ask(f"count by (__name__) ({EVERY_RECORD})", time=just_now())) >= len(RECORDS)

            eventually(recorded, 60.0, about=lambda: found.api("rules"))
            yield found


def test_the_rules_hold_their_unit_tests() -> None:
    """They are correct for what is shared, not known, found, gone, restarted, scraped twice, and for clusters."""
    tests = Path(__file__).parents[1] / "rules" / "fleet.test.yaml"
    accepted("test", "rules", tests)


def test_names_say_level_metric_and_operation() -> None:
    """A record's name is level:metric:operation, and its level names the labels that it is made by."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            found = re.fullmatch(r"(cluster(?:_\w+)?):gpumap_\w+:(sum|count|rate5m)", rule["record"])
            assert found, rule["record"]
            by = ", ".join(found[1].split("_"))
            assert re.match(rf"(sum|count|max) by \({by}\) \(", rule["expr"].strip()), rule["record"]


def test_every_rule_is_healthy_and_has_a_sample(fleet: Prometheus) -> None:
    """On the captures and the demo no rule fails, warns, or stays without a series."""
    rules = [rule for group in fleet.api("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    names = {labels["__name__"] for labels, _ in fleet.ask(f"count by (__name__) (last_over_time({EVERY_RECORD}[1m]))")}
    assert names == set(RECORDS)


@pytest.mark.parametrize("name", SAME)
def test_sums_over_one_level_are_those_over_another(fleet: Prometheus, name: str) -> None:
    """Namespaces, owners and models add up to what nodes do, though everything is scraped twice."""
    queries = (f"sum({name})", f"sum({SAME[name]})")
    assert_equal(fleet, *queries)
    assert fleet.value(queries[0]) > 0


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_within_its_whole(fleet: Prometheus, name: str) -> None:
    """In no namespace and on no node is a part without its whole, or more than it."""

    def wrong() -> list[tuple[Mapping[str, str], float]]:
        moment = just_now()
        more = f"{name} unless {PARTS[name]}", f"{name} > {PARTS[name]} * 1.000001"
        return [found for query in more for found in fleet.ask(query, time=moment)]

    eventually(lambda: not wrong(), 60.0, about=wrong)


def test_a_clusters_records_are_the_sums_of_the_rest(fleet: Prometheus) -> None:
    """Each record by cluster is what the namespaces', or the nodes', of the same name add up to."""
    for record in RECORDS:
        level, _, rest = record.partition(":")
        finer = [f"{each}:{rest}" for each in ("cluster_namespace", "cluster_node") if f"{each}:{rest}" in RECORDS]
        if level == "cluster" and finer:
            assert_equal(fleet, *(f"sum({name})" for name in (record, *finer)))


def test_what_the_rules_add_up_is_what_the_pages_say(fleet: Prometheus) -> None:
    """Held, used and total are those of the pages themselves, each device once."""

    def scraped(name: str) -> str:  # by one of the two jobs at least
        return f'max without (job, instance) ({name}{{node!="demo-node"}})'

    instances = f"* on (node, uuid) group_left (gpu_uuid, gpu_instance_id) {scraped('gpumap_device_info')}"
    for name, each in (
        ("gpumap_container_allocated_gpus", ""),
        ("gpumap_device_memory_total_bytes", instances),
        ("gpumap_device_memory_used_bytes", instances),
    ):
        said = f"{scraped(name)} {each}"
        once = f"max by (gpu_uuid, gpu_instance_id) ({said})" if each else said
        assert_equal(fleet, f'sum(cluster_node:{name}:sum{{node!="demo-node"}})', f"sum({once})")


def test_the_docs_name_records() -> None:
    """Each record in the table of docs/how-to/scrape.md is one of the rules."""
    named = [
        f"{name}:{operation}"
        for name, first, second in re.findall(
            r"^\| `(\w+:gpumap_\w+):(\w+)`(?:, `:(\w+)`)?", DOCS.read_text(), re.MULTILINE
        )
        for operation in (first, second)
        if operation
    ]
    assert len(named) >= 10
    assert sorted(named) == sorted(set(named) & set(RECORDS))


def test_the_docs_queries_are_answered(fleet: Prometheus) -> None:
    """Each promql fence of docs/how-to/scrape.md gives an answer on the demo and the captures."""
    fences = list(read_blocks(DOCS.read_text(), "promql"))
    assert fences
    for fence in fences:
        assert fleet.ask(fence.body) != [], f"docs/how-to/scrape.md:{fence.line}"
