"""`gpumap top`: what is used now, by container and device or by process, and what no container accounts for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.sort_keys import TOP_ORDERS
from gpumap.cli.tables.fleets import of_namespace, pods_in, values_of
from gpumap.cli.tables.layout import (
    NODE,
    Column,
    Shape,
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
from gpumap.cli.tables.map import COLOURS, shown_owner
from gpumap.cli.tables.unknowns import all_known, no_rows, troubles
from gpumap.model.devices import (
    NO_CONTAINER,
    NodeDevice,
    container_of,
    containers_on,
    device_name,
    node_devices,
    other_uses,
    owner_of,
    work_name,
)
from gpumap.model.map import Entry, HolderEntry, ProcessEntry, UserEntry, WorkEntry
from gpumap.model.terms import ContainerName
from gpumap.model.words import UNKNOWN, age, number, percent, size


class DeviceUse(NamedTuple):
    """A row: use of a device by a container, by a process, or by another owner.

    `holder` and `user` are a container's entries, `process` is a single process. A column reads what it needs of them.
    """

    on: NodeDevice
    container: ContainerName
    owner: str
    memory_bytes: int | None
    sm_ratio: float | None = None
    processes: int | None = None
    holder: HolderEntry | None = None
    user: UserEntry | None = None
    process: ProcessEntry | None = None
    work: WorkEntry | None = None

    @property
    def node(self) -> str:
        return self.on.node_map.node.name

    @property
    def memory_ratio(self) -> float | None:
        """The part of the device's memory."""
        memory = self.on.device.memory
        if memory is None or not memory.total_bytes or self.memory_bytes is None:
            return None
        return self.memory_bytes / memory.total_bytes

    @property
    def memory_peak_bytes(self) -> int | None:
        return self.user.memory_peak_bytes if self.user else None

    @property
    def granted_bytes(self) -> int | None:
        return self.holder.allocated_memory_bytes if self.holder else None

    @property
    def sm_activity_ratio(self) -> float | None:
        return self.user.sm_activity_ratio if self.user else None

    @property
    def busy_ratio(self) -> float | None:
        """SM time, or SM activity on a MIG device."""
        return self.user.busy_ratio if self.user else self.sm_ratio

    @property
    def last_active(self) -> float | None:
        return self.user.last_active if self.user else None

    @property
    def pod(self) -> str:
        """The pod, or the work outside pods."""
        return self.container.pod or work_name(self.work)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None


class TopRow(Entry, frozen=True, kw_only=True):
    """A row as -o json has it. `node` is only in that of a fleet; `pid`, `type` and `name` only with --processes."""

    node: str | UnsetType = UNSET
    device: str
    uuid: str
    model: str | None
    namespace: str | None
    pod: str | None
    container: str | None
    work: WorkEntry | None
    owner: str
    memory_bytes: int | None
    memory_ratio: float | None
    memory_peak_bytes: int | None
    granted_bytes: int | None
    sm_ratio: float | None
    processes: int | None
    last_active: float | None
    sm_activity_ratio: float | None
    pid: int | UnsetType | None = UNSET
    type: str | UnsetType | None = UNSET
    name: str | UnsetType | None = UNSET


# --- columns ----------------------------------------------------------------------------------------------------------


def _last_active(use: DeviceUse) -> str:
    return UNKNOWN if use.last_active is None else age(use.on.node_map.timestamp - use.last_active)


_NAMES: tuple[Column[DeviceUse], ...] = (
    name("NAMESPACE", lambda use: use.container.namespace),
    name("POD", lambda use: use.pod),
    name("CONTAINER", lambda use: use.container.container),
)
_DEVICE: Column[DeviceUse] = Column("DEVICE", lambda use: device_name(use.on.device), lambda use: use.on.number)
_MEMORY: tuple[Column[DeviceUse], ...] = (
    amount("MEMORY", size, lambda use: use.memory_bytes),
    Column("MEMORY%", lambda use: percent(use.memory_ratio), spare=4),
)
_SM: Column[DeviceUse] = amount("SM", percent, lambda use: use.busy_ratio)
_OWNER: Column[DeviceUse] = Column(
    "OWNER",
    lambda use: "reservation" if use.holder and use.holder.reservation else shown_owner(use.owner),
    lambda use: use.owner,
    colour=lambda use: COLOURS.get(use.owner, ""),
)
_LAST: tuple[Column[DeviceUse], ...] = (
    Column("UUID", lambda use: use.on.device.uuid, name=True, wide=True),
    Column("MODEL", lambda use: use.on.device.model or UNKNOWN, name=True, wide=True),
)
COLUMNS: tuple[Column[DeviceUse], ...] = (
    *_NAMES,
    _DEVICE,
    *_MEMORY,
    amount("PEAK", size, lambda use: use.memory_peak_bytes, spare=5),
    _SM,
    amount("PROCESSES", number, lambda use: use.processes, spare=3),
    _OWNER,
    amount("GRANTED", size, lambda use: use.granted_bytes, wide=True),
    Column("LAST ACTIVE", _last_active, wide=True),
    *_LAST,
)
PROCESS_COLUMNS: tuple[Column[DeviceUse], ...] = (
    _DEVICE,
    Column("PID", lambda use: number(use.pid), lambda use: use.pid),
    Column("TYPE", lambda use: (use.process and use.process.type) or UNKNOWN, spare=5),
    Column("PROCESS", lambda use: (use.process and use.process.name) or UNKNOWN, name=True),
    *_NAMES,
    *_MEMORY,
    _SM,
    _OWNER,
    *_LAST,
)
SORT_KEYS = sort_keys((NODE, *COLUMNS, *PROCESS_COLUMNS))
"""Either table is sorted by the columns of both."""


# --- what is shown ----------------------------------------------------------------------------------------------------


def top_table(maps: NodeMaps, shape: Shape) -> str:
    """Return the rows, then what keeps them from being whole."""
    uses = uses_of(maps, shape)
    if uses:
        columns = spare_containers(PROCESS_COLUMNS if shape.processes else COLUMNS, (use.container for use in uses))
        block = table(with_node(columns, fleet=maps.fleet), uses, shape)
    elif shape.namespace or not any(one.devices for one in maps.maps):
        block = no_rows(maps, shape)
    else:
        block = "Nothing is in use." if all_known(maps) else "No known use."
    return joined([block, notes(troubles(maps), shape.screen, "red")])


def top_values(maps: NodeMaps, shape: Shape) -> dict[str, object]:
    """Return the same rows for scripts, in bytes and ratios."""
    uses = uses_of(maps, shape)
    return values_of(maps, rows=[_value(use, fleet=maps.fleet, processes=shape.processes) for use in uses])


def top_names(maps: NodeMaps, shape: Shape) -> list[tuple[str, str]]:
    """Return the pods of the rows, in their order; only pods that exist."""
    return pods_in(use.container for use in uses_of(maps, shape) if use.owner != "gone")


def uses_of(maps: NodeMaps, shape: Shape) -> list[DeviceUse]:
    """Return the rows of the table, in its order."""
    find = _by_process if shape.processes else _by_container
    shown = of_namespace(maps, shape.namespace)
    uses = [use for node_map in shown.maps for on in node_devices(node_map) for use in find(on)]
    uses = in_order(uses, SORT_KEYS["memory"], reverse=False)  # among equals
    return in_order(uses, SORT_KEYS[shape.order or TOP_ORDERS[0]], reverse=shape.reverse)


def _by_container(on: NodeDevice) -> Iterator[DeviceUse]:
    for container, holder, user in containers_on(on.device):
        if user is None:
            yield DeviceUse(on, container, owner_of(holder, user), None, holder=holder)
        else:
            yield DeviceUse(
                on, container, user.owner, user.memory_bytes, user.sm_ratio, user.processes, holder=holder, user=user
            )
    for other in other_uses(on.device):
        ratios = [one.sm_ratio for one in other.processes if one.sm_ratio is not None]
        known = bool(ratios) and len(ratios) == len(other.processes)
        sm_ratio = min(sum(ratios), 1.0) if known else None
        if other.work:
            sm_ratio = other.work.sm_utilization_ratio
        count = other.process_count or None
        yield DeviceUse(on, other.name, other.owner, other.memory_bytes, sm_ratio, count, work=other.work)


def _by_process(on: NodeDevice) -> Iterator[DeviceUse]:
    for one in on.device.processes:
        yield DeviceUse(on, container_of(one), one.owner, one.memory_bytes, one.sm_ratio, 1, process=one, work=one.work)
    for owner in on.device.owners:
        if owner.owner in ("unaccounted", "sibling") and owner.memory_bytes:
            yield DeviceUse(on, NO_CONTAINER, owner.owner, owner.memory_bytes)


def _value(use: DeviceUse, *, fleet: bool, processes: bool) -> TopRow:
    process = use.process
    return TopRow(
        node=use.node if fleet else UNSET,
        device=device_name(use.on.device),
        uuid=use.on.device.uuid,
        model=use.on.device.model,
        namespace=use.container.namespace or None,
        pod=use.container.pod or None,
        container=use.container.container or None,
        work=WorkEntry(kind=use.work.kind, name=use.work.name) if use.work else None,
        owner=use.owner,
        memory_bytes=use.memory_bytes,
        memory_ratio=use.memory_ratio,
        memory_peak_bytes=use.memory_peak_bytes,
        granted_bytes=use.granted_bytes,
        sm_ratio=use.sm_ratio,
        processes=use.processes,
        last_active=use.last_active,
        sm_activity_ratio=use.sm_activity_ratio,
        pid=use.pid if processes else UNSET,
        type=(process.type if process else None) if processes else UNSET,
        name=(process.name if process else None) if processes else UNSET,
    )
