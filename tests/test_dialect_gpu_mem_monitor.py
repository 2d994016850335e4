"""The dialect gpu-mem-monitor: each process's own memory, also where several share a card."""

import pytest
from hypothesis import given
from msgspec import structs

from gpumap.agent.dialects.gpu_mem_monitor import FAMILIES
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner
from tests.dialect_pages import (
    HARD,
    MIB,
    SHARED_1,
    SHARED_2,
    TITAN,
    Rows,
    card,
    node,
    partitioned,
    process,
    rows,
)
from tests.generated import nodes
from tests.nodes import TestNode

NAME = "pod_used_gpu_mem_MB"


def family_rows(snapshot: Snapshot, *labels: str) -> Rows:
    return rows(FAMILIES, snapshot, NAME, *(labels or ("app_pid", "pod_namespace", "pod_name")))


def test_mib_are_cut_off() -> None:
    """As nvidia-smi cuts them off: a byte less than two MiB is one."""
    one = structs.replace(process(7, TITAN[0], None, HARD), memory_bytes=2 * MIB - 1)
    assert list(family_rows(node("n", [card(0, TITAN[0], "TITAN V")], [], [one])).values()) == [1]


@pytest.mark.parametrize("owner", [Owner.HOST, Owner.UNKNOWN, Owner.MPS_SERVER])
def test_a_process_in_no_pod_is_there_without_a_name(owner: Owner) -> None:
    """Memory that no pod uses is seen, under the empty name."""
    snapshot = node("n", [card(0, TITAN[0], "TITAN V")], [], [process(7, TITAN[0], 700, owner=owner)])
    assert family_rows(snapshot) == {("7", "", ""): 700}


def test_memory_that_is_not_reported_is_absent() -> None:
    """Never 0 for unknown."""
    snapshot = node("n", [card(0, TITAN[0], "TITAN V")], [], [process(7, TITAN[0], None, HARD)])
    assert family_rows(snapshot) == {}


def test_compute_instances_have_their_own_processes() -> None:
    """A process on two of them is a row on each, with what it has there; no process is shown for its sibling."""
    both = [process(7, SHARED_1.uuid, 100, HARD), process(7, SHARED_2.uuid, 20, HARD), process(8, SHARED_2.uuid, 3)]
    assert family_rows(partitioned([], both), "app_pid", "gpu_uuid", "gpu_name") == {
        ("7", SHARED_1.uuid, "A100"): 100,
        ("7", SHARED_2.uuid, "A100"): 20,
        ("8", SHARED_2.uuid, "A100"): 3,
    }


@given(nodes())
def test_every_process_with_known_memory_is_present_once(truth: TestNode) -> None:
    """On generated nodes: as many rows as processes, nothing added and nothing lost."""
    snapshot = truth.collect()
    seen = snapshot.node.capabilities["pid_visibility"]
    assert family_rows(snapshot, "app_pid", "gpu_uuid") == {
        (str(one.pid), one.uuid): one.memory_bytes >> 20
        for one in snapshot.processes
        if seen and one.memory_bytes is not None
    }
