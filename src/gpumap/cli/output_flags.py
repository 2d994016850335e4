"""The flags of commands that show tables: form, order, columns and interval. Also of `kubectl gpumap`.

This module also reads them into a Shape and a View.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumap.cli.command_line import Parser, one_of
from gpumap.cli.server_flags import seconds_of
from gpumap.model.errors import UsageError

if TYPE_CHECKING:
    from gpumap.cli.painting import View
    from gpumap.cli.reports import Report
    from gpumap.cli.tables import Shape

WATCH_INTERVAL, CLUSTER_INTERVAL = "2s", "15s"
"""The second is for a cluster: a Prometheus rarely scrapes more often."""
OFTEN = f"{WATCH_INTERVAL}; {CLUSTER_INTERVAL} with --prometheus"
_FORMS = ("table", "wide", "json", "yaml", "name")


def add_output(parser: Parser, orders: Sequence[str], often: str) -> argparse._ArgumentGroup:
    """Add the flags of a table. Return the group for flags that only one table has. `often` describes the default of
    --interval."""
    output = parser.add_argument_group("output")
    add_form(output, _FORMS)
    add_order(output, orders)
    add_no_headers(output)
    _add_watch(output, often)
    return output


def add_order(output: argparse._ArgumentGroup, orders: Sequence[str]) -> None:
    """Add the flags of the order. The first one is the default."""
    output.add_argument(
        "--sort-by",
        metavar="COLUMN",
        type=one_of(*orders),
        help=f"Sort by {', '.join(orders)}. Largest numbers first, names from A to Z, unknown last. "
        f"(default: {orders[0]})",
    )
    output.add_argument("--reverse", action="store_true", help="Reverse the order.")


def add_inspect_output(inspect: Parser, often: str) -> argparse._ArgumentGroup:
    """Add the flags of the tables of `inspect`."""
    output = inspect.add_argument_group("output")
    add_form(output, ("table", "json", "yaml"))
    output.add_argument("-d", "--details", action="store_true", help="Show one table for each node, with its pods.")
    output.add_argument("--used", action="store_true", help="Show used memory next to granted memory.")
    _add_watch(output, often)
    return output


def add_form(output: argparse._ArgumentGroup, forms: Sequence[str]) -> None:
    """Add the flag of the form. The first one is the default."""
    help_ = f"Output format: {', '.join(forms)}. (default: {forms[0]})"
    output.add_argument("-o", "--output", metavar="FORM", type=one_of(*forms), default=forms[0], help=help_)


def add_no_headers(output: argparse._ArgumentGroup) -> None:
    output.add_argument("--no-headers", action="store_true", help="Omit the line with the column titles.")


def _add_watch(output: argparse._ArgumentGroup, often: str) -> None:
    output.add_argument("-w", "--watch", action="store_true", help="Update the output until q or Ctrl-C.")
    output.add_argument(
        "--interval", metavar="DURATION", help=f"With --watch: time between two updates. (default: {often})"
    )


# --- reading them -----------------------------------------------------------------------------------------------------


def shape_of(given: argparse.Namespace, namespace: str = "") -> Shape:
    """Read the flags of `add_output`, and those that only some tables have. Raises UsageError."""
    from gpumap.cli.tables import Shape

    shape = Shape(
        wide=given.output == "wide",
        headers=not given.no_headers,
        order=given.sort_by or "",
        reverse=given.reverse,
        processes=getattr(given, "processes", False),
        namespace=namespace,
    )
    if "by" not in given:
        return shape
    by = given.by or ""
    if by and given.sort_by and given.command == "waste":
        raise UsageError("--sort-by sorts findings, but --by prints no findings")
    if by and given.output == "name":
        raise UsageError(f"--by {by}: prints sums, but -o name prints pods")
    return replace(shape, sums_by=by)


def view_of(
    given: argparse.Namespace,
    report: Report,
    shape: Shape,
    head: str,
    often: str = WATCH_INTERVAL,
) -> View:
    """Read how the report is shown, and how often. Raises UsageError."""
    from gpumap.cli.painting import View, is_interactive

    once = getattr(given, "once", True)  # only `top` has a screen for keys
    live = not once and given.output in ("table", "wide") and is_interactive()
    interval_seconds = seconds_of("--interval", given.interval or often)
    if given.interval is not None and not (given.watch or live):
        raise UsageError("--interval requires --watch")
    return View(report, given.output, shape, head, given.watch or live, interval_seconds, live)


def sorted_by(shape: Shape) -> str:
    """Return the order for the head of a watch."""
    return f" --sort-by {shape.order}" if shape.order else ""
