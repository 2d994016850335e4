"""What the plugins answered for a listed container: the checkpoint's row of its ids, where one and only one fits."""

from __future__ import annotations

from collections.abc import Iterable

from gpumap.agent.join.pods import PodTable
from gpumap.model.device_ids import DeviceRef
from gpumap.model.observations import (
    CheckpointEntry,
    ContainerName,
    ListedContainer,
    PluginAnswer,
    PodName,
    PodUid,
    ResourceDevices,
)
from gpumap.model.plugins import family, named_devices


class Answers:
    """What one checkpoint's rows say of listed containers."""

    def __init__(self, table: PodTable) -> None:
        self._uid_of = table.uid_of
        self._table = table

    def uid(self, name: ContainerName) -> PodUid | None:
        """The UID of a container's pod, if it is fixed."""
        return self._uid_of.get(name.pod_name)

    def of(self, name: ContainerName, devices: ResourceDevices, container: ListedContainer) -> tuple[PluginAnswer, ...]:
        """The answers that tell of these ids: the one to their resource first, then those of the plugin's others."""
        own_family = family(devices.resource)
        others = [
            other
            for other in container.devices
            if own_family and other is not devices and family(other.resource) == own_family
        ]
        found = (self._one(name, one) for one in (devices, *others))
        return tuple(answer for answer in found if answer is not None)

    def _one(self, name: ContainerName, devices: ResourceDevices) -> PluginAnswer | None:
        """Of rows that have these ids those of the pod, if its UID is fixed; else all must say the same."""
        if not devices.ids:
            return None
        rows = self._table.rows.of(name.container, devices)
        uid = self.uid(name)
        if uid is not None:
            rows = [row for row in rows if row.pod_uid == uid]
        else:  # a row of a pod that has ended stays until the next write, and its ids may have been handed on
            rows = [row for row in rows if self._name(row.pod_uid) in (None, name.pod_name)]
        answers = {row.answer for row in rows}
        return answers.pop() if len(answers) == 1 else None

    def _name(self, uid: PodUid) -> PodName | None:
        return self._table.named.get(uid) or self._table.name(uid)


def answers_of_row(row: CheckpointEntry, rows: Iterable[CheckpointEntry]) -> tuple[PluginAnswer, ...]:
    """The answers that tell of one row's ids: its own first, then those of its plugin's other rows among `rows`."""
    own_family = family(row.resource)
    others = (one for one in rows if own_family and one is not row and family(one.resource) == own_family)
    return tuple(one.answer for one in (row, *others) if one.answer is not None)


def first_named(answers: Iterable[PluginAnswer]) -> tuple[DeviceRef, ...]:
    """The devices that the first of some answers names that names any."""
    return next((refs for answer in answers if (refs := named_devices(answer))), ())
