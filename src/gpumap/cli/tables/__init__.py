"""What the commands show, made of the maps of nodes: tables for a terminal, values for scripts. Pure.

Start with `layout` (a table is a list of columns), then `map`, `top` or `waste`.
"""

from gpumap.cli.tables.layout import Shape

__all__ = ["Shape"]
