"""What readers of a snapshot compute from it: once for each snapshot, and never for another one."""

from __future__ import annotations

import gc
import weakref
from functools import partial

from gpumap.model.snapshot import LazyRows, Snapshot, once_per_snapshot
from tests.nodes import Gpu, Process, TestNode, gpu_uuid
from tests.snapshots import empty_node


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
