"""The result of one collection: the node, and what only the agent needs. `join.step` makes it.

Frozen values. What several readers compute from a snapshot is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast, overload

from gpumap.model.node import ContainerOnDevice, Node, Process
from gpumap.model.observations import Moment
from gpumap.model.readings import Uuid
from gpumap.model.terms import PodUid

_Row = TypeVar("_Row")
_View = TypeVar("_View")


class HiddenDevice(NamedTuple):
    """A MIG device that was made after gpumap's start. gpumap's container does not have its device nodes."""

    uuid: Uuid
    since: float
    """Unix seconds."""


class LazyRows(Sequence[_Row]):
    """Rows that are made when a reader first needs them. It equals a tuple of the same rows.

    Two threads that need them at the same time may both make them: the rows are equal.
    """

    __slots__ = ("_make", "_rows")

    def __init__(self, make: Callable[[], Iterable[_Row]]) -> None:
        self._make: Callable[[], Iterable[_Row]] | None = make

    def _made(self) -> tuple[_Row, ...]:
        if (make := self._make) is not None:
            self._rows = tuple(make())
            self._make = None  # it has the data that the rows are made of
        return self._rows

    def __len__(self) -> int:
        return len(self._made())

    def __iter__(self) -> Iterator[_Row]:
        return iter(self._made())

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[_Row, ...]: ...
    def __getitem__(self, index: int | slice) -> _Row | tuple[_Row, ...]:
        return self._made()[index]

    def __eq__(self, other: object) -> bool:
        return self._made() == (other._made() if isinstance(other, LazyRows) else other)

    def __repr__(self) -> str:
        return repr(self._made())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One node at `at`. Everything in it is sorted, so that equal nodes give equal pages."""

    at: Moment
    node: Node
    """Without processes and sums of findings: few ask for them (`published.published`)."""
    containers: tuple[ContainerOnDevice, ...] = ()
    """The containers of all devices, by name."""
    processes: Sequence[Process] = ()
    """`LazyRows`: many nodes have no reader of them."""
    answered: Mapping[str, float] = field(default_factory=dict)
    """When each source last answered, on the monotonic clock."""
    collections: tuple[tuple[str, int], ...] = ()
    """(what started it, number) of the collections since gpumap's start."""
    expires: float | None = None
    """Monotonic time at which data of an earlier collection becomes too old to serve."""
    has_short_process: bool = False
    """A process that began and ended between two collections worked on a leaf that a container holds."""
    pods_to_verify: frozenset[PodUid] = frozenset()
    """Pods that gpumap must know to exist: of holders that would then be idle, or that hold an id of another pod."""
    complaints: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Details of all complaints of this collection, by source and reason. `node.sources` have only the last ones."""
    hidden: tuple[HiddenDevice, ...] = ()
    """Only a new container solves it: the service exits to get one."""
    lost_driver: str = ""
    """Why NVML will not answer this container again: the service exits to get a new one."""
    views: dict[Callable[..., object], object] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What readers computed from it with `once_per_snapshot`. They are freed with it."""


def once_per_snapshot(read: Callable[[Snapshot], _View]) -> Callable[[Snapshot], _View]:
    """Compute a view of a snapshot once, for all families that need it. They must not change it.

    Two threads that need it at the same time may both compute it: the results are equal.
    """

    def view(snapshot: Snapshot) -> _View:
        if read not in snapshot.views:
            snapshot.views[read] = read(snapshot)
        return cast(_View, snapshot.views[read])

    return view
