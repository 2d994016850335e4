"""The summaries of `map` and `top` over a Prometheus: a row for each node or namespace, the worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpumap.cli.node_maps import FleetSums, NodeMaps, Sums
from gpumap.cli.sort_keys import WORKLOAD
from gpumap.cli.tables.layout import Column, Shape, SortKey, amount, in_order, joined, name, notes, sort_keys, table
from gpumap.cli.tables.unknowns import few
from gpumap.model.formatting import UNKNOWN, age, counted, number, percent, ratio, size
from gpumap.model.node import VERSION

NODE, NAMESPACE = "node", "namespace"
_SHOWN_MAX = 40
"""Rows of a screen. -o wide, json and yaml have all."""
_GPUS = ("held_gpus", "sm_gpus")
"""Parts of GPUs. All other sums are whole."""
Values = Mapping[str, float]


class Summary(NamedTuple):
    """The summary of a command. `whole` returns the parts of its last line, `worst` the key that sorts its rows."""

    columns: tuple[Column[Sums], ...]
    names: tuple[str, ...]
    worst: Callable[[Values], tuple[float, ...]]
    whole: Callable[[Values], Iterator[str]]


# --- columns ----------------------------------------------------------------------------------------------------------


def _amount(title: str, text: Callable[[float | None], str], quantity: str, sort_name: str = "") -> Column[Sums]:
    column: Column[Sums] = amount(title, text, lambda row: row.values.get(quantity))
    return column._replace(sort_name=sort_name)


def _part(values: Values, part: str, whole: str) -> float | None:
    if part not in values or not values.get(whole):
        return None
    return values[part] / values[whole]


_HELD = _amount("GPUS HELD", ratio, "held_gpus", sort_name="gpus")
_GRANTED = _amount("GRANTED", size, "granted_bytes")
_MAP: tuple[Column[Sums], ...] = (
    _amount("GPUS", number, "gpus", sort_name="all"),
    _amount("DOWN", number, "gpus_down")._replace(colour=lambda row: "red" if row.values.get("gpus_down") else ""),
    _amount("DEVICES", number, "devices")._replace(spare=1),
    _amount("FREE", number, "devices_free"),
    _HELD,
    _amount("HOLDERS", number, "holders")._replace(spare=1),
    _amount("USED", size, "memory_used_bytes", sort_name="memory"),
    _amount("TOTAL", size, "memory_total_bytes"),
    Column("USED%", lambda row: percent(_part(row.values, "memory_used_bytes", "memory_total_bytes"))),
)
_TOP = (
    _amount("PODS", number, "pods"),
    _HELD,
    _amount("GPUS BUSY", ratio, "sm_gpus", sort_name="sm"),
    _amount("MEMORY", size, "used_bytes"),
    _GRANTED,
)

# --- last lines -------------------------------------------------------------------------------------------------------


def _counted(value: float | None, noun: str) -> str:
    return f"{UNKNOWN} {noun}s" if value is None else counted(round(value), noun)


def _of_map(whole: Values) -> Iterator[str]:
    yield f"{number(whole.get('devices_free'))} of {_counted(whole.get('devices'), 'device')} free"
    yield f"{ratio(whole.get('held_gpus'))} GPUs held"
    yield f"{size(whole.get('memory_used_bytes'))} of {size(whole.get('memory_total_bytes'))} used"


def _of_top(whole: Values) -> Iterator[str]:
    yield f"{ratio(whole.get('held_gpus'))} GPUs held"
    yield f"SM time of {ratio(whole.get('sm_gpus'))} GPUs"
    yield f"{size(whole.get('used_bytes'))} used by containers"
    yield f"{size(whole.get('granted_bytes'))} granted"
    yield f"{size(whole.get('memory_used_bytes'))} used in total"


def _largest(*quantities: str) -> Callable[[Values], tuple[float, ...]]:
    return lambda values: tuple(values.get(one, -1.0) for one in quantities)


SUMMARIES = {
    "map": Summary(
        _MAP,
        (
            *("gpus", "gpus_up", "devices", "devices_free", "held_gpus", "holders"),
            *("memory_used_bytes", "memory_total_bytes"),
        ),
        _largest("gpus_down", "held_gpus", "memory_used_bytes"),
        _of_map,
    ),
    "top": Summary(
        _TOP,
        ("pods", "held_gpus", "sm_gpus", "used_bytes", "granted_bytes"),
        _largest("sm_gpus", "used_bytes"),
        _of_top,
    ),
}
"""By command."""
OF_ALL = {"top": ("devices_measured", "memory_used_bytes")}
"""Sums over nodes only: namespaces do not have them. Without measured devices the use of a node is not known."""


# --- what is shown ----------------------------------------------------------------------------------------------------


def orders_of(command: str, by: str) -> dict[str, SortKey[Sums]]:
    """Return the keys of --sort-by that the summary has."""
    return sort_keys(_columns(command, by))


def summary_table(command: str, maps: NodeMaps, sums: FleetSums, shape: Shape) -> str:
    """Return the worst rows, what is not in them, and a last line of sums over all."""
    summary, rows = SUMMARIES[command], _sorted(command, sums, shape)
    shown = rows if shape.wide else rows[:_SHOWN_MAX]
    more = f"{counted(len(rows) - len(shown), f'more {sums.by}')}. " if len(rows) > len(shown) else ""
    return joined(
        [
            notes([_head(sums)], shape.screen),
            table(_columns(command, sums.by), shown, shape) if rows else "",
            notes([f"{more}Rows of containers: -n NAMESPACE, --node NODE or --all."], shape.screen),
            notes(few((*sums.unknown, *maps.missing), fleet=True), shape.screen, "red"),
            notes([f"Sum: {', '.join(summary.whole(sums.whole))}."], shape.screen, "bold"),
        ]
    )


def summary_values(command: str, maps: NodeMaps, sums: FleetSums, shape: Shape) -> dict[str, object]:
    """Return the same for scripts, with all rows."""
    names = SUMMARIES[command].names
    rows = [
        {**({NAMESPACE: row.namespace} if sums.by == WORKLOAD else {}), sums.by: row.name, **_exact(row.values, names)}
        for row in _sorted(command, sums, shape)
    ]
    return {
        "version": VERSION,
        "by": sums.by,
        "nodes": sums.nodes,
        "nodes_without_data": sums.lost,
        "collected_seconds": sums.collected_seconds,
        "recorded_seconds": sums.recorded_seconds,
        "rows": rows,
        "sums": _exact(sums.whole, dict.fromkeys((*names, *OF_ALL.get(command, ())))),
        "unknown": list(sums.unknown),
        "missing": list(maps.missing),
    }


def _columns(command: str, by: str) -> Sequence[Column[Sums]]:
    first: Column[Sums] = name(by.upper(), lambda row: row.name)
    namespace: Column[Sums] = name(NAMESPACE.upper(), lambda row: row.namespace)
    return (*([namespace] if by == WORKLOAD else []), first, *SUMMARIES[command].columns)


def _sorted(command: str, sums: FleetSums, shape: Shape) -> list[Sums]:
    worst = SUMMARIES[command].worst
    rows = sorted(sums.rows, key=lambda row: worst(row.values), reverse=True)
    if key := orders_of(command, sums.by).get(shape.order):
        return in_order(rows, key, reverse=shape.reverse)
    return rows[::-1] if shape.reverse else rows


def _head(sums: FleetSums) -> str:
    gpus = _counted(sums.whole.get("gpus"), "GPU")
    down = round(sums.whole.get("gpus_down", 0))
    parts = [f"{counted(sums.nodes, 'node')}, {gpus}" + (f" ({down} down)" if down else "")]
    if sums.lost:
        parts.append(f"{counted(sums.lost, 'more node')} without current data")
    parts.append(f"collected within the last {age(max(sums.collected_seconds, 1))}")
    if sums.recorded_seconds is not None:
        parts.append(f"recording rules of {age(sums.recorded_seconds)} ago")
    return "; ".join(parts) + "."


def _exact(values: Values, names: Iterable[str]) -> dict[str, float | None]:
    """Return these quantities, `None` if they are not known."""
    return {one: None if one not in values else round(values[one], 3 if one in _GPUS else None) for one in names}
