"""No container that works is idle, and one that does not is: against the truth of a node whose jobs are known."""

from __future__ import annotations

import math
import random

import pytest

from gpumap.model.findings import DEFAULTS, findings
from gpumap.model.readings import Uuid
from tests.examples import examples
from tests.nodes import GIB, Gpu, Pod, gpu_uuid, mig_uuid
from tests.working import IDLE_SECONDS, Job, WorkingNode

CARD, OTHER = gpu_uuid(0), gpu_uuid(1)
SLICE = mig_uuid(0, 1, 0)


def holder(name: str, *leaves: Uuid) -> Pod:
    return Pod("ml", name, {"main": {"nvidia.com/gpu": [str(leaf) for leaf in leaves]}})


def repeated(pod: Pod, leaf: Uuid, length: float, every: float, sm: int = 30, start: float = 1001.3) -> list[Job]:
    """Return two hours of equal jobs."""
    return [
        Job(100 + number, pod, leaf, start + number * every, start + number * every + length, sm)
        for number in range(int(7200 / every))
    ]


@pytest.mark.parametrize(("length", "every"), [(3.0, 20.0), (2.0, 20.3), (0.5, 7.3), (3.0, 60.0)])
@pytest.mark.parametrize("mig", [False, True])
def test_short_jobs_are_work(length: float, every: float, *, mig: bool) -> None:
    """A pod that works in jobs shorter than the interval is never idle in an hour, and is charged for most of them."""
    leaf = SLICE if mig else CARD
    pod = holder("short", leaf)
    node = WorkingNode(
        [Gpu(0, mig=[(1, 0, 3)] if mig else None)],
        [pod],
        repeated(pod, leaf, length, every, 50 if mig else 30),
        with_gpm=frozenset((0,) if mig else ()),
    )
    for _ in node.run(3600.0):
        assert not node.idle()
    account = next(one for one in node.snapshot.accounts if one.uuid == leaf)
    print(mig, length, every, node.collections, account.sm_seconds, node.worked_seconds("short", leaf))
