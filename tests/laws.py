"""The laws of the contract, judged by what gpumap served and by what truly was: the oracle of every level of tests.

| function | what it needs | what it finds |
|---|---|---|
| `exposed.Page(text)` | a page | what breaks the format (L8), by raising |
| `inconsistent` | a page | what no node can have |
| `lost` | a page, the List | ids of devices that are nowhere (L5) |
| `wrong`, `wrong_map` | a page or map, its window | what was not so at any moment; absent and unknown are right |
| `missing`, `missing_in_map` | the same | what was so all the time, needs no broken part, and is not there |
| `disagreement` | page and map of one snapshot | where they differ |
| `Counters` | the pages of one agent | counters that fell (L9) |

Each finding is a text that begins with the law. Each way to run gpumap (a generated
node, the soak, the live cluster) has its own truth, and gives a `Window` of it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpumap.model.observations import DeviceId, ListedPod
from gpumap.model.terms import ContainerName
from tests.exposed import Labels, Page

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


# --- the laws ---------------------------------------------------------------------------------------------------------


Key = tuple[str, Labels]

USED = "gpumap_container_gpu_memory_used_bytes"
PROCESSES = "gpumap_container_gpu_processes"
UNASSIGNED = "gpumap_container_unassigned_use"
ALLOCATION = "gpumap_allocation_info"
SLOTS = "gpumap_allocation_slots"
UNMATCHED = "gpumap_unmatched_slots"
SHARE = "gpumap_container_allocated_gpus"
DEVICE = "gpumap_device_info"
DEVICE_USED = "gpumap_device_memory_used_bytes"
DEVICE_PROCESSES = "gpumap_device_processes"
BY_OWNER = "gpumap_device_memory_used_by_owner_bytes"
HOLDERS = "gpumap_device_holders"
UP = "gpumap_gpu_up"
SINCE = "gpumap_finding_since_timestamp_seconds"
WASTE = "gpumap_finding_memory_bytes"

SOURCES = {
    "kubelet": {"kubelet"},
    "nvml": {"nvml"},
    "procfs": {"proc"},
    "pod_identity": {"checkpoint", "logs"},
}
"""The parts of the node that each source needs."""
IDENTITY = frozenset({"proc", "checkpoint", "logs"})
"""Without one of these, gpumap may know only some of a container's processes."""
EVERYTHING = frozenset({"page", "kubelet", "nvml", *IDENTITY})
JUDGED = ("assigned", "unassigned", "gone", "host")
"""Owners that follow from what a container holds."""


def key(family: str, /, **labels: str) -> Key:
    return family, frozenset(labels.items())


def text_of(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(labels)) + "}"


def name_of(row: Mapping[str, Any]) -> ContainerName:
    return ContainerName(row["namespace"], row["pod"], row["container"])


def labels_of(name: ContainerName, leaf: str) -> dict[str, str]:
    return {"namespace": name.namespace, "pod": name.pod, "container": name.container, "uuid": leaf}


# --- a page -----------------------------------------------------------------------------------------------------------


def inconsistent(page: Page) -> Iterator[str]:
    """Find what no node can have."""
    sums = _sums(page, BY_OWNER)
    for row, used in page.rows(DEVICE_USED):
        leaf = row["uuid"]
        if leaf in sums and sums[leaf] != used:
            yield f"L1: the owners of {leaf} have {sums[leaf]:.0f}, and it has {used:.0f}"
    hosts = _sums(page, "gpumap_host_gpu_processes")
    for leaf, count in page.by(DEVICE_PROCESSES, "uuid", owner="host").items():
        if hosts and hosts[leaf] != count:
            yield f"L1: {count} processes of the host are on {leaf}, and its workloads have {hosts[leaf]}"
    parents = {row["uuid"]: row["gpu_uuid"] for row, _ in page.rows(DEVICE)}
    for leaf, gpu in parents.items():
        if leaf != gpu and gpu in parents:
            yield f"L4: {gpu} is a device beside its part {leaf}"
    if page.samples.get("gpumap_finding_judged"):
        yield from _inconsistent_findings(page, parents)
    shares: defaultdict[str, float] = defaultdict(float)
    for row, value in page.rows(SHARE):
        shares[parents.get(row["uuid"], row["uuid"])] += value
    yield from (f"L9: {value} of {gpu} are allocated" for gpu, value in shares.items() if value > 1 + 1e-9)
    for name in page.samples:
        least = min(page.samples[name].values()) if name in page.counters else 0
        if name.startswith("gpumap_") and least < 0:
            yield f"L9: the counter {name} has {least}"
        if name.startswith("gpumap_container_sm_util") and any(
            row["uuid"].startswith("MIG-") for row, _ in page.rows(name)
        ):
            yield f"L3: {name} of a MIG device"
        if name.startswith("gpumap_container_") and name.endswith("_ratio"):
            yield from (f"L9: {name} has {value}" for value in page.samples[name].values() if not 0 <= value <= 1)


def _inconsistent_findings(page: Page, parents: Mapping[str, str]) -> Iterator[str]:
    """Find findings that contradict the other series of their page. `parents` are the GPUs of leaves."""
    found: defaultdict[str, set[tuple[ContainerName, str]]] = defaultdict(set)
    for row, _ in page.rows(SINCE):
        found[row["finding"]].add((name_of(row), row["uuid"]))
    holders = {(name_of(row), row["uuid"]) for row, _ in page.rows(ALLOCATION)}
    holding_pods = {(name.pod_name, uuid) for name, uuid in holders}
    users = {(name_of(row), row["uuid"]) for row, _ in page.rows(UNASSIGNED)}
    accused = {
        (name, uuid)
        for name, uuid in users
        if not holding_pods & {(name.pod_name, uuid), (name.pod_name, parents.get(uuid, uuid))}
    }
    if found["squatter"] != accused:
        yield f"L11: the squatters are {found['squatter']}, and {accused} use what they do not hold"
    for kind in ("over", "stalled", "idle", "maybe_idle", "unused"):
        yield from (f"L11: {one} is {kind}, and holds nothing" for one in found[kind] - holders)
    down = {row["gpu_uuid"] for row, value in page.rows(UP) if value == 0}
    yield from (f"L11: {gpu} is down, and is no fault" for gpu in down - {uuid for _, uuid in found["fault"]})
    faulty: Counter[str] = Counter()
    for row, value in page.rows("gpumap_finding_gpus"):
        if row["finding"] == "fault" and row["uuid"]:
            faulty[row["uuid"]] += int(value)
    yield from (f"L9: {gpu} counts {number} times as broken" for gpu, number in faulty.items() if number != 1)
    totals = {row["gpu_uuid"]: value for row, value in page.rows("gpumap_gpu_memory_total_bytes")}
    parents = {row["uuid"]: row["gpu_uuid"] for row, _ in page.rows(DEVICE)}
    wasted: defaultdict[str, float] = defaultdict(float)
    for row, value in page.rows(WASTE):
        if row["finding"] in ("idle", "unused"):
            wasted[parents.get(row["uuid"], row["uuid"])] += value
    for gpu, value in wasted.items():
        if value > totals.get(gpu, value):
            yield f"L11: {value} of {gpu} are not used, and it has {totals[gpu]}"


def _sums(page: Page, family: str) -> defaultdict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for row, value in page.rows(family):
        sums[row["uuid"]] += value
    return sums


def slots(page: Page) -> Counter[tuple[ContainerName, str]]:
    """The slots of each container and resource, on devices and without one."""
    found: Counter[tuple[ContainerName, str]] = Counter()
    for family in (SLOTS, UNMATCHED):
        for row, value in page.rows(family):
            found[name_of(row), row["resource"]] += int(value)
    return found


def ids_of(pods: Iterable[ListedPod], is_gpu: Callable[[str, DeviceId], bool]) -> Counter[tuple[ContainerName, str]]:
    """Count the ids of GPUs in a List, by container and resource."""
    ids: Counter[tuple[ContainerName, str]] = Counter()
    for pod in pods:
        for container in pod.containers:
            name = ContainerName(pod.namespace, pod.name, container.name)
            for devices in container.devices:
                ids[name, devices.resource] += sum(1 for one in devices.ids if is_gpu(devices.resource, one))
    return ids


def lost(page: Page, ids: Mapping[tuple[ContainerName, str], int]) -> Iterator[str]:
    """Find ids of devices in the List that are nowhere on the page."""
    shown = slots(page)
    yield from (f"L5: {one} has {count} ids, the page {shown[one]}" for one, count in ids.items() if shown[one] < count)


def unproven(page: Page, *, has_list: bool, answered: bool) -> Iterator[str]:
    """Find holders without a List that is young enough, and accusations while the kubelet does not answer."""
    if not has_list:
        yield from (f"L6: {row} holds it, and no List is young enough" for row, _ in page.rows(ALLOCATION))
    if not answered:
        yield from (f"L6: {row} is accused without a List" for row, _ in page.rows(UNASSIGNED))
        owners = (row for row, value in page.rows(DEVICE_PROCESSES) if value)
        yield from (f"L6: {row} without a List" for row in owners if row["owner"] in ("unassigned", "gone"))


# --- what is wrong ----------------------------------------------------------------------------------------------------


def wrong(page: Page, window: Window) -> Iterator[str]:
    """Find what the page shows and was not so at any moment of its window."""
    yield from inconsistent(page)
    yield from unproven(page, has_list=window.has_list, answered="no kubelet" not in window.down)
    yield from _wrong_sources(page, window)
    yield from _wrong_allocations(page, window)
    yield from _wrong_use(page, window)
    yield from _wrong_rows(page, window)
    yield from _wrong_accusations(page, window)
    yield from _wrong_owners(page, window)
    yield from _wrong_devices(page, window)
    for row, _ in page.rows("gpumap_pod_info"):
        yield from _wrong_pod(row, window)


def _wrong_sources(page: Page, window: Window) -> Iterator[str]:
    for source, part in (("kubelet", "no kubelet"), ("nvml", "no nvml"), ("procfs", "no proc")):
        if part in window.down and page.up(source):
            yield f"L6: {source} is up, and did not answer"
    for gpu, value in page.by(UP, "gpu_uuid").items():
        if value and _is_lost(gpu, window):
            yield f"L6: {gpu} is up, and is lost"


def _is_lost(leaf: str, window: Window) -> bool:
    return "no nvml" in window.down or f"lost {window.gpu_of(leaf)}" in window.down


def _wrong_allocations(page: Page, window: Window) -> Iterator[str]:
    for family in (ALLOCATION, SLOTS):
        for row, _ in page.rows(family):
            name, leaf = name_of(row), row["uuid"]
            if not window.may_hold(name, leaf) or (family == SLOTS and not window.was_assigned(name, leaf)):
                yield f"L6: {name} does not hold {leaf}"
    for row, _ in page.rows(UNMATCHED):
        if (row["namespace"], row["pod"]) not in {(one.namespace, one.name) for one in window.pods}:
            yield f"L6: {row} is of no pod"
    for row, value in page.rows(SHARE):
        given = [one.gpus for one in window.holding(name_of(row), row["uuid"])]
        if given and not any(one is None or abs(value - one) < 1e-9 for one in given):
            yield f"L9: {row} has {value} of the GPU, and was given {given}"
    for leaf, value in page.by(HOLDERS, "uuid").items():
        of_leaf = {leaf, window.gpu_of(leaf)}
        holdings = [one for one in window.holdings if one.leaf in of_leaf and not one.of_init_container]
        least, most = ({one.name for one in held} for held in (filter(window.is_listed, holdings), holdings))
        if value < len(least) or (value > len(most) and not window.unknown_holdings and not window.shared):
            yield f"L10: {leaf} has {value:.0f} holders, and {len(least)} to {len(most)} are true"


def _wrong_use(page: Page, window: Window) -> Iterator[str]:
    """Memory and processes of a container are those of its own processes, at one moment; 0 only without any.

    Of two instances of a pod, one of which ends, the name is that of either.
    """
    for labels in page.samples.get(USED, {}).keys() | page.samples.get(PROCESSES, {}).keys():
        row = dict(labels)
        name, leaf = name_of(row), row["uuid"]
        shown = page.samples.get(USED, {}).get(labels), page.samples.get(PROCESSES, {}).get(labels)
        if _is_lost(leaf, window):
            yield f"L6: {name} is measured on {leaf}, and that is lost"
        if "no PIDs" in window.down:
            yield f"L2: {name} is measured without PIDs"
        own = window.on(leaf, name)
        pods = {one.pod for one in own} | {one.pod for one in window.holding(name, leaf)}
        states: set[tuple[int | None, int]] = {(0, 0)} if window.may_hold(name, leaf) and not own else set()
        for pod in pods:
            states |= _states([one for one in own if one.pod is pod], name, leaf, window)
        if not any(shown[0] in (None, size) and shown[1] in (None, count) for size, count in states):
            law = "L10" if 0 in shown else "L4"
            yield f"{law}: {name} has {shown} (bytes, processes) on {leaf}; true are {states}"


def _states(own: Sequence[Process], name: ContainerName, leaf: str, window: Window) -> set[tuple[int | None, int]]:
    if name.container and not IDENTITY & {*window.touched} and not any(one.is_hidden for one in own):
        return window.states(own, leaf)
    least = 1 if any(window.is_settled(one) for one in own) else 0
    return {total(some, leaf) for some in subsets(own) if len(some) >= least}


def _wrong_rows(page: Page, window: Window) -> Iterator[str]:
    """Every series of a container is of one that holds or uses the device; a counter may be of an earlier one."""
    for family, samples in page.samples.items():
        if not family.startswith("gpumap_container_"):
            continue
        for row in map(dict, samples):
            name, leaf = name_of(row), row.get("uuid", "")
            known = not leaf or window.may_hold(name, leaf) or window.on(leaf, name)
            if not known and not (family.endswith("_total") and _was_there(name, leaf, window)):
                yield f"L6: {family} {row}, and no such container is on the device"
    for row, _ in page.rows("pod_and_gpu_map_info"):
        held = (one for one in window.holdings if one.name[:2] == (row["namespace"], row["pod_name"]))
        if row["gpu_id"] not in {one.leaf for one in held} and not window.unknown_holdings:
            yield f"L6: pod_and_gpu_map_info {row}, and it holds nothing there"


def _was_there(name: ContainerName, leaf: str, window: Window) -> bool:
    return window.earlier is None or any(there == leaf and is_of(one, name) for one, there in window.earlier)


def _wrong_accusations(page: Page, window: Window) -> Iterator[str]:
    for row, _ in page.rows(UNASSIGNED):
        leaf = row["uuid"]
        if not any("unassigned" in window.owners(one, leaf) for one in window.on(leaf, name_of(row))):
            yield f"L10: {row} is accused, and is not guilty"


def _wrong_owners(page: Page, window: Window) -> Iterator[str]:
    """No owner has more than the processes of which it is true."""
    for family, which in ((BY_OWNER, 0), (DEVICE_PROCESSES, 1)):
        for row, value in page.rows(family):
            owner, leaf = row["owner"], row["uuid"]
            if value and "no PIDs" in window.down and owner not in ("unknown", "unaccounted", "sibling"):
                yield f"L2: {owner} has {value:.0f} on {leaf} without PIDs"
            if owner not in JUDGED or value == 0:
                continue
            there = [one for one in window.on(leaf) if owner in window.owners(one, leaf)]
            most = max(state[which] or 0 for state in window.states(there, leaf))
            if value > most and not any(None in one.uses.values() for one in there):
                yield f"L1: {owner} has {value:.0f} on {leaf} ({family}), and at most {most} are true"


def _wrong_devices(page: Page, window: Window) -> Iterator[str]:
    for leaf, value in page.by(DEVICE_USED, "uuid").items():
        if _is_lost(leaf, window):
            yield f"L6: {leaf} is measured, and is lost"
        base = window.base_bytes.get(leaf)
        if base is None and window.base_bytes:
            yield f"L6: {leaf} is measured, and does not exist"
        elif base is not None and value not in {base + (size or 0) for size, _ in window.states(window.on(leaf), leaf)}:
            yield f"L6: {leaf} has {value:.0f} bytes, and never had"
    counts: Counter[str] = Counter()
    for row, value in page.rows(DEVICE_PROCESSES):
        counts[row["uuid"]] += int(value) if row["owner"] != "sibling" else 0
    for leaf, count in counts.items():
        if count not in {number for _, number in window.states(window.on(leaf), leaf)}:
            yield f"L5: {leaf} has {count} processes, and never had"


def _wrong_pod(row: Mapping[str, Any], window: Window) -> Iterator[str]:
    """A pod that is shown holds or uses a device, and its UID is its own."""
    there = {*window.pods, *(one.pod for one in window.holdings), *(one.pod for one in window.processes if one.pod)}
    uids = {pod.uid for pod in there if (pod.namespace, pod.name) == (row["namespace"], row["pod"])}
    if not uids or (row["uid"] and not {row["uid"], ""} & uids):
        yield f"L4: {row} is no pod of the node; pods of that name have the UIDs {uids}"


def wrong_map(document: Mapping[str, Any], window: Window) -> Iterator[str]:
    """Find what /api/v1/map reports and was not so at any moment of its window."""
    for device in document["devices"]:
        leaf = device["uuid"]
        for row in device["processes"]:
            yield from _wrong_process(row, leaf, window)
        for row in device["containers"]:
            if row["grant"] is not None and not window.may_hold(name_of(row), leaf):
                yield f"L6: {name_of(row)} does not hold {leaf}"
    for row in document["pods"]:
        yield from _wrong_pod(row, window)


def _wrong_process(row: Mapping[str, Any], leaf: str, window: Window) -> Iterator[str]:
    what = f"process {row['pid']} on {leaf}"
    found = [one for one in window.on(leaf) if one.pid == row["pid"]]
    if not found:
        yield f"L6: {what} does not exist"
        return
    right = {"unknown"}.union(*(window.owners(one, leaf) for one in found))
    if row["owner"] not in right:
        yield f"L10: {what} is {row['owner']}, and is {right}"
    if row["owner"] in ("unassigned", "gone") and "no kubelet" in window.down:
        yield f"L6: {what} is {row['owner']} without a List"
    if row["memory_bytes"] not in {None, *(one.uses[leaf] for one in found)}:
        yield f"L6: {what} has {row['memory_bytes']} bytes, and never had"
    if row["namespace"] is not None:
        shown = ContainerName(row["namespace"], row["pod"], row["container"] or "")
        if not any(is_of(one.name, shown) for one in found):
            yield f"L4: {what} is of {shown}, and is of {[one.name for one in found]}"


# --- what is missing --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """A sample that the page must have if the parts in `needs` work."""

    value: float
    needs: frozenset[str]


def facts(window: Window) -> dict[Key, Fact]:
    """What was so all the time, so that the page must show it. Not what a left-over process makes uncertain."""
    found: dict[Key, Fact] = {}
    for source, parts in SOURCES.items():
        found[key("gpumap_source_up", source=source)] = Fact(1.0, frozenset({"page", *parts}))
    for gpu in {*window.leaves.values()}:
        found[key(UP, gpu_uuid=gpu)] = Fact(1.0, frozenset({"page", "nvml", gpu}))
    for leaf in window.leaves:
        found |= _facts_of_device(leaf, window)
    rows = [(one.name, one.leaf, one.pod) for one in window.holdings]
    rows += [(one.name, leaf, one.pod) for one in window.processes for leaf in one.uses if one.name and one.pod]
    names: defaultdict[ContainerName, set[Pod]] = defaultdict(set)
    for name, _, pod in rows:
        names[name._replace(container="")].add(pod)
    for name, leaf, _ in rows:
        if len(names[name._replace(container="")]) == 1:
            found |= _facts_of_container(name, leaf, window)
    return found


def _facts_of_device(leaf: str, window: Window) -> Iterator[tuple[Key, Fact]]:
    there = window.on(leaf)
    base = window.base_bytes.get(leaf)
    if not all(map(window.is_settled, there)):
        return
    needs = frozenset({"page", "nvml", leaf, window.gpu_of(leaf)})
    size, _ = total(there, leaf)
    if base is not None and size is not None:
        yield key(DEVICE_USED, uuid=leaf), Fact(base + size, needs)
        yield key(BY_OWNER, uuid=leaf, owner="unaccounted"), Fact(base, needs | EVERYTHING)
    owners = [window.owners(one, leaf) for one in there]
    if all(len(words) == 1 for words in owners):
        for word in (*JUDGED, "unknown"):
            size, count = total([one for one, words in zip(there, owners, strict=True) if word in words], leaf)
            yield key(DEVICE_PROCESSES, uuid=leaf, owner=word), Fact(count, needs | EVERYTHING)
            if size is not None:
                yield key(BY_OWNER, uuid=leaf, owner=word), Fact(size, needs | EVERYTHING)


def _facts_of_container(name: ContainerName, leaf: str, window: Window) -> Iterator[tuple[Key, Fact]]:
    labels = labels_of(name, leaf)
    held = [one for one in window.holding(name, leaf) if one.leaf == leaf and window.is_listed(one)]
    for one in held:
        needs = frozenset({"page", "kubelet"})
        yield key(ALLOCATION, **labels), Fact(1.0, needs)
        for resource in one.slots:
            count = sum(other.slots.get(resource, 0) for other in held)
            yield key(SLOTS, **labels, resource=resource), Fact(count, needs)
    own, there = window.on(leaf, name), window.on(leaf)
    if (
        name in window.unknown_holdings
        or leaf not in window.leaves
        or not all(map(window.is_settled, own or there))
        or not (own or held)
    ):
        return
    needs = EVERYTHING | {leaf, window.gpu_of(leaf)}
    size, count = total(own, leaf)
    yield key(PROCESSES, **labels), Fact(count, needs)
    if size is not None:
        yield key(USED, **labels), Fact(size, needs)
    if any(window.owners(one, leaf) == {"unassigned"} for one in own):
        yield key(UNASSIGNED, **labels), Fact(1.0, needs)


def missing(page: Page, window: Window, *, besides: Collection[str] = ()) -> Iterator[str]:
    """Find what the page lacks, or has with another value, although it was so all the time.

    `besides` are families that may need more than one collection.
    """
    for (family, labels), fact in facts(window).items():
        if family in besides:
            continue
        shown = page.samples.get(family, {}).get(labels)
        if shown != fact.value and not fact.needs & {*window.touched}:
            yield f"L3: {family}{text_of(labels)} is {'absent' if shown is None else shown}, and is {fact.value}"


def missing_in_map(document: Mapping[str, Any], window: Window) -> Iterator[str]:
    """Find processes that ran all the time with one owner, and have another one or none in the map."""
    if EVERYTHING & {*window.touched}:
        return
    shown = {(row["pid"], device["uuid"]): row for device in document["devices"] for row in device["processes"]}
    for one in filter(window.is_settled, window.processes):
        for leaf, size in one.uses.items():
            words = window.owners(one, leaf)
            if len(words) > 1 or {leaf, window.gpu_of(leaf)} & {*window.touched}:
                continue
            row = shown.get((one.pid, leaf))
            if row is None or {row["owner"]} != words or row["memory_bytes"] != size:
                yield f"L3: process {one.pid} is {row}, and is {words} of {one.name}"


def disagreement(page: Page, document: Mapping[str, Any]) -> Iterator[str]:
    """Find where the page and the map of one snapshot differ."""
    for device in document["devices"]:
        memory, owners = device["memory"], device["owners"]
        if memory is not None and owners and sum(one["memory_bytes"] or 0 for one in owners) != memory["used_bytes"]:
            yield f"L1: the owners of {device['uuid']} have {owners} in the map, and it has {memory['used_bytes']}"
    reads: tuple[tuple[str, Callable[[Mapping[str, Any]], object]], ...] = (
        (USED, lambda row: row["use"] and row["use"]["memory_bytes"]),
        (ALLOCATION, lambda row: None if row["grant"] is None else 1),
    )
    for family, read in reads:
        in_map = {
            key(family, **labels_of(name_of(row), device["uuid"])): read(row)
            for device in document["devices"]
            for row in device["containers"]
            if read(row) is not None
        }
        on_page = {(family, labels): value for labels, value in page.samples.get(family, {}).items()}
        if in_map != on_page:
            yield f"L11: {family}: map {in_map.items() - on_page.items()}, page {on_page.items() - in_map.items()}"
    of_map = {
        (one["finding"], one["reason"], *name_of(one), one["uuid"] or ""): (one["gpus"], one["memory_bytes"])
        for one in document.get("findings") or ()
    }
    of_page = {
        tuple(row[label] for label in ("finding", "reason", "namespace", "pod", "container", "uuid")): tuple(
            page.samples.get(family, {}).get(frozenset(row.items())) for family in ("gpumap_finding_gpus", WASTE)
        )
        for row, _ in page.rows(SINCE)
    }
    if of_map != of_page:
        yield f"L11: findings: map {of_map.items() - of_page.items()}, page {of_page.items() - of_map.items()}"


# --- counters ---------------------------------------------------------------------------------------------------------

_KEPT = ("gpumap_gpu_energy_joules_", "gpumap_gpu_clock_event_", "gpumap_gpu_ecc_", "gpumap_gpu_nvlink_")
"""Counters of the driver, which a restart of gpumap does not change."""


class Counters:
    """The counters of one agent over all of its lives. `checked` counts the values.

    A container's counters end `expires_seconds` after it was last on the device.
    """

    def __init__(self, expires_seconds: float) -> None:
        self._expires_seconds = expires_seconds
        self._last: dict[Key, float] = {}
        self._present: dict[Labels, float] = {}
        self._collections = 0.0
        self.checked = 0

    def restarted(self) -> None:
        """The agent is another process: its own counters begin at 0."""
        self._last = {one: value for one, value in self._last.items() if one[0].startswith(_KEPT)}

    def check(self, page: Page, at: float) -> Iterator[str]:
        """Find what fell.

        If a container uses the device again, its counters begin at 0. Only if the poll missed a collection they may be
        further, or be there without that use.
        """
        missed_none = page.collections == self._collections + 1
        users = {labels for family in (USED, ALLOCATION) for labels in page.samples.get(family, {})}
        away = {labels: at - seen for labels, seen in self._present.items()}
        ended = {labels for labels, seconds in away.items() if seconds >= self._expires_seconds}
        for family in page.counters:
            for labels, value in page.samples.get(family, {}).items():
                before = self._last.get((family, labels), 0.0)
                if value < before and not (labels in ended and (value == 0 or not missed_none)):
                    seconds = away.get(labels, 0.0)
                    yield f"L9: {family}{text_of(labels)} fell from {before} to {value}, {seconds:.1f} s after its use"
                elif value > before and any(label == "container" for label, _ in labels):
                    users.add(labels)  # it was on the device, also if the poll missed that
                self._last[family, labels] = value
                self.checked += 1
        # One that is not on the page any more begins at 0.
        self._last = {
            (family, labels): value
            for (family, labels), value in self._last.items()
            if labels not in ended or labels in page.samples.get(family, {})
        }
        self._present |= dict.fromkeys(users, at)
        self._collections = page.collections
