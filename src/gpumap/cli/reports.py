"""The reports of the commands: each one's table, its values for scripts, and its pods. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpumap.cli.fleet.sums import sums_table, sums_values
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.tables import Shape
from gpumap.cli.tables.map import map_names, map_table, map_values
from gpumap.cli.tables.top import top_names, top_table, top_values
from gpumap.cli.tables.waste import waste_names, waste_table, waste_values


class Report(NamedTuple):
    """The output of a command. `values` are Structs or builtins. `names` are the pods of the report: namespace and
    name."""

    table: Callable[[NodeMaps, Shape], str]
    values: Callable[[NodeMaps, Shape], object]
    names: Callable[[NodeMaps, Shape], Sequence[tuple[str, str]]] = lambda maps, shape: ()


REPORTS = {
    "map": Report(map_table, map_values, map_names),
    "map --prometheus": Report(sums_table, sums_values),
    "top": Report(top_table, top_values, top_names),
    "waste": Report(waste_table, waste_values, waste_names),
}
"""By command."""
