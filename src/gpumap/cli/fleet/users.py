"""Whether a container that uses a device was given it: no series says so of each, and the sums do. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gpumap.cli.fleet import families
from gpumap.cli.fleet.cluster import Cluster, Container


def users_by_owner(uuid: str, holders: Collection[Container], cluster: Cluster) -> Iterator[tuple[Container, str]]:
    """The containers that use a device, and as whom.

    An init container that was given the device is no holder, as the kubelet's list does not have it: its processes are
    among the device's `assigned` ones all the same. Of several that may be meant, pods that hold the device come first.
    """
    users = cluster.users.get(uuid, ())
    running = {name: cluster.of(families.PROCESSES)[(*name, uuid)] for name in users}
    accused = {name for name in users if (*name, uuid) in cluster.of(families.UNASSIGNED)}
    told = (processes for owner, _, processes in cluster.owners.get(uuid, ()) if owner == "assigned")
    left = (next(told, 0) or 0) - sum(running[name] for name in users if name in holders)
    pods = {name[:2] for name in holders}
    assigned = set(holders)
    for name in sorted(running, key=lambda name: (name[:2] not in pods, name)):
        if name not in assigned and name not in accused and 0 < running[name] <= left:
            assigned.add(name)
            left -= running[name]
    for name in users:
        yield name, "assigned" if name in assigned else "unassigned" if name in accused else "unknown"
