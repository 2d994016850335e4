"""The last hour in bounded memory: buckets, gaps, what is dropped first, and its JSON."""

from __future__ import annotations

from gpumap.agent.web.history import BUCKET_SECONDS, BUCKETS, History
from gpumap.model.node import ContainerOnDevice, Device, Gpu, Node, Use
from gpumap.model.observations import Moment
from gpumap.model.readings import DeviceMemory, GpuReading, Uuid
from gpumap.model.snapshot import Snapshot
from tests.snapshots import gpu, instances, leaf, with_node

UUID = Uuid("GPU-1")
GIB = 1 << 30
START = 600_000.0
"""The beginning of a bucket."""


def snapshot(at: float, used: int | None = GIB, sm: float | None = 0.5, pods: tuple[str, ...] = ("pod",)) -> Snapshot:
    """One GPU of 80 GiB and some containers on it, all of which use the same."""
    memory = None if used is None else DeviceMemory(80 * GIB, used, 80 * GIB - used)
    card = Gpu(UUID, 0, 0, "", "", False, None, 0.0, None, GpuReading(0, memory=memory, utilization_ratio=sm))
    use = Use(used, used, 1, sm, None, None, None)
    return Snapshot(
        at=Moment(at, 1e9 + at),
        node=Node(timestamp=1e9 + at, name="node", gpus=(card,), devices=(Device(UUID, UUID, memory=memory),)),
        containers=tuple(ContainerOnDevice("team", pod, "main", UUID, use=use) for pod in pods),
    )


def series(history: History, pod: str | None = "pod") -> tuple[list[int | None], list[int | None]]:
    """Memory and SM of a container, or of the device."""
    (found,) = (one for one in history.document().series if one.pod == pod)
    return found.memory_mib, found.sm_permille


def test_a_bucket_is_the_greatest_memory_and_the_mean_sm() -> None:
    """Within half a minute memory is its maximum, so that no peak is lost, and SM its mean; the same for both kinds."""
    history = History()
    for at, (used, sm) in enumerate([(GIB, 0.2), (3 * GIB, 0.4), (2 * GIB, 0.9)]):
        history.add(snapshot(START + 5 * at, used, sm))
    for kind in ("pod", None):
        assert series(history, kind) == ([3072], [500])
    history.add(snapshot(START + BUCKET_SECONDS, 0, 0.0))
    assert series(history) == ([3072, 0], [500, 0])


def test_what_was_not_known_is_a_gap() -> None:
    """A value that is not reported, and a time without a snapshot, leave null; the other value is still there."""
    history = History()
    history.add(snapshot(START, GIB, None))
    history.add(snapshot(START + BUCKET_SECONDS, None, 0.25))
    history.add(snapshot(START + 4 * BUCKET_SECONDS, GIB, 0.25))
    assert series(history) == ([1024, None, None, None, 1024], [250, None, None, 250])


def test_after_an_hour_it_is_forgotten() -> None:
    """The ring holds an hour: the oldest value falls out; who has been gone for an hour is no series any more."""
    history = History()
    for at in range(BUCKETS + 5):
        history.add(
            snapshot(START + at * BUCKET_SECONDS, (at + 1) << 20, pods=("pod", "early") if at < 3 else ("pod",))
        )
    memory, _ = series(history)
    assert memory == list(range(6, BUCKETS + 6))
    assert [one.pod for one in history.document().series if one.pod] == ["pod"]
    history.add(snapshot(START + 10_000 * BUCKET_SECONDS, 1 << 20))
    assert series(history)[0] == [1], "a sleep of days is all gap"


def test_memory_is_bounded() -> None:
    """Whatever comes and goes: the longest gone makes room, the living stay, and one too many has no curve."""
    history = History(max_series=8)
    for at in range(40):
        history.add(snapshot(START + at * BUCKET_SECONDS, pods=("living", f"pod-{at}")))
        found = history.document().series
        assert len(found) <= 8
        assert {None, "living", f"pod-{at}"} <= {one.pod for one in found}
    history = History(max_series=4)
    for at in range(3):
        history.add(snapshot(START + at, pods=tuple("abcdef")))
    assert [one.pod for one in history.document().series] == [None, "a", "b", "c"]


def test_mig_devices_have_no_utilisation_of_their_gpu() -> None:
    """A MIG device's curve is only of memory: its GPU's utilisation is not its own."""
    history = History()
    card = gpu(0, partitioned=True)
    mig = instances(card)[0]
    history.add(with_node(snapshot(START, pods=()), gpus=(card,), devices=(leaf(card, mig.uuid, mig),)))
    assert series(history, None) == ([40 << 10], [])
