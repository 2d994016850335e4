"""Pod identity: the device checkpoint and the log directories as one source. Each is optional; one must answer."""

from collections.abc import Callable

from gpumap.model import Complaint, PodIdentity, SourceError, Told
from gpumap.sources.checkpoint import CheckpointSource
from gpumap.sources.podlogs import PodLogsSource


class PodIdentitySource:
    """Reads both. A file that is merely not mounted is no complaint: it is a step of the privilege ladder not taken."""

    def __init__(self, checkpoint: CheckpointSource, logs: PodLogsSource, wall: Callable[[], float]) -> None:
        self._checkpoint = checkpoint
        self._logs = logs
        self._wall = wall

    def read(self) -> Told[PodIdentity]:
        """Give what can be read. Raises SourceError with both reasons where neither can."""
        complaints: list[Complaint] = []
        checkpoint = logs = None
        try:
            checkpoint = self._checkpoint.read()
        except SourceError as error:
            complaints.extend(error.complaints)
        try:
            logs, partly = self._logs.read(self._wall())
            complaints.extend(partly)
        except SourceError as error:
            complaints.extend(error.complaints)
        if checkpoint is None and logs is None:
            last = complaints[-1]
            raise SourceError(last.reason, last.detail, tuple(complaints[:-1]))
        broken = tuple(one for one in complaints if not one.reason.endswith("_missing"))
        return Told(PodIdentity(checkpoint, logs), broken)
