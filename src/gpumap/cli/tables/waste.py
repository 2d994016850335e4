"""`gpumap waste`: the findings, worst first; their sums; and what cannot be known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import UNSET, Struct, UnsetType

from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.rows import rows
from gpumap.cli.sort_keys import SUMS_BY, WASTE_ORDERS
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
from gpumap.model.devices import device_name, has_kubelet
from gpumap.model.findings import SUMMED, Finding, Thresholds, findings, sums, unknown, unmeasured_pods, worst_first
from gpumap.model.node import Node
from gpumap.model.shown import UNKNOWN, counted, number, ratio, size


class _NodeFindings(NamedTuple):
    node_map: Node
    findings: list[Finding]


class WasteRow(Struct, frozen=True, kw_only=True):
    """A finding as -o json has it. `node` is only in that of a fleet."""

    node: str | UnsetType = UNSET
    finding: str
    namespace: str | None
    pod: str | None
    container: str | None
    device: str | None
    uuid: str | None
    gpus: float | None
    granted_bytes: int | None
    used_bytes: int | None
    waste_bytes: int | None
    why: str
    idle_seconds: float | None
    pids: tuple[int, ...]
    remedy: str | None


_COLOURS = {"squatter": "red", "leftover": "red", "over": "red", "idle": "yellow", "unmatched": "yellow"}
_IN_CAPITALS = ("squatter", "leftover")
COLUMNS: tuple[Column[Finding], ...] = (
    Column(
        "FINDING",
        lambda one: one.kind.upper() if one.kind in _IN_CAPITALS else one.kind,
        colour=lambda one: _COLOURS.get(one.kind, ""),
    ),
    name("NAMESPACE", lambda one: one.container.namespace),
    name("POD", lambda one: one.container.pod),
    name("CONTAINER", lambda one: one.container.container),
    Column("DEVICE", lambda one: device_name(one.device) if one.device else UNKNOWN, lambda one: one.number),
    amount("GPUS", ratio, lambda one: one.gpus, spare=4),
    amount("GRANTED", size, lambda one: one.granted_bytes, spare=3),
    amount("USED", size, lambda one: one.used_bytes),
    amount("WASTE", size, lambda one: one.waste_bytes),
    Column("UUID", lambda one: one.device.uuid if one.device else UNKNOWN, name=True, wide=True),
    Column(
        "WHY", lambda one: one.why, lambda one: one.idle_seconds, largest_first=True, sort_name="idle", sentence=True
    ),
)
SORT_KEYS: dict[str, SortKey[Finding]] = sort_keys((NODE, *COLUMNS))
_BY_SEVERITY = WASTE_ORDERS[0]


class GroupSums(NamedTuple):
    """What is wasted by the pods of a namespace, or on a node: the sums of a node without unmatched slots."""

    name: str
    sums: dict[str, float | None]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _summed(title: str, key: str, *, spare: bool = False) -> Column[GroupSums]:
    return amount(title, size, lambda one: _whole(one.sums[key]), spare=spare)


GROUP_COLUMNS: tuple[Column[GroupSums], ...] = (
    amount("IDLE GPUS", ratio, lambda one: one.sums["idle_gpus"]),
    amount("IDLE HOLDERS", number, lambda one: _whole(one.sums["idle_holders"])),
    _summed("UNUSED", "unused_bytes"),
    _summed("OVER", "over_bytes", spare=True),
    _summed("SQUATTERS", "squatter_bytes"),
    _summed("LEFTOVERS", "leftover_bytes"),
)
"""The first column is the name, by what the sums are."""
_SUMS = {
    "unused": "granted but not used",
    "squatter": "used by squatters",
    "leftover": "used by leftovers",
    "over": "used over grants",
}


def waste_table(maps: NodeMaps, shape: Shape) -> str:
    """Return the findings, what cannot be known, and a last line of sums."""
    of_nodes = _findings(maps, shape)
    found = _sorted(of_nodes, shape)
    doubts = list(few(_unknown(maps, shape), maps.fleet))
    columns = spare_containers(COLUMNS, (one.container for one in found))
    groups = _groups(of_nodes, shape.sums_by, shape) if shape.sums_by else []
    if groups:
        block = table((name(shape.sums_by.upper(), lambda one: one.name), *GROUP_COLUMNS), groups, shape)
    elif found and not shape.sums_by:
        block = table(with_node(columns, fleet=maps.fleet), found, shape)
    elif not any(of_device for one in maps.maps for of_device in rows(one, shape.namespace)):
        block = no_rows(maps, shape)
    elif _judged(maps):
        block = "No waste found." if _all_known(maps) else "No waste found in the known data."
    elif any(map(has_kubelet, maps.maps)):
        block, doubts = notes(["gpumap could not check anything.", *doubts], shape.screen), []
    else:
        return notes([*doubts, *of_each(maps, gpus_to_repair), *maps.missing], shape.screen)
    remedies = dict.fromkeys(_remedy(one) for one in found if one.remedy) if shape.wide else ()
    return joined(
        [
            block,
            notes(remedies, shape.screen),
            notes(doubts, shape.screen),
            notes(few([*of_each(maps, gpus_to_repair), *maps.missing], maps.fleet), shape.screen, "red"),
            notes([_summary(found, _sums(of_nodes, shape.thresholds, shape.namespace))], shape.screen, "bold"),
        ]
    )


def waste_values(maps: NodeMaps, shape: Shape) -> dict[str, object]:
    """Return the same for scripts: findings, sums, also by namespace, and sentences on what is not known."""
    of_nodes = _findings(maps, shape)
    by = SUMS_BY if maps.fleet else SUMS_BY[:1]
    return values_of(
        maps,
        findings=[_value(one, fleet=maps.fleet) for one in _sorted(of_nodes, shape)],
        sums=_sums(of_nodes, shape.thresholds, shape.namespace),
        **{
            f"by_{what}": [{what: one.name or None, **one.sums} for one in _groups(of_nodes, what, shape)]
            for what in by
        },
        unknown=list(_unknown(maps, shape)),
    )


def waste_names(maps: NodeMaps, shape: Shape) -> list[tuple[str, str]]:
    """Return the pods of the findings, in their order; only pods that exist."""
    return pods_in(one.container for one in _sorted(_findings(maps, shape), shape) if one.kind != "leftover")


def _findings(maps: NodeMaps, shape: Shape) -> list[_NodeFindings]:
    return [_NodeFindings(one, findings(one, shape.thresholds, shape.namespace)) for one in maps.maps]


def _sorted(of_nodes: Iterable[_NodeFindings], shape: Shape) -> list[Finding]:
    found = [one for of_node in of_nodes for one in of_node.findings]
    order = shape.order or _BY_SEVERITY
    if order == _BY_SEVERITY:
        found.sort(key=worst_first)
        return found[::-1] if shape.reverse else found
    return in_order(found, SORT_KEYS[order], reverse=shape.reverse)


def _judged(maps: NodeMaps) -> bool:
    """Return whether anything could have been found: a measured device has known holders or users."""
    for node_map in maps.maps:
        total = sums((), node_map)
        known = total["idle_holders"] is not None or total["squatter_bytes"] is not None
        if known and any(on.use_known for on, _ in rows(node_map)):
            return True
    return False


def _all_known(maps: NodeMaps) -> bool:
    return all_known(maps) and not any(map(unmeasured_pods, maps.maps))


def _unknown(maps: NodeMaps, shape: Shape) -> Iterator[str]:
    return of_each(maps, lambda node_map: unknown(node_map, shape.thresholds, shape.namespace))


def _remedy(one: Finding) -> str:
    """Return what to do about all findings of a kind; about slots on no device for each pod."""
    of_pod = f" of {one.container.pod}" if one.kind == "unmatched" else ""
    return f"{one.kind}{of_pod}: {one.remedy}"


def _groups(of_nodes: Iterable[_NodeFindings], by: str, shape: Shape) -> list[GroupSums]:
    """Return the sums of each namespace or node that has a finding or an unknown sum, the largest first."""
    namespace, thresholds = shape.namespace, shape.thresholds
    parts: dict[str, list[_NodeFindings]] = {}
    for node_map, found in of_nodes:
        holders = (row for _, of_device in rows(node_map, namespace) for row in of_device if row.holds)
        names = (row.node if by == "node" else row.container.namespace for row in holders)
        groups: dict[str, list[Finding]] = {one: [] for one in names}
        for one in (one for one in found if one.kind != "unmatched"):
            groups.setdefault(one.node if by == "node" else one.container.namespace, []).append(one)
        for group, of_group in groups.items():
            parts.setdefault(group, []).append(_NodeFindings(node_map, of_group))
    made = []
    for group, of_nodes in sorted(parts.items()):
        added = _sums(of_nodes, thresholds, namespace if by == "node" else group)
        del added["unmatched_slots"]
        if None in added.values() or any(one.findings for one in of_nodes):
            made.append(GroupSums(group, added))
    return sorted(made, key=_largest, reverse=not shape.reverse)


def _largest(one: GroupSums) -> tuple[float, float]:
    in_bytes = ("unused_bytes", "over_bytes", "squatter_bytes", "leftover_bytes")
    return one.sums["idle_gpus"] or 0.0, sum(one.sums[key] or 0.0 for key in in_bytes)


def _sums(of_nodes: Iterable[_NodeFindings], thresholds: Thresholds, namespace: str = "") -> dict[str, float | None]:
    """Return the sums of all nodes of which something is known."""
    by_node = [sums(one.findings, one.node_map, namespace, thresholds) for one in of_nodes]
    added: dict[str, float | None] = {}
    for summed in SUMMED:
        known = [value for one in by_node if (value := one[summed]) is not None]
        added[summed] = sum(known) if known else None
    if added["idle_gpus"] is not None:
        added["idle_gpus"] = round(added["idle_gpus"], 3)
    return added


def _summary(found: Iterable[Finding], total: dict[str, float | None]) -> str:
    parts = []
    if total["idle_gpus"] is not None:
        shareless = sum(one.kind == "idle" and one.gpus is None for one in found)
        more = f" (and {counted(shareless, 'holder')} of unknown share)" if shareless else ""
        parts.append(f"{ratio(total['idle_gpus'])} GPUs held idle{more}")
    for kind, meaning in _SUMS.items():
        if (value := total[f"{kind}_bytes"]) is not None and (value or kind == "unused"):
            parts.append(f"{size(int(value))} {meaning}")
    if total["unmatched_slots"]:
        parts.append(f"{counted(int(total['unmatched_slots']), 'slot')} without a device")
    return f"Sum of the findings: {', '.join(parts) or 'unknown'}."


def _value(one: Finding, *, fleet: bool) -> WasteRow:
    return WasteRow(
        node=one.node if fleet else UNSET,
        finding=one.kind,
        namespace=one.container.namespace or None,
        pod=one.container.pod or None,
        container=one.container.container or None,
        device=device_name(one.device) if one.device else None,
        uuid=one.device.uuid if one.device else None,
        gpus=one.gpus,
        granted_bytes=one.granted_bytes,
        used_bytes=one.used_bytes,
        waste_bytes=one.waste_bytes,
        why=one.why,
        idle_seconds=one.idle_seconds,
        pids=one.pids,
        remedy=one.remedy,
    )
