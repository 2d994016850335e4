"""Device ids that two pods hold, although only one may, as findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpumap.model import remedies
from gpumap.model.grouping import grouped
from gpumap.model.node import Finding
from gpumap.model.observations import DeviceId, Moment
from gpumap.model.readings import Uuid
from gpumap.model.shown import counted, listed
from gpumap.model.terms import ContainerName, PodName


class AssignedTwice(NamedTuple):
    """A shared id of one of its containers, since when, and the other pods that hold it and exist."""

    container: ContainerName
    resource: str
    device_id: DeviceId
    uuid: Uuid
    since: Moment
    pods: tuple[PodName, ...]


def judge_assigned_twice(twice: Iterable[AssignedTwice]) -> Iterator[Finding]:
    """Yield a finding for each container and device."""
    for (name, uuid), entries in grouped(((entry.container, entry.uuid), entry) for entry in twice).items():
        pods = sorted({"/".join(pod) for entry in entries for pod in entry.pods})
        slots = [
            counted(len(ids), f"slot of {resource}", f"slots of {resource}")
            for resource, ids in grouped((entry.resource, entry.device_id) for entry in entries).items()
        ]
        yield Finding(
            *name,
            finding="unmatched",
            reason="assigned_twice",
            uuid=uuid,
            since=min(entry.since.wall for entry in entries),
            why=f"{listed(slots)} also assigned to {listed(pods)}",
            remedy=remedies.UNMATCHED["assigned_twice"],
        )
