"""The group `findings`: what is wrong on the node, and which kinds of it the node can judge."""

from __future__ import annotations

from gpumap.model.families import Rows

_FOUND = Rows(
    ("finding", "reason", "namespace", "pod", "container", "uuid"),
    lambda snapshot: (
        ((one.finding, one.reason, *one.name, one.uuid or ""), one) for one in snapshot.node.findings or ()
    ),
)
_JUDGED = Rows(
    ("finding",), lambda snapshot: (((kind,), is_judged) for kind, is_judged in snapshot.node.judged.items())
)

FINDINGS = (
    _FOUND.gauge(
        "gpumap_finding_since_timestamp_seconds",
        "Unix time since when the finding holds, as far as gpumap has seen it. It exists as long as the finding. For a "
        "fault, uuid is the GPU.",
        lambda one: one.since,
    ),
    _FOUND.gauge(
        "gpumap_finding_gpus",
        "Share of physical GPUs that an idle, unused or stalled container holds. A GPU with faults counts once: 1 for "
        "the worst, 0 for its others.",
        lambda one: one.gpus,
    ),
    _FOUND.gauge(
        "gpumap_finding_memory_bytes",
        "GPU memory that is granted but not used (idle, unused), used above the grant (over), or used without a grant "
        "(squatter, leftover).",
        lambda one: one.memory_bytes,
    ),
    _JUDGED.gauge(
        "gpumap_finding_judged",
        "1 if all of the node can be judged for this kind of finding now, else 0: findings may be missing.",
        int,
    ),
)
