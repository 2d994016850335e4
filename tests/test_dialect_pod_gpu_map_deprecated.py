"""The dialect pod-gpu-map-deprecated: a family for each row of the map, numbered in a fixed order."""

from dataclasses import replace

from hypothesis import given
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.dialects import pod_gpu_map
from gpumap.agent.dialects.pod_gpu_map import DEPRECATED_FAMILIES as FAMILIES
from gpumap.model.snapshot import Snapshot
from tests.dialect_pages import (
    PARENT,
    SHARED_1,
    SHARED_2,
    blind,
    card,
    holder,
    node,
    page,
    partitioned,
    rows,
    shuffled,
    squatted,
    without_nvml,
)
from tests.dialect_samples import CARD_0, CARD_1, ti
from tests.generated import nodes
from tests.nodes import TestNode
from tests.snapshots import busy_node

SAMPLE = """\
POD_GPU_MAP_INFO_0{gpu_id="GPU-40f717b2-01dc-1a31-6b17-d487ffe7cb61",gpu_model="4080ti",namespace="default",node="ti",pod_name="test"} 0.0
POD_GPU_MAP_INFO_11{gpu_id="GPU-40f717b2-01dc-1a31-6b17-d487ffe7cb91",gpu_model="2080ti",namespace="default",node="ti",pod_name="test3"} 0.0
"""  # noqa: E501 - as they stand in reference 004
LABELS = ("gpu_id", "namespace", "pod_name")


def numbered(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """The labels of family 0, 1, … in their order."""
    families = list(text_string_to_metric_families(page(FAMILIES, snapshot)))
    assert [family.name for family in families] == [f"POD_GPU_MAP_INFO_{number}" for number in range(len(families))]
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) == len(families)
    assert {sample.value for sample in samples} <= {0}
    return [tuple(sample.labels[label] for label in LABELS) for sample in samples]


def test_the_originals_samples_are_on_the_page() -> None:
    """Its rows of this node are all there, but for their numbers."""
    shown = {line.split("{")[1] for line in page(FAMILIES, ti()).splitlines() if not line.startswith("#")}
    assert shown == {line.removesuffix(".0").split("{")[1] for line in SAMPLE.splitlines()}


def test_rows_are_those_of_the_map_each_once() -> None:
    """Two containers and many slots of a pod on one card are one row, as on pod_and_gpu_map_info."""
    twice = [holder(("default", "test", name), CARD_0, slots={"nvidia.com/gpu": 4}) for name in ("a", "b")]
    assert numbered(replace(ti(), containers=tuple(twice))) == [(CARD_0, "default", "test")]
    assert set(numbered(busy_node())) == set(rows(pod_gpu_map.FAMILIES, busy_node(), "pod_and_gpu_map_info", *LABELS))


def test_numbers_follow_namespace_pod_and_card() -> None:
    """The order is fixed, so that a map that does not change keeps its numbers."""
    cards = card(0, CARD_0, "4080ti"), card(1, CARD_1, "2080ti")
    held = [("b", "x", CARD_0), ("a", "z", CARD_1), ("a", "y", CARD_1), ("a", "y", CARD_0)]
    snapshot = node("ti", cards, [holder((namespace, pod, "c"), uuid) for namespace, pod, uuid in held])
    assert numbered(snapshot) == [
        (CARD_0, "a", "y"),
        (CARD_1, "a", "y"),
        (CARD_1, "a", "z"),
        (CARD_0, "b", "x"),
    ]
    assert page(FAMILIES, shuffled(snapshot)) == page(FAMILIES, snapshot)


def test_hard_nodes() -> None:
    """Only who holds is on the map: with and without NVML and PID visibility, of a partitioned card as of its parts."""
    assert [row[2] for row in numbered(squatted())] == ["pod"]
    assert [row[2] for row in numbered(blind())] == ["pod"]
    assert [row[2] for row in numbered(without_nvml())] == ["pod"]
    held = [holder(("a", "p", "c"), uuid) for uuid in (PARENT, SHARED_1.uuid, SHARED_2.uuid)]
    assert {row[0] for row in numbered(partitioned(held))} == {PARENT, SHARED_1.uuid, SHARED_2.uuid}
    assert numbered(node("ti", [])) == []


@given(nodes())
def test_each_row_of_the_map_has_a_number(truth: TestNode) -> None:
    """On generated nodes the numbers count the rows of pod_and_gpu_map_info."""
    snapshot = truth.collect()
    found = numbered(snapshot)
    assert sorted(found) == sorted(rows(pod_gpu_map.FAMILIES, snapshot, "pod_and_gpu_map_info", *LABELS))
