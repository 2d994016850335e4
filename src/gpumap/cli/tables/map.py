"""`gpumap map`: the holders and users of each device, a row per container below each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.sort_keys import MAP_ORDERS
from gpumap.cli.tables.fleets import of_namespace, pods_in
from gpumap.cli.tables.layout import (
    Column,
    Shape,
    SortKey,
    in_order,
    joined,
    notes,
    sort_keys,
    spare_containers,
    table,
    with_node,
)
from gpumap.cli.tables.unknowns import no_rows, troubles
from gpumap.model.devices import (
    DeviceContainer,
    NodeDevice,
    OtherUse,
    container_of,
    containers_on,
    device_name,
    has_kubelet,
    listed_bytes,
    node_devices,
    other_uses,
    owner_of,
    partitioned_gpus,
    work_name,
)
from gpumap.model.gaps import use_known
from gpumap.model.map import VERSION, HolderEntry, NodeMap, UnmatchedEntry, UserEntry
from gpumap.model.terms import ContainerName
from gpumap.model.words import UNKNOWN, number, percent, ratio, size

COLOURS = {"unassigned": "red", "gone": "yellow", "unknown": "yellow"}
"""Of owners. `unassigned` is also in capitals."""


class MapRow(NamedTuple):
    """A row of a device, or below it of a `container` or of `other` use."""

    on: NodeDevice
    container: DeviceContainer | None = None
    other: OtherUse | None = None

    @property
    def node(self) -> str:
        return self.on.node_map.node.name


class UnmatchedRow(NamedTuple):
    """Slots on no device."""

    node: str
    entry: UnmatchedEntry


# --- columns ----------------------------------------------------------------------------------------------------------


def _column(
    title: str,
    device: Callable[[NodeDevice], str] | None = None,
    container: Callable[[DeviceContainer], str] | None = None,
    other: Callable[[OtherUse], str] | None = None,
    *,
    sort: Callable[[DeviceContainer], float | None] | None = None,
    sort_name: str = "",
) -> Column[MapRow]:
    """Return a column that reads devices, containers and other use in its own way each; without one it is empty.

    `sort` is of containers: they are sorted below their device.
    """

    def read(row: MapRow) -> str:
        if row.container is not None:
            return container(row.container) if container else ""
        if row.other is not None:
            return other(row.other) if other else ""
        return device(row.on) if device else ""

    def value(row: MapRow) -> float | None:
        return sort(row.container) if sort and row.container else None

    return Column(title, read, value if sort else None, largest_first=True, sort_name=sort_name)


def _named(title: str, part: Callable[[ContainerName], str]) -> Column[MapRow]:
    return _column(title, None, lambda one: part(one.name) or UNKNOWN, lambda one: part(one.name))._replace(name=True)


def _of_user(
    title: str, shown: Callable[[UserEntry], str], value: Callable[[UserEntry], float | None]
) -> Column[MapRow]:
    """Return a column of what is measured of a container."""
    return _column(
        title,
        container=lambda one: shown(one.user) if one.user else UNKNOWN,
        sort=lambda one: value(one.user) if one.user else None,
    )


def _granted(one: DeviceContainer, shown: Callable[[HolderEntry], str]) -> str:
    """A container that uses the device and is known not to hold it was granted 0."""
    if one.holder is not None:
        return shown(one.holder)
    return "0" if _owner_of(one) == "unassigned" else UNKNOWN


def _slots(holder: HolderEntry) -> str:
    """Slots of several resources are not added up: they are of different units."""
    return "+".join(str(slot.slots) for slot in holder.slots) or "0"


def _used_of(on: NodeDevice) -> str:
    memory = on.device.memory
    if memory is None:
        return size(listed_bytes(on.device))
    return f"{size(memory.used_bytes)} of {size(memory.total_bytes)}"


def _state(on: NodeDevice) -> str:
    if on.device.memory is not None or use_known(on.device):
        return ""
    return "partitioned" if on.device.uuid in partitioned_gpus(on.node_map) else "no reading"


def _owner_of(one: DeviceContainer) -> str:
    """Return the owner of the container's use, or that it only reserves the device for other pods."""
    if one.holder is not None and one.holder.reservation:
        return "reservation"
    return owner_of(one.holder, one.user)


def shown_owner(owner: str) -> str:
    return owner.upper() if owner == "unassigned" else owner


def _owner_colour(row: MapRow) -> str:
    if row.container is not None:
        return COLOURS.get(_owner_of(row.container), "")
    return COLOURS.get(row.other.owner, "") if row.other is not None else "yellow"


COLUMNS: tuple[Column[MapRow], ...] = (
    _column("DEVICE", lambda on: device_name(on.device))._replace(spans=True),
    _column("UUID", lambda on: on.device.uuid)._replace(name=True, spare=5),
    _named("NAMESPACE", lambda name: name.namespace),
    _column(
        "POD", None, lambda one: one.name.pod or UNKNOWN, lambda other: other.name.pod or work_name(other.work)
    )._replace(name=True, kept=True),
    _named("CONTAINER", lambda name: name.container),
    _column("SLOTS", None, lambda one: _granted(one, _slots))._replace(spare=3),
    _column(
        "GPUS",
        None,
        lambda one: _granted(one, lambda holder: ratio(holder.allocated_gpus)),
        sort=lambda one: one.holder.allocated_gpus if one.holder else None,
    )._replace(spare=4),
    _column(
        "GRANTED",
        None,
        lambda one: _granted(one, lambda holder: size(holder.allocated_memory_bytes)),
        sort=lambda one: one.holder.allocated_memory_bytes if one.holder else None,
    ),
    _column(
        "USED",
        _used_of,
        lambda one: size(one.user.memory_bytes if one.user else None),
        lambda other: size(other.memory_bytes),
        sort=lambda one: one.user.memory_bytes if one.user else None,
        sort_name="memory",
    )._replace(spans=True),
    _column(
        "SM",
        None,
        lambda one: percent(one.user.busy_ratio if one.user else None),
        lambda other: percent(other.work.sm_utilization_ratio) if other.work else "",
        sort=lambda one: one.user.busy_ratio if one.user else None,
    ),
    _column("OWNER", _state, lambda one: shown_owner(_owner_of(one)), lambda other: other.owner)._replace(
        colour=_owner_colour
    ),
    _column("MODEL", lambda on: on.device.model or UNKNOWN)._replace(wide=True),
    _of_user("PEAK", lambda user: size(user.memory_peak_bytes), lambda user: user.memory_peak_bytes)._replace(
        wide=True
    ),
    _column(
        "PROCESSES",
        None,
        lambda one: number(one.user.processes if one.user else None),
        lambda other: str(other.process_count or ""),
        sort=lambda one: one.user.processes if one.user else None,
    )._replace(wide=True),
    _column(
        "RESOURCES",
        None,
        lambda one: ",".join(slot.resource for slot in one.holder.slots) if one.holder else "",
    )._replace(wide=True),
)
_ASSIGNED = frozenset({"SLOTS", "GPUS", "GRANTED", "RESOURCES"})
"""Titles of columns that show what the kubelet assigned: machines without a kubelet do not have them."""
_UNMATCHED_COLUMNS: tuple[Column[UnmatchedRow], ...] = (
    Column("NAMESPACE", lambda row: row.entry.namespace, name=True),
    Column("POD", lambda row: row.entry.pod, name=True, kept=True),
    Column("CONTAINER", lambda row: row.entry.container, name=True),
    Column("RESOURCE", lambda row: row.entry.resource, name=True),
    Column("SLOTS", lambda row: str(row.entry.slots)),
    Column("NOT MATCHED", lambda row: row.entry.reason, colour=lambda _: "yellow"),
)
SORT_KEYS: dict[str, SortKey[MapRow]] = {
    "namespace": SortKey(lambda row: "\0".join(row.container.name) if row.container else None, False),
    **sort_keys(COLUMNS),
}


# --- what is shown ----------------------------------------------------------------------------------------------------


def map_table(maps: NodeMaps, shape: Shape) -> str:
    """Return each device with its holders and users; then slots on no device, and what is not known."""
    shown = of_namespace(maps, shape.namespace)
    rows = [row for node_map in shown.maps for row in _rows(node_map, shape)]
    columns = spare_containers(COLUMNS, (row.container.name for row in rows if row.container))
    if not any(map(has_kubelet, maps.maps)):
        columns = tuple(column for column in columns if column.title not in _ASSIGNED)
    unmatched = [UnmatchedRow(one.node.name, entry) for one in shown.maps for entry in one.unmatched]
    return joined(
        [
            table(with_node(columns, fleet=maps.fleet), rows, shape) if rows else no_rows(maps, shape),
            table(with_node(_UNMATCHED_COLUMNS, fleet=maps.fleet), unmatched, shape) if unmatched else "",
            notes(troubles(maps), shape.screen, "red"),
        ]
    )


def map_values(maps: NodeMaps, shape: Shape) -> NodeMap | dict[str, object]:
    """Return the same for scripts: the map as it is, or those of a fleet."""
    maps = of_namespace(maps, shape.namespace)
    if maps.fleet:
        return {"version": VERSION, "nodes": list(maps.maps), "missing": list(maps.missing)}
    (node_map,) = maps.maps
    return node_map


def map_names(maps: NodeMaps, shape: Shape) -> list[tuple[str, str]]:
    """Return the pods that hold or use a device, or hold slots on no device."""
    return pods_in(
        container_of(entry)
        for node_map in of_namespace(maps, shape.namespace).maps
        for entries in (*((*one.holders, *one.users) for one in node_map.devices), node_map.unmatched)
        for entry in entries
    )


def _rows(node_map: NodeMap, shape: Shape) -> Iterator[MapRow]:
    for on in node_devices(node_map):
        yield MapRow(on)
        containers = [MapRow(on, container=one) for one in containers_on(on.device)]
        yield from in_order(containers, SORT_KEYS[shape.order or MAP_ORDERS[0]], reverse=shape.reverse)
        for other in other_uses(on.device):
            yield MapRow(on, other=other)
