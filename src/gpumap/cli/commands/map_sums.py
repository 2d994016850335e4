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
from gpumap.cli.table import Column, Shape, amount, join_blocks, name, notes, sort_keys, sort_rows, table
from gpumap.cli.unknowns import few
from gpumap.model.errors import UsageError
from gpumap.model.formatting import counted, number, ratio, reason_sentences, size
from gpumap.model.grouping import grouped
from gpumap.model.node import VERSION

NODE, NAMESPACE = "node", "namespace"
_ON_DEVICE = (*CONTAINER, "uuid")
_SHOWN_MAX = 40
"""Rows of a screen. -o wide, json and yaml have all."""


class Grouping(NamedTuple):
    """How a server adds up: `match` selects series, `group_labels` are those of a row of its answer, `separating` are
    labels of targets with different things."""

    match: str
    group_labels: str
    separating: tuple[str, ...]

    def total(self, operator: str, expression: str) -> str:
        return f"{operator} by ({self.group_labels}) ({expression})"

    def each(self, labels: Iterable[str], series: str, *only: str) -> str:
        """Return each thing with these labels once."""
        return f"max by ({labels_by(labels, self.separating)}) ({series}{braced(*only, self.match)})"


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

    def question(self, grouping: Grouping, level: str) -> str:
        query = self.query(grouping)
        return f"{query} or 0 * ({self.zero(grouping)})" if self.zero and level == NODE else query


def _sum(series: str, *only: str) -> Callable[[Grouping], str]:
    """Return the query that adds up a series of containers."""
    return lambda grouping: grouping.total("sum", grouping.each(_ON_DEVICE, series, *only))


def _count(label: str, series: str, *only: str) -> Callable[[Grouping], str]:
    return lambda grouping: grouping.total("count", grouping.each((label,), series, *only))


def _free_devices(grouping: Grouping) -> str:
    return grouping.total("sum", grouping.each(("uuid",), "gpumap_device_free_ratio"))


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
    SumColumn("FREE", "free_devices", ratio, _free_devices, is_of_nodes=True),
    SumColumn("IDLE", "idle_gpus", ratio, _sum("gpumap_finding_gpus", 'finding="idle"'), _judged_nodes),
    SumColumn("GRANTED", "granted_bytes", size, _granted_bytes),
    SumColumn(
        *("USED", "used_bytes", size, _sum("gpumap_container_gpu_memory_used_bytes")),
        _visible_nodes,
        sort_name="memory",
    ),
    SumColumn("SM", "sm_gpus", ratio, _sum("gpumap_container_sm_utilization_ratio")),
)


def _columns(level: str) -> list[SumColumn]:
    return [column for column in COLUMNS if level == NODE or not column.is_of_nodes]


def _table_columns(level: str) -> Sequence[Column[SumRow]]:
    columns: list[Column[SumRow]] = [
        amount(column.title, column.text, lambda row, key=column.key: row.values.get(key))._replace(  # type: ignore[misc]
            sort_name=column.sort_name
        )
        for column in _columns(level)
    ]
    return (name(level.upper(), lambda row: row.name), *columns)


def check_flags(args: argparse.Namespace, shape: Shape) -> str:
    """Return what the sums are by. Raises UsageError for a flag that is for rows."""
    level, orders = args.by or NODE, [*sort_keys(_table_columns(args.by or NODE))]
    if shape.namespace or shape.words or args.output == "name":
        flag = "-o name" if args.output == "name" else " ".join(shape.words) or f"--namespace {shape.namespace}"
        raise UsageError(f"{flag}: map --prometheus shows sums (--by namespace); kubectl gpumap map shows rows")
    if shape.order and shape.order not in orders:
        raise UsageError(f"--sort-by {shape.order}: not a column of sums by {level}; valid values: {', '.join(orders)}")
    return level


# --- asking -----------------------------------------------------------------------------------------------------------


async def cluster_sums(server: Prometheus, match: str, level: str) -> NodeMaps:
    """Ask once for the sums of all nodes or namespaces."""
    cluster = await scraped_cluster(server, match)
    places = tuple(cluster.place_labels)
    if level == NODE:
        grouping = Grouping(match, ", ".join(places), places)
    else:
        grouping = Grouping(
            match, labels_by([NAMESPACE], ()), tuple(label for label in places if label not in SCRAPE_LABELS)
        )
    columns = _columns(level)
    answers = await together([server.instant(column.question(grouping, level), cluster.moment) for column in columns])
    # Of several targets of a node, the newest that has a value counts.
    ranks = {target.place: (node.name, -rank) for node in cluster.nodes for rank, target in enumerate(node.targets)}
    values: dict[str, dict[str, float]] = {node.name: {} for node in cluster.nodes if level == NODE}
    invalid = [*cluster.invalid]
    for column, rows in zip(columns, answers, strict=True):
        for row in sorted(rows, key=lambda row: ranks.get(place_of(row.labels), ("", 0))):
            group = ranks.get(place_of(row.labels), ("", 0))[0] if level == NODE else own_value(row.labels, NAMESPACE)
            value = number_of(row, is_whole=column.text is number)
            if value is None:
                invalid.append(invalid_row(column.key, row))
            elif group:
                values.setdefault(group, {})[column.key] = value
    missing = reason_sentences((name, "Prometheus cannot scrape its gpumap (up is 0)") for name in cluster.down)
    sums = ClusterSums(level, tuple(SumRow(name, values[name]) for name in sorted(values)))
    return NodeMaps((), (*missing, *left_out(invalid)), fleet=True, sums=sums)


# --- what is shown ----------------------------------------------------------------------------------------------------


def sums_table(maps: NodeMaps, shape: Shape) -> str:
    """Return the largest rows, then what is not in them, and a last line of sums over all."""
    rows, level, totals = _sorted(maps, shape), maps.sums.level, _totals(maps.sums)
    shown_rows = rows if shape.wide else rows[:_SHOWN_MAX]
    hidden = len(rows) - len(shown_rows)
    rest_notes = [f"{counted(hidden, f'more {level}')}: -o wide shows all."] if hidden else []
    parts = [f"{column.text(totals.get(column.key))} {column.title}" for column in _columns(level)]
    return join_blocks(
        [
            table(_table_columns(level), shown_rows, shape) if shown_rows else f"No {level} has a known sum.",
            notes(rest_notes, shape.screen),
            notes(few(maps.missing, fleet=True), shape.screen, "red"),
            notes([f"Sum: {', '.join(parts)}."], shape.screen, "bold"),
        ]
    )


def sums_values(maps: NodeMaps, shape: Shape) -> dict[str, object]:
    """Return the same for scripts, with all rows. Unknown sums are null."""
    sums = maps.sums
    rows = [{sums.level: row.name, **_values(row.values, sums.level)} for row in _sorted(maps, shape)]
    totals = _values(_totals(sums), sums.level)
    return {"version": VERSION, "by": sums.level, "rows": rows, "sums": totals, "missing": list(maps.missing)}


def _sorted(maps: NodeMaps, shape: Shape) -> list[SumRow]:
    sums = maps.sums
    key = sort_keys(_table_columns(sums.level))[shape.order or "gpus"]
    return sort_rows(sums.rows, key, reverse=shape.reverse)


def _totals(sums: ClusterSums) -> dict[str, float]:
    """Add up the rows. What none of them has is absent."""
    values = grouped(pair for row in sums.rows for pair in row.values.items())
    return {key: sum(of_key) for key, of_key in values.items()}


def _values(values: Mapping[str, float], level: str) -> dict[str, float | None]:
    """Return the values as -o json has them: bytes and counts whole, shares of GPUs rounded."""
    values_by_key: dict[str, float | None] = {}
    for column in _columns(level):
        value = values.get(column.key)
        is_share = column.text is ratio
        values_by_key[column.key] = value if value is None else round(value, 3) if is_share else round(value)
    return values_by_key


SUMS_REPORT = Report(sums_table, sums_values)
