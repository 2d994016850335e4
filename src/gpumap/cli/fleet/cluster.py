"""What a server told of all nodes, sorted by device and by target, so that documents can be made of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpumap.cli.fleet import families
from gpumap.cli.fleet.families import Family
from gpumap.cli.fleet.targets import Key, Node
from gpumap.cli.fleet.values import NOTHING, Told, Value

Labels = tuple[str, ...]
Container = tuple[str, str, str]
Slots = dict[str, int]
"""By resource."""

_OWNERS = ("assigned", "unassigned", "gone", "host", "mps_server", "sibling", "unknown", "unaccounted")
_INFO_WIDTH = len(families.DEVICE_INFO.by)


class OfTarget(NamedTuple):
    """What a gpumap says of its node as a whole."""

    sources: dict[str, bool]
    successes: dict[str, float]
    capabilities: dict[str, bool]
    unmatched: dict[Labels, int]
    """By namespace, pod, container, resource and reason."""
    down: list[str]
    """GPUs that do not answer."""
    uuids: list[str]
    """Devices."""
    deviceless: list[Labels]
    """GPUs without a device: uuid, index, minor, PCI bus id, model, and why it does not answer."""
    driver: list[Labels]
    """Versions of the driver, CUDA and NVML; none, where the group `device` is not served or NVML never answered."""
    pods: list[Labels]
    """Namespace, name and UID of those that hold or use a device."""


class Cluster(NamedTuple):
    """`infos` are the labels of gpumap_device_info by uuid; `faults` why a GPU that is down is."""

    told: Mapping[str, Told]
    infos: dict[str, Labels]
    holders: dict[str, dict[Container, Slots]]
    users: dict[str, list[Container]]
    offers: dict[str, Slots]
    owners: dict[str, list[tuple[str, Value | None, Value | None]]]
    """By uuid: owner, bytes, processes."""
    held: dict[str, int]
    """How many containers hold each device of which that is known."""
    faults: dict[str, str]
    targets: dict[Key, OfTarget]

    def of(self, family: Family) -> dict[Labels, Value]:
        """A family's values by its own labels."""
        return self.told.get(family.name, NOTHING).values


def group_by_family(told: Mapping[str, Told]) -> Cluster:
    """Sort what was told, by the names of families."""
    cluster = Cluster(told, {}, {}, {}, {}, {}, {}, {}, {})
    places: dict[str, set[Key]] = {}
    for row in sorted(cluster.of(families.DEVICE_INFO)):
        cluster.infos.setdefault(row[0], row[:_INFO_WIDTH])
        places.setdefault(row[0], set()).add(row[_INFO_WIDTH:])
    _sort_slots(cluster, places)
    for _, gpu_uuid, *of_gpu, _, _, _ in list(cluster.infos.values()):
        # A partitioned GPU that was given out whole is a device of which nothing is told but by its instances.
        cluster.infos.setdefault(gpu_uuid, (gpu_uuid, gpu_uuid, *of_gpu, "", "", ""))
    for uuid, *of_gpu, _ in (row[: len(families.DEVICELESS.by)] for row in sorted(cluster.of(families.DEVICELESS))):
        cluster.infos.setdefault(uuid, (uuid, uuid, *of_gpu, "", "", ""))
    for namespace, pod, container, uuid in sorted(cluster.of(families.PROCESSES)):
        cluster.users.setdefault(uuid, []).append((namespace, pod, container))
    _sort_owners(cluster)
    cluster.faults.update({uuid: "unknown" for uuid, *_ in cluster.of(families.GPU_DOWN)})
    cluster.faults.update(
        {uuid: reason for uuid, reason in sorted(cluster.of(families.GPU_FAULT)) if uuid in cluster.faults}
    )
    _sort_targets(cluster)
    for uuid in sorted(places):
        for key in places[uuid]:
            _of_target(cluster, key).uuids.append(uuid)
    return cluster


def devices_of(cluster: Cluster, node: Node) -> list[str]:
    """The uuids that a node's targets know, each once."""
    return sorted({uuid for key in node.keys if key in cluster.targets for uuid in cluster.targets[key].uuids})


def newest(cluster: Cluster, node: Node) -> OfTarget:
    """What the node's gpumap says of it: the one that collected last, where there are several for a while."""
    found = (cluster.targets[key] for key in node.keys if key in cluster.targets)
    return next(found, None) or _silent()


def knowers(cluster: Cluster) -> dict[str, list[Key]]:
    """The targets that know each device."""
    found: dict[str, list[Key]] = {}
    for key, target in cluster.targets.items():
        for uuid in target.uuids:
            found.setdefault(uuid, []).append(key)
    return found


def cards(cluster: Cluster) -> dict[Key, dict[str, str]]:
    """The GPUs that each target knows, by their index."""
    found: dict[Key, dict[str, str]] = {}
    for row in cluster.of(families.DEVICE_INFO):
        found.setdefault(row[_INFO_WIDTH:], {})[row[2]] = row[1]
    return found


def placeless(cluster: Cluster) -> list[str]:
    """Devices that containers hold or use, and of which no target tells that it has them."""
    placed = {uuid for target in cluster.targets.values() for uuid in target.uuids}
    return sorted((cluster.holders.keys() | cluster.users.keys()) - placed)


def _sort_slots(cluster: Cluster, places: dict[str, set[Key]]) -> None:
    """Who holds what, and what is offered. A device that NVML does not tell of stands where its holder is."""
    for (namespace, pod, container, uuid, resource), slots in sorted(cluster.of(families.SLOTS).items()):
        held = cluster.holders.setdefault(uuid, {}).setdefault((namespace, pod, container), {})
        held[resource] = max(held.get(resource, 0), int(slots))
    for (uuid,), key, count in _by_target(cluster, families.HOLDER_COUNT):
        cluster.held[uuid] = max(cluster.held.get(uuid, 0), int(count))
        if uuid not in cluster.infos:
            places.setdefault(uuid, set()).add(key)
    for (uuid, resource), key, slots in _by_target(cluster, families.ALLOCATABLE):
        offered = cluster.offers.setdefault(uuid, {})
        offered[resource] = max(offered.get(resource, 0), int(slots))
        if uuid not in cluster.infos:
            places.setdefault(uuid, set()).add(key)


def _sort_owners(cluster: Cluster) -> None:
    memory, processes = cluster.of(families.OWNER_BYTES), cluster.of(families.OWNER_PROCESSES)
    for row in sorted({*memory, *processes}, key=lambda row: (row[0], _rank(row[1]))):
        uuid, owner = row
        if owner in _OWNERS:
            cluster.owners.setdefault(uuid, []).append((owner, memory.get(row), processes.get(row)))


def _rank(owner: str) -> int:
    return _OWNERS.index(owner) if owner in _OWNERS else len(_OWNERS)


def _sort_targets(cluster: Cluster) -> None:
    for (source,), key, up in _by_target(cluster, families.SOURCE_UP):
        _of_target(cluster, key).sources[source] = bool(up)
    for (source,), key, moment in _by_target(cluster, families.SOURCE_SUCCESS):
        _of_target(cluster, key).successes[source] = moment
    for (capability,), key, present in _by_target(cluster, families.CAPABILITY):
        _of_target(cluster, key).capabilities[capability] = bool(present)
    for labels, key, slots in _by_target(cluster, families.UNMATCHED):
        _of_target(cluster, key).unmatched[labels] = int(slots)
    for (uuid,), key, _ in _by_target(cluster, families.GPU_DOWN):
        _of_target(cluster, key).down.append(uuid)
    for labels, key, _ in _by_target(cluster, families.DEVICELESS):
        _of_target(cluster, key).deviceless.append(labels)
    for labels, key, _ in _by_target(cluster, families.DRIVER_INFO):
        _of_target(cluster, key).driver.append(labels)
    for labels, key, _ in _by_target(cluster, families.POD_INFO):
        _of_target(cluster, key).pods.append(labels)


def _of_target(cluster: Cluster, key: Key) -> OfTarget:
    if key not in cluster.targets:
        cluster.targets[key] = _silent()
    return cluster.targets[key]


def _silent() -> OfTarget:
    return OfTarget({}, {}, {}, {}, [], [], [], [], [])


def _by_target(cluster: Cluster, family: Family) -> Iterator[tuple[Labels, Key, Value]]:
    """A family's own labels, its target, its value; sorted."""
    width = len(family.by)
    for row, value in sorted(cluster.of(family).items()):
        yield row[:width], row[width:], value
