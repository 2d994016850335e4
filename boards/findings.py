"""The tables of findings: what the agents judged, and what they cannot judge."""

from __future__ import annotations

from boards import queries as q
from boards.links import NODE_KEY, TO_CARD, TO_NAMESPACE, TO_POD
from boards.panels import BLUE, GREY, NONE, RED, YELLOW, Column, Key, Table
from gpumap.model.terms import FINDINGS

ABOUT = "docs/how-to/find-waste.md explains the kinds."
COLORS = {"stalled": YELLOW, "idle": YELLOW, "maybe_idle": BLUE, "unused": GREY, "unmatched": GREY}
WORDS = {"not_offered": "not offered", "maybe_idle": "may be idle"}
FINDING_KEY = Key(
    "finding",
    "Finding",
    words=tuple((kind, WORDS.get(kind, kind), COLORS.get(kind, RED)) for kind in FINDINGS),
)


def finding_table(
    where: str, title: str = "Findings", about: str = "", sorted_by: str = "Memory", width: int = 24
) -> Table:
    return Table(
        title=title,
        about=about or f"What the agents found, the largest waste first; `gpumap waste` shows the same. {ABOUT}",
        keys=(
            Key("cluster", "Cluster"),
            FINDING_KEY,
            Key("reason", "Reason"),
            NODE_KEY,
            Key("namespace", "Namespace", TO_NAMESPACE),
            Key("pod", "Pod", TO_POD),
            Key("container", "Container"),
            Key("uuid", "uuid", TO_CARD),
        ),
        columns=(
            Column(f"time() - {q.finding('since_timestamp_seconds', where)}", "For", unit="s"),
            Column(q.finding("gpus", where), "GPUs", decimals=2),
            Column(q.finding("memory_bytes", where), "Memory", unit="bytes"),
        ),
        sorted_by=sorted_by,
        absent=NONE,
        width=width,
    )


def finding_sums(key: Key, where: str, about: str) -> Table:
    """The same, added up by kind for each value of a label."""
    by = f"cluster, {key.label}, finding"
    return Table(
        title=f"Findings by {key.label}",
        about=f"{about} {ABOUT}",
        keys=(Key("cluster", "Cluster"), key, FINDING_KEY),
        columns=(
            Column(f"count by ({by}) ({q.finding('since_timestamp_seconds', where)})", "Findings", decimals=0),
            Column(f"sum by ({by}) ({q.finding('gpus', where)})", "GPUs", decimals=2),
            Column(f"sum by ({by}) ({q.finding('memory_bytes', where)})", "Memory", unit="bytes"),
        ),
        sorted_by="GPUs",
        absent=NONE,
        width=12,
    )


def unjudged_table(where: str) -> Table:
    return Table(
        title="Not judged",
        about="How many GPUs, devices, containers or holders cannot be judged now, by kind of finding and reason: "
        "findings may be missing. not_supported does not end. `gpumap waste` names them.",
        keys=(FINDING_KEY, Key("reason", "Reason")),
        columns=(Column(f"sum by (finding, reason) ({q.unjudged(where)})", "Not judged", decimals=0),),
        sorted_by="Not judged",
        absent=NONE,
        width=8,
    )
