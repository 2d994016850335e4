"""The group `findings`: what is wrong on the node, and which kinds of it the node can judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumap.model.families import Family, Series
from gpumap.model.node import Finding
from gpumap.model.snapshot import Snapshot

LABELS = ("finding", "reason", "namespace", "pod", "container", "uuid")


def _found(name: str, help: str, value: Callable[[Finding], float | None]) -> Family:
    """Return a family on findings."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for one in snapshot.node.findings or ():
            if (number := value(one)) is not None:
                yield Series((one.finding, one.reason, *one.name, one.uuid or ""), number)

    return Family(name, "gauge", help, LABELS, read)


FINDINGS = (
    _found(
        "gpumap_finding_since_timestamp_seconds",
        "Unix time since when the finding holds, as far as gpumap has seen it. It exists as long as the finding. For a "
        "fault, uuid is the GPU.",
        lambda one: one.since,
    ),
    _found(
        "gpumap_finding_gpus",
        "Share of physical GPUs that an idle, unused or stalled container holds; for a fault the number of GPUs.",
        lambda one: one.gpus,
    ),
    _found(
        "gpumap_finding_memory_bytes",
        "GPU memory that is granted but not used (idle, unused), used above the grant (over), or used without a grant "
        "(squatter, leftover).",
        lambda one: one.memory_bytes,
    ),
    Family(
        "gpumap_finding_judged",
        "gauge",
        "1 if all of the node can be judged for this kind of finding now, else 0: findings may be missing.",
        ("finding",),
        lambda snapshot: [Series((kind,), int(can)) for kind, can in snapshot.node.judged.items()],
    ),
)
