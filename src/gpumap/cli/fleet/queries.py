"""Which of gpumap's series each part of a node's map needs, and the PromQL that asks a server for them. Pure.

Every row has the labels that distinguish its target. Two Prometheus servers that scrape the same give one row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from gpumap.model.names import FINDINGS as KINDS
from gpumap.model.names import GPU_FINDINGS

FINDINGS = "findings"
"""What the agents find wrong. If only this is asked for, devices without a finding are left out."""
HOLDERS = "holders"
"""Holders: slots on devices, reservations, and slots that match no device."""
SHARES = "shares"
"""Allocated shares of GPUs."""
GRANTS = "grants"
"""Granted memory."""
OFFERS = "offers"
"""Slots that the kubelet offers on each device."""
USE = "use"
"""Memory and processes of containers, and unassigned use. Needs HOLDERS, to know the holders."""
PEAKS = "peaks"
"""Peak memory of containers."""
ACTIVITY = "activity"
"""SM time of containers."""
LAST_SEEN = "last seen"
"""When containers last worked."""
OTHERS = "others"
"""What no container uses."""
OWNERS = "owners"
"""Memory and processes by owner, containers' too; it includes OTHERS."""
WORK = "work"
"""Work outside pods: its memory, SM time and processes."""
HEALTH = "health"
"""What no table shows: GPUs' load, memory reserved by the driver, how long its calls hang, all capabilities."""
ALL = frozenset({FINDINGS, HOLDERS, SHARES, GRANTS, OFFERS, USE, PEAKS, ACTIVITY, LAST_SEEN, OWNERS, WORK, HEALTH})
"""Devices, their sizes, whether GPUs answer, faults and the sources' health are always asked for, unless only FINDINGS
are."""

SNAPSHOT = "gpumap_snapshot_timestamp_seconds"
"""Each gpumap has exactly one, whose labels are those of its target."""
CONTAINER = ("namespace", "pod", "container")
_SEEN_FOR = "5m"
"""How far a server looks back for a series' newest sample, by default."""
_KNOWN_FOR = "1h"


class DeviceInfo(Struct, frozen=True):
    """The labels of gpumap_device_info: text, empty if unknown."""

    uuid: str
    gpu_uuid: str = ""
    index: str = ""
    minor: str = ""
    pci_bus_id: str = ""
    model: str = ""
    mig_profile: str = ""
    gpu_instance_id: str = ""
    compute_instance_id: str = ""


class DevicelessGpu(Struct, frozen=True):
    """The labels of gpumap_gpu_without_device_info. `gpu_uuid` is empty if the GPU has not reported it."""

    gpu_uuid: str
    index: str
    minor: str
    pci_bus_id: str
    model: str
    reason: str


class AskedFamily(NamedTuple):
    """Series of one name. `by` are their own labels. `only` selects among them, `kept` compares their values.

    `always` selects series that are kept with any value. A family without a `part` is always asked for. `found`: only
    devices with a finding, and all of a GPU with one.
    """

    name: str
    by: tuple[str, ...]
    part: str = ""
    only: str = ""
    kept: str = ""
    always: str = ""
    found: bool = False


_ON_DEVICE = (*CONTAINER, "uuid")
_OF_OTHERS = 'owner!~"assigned|unassigned|scheduled"'
_OF_NONE = 'owner=""'
_INSTANCES = 'gpu_instance_id!=""'

DEVICE_INFO = AskedFamily("gpumap_device_info", DeviceInfo.__struct_fields__)
DRIVER_INFO = AskedFamily("gpumap_driver_info", ("driver_version", "cuda_version", "nvml_version"))
DEVICELESS = AskedFamily("gpumap_gpu_without_device_info", DevicelessGpu.__struct_fields__)
NODE_INFO = AskedFamily("gpumap_node_info", ("node", "internal_ip"))
SOURCE_UP = AskedFamily("gpumap_source_up", ("source",))
SOURCE_SUCCESS = AskedFamily("gpumap_source_last_success_timestamp_seconds", ("source",), only='source="kubelet"')
CAPABILITY = AskedFamily("gpumap_capability", ("capability",), only='capability="pid_visibility"')
MEMORY_TOTAL = AskedFamily("gpumap_device_memory_total_bytes", ("uuid",))
MEMORY_USED = AskedFamily("gpumap_device_memory_used_bytes", ("uuid",))
MEMORY_RESERVED = AskedFamily("gpumap_device_memory_reserved_bytes", ("uuid",), HEALTH)
GPU_MEMORY_TOTAL = AskedFamily("gpumap_gpu_memory_total_bytes", ("gpu_uuid",))
GPU_MEMORY_USED = AskedFamily("gpumap_gpu_memory_used_bytes", ("gpu_uuid",))
GPU_DOWN = AskedFamily("gpumap_gpu_up", ("gpu_uuid",), kept="== 0")
GPU_FAULT = AskedFamily("gpumap_gpu_fault_info", ("gpu_uuid", "reason"))
HOLDING = AskedFamily("gpumap_allocation_info", _ON_DEVICE, HOLDERS)
"""Also of containers with a share that a scheduler granted without slots."""
SLOTS = AskedFamily("gpumap_allocation_slots", (*_ON_DEVICE, "resource"), HOLDERS)
HOLDER_COUNT = AskedFamily("gpumap_device_holders", ("uuid",), HOLDERS)
"""It exists, also with 0, for each device whose holders are known."""
RESERVED = AskedFamily("gpumap_device_reserved_info", ("uuid", "namespace", "pod"), HOLDERS)
ALLOCATED_GPUS = AskedFamily("gpumap_container_allocated_gpus", _ON_DEVICE, SHARES)
ALLOCATED_MEMORY = AskedFamily("gpumap_container_allocated_gpu_memory_bytes", _ON_DEVICE, GRANTS)
UNMATCHED = AskedFamily("gpumap_unmatched_slots", (*CONTAINER, "resource", "reason"), HOLDERS)
ALLOCATABLE = AskedFamily("gpumap_device_slots_allocatable", ("uuid", "resource"), OFFERS)
PROCESSES = AskedFamily("gpumap_container_gpu_processes", _ON_DEVICE, USE)
USED = AskedFamily("gpumap_container_gpu_memory_used_bytes", _ON_DEVICE, USE)
UNASSIGNED = AskedFamily("gpumap_container_unassigned_use", _ON_DEVICE, USE)
PEAK = AskedFamily("gpumap_container_gpu_memory_peak_bytes", _ON_DEVICE, PEAKS)
SM = AskedFamily("gpumap_container_sm_utilization_ratio", _ON_DEVICE, ACTIVITY)
SM_ACTIVITY = AskedFamily("gpumap_container_sm_activity_ratio", _ON_DEVICE, ACTIVITY)
LAST_ACTIVE = AskedFamily("gpumap_container_last_active_timestamp_seconds", _ON_DEVICE, LAST_SEEN)
OWNER_BYTES = AskedFamily(
    *("gpumap_device_memory_used_by_owner_bytes", ("uuid", "owner"), OWNERS), kept="!= 0", always='owner="unaccounted"'
)
OWNER_PROCESSES = AskedFamily(
    "gpumap_device_processes", ("uuid", "owner"), OWNERS, kept="!= 0", always='owner="unknown"'
)
"""What is `always` kept exists, also with 0, for each device whose use is known."""
_OF_WORK = ("workload_kind", "workload", "uuid")
HOST_PROCESSES = AskedFamily("gpumap_host_gpu_processes", _OF_WORK, WORK)
HOST_MEMORY = AskedFamily("gpumap_host_gpu_memory_used_bytes", _OF_WORK, WORK)
HOST_SM = AskedFamily("gpumap_host_sm_utilization_ratio", _OF_WORK, WORK)
UTILIZATION = AskedFamily("gpumap_gpu_utilization_ratio", ("gpu_uuid",), HEALTH)
STUCK = AskedFamily("gpumap_nvml_stuck_seconds", ("gpu_uuid",), HEALTH, kept="> 0")
POD_INFO = AskedFamily("gpumap_pod_info", ("namespace", "pod", "uid"), HEALTH)
_OF_FINDING = ("finding", "reason", *_ON_DEVICE)
_KNOWN, _OF_GPUS = (f'finding=~"{"|".join(kinds)}"' for kinds in (KINDS, GPU_FINDINGS))
FINDING_SINCE = AskedFamily("gpumap_finding_since_timestamp_seconds", _OF_FINDING, only=_OF_GPUS)
"""It exists for each finding."""
FINDING_GPUS = AskedFamily("gpumap_finding_gpus", _OF_FINDING, FINDINGS, only=_KNOWN)
FINDING_MEMORY = AskedFamily("gpumap_finding_memory_bytes", _OF_FINDING, FINDINGS, only=_KNOWN)
JUDGED = AskedFamily("gpumap_finding_judged", ("finding",), FINDINGS)
UNJUDGED = AskedFamily("gpumap_finding_unjudged", ("finding", "reason"), FINDINGS)

FAMILIES = tuple(one for one in [*globals().values()] if isinstance(one, AskedFamily) and one is not NODE_INFO)
"""All above but NODE_INFO, which is asked for first: it may select targets."""
_FINDING_SINCE = FINDING_SINCE._replace(only=_KNOWN, always=_OF_GPUS)
_ONLY_FINDINGS = (
    SOURCE_UP._replace(kept="== 0", always='source=~"kubelet|nvml"'),
    DEVICE_INFO._replace(found=True),
    DEVICELESS,
    *(_FINDING_SINCE, FINDING_GPUS, FINDING_MEMORY, JUDGED, UNJUDGED),
)
_OWNERS_OF_PART = {OTHERS: (_OF_OTHERS, ""), USE: (_OF_NONE, _OF_NONE)}
"""For parts that are less than OWNERS: selectors of the bytes and processes by owner that are enough. Those that are
`always` kept are asked for in addition."""


class Selection(NamedTuple):
    """Which series to ask for.

    `match` are the user's matchers, `key` the labels that distinguish targets, `labels` all labels of targets.
    `namespace` selects the containers of one namespace; empty for all. `mixed`: only some targets have labels that
    series have too. `targets` is what is known of each, for rows that have only some labels of their target.
    """

    match: str
    key: tuple[str, ...]
    labels: frozenset[str]
    namespace: str = ""
    mixed: bool = False
    targets: Mapping[tuple[str, ...], TargetLabels] = {}


class TargetLabels(NamedTuple):
    """The names of a target's labels, and its node's name. The newest target comes first."""

    labels: frozenset[str]
    node: str


def families_for(parts: Collection[str]) -> list[AskedFamily]:
    """Return the families that these parts of a map need."""
    if {*parts} == {FINDINGS}:
        return [*_ONLY_FINDINGS]
    asked = {*parts, *([HOLDERS] if USE in parts else [])}
    families = [family for family in FAMILIES if not family.part or family.part in asked]
    if HEALTH in asked:
        families = [
            family._replace(only="") if family in (CAPABILITY, SOURCE_SUCCESS) else family for family in families
        ]
    if FINDINGS in asked:
        families[families.index(FINDING_SINCE)] = _FINDING_SINCE
    selectors = next((selectors for part, selectors in _OWNERS_OF_PART.items() if part in asked), None)
    if selectors and OWNERS not in asked:
        families += [
            family._replace(only=only) for family, only in zip((OWNER_BYTES, OWNER_PROCESSES), selectors, strict=True)
        ]
    return families


def question(family: AskedFamily, selection: Selection) -> str:
    """Return PromQL for the family's series, by its own labels and by those of its target.

    An own label that the target has too is `exported_…` unless Prometheus honors gpumap's labels.
    """
    own = [*family.by, *(f"exported_{name}" for name in family.by if name in selection.labels)]
    by = ", ".join([*own, *(name for name in selection.key if name not in own)])
    expression = f"max by ({by}) ({' or '.join(_selectors(family, selection))})"
    if family.kept:
        expression = f"{expression} {family.kept}"
    if family.always:
        expression = f"{expression} or max by ({by}) ({family.name}{braced(family.always, selection.match)})"
    return expression


def _selectors(family: AskedFamily, selection: Selection) -> Iterator[str]:
    """Select one namespace by each label that may have it. A target in that namespace may have rows of others too."""
    matchers = [""]
    if selection.namespace and "namespace" in family.by:
        names = ["namespace", *(["exported_namespace"] if "namespace" in selection.labels else [])]
        matchers = [f'{name}="{_quoted(selection.namespace)}"' for name in names]
    for one in matchers:
        series = f"{family.name}{braced(family.only, one, selection.match)}"
        if family.found:
            found = f"{FINDING_SINCE.name}{braced(selection.match)}"
            of_mig = f"{family.name}{braced(_INSTANCES, selection.match)}"
            on_gpus = f'label_replace({found}, "gpu_uuid", "$1", "uuid", "(.+)")'
            series = f"{of_mig} and on (uuid) {found} or {series} and on (gpu_uuid) {on_gpus}"
        yield series


def braced(*matchers: str) -> str:
    """Return matchers in braces; nothing if all are empty."""
    given = [one for one in matchers if one]
    return f"{{{','.join(given)}}}" if given else ""


def targets_question(match: str) -> str:
    """Return PromQL for every scraped gpumap, with all labels; the value is the time of its collection."""
    return f"{SNAPSHOT}{braced(match)}"


def spacings_question(match: str) -> str:
    """Return PromQL for the time between the last two collections that scrapes saw; no answer for a single one."""
    return f"idelta({SNAPSHOT}{braced(match)}[{_SEEN_FOR}])"


def unreachable_question(match: str) -> str:
    """Return PromQL for targets that do not answer, whatever they are."""
    return f"up{braced(match)} == 0"


def down_question(match: str) -> str:
    """Return PromQL for targets that do not answer and were a gpumap within the last hour, or whose job has only
    gpumaps."""
    up, snapshot = f"up{braced(match)}", f"{SNAPSHOT}{braced(match)}"
    known = f"{up} == 0 and on (job, instance) last_over_time({snapshot}[{_KNOWN_FOR}])"
    own_job = f"count by (job) ({up} == 1) == count by (job) ({snapshot})"
    return f"({known}) or ({up} == 0 and on (job) ({own_job}))"


def matchers_of_targets(targets: Iterable[Mapping[str, str]], key: Collection[str]) -> Iterator[str]:
    """Return matchers that select these targets, and possibly others."""
    rows = list(targets)
    for name in key:
        values = sorted({row.get(name, "") for row in rows})
        alternatives = "|".join(map(_literal, values))
        yield f'{name}=~"{alternatives}"'


def _literal(value: str) -> str:
    """Quote a value as a regular expression in a string of PromQL."""
    escaped = "".join(f"\\{one}" if one in r"\.+*?()|[]{}^$" else one for one in value)
    return _quoted(escaped)


def _quoted(text: str) -> str:
    """Quote a text in a string of PromQL."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
