"""What runs on the node, from the processes themselves: their PIDs, and the environment that the test gave them.

`Watch` reads it many times a second and writes what the stand-in driver answers. It uses no cgroup, no log name, no
checkpoint and no answer of the kubelet, so gpumap's sources cannot mislead it. All times are of the wall clock, as
gpumap's snapshots are.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from tests.cluster import layout
from tests.cluster.device_plugin import ALLOCATION, Allocation, Allocations
from tests.node import MIB

SCAN_SECONDS = 0.02
YOUNG_SECONDS = 30.0
"""A process that has none of our variables by then is not ours."""
NEVER = math.inf


class _Key(NamedTuple):
    """A process: its PID, and its start time as /proc has it."""

    pid: int
    started: str


class Container(NamedTuple):
    """A container by the names that a test gave it. `pod` is the name that a kubelet reports."""

    namespace: str
    pod: str
    name: str


class Span(NamedTuple):
    """A time from one moment to another."""

    start: float
    end: float

    def meets(self, other: Span) -> bool:
        return self.start <= other.end and other.start <= self.end

    def covers(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end


@dataclass(slots=True)
class Process:
    """A process of a workload, until its next exec. `container` is None for a process of the host.

    `uses` has the bytes by device, and `settled` says that it will use no others. The driver lists it from some moment
    in `began` to some moment in `ended`.
    """

    pid: int
    container: Container | None
    instance: str
    uses: dict[str, int]
    settled: bool
    began: Span
    ended: Span = field(default_factory=lambda: Span(NEVER, NEVER))

    @property
    def possible(self) -> Span:
        """When the driver may list it."""
        return Span(self.began.start, self.ended.end)

    @property
    def certain(self) -> Span:
        """When the driver lists it for sure."""
        return Span(self.began.end, self.ended.start)


@dataclass
class Holding:
    """The devices that one container of one instance of a pod was assigned at once, for as long as it may have them."""

    container: Container
    instance: str
    allocation: Allocation
    seen_at: float
    """When a process of the container was first seen: since then the kubelet lists it."""

    @property
    def of_init_container(self) -> bool:
        """No kubelet lists init containers. By their names, which the tests give."""
        return self.container.name.startswith("init")


@dataclass
class Truth:
    """All that was seen until now."""

    allocations: Allocations
    processes: list[Process] = field(default_factory=list)
    holdings: dict[int, Holding] = field(default_factory=dict)
    """By the allocation's number."""
    deleted: dict[str, float] = field(default_factory=dict)
    """When the test removed an instance of a pod."""
    ending: set[str] = field(default_factory=set)
    """Instances that end by themselves, for good: the kubelet may take their devices back at any time."""
    uids: dict[str, str] = field(default_factory=dict)
    """UIDs of instances, where the test gave them."""
    emptied: dict[str, float] = field(default_factory=dict)
    """When the last process of an instance ended, so far."""

    def ended(self, instance: str) -> float:
        """When an instance was removed, or ended by itself, and its last process had ended; NEVER before that."""
        if instance in self.ending:
            removed = 0.0
        elif instance in self.deleted:
            removed = self.deleted[instance]
        else:
            return NEVER
        if any(process.instance == instance and process.ended.end == NEVER for process in self.processes):
            return NEVER
        return max(removed, self.emptied.get(instance, NEVER))


class Watch:
    """Follows the processes below `proc` in a thread, and keeps the driver's `state` file in line with them."""

    def __init__(self, proc: Path, state: Path, allocations: Allocations) -> None:
        self.truth = Truth(allocations)
        self.lock = threading.Lock()
        self._proc = proc
        self._state = state
        self._known: dict[_Key, Process | None] = {}
        self._agents: dict[_Key, str] = {}
        self._first_seen: dict[_Key, float] = {}
        self._last = time.time()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self.scan()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(SCAN_SECONDS):
            self.scan()

    @property
    def running(self) -> bool:
        """Whether it still looks: a failure ends its thread."""
        return self._thread.is_alive()

    def agent(self, name: str) -> int | None:
        """A PID of a gpumap, by the name that the test gave it."""
        with self.lock:
            return next((key.pid for key, known in self._agents.items() if known == name), None)

    def mark_deleted(self, instance: str) -> None:
        with self.lock:
            self.truth.deleted[instance] = time.time()

    def scan(self) -> None:
        """Look once."""
        looked = time.time()
        found = set(self._living())
        changed = False
        with self.lock:
            for key in [key for key in self._first_seen if key not in found]:
                changed |= self._end(key, looked)
            for key in found:
                changed |= self._look(key, looked)
        if changed or not self._state.exists():
            self._tell_driver()
        self._last = looked

    def _living(self) -> Iterator[_Key]:
        """A zombie has no memory and no device any more."""
        for entry in self._proc.iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    words = (entry / "stat").read_text().rpartition(") ")[2].split()
                    if words[0] not in "ZX":
                        yield _Key(int(entry.name), words[19])

    def _end(self, key: _Key, looked: float) -> bool:
        del self._first_seen[key]
        self._agents.pop(key, None)
        process = self._known.pop(key, None)
        if process is None:
            return False
        process.ended = Span(self._last, NEVER)  # the driver lists it until the state file is written
        self.truth.emptied[process.instance] = looked
        return True

    def _look(self, key: _Key, looked: float) -> bool:
        """Read a process's environment, again and again while it does not use a device: each exec changes it."""
        first_seen = self._first_seen.setdefault(key, looked)
        known = self._known.get(key)
        if (known.uses or known.settled) if known else looked - first_seen > YOUNG_SECONDS:
            return False
        try:
            text = (self._proc / str(key.pid) / "environ").read_text(errors="replace")
        except OSError:
            return False
        variables = dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
        if layout.AGENT in variables:
            self._agents[key] = variables[layout.AGENT]
        if layout.INSTANCE not in variables:
            return False
        process = Process(
            key.pid,
            _container(variables),
            variables[layout.INSTANCE],
            dict(_uses(variables)),
            layout.MEMORY_MIB in variables,
            Span(self._last, NEVER),
        )
        if known is not None and not process.settled:
            return False
        if known is not None:  # by an exec
            known.ended = Span(self._last, NEVER)
        self._known[key] = process
        self.truth.processes.append(process)
        self._note_holdings(process, variables, looked)
        return True

    def _note_holdings(self, process: Process, variables: dict[str, str], looked: float) -> None:
        for name in variables:
            if process.container is not None and name.startswith(ALLOCATION):
                allocation = self.truth.allocations.made[int(name.removeprefix(ALLOCATION))]
                holding = Holding(process.container, process.instance, allocation, looked)
                self.truth.holdings.setdefault(allocation.number, holding)

    def _tell_driver(self) -> None:
        with self.lock:
            living = [process for process in self._known.values() if process is not None]
            uses = [layout.Use(one.pid, uuid, size) for one in living for uuid, size in one.uses.items()]
        layout.driver(uses).write(self._state)
        written = time.time()
        with self.lock:
            for process in self.truth.processes:
                if process.began.end == NEVER:
                    process.began = Span(process.began.start, written)
                if process.ended.start != NEVER and process.ended.end == NEVER:
                    process.ended = Span(process.ended.start, written)


def _container(variables: dict[str, str]) -> Container | None:
    if layout.POD not in variables:
        return None
    namespace, _, pod = variables[layout.POD].partition("/")
    return Container(namespace, pod, variables[layout.CONTAINER])


def _uses(variables: dict[str, str]) -> Iterable[tuple[str, int]]:
    if layout.MEMORY_MIB not in variables:
        return
    size = int(variables[layout.MEMORY_MIB]) * MIB
    devices = variables.get(layout.DEVICE)
    if devices is None:
        devices = ",".join(value for name, value in sorted(variables.items()) if name.startswith(ALLOCATION))
    for uuid in filter(None, devices.split(",")):
        yield uuid, size
