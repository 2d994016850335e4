"""Whether a query asks for what there is: the series and labels of gpumap's families, of records, and of neighbours."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from gpumap.agent.metrics import GROUPS, PROCESSES, self_families

NEIGHBOURS: Mapping[str, frozenset[str]] = {
    "up": frozenset(),
    "process_start_time_seconds": frozenset(),
    "kube_pod_labels": frozenset({"namespace", "pod", "label_team"}),
    "kube_node_info": frozenset({"node"}),
    "kube_node_status_allocatable": frozenset({"node", "resource", "unit"}),
}
"""Series that are not gpumap's own families."""
OF_SCRAPES = frozenset({"cluster", "node", "instance", "job", "exported_pod"})
"""Labels of the scrape; `cluster` is of whoever has several, `exported_pod` of one without honorLabels."""
_SERIES = re.compile(r"(?<![\w:\"$])((?:gpumap|kube|process)_\w+|up|[a-z_]+:[\w:]+)\b(?!\s*\()(?:\{([^}]*)\})?")
_LISTED = re.compile(r"\b(?:by|on|group_left|without|ignoring)\s*\(([^)]*)\)")


def _labels() -> dict[str, frozenset[str]]:
    """By series: those of docs/reference/metrics.md, which is made of the same tables."""
    known = dict(NEIGHBOURS)
    for family in (*[row for rows in GROUPS.values() for row in rows], *PROCESSES, *self_families("", "")):
        names = [f"{family.name}_{end}" for end in ("sum", "count")] if family.kind == "summary" else [family.name]
        known |= {name: frozenset(family.labels) for name in names}
    return known


LABELS = _labels()


def selectors(query: str) -> Iterator[tuple[str, str]]:
    """Each series that is asked for, and its matchers."""
    yield from re.findall(_SERIES, re.sub(_LISTED, "", query))


def assert_known(query: str, records: Collection[str], made: Collection[str]) -> None:
    """Every series and every label in it is of metrics.md, of a record, of a neighbour, or made by the query."""
    named = list(selectors(query))
    assert named, query
    everything = OF_SCRAPES.union(made, *LABELS.values())
    for series, matchers in named:
        assert series in LABELS or series in records, series
        allowed = everything if series in records else OF_SCRAPES | LABELS[series]
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", matchers):
            assert label in allowed, f"{series}{{{label}}}"
    for listed in re.findall(_LISTED, query):
        assert {label.strip() for label in listed.split(",") if label.strip()} <= everything, listed
