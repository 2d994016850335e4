"""`gpumap waste`: the agents' findings except faults, worst first; their sums; and what could not be judged."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpumap.cli.kube_state import unlisted, workload_of
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.rows import rows
from gpumap.cli.sort_keys import SUMS_BY, WASTE_ORDERS, WORKLOAD
from gpumap.cli.tables.fleets import pods_in, values_of
from gpumap.cli.tables.layout import (
    NODE,
    Column,
    Shape,
    SortKey,
    amount,
    in_order,
    joined,
    name,
    notes,
    sort_keys,
    spare_containers,
    table,
    with_node,
)
from gpumap.cli.tables.unknowns import all_known, few, gpus_to_repair, no_rows, of_each
from gpumap.model.devices import device_name, has_kubelet, select_namespace
from gpumap.model.findings import judged_holders, judged_kinds, sums, waste_rank, worst_first
from gpumap.model.formatting import UNKNOWN, age, counted, listed, number, ratio, size
from gpumap.model.grouping import grouped
from gpumap.model.names import FINDINGS
from gpumap.model.node import Device, Finding, Node

_KINDS = FINDINGS[1:]
"""Without faults: `gpumap check` and `gpumap doctor` show them."""
_SHOWN_MAX = 40
"""Rows of a fleet on a screen. -o wide, json and yaml have all."""


class FindingRow(NamedTuple):
    """A finding with the node and the device that have it."""

    node: str
    device: str
    seconds: float
    """For how long it has held."""
    finding: Finding


_COLOURS = {
    "fault": "red",
    "not_offered": "red",
    "squatter": "red",
    "leftover": "red",
    "unexplained": "red",
    "over": "red",
    "stalled": "yellow",
    "idle": "yellow",
    "maybe_idle": "cyan",
    "unmatched": "yellow",
}
_IN_CAPITALS = ("squatter", "leftover", "unexplained")


def shown_finding(one: Finding) -> str:
    """Return the kind of a finding as tables show it."""
    return one.finding.upper() if one.finding in _IN_CAPITALS else one.finding.replace("_", " ")


def finding_colour(one: Finding) -> str:
    return _COLOURS.get(one.finding, "")


COLUMNS: tuple[Column[FindingRow], ...] = (
    Column(
        "FINDING",
        lambda row: shown_finding(row.finding),
        colour=lambda row: finding_colour(row.finding),
    ),
    name("NAMESPACE", lambda row: row.finding.namespace),
    name("POD", lambda row: row.finding.pod),
    name("CONTAINER", lambda row: row.finding.container),
    Column("DEVICE", lambda row: row.device, lambda row: row.device),
    amount("GPUS", ratio, lambda row: row.finding.gpus, spare=4),
    amount("GRANTED", size, lambda row: row.finding.granted_bytes, wide=True),
    amount("USED", size, lambda row: row.finding.used_bytes, wide=True),
    amount("WASTE", size, lambda row: row.finding.memory_bytes),
    Column("FOR", lambda row: age(row.seconds), lambda row: row.seconds, largest_first=True),
    Column("UUID", lambda row: row.finding.uuid or UNKNOWN, name=True, wide=True),
    Column("WHY", lambda row: row.finding.why, sentence=True),
)
SORT_KEYS: dict[str, SortKey[FindingRow]] = sort_keys((NODE, *COLUMNS))
_BY_SEVERITY = WASTE_ORDERS[0]


class GroupSums(NamedTuple):
    """What is wasted by the pods of a namespace or workload, or on a node. `namespace` is that of a workload."""

    namespace: str
    name: str
    sums: dict[str, float | None]


def _summed(title: str, text: Callable[[float | None], str], key: str, *, spare: int = 0) -> Column[GroupSums]:
    return amount(title, text, lambda one: one.sums[key], spare=spare)


GROUP_COLUMNS: tuple[Column[GroupSums], ...] = (
    _summed("IDLE GPUS", ratio, "idle_gpus"),
    _summed("IDLE HOLDERS", number, "idle_holders"),
    _summed("UNUSED", size, "unused_bytes"),
    _summed("OVER", size, "over_bytes", spare=1),
    _summed("SQUATTERS", size, "squatter_bytes"),
    _summed("LEFTOVERS", size, "leftover_bytes"),
)
"""The first column is the name, by what the sums are, after the namespace of a workload."""


def waste_table(maps: NodeMaps, shape: Shape) -> str:
    """Return the findings, what could not be judged, and a last line of sums."""
    found = _rows(maps, shape)
    doubts = list(few(_unjudged(maps), maps.fleet))
    groups = _groups(maps, shape.sums_by, shape) if shape.sums_by else []
    most = _SHOWN_MAX if maps.fleet and not shape.wide else len(groups or found)
    unseen = max(len(groups or found) - most, 0)
    if groups:
        namespace: Column[GroupSums] = name("NAMESPACE", lambda one: one.namespace)
        first: Column[GroupSums] = name(shape.sums_by.upper(), lambda one: one.name)
        names = (namespace, first) if shape.sums_by == WORKLOAD else (first,)
        block = table((*names, *GROUP_COLUMNS), groups[:most], shape)
    elif found:
        columns_of_rows = spare_containers(COLUMNS, (row.finding.name for row in found[:most]))
        block = table(with_node(columns_of_rows, fleet=maps.fleet), found[:most], shape)
    elif not maps.fleet and not any(of_device for one in maps.maps for of_device in rows(one, shape.namespace)):
        block = no_rows(maps, shape)
        if shape.namespace:
            return notes([block, *(() if all_known(maps) else doubts), *maps.missing], shape.screen)
    elif not any(map(has_kubelet, maps.maps)):
        return notes([*doubts, *of_each(maps, gpus_to_repair), *maps.missing], shape.screen)
    elif any(judged_kinds(node) & {*_KINDS} for node in maps.maps):
        is_whole = not maps.missing and all(judged_kinds(node) >= {*_KINDS} for node in maps.maps)
        block = "No waste found." if is_whole else "No waste found in the known data."
    else:
        block, doubts = notes(["gpumap could not check anything.", *doubts], shape.screen), []
    what = f"more {shape.sums_by if groups else 'finding'}"
    more = [f"{counted(unseen, what)}: -o wide shows all."] if unseen else []
    more += [] if groups else of_each(maps, lambda node: _sharing(node, shape.namespace))
    return joined(
        [
            block,
            notes(more, shape.screen),
            notes(dict.fromkeys(map(_remedy, found)) if shape.wide else (), shape.screen),
            notes(doubts, shape.screen),
            notes(few([*of_each(maps, gpus_to_repair), *maps.missing], maps.fleet), shape.screen, "red"),
            notes([_summary(found, _sums(found, _judged_by_all(maps.maps)))], shape.screen, "bold"),
        ]
    )


def _sharing(node: Node, namespace: str) -> Iterator[str]:
    """Name the findings on memory that several containers were granted: WASTE has a part of it for each."""
    devices: dict[str | None, Device] = {device.uuid: device for device in node.devices}
    pools = grouped(
        ((device.gpu_uuid or device.uuid, device.mig and device.mig.gpu_instance_id, device.memory.total_bytes), one)
        for one in select_namespace(node.findings or (), namespace)
        if one.finding in ("idle", "maybe_idle", "unused") and (device := devices.get(one.uuid)) and device.memory
    )
    sharers = [
        "/".join(one.pod_name)
        for (_, _, total_bytes), found in pools.items()
        if sum(one.granted_bytes or 0 for one in found) > total_bytes
        for one in found
    ]
    if sharers:
        yield f"WASTE counts memory that containers share only once, not as GRANTED minus USED: {listed(sharers)}."


def waste_values(maps: NodeMaps, shape: Shape) -> dict[str, object]:
    """Return the same for scripts: findings, sums, also by namespace, and sentences on what is not known."""
    found = _rows(maps, shape)
    by = (*(SUMS_BY if maps.fleet else SUMS_BY[:1]), *([WORKLOAD] if maps.workloads is not None else []))
    return values_of(
        maps,
        findings=[_value(row, fleet=maps.fleet) for row in found],
        sums=_sums(found, _judged_by_all(maps.maps)),
        **{f"by_{what}": [_sums_value(what, one) for one in _groups(maps, what, shape)] for what in by},
        unjudged_sentences=list(_unjudged(maps)),
    )


def waste_names(maps: NodeMaps, shape: Shape) -> list[tuple[str, str]]:
    """Return the pods of the findings, in their order; only pods that exist."""
    return pods_in(row.finding.name for row in _rows(maps, shape) if row.finding.finding != "leftover")


def _rows(maps: NodeMaps, shape: Shape) -> list[FindingRow]:
    found = [row for one in maps.maps for row in _rows_of(one, shape.namespace)]
    order = shape.order or _BY_SEVERITY
    if order in _ORDERS:
        return sorted(found, key=_ORDERS[order], reverse=shape.reverse)
    return in_order(found, SORT_KEYS[order], reverse=shape.reverse)


_ORDERS = {
    _BY_SEVERITY: lambda row: (worst_first(row.finding), row.node),
    "waste": lambda row: (waste_rank(row.finding), row.node, row.finding.name),
}


def _rows_of(node: Node, namespace: str) -> Iterator[FindingRow]:
    names: dict[str | None, str] = {gpu.uuid: str(gpu.index) for gpu in node.gpus}
    names |= {device.uuid: device_name(device) for device in node.devices}
    for one in select_namespace(node.findings or (), namespace):
        if one.finding in _KINDS:
            yield FindingRow(node.name, names.get(one.uuid, UNKNOWN), max(node.timestamp - one.since, 0.0), one)


def _unjudged(maps: NodeMaps) -> Iterator[str]:
    """Return what the agents say, or, of a Prometheus, which nodes cannot judge which kinds."""
    if maps.workloads is not None:
        found = (one for node in maps.maps for one in node.findings or () if one.finding != "leftover" and one.pod)
        yield from unlisted((one.pod_name for one in found), maps.workloads)
    yield from of_each(maps, lambda node: node.unjudged_sentences)
    if maps.fleet and (count := judged_holders(maps.maps)):
        yield f"{count}."
    silent = [node for node in maps.maps if maps.fleet and not node.unjudged_sentences]
    down = {
        node.name: ", ".join(f"{source.source} down" for source in node.sources if not source.up) for node in silent
    }
    unknown_kinds = ((kind, node.name) for node in silent for kind in _KINDS if kind not in judged_kinds(node))
    kinds = grouped(((kind, down[name]), name) for kind, name in unknown_kinds)
    nodes = grouped(((tuple(names), why), kind) for (kind, why), names in kinds.items())
    for (unable, why), of_nodes in nodes.items():
        what = f"{', '.join(of_nodes)}: not known on {len(unable)} of {counted(len(maps.maps), 'node')}"
        yield f"{what}{f': {why}' if why else ''} ({', '.join(unable[:3])}{', …' if len(unable) > 3 else ''})."


def _remedy(row: FindingRow) -> str:
    """Return what to do about all findings of a kind; about slots on no device for each pod."""
    one = row.finding
    of_pod = f" of {one.pod}" if one.finding == "unmatched" else ""
    return f"{one.finding.replace('_', ' ')}{of_pod}: {one.remedy}"


def _groups(maps: NodeMaps, by: str, shape: Shape) -> list[GroupSums]:
    """Return the sums of each namespace, node or workload that has a finding, and of nodes that cannot be judged; the
    largest first."""
    groups = grouped((_group_of(row, by, maps.workloads or {}), row) for row in _rows(maps, shape))
    if by == "node":
        unjudged = (node for node in maps.maps if not judged_kinds(node) >= {*_KINDS})
        groups = {("", node.name): [] for node in unjudged} | groups
    judged = {node.name: judged_kinds(node) for node in maps.maps}
    by_all = _judged_by_all(maps.maps)
    made = [
        GroupSums(*group, _sums(of_group, judged[group[1]] if by == "node" else by_all))
        for group, of_group in groups.items()
    ]
    return sorted(sorted(made, key=lambda one: one.name), key=_largest, reverse=not shape.reverse)


def _group_of(row: FindingRow, by: str, workloads: Mapping[tuple[str, str], str]) -> tuple[str, str]:
    one = row.finding
    if by == WORKLOAD:
        return one.namespace, workload_of(one.pod_name, workloads) if one.pod else ""
    return "", row.node if by == "node" else one.namespace


def _sums_value(by: str, one: GroupSums) -> dict[str, object]:
    names = {"namespace": one.namespace or None} if by == WORKLOAD else {}
    return {**names, by: one.name or None, **one.sums}


def _largest(one: GroupSums) -> tuple[float, float]:
    in_bytes = ("unused_bytes", "over_bytes", "squatter_bytes", "leftover_bytes", "unexplained_bytes")
    return one.sums["idle_gpus"] or 0.0, sum(one.sums[key] or 0.0 for key in in_bytes)


def _judged_by_all(nodes: Sequence[Node]) -> frozenset[str]:
    return frozenset.intersection(*map(judged_kinds, nodes)) if nodes else frozenset()


def _sums(rows: Iterable[FindingRow], judged: Container[str]) -> dict[str, float | None]:
    return {key: value for key, value in sums([row.finding for row in rows], judged).items() if key != "faults"}


_MEANINGS = {
    "unused_bytes": "granted but not used",
    "squatter_bytes": "used by squatters",
    "leftover_bytes": "used by leftovers",
    "unexplained_bytes": "used by no process",
    "over_bytes": "used over grants",
}


def _summary(found: Iterable[FindingRow], total: dict[str, float | None]) -> str:
    shareless = sum(row.finding.finding == "idle" and row.finding.gpus is None for row in found)
    more = f" (and {counted(shareless, 'holder')} of unknown share)" if shareless else ""
    parts = [f"{ratio(total['idle_gpus'])} GPUs held idle{more}"]
    for key, meaning in _MEANINGS.items():
        if total[key] or key == "unused_bytes":
            parts.append(f"{size(total[key])} {meaning}")
    if total["not_offered_gpus"]:
        parts.append(f"{counted(int(total['not_offered_gpus']), 'GPU')} not offered")
    if total["maybe_idle_gpus"]:
        parts.append(f"{ratio(total['maybe_idle_gpus'])} GPUs may be idle")
    if total["unexplained_gpus"]:
        parts.append(f"{ratio(total['unexplained_gpus'])} GPUs busy without a process")
    if total["stalled_gpus"]:
        parts.append(f"{ratio(total['stalled_gpus'])} GPUs may be stalled")
    if total["unmatched"]:
        parts.append(f"{counted(int(total['unmatched']), 'container')} with unmatched slots")
    return f"Sum of the findings: {', '.join(parts)}."


def _value(row: FindingRow, *, fleet: bool) -> dict[str, object]:
    """Return a finding as -o json has it."""
    one = row.finding
    return {
        **({"node": row.node} if fleet else {}),
        "finding": one.finding,
        "reason": one.reason,
        "namespace": one.namespace or None,
        "pod": one.pod or None,
        "container": one.container or None,
        "device": row.device if one.uuid else None,
        "uuid": one.uuid,
        "since": one.since,
        "gpus": one.gpus,
        "granted_bytes": one.granted_bytes,
        "used_bytes": one.used_bytes,
        "memory_bytes": one.memory_bytes,
        "why": one.why,
        "pids": one.pids,
        "remedy": one.remedy,
    }
