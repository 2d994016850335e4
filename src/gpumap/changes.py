"""The log: what changed from one snapshot to the next, a line each, and nothing while nothing changes."""

import logging

from gpumap.model import Observations, Observed, Source
from gpumap.snapshot import Snapshot, SourceHealth

OPTIONAL_STEPS = ("device_checkpoint", "pod_logs", "process_utilization")
"""Capabilities that privileges or the driver give or withhold, besides PID visibility."""


def log_changes(log: logging.Logger, before: Snapshot | None, after: Snapshot, observations: Observations) -> None:
    """Log the changes between two snapshots that follow each other; `before` is `None` at the start."""
    known = {health.source: health for health in before.sources} if before else {}
    for health in after.sources:
        _log_source(log, known.get(health.source), health)
    _log_visibility(log, before, after, observations)
    if before is None or _optional(before) != _optional(after):
        log.info("capabilities %s", _optional(after))
    faults = {gpu.uuid: gpu.fault for gpu in before.gpus} if before else {}
    for gpu in after.gpus:
        if gpu.fault != faults.get(gpu.uuid):
            if gpu.fault is not None:
                log.warning("gpu down uuid=%s index=%d reason=%s", gpu.uuid, gpu.index, gpu.fault)
            else:
                log.info("gpu up uuid=%s index=%d", gpu.uuid, gpu.index)
    both_up = before is not None and before.driver is not None and after.driver is not None
    if before is not None and both_up and {gpu.uuid for gpu in before.gpus} != {gpu.uuid for gpu in after.gpus}:
        log.info("gpus changed count=%d", len(after.gpus))
    known_hidden = {device.uuid for device in before.hidden} if before else set()
    for device in after.hidden:
        if device.uuid not in known_hidden:
            log.error("mig device hidden: this container has no nodes of it uuid=%s", device.uuid)


def _optional(snapshot: Snapshot) -> str:
    return " ".join(f"{name}={present:d}" for name, present in snapshot.capabilities if name in OPTIONAL_STEPS)


def _log_source(log: logging.Logger, before: SourceHealth | None, after: SourceHealth) -> None:
    if before is not None and (before.up, before.reason) == (after.up, after.reason):
        return
    if not after.up:
        log.warning("source down source=%s reason=%s detail=%r", after.source.value, after.reason, after.detail)
    elif after.reason:
        log.warning("source complains source=%s reason=%s detail=%r", after.source.value, after.reason, after.detail)
    else:
        log.info("source up source=%s", after.source.value)


def _log_visibility(log: logging.Logger, before: Snapshot | None, after: Snapshot, observations: Observations) -> None:
    if not isinstance(observations.procfs, Observed):
        return
    seen = dict(after.capabilities)["pid_visibility"]
    known = before is not None and any(health.up for health in before.sources if health.source is Source.PROCFS)
    if before is not None and known and dict(before.capabilities)["pid_visibility"] == seen:
        return
    reason = after.visibility_reason
    if seen:
        log.info("processes of other containers are visible pid_visibility=1 reason=%r", reason)
    else:
        log.warning(
            "no per-container memory or SM: processes of other containers are not visible pid_visibility=0 reason=%r",
            reason,
        )
