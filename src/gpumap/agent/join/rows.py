"""The device checkpoint's rows, found by what the List says of a container; the List has no UIDs."""

from __future__ import annotations

from gpumap.model.observations import Checkpoint, CheckpointEntry, DeviceId, ResourceDevices


class Rows:
    """The rows of one checkpoint by container, resource and id."""

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self._by_id: dict[tuple[str, str, DeviceId], list[CheckpointEntry]] = {}
        for entry in checkpoint.entries if checkpoint else ():
            for device_id in entry.ids:
                self._by_id.setdefault((entry.container, entry.resource, device_id), []).append(entry)

    def of(self, container: str, devices: ResourceDevices) -> list[CheckpointEntry]:
        """Those that hold all that a container of this name is listed with; devices have one id at least.

        They may hold more: kubelets 1.20 to 1.22 leave some devices out of the List (kubernetes/kubernetes#103289).
        """
        listed = frozenset(devices.ids)
        with_first = self._by_id.get((container, devices.resource, devices.ids[0]), ())
        return [row for row in with_first if listed <= row.ids]
