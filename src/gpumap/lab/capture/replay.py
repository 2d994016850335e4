"""Makes a capture's page: each frame is one collection of the real sources, without waiting between them.

`expected.prom` is this page. It must not depend on time, place or speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gpumap.agent import metrics, service
from gpumap.agent.exposition import Exposition
from gpumap.agent.metrics import native, self_families
from gpumap.agent.settings import collect_everything, resolve
from gpumap.lab.capture.format import Capture
from gpumap.lab.node import PlayedNode
from gpumap.lab.node_files import temporary_folder
from gpumap.model.families import Family
from gpumap.model.observations import Moment
from gpumap.model.snapshot import Snapshot

COLLECTIONS_MIN = 2
"""Accusations take two snapshots that agree: a capture of one frame is collected twice."""
INTERVAL_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
"""For each source: the page must not depend on the speed of the machine. A source that is down in a capture answers
at once."""
BEGAN = Moment(1000.0, 1.7e9)
"""The time when each replay begins."""
GROUPS = tuple(metrics.GROUPS)
"""Each group of families is on the page. NVML is asked for these, and for what dialects show."""

CLOCK_DEPENDENT = frozenset(
    {
        "gpumap_container_last_active_timestamp_seconds",
        "gpumap_finding_since_timestamp_seconds",
        "gpumap_gpu_last_success_timestamp_seconds",
        "gpumap_snapshot_timestamp_seconds",
        "gpumap_source_duration_seconds",
        "gpumap_source_last_success_timestamp_seconds",
        "gpumap_xid_blind_seconds_total",
        "nvidia_smi_last_collect_duration_seconds",
        "nvidia_smi_last_collect_success_timestamp_seconds",
        "nvidia_smi_xid_last_timestamp_seconds",
    }
)
"""Families whose values are times, or depend on milliseconds between them: left out of the page."""


def families() -> Iterable[Family]:
    """The native page with every group and the series of processes, without clocks."""
    every = (*native(GROUPS, process_metrics=True), *self_families("0", "0"))
    return (family for family in every if family.name not in CLOCK_DEPENDENT)


async def page(capture: Capture) -> bytes:
    """The page after the last frame."""
    return Exposition(families()).render((await snapshots(capture))[-1])


async def snapshots(capture: Capture) -> list[Snapshot]:
    """Collect each frame at its time on a simulated clock."""
    collected: list[Snapshot] = []
    frames = list(capture.frames)
    while len(frames) < COLLECTIONS_MIN:
        frames.append(replace(frames[-1], offset_seconds=frames[-1].offset_seconds + INTERVAL_SECONDS))
    offset = 0.0

    def clock() -> Moment:
        return Moment(BEGAN.monotonic + offset, BEGAN.wall + offset)

    with temporary_folder() as folder:
        node = PlayedNode(capture, Path(folder))
        settings = node.settings(resolve(argparse.Namespace(), {}))
        settings = collect_everything(replace(settings, interval_seconds=INTERVAL_SECONDS, push=False))
        try:
            await node.show(frames[0])
            async with service.collector(
                settings, node.driver_command, collected.append, clock, pods_patience_seconds=PATIENCE_SECONDS
            ) as loop:
                loop.deadline_seconds = PATIENCE_SECONDS
                for frame in frames:
                    offset = frame.offset_seconds
                    await node.show(frame)
                    await loop.collect()
        finally:
            await node.stop()
    return collected
