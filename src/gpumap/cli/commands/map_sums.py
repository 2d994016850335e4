"""`gpumap map --prometheus`: a cluster in one table of sums, by node or by namespace. The server adds up.

A column is a query. What several targets report counts once, with the larger value. Unknown is absent, not 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpumap.cli.rows import ClusterSums, NodeMaps, SumRow
from gpumap.cli.screen import Report
from gpumap.cli.sources.prometheus import Prometheus, together
from gpumap.cli.sources.scraped_nodes import (
    CONTAINER,
    SCRAPE_LABELS,
    braced,
    invalid_row,
    labels_by,
    left_out,
    number_of,
    own_value,
    place_of,
    scraped_cluster,
)
from gpumap.cli.table import Column, Shape, amount, in_order, joined, name, notes, sort_keys, table
from gpumap.cli.unknowns import few
from gpumap.model.errors import UsageError
from gpumap.model.formatting import counted, number, ratio, reason_sentences, size
from gpumap.model.node import VERSION

NODE, NAMESPACE = "node", "namespace"
_ON_DEVICE = (*CONTAINER, "uuid")
_SHOWN_MAX = 40
"""Rows of a screen. -o wide, json and yaml have all."""


class Grouping(NamedTuple):
    """How a server adds up: `match` selects series, `by` are the labels of a row of its answer, `separating` those of
    targets with different things."""

    match: str
    by: str
    separating: tuple[str, ...]

    def total(self, operator: str, expression: str) -> str:
        return f"{operator} by ({self.by}) ({expression})"

    def each(self, own: Iterable[str], series: str, *only: str) -> str:
        """Return each thing with these labels once."""
        return f"max by ({labels_by(own, self.separating)}) ({series}{braced(*only, self.match)})"


class SumColumn(NamedTuple):
    """A column of sums: its query, and the key of its value in -o json. `zero` is a query with a row for each node that
    has 0 if it has no other value."""

    title: str
    key: str
    text: Callable[[float | None], str]
    query: Callable[[Grouping], str]
    zero: Callable[[Grouping], str] | None = None
    is_of_nodes: bool = False
    sort_name: str = ""

    def question(self, grouping: Grouping, by: str) -> str:
        query = self.query(grouping)
        return f"{query} or 0 * ({self.zero(grouping)})" if self.zero and by == NODE else query


def _sum(series: str, *only: str) -> Callable[[Grouping], str]:
    """Return the query that adds up a series of containers."""
    return lambda grouping: grouping.total("sum", grouping.each(_ON_DEVICE, series, *only))


def _count(own: str, series: str, *only: str) -> Callable[[Grouping], str]:
    return lambda grouping: grouping.total("count", grouping.each((own,), series, *only))


def _free_devices(grouping: Grouping) -> str:
    free = f"{grouping.each(('uuid',), 'gpumap_device_holders')} == bool 0"
    return grouping.total("sum", f"({free}) and on (uuid) gpumap_device_info{braced(grouping.match)}")


def _judged_nodes(grouping: Grouping) -> str:
    """Return the query for nodes on which all holders can be judged."""
    judged = _count("finding", "gpumap_finding_judged", 'finding="idle"')
    unjudged = _count("reason", "gpumap_finding_unjudged", 'finding="idle"', 'reason!="not_supported"')
    return f"{judged(grouping)} unless {unjudged(grouping)}"


def _visible_nodes(grouping: Grouping) -> str:
    """Return the query for nodes on which the container of each process is known."""
    processes = grouping.each(("uuid",), "gpumap_device_processes", 'owner="unknown"')
    return f"{grouping.total('count', processes)} unless {grouping.total('count', f'{processes} > 0')}"


def _granted_bytes(grouping: Grouping) -> str:
    """Return the query for granted memory. Compute instances of one GPU instance report all of its memory: each counts
    for its part."""
    instance = "gpu_uuid, gpu_instance_id"
    selector = braced('gpu_instance_id!=""', grouping.match)
    devices = f"max by (uuid, {instance}) (gpumap_device_info{selector})"
    sharers = f"max by (uuid) ({devices} * on ({instance}) group_left () (count by ({instance}) ({devices}) > 1))"
    granted = grouping.each(_ON_DEVICE, "gpumap_container_allocated_gpu_memory_bytes")
    return grouping.total("sum", f"{granted} / on (uuid) group_left () {sharers} or {granted}")


COLUMNS = (
    SumColumn("GPUS", "gpus", number, _count("gpu_uuid", "gpumap_gpu_up"), is_of_nodes=True, sort_name="all"),
    SumColumn(
        *("HELD", "held_gpus", ratio, _sum("gpumap_container_allocated_gpus"), _count("uuid", "gpumap_device_holders")),
        sort_name="gpus",
    ),
    SumColumn("FREE", "free_devices", number, _free_devices, is_of_nodes=True),
    SumColumn("IDLE", "idle_gpus", ratio, _sum("gpumap_finding_gpus", 'finding="idle"'), _judged_nodes),
    SumColumn("GRANTED", "granted_bytes", size, _granted_bytes),
    SumColumn(
        *("USED", "used_bytes", size, _sum("gpumap_container_gpu_memory_used_bytes")),
        _visible_nodes,
        sort_name="memory",
    ),
    SumColumn("SM", "sm_gpus", ratio, _sum("gpumap_container_sm_utilization_ratio")),
)


def _columns(by: str) -> list[SumColumn]:
    return [column for column in COLUMNS if by == NODE or not column.is_of_nodes]


def _table_columns(by: str) -> Sequence[Column[SumRow]]:
    columns: list[Column[SumRow]] = [
        amount(column.title, column.text, lambda row, key=column.key: row.values.get(key))._replace(  # type: ignore[misc]
            sort_name=column.sort_name
        )
        for column in _columns(by)
    ]
    return (name(by.upper(), lambda row: row.name), *columns)


def check_flags(args: argparse.Namespace, shape: Shape) -> str:
    """Return what the sums are by. Raises UsageError for a flag that is for rows."""
    by, orders = args.by or NODE, [*sort_keys(_table_columns(args.by or NODE))]
    if shape.namespace or args.output == "name":
        flag = "-o name" if args.output == "name" else f"--namespace {shape.namespace}"
        raise UsageError(f"{flag}: map --prometheus shows sums (--by namespace); kubectl gpumap map shows rows")
    if shape.order and shape.order not in orders:
        raise UsageError(f"--sort-by {shape.order}: not a column of sums by {by}; valid values: {', '.join(orders)}")
    return by


# --- asking -----------------------------------------------------------------------------------------------------------


async def cluster_sums(server: Prometheus, match: str, by: str) -> NodeMaps:
    """Ask once for the sums of all nodes or namespaces."""
    cluster = await scraped_cluster(server, match)
    places = tuple(cluster.place_labels)
    if by == NODE:
        grouping = Grouping(match, ", ".join(places), places)
    else:
        grouping = Grouping(match, labels_by([NAMESPACE], ()), tuple(one for one in places if one not in SCRAPE_LABELS))
    columns = _columns(by)
    answers = await together([server.instant(column.question(grouping, by), cluster.moment) for column in columns])
    # Of several targets of a node, the newest that has a value counts.
    ranks = {target.place: (node.name, -rank) for node in cluster.nodes for rank, target in enumerate(node.targets)}
    values: dict[str, dict[str, float]] = {node.name: {} for node in cluster.nodes if by == NODE}
    invalid = [*cluster.invalid]
    for column, rows in zip(columns, answers, strict=True):
        for row in sorted(rows, key=lambda row: ranks.get(place_of(row.labels), ("", 0))):
            group = ranks.get(place_of(row.labels), ("", 0))[0] if by == NODE else own_value(row.labels, NAMESPACE)
            value = number_of(row, is_whole=column.text is number)
            if value is None:
                invalid.append(invalid_row(column.key, row))
            elif group:
                values.setdefault(group, {})[column.key] = value
    missing = reason_sentences((name, "Prometheus cannot scrape its gpumap (up is 0)") for name in cluster.down)
    sums = ClusterSums(by, tuple(SumRow(name, values[name]) for name in sorted(values)))
    return NodeMaps((), (*missing, *left_out(invalid)), fleet=True, sums=sums)


# --- what is shown ----------------------------------------------------------------------------------------------------


def sums_table(maps: NodeMaps, shape: Shape) -> str:
    """Return the largest rows, then what is not in them, and a last line of sums over all."""
    rows, sums = _sorted(maps, shape), _sums(maps)
    by, totals = sums.by, _totals(sums)
    shown = rows if shape.wide else rows[:_SHOWN_MAX]
    more = [f"{counted(len(rows) - len(shown), f'more {by}')}: -o wide shows all."] if len(rows) > len(shown) else []
    parts = [f"{column.text(totals.get(column.key))} {column.title}" for column in _columns(by)]
    return joined(
        [
            table(_table_columns(by), shown, shape) if shown else f"No {by} has a known sum.",
            notes(more, shape.screen),
            notes(few(maps.missing, fleet=True), shape.screen, "red"),
            notes([f"Sum: {', '.join(parts)}."], shape.screen, "bold"),
        ]
    )


def sums_values(maps: NodeMaps, shape: Shape) -> dict[str, object]:
    """Return the same for scripts, with all rows. Unknown sums are null."""
    sums = _sums(maps)
    rows = [{sums.by: row.name, **_values(row.values, sums.by)} for row in _sorted(maps, shape)]
    totals = _values(_totals(sums), sums.by)
    return {"version": VERSION, "by": sums.by, "rows": rows, "sums": totals, "missing": list(maps.missing)}


def _sums(maps: NodeMaps) -> ClusterSums:
    assert maps.sums is not None  # noqa: S101 -- only answers of `cluster_sums` are shown here
    return maps.sums


def _sorted(maps: NodeMaps, shape: Shape) -> list[SumRow]:
    sums = _sums(maps)
    key = sort_keys(_table_columns(sums.by))[shape.order or "gpus"]
    return in_order(sums.rows, key, reverse=shape.reverse)


def _totals(sums: ClusterSums) -> dict[str, float]:
    """Add up the rows. What none of them has is absent."""
    totals: dict[str, float] = {}
    for row in sums.rows:
        for key, value in row.values.items():
            totals[key] = totals.get(key, 0) + value
    return totals


def _values(values: Mapping[str, float], by: str) -> dict[str, float | None]:
    """Return the values as -o json has them: bytes and counts whole, shares of GPUs rounded."""
    shown: dict[str, float | None] = {}
    for column in _columns(by):
        value = values.get(column.key)
        is_share = column.text is ratio
        shown[column.key] = value if value is None else round(value, 3) if is_share else round(value)
    return shown


SUMS_REPORT = Report(sums_table, sums_values)
