"""Several compute instances of one GPU instance: they share its memory, and nothing of a process counts twice."""

from __future__ import annotations

import pytest

from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, mig_uuid, owners

FIRST, SECOND, ALONE = mig_uuid(0, 1, 0), mig_uuid(0, 1, 1), mig_uuid(0, 2, 0)


def holder(name: str, *leaves: Uuid) -> Pod:
    return Pod("ml", name, {"main": {"nvidia.com/mig-1c.3g.40gb": [str(leaf) for leaf in leaves]}})


def adds_up(snapshot: Snapshot) -> bool:
    """L1, on each leaf."""
    return all(
        leaf.memory is not None and sum(use.memory_bytes or 0 for use in leaf.owners) == leaf.memory.used_bytes
        for leaf in snapshot.node.devices
    )


def test_a_process_on_two_compute_instances_is_a_part_on_each() -> None:
    """Each row is its own instance's (the kernel sums memory by the instance that it was opened on), and a sibling's
    on the other; the container's series add up to the process."""
    both = holder("both", FIRST, SECOND)
    node = TestNode([Gpu(0, mig=[(1, 0, 1), (1, 1, 2), (2, 0, 1)])], [both])
    node.processes = [Process(10, FIRST, both, memory=GIB), Process(10, SECOND, both, memory=2 * GIB)]
    snapshot = node.collect()
    assert adds_up(snapshot)
    assert (owners(snapshot, FIRST)["assigned"], owners(snapshot, FIRST)["sibling"]) == (GIB, 2 * GIB)
    assert (owners(snapshot, SECOND)["assigned"], owners(snapshot, SECOND)["sibling"]) == (2 * GIB, GIB)
    assert "sibling" not in owners(snapshot, ALONE)
    assert sum(row.use.memory_bytes or 0 for row in snapshot.containers if row.use) == 3 * GIB
    assert sum(row.allocated_gpus or 0 for row in snapshot.containers) == pytest.approx(3 / 7)
