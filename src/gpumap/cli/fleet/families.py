"""Which of gpumap's series each part of a node's document needs, and the question that asks a server for them. Pure.

A GPU's uuid is one GPU's alone, in all clusters: most series are asked for by uuid, without the labels of their target.
So answers are small, and two Prometheus servers, or two agents of one node for a while, are no two rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

HOLDERS = "holders"
"""Who holds what: slots on devices, and on none."""
SHARES = "shares"
"""Shares of GPUs that were given."""
GRANTS = "grants"
"""Memory that was granted."""
OFFERS = "offers"
"""Slots that the kubelet offers on each device."""
USE = "use"
"""Memory and processes of containers, and who uses what it was not given. Needs HOLDERS, to say who holds it."""
PEAKS = "peaks"
"""The most memory that containers used."""
ACTIVITY = "activity"
"""SM time of containers."""
LAST_SEEN = "last seen"
"""When containers last had SM time."""
LEFTOVERS = "leftovers"
"""Memory and processes of pods that are gone."""
OTHERS = "others"
"""What is used by no container; LEFTOVERS are in it."""
OWNERS = "owners"
"""Memory and processes by owner, containers' too; OTHERS are in it."""
TAKEN = "taken"
"""How much of each device's memory is in use, by whomever."""
HEALTH = "health"
"""What no table shows: GPUs' load, memory that the driver keeps, how long its calls hang, all capabilities."""
ALL = frozenset({HOLDERS, SHARES, GRANTS, OFFERS, USE, PEAKS, ACTIVITY, LAST_SEEN, OWNERS, TAKEN, HEALTH})
"""Devices, their sizes, whether GPUs answer, and the sources' health come with any of them."""

SNAPSHOT = "gpumap_snapshot_timestamp_seconds"
"""Every gpumap has just one, and it has no labels but those of its target."""
CONTAINER = ("namespace", "pod", "container")
_SEEN_FOR = "5m"
"""As far as a server looks back for a series' newest sample, by default."""
_KNOWN_FOR = "1h"


class Family(NamedTuple):
    """Series of one name, of those with `only`, and of these the values that are `kept`; their own labels in `by`.

    `of_target`: rows tell which target they are of. `always`: of those with it, any value is kept. Without a `part`
    they are always asked for.
    """

    name: str
    by: tuple[str, ...]
    part: str = ""
    of_target: bool = False
    only: str = ""
    kept: str = ""
    always: str = ""


_ON_DEVICE = (*CONTAINER, "uuid")
_OF_OTHERS = 'owner!~"assigned|unassigned"'
_OF_GONE = 'owner="gone"'
_OF_NONE = 'owner=""'

DEVICE_INFO = Family(
    "gpumap_device_info",
    (
        *("uuid", "gpu_uuid", "index", "minor", "pci_bus_id", "model"),
        *("mig_profile", "gpu_instance_id", "compute_instance_id"),
    ),
    of_target=True,
)
DRIVER_INFO = Family("gpumap_driver_info", ("driver_version", "cuda_version", "nvml_version"), of_target=True)
DEVICELESS = Family(
    "gpumap_gpu_without_device_info", ("uuid", "index", "minor", "pci_bus_id", "model", "reason"), of_target=True
)
"""Its `uuid` is empty where the GPU has not told it."""
NODE_INFO = Family("gpumap_node_info", ("node", "internal_ip"), of_target=True)
SOURCE_UP = Family("gpumap_source_up", ("source",), of_target=True)
SOURCE_SUCCESS = Family(
    "gpumap_source_last_success_timestamp_seconds", ("source",), of_target=True, only='source="kubelet"'
)
CAPABILITY = Family("gpumap_capability", ("capability",), of_target=True, only='capability="pid_visibility"')
MEMORY_TOTAL = Family("gpumap_device_memory_total_bytes", ("uuid",))
MEMORY_USED = Family("gpumap_device_memory_used_bytes", ("uuid",), TAKEN)
MEMORY_RESERVED = Family("gpumap_device_memory_reserved_bytes", ("uuid",), HEALTH)
GPU_MEMORY_TOTAL = Family("gpumap_gpu_memory_total_bytes", ("uuid",))
GPU_MEMORY_USED = Family("gpumap_gpu_memory_used_bytes", ("uuid",), TAKEN)
GPU_DOWN = Family("gpumap_gpu_up", ("uuid",), of_target=True, kept="== 0")
GPU_FAULT = Family("gpumap_gpu_fault_info", ("uuid", "reason"))
SLOTS = Family("gpumap_allocation_slots", (*_ON_DEVICE, "resource"), HOLDERS)
HOLDER_COUNT = Family("gpumap_device_holders", ("uuid",), HOLDERS, of_target=True)
"""It stands, with 0 too, on each device of which it is known who holds it."""
ALLOCATED_GPUS = Family("gpumap_container_allocated_gpus", _ON_DEVICE, SHARES)
ALLOCATED_MEMORY = Family("gpumap_container_allocated_gpu_memory_bytes", _ON_DEVICE, GRANTS)
UNMATCHED = Family("gpumap_unmatched_slots", (*CONTAINER, "resource", "reason"), HOLDERS, of_target=True)
ALLOCATABLE = Family("gpumap_device_slots_allocatable", ("uuid", "resource"), OFFERS, of_target=True)
PROCESSES = Family("gpumap_container_gpu_processes", _ON_DEVICE, USE)
USED = Family("gpumap_container_gpu_memory_used_bytes", _ON_DEVICE, USE)
UNASSIGNED = Family("gpumap_container_unassigned_use", _ON_DEVICE, USE)
PEAK = Family("gpumap_container_gpu_memory_peak_bytes", _ON_DEVICE, PEAKS)
SM = Family("gpumap_container_sm_utilization_ratio", _ON_DEVICE, ACTIVITY)
LAST_ACTIVE = Family("gpumap_container_last_active_timestamp_seconds", _ON_DEVICE, LAST_SEEN)
OWNER_BYTES = Family(
    *("gpumap_device_memory_used_by_owner_bytes", ("uuid", "owner"), OWNERS), kept="!= 0", always='owner="unaccounted"'
)
OWNER_PROCESSES = Family("gpumap_device_processes", ("uuid", "owner"), OWNERS, kept="!= 0", always='owner="unknown"')
"""What is `always` kept stands, with 0 too, on each device of which it is known who uses it."""
UTILIZATION = Family("gpumap_gpu_utilization_ratio", ("uuid",), HEALTH)
STUCK = Family("gpumap_nvml_stuck_seconds", ("uuid",), HEALTH, kept="> 0")
POD_INFO = Family("gpumap_pod_info", ("namespace", "pod", "pod_uid"), HEALTH, of_target=True)

FAMILIES = (
    *(
        DEVICE_INFO,
        DRIVER_INFO,
        DEVICELESS,
        SOURCE_UP,
        SOURCE_SUCCESS,
        CAPABILITY,
        MEMORY_TOTAL,
        MEMORY_USED,
        MEMORY_RESERVED,
    ),
    *(GPU_MEMORY_TOTAL, GPU_MEMORY_USED, GPU_DOWN, GPU_FAULT),
    *(SLOTS, HOLDER_COUNT, ALLOCATED_GPUS, ALLOCATED_MEMORY, UNMATCHED, ALLOCATABLE, POD_INFO),
    *(PROCESSES, USED, UNASSIGNED, PEAK, SM, LAST_ACTIVE, OWNER_BYTES, OWNER_PROCESSES, UTILIZATION, STUCK),
)
"""All but NODE_INFO, which is asked for before: it may choose among the targets."""
_LESS = {OTHERS: (_OF_OTHERS, ""), LEFTOVERS: (_OF_GONE, _OF_GONE), USE: (_OF_NONE, _OF_NONE)}
"""Which owners' bytes and processes are enough for parts that are less than OWNERS, besides those `always` kept."""


class Selection(NamedTuple):
    """Which series are asked for. `match` are the user's matchers, `key` the labels that tell targets apart, `labels`
    all that targets have; `namespace` is the one whose containers are asked for, empty for all.

    `by_target`: all rows tell which target they are of. `targets` is what is known of each, for rows that tell it in
    part.
    """

    match: str
    key: tuple[str, ...]
    labels: frozenset[str]
    namespace: str = ""
    by_target: bool = False
    targets: Mapping[tuple[str, ...], Scraped] = {}


class Scraped(NamedTuple):
    """A target: the names of its labels, and its node's name. They stand newest first."""

    labels: frozenset[str]
    node: str


def needed(parts: Collection[str]) -> list[Family]:
    """The families that these parts of a document are made of."""
    asked = {*parts, *([HOLDERS] if USE in parts else [])}
    found = [family for family in FAMILIES if not family.part or family.part in asked]
    if HEALTH in asked:
        found = [family._replace(only="") if family in (CAPABILITY, SOURCE_SUCCESS) else family for family in found]
    less = next((less for part, less in _LESS.items() if part in asked), None)
    if less and OWNERS not in asked:
        found += [one._replace(only=only) for one, only in zip((OWNER_BYTES, OWNER_PROCESSES), less, strict=True)]
    return found


def question(family: Family, selection: Selection) -> str:
    """In PromQL: the family's series, by its own labels and, where it takes that, by those of its target.

    Own labels that the target has too are `exported_…` where Prometheus does not honour gpumap's.
    """
    own = [*family.by, *(f"exported_{name}" for name in family.by if name in selection.labels)]
    of_target = family.of_target or selection.by_target
    by = ", ".join([*own, *(name for name in selection.key if of_target and name not in own)])
    found = f"max by ({by}) ({' or '.join(_selectors(family, selection))})"
    if family.kept:
        found = f"{found} {family.kept}"
    if family.always:
        found = f"{found} or max by ({by}) ({family.name}{braced(family.always, selection.match)})"
    return found


def _selectors(family: Family, selection: Selection) -> Iterator[str]:
    """Of one namespace alone by whichever of the labels has it. A row of a target in it may be another's too."""
    named = [""]
    if selection.namespace and "namespace" in family.by:
        found = ["namespace", *(["exported_namespace"] if "namespace" in selection.labels else [])]
        named = [f'{name}="{_quoted(selection.namespace)}"' for name in found]
    yield from (f"{family.name}{braced(family.only, one, selection.match)}" for one in named)


def braced(*matchers: str) -> str:
    """Matchers as a selector has them; none where there are none."""
    told = [one for one in matchers if one]
    return f"{{{','.join(told)}}}" if told else ""


def targets_question(match: str) -> str:
    """Every gpumap that is scraped, with all labels; the value is when it collected."""
    return f"{SNAPSHOT}{braced(match)}"


def spacings_question(match: str) -> str:
    """The time between what two scrapes of each of them saw, as a mean over five minutes; of a single one, NaN."""
    told = f"{SNAPSHOT}{braced(match)}[{_SEEN_FOR}]"
    return f"(max_over_time({told}) - min_over_time({told})) / (count_over_time({told}) - 1)"


def down_question(match: str) -> str:
    """Targets that do not answer, and were a gpumap within the last hour; or all of whose job's others are one."""
    up, told = f"up{braced(match)}", f"{SNAPSHOT}{braced(match)}"
    known = f"{up} == 0 and on (job, instance) last_over_time({told}[{_KNOWN_FOR}])"
    own_job = f"count by (job) ({up} == 1) == count by (job) ({told})"
    return f"({known}) or ({up} == 0 and on (job) ({own_job}))"


def chosen(targets: Iterable[Mapping[str, str]], key: Collection[str]) -> Iterator[str]:
    """Matchers for these targets, and maybe some others."""
    rows = list(targets)
    for name in key:
        values = sorted({row.get(name, "") for row in rows})
        alternatives = "|".join(map(_literal, values))
        yield f'{name}=~"{alternatives}"'


def _literal(value: str) -> str:
    """A value as a regular expression within a string of PromQL."""
    escaped = "".join(f"\\{one}" if one in r"\.+*?()|[]{}^$" else one for one in value)
    return _quoted(escaped)


def _quoted(text: str) -> str:
    """A text within a string of PromQL."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
