"""Pod identity: the device checkpoint, the log directories, DRA's state and the Pods API as one source.

Each is optional, and one must answer. DRA's state does not count: it ties UIDs to claims, but names no pod and no
container.
"""

from collections.abc import Callable

from gpumap.agent.sources.checkpoint import CheckpointSource
from gpumap.agent.sources.dra import DraSource
from gpumap.agent.sources.podlogs import PodLogsSource
from gpumap.model.observations import Complaint, PodIdentity, ReportedPod, SourceAnswer, SourceError

_NOT_TAKEN = frozenset({"checkpoint_missing", "pod_logs_missing"})


def not_asked() -> SourceAnswer[tuple[ReportedPod, ...] | None]:
    """The Pods API, for who was not asked to ask it."""
    return SourceAnswer(None)


class PodIdentitySource:
    """Reads all. A file that is merely not mounted is no complaint: it is a step of the privilege ladder not taken."""

    def __init__(
        self,
        checkpoint: CheckpointSource,
        logs: PodLogsSource,
        dra: DraSource,
        wall: Callable[[], float],
        read_pods: Callable[[], SourceAnswer[tuple[ReportedPod, ...] | None]] = not_asked,
    ) -> None:
        self._checkpoint = checkpoint
        self._logs = logs
        self._dra = dra
        self._wall = wall
        self._read_pods = read_pods

    def read(self) -> SourceAnswer[PodIdentity]:
        """Give what can be read. Raises SourceError with all reasons where none that counts can."""
        pods, complaints_of_pods = self._read_pods()
        dra, complaints_of_dra = self._dra.read()
        complaints: list[Complaint] = [*complaints_of_pods, *complaints_of_dra]
        checkpoint = logs = None
        try:
            checkpoint, partly = self._checkpoint.read()
            complaints.extend(partly)
        except SourceError as error:
            complaints.extend(error.complaints)
        try:
            logs, partly = self._logs.read(self._wall())
            complaints.extend(partly)
        except SourceError as error:
            complaints.extend(error.complaints)
        if checkpoint is None and logs is None and pods is None:
            last = complaints[-1]
            raise SourceError(last.reason, last.detail, tuple(complaints[:-1]))
        broken = tuple(one for one in complaints if one.reason not in _NOT_TAKEN)
        return SourceAnswer(PodIdentity(checkpoint, logs, dra, pods), broken)
