"""`gpumap inspect`: its flags. `gpumap.cli.inspect` has its tables."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gpumap.cli.args import add_form, add_watch
from gpumap.cli.commands import SUMMARIES, Program
from gpumap.cli.parser import add_command
from gpumap.model.errors import UsageError

if TYPE_CHECKING:
    from gpumap.cli.commands import Commands

_MORE = """\
For GPUs that gpushare shares, the columns and numbers are those of `kubectl inspect gpushare`
and `kubectl inspect cgpu`. For other GPUs they show the granted memory in GiB."""
_EXAMPLES = {
    "gpumap": [
        ("this node", "gpumap inspect"),
        ("this node, container by container", "gpumap inspect -d"),
        ("who uses more than was granted", "gpumap inspect -d --used --url http://127.0.0.1:9401"),
    ],
    "kubectl gpumap": [
        ("the whole cluster", "kubectl gpumap inspect"),
        ("one node with its pods and their used memory", "kubectl gpumap inspect gpu-1 -d --used"),
    ],
}


def add_inspect(commands: Commands, program: Program) -> None:
    parser = add_command(
        commands,
        "inspect",
        program.bind(_inspect),
        summary=SUMMARIES["inspect"],
        more=_MORE,
        usage="[NODE] [flags]",
        examples=_EXAMPLES[program.name],
    )
    parser.add_argument("only_node", metavar="NODE", nargs="?", help="Show only this node.")
    output = parser.add_argument_group("output")
    add_form(output, ("table", "json", "yaml"))
    output.add_argument("-d", "--details", action="store_true", help="Show one table for each node, with its pods.")
    output.add_argument("--used", action="store_true", help="Show used memory next to granted memory.")
    add_watch(output, program.interval_help)
    program.add_source(parser, "inspect")


def _inspect(program: Program, args: argparse.Namespace) -> int:
    from gpumap.cli.inspect.report import inspect_report
    from gpumap.cli.table import Shape

    if args.only_node == "":
        raise UsageError("NODE: must not be empty")
    report = inspect_report(details=args.details, used=args.used, node=args.only_node)
    return program.show(args, report, Shape(), None)
