"""What `inspect` shows: its tables, of all nodes or of one, counted once for all that is said of a sight. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpumap.cli.command_line import did_you_mean
from gpumap.cli.fleet import families as parts
from gpumap.cli.inspect.grants import Grants, grants
from gpumap.cli.inspect.notes import notes
from gpumap.cli.node_documents import Seen
from gpumap.cli.reports import Report
from gpumap.cli.tables import Shape
from gpumap.cli.tables.inspect import inspect_table, inspect_values
from gpumap.model.document import Document
from gpumap.model.errors import FatalError


def inspect_report(*, details: bool, used: bool, node: str | None = None) -> Report:
    """Of all nodes or, by name, of one of them."""
    counted = _once_a_sight(node)

    def table(seen: Seen, _: Shape) -> str:
        return inspect_table(counted(seen), details=details, used=used)

    def values(seen: Seen, _: Shape) -> Document:
        return inspect_values(counted(seen), seen.missing)

    def beside(seen: Seen) -> Sequence[str]:
        return notes(only(seen, node), counted(seen), used=used)

    def read(form: str, _: Shape) -> frozenset[str]:
        found = {parts.HOLDERS, parts.GRANTS, parts.OFFERS}
        return frozenset(found | ({parts.USE, parts.TAKEN} if used or form != "table" else set()))

    return Report(table, values, read, notes=beside)


def _once_a_sight(node: str | None) -> Callable[[Seen], Grants]:
    """Counts what was seen, and not once more for the notes: a large cluster takes seconds."""
    last: list[tuple[Seen, Grants]] = []

    def counted(seen: Seen) -> Grants:
        if not last or last[0][0] is not seen:
            last[:] = [(seen, grants(only(seen, node)))]
        return last[0][1]

    return counted


def only(seen: Seen, node: str | None) -> Seen:
    """What was seen of one node. Raises FatalError where there is none of that name."""
    if node is None:
        return seen
    documents = tuple(one for one in seen.documents if one["node"]["name"] == node)
    if not documents:
        names = [one["node"]["name"] for one in seen.documents]
        raise FatalError(f'no node "{node}" was seen{did_you_mean(node, names)}')
    return seen._replace(documents=documents)
