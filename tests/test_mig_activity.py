"""The SM activity of MIG devices and of GPUs: which container has it, how long a holder rests, and what is charged."""

from __future__ import annotations

import pytest

from gpumap.model.node import ContainerAccount, Watch
from gpumap.model.snapshot import Snapshot
from tests.nodes import GIB, WHOLE, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid

LEAF = mig_uuid(0, 1, 0)
ALONE = (1, 0)


def mig_pod(name: str = "a", *ids: str) -> Pod:
    return Pod("ml", name, {"main": {"nvidia.com/mig-3g.40gb": list(ids or (LEAF,))}})


def mig_node(*pods: Pod, activity: float | None = 0.5) -> TestNode:
    """A Hopper GPU, read once. These pods hold its MIG device of three slices."""
    activities = {} if activity is None else {ALONE: activity}
    return TestNode([Gpu(0, mig=[(1, 0, 3), (2, 0, 4)], millijoules=0, activities=activities)], list(pods))


def watched(snapshot: Snapshot, pod: Pod) -> Watch:
    holder = pod.row(snapshot, LEAF)
    assert holder.watch is not None
    return holder.watch


def activity(snapshot: Snapshot, pod: Pod, container: str = "main") -> float | None:
    return pod.use(snapshot, LEAF, container).sm_activity_ratio


def charged(snapshot: Snapshot, pod: Pod) -> ContainerAccount:
    return next(one for one in snapshot.node.accounts if (one.name, one.uuid) == (pod.full(), LEAF))


# --- which container has it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["holder", "squatter", "other container", "host", "gone", "hidden"])
def test_of_two_users_it_is_no_ones(who: str) -> None:
    """Whoever else has a process there, known or not: neither is credited with what both did."""
    pod, other = mig_pod("a", f"{LEAF}::0"), mig_pod("b", f"{LEAF}::1") if who == "holder" else Pod("ml", "b")
    pod.ids["side"] = {}
    node = mig_node(pod, other)
    node.processes = [Process(100, LEAF, pod), Process(101, LEAF, other)]
    if who == "other container":
        node.processes[1] = Process(101, LEAF, pod, "side")
    elif who == "host":
        node.processes[1] = Process(101, LEAF, None)
    elif who == "gone":
        node.pods = [pod]
    elif who == "hidden":
        node.processes[1].readable = False
    for _ in range(3):
        snapshot = node.collect()
    assert [row.use and row.use.sm_activity_ratio for row in snapshot.containers] == [None] * len(snapshot.containers)


@pytest.mark.parametrize("who", ["unlisted", "nameless"])
def test_the_activity_of_an_uncertain_user_makes_no_holder_idle(who: str) -> None:
    """A process of a pod that is not listed any longer, and one without a container: the activity may be a holder's."""
    holder, other = mig_pod("a", f"{LEAF}::0"), mig_pod("b", f"{LEAF}::1")
    node = mig_node(holder, other)
    node.processes = [Process(101, LEAF, other)]
    node.collect()
    if who == "unlisted":
        other.listed = other.in_checkpoint = False
    else:
        other.has_links, other.ids["side"] = False, {}
    node.collect()
    assert activity(node.collect(), holder) is None


def test_a_holder_without_a_process_rests() -> None:
    """Its zero is there while the device rests too: what computes without a process that anybody saw may be its own."""
    pod = mig_pod()
    node = mig_node(pod, activity=0.0)
    node.collect()
    assert activity(node.collect(), pod) == 0.0
    node.gpus[0].activities[ALONE] = 0.25
    assert activity(node.collect(), pod) is None


# --- rest -------------------------------------------------------------------------------------------------------------


def test_a_mig_pod_that_rests_is_an_idle_holder() -> None:
    """With a process and memory, and activity 0 for as long as `waste` waits; the time counts from its last work."""
    pod = mig_pod()
    node = mig_node(pod, activity=0.5)
    node.processes = [Process(100, LEAF, pod, memory=GIB)]
    node.collect()
    last = node.collect().at.wall
    node.gpus[0].activities[ALONE] = 0.0
    for _ in range(59):
        snapshot = node.collect()
    assert watched(snapshot, pod).last_active == last
    assert [one.finding for one in snapshot.node.findings or ()] == ["unused"]
    found = node.collect(5.0).node.findings or ()
    assert [(one.finding, one.why, one.since) for one in found] == [("idle", "no activity seen for 5m", last)]
    node.gpus[0].activities[ALONE] = 0.0009  # an idle CUDA context does not read exactly 0
    assert "idle" in [one.finding for one in node.collect().node.findings or ()]
    node.gpus[0].activities[ALONE] = 0.01
    assert "idle" not in [one.finding for one in node.collect().node.findings or ()]


# --- what is charged --------------------------------------------------------------------------------------------------


def test_the_activity_of_a_mig_device_counts_as_its_share_of_the_gpu() -> None:
    """Half of three of seven slices for five seconds. It is no SM time, and no energy, which only GPUs report."""
    pod = mig_pod()
    node = mig_node(pod)
    node.processes = [Process(100, LEAF, pod)]
    node.collect()
    assert charged(node.collect(), pod).sm_activity_seconds == 0.0
    snapshot = node.collect()
    account = charged(snapshot, pod)
    assert account.sm_activity_seconds == pytest.approx(5.0 * 0.5 * 3 / 7)
    assert account.allocated_gpu_seconds == pytest.approx(10.0 * 3 / 7)
    assert (account.sm_seconds, account.energy_joules) == (None, None)


def test_where_several_hold_a_mig_device_no_time_is_charged() -> None:
    """Their activity is known only while one of them computes, so no time of it is counted."""
    pod, other = mig_pod("a", f"{LEAF}::0"), mig_pod("b", f"{LEAF}::1")
    node = mig_node(pod, other)
    node.processes = [Process(100, LEAF, pod)]
    for _ in range(3):
        snapshot = node.collect()
    assert (activity(snapshot, pod), activity(snapshot, other)) == (0.5, 0.0)
    assert (charged(snapshot, pod).sm_activity_seconds, charged(snapshot, other).sm_activity_seconds) == (None, None)


def test_without_the_share_of_the_device_no_time_is_charged() -> None:
    """The driver may keep the number of slices back."""
    pod = mig_pod()
    node = mig_node(pod)
    node.gpus[0].mig = [(1, 0, 0)]
    node.processes = [Process(100, LEAF, pod)]
    for _ in range(3):
        snapshot = node.collect()
    assert activity(snapshot, pod) == 0.5
    assert charged(snapshot, pod).sm_activity_seconds is None


def test_the_activity_of_a_gpu_counts_once_beside_its_sm_time() -> None:
    """A whole GPU has both: rules and the bill take its SM time."""
    pod = Pod("ml", "a", {"main": {"nvidia.com/gpu": [str(gpu_uuid(0))]}})
    node = TestNode([Gpu(0, activities={WHOLE: 0.25})], [pod])
    node.processes = [Process(100, gpu_uuid(0), pod, sm=0.5)]
    for _ in range(3):
        snapshot = node.collect()
    found = pod.use(snapshot, gpu_uuid(0))
    assert (found.sm_ratio, found.sm_activity_ratio, found.busy_ratio) == (0.5, 0.25, 0.5)
    (account,) = snapshot.node.accounts
    assert (account.sm_seconds, account.sm_activity_seconds) == (10.0 * 0.5, 5.0 * 0.25)
    node.processes = []
    node.collect()
    assert [row.use and row.use.sm_activity_ratio for row in node.collect().containers] == [None]
