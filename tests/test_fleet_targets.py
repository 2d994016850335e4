"""Many targets of many clusters: whatever their labels, each node's map is what its own agent says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gpumap.agent.published import published
from gpumap.cli.fleet.targets import Target, down_nodes
from gpumap.model.snapshot import Snapshot
from tests.examples import examples
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.test_fleet import Scrape, cluster_of, named, node_of, target
from tests.test_fleet_truth import facts_in_series, shown_of


@given(st.data())
@settings(max_examples=examples(40))
def test_any_cluster(data: st.DataObject) -> None:
    """Nodes of one to three clusters. Targets have the labels of their cluster; each is scraped by one or two
    servers: every node's map is what its agent says."""
    honour = data.draw(st.booleans())
    scrapes: list[Scrape] = []
    expected: dict[str, dict[str, Any]] = {}
    for number in range(data.draw(st.integers(1, 4))):
        cluster = data.draw(st.sampled_from(["east", "west", "north"]))
        kind = data.draw(st.sampled_from([target("x"), {"job": "gpumap"}, {"job": "gpumap", "namespace": "gpumap"}]))
        snapshot = node_of(data.draw(st.sampled_from([f"gpu-{number}", "gpu-x"])), number, f"ns{number}")
        if any(one.node.name == snapshot.node.name and of["cluster"] == cluster for one, of in scrapes):
            continue
        of_target = {**kind, "instance": f"{number}:1", "cluster": cluster}
        replicas = data.draw(st.sampled_from([[""], ["a"], ["a", "b"]]))
        scrapes += [(snapshot, {**of_target, "prometheus_replica": one} if one else of_target) for one in replicas]
        expected[gpu_uuid(number)] = facts_in_series(published(snapshot))
    seen, nodes = cluster_of(*scrapes, honour=honour)
    assert seen.missing == ()
    found = {one.devices[0].uuid: facts_in_series(one) for one in seen.maps}
    assert all(one.pop("name").endswith(expected[uuid].pop("name")) for uuid, one in found.items())
    assert found == expected
    assert len({node.shown for node in nodes}) == len(expected)


def test_a_node_that_is_down_in_one_of_two_clusters() -> None:
    """That the other cluster's node of its name answers does not hide it."""
    there = target("a:1", cluster="east", node="gpu-1")
    _, nodes = cluster_of((node_of("gpu-1", 0), there))
    targets = {nodes[0].keys[0]: Target(there, 0.0)}
    downs = down_nodes([target("b:1", cluster="west", node="gpu-1"), {**there, "instance": "c:1"}], targets, nodes)
    assert [(down.name, down.shown) for down in downs] == [("gpu-1", "west/gpu-1")]


def seeing(*, visible: bool, later: float = 0.0) -> Snapshot:
    """What an agent says of a card with a pod and a process of the host, that sees processes or not."""
    pod = Pod("ml", "train", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}})
    node = TestNode([Gpu(0)], [pod], [Process(10, gpu_uuid(0), pod, memory=40 * GIB), Process(11, gpu_uuid(0), None)])
    node.visible = visible
    node.collect()
    snapshot = named(node.collect(), "gpu-1")
    at = snapshot.at._replace(wall=snapshot.at.wall + later)
    return replace(snapshot, at=at, node=structs.replace(snapshot.node, timestamp=at.wall))


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("honour", [True, False])
def test_two_agents_that_see_differently(sees: bool, honour: bool) -> None:
    """The newest says what a node is like, and its owners' memory adds up to the device's."""
    old, new = seeing(visible=not sees), seeing(visible=sees, later=5.0)
    seen, nodes = cluster_of((old, target("a:1", service="a")), (new, target("b:1", service="b")), honour=honour)
    assert len(nodes) == 1
    assert facts_in_series(seen.maps[0]) == facts_in_series(published(new))
    assert shown_of(seen.maps[0]) == shown_of(published(new))


def test_a_gpu_that_two_nodes_have() -> None:
    """Each is shown with its own pods, not with the other's, and the doubt is reported."""
    one, two = node_of("gpu-1", 0), node_of("gpu-2", 0)
    seen, _ = cluster_of((one, target("a:1")), (two, target("b:1")))
    assert seen.missing == (gpu_uuid(0),)
    assert [facts_in_series(found) for found in seen.maps] == [
        facts_in_series(published(one)),
        facts_in_series(published(two)),
    ]
