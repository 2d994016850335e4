"""The record of each source: whether its last attempt succeeded, and how many attempts and complaints it had."""

from __future__ import annotations

from msgspec import structs

from gpumap.model import remedies
from gpumap.model.node import SourceHealth
from gpumap.model.observations import Complaint, Failed, Observations, Observed
from gpumap.model.terms import Source

_REASONS = {
    Source.KUBELET: (
        "connection_refused",
        "deadline_exceeded",
        "permission_denied",
        "rate_limited",
        "socket_missing",
    ),
    Source.NVML: (
        "deadline_exceeded",
        "driver_not_loaded",
        "hung",
        "library_not_found",
        "lost",
        "worker_crashed",
    ),
    Source.PROCFS: ("unreadable",),
    Source.POD_IDENTITY: ("checkpoint_corrupt", "checkpoint_unreadable", "pod_logs_unreadable"),
}
"""Reasons that are counted from 0: increase() then shows their first error. Other reasons are added when they occur."""


def untried() -> tuple[SourceHealth, ...]:
    """Return the record of sources before their first attempt."""
    return tuple(SourceHealth(source.value, errors=dict.fromkeys(_REASONS[source], 0)) for source in Source)


def answers(observations: Observations) -> dict[str, Observed[object] | Failed]:
    """Return the answers and failures of one collection, by source."""
    found: dict[str, Observed[object] | Failed | None] = {
        Source.KUBELET: observations.kubelet,
        Source.NVML: observations.nvml,
        Source.PROCFS: observations.procfs,
        Source.POD_IDENTITY: observations.pod_identity,
    }
    return {source: answer for source, answer in found.items() if answer is not None}


def record_health(health: tuple[SourceHealth, ...], observations: Observations) -> tuple[SourceHealth, ...]:
    """Add the answers and failures of one collection. A source that this machine does not have has no record."""
    now = answers(observations)
    return tuple(_record(before, now[before.source]) for before in health if before.source in now)


def _record(before: SourceHealth, answer: Observed[object] | Failed) -> SourceHealth:
    errors = dict(before.errors)
    for complaint in answer.complaints:
        errors[complaint.reason] = errors.get(complaint.reason, 0) + 1
    last = answer.complaints[-1] if answer.complaints else Complaint("", "")
    return structs.replace(
        before,
        up=isinstance(answer, Observed),
        reason=last.reason,
        detail=last.detail,
        remedy=remedies.SOURCES[Source(before.source)].get(last.reason),
        last_success=answer.at.wall if isinstance(answer, Observed) else before.last_success,
        attempts=before.attempts + 1,
        seconds=before.seconds + answer.seconds,
        errors=errors,
        failures=before.failures + isinstance(answer, Failed),
        last_seconds=answer.seconds,
    )
