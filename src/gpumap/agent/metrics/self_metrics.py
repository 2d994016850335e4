"""The families on gpumap itself."""

from __future__ import annotations

from gpumap.agent.metrics.allocation import NODE
from gpumap.agent.metrics.device import GPUS
from gpumap.model.families import Family, Rows, Series

_SOURCES = Rows(("source",), lambda snapshot: (((health.source,), health) for health in snapshot.node.sources))


def self_families(version: str, python_version: str) -> tuple[Family, ...]:
    """Return the families on gpumap itself. They exist with any flags and after any failure."""
    return (
        NODE.info(
            ("version", "python_version"),
            "gpumap_build_info",
            "Version of gpumap.",
            lambda _: (version, python_version),
        ),
        _SOURCES.gauge(
            "gpumap_source_up",
            "1 if gpumap's last attempt to read the source succeeded, else 0.",
            lambda health: int(health.up),
        ),
        _SOURCES.gauge(
            "gpumap_source_last_success_timestamp_seconds",
            "Unix time of the source's last answer.",
            lambda health: health.last_success,
        ),
        _SOURCES.by(
            "reason",
            "gpumap_source_errors_total",
            "Failed attempts to read the source, by reason.",
            lambda health: dict(sorted(health.errors.items())),
            "counter",
        ),
        Family(
            "gpumap_source_duration_seconds",
            "summary",
            "Time spent on reading the source.",
            ("source",),
            lambda snapshot: [
                Series((health.source,), value, suffix)
                for health in snapshot.node.sources
                for suffix, value in (("_sum", health.seconds), ("_count", health.attempts))
            ],
        ),
        Family(
            "gpumap_snapshot_timestamp_seconds",
            "gauge",
            "Unix time at which gpumap collected the data of this page.",
            (),
            lambda snapshot: [Series((), snapshot.at.wall)],
        ),
        Family(
            "gpumap_collections_total",
            "counter",
            "Collections, by what started them.",
            ("trigger",),
            lambda snapshot: [Series((trigger,), count) for trigger, count in snapshot.collections],
        ),
        NODE.by(
            "capability",
            "gpumap_capability",
            "1 if gpumap has the capability with its privileges and this driver, else 0.",
            lambda node: {name: int(present) for name, present in node.capabilities.items()},
        ),
        GPUS.gauge(
            "gpumap_nvml_stuck_seconds",
            "Age of the driver call on the GPU that has not returned yet; 0 if there is none.",
            lambda gpu: gpu.stuck_seconds,
        ),
    )
