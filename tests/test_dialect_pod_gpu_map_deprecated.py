"""The dialect pod-gpu-map-deprecated: a family for each row of the map, numbered in a fixed order."""

from hypothesis import given
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.dialects.small import POD_GPU_MAP
from gpumap.agent.dialects.small import POD_GPU_MAP_DEPRECATED as FAMILIES
from gpumap.model.snapshot import Snapshot
from tests.dialect_pages import page, rows
from tests.generated import nodes
from tests.nodes import TestNode

LABELS = ("gpu_id", "namespace", "pod_name")


def numbered(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """The labels of family 0, 1, … in their order."""
    families = list(text_string_to_metric_families(page(FAMILIES, snapshot)))
    assert [family.name for family in families] == [f"POD_GPU_MAP_INFO_{number}" for number in range(len(families))]
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) == len(families)
    assert {sample.value for sample in samples} <= {0}
    return [tuple(sample.labels[label] for label in LABELS) for sample in samples]


@given(nodes())
def test_each_row_of_the_map_has_a_number(truth: TestNode) -> None:
    """On generated nodes the numbers count the rows of pod_and_gpu_map_info."""
    snapshot = truth.collect()
    found = numbered(snapshot)
    assert sorted(found) == sorted(rows(POD_GPU_MAP, snapshot, "pod_and_gpu_map_info", *LABELS))
