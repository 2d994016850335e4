"""The column that says of which node a row is, where a table is of more than one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpumap.cli.node_documents import Seen
from gpumap.cli.tables.layout import Column, Row

NODE = Column("NODE", name=True)


def with_node(columns: Sequence[Column], seen: Seen) -> Sequence[Column]:
    """The columns, with that of the node before them."""
    return (NODE, *columns) if seen.fleet else columns


def in_columns(rows: Iterable[Row], seen: Seen) -> Iterator[Row]:
    """Rows whose first cell is the node, as these columns take them. What is coloured is counted without it."""
    for row in rows:
        if not seen.fleet:
            yield row._replace(cells=row.cells[1:])
        else:
            yield row if row.coloured is None else row._replace(coloured=row.coloured + 1)
