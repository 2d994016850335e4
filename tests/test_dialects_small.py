"""The small dialects: which rows each has on any node, and what is particular to it."""

import pytest
from hypothesis import given, settings
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.dialects.small import (
    CADVISOR,
    DCGM_JOIN,
    GPU_MEM_MONITOR,
    POD_GPU_MAP,
    POD_GPU_MAP_DEPRECATED,
    node_family,
)
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner
from tests import dcgm_nodes
from tests.dcgm_nodes import CARD, P1, P2, TRAINER
from tests.dialect_pages import (
    ALONE,
    GIB,
    HARD,
    PARENT,
    SHARED_1,
    SHARED_2,
    TITAN,
    Rows,
    card,
    holder,
    lints,
    node,
    page,
    partitioned,
    process,
    rows,
    used,
    user,
)
from tests.examples import examples
from tests.generated import nodes
from tests.nodes import TestNode
from tests.snapshots import busy_node, with_node

CONTAINER = ("namespace", "pod", "container")

# --- cadvisor ---------------------------------------------------------------------------------------------------------


def accelerator_rows(snapshot: Snapshot, name: str) -> Rows:
    return rows(CADVISOR, snapshot, f"container_accelerator_{name}", *CONTAINER, "acc_id")


def test_a_whole_partitioned_card_is_its_devices() -> None:
    """Its holder has what the MIG devices have, not the card's total on top; without PID visibility, the card's."""
    whole = holder(HARD, PARENT, memory_mib=81920)
    on_leaves = [user(HARD, mig.uuid, used(1, None)) for mig in (SHARED_1, SHARED_2, ALONE)]
    assert PARENT not in {key[-1] for key in accelerator_rows(partitioned([whole, *on_leaves]), "memory_total_bytes")}
    assert accelerator_rows(partitioned([whole]), "memory_total_bytes") == {(*HARD, PARENT): 80 * GIB}


@given(nodes())
def test_no_container_has_more_than_is_used(truth: TestNode) -> None:
    """On generated nodes: used is what was measured of the container, and on no more rows than there are."""
    snapshot = truth.collect()
    measured = {(*row.name, row.uuid): row.use.memory_bytes for row in snapshot.containers if row.use is not None}
    assert accelerator_rows(snapshot, "memory_used_bytes") == {
        key: value for key, value in measured.items() if value is not None
    }
    assert all(0 <= value <= 100 for value in accelerator_rows(snapshot, "duty_cycle").values())


# --- gpu-mem-monitor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [Owner.HOST, Owner.UNKNOWN, Owner.MPS_SERVER])
def test_a_process_in_no_pod_is_there_without_a_name(owner: Owner) -> None:
    """Memory that no pod uses is seen, under the empty name."""
    snapshot = node("n", [card(0, TITAN[0], "TITAN V")], [], [process(7, TITAN[0], 700, owner=owner)])
    named = rows(GPU_MEM_MONITOR, snapshot, "pod_used_gpu_mem_MB", "app_pid", "pod_namespace", "pod_name")
    assert named == {("7", "", ""): 700}


@given(nodes())
def test_every_process_with_known_memory_is_present_once(truth: TestNode) -> None:
    """On generated nodes: as many rows as processes, nothing added and nothing lost."""
    snapshot = truth.collect()
    seen = snapshot.node.capabilities["pid_visibility"]
    assert rows(GPU_MEM_MONITOR, snapshot, "pod_used_gpu_mem_MB", "app_pid", "gpu_uuid") == {
        (str(process.pid), process.uuid): process.memory_bytes >> 20
        for process in snapshot.processes
        if seen and process.memory_bytes is not None
    }


# --- pod-gpu-map, with its page of the node, and the deprecated form --------------------------------------------------


def test_the_nodes_page_has_the_rows_of_the_map() -> None:
    """/metrics/nodes has the same rows as pod_and_gpu_map_info, under the node's own name."""
    snapshot = busy_node(gpus=4)
    text, labels = page((node_family("ti"),), snapshot), ("gpu_id", "gpu_model", "namespace", "node", "pod_name")
    assert text.startswith(
        "# HELP ti_info Provide every node's pod and gpu mapping relationship\n# TYPE ti_info gauge\n"
    )
    assert rows((node_family("ti"),), snapshot, "ti_info", *labels) == rows(
        POD_GPU_MAP, snapshot, "pod_and_gpu_map_info", *labels
    )


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ti2", "ti2_info"),
        ("gpu-node.example.com", "gpu_node_example_com_info"),
        ("10.0.0.7", "_10_0_0_7_info"),
        ("Knoten_ä:1", "Knoten___1_info"),
        ("", "_info"),
        ("٣", "__info"),
    ],
)
def test_the_nodes_name_becomes_a_valid_metric_name(name: str, family: str) -> None:
    """What is no letter or digit becomes _, and a leading digit gets one before it; the label keeps the name."""
    snapshot = with_node(busy_node(gpus=2), name=name)
    (read,) = text_string_to_metric_families(page((node_family(name),), snapshot))
    assert read.name == family
    assert {sample.labels["node"] for sample in read.samples} == {name}


def test_promtool_reports_nothing_on_the_nodes_page() -> None:
    """`promtool check metrics` has nothing against it either (docs/reference/dialects.md says so)."""
    assert lints(page((node_family("gpu-node.example.com"),), busy_node())) == []


@given(nodes())
def test_each_row_of_the_map_has_a_number(truth: TestNode) -> None:
    """The deprecated dialect has a family for each row of pod_and_gpu_map_info, numbered from 0 in their order."""
    snapshot, labels = truth.collect(), ("gpu_id", "namespace", "pod_name")
    families = list(text_string_to_metric_families(page(POD_GPU_MAP_DEPRECATED, snapshot)))
    assert [family.name for family in families] == [f"POD_GPU_MAP_INFO_{number}" for number in range(len(families))]
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) == len(families)
    assert {sample.value for sample in samples} <= {0}
    numbered = sorted(tuple(sample.labels[label] for label in labels) for sample in samples)
    assert numbered == sorted(rows(POD_GPU_MAP, snapshot, "pod_and_gpu_map_info", *labels))


# --- dcgm-join --------------------------------------------------------------------------------------------------------


def join_owners(snapshot: Snapshot) -> list[tuple[str, ...]]:
    return [
        tuple(sample.labels.get(label, "") for label in ("UUID", "GPU_I_ID", *CONTAINER))
        for family in text_string_to_metric_families(page(DCGM_JOIN, snapshot))
        for sample in family.samples
    ]


def test_a_claim_that_looks_on_owns_nothing() -> None:
    """Admin access is not a share of the GPU, whether NVML answers or not."""
    monitored = dcgm_nodes.node(dcgm_nodes.holder(TRAINER), dcgm_nodes.holder(P1, gpus=0.0))
    expected = [(CARD, "", "ml", "job-0", "trainer")]
    assert join_owners(monitored) == join_owners(dcgm_nodes.without_nvml(monitored)) == expected


def test_compute_instances_of_one_gpu_instance_have_their_holders_once() -> None:
    """Who holds both is one owner of the GPU instance; who holds one of them is another."""
    on = dcgm_nodes.card(partitioned=True)
    parts = dcgm_nodes.instance(2, 0, "1c.3g.40gb"), dcgm_nodes.instance(2, 1, "2c.3g.40gb")
    leaves = tuple(dcgm_nodes.leaf(on, instance=part) for part in parts)
    holders = [dcgm_nodes.holder(name, part.uuid) for name, part in ((P1, parts[0]), (P1, parts[1]), (P2, parts[1]))]
    snapshot = dcgm_nodes.node(*holders, gpus=(on,), leaves=leaves)
    assert join_owners(snapshot) == [(CARD, "2", "ml", "p1", "a"), (CARD, "2", "ml", "p2", "a")]
    assert page(DCGM_JOIN, snapshot).count('GPU_I_PROFILE="3g.40gb"') == 2


@settings(max_examples=examples(100))
@given(nodes())
def test_owners_are_the_holders(truth: TestNode) -> None:
    """Each holder of a device that NVML knows, and each user of a reserved one, has one row; no reservation has."""
    snapshot = truth.collect()
    owners = join_owners(snapshot)
    assert len(owners) == len(set(owners))
    held = {
        (device.gpu_uuid, *row.name)
        for device in snapshot.node.devices
        for row in device.containers
        if device.gpu_uuid and (row.holds or row.owner is Owner.SCHEDULED) and not row.reservation
    }
    assert {(uuid, *name) for uuid, _, *name in owners} == held
