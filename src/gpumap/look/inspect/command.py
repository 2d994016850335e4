"""`gpumap inspect`: its flags, and how they are done."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpumap.command_line import Parser, add_command, did_you_mean
from gpumap.errors import FatalError
from gpumap.flags import add_flags
from gpumap.look.server_flags import add_server_flags

if TYPE_CHECKING:
    from gpumap.document import Document
    from gpumap.look.inspect.grants import Grants
    from gpumap.look.seen import Seen, Sights
    from gpumap.look.tables import Shape

    Commands = argparse._SubParsersAction[Parser]

_MORE = """\
The tables of `kubectl inspect gpushare` and `kubectl inspect cgpu`, byte for byte, of GPUs that
are shared out by gpushare; of others the memory that was granted, in GiB. What a table has no
room for is told on standard error."""


def add_inspect(commands: Commands) -> None:
    from gpumap.look.commands import LOOKING, add_url

    inspect = add_command(
        commands,
        "inspect",
        _inspect,
        says="show how much of each GPU's memory is granted, as `kubectl inspect gpushare` does",
        more=_MORE,
        usage="[NODE] [flags]",
        examples=[
            ("this node", "gpumap inspect"),
            ("the whole cluster, pod by pod", "gpumap inspect -d --prometheus http://prom:9090"),
            ("who uses more than was granted", "gpumap inspect -d --used --url http://127.0.0.1:9401"),
        ],
    )
    inspect.add_argument("only_node", metavar="NODE", nargs="?", help="one node alone")
    add_details(inspect)
    add_server_flags(add_url(inspect))
    add_flags(inspect, LOOKING)


def add_details(inspect: Parser) -> None:
    """Add how the tables are shown, wherever they come from; `kubectl gpumap` has the same flags."""
    from gpumap.look.commands import add_form, add_watch

    output = inspect.add_argument_group("output")
    add_form(output, ("table", "json", "yaml"))
    output.add_argument("-d", "--details", action="store_true", help="a table for each node, with its pods")
    output.add_argument("--used", action="store_true", help="what is really used beside what was granted")
    add_watch(output)
    inspect.set_defaults(no_headers=False, sort_by=None, reverse=False)


def _inspect(given: argparse.Namespace) -> int:
    # A server is asked for the node that was named alone, and calls it as it can be told from others.
    return run_inspect(given, node=None if given.prometheus is not None else given.only_node)


def run_inspect(
    given: argparse.Namespace,
    look: Callable[[argparse.Namespace, float], Sights] | None = None,
    node: str | None = None,
) -> int:
    """Show what `look` sees, of all nodes or of one of them; by default this node, an agent, or what a server knows."""
    from gpumap.look.commands import run
    from gpumap.look.inspect.notes import notes
    from gpumap.look.tables.inspect import inspect_table, inspect_values

    counted = _once_a_sight(node)

    def table(seen: Seen, _: Shape) -> str:
        return inspect_table(counted(seen), details=given.details, used=given.used)

    def values(seen: Seen, _: Shape) -> Document:
        return inspect_values(counted(seen), seen.missing)

    def beside(seen: Seen) -> Sequence[str]:
        return notes(only(seen, node), counted(seen), used=given.used)

    return run(given, table, values, look, notes=beside)


def _once_a_sight(node: str | None) -> Callable[[Seen], Grants]:
    """Counts what was seen, and not once more for the notes: a large cluster takes seconds."""
    from gpumap.look.inspect.grants import grants

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
