"""The dialect dcgm-join: one row per container and GPU or GPU instance, under the keys of dcgm-exporter."""

from hypothesis import given, settings
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumap.agent.dialects.small import DCGM_JOIN as FAMILIES
from gpumap.agent.exposition import Exposition
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner
from tests.dcgm_nodes import (
    CARD,
    P1,
    P2,
    TRAINER,
    card,
    holder,
    instance,
    leaf,
    node,
    without_nvml,
)
from tests.examples import examples
from tests.generated import nodes
from tests.nodes import TestNode

KEY = ("UUID", "GPU_I_ID", "namespace", "pod", "container")


def page(snapshot: Snapshot, *, openmetrics: bool = False) -> str:
    return Exposition(FAMILIES, openmetrics=openmetrics).render(snapshot).decode()


def owners(snapshot: Snapshot) -> list[tuple[str, ...]]:
    return [
        tuple(sample.labels.get(label, "") for label in KEY)
        for family in parse_text(page(snapshot))
        for sample in family.samples
    ]


def test_a_claim_that_looks_on_owns_nothing() -> None:
    """Admin access is no share of the card, whether NVML answers or not."""
    monitored = node(holder(TRAINER), holder(P1, gpus=0.0))
    assert owners(monitored) == owners(without_nvml(monitored)) == [(CARD, "", "ml", "job-0", "trainer")]


def test_compute_instances_of_one_gpu_instance_have_their_holders_once() -> None:
    """Who holds both is one owner of the GPU instance; who holds one of them is another."""
    on = card(partitioned=True)
    parts = instance(2, 0, "1c.3g.40gb"), instance(2, 1, "2c.3g.40gb")
    leaves = tuple(leaf(on, instance=one) for one in parts)
    rows = holder(P1, parts[0].uuid), holder(P1, parts[1].uuid), holder(P2, parts[1].uuid)
    snapshot = node(*rows, gpus=(on,), leaves=leaves)
    assert owners(snapshot) == [(CARD, "2", "ml", "p1", "a"), (CARD, "2", "ml", "p2", "a")]
    assert page(snapshot).count('GPU_I_PROFILE="3g.40gb"') == 2


@settings(max_examples=examples(100))
@given(nodes())
def test_owners_are_the_holders(truth: TestNode) -> None:
    """No row is there twice."""
    snapshot = truth.collect()
    found = owners(snapshot)
    assert len(found) == len(set(found))
    held = {
        (device.gpu_uuid, *row.name)
        for device in snapshot.node.devices
        for row in device.containers
        if device.gpu_uuid and (row.holds or row.owner is Owner.SCHEDULED) and not row.reservation
    }
    assert {(uuid, *name) for uuid, _, *name in found} == held
