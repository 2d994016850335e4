"""What truly was on a node while gpumap collected: pods, what they hold, processes, and when each came and went.

Each way to run gpumap has its own truth: a generated node, the machine of the soak, the processes of the live cluster.
Each gives a `Window` of it, and `tests.laws` compares that with what gpumap served.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumap.model.names import ContainerName

MOST_SUBSETS = 10


class Span(NamedTuple):
    """A time from one moment to another."""

    start: float
    end: float

    def meets(self, other: Span) -> bool:
        return self.start <= other.end and other.start <= self.end

    def covers(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end


LONG_AGO = Span(-math.inf, -math.inf)
NEVER = Span(math.inf, math.inf)
SOME_TIME = Span(-math.inf, math.inf)
"""The end of something if no source reports whether it has ended."""


@dataclass(eq=False)
class Pod:
    """One instance of a pod. The kubelet forgot it at some moment of `ended`. An empty `uid` is not known."""

    namespace: str
    name: str
    uid: str = ""
    ended: Span = NEVER

    def container(self, name: str) -> ContainerName:
        return ContainerName(self.namespace, self.name, name)


@dataclass(eq=False)
class Holding:
    """A device that a container was assigned, until its pod ends. `began` is when the kubelet listed it."""

    pod: Pod
    name: ContainerName
    leaf: str
    slots: Mapping[str, int]
    """By resource. Empty: not known."""
    gpus: float | None = None
    """The share of the GPU. None: not known."""
    needs: frozenset[str] = frozenset()
    """The parts of the node that name the device, beside the List."""
    began: Span = LONG_AGO
    of_init_container: bool = False
    """No kubelet lists init containers."""


@dataclass(eq=False)
class Process:
    """A process with its bytes on each device; None: the driver does not report them. No pod: it is the host's.

    The driver lists it from some moment in `began` to some moment in `ended`.
    """

    pid: int
    pod: Pod | None
    name: ContainerName | None
    uses: Mapping[str, int | None]
    began: Span = LONG_AGO
    ended: Span = NEVER
    is_hidden: bool = False
    """No source reports its pod."""

    @property
    def possible(self) -> Span:
        """When the driver may list it."""
        return Span(self.began.start, self.ended.end)

    @property
    def certain(self) -> Span:
        """When the driver lists it for sure."""
        return Span(self.began.end, self.ended.start)


@dataclass
class Window:
    """The truth between two moments, in which gpumap read its sources.

    `down` has the parts of the node that were broken all the time, `touched` those that were at some time. Parts are
    the words of `laws.SOURCES`, `page`, and the devices.
    """

    span: Span
    pods: Sequence[Pod]
    holdings: Sequence[Holding]
    processes: Sequence[Process]
    leaves: Mapping[str, str]
    """The GPU of each device that can be assigned."""
    base_bytes: Mapping[str, int]
    """Memory of a device that no process explains, for the devices of which that is known."""
    down: Collection[str] = ()
    touched: Collection[str] = ()
    listed_since: float | None = None
    """The List that the page shows may be as old as this. None: it is of the window."""
    has_list: bool = True
    """A List is young enough to be shown."""
    unknown_holdings: Collection[ContainerName] = ()
    """Containers of which the test does not know what they hold."""
    has_schedulers: bool = False
    """A scheduler may let pods use devices beside the kubelet."""
    shared: Collection[ContainerName] = ()
    """Containers to which a scheduler may have given devices, which the List does not have."""
    earlier: Collection[tuple[ContainerName, str]] | None = None
    """Containers and the devices that they ever had to do with; their counters live on. None: not known."""
    _on: dict[str, list[Process]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        since = Span(self._list_at, self.span.end)
        self.pods = [one for one in self.pods if one.ended.end >= since.start]
        self.holdings = [
            one for one in self.holdings if one.pod.ended.end >= since.start and one.began.start <= since.end
        ]
        self.processes = [one for one in self.processes if one.possible.meets(self.span)]
        self._on = {}
        for one in self.processes:
            for leaf in one.uses:
                self._on.setdefault(leaf, []).append(one)

    @property
    def _list_at(self) -> float:
        return self.span.start if self.listed_since is None else self.listed_since

    def gpu_of(self, leaf: str) -> str:
        return self.leaves.get(leaf, leaf)

    def on(self, leaf: str, name: ContainerName | None = None) -> list[Process]:
        """Processes on a device: all, or those of a container; of a pod, if the container has no name."""
        found = self._on.get(leaf, [])
        return found if name is None else [one for one in found if is_of(one.name, name)]

    def holding(self, name: ContainerName, leaf: str) -> list[Holding]:
        """What a container was assigned of a device. Who holds a GPU holds its parts."""
        of_leaf = {leaf, self.gpu_of(leaf)}
        return [one for one in self.holdings if one.leaf in of_leaf and is_of(one.name, name)]

    def may_hold(self, name: ContainerName, leaf: str) -> bool:
        return name in self.unknown_holdings or name in self.shared or bool(self.holding(name, leaf))

    def was_assigned(self, name: ContainerName, leaf: str) -> bool:
        """Whether the kubelet may have assigned it this very device."""
        return name in self.unknown_holdings or any(one.leaf == leaf for one in self.holding(name, leaf))

    def is_listed(self, one: Holding) -> bool:
        """Whether the kubelet lists it all the time, and the device is known."""
        known = one.began.end <= self._list_at and not one.of_init_container
        return known and one.pod.ended.start >= self.span.end and not one.needs & {*self.touched}

    def is_settled(self, one: Process) -> bool:
        """Whether it was there all the time, and its pod too."""
        with_pod = one.pod is None or one.pod.ended.start > self.span.end
        return with_pod and not one.is_hidden and one.certain.covers(self.span)

    def owners(self, one: Process, leaf: str) -> set[str]:
        """The owners that are true of a process on a device, as pods come and go. `unknown` is always allowed."""
        if one.pod is None or one.name is None:
            return {"host"}
        words = {"gone"} if one.pod.ended.start <= self.span.end else set()
        if self.has_schedulers:
            words.add("scheduled")
        if one.name in self.unknown_holdings or one.name in self.shared:
            return words | {"assigned", "unassigned"}
        if any(holding.pod is one.pod for holding in self.holding(one.name, leaf)):
            words.add("assigned")
        elif one.pod.ended.end > self.span.start:
            words.add("unassigned")
        return words

    def states(self, processes: Iterable[Process], leaf: str) -> set[tuple[int | None, int]]:
        """Each (bytes, number) of these processes that the driver reported at some moment."""
        processes = list(processes)
        edges = {edge for one in processes for edge in (*one.began, *one.ended) if self.span.meets(Span(edge, edge))}
        found = set()
        for moment in {*self.span, *edges}:
            at = Span(moment, moment)
            sure = [one for one in processes if one.certain.covers(at)]
            unsure = [one for one in processes if one.possible.meets(at) and one not in sure]
            found |= {total([*sure, *chosen], leaf) for chosen in subsets(unsure)}
        return found


def is_of(true: ContainerName | None, shown: ContainerName) -> bool:
    """Whether a row is of a container. A row without a container's name is of a pod of which only that is known."""
    return true is not None and true[:2] == shown[:2] and shown.container in ("", true.container)


def total(processes: Sequence[Process], leaf: str) -> tuple[int | None, int]:
    """Bytes and number. One process without bytes leaves the sum unknown."""
    sizes = [one.uses[leaf] for one in processes]
    return None if None in sizes else sum(size or 0 for size in sizes), len(sizes)


def subsets(processes: Sequence[Process]) -> Iterator[list[Process]]:
    """Every choice among processes; of many only runs, in order."""
    if len(processes) <= MOST_SUBSETS:
        for mask in range(1 << len(processes)):
            yield [one for bit, one in enumerate(processes) if mask >> bit & 1]
        return
    for start in range(len(processes) + 1):
        for end in range(start, len(processes) + 1):
            yield list(processes[start:end])
