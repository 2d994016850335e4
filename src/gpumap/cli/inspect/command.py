"""`gpumap inspect`: its flags, and how it is done."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gpumap.cli.command_line import Parser, add_command, leave_to_help_all
from gpumap.cli.credentials import add_credentials
from gpumap.cli.output_flags import add_inspect_output
from gpumap.cli.server_flags import HOW_TO_ASK
from gpumap.cli.sort_keys import INSPECT_SUMMARY
from gpumap.cli.this_node import NODE_FLAGS, add_node_flags
from gpumap.cli.where import add_url, run
from gpumap.model.errors import UsageError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]

_MORE = """\
For GPUs that gpushare shares, the columns and numbers are those of `kubectl inspect gpushare`
and `kubectl inspect cgpu`. For other GPUs they show the granted memory in GiB."""


def add_inspect(commands: Commands) -> None:
    inspect = add_command(
        commands,
        "inspect",
        _inspect,
        summary=INSPECT_SUMMARY,
        more=_MORE,
        usage="[NODE] [flags]",
        examples=[
            ("this node", "gpumap inspect"),
            ("this node, container by container", "gpumap inspect -d"),
            ("who uses more than was granted", "gpumap inspect -d --used --url http://127.0.0.1:9401"),
        ],
    )
    inspect.add_argument("only_node", metavar="NODE", nargs="?", help="Show only this node.")
    add_inspect_output(inspect)
    add_url(inspect)
    add_credentials(inspect.add_argument_group(HOW_TO_ASK))
    add_node_flags(inspect)
    leave_to_help_all(inspect, HOW_TO_ASK, *NODE_FLAGS)


def _inspect(given: argparse.Namespace) -> int:
    from gpumap.cli.inspect.report import inspect_report
    from gpumap.cli.tables import Shape

    if given.only_node == "":
        raise UsageError("NODE: must not be empty")
    return run(given, inspect_report(details=given.details, used=given.used, node=given.only_node), Shape())
