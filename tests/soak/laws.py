"""The laws of the contract, judged by the page and the truth of the node.

A page shows what gpumap read between two moments, its window. Meanwhile the truth may change, and the sources are read
one after another. So there are two rules:

- `wrong`: whatever the page says must be right in one of the truths of its window, value by value.
- `missing`: whatever is the same in all truths of the window, and needs no part of the node that is broken, must be on
  the page, with that value.

An accusation needs two collections, so `missing` gets the truths of three windows. While the kubelet does not answer,
gpumap serves its last List: then an allocation may be as old as that.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.agent import Page
from tests.soak.world import CARDS, GPUS, PARTITIONED, Process, Truth

Labels = frozenset[tuple[str, str]]
Key = tuple[str, Labels]
Container = tuple[str, str, str]

USED = "gpumap_container_gpu_memory_used_bytes"
PROCESSES = "gpumap_container_gpu_processes"
UNASSIGNED = "gpumap_container_unassigned_use"
ALLOCATION = "gpumap_allocation_info"
DEVICE_USED = "gpumap_device_memory_used_bytes"
BY_OWNER = "gpumap_device_memory_used_by_owner_bytes"
UP = "gpumap_gpu_up"
SOURCES = {
    "kubelet": {"kubelet"},
    "nvml": {"nvml"},
    "procfs": {"proc"},
    "pod_identity": {"checkpoint", "logs"},
}
"""The parts of the node that each source needs."""
EVERYTHING = frozenset({"page", "kubelet", "nvml", "proc", "checkpoint", "logs"})


@dataclass(frozen=True)
class Fact:
    """A sample that the page must have if the parts in `needs` work."""

    value: float
    needs: frozenset[str]


def key(name: str, **labels: str) -> Key:
    return name, frozenset(labels.items())


def gpu_of(leaf: str) -> str:
    return GPUS[PARTITIONED] if leaf.startswith("MIG-") else leaf


def owner(one: Process, truth: Truth) -> str:
    """The owner of a process."""
    if one.pod is None:
        return "host"
    pod = truth.pods.get(one.pod.uid)
    if pod is None:
        return "gone"
    grant = pod.grants.get(one.container)
    return "assigned" if grant is not None and grant.leaf == one.leaf else "unassigned"


@functools.lru_cache(maxsize=1024)
def facts(truth: Truth) -> dict[Key, Fact]:
    """What the page must have. Not what a left-over process makes uncertain: its owner may be unknown."""
    found: dict[Key, Fact] = {}
    for source, parts in SOURCES.items():
        found[key("gpumap_source_up", source=source)] = Fact(1.0, frozenset({"page", *parts}))
    for gpu in GPUS:
        found[key(UP, gpu_uuid=gpu)] = Fact(1.0, frozenset({"page", "nvml", gpu}))
    on: dict[str, list[Process]] = {leaf: [] for leaf in truth.leaves}
    for one in truth.processes.values():
        on[one.leaf].append(one)
    for leaf, gpu in truth.leaves.items():
        found[key(DEVICE_USED, uuid=leaf)] = Fact(truth.used_bytes(leaf), frozenset({"page", "nvml", gpu}))
        owners = [owner(one, truth) for one in on[leaf]]
        if "gone" not in owners:
            for word in ("assigned", "unassigned", "gone", "host"):
                labels = {"uuid": leaf, "owner": word}
                count = sum(1 for one in owners if one == word)
                found[key("gpumap_device_processes", **labels)] = Fact(count, EVERYTHING | {gpu})
                used = sum(one.memory_bytes for one in on[leaf] if owner(one, truth) == word)
                found[key(BY_OWNER, **labels)] = Fact(used, EVERYTHING | {gpu})
    left = {one.pod.full for one in truth.processes.values() if one.pod and one.pod.uid not in truth.pods}
    for pod in truth.pods.values():
        for container in pod.containers:
            name = {"namespace": pod.namespace, "pod": pod.name, "container": container}
            grant = pod.grants.get(container)
            if grant is not None:
                parts = {"page", "kubelet", *(("checkpoint",) if grant.sharing.by_answer else ())}
                needs = frozenset(parts | ({"nvml"} if grant.sharing.by_answer else set()))
                found[key(ALLOCATION, **name, uuid=grant.leaf)] = Fact(1.0, needs)
                slots = key("gpumap_allocation_slots", **name, uuid=grant.leaf, resource=grant.sharing.resource)
                found[slots] = Fact(len(grant.slots), needs)
            used_leaves = {one.leaf for one in truth.processes.values() if _is_of(one, pod.uid, container)}
            for leaf in used_leaves | ({grant.leaf} if grant is not None else set()):
                own = [one for one in on[leaf] if _is_of(one, pod.uid, container)]
                if pod.full in left or (not own and any(owner(one, truth) == "gone" for one in on[leaf])):
                    continue
                needs = EVERYTHING | {gpu_of(leaf)}
                found[key(USED, **name, uuid=leaf)] = Fact(sum(one.memory_bytes for one in own), needs)
                found[key(PROCESSES, **name, uuid=leaf)] = Fact(len(own), needs)
                if grant is None or grant.leaf != leaf:
                    found[key(UNASSIGNED, **name, uuid=leaf)] = Fact(1.0, needs)
    return found


def _is_of(one: Process, uid: str, container: str) -> bool:
    return one.pod is not None and one.pod.uid == uid and one.container == container


def missing(page: Page, agent: str, truths: Sequence[Truth], *, recovering_counts: bool = True) -> Iterator[str]:
    """What the page lacks, or has with another value, although it was so all the time."""
    broken: set[str] = set()
    for truth in truths:
        broken |= truth.broken(agent, or_recovering=recovering_counts)
    every = [facts(truth) for truth in truths]
    for (name, labels), fact in every[0].items():
        if fact.needs & broken or any(other.get((name, labels)) != fact for other in every[1:]):
            continue
        shown = page.samples.get(name, {}).get(labels)
        if shown != fact.value:
            yield f"{name}{_text(labels)} is {'absent' if shown is None else shown}, and is in truth {fact.value}"


def _text(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(labels)) + "}"


@dataclass(frozen=True)
class Window:
    """The truths of a page's window. `listed` begins with the last List that the page may show."""

    agent: str
    truths: Sequence[Truth]
    listed: Sequence[Truth]
    fresh: Sequence[Truth]
    """The truths since the oldest List that gpumap may still use."""

    def always(self, part: str) -> bool:
        return all(part in truth.broken(self.agent, or_recovering=False) for truth in self.truths)


def wrong(page: Page, window: Window) -> Iterator[str]:
    """What the page says and was not so at any moment of its window."""
    yield from _conservation(page)
    yield from _shares(page)
    yield from _sources(page, window)
    yield from _gpus(page, window)
    yield from _allocation(page, window)
    yield from _use(page, window)


def _conservation(page: Page) -> Iterator[str]:
    sums: defaultdict[str, float] = defaultdict(float)
    for labels, value in page.samples.get(BY_OWNER, {}).items():
        sums[dict(labels)["uuid"]] += value
    for labels, used in page.samples.get(DEVICE_USED, {}).items():
        leaf = dict(labels)["uuid"]
        if sums[leaf] != used:
            yield f"L1: the owners of {leaf} have {sums[leaf]}, and it has {used}"


def _shares(page: Page) -> Iterator[str]:
    sums: defaultdict[str, float] = defaultdict(float)
    for labels, value in page.samples.get("gpumap_container_allocated_gpus", {}).items():
        sums[gpu_of(dict(labels)["uuid"])] += value
    for gpu, total in sums.items():
        if total > 1 + 1e-9:
            yield f"L9: {total} of {gpu} are allocated"


def _sources(page: Page, window: Window) -> Iterator[str]:
    for source, part in (("kubelet", "no kubelet"), ("nvml", "no nvml"), ("procfs", "no proc")):
        if window.always(part) and page.up(source):
            yield f"L6: {source} is up, and did not answer"


def _gpus(page: Page, window: Window) -> Iterator[str]:
    lost = {gpu for gpu in GPUS if window.always(f"lost {gpu}") or window.always("no nvml")}
    for labels, value in page.samples.get(UP, {}).items():
        if value and dict(labels)["gpu_uuid"] in lost:
            yield f"L6: {_text(labels)} is up, and is lost"
    for labels, value in page.samples.get(DEVICE_USED, {}).items():
        leaf = dict(labels)["uuid"]
        if gpu_of(leaf) in lost:
            yield f"L6: {leaf} is measured, and is lost"
        elif all(leaf not in truth.leaves or truth.used_bytes(leaf) != value for truth in window.truths):
            yield f"L6: {leaf} has {value} bytes, and never had"


def _allocation(page: Page, window: Window) -> Iterator[str]:
    for name in (ALLOCATION, "gpumap_allocation_slots"):
        if page.samples.get(name) and all(
            "no kubelet" in truth.broken(window.agent, or_recovering=False) for truth in window.fresh
        ):
            yield f"L6: {name}, and no List is younger than --stale-after"
        possible = {one for truth in window.listed for one, fact in facts(truth).items() if one[0] == name}
        for labels in page.samples.get(name, {}):
            if (name, labels) not in possible:
                yield f"L6: {name}{_text(labels)}, and it does not hold that"


def _use(page: Page, window: Window) -> Iterator[str]:
    for labels, value in page.samples.get(USED, {}).items():
        row = dict(labels)
        leaf = row["uuid"]
        full, container = (row["namespace"], row["pod"]), row["container"]
        pods = {pod.uid for truth in window.listed for pod in truth.pods.values() if pod.full == full}
        if not pods:
            yield f"L6: {_text(labels)} is measured, and does not exist"
            continue
        if gpu_of(leaf) in GPUS and window.always(f"lost {gpu_of(leaf)}"):
            yield f"L6: {_text(labels)} is measured, and its GPU is lost"
        most = max(_most_bytes(window, uid, container, leaf) for uid in pods)
        if value > most:
            yield f"L4: {_text(labels)} has {value} bytes, and at most {most} are its own"
        if value == 0 and all(_runs(truth, pods, leaf, container) for truth in window.truths):
            yield f"L10: {_text(labels)} is idle, and its processes run"
    for labels in page.samples.get(UNASSIGNED, {}):
        row = dict(labels)
        name = (row["namespace"], row["pod"], row["container"])
        if window.always("no kubelet"):
            yield f"L6: {_text(labels)} is accused without a List"
        if not any(_is_squatter(truth, name, row["uuid"]) for truth in window.truths):
            yield f"L10: {_text(labels)} is accused, and is not guilty"


def _most_bytes(window: Window, uid: str, container: str, leaf: str) -> int:
    most: dict[int, int] = {}
    for truth in window.truths:
        for one in truth.processes.values():
            if one.leaf == leaf and one.pod is not None and one.pod.uid == uid and container in ("", one.container):
                most[one.pid] = max(most.get(one.pid, 0), one.memory_bytes)
    return sum(most.values())


def _runs(truth: Truth, pods: set[Any], leaf: str, container: str) -> bool:
    alive = pods & set(truth.pods)
    return bool(alive) and all(
        any(_is_of(one, uid, container) and one.leaf == leaf for one in truth.processes.values()) for uid in alive
    )


def _is_squatter(truth: Truth, name: Container, leaf: str) -> bool:
    return any(
        one.leaf == leaf
        and one.pod is not None
        and one.pod.full == name[:2]
        and name[2] in ("", one.container)
        and owner(one, truth) == "unassigned"
        for one in truth.processes.values()
    )


# --- the map as JSON --------------------------------------------------------------------------------------------------


def wrong_map(document: Mapping[str, Any], window: Window) -> Iterator[str]:
    """Find what /api/v1/map reports and was not so at any moment of its window."""
    for device in document["devices"]:
        leaf, memory = device["uuid"], device["memory"]
        if memory is not None and device["owners"]:
            total = sum(one["memory_bytes"] or 0 for one in device["owners"])
            if total != memory["used_bytes"]:
                yield f"L1: the owners of {leaf} have {total}, and it has {memory['used_bytes']}"
        for row in device["processes"]:
            yield from _process(row, leaf, window)


def _process(row: Mapping[str, Any], leaf: str, window: Window) -> Iterator[str]:
    found = [(t, t.processes[row["pid"]]) for t in window.truths if row["pid"] in t.processes]
    found = [(truth, one) for truth, one in found if one.leaf == leaf]
    if not found:
        yield f"L6: process {row['pid']} is on {leaf}, and does not exist"
        return
    word = row["owner"]
    right = {owner(one, truth) for truth, one in found}
    if window.listed is not window.truths:
        right |= {owner(one, truth) for _, one in found for truth in window.listed} & {"assigned"}
    if word not in right | {"unknown"}:
        yield f"L10: process {row['pid']} on {leaf} is {word}, and is {right}"
    if word in ("unassigned", "gone") and window.always("no kubelet"):
        yield f"L6: process {row['pid']} on {leaf} is {word} without a List"
    names = {(one.pod.full, one.container) if one.pod else (None, "") for _, one in found}
    if row["namespace"] is not None and not any(
        full == (row["namespace"], row["pod"]) and row["container"] in ("", None, container)
        for full, container in names
    ):
        yield f"L4: process {row['pid']} is of {row['namespace']}/{row['pod']}/{row['container']}, and is of {names}"


def missing_in_map(document: Mapping[str, Any], agent: str, truths: Sequence[Truth]) -> Iterator[str]:
    """Processes that ran all the time with one owner, and have another one or none in the map."""
    broken: set[str] = set()
    for truth in truths:
        broken |= truth.broken(agent, or_recovering=True)
    if broken & EVERYTHING:
        return
    shown = {(row["pid"], device["uuid"]): row for device in document["devices"] for row in device["processes"]}
    for pid, one in truths[0].processes.items():
        words = {owner(t.processes[pid], t) if t.processes.get(pid) == one else "" for t in truths}
        if len(words) > 1 or words & {"", "gone"} or gpu_of(one.leaf) in broken:
            continue
        row = shown.get((pid, one.leaf))
        if row is None or {row["owner"]} != words or row["memory_bytes"] != one.memory_bytes:
            yield f"process {pid} is {row}, and is {words} of {one}"


def disagreement(page: Page, document: Mapping[str, Any]) -> Iterator[str]:
    """Where the page and the map of one snapshot differ."""
    pairs: tuple[tuple[str, str, Callable[[Mapping[str, Any]], object]], ...] = (
        (USED, "users", lambda row: row["memory_bytes"]),
        (ALLOCATION, "holders", lambda row: 1),
    )
    for name, part, read in pairs:
        in_map = {
            key(
                name, namespace=row["namespace"], pod=row["pod"], container=row["container"], uuid=device["uuid"]
            ): read(row)
            for device in document["devices"]
            for row in device[part]
            if read(row) is not None
        }
        on_page = {(name, labels): value for labels, value in page.samples.get(name, {}).items()}
        if in_map != on_page:
            yield f"{name}: the map has {in_map.items() - on_page.items()}, the page {on_page.items() - in_map.items()}"


# --- counters ---------------------------------------------------------------------------------------------------------

_KEPT = ("gpumap_gpu_energy_joules_", "gpumap_gpu_clock_event_", "gpumap_gpu_ecc_", "gpumap_gpu_nvlink_")
"""Counters of the driver, which a restart of gpumap does not change."""
_EXPIRES_SECONDS = 280.0
"""gpumap forgets after 300 s between two readings of the driver, and a reading may be a second (20 s of the fast clock)
before its page."""


class Counters:
    """The counters of one agent over all of its lives. `checked` counts the values."""

    def __init__(self) -> None:
        self._last: dict[Key, float] = {}
        self._present: dict[Labels, float] = {}
        self._collections = 0.0
        self.checked = 0

    def restarted(self) -> None:
        """The agent is another process: its own counters begin at 0."""
        self._last = {one: value for one, value in self._last.items() if one[0].startswith(_KEPT)}

    def check(self, page: Page, at: float) -> Iterator[str]:
        """Find what fell. A container's counters end five minutes after it was last on the device.

        If it uses the device again, they begin at 0. Only if the poll missed a collection they may be further, or be
        there without that use.
        """
        families = re.findall(r"^# TYPE (\S+) (counter|summary)$", page.text, re.MULTILINE)
        names = [name + end for name, kind in families for end in (("",) if kind == "counter" else ("_sum", "_count"))]
        missed_none = page.collections == self._collections + 1
        users = {labels for name in (USED, ALLOCATION) for labels in page.samples.get(name, {})}
        away = {labels: at - seen for labels, seen in self._present.items()}
        ended = {labels for labels, seconds in away.items() if seconds >= _EXPIRES_SECONDS}
        for name in names:
            for labels, value in page.samples.get(name, {}).items():
                before = self._last.get((name, labels), 0.0)
                if value < before and not (labels in ended and (value == 0 or not missed_none)):
                    seconds = away.get(labels, 0.0)
                    yield f"L9: {name}{_text(labels)} fell from {before} to {value}, {seconds:.1f} s after its use"
                elif value > before and any(label == "container" for label, _ in labels):
                    users.add(labels)  # it was on the device, also if the poll missed that
                self._last[name, labels] = value
                self.checked += 1
        # One that is not on the page any more begins at 0.
        self._last = {
            (name, labels): value
            for (name, labels), value in self._last.items()
            if labels not in ended or labels in page.samples.get(name, {})
        }
        self._present |= dict.fromkeys(users, at)
        self._collections = page.collections


__all__ = ["CARDS", "Counters", "Window", "disagreement", "facts", "missing", "missing_in_map", "wrong", "wrong_map"]
