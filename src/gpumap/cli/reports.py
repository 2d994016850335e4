"""The reports of the commands: each one's table, its values for scripts, and the parts of a map that it reads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpumap.cli.fleet import families as parts
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.tables import (
    Shape,
    map_names,
    map_table,
    map_values,
    top_names,
    top_table,
    top_values,
    waste_names,
    waste_table,
    waste_values,
)


@dataclass(frozen=True, slots=True)
class Report:
    """`values` are Structs or builtins. `names` are the pods of the report: namespace and name. `notes` are printed
    beside a table that has no room for them. `parts` are the parts of a map that a form reads: a server is asked for no
    more."""

    table: Callable[[NodeMaps, Shape], str]
    values: Callable[[NodeMaps, Shape], object]
    parts: Callable[[str, Shape], frozenset[str]]
    names: Callable[[NodeMaps, Shape], Sequence[tuple[str, str]]] | None = None
    notes: Callable[[NodeMaps], Sequence[str]] | None = None


def _map_parts(form: str, shape: Shape) -> frozenset[str]:
    if form in ("json", "yaml"):
        return parts.ALL
    found = {parts.HOLDERS, parts.SHARES, parts.GRANTS, parts.USE, parts.ACTIVITY, parts.OTHERS, parts.TAKEN}
    return frozenset(found | ({parts.PEAKS} if form == "wide" or shape.order == "peak" else set()))


def _top_parts(form: str, shape: Shape) -> frozenset[str]:
    found = {parts.HOLDERS, parts.USE, parts.PEAKS, parts.ACTIVITY, parts.OTHERS}
    found |= {parts.GRANTS} if form != "table" or shape.order == "granted" else set()
    return frozenset(found | ({parts.LAST_SEEN} if form != "table" else set()))


def _waste_parts(form: str, shape: Shape) -> frozenset[str]:
    found = {parts.HOLDERS, parts.SHARES, parts.GRANTS, parts.USE, parts.PEAKS, parts.LEFTOVERS}
    return frozenset(found | {parts.ACTIVITY, parts.LAST_SEEN})


REPORTS = {
    "map": Report(map_table, map_values, _map_parts, map_names),
    "top": Report(top_table, top_values, _top_parts, top_names),
    "waste": Report(waste_table, waste_values, _waste_parts, waste_names),
}
"""By command."""
