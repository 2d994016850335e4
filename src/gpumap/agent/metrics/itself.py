"""The families on gpumap itself."""

from __future__ import annotations

from collections.abc import Iterator

from gpumap.model.families import Family, Series
from gpumap.model.snapshot import Snapshot


def _sources_last_success(snapshot: Snapshot) -> Iterator[Series]:
    for health in snapshot.sources:
        if health.last_success is not None:
            yield Series((health.source.value,), health.last_success.wall)


def _sources_errors(snapshot: Snapshot) -> Iterator[Series]:
    for health in snapshot.sources:
        for reason, count in sorted(health.errors.items()):
            yield Series((health.source.value, reason), count)


def _sources_duration(snapshot: Snapshot) -> Iterator[Series]:
    for health in snapshot.sources:
        yield Series((health.source.value,), health.seconds, "_sum")
        yield Series((health.source.value,), health.attempts, "_count")


def self_families(version: str, python_version: str) -> tuple[Family, ...]:
    """Return the families on gpumap itself. They exist with any flags and after any failure."""
    return (
        Family(
            "gpumap_build_info",
            "gauge",
            "This gpumap's version.",
            ("version", "python_version"),
            lambda snapshot: [Series((version, python_version), 1)],
        ),
        Family(
            "gpumap_source_up",
            "gauge",
            "Whether the last attempt to ask this source succeeded.",
            ("source",),
            lambda snapshot: [Series((health.source.value,), int(health.up)) for health in snapshot.sources],
        ),
        Family(
            "gpumap_source_last_success_timestamp_seconds",
            "gauge",
            "When this source last answered.",
            ("source",),
            _sources_last_success,
        ),
        Family(
            "gpumap_source_errors_total",
            "counter",
            "What went wrong in asking this source, by reason.",
            ("source", "reason"),
            _sources_errors,
        ),
        Family(
            "gpumap_source_duration_seconds",
            "summary",
            "Time spent in asking this source.",
            ("source",),
            _sources_duration,
        ),
        Family(
            "gpumap_snapshot_timestamp_seconds",
            "gauge",
            "When the data of this page was collected.",
            (),
            lambda snapshot: [Series((), snapshot.at.wall)],
        ),
        Family(
            "gpumap_collections_total",
            "counter",
            "Collections made, by what started them.",
            ("trigger",),
            lambda snapshot: [Series((trigger,), count) for trigger, count in snapshot.collections],
        ),
        Family(
            "gpumap_capability",
            "gauge",
            "What gpumap can do here with the privileges and the driver that it has.",
            ("capability",),
            lambda snapshot: [Series((name,), int(present)) for name, present in snapshot.capabilities],
        ),
        Family(
            "gpumap_nvml_stuck_seconds",
            "gauge",
            "How long a driver call on this GPU has not returned.",
            ("uuid",),
            lambda snapshot: [Series((gpu.uuid,), gpu.stuck_seconds) for gpu in snapshot.gpus],
        ),
    )
