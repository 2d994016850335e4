"""The log: one line for each change from one snapshot to the next, and none while nothing changes."""

import logging
from collections import Counter
from operator import attrgetter

from gpumap.model.node import Gpu, SourceHealth
from gpumap.model.observations import Observations, Observed
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Source

_XIDS_KEY = attrgetter("name", "uuid", "code")
OPTIONAL_STEPS = ("device_checkpoint", "pod_logs", "process_utilization")
"""Capabilities that depend on privileges or on the driver, apart from PID visibility."""


def log_changes(log: logging.Logger, before: Snapshot | None, after: Snapshot, observations: Observations) -> None:
    """Log the changes between two consecutive snapshots. `before` is `None` at the start."""
    known = {health.source: health for health in before.node.sources} if before else {}
    for health in after.node.sources:
        _log_source(log, known.get(health.source), health)
    _log_other_complaints(log, before, after)
    _log_visibility(log, before, after, observations)
    if before is None or _optional(before) != _optional(after):
        log.info("capabilities %s", _optional(after))
    known_gpus = {gpu.uuid: gpu for gpu in before.node.gpus} if before else {}
    for gpu in after.node.gpus:
        _log_gpu(log, known_gpus.get(gpu.uuid), gpu)
    _log_xids(log, before, after, observations)
    both_up = before is not None and before.node.driver is not None and after.node.driver is not None
    if before is not None and both_up and known_gpus.keys() != {gpu.uuid for gpu in after.node.gpus}:
        log.info("gpus changed count=%d", len(after.node.gpus))
    known_hidden = {device.uuid for device in before.hidden} if before else set()
    for device in after.hidden:
        if device.uuid not in known_hidden:
            log.error("mig device hidden: this container does not have its device nodes uuid=%s", device.uuid)


def _optional(snapshot: Snapshot) -> str:
    return " ".join(
        f"{name}={present:d}" for name, present in snapshot.node.capabilities.items() if name in OPTIONAL_STEPS
    )


def _log_source(log: logging.Logger, before: SourceHealth | None, after: SourceHealth) -> None:
    if before is not None and (before.up, before.reason) == (after.up, after.reason):
        return
    if not after.up:
        log.warning("source down source=%s reason=%s detail=%r", after.source, after.reason, after.detail)
    elif after.reason:
        log.warning("source complains source=%s reason=%s detail=%r", after.source, after.reason, after.detail)
    else:
        log.info("source up source=%s", after.source)


def _log_other_complaints(log: logging.Logger, before: Snapshot | None, after: Snapshot) -> None:
    """Log the new complaints of sources beside their last ones."""
    logged = {(health.source, health.reason) for health in after.node.sources}
    new = after.complaints.keys() - (before.complaints if before else {}).keys() - logged
    for key in sorted(new):
        log.warning("source complains source=%s reason=%s detail=%r", *key, after.complaints[key])


def _log_gpu(log: logging.Logger, before: Gpu | None, after: Gpu) -> None:
    uuid, index, fault = after.uuid, after.index, after.fault
    if fault != (before.fault if before else None):
        if fault is not None:
            log.warning("gpu down uuid=%s index=%d reason=%s", uuid, index, fault)
        else:
            log.info("gpu up uuid=%s index=%d", uuid, index)
    known, action = before.recovery_action if before else None, after.recovery_action
    if action not in (None, "none", known):
        log.warning("gpu needs recovery uuid=%s index=%d action=%s", uuid, index, action)
    elif action == "none" and known not in (None, "none"):
        log.info("gpu needs no recovery uuid=%s index=%d", uuid, index)
    for word in ("row_remap_pending", "row_remap_failure"):
        if getattr(after.reading, word, None) and not (before and getattr(before.reading, word, None)):
            log.warning("gpu memory %s uuid=%s index=%d", word.replace("_", " "), uuid, index)


def _log_xids(log: logging.Logger, before: Snapshot | None, after: Snapshot, observations: Observations) -> None:
    """Log the XID errors of this collection, and the containers that they are counted for."""
    errors_by_code = Counter[tuple[Uuid, int]]()
    for event in observations.nvml.value.xids if isinstance(observations.nvml, Observed) else ():
        errors_by_code[event.uuid, event.code] += event.times
    gpu_of = {device.uuid: device.gpu_uuid for device in after.node.devices if device.gpu_uuid}
    known = {_XIDS_KEY(xids): xids.errors for xids in before.node.container_xids} if before else {}
    for (uuid, code), errors in sorted(errors_by_code.items()):
        affected = [
            "/".join(xids.name)
            for xids in after.node.container_xids
            if xids.code == code
            and gpu_of.get(xids.uuid, xids.uuid) == uuid
            and xids.errors > known.get(_XIDS_KEY(xids), 0)
        ]
        log.warning("xid gpu=%s code=%d errors=%d containers=%r", uuid, code, errors, ",".join(affected))


def _log_visibility(log: logging.Logger, before: Snapshot | None, after: Snapshot, observations: Observations) -> None:
    if not isinstance(observations.procfs, Observed):
        return
    is_visible = after.node.capabilities["pid_visibility"]
    known = before is not None and any(health.up for health in before.node.sources if health.source == Source.PROCFS)
    if before is not None and known and before.node.capabilities["pid_visibility"] == is_visible:
        return
    reason = after.node.pid_visibility_reason
    if is_visible:
        log.info("processes of other containers are visible pid_visibility=1 reason=%r", reason)
    else:
        log.warning(
            "no per-container memory or SM: processes of other containers are not visible pid_visibility=0 reason=%r",
            reason,
        )
