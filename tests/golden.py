"""A capture is a test: a folder of what the sources said, and the page that it must give.

`make golden` (`python -m tests.golden`) writes each capture's `expected.prom` anew; `git diff` is the review. The
format of a capture is told in tests/captures/README.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from google.protobuf import json_format

from gpumap._proto.podresources import v1_pb2
from gpumap.collect import Collector
from gpumap.demo import kubelet as fake
from gpumap.device_ids import DEFAULT_RESOURCE_PATTERN
from gpumap.dialects.pod_gpu_map import FAMILIES as POD_GPU_MAP
from gpumap.exposition import Exposition
from gpumap.join import Rules
from gpumap.metrics import native, self_families
from gpumap.snapshot import Node, Snapshot
from gpumap.sources.checkpoint import CheckpointSource
from gpumap.sources.identity import PodIdentitySource
from gpumap.sources.kubelet import KubeletSource
from gpumap.sources.nvml import NvmlSource
from gpumap.sources.podlogs import PodLogsSource
from gpumap.sources.procfs import ProcfsSource

CAPTURES = Path(__file__).parent / "captures"
EXPECTED = "expected.prom"
COLLECTIONS = 2
"""Accusations take two snapshots that agree."""

CLOCK_DEPENDENT = frozenset(
    {
        "gpumap_container_last_active_timestamp_seconds",
        "gpumap_gpu_last_success_timestamp_seconds",
        "gpumap_snapshot_timestamp_seconds",
        "gpumap_source_duration_seconds",
        "gpumap_source_last_success_timestamp_seconds",
    }
)
"""Families whose values are times: left out of the golden pages."""


def captures() -> list[Path]:
    """Every capture folder."""
    return sorted(path.parent for path in CAPTURES.glob("*/capture.json"))


def page(capture: Path) -> bytes:
    """Replay a capture through the real sources and give the native page, without what depends on the clock."""
    families = (
        *native(("allocation", "use", "device", "codec"), process_metrics=True),
        *POD_GPU_MAP,
        *self_families("0", "0"),
    )
    stable = (family for family in families if family.name not in CLOCK_DEPENDENT)
    return Exposition(stable).render(asyncio.run(replay(capture)))


async def replay(capture: Path) -> Snapshot:
    """Serve a capture over a real socket, file trees and a driver process, and collect as often as it takes."""
    told = json.loads((capture / "capture.json").read_text())
    with tempfile.TemporaryDirectory(prefix="gpumap-") as folder:
        root = Path(folder)
        _lay_out_logs(capture / "log.tree", root)
        kubelet = _kubelet(capture, root / "kubelet.sock", told["podresources"])
        await kubelet.start()
        nvml = NvmlSource([sys.executable, "-m", "tests.replay_driver", str(capture / "nvml.json")])
        source = KubeletSource(root / "kubelet.sock")
        own = capture / "own"
        loop = Collector(
            nvml,
            ProcfsSource(capture / "proc", own if own.exists() else Path("/proc/self")),
            PodIdentitySource(
                CheckpointSource((capture / "kubelet_internal_checkpoint",)), PodLogsSource(root / "var/log"), time.time
            ).read,
            source,
            Rules(
                Node(told["node"], ""),
                lambda name: re.fullmatch(DEFAULT_RESOURCE_PATTERN, name) is not None,
                stale_after_seconds=60.0,
            ),
            5.0,
            lambda snapshot: None,
        )
        try:
            for _ in range(COLLECTIONS):
                snapshot = await loop.collect()
        finally:
            loop.close()
            await asyncio.gather(nvml.close(), source.close(), kubelet.stop())
    return snapshot


def _kubelet(capture: Path, socket: Path, version: str) -> fake.FakeKubelet:
    kubelet = fake.FakeKubelet(socket, {"v1", "v1alpha1"} if version == "v1" else {version})
    pods = _answer(capture / "kubelet" / "list", v1_pb2.ListPodResourcesResponse())
    kubelet.misbehave(fake.Raw(pods or b""), fake.LIST if version == "v1" else fake.LIST_V1ALPHA1)
    allocatable = _answer(capture / "kubelet" / "allocatable", v1_pb2.AllocatableResourcesResponse())
    kubelet.misbehave(fake.NO_ALLOCATABLE if allocatable is None else fake.Raw(allocatable), fake.ALLOCATABLE)
    return kubelet


def _answer(stem: Path, message: v1_pb2.ListPodResourcesResponse | v1_pb2.AllocatableResourcesResponse) -> bytes | None:
    """An answer as bytes: the kubelet's own, or written by hand as JSON."""
    if stem.with_suffix(".pb").exists():
        return stem.with_suffix(".pb").read_bytes()
    if not stem.with_suffix(".json").exists():
        return None
    json_format.Parse(stem.with_suffix(".json").read_text(), message)
    return message.SerializeToString()


def _lay_out_logs(tree: Path, root: Path) -> None:
    """Make the directories and links of a `log.tree`: kind, mode, path, size, "->" and a link's target."""
    for line in tree.read_text().splitlines() if tree.exists() else ():
        kind, _, path, _, _, *target = line.split(" ")
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "d":
            place.mkdir(exist_ok=True)
        elif kind == "l":
            place.symlink_to(target[0])
        else:
            place.touch()


def main() -> None:
    """Write every golden page anew."""
    for capture in captures():
        (capture / EXPECTED).write_bytes(page(capture))
        print(capture.name)


if __name__ == "__main__":
    main()
