"""The row on gpumap itself of the board GPU Health: its sources, what it misses, and what it cannot place."""

from __future__ import annotations

from boards import queries as q
from boards.links import NODE_KEY
from boards.panels import GREEN, NONE, YELLOW, Column, Curves, Key, Query, Row, Table

ROW = Row(
    "gpumap itself",
    (
        Curves(
            title="Errors of sources",
            about="Failed reads of a source per second, by reason. Remedies: docs/how-to/troubleshoot.md.",
            queries=(
                Query(
                    "sum by (source, reason) ("
                    + q.rate("gpumap_source_errors_total", f"{q.BY_SOURCE}, reason", q.NODE)
                    + ")",
                    "{{source}} {{reason}}",
                ),
            ),
            unit="ops",
            width=8,
        ),
        Curves(
            title="Time to read a source",
            about="Mean time of an attempt, over all nodes.",
            queries=(
                Query(
                    f"sum by (source) ({q.rate('gpumap_source_duration_seconds_sum', q.BY_SOURCE, q.NODE)})"
                    f" / sum by (source) ({q.rate('gpumap_source_duration_seconds_count', q.BY_SOURCE, q.NODE)})",
                    "{{source}}",
                ),
            ),
            unit="s",
            width=8,
        ),
        Curves(
            title="Not listened, not measured",
            about="Share of time, mean over GPUs. Not listened: time without an XID event listener. Not charged: time "
            "that is charged to no container. Both should be 0.",
            queries=(
                Query(f"avg({q.rate('gpumap_xid_blind_seconds_total', q.BY_GPU, q.GPU)})", "not listened"),
                Query(f"avg({q.rate('gpumap_accounting_gap_seconds_total', q.BY_GPU, q.GPU)})", "not charged"),
            ),
            unit="percentunit",
            width=8,
        ),
        Table(
            title="Slots without a device",
            about="Assigned slots that match no device of NVML, by reason. Remedies: docs/how-to/troubleshoot.md.",
            keys=(
                Key("cluster", "Cluster"),
                NODE_KEY,
                Key("namespace", "Namespace"),
                Key("pod", "Pod"),
                Key("container", "Container"),
                Key("resource", "Resource"),
                Key("reason", "Why"),
            ),
            columns=(
                Column(
                    q.most(
                        "gpumap_unmatched_slots", "cluster, node, namespace, pod, container, resource, reason", q.NODE
                    )
                    + " > 0",
                    "Slots",
                    decimals=0,
                ),
            ),
            sorted_by="Slots",
            absent=NONE,
            width=12,
            height=7,
        ),
        Table(
            title="What gpumap can do on each node",
            about="1: available. 0: a privilege or the driver is missing. `gpumap doctor` names it.",
            keys=(Key("cluster", "Cluster"), NODE_KEY, Key("capability", "Capability")),
            columns=(
                Column(
                    q.most("gpumap_capability", "cluster, node, capability", q.NODE),
                    "Can",
                    decimals=0,
                    steps=((0, YELLOW), (1, GREEN)),
                ),
            ),
            sorted_by="Can",
            rising=True,
            width=12,
            height=7,
        ),
    ),
)
