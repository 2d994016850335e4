"""The dialect gpu-manager: what a container uses of each card and in all, and what it was given."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from msgspec import structs

from gpumap.agent.dialects.gpu_manager import FAMILIES
from gpumap.model.node import UnmatchedSlots
from gpumap.model.snapshot import Snapshot
from tests.dialect_pages import (
    ALONE,
    HARD,
    MIB,
    PARENT,
    SHARED_1,
    SHARED_2,
    TITAN,
    Rows,
    blind,
    holder,
    page,
    partitioned,
    rows,
    used,
    user,
    without_nvml,
)
from tests.dialect_samples import T4, tke
from tests.generated import nodes
from tests.nodes import TestNode
from tests.snapshots import with_node

MEMORY, UTILIZATION = "container_gpu_memory_total", "container_gpu_utilization"
ASKED_MEMORY, ASKED_CARDS = "container_request_gpu_memory", "container_request_gpu_utilization"
CARD_OF = {MEMORY: "gpu_memory", UTILIZATION: "gpu", ASKED_MEMORY: "req_of_gpu_memory", ASKED_CARDS: "req_of_gpu"}


def family_rows(snapshot: Snapshot, name: str) -> Rows:
    """By pod and card."""
    return rows(FAMILIES, snapshot, name, "pod_name", CARD_OF[name])


def test_what_is_not_known_is_absent() -> None:
    """Without PID visibility and without NVML only the request remains; time-slicing grants no memory."""
    assert family_rows(blind(), MEMORY) == family_rows(blind(), UTILIZATION) == {}
    assert family_rows(blind(), ASKED_MEMORY) == {(HARD[1], "total"): 12066}
    assert page(FAMILIES, without_nvml()).count("\n") == 3
    assert family_rows(without_nvml(), ASKED_CARDS) == {(HARD[1], "total"): 1}
    part = holder(HARD, T4[0], used(None, None), gpus=0.25, memory_mib=None)
    assert page(FAMILIES, replace(tke(), containers=(part,))).count("\n") == 3


def test_total_is_absent_where_a_part_is_not_known() -> None:
    """A card without values, or slots on a card that NVML does not list, leave only the other card's number."""
    known, unknown = holder(HARD, T4[0], used(10, 0.1)), holder(HARD, T4[1], used(None, None), gpus=None)
    snapshot = replace(tke(), containers=(known, unknown))
    assert family_rows(snapshot, MEMORY) == {(HARD[1], "gpu0"): 10}
    assert family_rows(snapshot, UTILIZATION) == {(HARD[1], "gpu0"): 10}
    assert family_rows(snapshot, ASKED_CARDS) == {}
    nameless = replace(tke(), containers=(known, holder(HARD, TITAN[0], used(5, 0.5))))
    assert family_rows(nameless, MEMORY) == {(HARD[1], "gpu0"): 10}
    unmatched = UnmatchedSlots(*HARD, "nvidia.com/gpu", "device_down", 1)
    elsewhere = replace(with_node(tke(), unmatched=(unmatched,)), containers=(known,))
    assert family_rows(elsewhere, MEMORY) == {(HARD[1], "gpu0"): 10}
    assert family_rows(elsewhere, ASKED_CARDS) == family_rows(elsewhere, ASKED_MEMORY) == {}
    unmatched = structs.replace(unmatched, reason="untrusted_id")
    untrusted = replace(with_node(tke(), unmatched=(unmatched,)), containers=(known,))
    assert family_rows(untrusted, MEMORY) == {(HARD[1], "gpu0"): 10, (HARD[1], "total"): 10}


def test_mig_devices_of_a_card_are_added_up() -> None:
    """A row a card: memory of its devices; no time, which MIG does not report; shared memory was granted once."""
    held = [
        holder(HARD, one.uuid, used(number, None), gpus=1 / 7, memory_mib=9728)
        for number, one in enumerate((SHARED_1, SHARED_2, ALONE), 1)
    ]
    snapshot = partitioned(held)
    assert family_rows(snapshot, MEMORY) == {(HARD[1], "gpu0"): 6, (HARD[1], "total"): 6}
    assert family_rows(snapshot, UTILIZATION) == {}
    assert family_rows(snapshot, ASKED_MEMORY) == {(HARD[1], "total"): 2 * 9728}
    assert family_rows(snapshot, ASKED_CARDS) == {(HARD[1], "total"): pytest.approx(3 / 7)}


def test_a_whole_partitioned_card_is_all_of_its_devices() -> None:
    """Its holder's card is known when each of its MIG devices is; what it asked for is the card."""
    whole = holder(HARD, PARENT, memory_mib=81920)
    on_leaves = [user(HARD, one.uuid, used(1, None)) for one in (SHARED_1, SHARED_2, ALONE)]
    assert family_rows(partitioned([whole, *on_leaves]), MEMORY) == {(HARD[1], "gpu0"): 3, (HARD[1], "total"): 3}
    assert family_rows(partitioned([whole, *on_leaves[1:]]), MEMORY) == {}
    assert family_rows(partitioned([whole]), ASKED_MEMORY) == {(HARD[1], "total"): 81920}
    assert family_rows(partitioned([whole]), ASKED_CARDS) == {(HARD[1], "total"): 1}


@given(nodes())
def test_cards_add_up_to_what_was_measured(truth: TestNode) -> None:
    """On generated nodes: a total is the sum of its cards, and no card has more than its devices' rows."""
    snapshot = truth.collect()
    labels = ("namespace", "pod_name", "container_name")
    numbers = rows(FAMILIES, snapshot, MEMORY, *labels, "gpu_memory")
    for key, value in numbers.items():
        if key[-1] == "total":
            assert value == sum(one for other, one in numbers.items() if other[:3] == key[:3] and other != key)
            measured = [row.use.memory_bytes or 0 for row in snapshot.containers if row.name == key[:3] and row.use]
            assert value <= sum(measured) / MIB
    percents = rows(FAMILIES, snapshot, UTILIZATION, *labels, "gpu")
    for key, value in percents.items():
        if key[-1] == "total":
            parts = [one for other, one in percents.items() if other[:3] == key[:3] and other != key]
            assert math.isclose(value, sum(parts), abs_tol=1e-6)
