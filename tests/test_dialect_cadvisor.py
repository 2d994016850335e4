"""The dialect cadvisor: a container's own memory and time, under the names that had the card's."""

from hypothesis import given

from gpumap.agent.dialects.small import CADVISOR as FAMILIES
from gpumap.model.snapshot import Snapshot
from tests.dialect_pages import (
    ALONE,
    GIB,
    HARD,
    PARENT,
    SHARED_1,
    SHARED_2,
    Rows,
    holder,
    partitioned,
    rows,
    used,
    user,
)
from tests.generated import nodes
from tests.nodes import TestNode

PREFIX = "container_accelerator_"
CONTAINER = ("namespace", "pod", "container")


def family_rows(snapshot: Snapshot, name: str, *labels: str) -> Rows:
    return rows(FAMILIES, snapshot, PREFIX + name, *(labels or (*CONTAINER, "acc_id")))


def test_a_whole_partitioned_card_is_its_devices() -> None:
    """Its holder has what the MIG devices have, not the card's total on top; without PID visibility, the card's."""
    whole = holder(HARD, PARENT, memory_mib=81920)
    on_leaves = [user(HARD, one.uuid, used(1, None)) for one in (SHARED_1, SHARED_2, ALONE)]
    assert PARENT not in {key[-1] for key in family_rows(partitioned([whole, *on_leaves]), "memory_total_bytes")}
    assert family_rows(partitioned([whole]), "memory_total_bytes") == {(*HARD, PARENT): 80 * GIB}


@given(nodes())
def test_no_container_has_more_than_is_used(truth: TestNode) -> None:
    """On generated nodes: used is what was measured of the container, and on no more rows than there are."""
    snapshot = truth.collect()
    measured = {(*row.name, row.uuid): row.use.memory_bytes for row in snapshot.containers if row.use is not None}
    assert family_rows(snapshot, "memory_used_bytes") == {
        key: value for key, value in measured.items() if value is not None
    }
    assert all(0 <= value <= 100 for value in family_rows(snapshot, "duty_cycle").values())
