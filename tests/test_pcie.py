"""The counter of bytes over PCIe: whoever counts them, it never jumps, and goes back only with the driver."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from gpumap.agent.join import Memory, step
from gpumap.agent.join.pcie import PcieCount, count_pcie
from gpumap.agent.join.settings import GPUS_AWAY_MAX
from gpumap.agent.metrics.device import LINKS
from gpumap.model.observations import Observed
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests.nodes import RULES, Gpu, TestNode, gpu_uuid

SENT, RECEIVED = (family for family in LINKS if "pcie" in family.name)


def values(snapshot: Snapshot, index: int = 0) -> tuple[float, float] | None:
    found = [
        series.value
        for family in (SENT, RECEIVED)
        for series in family.read(snapshot)
        if series.labels == (gpu_uuid(index),)
    ]
    return (found[0], found[1]) if found else None


def collect(node: TestNode, source: str, sent: int, received: int) -> tuple[float, float] | None:
    node.gpus[0].pcie = source, sent, received
    return values(node.collect())


def test_the_drivers_counter_is_shown_as_it_is() -> None:
    """From the first reading on, and after the driver began again."""
    node = TestNode([Gpu(0)])
    assert collect(node, "totals", 1000, 2000) == (1000, 2000)
    assert collect(node, "totals", 1500, 2000) == (1500, 2000)
    assert collect(node, "totals", 10, 20) == (10, 20)


def test_what_gpumap_adds_up_starts_at_nought_and_never_goes_back() -> None:
    """The worker's sums begin at 0 with each handle of the GPU: what was counted remains, and goes on."""
    node = TestNode([Gpu(0)])
    assert collect(node, "rates", 700, 7000) == (0, 0)
    assert collect(node, "rates", 800, 9000) == (100, 2000)
    assert collect(node, "rates", 0, 0) == (100, 2000)
    assert collect(node, "rates", 50, 500) == (150, 2500)
    node.gpus[0].fault = "lost"
    assert values(node.collect()) is None
    node.gpus[0].fault = None
    assert collect(node, "rates", 10, 20) == (160, 2520)
    node.memory = Memory()
    assert collect(node, "rates", 900, 900) == (0, 0)


def test_a_change_of_the_counter_is_no_traffic() -> None:
    """From sums to the driver's counter and back it goes on from its value; a driver that begins again is shown."""
    node = TestNode([Gpu(0)])
    collect(node, "rates", 0, 0)
    assert collect(node, "rates", 100, 200) == (100, 200)
    assert collect(node, "totals", 10**15, 10**9) == (100, 200)
    assert collect(node, "totals", 10**15, 10**9) == (100, 200), "no traffic is no restart"
    assert collect(node, "totals", 10**15 + 5, 10**9 + 6) == (105, 206)
    assert collect(node, "rates", 3, 4) == (105, 206)
    assert collect(node, "rates", 4, 6) == (106, 208)
    assert collect(node, "totals", 9, 9) == (106, 208)
    assert collect(node, "totals", 1, 2) == (1, 2)


def test_without_a_count_there_is_none() -> None:
    """A GPU without GPM beside one that has it; and while NVML is down."""
    node = TestNode([Gpu(0, pcie=("rates", 0, 0)), Gpu(1)])
    assert values(node.collect(), 1) is None
    node.down = {"nvml"}
    assert values(node.collect()) is None
    node.down = set()
    assert collect(node, "rates", 10, 10) == (10, 10)


@pytest.mark.parametrize("absent", ["pcie_transmit_bytes", "pcie_receive_bytes", "pcie_source", "uuid"])
def test_a_part_of_a_count_is_no_count(absent: str) -> None:
    """The driver refuses a value: the counter continues when all exist again."""
    node = TestNode([Gpu(0)])
    collect(node, "rates", 10, 10)
    before = node.memory.pcie
    observed = node.observe()
    assert isinstance(observed.nvml, Observed)
    reading = structs.replace(observed.nvml.value.gpus[0], **{absent: None})
    answer = replace(observed.nvml, value=replace(observed.nvml.value, gpus=(reading,)))
    node.memory, _ = step(node.memory, replace(observed, nvml=answer), RULES)
    assert node.memory.pcie == before
    assert collect(node, "rates", 11, 12) == (1, 2)


def test_counts_of_the_last_gpus_that_went_away_are_kept() -> None:
    """A GPU that comes back continues. Those that went away first are forgotten."""
    one = PcieCount("rates", (1, 1), (0, 0))
    away = [Uuid(f"GPU-{number}") for number in range(GPUS_AWAY_MAX + 2)]
    node = TestNode([Gpu(0, pcie=("rates", 0, 0))])
    after, _ = count_pcie(dict.fromkeys([*away, gpu_uuid(0)], one), node.observe())
    assert [*after] == [*away[2:], gpu_uuid(0)]


@example([(False, 0, 5), (False, 0, 3)])
@example([(False, 5, 0), (False, 3, 0)])
@example([(False, 0, 5), (True, 0, 0), (False, 0, 3)])
@example([(False, 5, 0), (True, 0, 0), (False, 3, 0)])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=8))
def test_sums_of_any_course_add_up(course: list[tuple[bool, int, int]]) -> None:
    """Of rates the counter is all that was added since the first reading, however often the worker began again."""
    node = TestNode([Gpu(0)])
    counted = expected = (0, 0)
    collect(node, "rates", 0, 0)
    for anew, sent, received in course:
        counted = (0, 0) if anew else (counted[0] + sent, counted[1] + received)
        expected = expected if anew else (expected[0] + sent, expected[1] + received)
        assert collect(node, "rates", *counted) == expected
