"""A server's values of all nodes, grouped by device and by target, so that maps can be made of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from gpumap.cli.fleet import families
from gpumap.cli.fleet.families import DeviceInfo, DevicelessGpu, Family
from gpumap.cli.fleet.targets import Key, Labels, Node
from gpumap.cli.fleet.values import NO_VALUES, FamilyValues, Value
from gpumap.model.terms import Owner

Container = tuple[str, str, str]
"""Namespace, pod, container."""
Slots = dict[str, int]
"""By resource."""

_OWNERS = tuple(owner.value for owner in Owner)
_INFO_WIDTH = len(families.DEVICE_INFO.by)


class TargetFacts(NamedTuple):
    """What a gpumap reports about its node as a whole."""

    sources: dict[str, bool]
    successes: dict[str, float]
    capabilities: dict[str, bool]
    unmatched: dict[Labels, int]
    """By namespace, pod, container, resource and reason."""
    down: list[str]
    """GPUs that do not answer."""
    uuids: list[str]
    """Devices."""
    deviceless: list[DevicelessGpu]
    driver: list[Labels]
    """Versions of the driver, CUDA and NVML; empty if gpumap does not serve the group `device` or NVML never
    answered."""
    pods: list[Labels]
    """Namespace, name and UID of those that hold or use a device."""


class Cluster(NamedTuple):
    """`faults` are the reasons of GPUs that are down."""

    values: Mapping[str, FamilyValues]
    infos: dict[str, DeviceInfo]
    holders: dict[str, dict[Container, Slots]]
    users: dict[str, list[Container]]
    offers: dict[str, Slots]
    works: dict[str, list[tuple[str, str]]]
    """Kinds and names of the work outside pods, by uuid."""
    owners: dict[str, list[tuple[str, int | None, int | None]]]
    """By uuid: owner, bytes, processes."""
    held: dict[str, int]
    """The number of containers that hold each device whose holders are known."""
    faults: dict[str, str]
    targets: dict[Key, TargetFacts]

    def of(self, family: Family) -> dict[Labels, Value]:
        """Return a family's values by its own labels."""
        return self.values.get(family.name, NO_VALUES).values

    def value(self, family: Family, *labels: str) -> Value | None:
        return self.of(family).get(labels)

    def whole(self, family: Family, *labels: str) -> int | None:
        """Return a value that is whole: bytes, processes."""
        value = self.of(family).get(labels)
        return None if value is None else int(value)


def group_by_family(values: Mapping[str, FamilyValues]) -> Cluster:
    """Group the values of families, by their names."""
    cluster = Cluster(values, {}, {}, {}, {}, {}, {}, {}, {}, {})
    places: dict[str, set[Key]] = {}
    for row in sorted(cluster.of(families.DEVICE_INFO)):
        cluster.infos.setdefault(row[0], DeviceInfo(*row[:_INFO_WIDTH]))
        places.setdefault(row[0], set()).add(row[_INFO_WIDTH:])
    _group_slots(cluster, places)
    for info in list(cluster.infos.values()):
        # A partitioned GPU that was assigned as a whole is a device without series of its own.
        whole = replace(info, uuid=info.gpu_uuid, mig_profile="", gpu_instance_id="", compute_instance_id="")
        cluster.infos.setdefault(info.gpu_uuid, whole)
    for row in sorted(cluster.of(families.DEVICELESS)):
        gpu = DevicelessGpu(*row[: len(families.DEVICELESS.by)])
        info = DeviceInfo(gpu.gpu_uuid, gpu.gpu_uuid, gpu.index, gpu.minor, gpu.pci_bus_id, gpu.model, "", "", "")
        cluster.infos.setdefault(gpu.gpu_uuid, info)
    for namespace, pod, container, uuid in sorted(cluster.of(families.PROCESSES)):
        cluster.users.setdefault(uuid, []).append((namespace, pod, container))
    for kind, name, uuid in sorted(cluster.of(families.HOST_PROCESSES)):
        cluster.works.setdefault(uuid, []).append((kind, name))
    _group_owners(cluster)
    cluster.faults.update({uuid: "unknown" for uuid, *_ in cluster.of(families.GPU_DOWN)})
    cluster.faults.update(
        {uuid: reason for uuid, reason in sorted(cluster.of(families.GPU_FAULT)) if uuid in cluster.faults}
    )
    _group_targets(cluster)
    for uuid in sorted(places):
        for key in places[uuid]:
            _facts_of(cluster, key).uuids.append(uuid)
    return cluster


def devices_of(cluster: Cluster, node: Node) -> list[str]:
    """Return the uuids that a node's targets know, each once."""
    return sorted({uuid for key in node.keys if key in cluster.targets for uuid in cluster.targets[key].uuids})


def newest_facts(cluster: Cluster, node: Node) -> TargetFacts:
    """Return what the node's gpumap reports: the one that collected last, if there are several during an update."""
    known = (cluster.targets[key] for key in node.keys if key in cluster.targets)
    return next(known, None) or _no_facts()


def targets_by_device(cluster: Cluster) -> dict[str, list[Key]]:
    """Return the targets that know each device."""
    keys: dict[str, list[Key]] = {}
    for key, facts in cluster.targets.items():
        for uuid in facts.uuids:
            keys.setdefault(uuid, []).append(key)
    return keys


def gpus_by_index(cluster: Cluster) -> dict[Key, dict[str, str]]:
    """Return the GPUs that each target knows, by their index."""
    gpus: dict[Key, dict[str, str]] = {}
    for row in cluster.of(families.DEVICE_INFO):
        info = DeviceInfo(*row[:_INFO_WIDTH])
        gpus.setdefault(row[_INFO_WIDTH:], {})[info.index] = info.gpu_uuid
    return gpus


def devices_without_target(cluster: Cluster) -> list[str]:
    """Return devices that containers hold or use, and that no target reports."""
    placed = {uuid for facts in cluster.targets.values() for uuid in facts.uuids}
    return sorted((cluster.holders.keys() | cluster.users.keys()) - placed)


def users_by_owner(uuid: str, holders: Collection[Container], cluster: Cluster) -> Iterator[tuple[Container, str]]:
    """Return the containers that use a device, and the owner word of each.

    No series has that word for a container; the sums by owner decide. An init container that was assigned the device is
    no holder, as the kubelet's list does not have it: its processes are still among the device's `assigned` ones. If
    several containers are possible, those whose pod holds the device come first. A holder without slots is `scheduled`.
    """
    users = cluster.users.get(uuid, ())
    running = {name: cluster.of(families.PROCESSES)[(*name, uuid)] for name in users}
    held = {uuid, cluster.infos[uuid].gpu_uuid} if uuid in cluster.infos else {uuid}
    with_slots = {name for one in held for name, slots in cluster.holders.get(one, {}).items() if slots}
    owner_of = {name: "assigned" if name in with_slots else "scheduled" for name in holders}
    owner_of |= {name: "unassigned" for name in users if (*name, uuid) in cluster.of(families.UNASSIGNED)}
    pods = {name[:2] for name in holders}
    for word in ("assigned", "scheduled"):
        sums = (processes for owner, _, processes in cluster.owners.get(uuid, ()) if owner == word)
        left = (next(sums, 0) or 0) - sum(running[name] for name in users if owner_of.get(name) == word)
        for name in sorted(running, key=lambda name: (name[:2] not in pods, name)):
            if name not in owner_of and 0 < running[name] <= left:
                owner_of[name] = word
                left -= running[name]
    for name in users:
        yield name, owner_of.get(name, "unknown")


# --- grouping ---------------------------------------------------------------------------------------------------------


def _group_slots(cluster: Cluster, places: dict[str, set[Key]]) -> None:
    """Group holders and offers. A device that NVML does not report belongs to the target that reports its holder."""
    for (namespace, pod, container, uuid, resource), slots in sorted(cluster.of(families.SLOTS).items()):
        held = cluster.holders.setdefault(uuid, {}).setdefault((namespace, pod, container), {})
        held[resource] = max(held.get(resource, 0), int(slots))
    for namespace, pod, container, uuid in sorted(cluster.of(families.HOLDING)):
        cluster.holders.setdefault(uuid, {}).setdefault((namespace, pod, container), {})
    for (uuid,), key, count in _by_target(cluster, families.HOLDER_COUNT):
        cluster.held[uuid] = max(cluster.held.get(uuid, 0), int(count))
        if uuid not in cluster.infos:
            places.setdefault(uuid, set()).add(key)
    for (uuid, resource), key, slots in _by_target(cluster, families.ALLOCATABLE):
        offered = cluster.offers.setdefault(uuid, {})
        offered[resource] = max(offered.get(resource, 0), int(slots))
        if uuid not in cluster.infos:
            places.setdefault(uuid, set()).add(key)


def _group_owners(cluster: Cluster) -> None:
    memory, processes = families.OWNER_BYTES, families.OWNER_PROCESSES
    rows = {*cluster.of(memory), *cluster.of(processes)}
    for uuid, owner in sorted((row for row in rows if row[1] in _OWNERS), key=lambda row: _OWNERS.index(row[1])):
        sums = (owner, cluster.whole(memory, uuid, owner), cluster.whole(processes, uuid, owner))
        cluster.owners.setdefault(uuid, []).append(sums)


def _group_targets(cluster: Cluster) -> None:
    for (source,), key, up in _by_target(cluster, families.SOURCE_UP):
        _facts_of(cluster, key).sources[source] = bool(up)
    for (source,), key, moment in _by_target(cluster, families.SOURCE_SUCCESS):
        _facts_of(cluster, key).successes[source] = moment
    for (capability,), key, present in _by_target(cluster, families.CAPABILITY):
        _facts_of(cluster, key).capabilities[capability] = bool(present)
    for labels, key, slots in _by_target(cluster, families.UNMATCHED):
        _facts_of(cluster, key).unmatched[labels] = int(slots)
    for (uuid,), key, _ in _by_target(cluster, families.GPU_DOWN):
        _facts_of(cluster, key).down.append(uuid)
    for labels, key, _ in _by_target(cluster, families.DEVICELESS):
        _facts_of(cluster, key).deviceless.append(DevicelessGpu(*labels))
    for labels, key, _ in _by_target(cluster, families.DRIVER_INFO):
        _facts_of(cluster, key).driver.append(labels)
    for labels, key, _ in _by_target(cluster, families.POD_INFO):
        _facts_of(cluster, key).pods.append(labels)


def _facts_of(cluster: Cluster, key: Key) -> TargetFacts:
    if key not in cluster.targets:
        cluster.targets[key] = _no_facts()
    return cluster.targets[key]


def _no_facts() -> TargetFacts:
    return TargetFacts({}, {}, {}, {}, [], [], [], [], [])


def _by_target(cluster: Cluster, family: Family) -> Iterator[tuple[Labels, Key, Value]]:
    """Return a family's own labels, its target and its value; sorted."""
    width = len(family.by)
    for row, value in sorted(cluster.of(family).items()):
        yield row[:width], row[width:], value
