"""The reports of the commands: each one's table, its values for scripts, and the parts of a map that it reads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpumap.cli.fleet import queries as parts
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.tables import Shape
from gpumap.cli.tables.fits import fit_names, fit_table, fit_values
from gpumap.cli.tables.map import map_names, map_table, map_values
from gpumap.cli.tables.summary import summary_table, summary_values
from gpumap.cli.tables.top import top_names, top_table, top_values
from gpumap.cli.tables.waste import waste_names, waste_table, waste_values


@dataclass(frozen=True, slots=True)
class Report:
    """The output of a command. `values` are Structs or builtins. `names` are the pods of the report: namespace and
    name.

    `needs` are the parts of a map that every form reads. `also` are those that a form or a sort key reads in addition.
    A server is asked only for these.
    """

    table: Callable[[NodeMaps, Shape], str]
    values: Callable[[NodeMaps, Shape], object]
    needs: frozenset[str] = frozenset()
    also: Mapping[str, frozenset[str]] = field(default_factory=dict)
    names: Callable[[NodeMaps, Shape], Sequence[tuple[str, str]]] = lambda maps, shape: ()

    def parts(self, form: str, shape: Shape) -> frozenset[str]:
        """Return the parts of a map to ask a server for."""
        nothing = frozenset[str]()
        return self.needs | self.also.get(form, nothing) | self.also.get(shape.order, nothing)


def summarized(report: Report, command: str) -> Report:
    """Return the report that shows sums if the answer has them, and its rows if not."""

    def table(maps: NodeMaps, shape: Shape) -> str:
        return report.table(maps, shape) if maps.sums is None else summary_table(command, maps, maps.sums, shape)

    def values(maps: NodeMaps, shape: Shape) -> object:
        return report.values(maps, shape) if maps.sums is None else summary_values(command, maps, maps.sums, shape)

    return replace(report, table=table, values=values)


_PEAKS, _GRANTS = frozenset({parts.PEAKS}), frozenset({parts.GRANTS})
_TOP_COLUMNS = frozenset({parts.GRANTS, parts.LAST_SEEN})
_REST = (parts.OTHERS, parts.WORK)

REPORTS = {
    "map": Report(
        map_table,
        map_values,
        frozenset({parts.HOLDERS, parts.SHARES, parts.GRANTS, parts.USE, parts.ACTIVITY, *_REST}),
        {"json": parts.ALL, "yaml": parts.ALL, "wide": _PEAKS, "peak": _PEAKS},
        map_names,
    ),
    "top": Report(
        top_table,
        top_values,
        frozenset({parts.HOLDERS, parts.USE, parts.PEAKS, parts.ACTIVITY, *_REST}),
        {
            **dict.fromkeys(("wide", "json", "yaml", "name"), _TOP_COLUMNS),
            "live": _TOP_COLUMNS | {parts.FINDINGS},
            "granted": _GRANTS,
        },
        top_names,
    ),
    "waste": Report(
        waste_table,
        waste_values,
        frozenset({parts.FINDINGS}),
        names=waste_names,
    ),
    "waste --would-fit": Report(fit_table, fit_values, frozenset({parts.HOLDERS, parts.SHARES}), {}, fit_names),
}
"""By command, with a flag that changes what it shows."""
