"""MIG devices that the container runtime keeps from us: what counts as hidden, and what a restart would not help."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumap.agent.join.needs_restart import COLLECTIONS, HiddenMemory, VisibleMigDevices, find_hidden
from gpumap.agent.join.settings import RESTART_AFTER_SECONDS
from gpumap.model.observations import Moment
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests.nodes import Gpu, Pod, TestNode, gpu_uuid, mig_uuid

CARD = Uuid("GPU-0")
A, B, C = (Uuid(f"MIG-{letter}") for letter in "abc")
INTERVAL = 10.0


class Situation(NamedTuple):
    """What NVML and the kubelet report in one collection. `named` is `None` while no plugin offers anything."""

    readable: str = ""
    denied: str = ""
    named: str | None = ""
    partitioned: bool = True

    @property
    def visible(self) -> VisibleMigDevices:
        readable, denied = _uuids(self.readable), _uuids(self.denied)
        layout = readable | denied | ({CARD} if self.partitioned else set())
        return VisibleMigDevices(
            readable, denied, None if self.named is None else _uuids(self.named), frozenset(layout)
        )


def _uuids(letters: str) -> frozenset[Uuid]:
    return frozenset(Uuid(f"MIG-{letter}") for letter in letters)


def hidden_after(*situations: Situation | None, interval: float = INTERVAL) -> list[str]:
    """What is hidden at each collection; `None` is one that is not complete."""
    memory, found = HiddenMemory(), []
    for number, one in enumerate(situations):
        at = Moment(number * interval, 1e9 + number * interval)
        memory, hidden = find_hidden(memory, one.visible if one else None, at, RESTART_AFTER_SECONDS)
        found.append("".join(device.uuid.removeprefix("MIG-") for device in hidden))
    return found


@pytest.mark.parametrize(
    "later",
    [Situation("a", named="ab"), Situation("a", "b", named="ab")],
    ids=["not listed by NVML", "listed and denied"],
)
def test_a_device_that_came_after_our_start_is_hidden_by_and_by(later: Situation) -> None:
    """It must stay so for 30 s and three collections; then it is found, from then on."""
    assert hidden_after(Situation("a", named="a"), later, later, later, later, later) == ["", "", "", "", "b", "b"]
    assert hidden_after(Situation("a", named="a"), *[later] * 4, interval=30.0) == ["", "", "", "b", "b"]


@pytest.mark.parametrize("named", ["a", None])
def test_a_device_that_no_plugin_names_is_hidden_after_ten_minutes(named: str | None) -> None:
    """One that is made on demand may be gone by then; and restarts so far apart cost no back-off of the kubelet's."""
    found = hidden_after(Situation("a", named="a"), *[Situation("a", "b", named=named)] * 62)
    assert [number for number, one in enumerate(found) if one] == [61, 62]


@pytest.mark.parametrize(
    ("why", "situations"),
    [
        ("missing at our start", [Situation("a", named="ab")] * 9),
        ("denied at our start", [Situation("a", "b", named="a")] * 9),
        ("seen, and gone with its partition", [Situation("ab", named="ab"), *[Situation("c", named="abc")] * 9]),
        ("seen, and denied later", [Situation("ab", named="ab"), *[Situation("a", "b", named="ab")] * 9]),
        ("seen in between", [Situation("a", named="a"), Situation("a", named="ab"), Situation("ab", named="ab")]),
        ("nothing is offered yet", [Situation("a", named="a"), *[Situation("a", named=None)] * 9]),
        (
            "its plugin started beside us",
            [Situation("a", named=None), Situation("a", named=None), *[Situation("a", named="ab")] * 9],
        ),
        ("nothing but whole GPUs", [Situation(partitioned=False)] * 9),
    ],
)
def test_what_a_restart_would_not_help_is_not_hidden(why: str, situations: list[Situation]) -> None:
    """A device that our next start would miss as well, or that NVML has shown us, is no reason to end."""
    assert set(hidden_after(*situations)) == {""}, why


def test_collections_that_are_not_complete_prove_nothing() -> None:
    """While NVML or the kubelet is down, no device counts as hidden. The wait goes on after it, without its time."""
    start, missing = Situation("a", named="a"), Situation("a", named="ab")
    found = hidden_after(None, start, missing, missing, None, None, None, missing, missing, missing)
    assert found == [*[""] * 9, "b"]
    assert set(hidden_after(None, *[missing] * 5)) == {""}, "the first complete one is the start"


letters = st.sets(st.sampled_from("abcd")).map(lambda found: "".join(sorted(found)))


@st.composite
def anything(draw: st.DrawFn) -> Situation | None:
    readable, denied = draw(letters), draw(letters)
    denied = "".join(set(denied) - set(readable))
    return draw(
        st.none() | st.builds(Situation, st.just(readable), st.just(denied), st.none() | letters, st.booleans())
    )


@given(st.lists(anything(), max_size=12), st.sampled_from([1.0, 15.0, 60.0]))
def test_one_restart_never_leads_to_the_next(situations: list[Situation | None], interval: float) -> None:
    """Whatever was seen before: an agent that ended for it, and sees the same again, does not end."""
    found = hidden_after(*situations, interval=interval)
    for number, hidden in enumerate(found):
        one = situations[number]
        if not hidden or one is None:
            assert not hidden
            continue
        complete = sum(1 for earlier, later in itertools.pairwise(situations[: number + 1]) if earlier and later)
        assert complete * interval >= RESTART_AFTER_SECONDS
        assert number >= COLLECTIONS
        seen = "".join(earlier.readable for earlier in situations[: number + 1] if earlier)
        assert not set(hidden) & set(seen)
        assert set(hidden_after(*[one] * 12, interval=interval)) == {""}


def hidden(snapshot: Snapshot) -> list[Uuid]:
    return [device.uuid for device in snapshot.hidden]


def a_node(*, offered: list[str]) -> TestNode:
    """A card with one MIG device, held by a pod."""
    pod = Pod("ml", "first", {"main": {"nvidia.com/mig-1g.10gb": [mig_uuid(0, 1, 0)]}})
    return TestNode([Gpu(0, mig=[(1, 0, 1)])], [pod], allocatable={"nvidia.com/mig-1g.10gb": offered})


@pytest.mark.parametrize("replica", ["", "::3"])
def test_the_step_finds_a_device_that_the_kubelet_gives_away_and_nvml_does_not_list(replica: str) -> None:
    """A pod that holds it is enough; that of a resource which is no GPU's is not."""
    mine, new = mig_uuid(0, 1, 0), mig_uuid(0, 2, 0)
    node = a_node(offered=[mine])
    node.collect()
    node.pods.append(Pod("ml", "other", {"main": {"example.com/mig": [mig_uuid(0, 3, 0)]}}))
    node.pods.append(Pod("ml", "second", {"main": {"nvidia.com/mig-1g.10gb": [new + replica]}}))
    assert [hidden(node.collect(15.0)) for _ in range(4)] == [[], [], [new], [new]]


def test_the_step_waits_while_a_gpu_or_the_kubelet_is_down() -> None:
    """A GPU that does not answer may have the device, and an old List may name one that is gone."""
    mine, new = mig_uuid(0, 1, 0), mig_uuid(0, 2, 0)
    node = a_node(offered=[mine])
    node.gpus.append(Gpu(1))
    node.collect()
    node.allocatable = {"nvidia.com/mig-1g.10gb": [mine, new]}
    node.collect()
    node.gpus[1].fault = "lost"
    assert [hidden(node.collect(20.0)) for _ in range(3)] == [[], [], []]
    node.gpus[1].fault = None
    node.down = {"kubelet"}
    assert hidden(node.collect(20.0)) == []
    node.down = set()
    assert [hidden(node.collect(15.0)) for _ in range(3)] == [[], [], [new]]


def test_the_old_form_of_a_name_is_no_other_device() -> None:
    """MIG-GPU-…/<gi>/<ci> is the device that NVML lists under its own uuid."""
    mine = mig_uuid(0, 1, 0)
    node = a_node(offered=[mine])
    node.collect()
    node.allocatable = {"nvidia.com/mig-1g.10gb": [mine, f"MIG-{gpu_uuid(0)}/1/0", f"MIG-{gpu_uuid(0)}/2/0"]}
    assert [hidden(node.collect(20.0)) for _ in range(3)][-1] == [f"MIG-{gpu_uuid(0)}/2/0"]
