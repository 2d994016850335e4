"""Several compute instances of one GPU instance: they share its memory, and nothing of a process counts twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests import standin
from tests.measured import MeasuredNode, measure
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid, owners
from tests.standin import Attributes, Code, Driver, MigInstance

FIRST, SECOND, ALONE = mig_uuid(0, 1, 0), mig_uuid(0, 1, 1), mig_uuid(0, 2, 0)
NOWHERE = 0xFFFFFFFF


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


# --- over the driver's own lists --------------------------------------------------------------------------------------


def part(uuid: Uuid, ci: int, rows: list[standin.Process] | None, gi: int = 1) -> MigInstance:
    attributes = Attributes(gpu_instance_slice_count=3, compute_instance_slice_count=1, memory_size_mib=40192)
    return MigInstance(
        uuid,
        gi=gi,
        ci=ci,
        memory_used_bytes=6 * GIB,
        memory_total_bytes=40 * GIB,
        attributes=attributes,
        processes=rows,
    )


@pytest.mark.parametrize("of_instance", ["their own", "of the whole GPU instance", "the parent's"])
async def test_processes_find_their_compute_instance(tmp_path: Path, of_instance: str) -> None:
    """Whether the driver lists a compute instance's processes, its GPU instance's, or the GPU's: by their ids each is
    on its own leaf, and a sibling's on the other."""
    rows = [standin.Process(10, GIB, gi=1, ci=0), standin.Process(11, 2 * GIB, gi=1, ci=1)]
    lists = {
        "their own": ([rows[0]], [rows[1]]),
        "of the whole GPU instance": (rows, rows),
        "the parent's": (None, None),
    }
    first, second = lists[of_instance]
    gpu = standin.Gpu(gpu_uuid(0), instances=[part(FIRST, 0, first), part(SECOND, 1, second)])
    gpu.processes = rows if of_instance == "the parent's" else []
    driver = Driver(gpus=[gpu])
    one, other = holder("one", FIRST), holder("other", SECOND)
    node = MeasuredNode([], [one, other], reading=await measure(driver, tmp_path))
    node.processes = [Process(10, FIRST, one), Process(11, SECOND, other)]
    snapshot = node.collect()
    assert adds_up(snapshot)
    assert (owners(snapshot, FIRST)["assigned"], owners(snapshot, FIRST)["sibling"]) == (GIB, 2 * GIB)
    assert (owners(snapshot, SECOND)["assigned"], owners(snapshot, SECOND)["sibling"]) == (2 * GIB, GIB)


@pytest.mark.parametrize("lists", ["no privilege", "no ids"])
async def test_processes_that_cannot_be_placed_accuse_no_pod(tmp_path: Path, lists: str) -> None:
    """The parent's rows without ids, or one row in the lists of two compute instances: all is unaccounted, no holder
    is idle, nobody is a squatter."""
    row = standin.Process(10, GIB, gi=NOWHERE, ci=NOWHERE)
    own = [row] if lists == "no ids" else None
    gpu = standin.Gpu(gpu_uuid(0), instances=[part(FIRST, 0, own), part(SECOND, 1, own)])
    gpu.processes = [row] if own is None else []
    driver = Driver(gpus=[gpu])
    if own is None:
        driver.fail = {("nvmlDeviceGetComputeRunningProcesses_v3", "0.mig"): Code.NO_PERMISSION}
    one, other = holder("one", FIRST), holder("other", SECOND)
    node = MeasuredNode([], [one, other], reading=await measure(driver, tmp_path))
    node.processes = [Process(10, FIRST, one)]
    for _ in range(2):
        snapshot = node.collect()
    assert adds_up(snapshot)
    assert owners(snapshot, FIRST) == owners(snapshot, SECOND) == {"unaccounted": 6 * GIB}
    assert [row.use for row in snapshot.containers] == [None, None]
