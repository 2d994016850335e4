"""The group `findings`: what is wrong on the node, and which kinds of it the node can judge."""

from __future__ import annotations

from collections import Counter

from gpumap.model.families import Rows
from gpumap.model.node import Node

_FOUND = Rows(
    ("finding", "reason", "namespace", "pod", "container", "uuid"),
    lambda snapshot: (
        ((one.finding, one.reason, *one.name, one.uuid or ""), one) for one in snapshot.node.findings or ()
    ),
)
_JUDGED = Rows(("finding",), lambda snapshot: (((kind,), count) for kind, count in snapshot.node.judged.items()))
_UNJUDGED = Rows(("finding", "reason"), lambda snapshot: sorted(_unjudged(snapshot.node).items()))


def _unjudged(node: Node) -> Counter[tuple[str, str]]:
    """Count what cannot be judged, by kind of finding and reason."""
    return Counter((kind, entry.reason) for entry in node.unjudged for kind in entry.findings)


FINDINGS = (
    _FOUND.gauge(
        "gpumap_finding_since_timestamp_seconds",
        "Unix time since when the finding holds, as far as gpumap has seen it. It exists as long as the finding. Of "
        "fault and not_offered, uuid is the GPU.",
        lambda one: one.since,
    ),
    _FOUND.gauge(
        "gpumap_finding_gpus",
        "Share of physical GPUs that an idle, maybe_idle, unused or stalled container holds. 1 for a GPU that is not "
        "offered, or busy without a process. A GPU with faults counts once: 1 for the worst, 0 for its others.",
        lambda one: one.gpus,
    ),
    _FOUND.gauge(
        "gpumap_finding_memory_bytes",
        "GPU memory that is granted but not used (idle, maybe_idle, unused), used above the grant (over), or used "
        "without a grant (squatter, leftover, unexplained).",
        lambda one: one.memory_bytes,
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
