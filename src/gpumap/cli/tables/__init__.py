"""What the commands show, made of the maps of nodes: tables for a terminal, values for scripts. Pure.

Start with `layout` (a table is a list of columns), then `map`, `top` or `waste`.
"""

from gpumap.cli.sort_keys import MAP_ORDERS, TOP_ORDERS, WASTE_ORDERS
from gpumap.cli.tables.layout import Shape
from gpumap.cli.tables.map import map_names, map_table, map_values
from gpumap.cli.tables.top import top_names, top_table, top_values
from gpumap.cli.tables.waste import waste_names, waste_table, waste_values

__all__ = [
    "MAP_ORDERS",
    "TOP_ORDERS",
    "WASTE_ORDERS",
    "Shape",
    "map_names",
    "map_table",
    "map_values",
    "top_names",
    "top_table",
    "top_values",
    "waste_names",
    "waste_table",
    "waste_values",
]
