"""The group `health`: clocks, throttle reasons, fans, memory errors, recovery actions and XID errors."""

from __future__ import annotations

from collections import Counter

from gpumap.agent.metrics.allocation import CONTAINER_LABELS
from gpumap.agent.metrics.device import GPUS, READINGS
from gpumap.model.families import Family, Rows, Series, whether
from gpumap.model.readings import GpuReading
from gpumap.model.snapshot import Snapshot

_ECC_ERRORS = Rows(
    ("gpu_uuid", "type"),
    lambda snapshot: (
        ((uuid, kind), counts)
        for (uuid,), reading in READINGS.read(snapshot)
        for kind, counts in reading.ecc_errors.items()
    ),
)
_PARTS_OF_THERMAL = frozenset({"sw_thermal_slowdown", "hw_thermal_slowdown"})


def _clock_event_seconds(reading: GpuReading) -> dict[str, float]:
    """Return the driver's times by reason, without those that contain the times of other reasons."""
    sums = {"total_app_clocks", "total_base_clocks"}
    if reading.clock_event_seconds.keys() & _PARTS_OF_THERMAL:
        sums.add("thermal")
    return {reason: seconds for reason, seconds in reading.clock_event_seconds.items() if reason not in sums}


_XIDS_OF_GPUS = Rows(("gpu_uuid",), lambda snapshot: (((xids.uuid,), xids) for xids in snapshot.node.xids))

HEALTH = (
    READINGS.by(
        "domain", "gpumap_gpu_clock_hertz", "Current clock frequency, by domain.", lambda reading: reading.clocks_hertz
    ),
    READINGS.by(
        "reason",
        "gpumap_gpu_clock_event",
        "1 if the driver throttles the clocks now for this reason, else 0. Idleness is a reason.",
        lambda reading: {reason: int(active) for reason, active in reading.clock_events.items()},
    ),
    READINGS.by(
        "reason",
        "gpumap_gpu_clock_event_seconds_total",
        "Time of throttled clocks, by reason, as counted by the driver. No reason contains the time of another.",
        _clock_event_seconds,
        "counter",
    ),
    READINGS.gauge(
        "gpumap_gpu_performance_state",
        "Performance state, from 0 (fastest) to 15 (slowest).",
        lambda reading: reading.performance_state,
    ),
    READINGS.by(
        "fan",
        "gpumap_gpu_fan_speed_ratio",
        "Fan speed as a ratio of its maximum speed. Can exceed 1.",
        lambda reading: reading.fan_speed_ratios,
    ),
    _ECC_ERRORS.by(
        "location",
        "gpumap_gpu_ecc_errors_total",
        "ECC memory errors over the GPU's life, by type and location, as counted by the driver.",
        lambda counts: counts,
        "counter",
    ),
    READINGS.by(
        "type",
        "gpumap_gpu_remapped_rows",
        "Memory rows that the GPU replaced by spare rows, by type of their errors.",
        lambda reading: reading.remapped_rows,
    ),
    READINGS.gauge(
        "gpumap_gpu_row_remap_pending",
        "1 if the GPU replaces rows at its next reset, else 0.",
        lambda reading: whether(reading.row_remap_pending),
    ),
    READINGS.gauge(
        "gpumap_gpu_row_remap_failure",
        "1 if the GPU could not replace a row because no spare row was left, else 0.",
        lambda reading: whether(reading.row_remap_failure),
    ),
    READINGS.by(
        "type",
        "gpumap_gpu_retired_pages",
        "Memory pages that the GPU no longer uses, by type of their errors. GPUs before Ampere.",
        lambda reading: reading.retired_pages,
    ),
    GPUS.info(
        ("action",),
        "gpumap_gpu_recovery_action_info",
        "Recovery action that the driver requests for the GPU; none if the GPU is healthy.",
        lambda gpu: (gpu.recovery_action,) if gpu.recovery_action is not None else None,
    ),
    _XIDS_OF_GPUS.counter(
        "gpumap_gpu_xid_errors_total",
        "XID errors of the GPU that gpumap received.",
        lambda xids: sum(xids.counts.values()),
    ),
    _XIDS_OF_GPUS.by(
        "xid",
        "gpumap_gpu_xid_errors_by_code_total",
        "XID errors of the GPU that gpumap received, by code.",
        lambda xids: {str(code): count for code, count in xids.counts.items()},
        "counter",
    ),
    Family(
        "gpumap_container_xid_errors_total",
        "counter",
        "XID errors of the device while the container held or used it, by code.",
        (*CONTAINER_LABELS, "xid"),
        lambda snapshot: [
            Series((*row.name, row.uuid, str(row.code)), row.errors) for row in snapshot.node.container_xids
        ],
    ),
    _XIDS_OF_GPUS.counter(
        "gpumap_xid_blind_seconds_total",
        "Time without a registered XID event listener for the GPU.",
        lambda xids: xids.blind_seconds,
    ),
)


# --- the group findings -----------------------------------------------------------------------------------------------


_FOUND = Rows(
    ("finding", "reason", "namespace", "pod", "container", "uuid"),
    lambda snapshot: (
        ((finding.finding, finding.reason, *finding.name, finding.uuid or ""), finding)
        for finding in snapshot.node.findings or ()
    ),
)
_JUDGED = Rows(("finding",), lambda snapshot: (((kind,), count) for kind, count in snapshot.node.judged.items()))


def _unjudged(snapshot: Snapshot) -> list[tuple[tuple[str, str], int]]:
    """Count what cannot be judged, by kind of finding and reason."""
    counts = Counter((kind, entry.reason) for entry in snapshot.node.unjudged for kind in entry.findings)
    return sorted(counts.items())


_UNJUDGED = Rows(("finding", "reason"), _unjudged)


FINDINGS = (
    _FOUND.gauge(
        "gpumap_finding_since_timestamp_seconds",
        "Unix time since when the finding holds, as far as gpumap has seen it. It exists as long as the finding. Of "
        "fault and not_offered, uuid is the GPU.",
        lambda finding: finding.since,
    ),
    _FOUND.gauge(
        "gpumap_finding_gpus",
        "Share of physical GPUs that an idle, maybe_idle, unused or stalled container holds. 1 for a GPU that is not "
        "offered, or busy without a process. A GPU with faults counts once: 1 for the worst, 0 for its others.",
        lambda finding: finding.gpus,
    ),
    _FOUND.gauge(
        "gpumap_finding_memory_bytes",
        "GPU memory that is granted but not used (idle, maybe_idle, unused), used above the grant (over), or used "
        "without a grant (squatter, leftover, unexplained).",
        lambda finding: finding.memory_bytes,
    ),
    _JUDGED.gauge(
        "gpumap_finding_judged",
        "How many GPUs, devices, containers or holders can be judged for this kind of finding now.",
        int,
    ),
    _UNJUDGED.gauge(
        "gpumap_finding_unjudged",
        "How many cannot be judged for this kind of finding now, by reason: findings may be missing. Absent if 0.",
        int,
    ),
)
