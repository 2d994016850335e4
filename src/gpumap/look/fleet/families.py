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
HEALTH = "health"
"""What no table shows: GPUs' load, memory that the driver keeps, how long its calls hang, all capabilities."""
ALL = frozenset({HOLDERS, SHARES, GRANTS, OFFERS, USE, PEAKS, ACTIVITY, LAST_SEEN, OWNERS, HEALTH})
"""Devices, their memory, whether GPUs answer, and the sources' health come with any of them."""

SNAPSHOT = "gpumap_snapshot_timestamp_seconds"
"""Every gpumap has just one, and it has no labels but those of its target."""
CONTAINER = ("namespace", "pod", "container")
_SEEN_FOR = "5m"
"""As far as a server looks back for a series' newest sample, by default."""
_KNOWN_FOR = "1h"


class Family(NamedTuple):
    """Series of one name, of those with `only`, and of these the values that are `kept`; their own labels in `by`.

    `of_target`: rows tell which target they are of. Without a `part` they are always asked for.
    """

    name: str
    by: tuple[str, ...]
    part: str = ""
    of_target: bool = False
    only: str = ""
    kept: str = ""


_ON_DEVICE = (*CONTAINER, "uuid")
_OF_OTHERS = 'owner!~"assigned|unassigned"'
_OF_GONE = 'owner="gone"'

DEVICE_INFO = Family(
    "gpumap_device_info",
    (
        *("uuid", "gpu_uuid", "index", "minor", "pci_bus_id", "model"),
        *("mig_profile", "gpu_instance_id", "compute_instance_id"),
    ),
    of_target=True,
)
NODE_INFO = Family("gpumap_node_info", ("node", "internal_ip"), of_target=True)
SOURCE_UP = Family("gpumap_source_up", ("source",), of_target=True)
SOURCE_SUCCESS = Family(
    "gpumap_source_last_success_timestamp_seconds", ("source",), of_target=True, only='source="kubelet"'
)
CAPABILITY = Family("gpumap_capability", ("capability",), of_target=True, only='capability="pid_visibility"')
MEMORY_TOTAL = Family("gpumap_device_memory_total_bytes", ("uuid",))
MEMORY_USED = Family("gpumap_device_memory_used_bytes", ("uuid",))
MEMORY_RESERVED = Family("gpumap_device_memory_reserved_bytes", ("uuid",), HEALTH)
GPU_MEMORY_TOTAL = Family("gpumap_gpu_memory_total_bytes", ("uuid",))
GPU_MEMORY_USED = Family("gpumap_gpu_memory_used_bytes", ("uuid",))
GPU_DOWN = Family("gpumap_gpu_up", ("uuid",), of_target=True, kept="== 0")
GPU_FAULT = Family("gpumap_gpu_fault_info", ("uuid", "reason"))
SLOTS = Family("gpumap_allocation_slots", (*_ON_DEVICE, "resource"), HOLDERS, of_target=True)
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
OWNER_BYTES = Family("gpumap_device_memory_used_by_owner_bytes", ("uuid", "owner"), OWNERS, kept="!= 0")
OWNER_PROCESSES = Family("gpumap_device_processes", ("uuid", "owner"), OWNERS, kept="!= 0")
UTILIZATION = Family("gpumap_gpu_utilization_ratio", ("uuid",), HEALTH)
STUCK = Family("gpumap_nvml_stuck_seconds", ("uuid",), HEALTH, kept="> 0")

FAMILIES = (
    *(DEVICE_INFO, SOURCE_UP, SOURCE_SUCCESS, CAPABILITY, MEMORY_TOTAL, MEMORY_USED, MEMORY_RESERVED),
    *(GPU_MEMORY_TOTAL, GPU_MEMORY_USED, GPU_DOWN, GPU_FAULT),
    *(SLOTS, ALLOCATED_GPUS, ALLOCATED_MEMORY, UNMATCHED, ALLOCATABLE),
    *(PROCESSES, USED, UNASSIGNED, PEAK, SM, LAST_ACTIVE, OWNER_BYTES, OWNER_PROCESSES, UTILIZATION, STUCK),
)
"""All but NODE_INFO, which is asked for before: it may choose among the targets."""
_LESS = {OTHERS: _OF_OTHERS, LEFTOVERS: _OF_GONE}
"""Which owners' series are enough for parts that are less than OWNERS."""


class Selection(NamedTuple):
    """Which series are asked for. `match` are the user's matchers, `key` the labels that tell targets apart, `labels`
    all that targets have."""

    match: str
    key: tuple[str, ...]
    labels: frozenset[str]


def needed(parts: Collection[str]) -> list[Family]:
    """The families that these parts of a document are made of."""
    asked = {*parts, *([HOLDERS] if USE in parts else [])}
    found = [family for family in FAMILIES if not family.part or family.part in asked]
    if HEALTH in asked:
        found = [family._replace(only="") if family is CAPABILITY else family for family in found]
    less = next((only for part, only in _LESS.items() if part in asked), "")
    if less and OWNERS not in asked:
        found += [family._replace(only=less) for family in (OWNER_BYTES, OWNER_PROCESSES)]
    return found


def question(family: Family, selection: Selection) -> str:
    """In PromQL: the family's series, by its own labels and, where it takes that, by those of its target.

    Own labels that the target has too are `exported_…` where Prometheus does not honour gpumap's.
    """
    own = [*family.by, *(f"exported_{name}" for name in family.by if name in selection.labels)]
    by = [*own, *(name for name in selection.key if family.of_target and name not in own)]
    found = f"max by ({', '.join(by)}) ({family.name}{braced(family.only, selection.match)})"
    return f"{found} {family.kept}" if family.kept else found


def braced(*matchers: str) -> str:
    """Matchers as a selector has them; none where there are none."""
    told = [one for one in matchers if one]
    return f"{{{','.join(told)}}}" if told else ""


def targets_question(match: str) -> str:
    """Every gpumap that is scraped, with all labels; the value is when it collected."""
    return f"{SNAPSHOT}{braced(match)}"


def scrapes_question(match: str) -> str:
    """How often each of them was scraped in five minutes."""
    return f"count_over_time({SNAPSHOT}{braced(match)}[{_SEEN_FOR}])"


SEEN_SECONDS = 300


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
    return escaped.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
