"""What readers of a snapshot compute from it: once for each snapshot, and never for another one."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.exposition import Exposition
from gpumap.agent.flags import ALL_DIALECTS
from gpumap.model.snapshot import LazyRows, Snapshot, once_per_snapshot
from tests.nodes import Gpu, Process, TestNode, gpu_uuid
from tests.snapshots import busy_node, empty_node, with_node

EVERY_DIALECT = [family for name in ALL_DIALECTS for family in DIALECTS[name].families]


class View:
    """A value that shows when it is freed."""


def test_a_view_is_computed_once_for_each_snapshot() -> None:
    """All families of a page get the same view. Another snapshot, also one that is equal, has its own."""
    computed: list[Snapshot] = []

    @once_per_snapshot
    def view(snapshot: Snapshot) -> View:
        computed.append(snapshot)
        return View()

    first, second = empty_node(), empty_node()
    assert view(first) is view(first)
    assert view(second) is not view(first)
    assert [id(one) for one in computed] == [id(first), id(second)]


def test_two_views_of_a_snapshot_are_apart() -> None:
    """Each function keeps its own result."""
    snapshot = empty_node("node-7")
    assert once_per_snapshot(lambda one: one.node.name)(snapshot) == "node-7"
    assert once_per_snapshot(lambda one: len(one.node.gpus))(snapshot) == 0


def test_a_view_is_freed_with_its_snapshot() -> None:
    """Nothing else keeps it: the collector of garbage is not needed."""
    view = once_per_snapshot(lambda _: View())
    snapshot = empty_node()
    seen = weakref.ref(view(snapshot))
    assert seen() is not None
    gc.disable()
    try:
        del snapshot
        assert seen() is None
    finally:
        gc.enable()


def test_views_are_no_part_of_the_value() -> None:
    """A snapshot from which pages were made equals the same one without pages, and looks the same."""
    rendered, fresh = busy_node(), busy_node()
    Exposition(EVERY_DIALECT).render(rendered)
    assert rendered == fresh
    assert repr(rendered) == repr(fresh)


def test_a_changed_copy_has_its_own_views() -> None:
    """A page of a changed copy shows the copy's rows, not what was computed from the original."""
    original = busy_node()
    page = Exposition(EVERY_DIALECT)
    before = page.render(original)
    changed = replace(
        with_node(original, gpus=original.node.gpus[:4], devices=original.node.devices[:10]),
        processes=original.processes[:1],
    )
    after = page.render(changed)
    assert after != before
    assert after == Exposition(EVERY_DIALECT).render(replace(changed))
    assert page.render(original) == before


def test_lazy_rows_are_made_once_when_they_are_needed() -> None:
    """They are a tuple to every reader, and free what they are made of."""
    made: list[str] = []

    def make(source: View) -> tuple[int, ...]:
        made.append("made")
        return 1, 2, 3

    source = View()
    seen = weakref.ref(source)
    rows = LazyRows(partial(make, source))
    del source
    assert made == []
    assert rows == (1, 2, 3) == rows
    assert (len(rows), rows[0], rows[::-1], [*rows], repr(rows)) == (3, 1, (3, 2, 1), [1, 2, 3], "(1, 2, 3)")
    assert rows == LazyRows(lambda: (1, 2, 3)) != LazyRows(lambda: (1, 2))
    assert hash(rows) == hash((1, 2, 3))
    assert made == ["made"]
    assert seen() is None


def test_processes_of_a_snapshot_stay_as_they_were_collected() -> None:
    """Rows that are made after later collections are those of their own collection."""
    process = Process(7, gpu_uuid(0), None, memory=1000)
    node, same = TestNode([Gpu(0)], processes=[process]), TestNode([Gpu(0)], processes=[process])
    late, early = node.collect(), same.collect()
    assert [one.memory_bytes for one in early.processes] == [1000]
    process.memory = 2000
    assert [one.memory_bytes for one in node.collect().processes] == [2000]
    assert late == early
    assert late.processes == tuple(early.processes)
