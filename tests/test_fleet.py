"""The maps that are made of series are those of the agents that served them, as far as series have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.cli.fleet import joins, queries
from gpumap.cli.fleet.joins import Answers, duplicate_devices, gaps, series_of_nodes
from gpumap.cli.fleet.queries import AskedFamily, Selection, families_for, matchers_of_targets, question
from gpumap.cli.fleet.targets import (
    Target,
    TargetsOfNode,
    differ_in_own_labels,
    down_nodes,
    labels_by_key,
    names_of,
    selection_of,
    targets_by_key,
)
from gpumap.cli.fleet.values import FamilyValues, read
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.tables import Shape
from gpumap.cli.tables.fleets import of_namespace
from gpumap.cli.tables.map import map_names, map_table, map_values
from gpumap.cli.tables.top import top_table, top_values
from gpumap.cli.tables.waste import waste_table, waste_values
from gpumap.model.node import ContainerOnDevice, Watch
from gpumap.model.snapshot import Snapshot
from tests.nodes import Gpu, Pod, Process, TestNode, gpu_uuid
from tests.scraped import kept

PAGE = (*native(GROUPS, process_metrics=False), *self_families("1", "3"))
Labels = dict[str, str]
Scrape = tuple[Snapshot, Labels]
"""A page, and the labels of the target that it came from."""
MONITORED = {"job": "gpumap", "endpoint": "metrics", "namespace": "gpumap", "pod": "gpumap-x", "container": "gpumap"}


def series(scrapes: Iterable[Scrape], *, honour: bool) -> Iterator[tuple[str, Labels, float]]:
    """What Prometheus stores of pages, with honor_labels or without."""
    for snapshot, target in scrapes:
        for family in PAGE:
            for one in family.read(snapshot):
                own = dict(zip(family.labels, one.labels, strict=True))
                stored = kept(own, target, honored=honour)
                yield family.name + one.suffix, {k: v for k, v in stored.items() if v}, one.value


def cluster_of(
    *scrapes: Scrape,
    honour: bool = True,
    parts: frozenset[str] = queries.ALL,
    dropped: frozenset[str] = frozenset(),
) -> tuple[NodeMaps, list[TargetsOfNode]]:
    """What a command gets from a server that has these series; `missing` is what nodes do not report."""
    stored = [one for one in series(scrapes, honour=honour) if one[0] not in dropped]
    found = [(labels, value) for name, labels, value in stored if name == queries.SNAPSHOT]
    selection = selection_of([{**labels, "__name__": queries.SNAPSHOT} for labels, _ in found], "")
    targets = targets_by_key(found, {}, selection)

    def ask(family: AskedFamily, selection: Selection) -> FamilyValues:
        return read(family, answer(stored, family, selection), selection)

    names = names_of(targets, ask(queries.NODE_INFO, selection).values)
    labels = [one.labels for one in targets.values()]
    selection = selection._replace(mixed=differ_in_own_labels(labels), targets=labels_by_key(targets, names))
    requests = families_for(parts)
    answers = Answers(targets, names, requests, {one.name: ask(one, selection) for one in requests})
    nodes, odd = series_of_nodes(answers)
    maps = tuple(map(joins.node_of, nodes))
    slots_served = any(one.of(queries.SLOTS) for one in nodes)
    missing = [
        *(
            f"{one.name}: {why}"
            for one, of in zip(maps, nodes, strict=True)
            for why in gaps(of, one, parts, "", slots_served=slots_served)
        ),
        *sorted(duplicate_devices(maps)),
        *(row for one in answers.values.values() for row in one.odd),
        *odd,
    ]
    return NodeMaps(maps, tuple(missing), fleet=True), [one.node for one in nodes]


def answer(
    stored: Iterable[tuple[str, Labels, float]], family: AskedFamily, selection: Selection
) -> list[tuple[Mapping[str, str], tuple[float, str]]]:
    """As a server answers the family's question."""
    by = question(family, selection).partition("(")[2].partition(")")[0].split(", ")
    groups: dict[tuple[tuple[str, str], ...], float] = {}
    for name, labels, value in stored:
        if name == family.name and _is_kept(family, labels, value):
            key = tuple((one, labels[one]) for one in by if one in labels)
            groups[key] = max(groups.get(key, value), value)
    return [(dict(key), (0.0, repr(value))) for key, value in groups.items()]


def _is_kept(family: AskedFamily, labels: Labels, value: float) -> bool:
    """What the selectors and the comparison of its question leave. Devices without a finding do no harm."""
    if family.always and _fits(family.always, labels):
        return True
    return (
        _fits(family.only, labels) and {"": True, "== 0": value == 0, "!= 0": value != 0, "> 0": value > 0}[family.kept]
    )


def _fits(matcher: str, labels: Labels) -> bool:
    """Whether a selector takes them: `a="b"`, `a=~"b|c"` or `a!~"b|c"`."""
    for operator in ("!~", "=~"):
        if operator in matcher:
            name, _, alternatives = matcher.partition(operator)
            return (labels.get(name, "") in alternatives.strip('"').split("|")) is (operator == "=~")
    name, _, value = matcher.partition("=")
    return not matcher or labels.get(name, "") == value.strip('"')


def target(instance: str, **labels: str) -> Labels:
    return {**MONITORED, "instance": instance, "service": "gpumap", **labels}


def named(snapshot: Snapshot, name: str, address: str = "") -> Snapshot:
    return replace(snapshot, node=msgspec.structs.replace(snapshot.node, name=name, internal_ip=address))


_NOT_IN_SERIES = ("memory_controller_busy_ratio", "encoder_ratio", "decoder_ratio", "pod_uid")


def container_in_series(one: ContainerOnDevice) -> ContainerOnDevice:
    """What series have of a container on a device."""
    use = one.use and msgspec.structs.replace(one.use, **dict.fromkeys(_NOT_IN_SERIES, None))
    grant = one.grant and msgspec.structs.replace(one.grant, admin_access=False)
    last_active = one.watch.last_active if one.watch and one.use else None
    watch = None if last_active is None else Watch(last_active, 0.0, 0.0, 0.0, 0.0)
    return msgspec.structs.replace(one, use=use, grant=grant, watch=watch)


def node_of(name: str, first: int, namespace: str = "ml") -> Snapshot:
    """A node with a card of its own: one pod computes on it, another squats."""
    card = gpu_uuid(first)
    holder = Pod(namespace, f"{name}-train", {"main": {"nvidia.com/gpu": [card]}})
    squatter = Pod("dev", f"{name}-shell", {"main": {}})
    node = TestNode([Gpu(first)], [holder, squatter], [Process(10, card, holder, sm=0.5), Process(11, card, squatter)])
    node.collect()
    return named(node.collect(), name)


def sums(answer: NodeMaps) -> dict[str, Any]:
    """The sums of `waste`."""
    found: dict[str, Any] = msgspec.to_builtins(waste_values(answer, Shape()))["sums"]
    return found


def test_nodes_of_a_cluster_in_one_table() -> None:
    """Rows of all nodes are together, and name their node; sums are of all."""
    one, two = node_of("gpu-1", 0), node_of("gpu-2", 1, "web")
    seen, _ = cluster_of((one, target("a:1")), (two, target("b:1")))
    table = top_table(seen, Shape(order="node"))
    assert [line.split()[0] for line in table.splitlines() if "GiB" in line] == ["gpu-1"] * 2 + ["gpu-2"] * 2
    assert table.startswith("NODE ")
    rows = msgspec.to_builtins(top_values(seen, Shape(order="sm")))
    assert [row["node"] for row in rows["rows"]][:2] == ["gpu-1", "gpu-2"]
    assert [node["name"] for node in rows["nodes"]] == ["gpu-1", "gpu-2"]
    each = [sums(NodeMaps((one,))) for one in seen.maps]
    assert sums(seen) == {
        key: None if None in of else sum(of) for key in each[0] for of in [[one[key] for one in each]]
    }
    assert sums(seen)["squatter_bytes"] == 2 * each[0]["squatter_bytes"] > 0
    waste = waste_table(seen, Shape())
    assert waste.count("uses a device that it does not hold\n") == 2
    assert [one["name"] for one in msgspec.to_builtins(map_values(seen, Shape()))["nodes"]] == [
        "gpu-1",
        "gpu-2",
    ]


def test_one_namespace() -> None:
    """Rows of other namespaces are gone, devices stay where it has a pod, and the sums are of what is shown."""
    both, _ = cluster_of((node_of("gpu-1", 0), target("a:1")), (node_of("gpu-2", 1, "web"), target("b:1")))
    seen = of_namespace(both, "web")
    table = map_table(seen, Shape(namespace="web"))
    assert "gpu-2-train" in table
    assert "gpu-1" not in table
    assert "shell" not in table
    assert map_names(seen, Shape()) == [("web", "gpu-2-train")]
    assert map_names(both, Shape())[:2] == [("ml", "gpu-1-train"), ("dev", "gpu-1-shell")]
    assert sums(seen)["squatter_bytes"] == 0
    nothing = of_namespace(both, "no")
    assert map_table(nothing, Shape(namespace="no")).startswith("Namespace no has no holder or user of a GPU.")


def test_targets_that_are_down() -> None:
    """Targets that are down are called by their nodes; not those of a node that answers by another one."""
    seen, nodes = cluster_of((node_of("gpu-1", 0), target("a:1", node="gpu-1")))
    assert seen.maps
    rows = [target("z:1", node="gpu-1"), target("c:1", node="gpu-3"), {"job": "gpumap", "instance": "d:1"}]
    there = {nodes[0].keys[0]: Target(target("a:1", node="gpu-1"), 0.0)}
    assert [down.shown for down in down_nodes(rows, there, nodes)] == ["d:1", "gpu-3"]


def test_many_broken_nodes_do_not_fill_the_screen() -> None:
    """What many have in common is one line, and of what is left there are twenty."""
    seen, _ = cluster_of(*((node_of(f"gpu-{number}", number), target(f"{number}:1")) for number in range(3)))
    broken = tuple(msgspec.structs.replace(one, capabilities={}) for one in seen.maps)
    table = map_table(NodeMaps(broken, tuple(f"node {number}: is away" for number in range(300)), fleet=True), Shape())
    assert "\n3 nodes, gpu-0, gpu-1, gpu-2: Processes of other containers are not visible" in table
    assert table.count(": is away") == 20
    assert table.endswith("and 280 more like this\n")


@pytest.mark.parametrize("text", ["NaN", "+Inf", "-1", "0.5", "x", "1e300", "1_0", "٣", " 5"])
def test_values_that_are_none(text: str) -> None:
    """Bytes are whole and not negative; what is not so is not known, and said."""
    found = read(queries.USED, [({"uuid": "GPU-1", "pod": "p"}, (0.0, text))], Selection("", (), frozenset()))
    assert found.values == {}
    assert found.odd == (f"gpumap_container_gpu_memory_used_bytes{{pod=p, uuid=GPU-1}} is {text.strip()}",)


def test_questions() -> None:
    """A family's own labels, those of the target where they are needed, and the user's matchers."""
    selection = Selection('cluster="a"', ("instance",), frozenset({"namespace", "instance"}))
    assert question(queries.USED, selection) == (
        "max by (namespace, pod, container, uuid, exported_namespace, instance) "
        '(gpumap_container_gpu_memory_used_bytes{cluster="a"})'
    )
    assert question(queries.OWNER_PROCESSES._replace(only='owner="gone"'), selection) == (
        'max by (uuid, owner, instance) (gpumap_device_processes{owner="gone",cluster="a"}) != 0 '
        'or max by (uuid, owner, instance) (gpumap_device_processes{owner="unknown",cluster="a"})'
    )
    assert question(queries.GPU_DOWN, selection) == 'max by (gpu_uuid, instance) (gpumap_gpu_up{cluster="a"}) == 0'
    odd: list[Any] = [{"instance": 'a.b:1"|\\'}]
    assert list(matchers_of_targets(odd, ("instance",))) == ['instance=~"a\\\\.b:1\\"\\\\|\\\\\\\\"']


def test_many_findings_do_not_fill_the_screen() -> None:
    """The worst 40, and how many more there are; the sums are of all. -o wide has all, and so have sums by node."""
    seen, _ = cluster_of(*((node_of(f"gpu-{number}", number), target(f"{number}:1")) for number in range(43)))
    lines = waste_table(seen, Shape()).splitlines()
    assert sum("SQUATTER" in line for line in lines) == 40
    assert "3 more findings: -o wide shows all." in lines
    assert "43.0GiB used by squatters" in lines[-1]
    assert waste_table(seen, Shape(wide=True)).count("SQUATTER ") == 43
    assert "3 more nodes: -o wide shows all." in waste_table(seen, Shape(sums_by="node"))
