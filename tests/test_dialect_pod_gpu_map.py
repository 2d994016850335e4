"""The dialect pod-gpu-map: the original's names, labels and words, without its repeated rows and invalid names."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.dialects.small import node_family
from gpumap.model.node import ContainerOnDevice
from gpumap.model.snapshot import Snapshot
from tests.dialect_pages import card, holder, lints, node, page
from tests.snapshots import busy_node, with_node

CARD_0 = "GPU-40f717b2-01dc-1a31-6b17-d487ffe7cb61"
CARD_1 = "GPU-40f717b2-01dc-1a31-6b17-d487ffe7cb91"
TEST = f'gpu_id="{CARD_0}",gpu_model="4080ti",namespace="default",node="ti",pod_name="test"'
TEST2 = f'gpu_id="{CARD_0}",gpu_model="4080ti",namespace="default",node="ti",pod_name="test2"'
TEST3 = f'gpu_id="{CARD_1}",gpu_model="2080ti",namespace="default",node="ti",pod_name="test3"'
CARDS = card(0, CARD_0, "4080ti"), card(1, CARD_1, "2080ti")


def held(pod: str, uuid: str, container: str = "main", slots: int = 1) -> ContainerOnDevice:
    return holder(("default", pod, container), uuid, slots={"nvidia.com/gpu": slots})


def ti(*, nvml: bool = True) -> Snapshot:
    return node("ti", CARDS if nvml else (), [held("test", CARD_0), held("test2", CARD_0), held("test3", CARD_1)])


def test_the_nodes_page_is_written_as_the_original_writes_it() -> None:
    """/metrics/nodes has the same rows under the node's own name."""
    assert page((node_family("ti"),), ti()) == (
        "# HELP ti_info Provide every node's pod and gpu mapping relationship\n"
        "# TYPE ti_info gauge\n"
        f"ti_info{{{TEST}}} 1\n"
        f"ti_info{{{TEST2}}} 1\n"
        f"ti_info{{{TEST3}}} 1\n"
    )


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ti", "ti_info"),
        ("ti2", "ti2_info"),
        ("gpu-node.example.com", "gpu_node_example_com_info"),
        ("10.0.0.7", "_10_0_0_7_info"),
        ("7th", "_7th_info"),
        ("Knoten_ä:1", "Knoten___1_info"),
        ("", "_info"),
        ("٣", "__info"),
    ],
)
def test_the_nodes_name_becomes_a_valid_metric_name(name: str, family: str) -> None:
    """What is no letter or digit becomes _, and a leading digit gets one before it; the label keeps the name."""
    snapshot = with_node(ti(), name=name)
    (read,) = text_string_to_metric_families(page((node_family(name),), snapshot))
    assert read.name == family
    assert {one.labels["node"] for one in read.samples} == {name}


def test_promtool_reports_nothing_on_the_nodes_page() -> None:
    """`promtool check metrics` has nothing against it either (docs/reference/dialects.md says so)."""
    assert lints(page((node_family("gpu-node.example.com"),), busy_node())) == []
