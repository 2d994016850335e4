"""What runs on the node, from the processes themselves: their PIDs, and the environment that the test gave them.

`Watch` reads it many times a second and writes what the stand-in driver answers. It uses no cgroup, no log name, no
checkpoint and no answer of the kubelet, so gpumap's sources cannot mislead it. All times are of the wall clock, as
gpumap's snapshots are.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from gpumap.model.terms import ContainerName
from tests.cluster import layout
from tests.cluster.device_plugin import ALLOCATION, Allocation, Allocations
from tests.laws import NEVER, Holding, Pod, Process, Span, Window
from tests.machine import MIB

SCAN_SECONDS = 0.02
RELEASE_SECONDS = 20.0
"""How long a kubelet may list a pod, and its logs and cgroups remain, after the pod's last process ended."""
YOUNG_SECONDS = 30.0
"""A process that has none of our variables by then is not ours."""


class _Key(NamedTuple):
    """A process: its PID, and its start time as /proc has it."""

    pid: int
    started: str


@dataclass(eq=False)
class Instance(Pod):
    """A pod from one writing of its manifest to the next."""

    deleted: float = NEVER.start
    """When the test removed it."""
    ends: bool = False
    """It ends by itself, for good: the kubelet may take its devices back at any time."""
    emptied: float = NEVER.start
    """When its last process ended, so far."""


@dataclass
class Truth:
    """All that was seen until now."""

    allocations: Allocations
    pods: dict[str, Instance] = field(default_factory=dict)
    """By the names of instances."""
    processes: list[Process] = field(default_factory=list)
    """A process is another one after an exec."""
    holdings: dict[tuple[int, str], Holding] = field(default_factory=dict)
    """By the allocation's number and the leaf."""

    def pod(self, instance: str, namespace: str, name: str) -> Instance:
        return self.pods.setdefault(instance, Instance(namespace, name))

    def hold(self, pod: Instance, name: ContainerName, allocation: Allocation, seen_at: float) -> None:
        """Note what a container was assigned. Since its first process was seen, the kubelet lists it."""
        for leaf in allocation.leaves:
            slots, gpus = layout.share(allocation, leaf)
            holding = Holding(
                pod,
                name,
                leaf,
                {allocation.resource: slots},
                gpus,
                layout.NEEDS.get(allocation.resource, frozenset()),
                Span(allocation.at, seen_at),
                name.container.startswith("init"),  # by the names that the tests give
            )
            self.holdings.setdefault((allocation.number, leaf), holding)

    def ended(self, pod: Instance) -> Span:
        """When the kubelet may have forgotten a pod: it was removed or ended, and its last process has ended."""
        removed = -NEVER.start if pod.ends else pod.deleted
        lives = any(one.pod is pod and one.ended.end == NEVER.end for one in self.processes)
        return (
            NEVER
            if removed == NEVER.start
            else Span(removed, NEVER.end if lives else max(removed, pod.emptied) + RELEASE_SECONDS)
        )

    def window(self, span: Span, lacks: frozenset[str], listed_since: float | None = None) -> Window:
        """The window of a gpumap that cannot see what it `lacks`."""
        for pod in self.pods.values():
            pod.ended = self.ended(pod)
        earlier = {(one.name, one.leaf) for one in self.holdings.values()}
        earlier |= {(one.name, leaf) for one in self.processes if one.name for leaf in one.uses}
        leaves = layout.leaves()
        base = dict.fromkeys(leaves, layout.BASE_BYTES)
        pods, holdings = [*self.pods.values()], [*self.holdings.values()]
        return Window(span, pods, holdings, self.processes, leaves, base, (), lacks, listed_since, earlier=earlier)


class Watch:
    """Follows the processes below `proc` in a thread, and keeps the driver's `state` file in line with them."""

    def __init__(self, proc: Path, state: Path, allocations: Allocations) -> None:
        self.truth = Truth(allocations)
        self.lock = threading.Lock()
        self._proc = proc
        self._state = state
        self._known: dict[_Key, Process | None] = {}
        self._settled: set[_Key] = set()
        """Processes that will use no other devices."""
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
            self.truth.pods[instance].deleted = time.time()

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
        process.ended = Span(self._last, NEVER.end)  # the driver lists it until the state file is written
        if isinstance(process.pod, Instance):
            process.pod.emptied = looked
        return True

    def _look(self, key: _Key, looked: float) -> bool:
        """Read a process's environment, again and again while it does not use a device: each exec changes it."""
        first_seen = self._first_seen.setdefault(key, looked)
        known = self._known.get(key)
        if (known.uses or key in self._settled) if known else looked - first_seen > YOUNG_SECONDS:
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
        settled = layout.MEMORY_MIB in variables
        if known is not None and not settled:
            return False
        name = _container(variables)
        pod = self.truth.pod(variables[layout.INSTANCE], *name[:2]) if name is not None else None
        process = Process(key.pid, pod, name, dict(_uses(variables)), Span(self._last, NEVER.end))
        if known is not None:  # by an exec
            known.ended = Span(self._last, NEVER.end)
        if settled:
            self._settled.add(key)
        self._known[key] = process
        self.truth.processes.append(process)
        if pod is not None and name is not None:
            for number in (int(one.removeprefix(ALLOCATION)) for one in variables if one.startswith(ALLOCATION)):
                self.truth.hold(pod, name, self.truth.allocations.made[number], looked)
        return True

    def _tell_driver(self) -> None:
        with self.lock:
            living = [process for process in self._known.values() if process is not None]
            uses = [layout.Use(one.pid, uuid, size) for one in living for uuid, size in one.uses.items() if size]
        layout.driver(uses).write(self._state)
        written = time.time()
        with self.lock:
            for process in self.truth.processes:
                if process.began.end == NEVER.end:
                    process.began = Span(process.began.start, written)
                if process.ended.start != NEVER.start and process.ended.end == NEVER.end:
                    process.ended = Span(process.ended.start, written)


def _container(variables: dict[str, str]) -> ContainerName | None:
    if layout.POD not in variables:
        return None
    namespace, _, pod = variables[layout.POD].partition("/")
    return ContainerName(namespace, pod, variables[layout.CONTAINER])


def _uses(variables: dict[str, str]) -> Iterable[tuple[str, int]]:
    if layout.MEMORY_MIB not in variables:
        return
    size = int(variables[layout.MEMORY_MIB]) * MIB
    devices = variables.get(layout.DEVICE)
    if devices is None:
        devices = ",".join(value for name, value in sorted(variables.items()) if name.startswith(ALLOCATION))
    for uuid in filter(None, devices.split(",")):
        yield uuid, size
