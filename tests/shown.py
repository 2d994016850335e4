"""The tables and values of one document, as the commands show them of one node."""

from gpumap.cli import tables
from gpumap.cli.node_documents import Seen
from gpumap.cli.tables import Shape
from gpumap.model.document import Document


def map_table(document: Document, shape: Shape) -> str:
    return tables.map_table(Seen((document,)), shape)


def top_table(document: Document, shape: Shape) -> str:
    return tables.top_table(Seen((document,)), shape)


def top_values(document: Document, shape: Shape) -> Document:
    return tables.top_values(Seen((document,)), shape)


def waste_table(document: Document, shape: Shape) -> str:
    return tables.waste_table(Seen((document,)), shape)


def waste_values(document: Document, shape: Shape) -> Document:
    return tables.waste_values(Seen((document,)), shape)
