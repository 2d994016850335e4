"""The dialect gpu-mem-monitor: each process's own memory, also where several share a card."""

import pytest
from hypothesis import given

from gpumap.agent.dialects.small import GPU_MEM_MONITOR as FAMILIES
from gpumap.model.names import Owner
from gpumap.model.snapshot import Snapshot
from tests.dialect_pages import TITAN, Rows, card, node, process, rows
from tests.generated import nodes
from tests.nodes import TestNode

NAME = "pod_used_gpu_mem_MB"


def family_rows(snapshot: Snapshot, *labels: str) -> Rows:
    return rows(FAMILIES, snapshot, NAME, *(labels or ("app_pid", "pod_namespace", "pod_name")))


@pytest.mark.parametrize("owner", [Owner.HOST, Owner.UNKNOWN, Owner.MPS_SERVER])
def test_a_process_in_no_pod_is_there_without_a_name(owner: Owner) -> None:
    """Memory that no pod uses is seen, under the empty name."""
    snapshot = node("n", [card(0, TITAN[0], "TITAN V")], [], [process(7, TITAN[0], 700, owner=owner)])
    assert family_rows(snapshot) == {("7", "", ""): 700}


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
