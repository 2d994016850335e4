"""The log says what changed of a GPU's health, once, and who was hit by an XID error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from gpumap.agent.changes import log_changes
from gpumap.agent.join import step
from gpumap.model.node import ContainerXids, Gpu
from gpumap.model.observations import Complaint, NvmlReading, Observations, Observed
from gpumap.model.readings import XidError
from gpumap.model.snapshot import Snapshot
from tests.nodes import RULES, Pod, Process, TestNode, gpu_uuid, mig_uuid
from tests.nodes import Gpu as MadeGpu
from tests.snapshots import empty_node, gpu, with_node

Logged = Callable[..., list[str]]


@pytest.fixture(name="logged")
def make_logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """The lines that come of a node with one GPU changing."""
    quiet = TestNode(down={"kubelet", "nvml", "procfs", "pod_identity"}).observe()

    def logged(before: Gpu, after: Gpu) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            node = empty_node()
            snapshots = [with_node(node, gpus=(one,)) for one in (before, after)]
            log_changes(logging.getLogger("test"), snapshots[0], snapshots[1], quiet)
        return caplog.messages

    return logged


def test_a_recovery_action_comes_and_goes(logged: Logged) -> None:
    """It is said when the driver begins to ask for it, for another one, and for nothing any more; never twice."""
    well = gpu(0)
    ill, worse = (
        structs.replace(well, recovery_action="gpu_reset"),
        structs.replace(well, recovery_action="node_reboot"),
    )
    where = f"uuid={well.uuid} index=0"
    assert logged(well, ill) == [f"gpu needs recovery {where} action=gpu_reset"]
    assert logged(ill, worse) == [f"gpu needs recovery {where} action=node_reboot"]
    assert logged(worse, worse) == []
    assert logged(ill, well) == [f"gpu needs no recovery {where}"]
    assert logged(structs.replace(well, recovery_action=None), well) == []


def with_xids(observations: Observations, *events: XidError) -> Observations:
    assert isinstance(observations.nvml, Observed)
    reading: NvmlReading = replace(observations.nvml.value, xids=events)
    return replace(observations, nvml=replace(observations.nvml, value=reading))


def test_xid_errors_are_logged_with_their_containers(caplog: pytest.LogCaptureFixture) -> None:
    """Each code of a collection is a line; a container that was hit earlier is not named again."""
    leaf = mig_uuid(0, 1, 0)
    pod = Pod("ml", "job", {"main": {"nvidia.com/mig-1g.10gb": [str(leaf)]}})
    node = TestNode([MadeGpu(0, mig=[(1, 0, 1)])], [pod], [Process(10, leaf, pod)])
    snapshot = node.collect()
    hit = ContainerXids(*pod.full(), leaf, 31, 1)
    after = with_node(snapshot, container_xids=(hit, structs.replace(hit, code=79)))
    before = with_node(snapshot, container_xids=(hit,))
    event = XidError(gpu_uuid(0), 31, None, None, 0.5)
    observations = with_xids(node.observe(), event, event, event._replace(code=79))

    def lines(earlier: Snapshot, later: Snapshot) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            log_changes(logging.getLogger("test"), earlier, later, observations)
        return caplog.messages

    assert lines(before, after) == [
        f"xid gpu={gpu_uuid(0)} code=31 errors=2 containers=''",
        f"xid gpu={gpu_uuid(0)} code=79 errors=1 containers='ml/job/main'",
    ]
    assert lines(snapshot, before)[0] == f"xid gpu={gpu_uuid(0)} code=31 errors=2 containers='ml/job/main'"


def test_each_reason_of_a_source_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A source may complain of several things in one collection. Each new one is a line, and none is logged again."""
    node = TestNode()

    def lines(*reasons: str) -> list[str]:
        complaints = tuple(Complaint(reason, f"of {reason}") for reason in reasons)
        observations = node.observe()
        assert isinstance(observations.nvml, Observed)
        observations = replace(observations, nvml=replace(observations.nvml, complaints=complaints))
        before, (node.memory, snapshot) = snapshots[-1], step(node.memory, observations, RULES)
        snapshots.append(snapshot)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            log_changes(logging.getLogger("test"), before, snapshot, observations)
        return [line for line in caplog.messages if "source=nvml" in line]

    def line(reason: str) -> str:
        return f"source complains source=nvml reason={reason} detail='of {reason}'"

    snapshots = [node.collect()]
    assert lines() == []
    assert lines("lost", "hung") == [line("hung"), line("lost")]
    assert lines("lost", "hung") == []
    assert lines("lost", "lost", "unknown", "hung") == [line("unknown")]
    assert lines("hung") == []
    assert lines("lost", "hung") == [line("lost")], "it is back"
