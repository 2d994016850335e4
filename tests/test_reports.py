"""A command asks a server for what it shows, and for nothing that it does not need to show the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from msgspec import structs

from gpumap.cli.fleet import queries
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.reports import REPORTS, Report
from gpumap.cli.sort_keys import MAP_ORDERS, TOP_ORDERS, WASTE_ORDERS
from gpumap.cli.tables import Shape
from gpumap.model.names import FINDINGS
from gpumap.model.snapshot import Snapshot
from tests.examples import examples
from tests.generated import nodes as made_nodes
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.snapshots import busy_node
from tests.test_fleet import cluster_of, named, target

GPU_MEM = "aliyun.com/gpu-mem"
ORDERS = {"map": MAP_ORDERS, "top": TOP_ORDERS, "waste": WASTE_ORDERS}


def shapes(command: str) -> Iterator[tuple[str, Shape]]:
    """Every form and order that its flags let through."""
    if command not in ORDERS:
        yield from ((form, Shape()) for form in ("table", "json"))
        return
    for order in ORDERS[command]:
        for form in ("table", "wide", "json", "name"):
            yield form, Shape(wide=form == "wide", order=order)


def shown(report: Report, form: str, shape: Shape, seen: NodeMaps) -> object:
    """What is printed."""
    match form:
        case "json":
            return report.values(seen, shape)
        case "name":
            assert report.names is not None
            return report.names(seen, shape)
    return report.table(seen, shape)


class Look:
    """What looks at one node see, by the parts that are asked for."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._scrape = (snapshot, target("a:1", node="node-1"))
        self._seen: dict[frozenset[str], NodeMaps] = {}
        self._whole: dict[tuple[int, str, str], object] = {}

    def of(self, parts: frozenset[str]) -> NodeMaps:
        if parts not in self._seen:
            self._seen[parts] = cluster_of(self._scrape, parts=parts)[0]
        return self._seen[parts]

    def differs(self, report: Report, form: str, shape: Shape, parts: frozenset[str]) -> bool:
        """Whether these parts show something else than all of them."""
        key = (id(report), form, shape.order)
        if key not in self._whole:
            self._whole[key] = shown(report, form, shape, self._of(queries.ALL, report))
        return shown(report, form, shape, self._of(parts, report)) != self._whole[key]

    def _of(self, parts: frozenset[str], report: Report) -> NodeMaps:
        """`waste` names no gap of what it does not read."""
        return self.of(parts)._replace(missing=()) if report is REPORTS["waste"] else self.of(parts)


def wasteful() -> Iterator[Snapshot]:
    """Nodes on which somebody wastes, in every way that is found: what is idle has computed before."""
    busy = busy_node(4, 3)
    yield named(
        replace(busy, node=structs.replace(busy.node, findings=(), judged=dict.fromkeys(FINDINGS, True))), "node-1"
    )
    card = gpu_uuid(0)
    train, gone = Pod("ml", "train", {"main": {"nvidia.com/gpu": [card]}}), Pod("ml", "gone", {"main": {}})
    node = TestNode([Gpu(0), Gpu(1)], [train, gone], [Process(10, card, train, memory=GIB, sm=0.5)])
    node.processes.append(Process(11, gpu_uuid(1), gone, memory=3 * GIB))
    yield named(node.watch(), "node-1")
    node.pods.remove(gone)
    node.processes[0] = replace(node.processes[0], sm=0.0)
    yield named(node.watch(), "node-1")
    yield named(shared_out(), "node-1")


def shared_out() -> Snapshot:
    """A card that gpushare's plugin shares out by the MiB, and a pod that holds two of its slots."""
    offered = {GPU_MEM: [f"{gpu_uuid(0)}-_-{number}" for number in range(64)]}
    node = TestNode([Gpu(0, total=64 << 20)], [Pod("ml", "a", {"main": {GPU_MEM: offered[GPU_MEM][:2]}})])
    node.allocatable = offered
    node.collect()
    return node.collect()


WASTEFUL = tuple(map(Look, wasteful()))


@pytest.mark.parametrize("command", REPORTS)
def test_the_requested_parts_are_enough(command: str) -> None:
    """Every form, in every order, is the same as if the server had been asked for all that it has."""
    report = REPORTS[command]
    for form, shape in shapes(command):
        for look in WASTEFUL:
            assert not look.differs(report, form, shape, report.parts(form, shape)), (form, shape.order)


@given(made_nodes())
@settings(max_examples=examples(15))
def test_the_parts_are_enough_for_any_node(node: TestNode) -> None:
    node.collect()
    look = Look(named(node.collect(), "node-1"))
    for command, report in REPORTS.items():
        for form, shape in shapes(command):
            if shape.order in ("", *(orders[0] for orders in ORDERS.values())):
                assert not look.differs(report, form, shape, report.parts(form, shape)), (command, form)


@pytest.mark.parametrize("command", REPORTS)
def test_each_requested_part_is_needed(command: str) -> None:
    """Without any one of its parts some form of it would be another."""
    report = REPORTS[command]
    requests = [
        (form, shape, report.parts(form, shape)) for form, shape in shapes(command) if form in ("table", "wide")
    ]
    for part in frozenset[str]().union(*(parts for _, _, parts in requests)) - {
        queries.HOLDERS
    }:  # which comes with USE
        assert any(
            look.differs(report, form, shape, parts - {part})
            for form, shape, parts in requests
            if part in parts
            for look in WASTEFUL
        ), part
