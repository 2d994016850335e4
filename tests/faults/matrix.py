"""A row of the fault matrix, and the test of a row: inject the fault, compare, take it away, count collections.

While a fault lasts, the page must be as the row says, in at least two collections. The log must have each of the row's
lines exactly once, because gpumap logs changes. A row without log lines asserts that nothing is logged. After the
fault, the page must be what it was before within `recovers` collections. Every page seen must keep the laws that a page
can show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from tests import laws
from tests.agent import Agent, until
from tests.exposed import Page
from tests.faults.expected import holds, matches, path_and_status, shown
from tests.faults.site import Inject, Site, Start

SERVED = Start()

ACCUSES_AGAIN = 4
"""Collections until an accusation is back: two snapshots must agree, for 0.4 s if they are pushed. The interval of the
tests is 0.2 s."""

HEALTHY = (
    "gpumap_source_up",
    "gpumap_capability",
    "gpumap_gpu_up",
    "gpumap_gpu_fault_info",
    "gpumap_allocation_info",
    "gpumap_allocation_slots",
    "gpumap_unmatched_slots",
    "gpumap_device_holders",
    "gpumap_device_slots_allocatable",
    "gpumap_device_memory_used_bytes",
    "gpumap_device_memory_used_by_owner_bytes",
    "gpumap_device_processes",
    "gpumap_container_allocated_gpus",
    "gpumap_container_gpu_memory_used_bytes",
    "gpumap_container_gpu_processes",
    "gpumap_container_unassigned_use",
    "gpumap_pod_info",
)
"""After a fault these families have the samples and the values that they had before it."""


def is_up(source: str) -> str:
    return f'gpumap_source_up{{source="{source}"}} 1'


def is_down(source: str, reason: str) -> tuple[str, str]:
    return f'gpumap_source_up{{source="{source}"}} 0', counts(source, reason)


def counts(source: str, reason: str) -> str:
    return f'gpumap_source_errors_total{{source="{source}",reason="{reason}"}} rises'


class Row(Protocol):
    """What `make faults` prints of a fault."""

    @property
    def part(self) -> str: ...
    @property
    def fault(self) -> str: ...
    @property
    def lines(self) -> tuple[str, ...]:
        """Lines on the page, the log and the recovery."""
        ...


@dataclass(frozen=True)
class Fault:
    """A fault of a running service. `inject` holds it for as long as the context lasts."""

    part: str
    fault: str
    inject: Inject
    page: tuple[str, ...]
    self_metrics: tuple[str, ...]
    """Both as in `expected.py`."""
    log: tuple[str, ...] | None
    """Texts of lines; `…` is any text. An empty tuple: nothing is logged. None: it depends on the moment."""
    recovers: int = 1
    """After so many collections that began when the fault had ended."""
    looks: int = 1
    """How many later collections are as the row says, beside the first. More, for a fault that comes and goes."""
    start: Start = SERVED
    """How the service is started. Rows in a row that start it alike share it."""

    @property
    def lines(self) -> tuple[str, ...]:
        after = "next collection" if self.recovers == 1 else f"{self.recovers} collections"
        log = ("by the moment",) if self.log is None else self.log or ("nothing",)
        logged = (f"log: {line}" for line in log)
        return (*self.page, *self.self_metrics, *logged, f"as before after: {after}")

    def __str__(self) -> str:
        return f"{self.part}: {self.fault}"


def fault_of(
    part: str,
    up: str,
    fault: str,
    inject: Inject,
    *page: str,
    metrics: tuple[str, ...] = (),
    log: tuple[str, ...] | None = (),
    recovers: int = 1,
    looks: int = 1,
    start: Start = SERVED,
) -> Fault:
    """A row of a source that stays up. `partial` fills in the first two."""
    return Fault(part, fault, inject, page, (up, *metrics), log, recovers, looks, start)


@dataclass(frozen=True)
class Refusal:
    """A fault of a command: it ends with a code and one line, and prints nothing else."""

    part: str
    fault: str
    arguments: tuple[str, ...]
    """The test replaces `URL` and `DIR` by an address and a folder."""
    code: int
    says: str
    """The begin of the line, in which `…` is any text."""
    answer: bytes = b""
    """What the server sends; it sends it again and again if `is_endless`."""
    is_endless: bool = False

    @property
    def lines(self) -> tuple[str, ...]:
        return f"exit code {self.code}", f"prints: {self.says}"

    def __str__(self) -> str:
        return f"{self.part}: {self.fault}"


async def suffer(fault: Fault, site: Site) -> None:
    """Assert a row on a service that is well before and after."""
    agent = site.agent
    before = await agent.later(1)
    counters = laws.Counters(math.inf)

    def judge(page: Page) -> None:
        found = [*laws.inconsistent(page), *counters.check(page, 0.0)]
        assert not found, f"{fault}: {found}"

    judge(before)
    assert fault.page, "a row asserts something of the page"
    logged = len(agent.log)

    async def differing() -> list[str]:
        """The lines that do not hold now."""
        page = await agent.page()
        judge(page)
        lines = (*fault.page, *fault.self_metrics)
        return [f"{line} (it is {shown(line, page)})" for line in lines if not await _holds(line, before, page, agent)]

    async def not_once() -> list[str]:
        """The texts that the log does not have once, and how often it has them."""
        lines = agent.log[logged:].splitlines()
        if fault.log is None:
            return []
        if not fault.log:
            return lines
        counts = {text: sum(matches(text, line) for line in lines) for text in fault.log}
        return [f"{count} times: {text}" for text, count in counts.items() if count != 1]

    async with fault.inject(site):
        await agent.later(2)  # of a collection that began with the fault
        await until(differing, lambda found: not found, f"{fault} does not show on the page")
        for _ in range(fault.looks):
            await agent.later(1)
            assert await differing() == [], f"{fault} shows only for a moment"
        await until(not_once, lambda found: not found, f"{fault} is not logged once")
    page = await agent.later(fault.recovers + 1)
    judge(page)
    unlike = {name: (before.samples.get(name), page.samples.get(name)) for name in HEALTHY}
    unlike = {name: (was, now) for name, (was, now) in unlike.items() if was != now}
    assert not unlike, f"{fault}: is not as before after {fault.recovers} collections: {unlike}"
    assert page.container_series() == before.container_series()


async def _holds(line: str, before: Page, page: Page, agent: Agent) -> bool:
    request = path_and_status(line)
    return holds(line, before, page) if request is None else (await agent.get(request[0])).status == request[1]
