"""Device ids that two pods hold, although only one may: a kubelet that lost its checkpoint assigns them again.

Both pods must exist. Kubelets before 1.34 also list pods that have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpumap.agent.join.grants import Holding
from gpumap.agent.join.inventory import Inventory
from gpumap.agent.judgement.assigned_twice import AssignedTwice
from gpumap.model.grouping import grouped
from gpumap.model.observations import DeviceId, Moment
from gpumap.model.plugins import Unit
from gpumap.model.readings import Uuid
from gpumap.model.terms import ContainerName, PodName


class SharedId(NamedTuple):
    """An id that containers of several pods hold."""

    resource: str
    device_id: DeviceId
    uuid: Uuid
    containers: tuple[ContainerName, ...]


def find_shared_ids(holdings: Iterable[Holding], inventory: Inventory) -> tuple[SharedId, ...]:
    """Return the ids of whole GPUs, MIG devices and replicas that several pods hold. Claims may be shared."""
    exclusive = (
        holding
        for holding in holdings
        if holding.plugin.unit in (Unit.DEVICE, Unit.REPLICA)
        if holding.claim is None and holding.uuid not in inventory.parents
    )
    containers = grouped(((one.resource, id_, one.uuid), one.container) for one in exclusive for id_ in one.ids)
    return tuple(
        SharedId(*key, tuple(sorted(names)))
        for key, names in sorted(containers.items())
        if len({name.pod_name for name in names}) > 1
    )


def watch_shared_ids(
    before: Iterable[AssignedTwice], shared_ids: Iterable[SharedId], exists: Callable[[PodName], bool], moment: Moment
) -> tuple[AssignedTwice, ...]:
    """Return the shared ids of which at least two pods certainly exist."""
    since = {entry[:4]: entry.since for entry in before}
    twice: list[AssignedTwice] = []
    for resource, device_id, uuid, containers in shared_ids:
        pods = {container.pod_name for container in containers if exists(container.pod_name)}
        for container in containers if len(pods) > 1 else ():
            key, others = (container, resource, device_id, uuid), pods - {container.pod_name}
            if others < pods:
                twice.append(AssignedTwice(*key, since.get(key, moment), tuple(sorted(others))))
    return tuple(twice)
