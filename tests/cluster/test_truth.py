"""What the live node's processes say of themselves becomes the truth of a window."""

from __future__ import annotations

from tests import laws
from tests.cluster import layout
from tests.cluster.device_plugin import Allocations
from tests.cluster.truth import RELEASE_SECONDS, Truth
from tests.node import MIB
from tests.truth import NEVER, Process, Span

NOW = 2000.0
CARD = layout.GPUSHARE_GPUS[18][0]


def test_a_window_has_what_was_assigned_and_what_runs() -> None:
    """The slots and the share are those of the allocation. A device that only the checkpoint names needs it."""
    truth = Truth(Allocations())
    pod = truth.pod("train.1", "ml", "train")
    name = pod.container("main")
    for resource, ids, leaf in (
        (layout.SHARED, [f"{layout.SHARED_GPU}::{slot}" for slot in (0, 1)], layout.SHARED_GPU),
        (layout.GPUSHARE, [f"any-_-{slot}" for slot in range(4)], CARD),
    ):
        truth.hold(pod, name, truth.allocations.add(resource, ids, [leaf]), NOW - 100)
    for one in truth.holdings.values():
        one.began = Span(NOW - 101, NOW - 100)
    truth.processes.append(Process(11, pod, name, {CARD: 90 * MIB}, Span(NOW - 50, NOW - 49)))
    window = truth.window(Span(NOW, NOW + 1), frozenset({"checkpoint"}))
    found = {family: fact for (family, labels), fact in laws.facts(window).items() if ("uuid", CARD) in labels}
    assert found[laws.USED].value == 90 * MIB
    assert laws.ALLOCATION not in found
    shares = [(one.gpus, one.slots) for leaf in (CARD, layout.SHARED_GPU) for one in window.holding(name, leaf)]
    assert shares == [(4 / 16, {layout.GPUSHARE: 4}), (2 / 4, {layout.SHARED: 2})]
    assert window.earlier == {(name, CARD), (name, layout.SHARED_GPU)}


def test_a_pod_has_ended_with_its_last_process() -> None:
    """When it was removed, or ended by itself, and nothing of it runs."""
    truth = Truth(Allocations())
    pod = truth.pod("train.1", "ml", "train")
    process = Process(11, pod, pod.container("main"), {layout.FREE_GPU: MIB}, Span(NOW - 9, NOW - 8))
    truth.processes.append(process)
    assert truth.ended(pod) == NEVER
    pod.deleted = NOW
    assert truth.ended(pod) == Span(NOW, NEVER.end)
    process.ended, pod.emptied = Span(NOW + 1, NOW + 2), NOW + 2
    assert truth.ended(pod) == Span(NOW, NOW + 2 + RELEASE_SECONDS)
    pod.deleted, pod.ends = NEVER.start, True
    assert truth.ended(pod).end == NOW + 2 + RELEASE_SECONDS
