"""Compares gpumap's page and map with what ran on the node when gpumap collected: no number without a true cause.

A page is compared with every state of the node between two moments (`Window`): gpumap read its sources somewhere in
between. A value is right if it was true at one of these moments; absent and `unknown` are always allowed here. That a
page is complete is checked only after the node was left alone for some time (`Settled`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from tests.agent import Page
from tests.cluster import layout
from tests.cluster.truth import NEVER, Container, Holding, Process, Span, Truth

LONGEST_READ_SECONDS = 5.0
"""From a collection's first read to its end: a source's deadline."""
AFTER_SECONDS = 0.5
"""A process that dies leaves /proc before the driver's list. So a page may know of an end that much earlier."""
RELEASE_SECONDS = 20.0
"""How long a kubelet may list a pod, and its logs and cgroups remain, after the pod's last process ended."""


class Window(NamedTuple):
    """When the collection of a page may have read its sources, and until when a kubelet was away before that."""

    span: Span
    released_after: float
    """Instances that ended before this moment are no longer listed."""


class Finding(NamedTuple):
    """What a page has and the node has not, or the reverse."""

    rule: str
    what: str


@dataclass(frozen=True, slots=True)
class Privileges:
    """What a gpumap may see. Without one of them it knows less, and is never wrong."""

    processes: bool = True
    checkpoint: bool = True
    logs: bool = True


ALL = Privileges()

Row = Mapping[str, str]
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"\\]*)"')


_COMPARED = (
    *("gpumap_container_", "gpumap_allocation_", "gpumap_device_memory_used", "gpumap_device_holders"),
    *("gpumap_device_processes", "gpumap_pod_info", "gpumap_unmatched_slots", "pod_and_gpu_map_info"),
    *("gpumap_source_up", "gpumap_snapshot_timestamp_seconds", "process_start_time_seconds"),
)


def _is_compared(line: str) -> bool:
    return line.startswith(_COMPARED)


def read_page(text: str, *, carefully: bool = False) -> Page:
    """A page, by expressions that know only names as they are here. prometheus_client's parser takes 50 times as long;
    `carefully`: it reads the page too, and must find the same."""
    page = Page("")
    page.text = text
    for name, labels, value in _SAMPLE.findall("\n".join(filter(_is_compared, text.splitlines()))):
        samples = page.samples.setdefault(name, {})
        row = frozenset(_LABEL.findall(labels))
        assert row not in samples, f"{name} {labels} is there twice"
        samples[row] = float(value)
    if carefully:
        whole = Page(text).samples
        assert all(whole[name] == samples for name, samples in page.samples.items())
    return page


def rows(page: Page, family: str) -> Iterator[tuple[Row, float]]:
    for labels, value in page.samples.get(family, {}).items():
        yield dict(labels), value


def container_of(row: Row) -> Container:
    return Container(row["namespace"], row["pod"], row["container"])


class Comparison:
    """The truth of one window, as a page may show it."""

    def __init__(self, truth: Truth, window: Window) -> None:
        self.span = window.span
        self.users = [one for one in truth.processes if one.uses and one.possible.meets(window.span)]
        self.holdings = [one for one in truth.holdings.values() if _may_be_listed(one, truth, window)]
        self.certain_holdings = [one for one in self.holdings if _is_listed(one, truth, window)]
        self.instances = {one.instance for one in self.holdings} | {one.instance for one in self.users}
        self._ended = {one.instance: truth.ended(one.instance) for one in self.users}
        self._deleted = truth.deleted
        self._uids = truth.uids
        self._ever = {(one.container, leaf) for one in truth.holdings.values() for leaf in one.allocation.leaves}
        self._ever |= {(one.container, leaf) for one in truth.processes if one.container for leaf in one.uses}

    def pods(self) -> set[tuple[str, str, str]]:
        """Namespace, name and UID of each pod that holds or uses a device; "" for a UID that is not known here."""
        found = [(one.container, one.instance) for one in self.holdings]
        found += [(one.container, one.instance) for one in self.users if one.container]
        return {(*container[:2], self._uids.get(instance, "")) for container, instance in found if container}

    def holds(self, container: Container, uuid: str) -> bool:
        return bool(self.holding_instances(container, uuid))

    def holding_instances(self, container: Container, uuid: str) -> set[str]:
        return {
            one.instance for one in self.holdings if _is_of(one.container, container) and uuid in one.allocation.leaves
        }

    def ever_on(self, container: Container, uuid: str) -> bool:
        """Whether a container had to do with a device at any time."""
        return any(leaf == uuid and _is_of(one, container) for one, leaf in self._ever)

    def holders(self, uuid: str, certain: bool = False) -> set[Container]:
        found = self.certain_holdings if certain else self.holdings
        return {one.container for one in found if uuid in one.allocation.leaves and not one.of_init_container}

    def on(self, uuid: str, container: Container | None = None) -> list[Process]:
        """Processes on a device: all, or those of a container; of a pod, if the container has no name."""
        return [
            one for one in self.users if uuid in one.uses and (container is None or _is_of(one.container, container))
        ]

    def states(self, processes: Iterable[Process], uuid: str) -> set[tuple[int, int]]:
        """Each (bytes, number) of these processes that the driver reported at some moment."""
        processes = list(processes)
        moments = {self.span.start, self.span.end}
        for one in processes:
            edges = (one.began.start, one.began.end, one.ended.start, one.ended.end)
            moments |= {edge for edge in edges if self.span.start <= edge <= self.span.end}
        found = set()
        for moment in moments:
            at = Span(moment, moment)
            sure = [one for one in processes if one.certain.covers(at)]
            unsure = [one for one in processes if one.possible.meets(at) and one not in sure]
            for chosen in _subsets(unsure):
                both = [*sure, *chosen]
                found.add((sum(one.uses[uuid] for one in both), len(both)))
        return found

    def true_owners(self, process: Process, uuid: str) -> set[str]:
        """The owners that are true of a process on a device, as pods come and go in the window."""
        if process.container is None:
            return {"host"}
        owners = set()
        if self.is_deleted(process):
            owners.add("gone")
        if any(one.instance == process.instance for one in self.holdings_of(process, uuid)):
            owners.add("assigned")
        elif self._ended[process.instance] > self.span.start:
            owners.add("unassigned")
        return owners

    def is_deleted(self, process: Process) -> bool:
        """Whether its pod was removed, so that it is left over."""
        return self._deleted.get(process.instance, NEVER) <= self.span.end

    def holdings_of(self, process: Process, uuid: str) -> list[Holding]:
        return [one for one in self.holdings if one.container == process.container and uuid in one.allocation.leaves]


def _is_of(true: Container | None, reported: Container) -> bool:
    """Whether a row is of a container. A row without a container's name is of a pod of which only that is known."""
    return true is not None and true[:2] == reported[:2] and reported.name in ("", true.name)


def _subsets(processes: list[Process]) -> Iterator[list[Process]]:
    """Every choice among processes that are just coming or going; of more than six only runs, in order."""
    if len(processes) <= 6:
        for mask in range(1 << len(processes)):
            yield [one for bit, one in enumerate(processes) if mask >> bit & 1]
        return
    for start in range(len(processes) + 1):
        for end in range(start, len(processes) + 1):
            yield processes[start:end]


def _may_be_listed(holding: Holding, truth: Truth, window: Window) -> bool:
    ended = truth.ended(holding.instance)
    return holding.allocation.at <= window.span.end and ended >= window.released_after


def _is_listed(holding: Holding, truth: Truth, window: Window) -> bool:
    deleted = truth.deleted.get(holding.instance, NEVER)
    known = holding.seen_at <= window.span.start and holding.instance not in truth.ending
    return known and deleted >= window.span.end


# --- what must be true of every page ---


def allocations(page: Page, truth: Comparison) -> Iterator[str]:
    """Only a container that was assigned a device holds it."""
    families = ("gpumap_allocation_info", "gpumap_allocation_slots")
    for row, _ in chain(*(rows(page, family) for family in families)):
        if not truth.holds(container_of(row), row["uuid"]):
            yield f"{row} holds nothing there"
    for row, _ in rows(page, "gpumap_unmatched_slots"):
        if not any(one.container == container_of(row) for one in truth.holdings):
            yield f"{row} holds nothing"


def grants(page: Page, truth: Comparison) -> Iterator[str]:
    """Shares and granted memory are those of the plugin's answer."""
    for row, value in rows(page, "gpumap_container_allocated_gpus"):
        shares = {_share(one, row["uuid"]) for one in truth.holdings if one.container == container_of(row)}
        if not any(share is not None and abs(value - share) < 1e-9 for share in shares):
            yield f"{row}: {value}; the plugin gave {shares}"


def _share(holding: Holding, uuid: str) -> float | None:
    allocation = holding.allocation
    if uuid not in allocation.leaves:
        return None
    slots = sum(1 for one in allocation.ids if allocation.resource == layout.GPUSHARE or one.startswith(uuid))
    return {
        layout.WHOLE: 1.0,
        layout.SHARED: slots / 4,
        layout.MIG: 1 / 7,
        layout.GPUSHARE: slots / 16,
    }[allocation.resource]


def container_memory(page: Page, truth: Comparison) -> Iterator[str]:
    """Memory and processes of a container are those of its own processes, at one moment; 0 only without any.

    Of two instances of a pod, one of which ends, the name is that of either.
    """
    for family, which in (("gpumap_container_gpu_memory_used_bytes", 0), ("gpumap_container_gpu_processes", 1)):
        for row, value in rows(page, family):
            container, uuid = container_of(row), row["uuid"]
            processes = truth.on(uuid, container)
            of_instances = [
                [one for one in processes if one.instance == instance]
                for instance in {one.instance for one in processes} | truth.holding_instances(container, uuid)
            ]
            values = {state[which] for own in of_instances for state in truth.states(own, uuid)}
            if not container.name:  # some processes of the pod: their container is not known
                values |= {
                    sum(one.uses[uuid] for one in some) if which == 0 else len(some) for some in _subsets(processes)
                }
            if value not in values:
                yield f"{family} {row} {value:.0f}; true: {sorted(values)}"
            elif value == 0 and not truth.holds(container, uuid) and not truth.on(uuid, container):
                yield f"{family} {row} 0, of a container that has nothing to do with the device"


def other_rows(page: Page, truth: Comparison) -> Iterator[str]:
    """Every other series of a container is of one that holds or uses the device; counters may be of an earlier one."""
    for family, samples in page.samples.items():
        if not family.startswith(("gpumap_container_", "gpumap_allocation_")):
            continue
        for labels in samples:
            series = dict(labels)
            container, uuid = container_of(series), series["uuid"]
            known = truth.holds(container, uuid) or truth.on(uuid, container)
            if not (known or (family.endswith("_total") and truth.ever_on(container, uuid))):
                yield f"{family} {series}: no such container on the device"
    for row, _ in rows(page, "pod_and_gpu_map_info"):
        if not any(
            (one.container.namespace, one.container.pod) == (row["namespace"], row["pod_name"])
            and row["gpu_id"] in one.allocation.leaves
            for one in truth.holdings
        ):
            yield f"pod_and_gpu_map_info {row}: it holds nothing there"


def accusations(page: Page, truth: Comparison) -> Iterator[str]:
    """Only a container that uses what it was not assigned is reported to do so."""
    for row, _ in rows(page, "gpumap_container_unassigned_use"):
        users = truth.on(row["uuid"], container_of(row))
        if not any("unassigned" in truth.true_owners(one, row["uuid"]) for one in users):
            yield f"{row} is accused without reason"


def owners(page: Page, truth: Comparison) -> Iterator[str]:
    """No owner has more than the processes of which it is true; only `unknown` and `unaccounted` may."""
    for family, which in (("gpumap_device_memory_used_by_owner_bytes", 0), ("gpumap_device_processes", 1)):
        for row, value in rows(page, family):
            owner, uuid = row["owner"], row["uuid"]
            if owner == "unaccounted" or value == 0:
                continue
            there = truth.on(uuid)
            if owner != "unknown":
                there = [one for one in there if owner in truth.true_owners(one, uuid)]
            most = max(state[which] for state in truth.states(there, uuid))
            if value > most:
                yield f"{family} {row} {value:.0f}; at most {most} is true"


def holders(page: Page, truth: Comparison) -> Iterator[str]:
    """A device has at least the holders that it certainly had, and at most those that it may have had."""
    for row, value in rows(page, "gpumap_device_holders"):
        least, most = len(truth.holders(row["uuid"], certain=True)), len(truth.holders(row["uuid"]))
        if not least <= value <= most:
            yield f"{row}: {value:.0f}; {least} to {most} are true"


def devices(page: Page, truth: Comparison) -> Iterator[str]:
    """The memory of a device is the driver's, and its owners add up to it exactly (L1)."""
    sums: dict[str, float] = {}
    for row, value in rows(page, "gpumap_device_memory_used_by_owner_bytes"):
        sums[row["uuid"]] = sums.get(row["uuid"], 0.0) + value
    for row, value in rows(page, "gpumap_device_memory_used_bytes"):
        uuid = row["uuid"]
        if uuid in sums and sums[uuid] != value:
            yield f"{uuid}: its owners have {sums[uuid]:.0f} of {value:.0f} bytes"
        values = {layout.BASE_BYTES + size for size, _ in truth.states(truth.on(uuid), uuid)}
        if value not in values:
            yield f"{uuid}: {value:.0f} bytes are used; true: {sorted(values)}"


def pods(page: Page, truth: Comparison) -> Iterator[str]:
    """A pod's UID is its own."""
    known = truth.pods()
    for row, _ in rows(page, "gpumap_pod_info"):
        if not _is_pod(row["namespace"], row["pod"], row["uid"], known):
            yield f"gpumap_pod_info {row}; true: {sorted(known)}"


def _is_pod(namespace: str, name: str, uid: str | None, known: set[tuple[str, str, str]]) -> bool:
    same = {
        known_uid
        for known_namespace, known_name, known_uid in known
        if (known_namespace, known_name) == (namespace, name)
    }
    return bool(same) and (not uid or uid in same or "" in same)


def shares(page: Page, truth: Comparison) -> Iterator[str]:
    """The shares of a GPU's holders add up to 1 at most (L9)."""
    sums: dict[str, float] = {}
    for row, value in rows(page, "gpumap_container_allocated_gpus"):
        gpu = layout.MIG_GPU if row["uuid"] in layout.MIG_DEVICES else row["uuid"]
        sums[gpu] = sums.get(gpu, 0.0) + value
    for gpu, total in sums.items():
        if total > 1 + 1e-9:
            yield f"{gpu}: its holders have {total}"


PageRule = Callable[[Page, Comparison], Iterator[str]]
PAGE_RULES: tuple[PageRule, ...] = (
    allocations,
    grants,
    container_memory,
    other_rows,
    accusations,
    owners,
    holders,
    devices,
    pods,
    shares,
)


def check_page(page: Page, truth: Comparison) -> list[Finding]:
    """What is wrong on a page, whatever gpumap may see."""
    return [Finding(rule.__name__, what) for rule in PAGE_RULES for what in rule(page, truth)]


def check_map(text: str, truth: Comparison) -> list[Finding]:
    """What is wrong in a map: each process by its PID, each holder, and each pod."""
    return [Finding("map", what) for what in _map_findings(json.loads(text), truth)]


def _map_findings(document: dict[str, Any], truth: Comparison) -> Iterator[str]:
    for device in document["devices"]:
        uuid = device["uuid"]
        for process in device["processes"]:
            yield from _process_findings(process, uuid, truth)
        for holder in device["holders"]:
            if not truth.holds(container_of(holder), uuid):
                yield f"{holder} holds nothing of {uuid}"
    known = truth.pods()
    for pod in document["pods"]:
        if not _is_pod(pod["namespace"], pod["pod"], pod["uid"], known):
            yield f"{pod} neither holds nor uses a device"


def _process_findings(process: dict[str, Any], uuid: str, truth: Comparison) -> Iterator[str]:
    found = [one for one in truth.on(uuid) if one.pid == process["pid"]]
    if not found:
        yield f"{process}: no such process on {uuid}"
        return
    allowed = {"unknown"}.union(*(truth.true_owners(one, uuid) for one in found))
    if process["owner"] not in allowed:
        yield f"{process} on {uuid}: true is {sorted(allowed)}"
    if process["memory_bytes"] not in {None, *(one.uses[uuid] for one in found)}:
        yield f"{process} on {uuid}: its memory is not the driver's"
    name = process["namespace"], process["pod"]
    names = {(one.container.namespace, one.container.pod) if one.container else None for one in found}
    if process["pod"] is not None and name not in names:
        yield f"{process} on {uuid}: it is of {names}"
    if process["container"] and process["container"] not in {one.container.name for one in found if one.container}:
        yield f"{process} on {uuid}: it is of another container"


# --- what must be there once a part of the node was left alone ---


def check_complete(page: Page, truth: Comparison, settled: Span, privileges: Privileges) -> list[Finding]:
    """What is missing on a page though it did not change in `settled`, and every source was there all the time."""
    return [Finding("complete", what) for what in _missing(page, truth, settled, privileges)]


def _missing(page: Page, truth: Comparison, settled: Span, privileges: Privileges) -> Iterator[str]:
    for source in ("kubelet", "nvml"):
        if not page.up(source):
            yield f"the source {source} is down"
    holdings = [one for one in truth.certain_holdings if one.seen_at <= settled.start and not one.of_init_container]
    for holding in holdings:
        if holding.allocation.resource == layout.GPUSHARE and not privileges.checkpoint:
            continue  # only the checkpoint names the card
        for leaf in holding.allocation.leaves:
            if page.value("gpumap_allocation_info", **_labels(holding.container, leaf)) is None:
                yield f"{holding.container} is not shown as a holder of {leaf}"
    if privileges != ALL:
        return
    users = [one for one in truth.users if one.certain.covers(settled) and not truth.is_deleted(one)]
    for process in users:
        for uuid in process.uses:
            if process.container and truth.true_owners(process, uuid) & {"assigned", "unassigned"}:
                yield from _without_memory(page, process.container, uuid)
            left_alone = all(one in users for one in truth.on(uuid))
            if left_alone and page.value("gpumap_device_processes", uuid=uuid, owner="unknown") != 0:
                yield f"{uuid} has unknown processes"
            squats = truth.true_owners(process, uuid) == {"unassigned"}
            if squats and page.value("gpumap_container_unassigned_use", **_labels(process.container, uuid)) is None:
                yield f"{process.container} uses {uuid} without an assignment, and is not reported"
    for holding in holdings:
        for leaf in holding.allocation.leaves:
            if all(one in users for one in truth.on(leaf)):
                yield from _without_memory(page, holding.container, leaf)


def _labels(container: Container | None, uuid: str) -> dict[str, str]:
    assert container is not None
    return {"namespace": container.namespace, "pod": container.pod, "container": container.name, "uuid": uuid}


def _without_memory(page: Page, container: Container, uuid: str) -> Iterator[str]:
    if page.value("gpumap_container_gpu_memory_used_bytes", **_labels(container, uuid)) is None:
        yield f"{container} has neither memory on {uuid} nor a zero"
