"""The findings that a Prometheus has of a cluster are those of the agents, as far as series have them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumap.agent.judgement.judge import ENDING_SECONDS
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.agent.published import published
from gpumap.cli.commands.waste import waste_table, waste_values
from gpumap.cli.rows import NodeMaps
from gpumap.cli.sources import scraped_findings as findings
from gpumap.cli.sources.prometheus import Prometheus, Row
from gpumap.cli.sources.scraped_findings import cluster_findings
from gpumap.cli.sources.scraped_nodes import SNAPSHOT
from gpumap.cli.table import Shape
from gpumap.model.snapshot import Snapshot
from tests.examples import examples
from tests.generated import nodes as made_nodes
from tests.nodes import Gpu, Pod, Process, TestNode, gpu_uuid
from tests.scraped import kept

PAGE = (*native(GROUPS, process_metrics=False), *self_families("1", "3"))
Labels = dict[str, str]
Scrape = tuple[Snapshot, Labels]
"""A page, and the labels of the target that it came from."""
MONITORED = {"job": "gpumap", "endpoint": "metrics", "namespace": "gpumap", "pod": "gpumap-x", "container": "gpumap"}


def target(instance: str, **labels: str) -> Labels:
    return {**MONITORED, "instance": instance, "service": "gpumap", **labels}


BARE: Labels = {"job": "g", "instance": "b:1"}
KINDS: tuple[Labels, ...] = (target("a:1", node="n"), target("a:1"), BARE, {**BARE, "namespace": "gpumap"})
"""Targets as an operator, a static configuration and something between them label them."""


@dataclass
class PlayedServer:
    """A server that answers a query with all rows of the first family in it, whatever it asks of them."""

    series: dict[str, list[Row]]
    url: str = "http://prom"

    async def instant(self, expression: str, moment: int | None = None) -> list[Row]:
        if expression == "vector(time())":
            return [Row({}, [(0.0, str(max(float(row.points[0][1]) for row in self.series[SNAPSHOT])))])]
        family = re.search(r"gpumap_\w+|\bup\b", expression)
        return [] if family is None or expression.startswith("idelta") else self.series.get(family[0], [])


def series(scrapes: Iterable[Scrape], *, honour: bool) -> Iterator[tuple[str, Row]]:
    """What Prometheus stores of pages, with honor_labels or without."""
    for snapshot, of_target in scrapes:
        for family in PAGE:
            for sample in family.read(snapshot):
                own = dict(zip(family.labels, sample.labels, strict=True))
                labels = {name: value for name, value in kept(own, of_target, honored=honour).items() if value}
                yield family.name + sample.suffix, Row(labels, [(0.0, repr(sample.value))])


def cluster_of(
    *scrapes: Scrape, honour: bool = True, dropped: frozenset[str] = frozenset(), down: Iterable[Labels] = ()
) -> NodeMaps:
    """What `waste` gets from a server that has these series."""
    stored: dict[str, list[Row]] = {"up": [Row(labels, [(0.0, "0")]) for labels in down]}
    for name, row in series(scrapes, honour=honour):
        if name not in dropped:
            stored.setdefault(name, []).append(row)
    return asyncio.run(cluster_findings(cast("Prometheus", PlayedServer(stored)), ""))


def named(snapshot: Snapshot, name: str, address: str = "") -> Snapshot:
    return replace(snapshot, node=msgspec.structs.replace(snapshot.node, name=name, internal_ip=address))


def node_of(name: str, first: int, namespace: str = "ml") -> Snapshot:
    """A node with a card of its own: one pod computes on it, another squats."""
    card = gpu_uuid(first)
    holder = Pod(namespace, f"{name}-train", {"main": {"nvidia.com/gpu": [card]}})
    squatter = Pod("dev", f"{name}-shell", {"main": {}})
    node = TestNode([Gpu(first)], [holder, squatter], [Process(10, card, holder, sm=0.5), Process(11, card, squatter)])
    node.collect()
    return named(node.collect(), name)


def waste(maps: NodeMaps) -> Any:
    """What `waste -o json` shows, as far as series have it."""
    values = msgspec.to_builtins(waste_values(maps, Shape()))
    for finding in values["findings"]:
        for key in ("node", "why", "remedy", "pids", "granted_bytes", "used_bytes"):
            finding.pop(key, None)
    return values["findings"], values["sums"], values["by_namespace"]


def agree(snapshot: Snapshot, of_target: Labels, *, honour: bool) -> None:
    """The series of a node show the findings that the agent shows."""
    seen = cluster_of((snapshot, of_target), honour=honour)
    assert seen.missing == ()
    own = published(snapshot)
    assert waste(seen) == waste(NodeMaps((own,), fleet=True))
    (node,) = seen.maps
    assert (node.name, node.internal_ip, node.timestamp) == (own.name, own.internal_ip, own.timestamp)
    assert node.judged == own.judged


@given(made_nodes(), st.sampled_from(KINDS), st.booleans(), st.sets(st.sampled_from(["kubelet", "nvml", "procfs"])))
@settings(max_examples=examples(40))
def test_any_node(node: TestNode, of_target: Labels, honour: bool, down: set[str]) -> None:
    """Whatever a node is like, and whichever of its sources are down."""
    node.collect()
    node.down |= down
    agree(node.collect(ENDING_SECONDS), of_target, honour=honour)


@given(st.data())
@settings(max_examples=examples(40))
def test_any_cluster(data: st.DataObject) -> None:
    """Nodes of one to three clusters."""
    scrapes: list[Scrape] = []
    expected: dict[str, str] = {}
    for number in range(data.draw(st.integers(1, 4))):
        cluster = data.draw(st.sampled_from(["east", "west", "north"]))
        kind = data.draw(st.sampled_from([target("x"), {"job": "gpumap"}, {"job": "gpumap", "namespace": "gpumap"}]))
        snapshot = node_of(data.draw(st.sampled_from([f"gpu-{number}", "gpu-x"])), number, f"ns{number}")
        if any(one.node.name == snapshot.node.name and of["cluster"] == cluster for one, of in scrapes):
            continue
        of_target = {**kind, "instance": f"{number}:1", "cluster": cluster}
        replicas = data.draw(st.sampled_from([[""], ["a"], ["a", "b"]]))
        scrapes += [(snapshot, {**of_target, "prometheus_replica": one} if one else of_target) for one in replicas]
        expected[gpu_uuid(number)] = snapshot.node.name
    seen = cluster_of(*scrapes, honour=data.draw(st.booleans()))
    assert seen.missing == ()
    assert len({node.name for node in seen.maps}) == len(expected)
    found = {finding.uuid: node.name for node in seen.maps for finding in node.findings or ()}
    assert {uuid: name.rpartition("/")[2] for uuid, name in found.items()} == expected


def test_nodes_of_a_cluster_in_one_table() -> None:
    """Rows of all nodes are together, and name their node; sums are of all."""
    seen = cluster_of((node_of("gpu-1", 0), target("a:1")), (node_of("gpu-2", 1, "web"), target("b:1")))
    table = waste_table(seen, Shape(order="node"))
    assert [line.split()[:2] for line in table.splitlines()[:3]] == [
        ["NODE", "FINDING"],
        ["gpu-1", "SQUATTER"],
        ["gpu-2", "SQUATTER"],
    ]
    _, sums, by_namespace = waste(seen)
    squatted = [waste(NodeMaps((node,), fleet=True))[1]["squatter_bytes"] for node in seen.maps]
    assert sums["squatter_bytes"] == sum(squatted) > 0
    assert [row["namespace"] for row in by_namespace] == ["dev"]


def test_nodes_that_are_down() -> None:
    """Targets that are down are called by their nodes; not those of a node that answers by another target."""
    east, up = {"cluster": "east"}, node_of("gpu-1", 0)
    down = [target("z:1", node="gpu-1"), target("c:1", node="gpu-3"), {"job": "gpumap", "instance": "d:1"}]
    seen = cluster_of((up, target("a:1", node="gpu-1")), down=down)
    assert seen.missing == ("2 nodes, d:1, gpu-3: Prometheus cannot scrape its gpumap (up is 0)",)
    there = target("a:1", node="gpu-1", **east)
    seen = cluster_of((up, there), down=[target("b:1", cluster="west", node="gpu-1"), {**there, "instance": "c:1"}])
    assert seen.missing == ("node west/gpu-1: Prometheus cannot scrape its gpumap (up is 0)",)


@pytest.mark.parametrize("text", ["NaN", "+Inf", "-1", "0.5", "x", "1e300", "1_0", "٣", " 5"])
def test_values_that_are_none(text: str) -> None:
    """Bytes are whole and not negative; what is not so is not known, and said."""
    rows = dict(series([(node_of("n", 0), BARE)], honour=True))
    stored = {name: [row] for name, row in rows.items()}
    memory = findings.MEMORY.name
    stored[memory] = [Row(rows[memory].labels, [(0.0, text)])]
    seen = asyncio.run(cluster_findings(cast("Prometheus", PlayedServer(stored)), ""))
    assert [finding.memory_bytes for finding in seen.maps[0].findings or ()] == [None]
    assert len(seen.missing) == 1
    assert seen.missing[0].startswith(f"left out, because it is not valid: {memory}{{")
    assert seen.missing[0].endswith(f"}} is {text.strip()}")


def test_questions() -> None:
    """A family's own labels as scrapes rename them, those of the target, and the user's matchers."""
    assert findings.JUDGED.question('cluster="a"', ["cluster", "instance"]) == (
        'max by (finding, exported_finding, cluster, instance) (gpumap_finding_judged{cluster="a"})'
    )


def test_many_findings_do_not_fill_the_screen() -> None:
    """The worst 40, and how many more there are; the sums are of all. -o wide has all, and so have sums by node."""
    seen = cluster_of(*((node_of(f"gpu-{number}", number), target(f"{number}:1")) for number in range(43)))
    lines = waste_table(seen, Shape()).splitlines()
    assert sum("SQUATTER" in line for line in lines) == 40
    assert "3 more findings: -o wide shows all." in lines
    assert "squatter 43.0GiB" in lines[-1]
    assert waste_table(seen, Shape(wide=True)).count("SQUATTER ") == 43
    assert "3 more nodes: -o wide shows all." in waste_table(seen, Shape(sums_by="node"))


# --- what is not served -----------------------------------------------------------------------------------------------


def test_a_node_without_its_sources() -> None:
    seen = cluster_of((node_of("n", 0), target("a:1", node="n")), dropped=frozenset({"gpumap_source_up"}))
    assert seen.missing == ("node n: its gpumap does not report its sources (Prometheus drops gpumap_source_up)",)


@pytest.mark.parametrize(
    "dropped", [frozenset(family.name for family in GROUPS["findings"]), frozenset({"gpumap_finding_judged"})]
)
def test_findings_that_are_not_served_are_no_zeros(dropped: frozenset[str]) -> None:
    """Such a node is never shown as free of waste, neither on its own nor beside another one."""
    scrapes = (node_of("m", 0), target("a:1", node="m")), (node_of("n", 1), target("b:1", node="n"))
    seen = cluster_of(*scrapes, dropped=dropped)
    assert [one.partition(" (")[0] for one in seen.missing] == [
        "2 nodes, m, n: its gpumap does not report what is wrong on it"
    ]
    _, sums, _ = waste(seen)
    assert {value for key, value in sums.items() if key != "squatter_bytes"} == {None}
    assert "No waste found" not in waste_table(seen, Shape())
    assert "unmatched: not known on 2 of 2 nodes (m, n)." in waste_table(seen, Shape())


def test_two_targets_of_a_node_find_a_thing_once() -> None:
    """A node that two jobs scrape has the findings of one: of the newest that serves findings."""
    older, newer = node_of("n", 0), node_of("n", 0)
    newer = replace(newer, at=newer.at._replace(wall=newer.at.wall + 5))
    scrapes = (older, target("a:1", job="x")), (newer, target("b:1", job="y"))
    for judges in ([older], [newer], [older, newer]):
        silent = (replace(one, node=msgspec.structs.replace(one.node, findings=None, judged={})) for one, _ in scrapes)
        served = [(one if one in judges else other, of) for (one, of), other in zip(scrapes, silent, strict=True)]
        (found,) = cluster_of(*served).maps
        assert [one.finding for one in found.findings or ()] == ["squatter"]


def test_a_fault_is_not_one_of_gpumaps_own_pod() -> None:
    """Without honorLabels an empty name becomes that of the target."""
    node = TestNode([Gpu(0, fault="lost"), Gpu(1)], [], [])
    node.collect()
    seen = cluster_of((node.collect(), target("a:1")), honour=False)
    assert {(one.finding, one.pod, one.namespace) for one in seen.maps[0].findings or ()} == {("fault", "", "")}
